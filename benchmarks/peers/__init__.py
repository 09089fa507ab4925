"""Debezium beside us: the same rows, the same servers, in turns (``make bench-peers``)."""
