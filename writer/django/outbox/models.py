"""The outbox table for queries and the admin. Events are written with ``Outbox.add``."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class OutboxEvent(models.Model):
    """One row of the outbox table; ``cdc_relay.outbox`` says what the columns mean."""

    PENDING, SENT, DEAD = 0, 1, 2

    id = models.BigAutoField(primary_key=True)
    event_id = models.CharField(max_length=64, unique=True)
    aggregate_type = models.CharField(max_length=64)
    aggregate_id = models.CharField(max_length=64)
    event_type = models.CharField(max_length=128)
    payload = models.JSONField(null=True)
    headers = models.JSONField(null=True)
    status = models.SmallIntegerField(default=PENDING)
    retry_count = models.IntegerField(default=0)
    next_retry_time = models.DateTimeField(null=True)
    last_error = models.CharField(max_length=512, null=True)
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()
    sent_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "outbox_event"
        ordering: ClassVar[list[str]] = ["id"]

    def __str__(self) -> str:
        return f"{self.event_type} of {self.aggregate_type} {self.aggregate_id}"
