from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations

from cdc_relay.outbox import inbox_sequence_table, inbox_table

from ...tables import create, drop


class Migration(migrations.Migration):
    initial = True
    atomic = False  # no DDL of MySQL can be rolled back
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        migrations.RunPython(
            create(inbox_table, inbox_sequence_table), drop(inbox_table, inbox_sequence_table)
        )
    ]
