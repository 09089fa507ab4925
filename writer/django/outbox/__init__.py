"""The Django app of the outbox's tables."""
