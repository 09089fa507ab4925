from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

from cdc_relay.outbox import outbox_table, sequence_table

from ...tables import create, drop


class Migration(migrations.Migration):
    initial = True
    atomic = False  # no DDL of MySQL can be rolled back
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        migrations.SeparateDatabaseAndState(
            database_operations=[
                migrations.RunPython(
                    create(outbox_table, sequence_table), drop(outbox_table, sequence_table)
                )
            ],
            state_operations=[
                migrations.CreateModel(
                    name="OutboxEvent",
                    fields=[
                        ("id", models.BigAutoField(primary_key=True, serialize=False)),
                        ("event_id", models.CharField(max_length=64, unique=True)),
                        ("aggregate_type", models.CharField(max_length=64)),
                        ("aggregate_id", models.CharField(max_length=64)),
                        ("event_type", models.CharField(max_length=128)),
                        ("payload", models.JSONField(null=True)),
                        ("headers", models.JSONField(null=True)),
                        ("status", models.SmallIntegerField(default=0)),
                        ("retry_count", models.IntegerField(default=0)),
                        ("next_retry_time", models.DateTimeField(null=True)),
                        ("last_error", models.CharField(max_length=512, null=True)),
                        ("created_at", models.DateTimeField()),
                        ("updated_at", models.DateTimeField()),
                        ("sent_at", models.DateTimeField(null=True)),
                    ],
                    options={"db_table": "outbox_event", "ordering": ["id"]},
                )
            ],
        )
    ]
