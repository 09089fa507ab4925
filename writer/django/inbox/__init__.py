"""The Django app of the inbox's tables."""
