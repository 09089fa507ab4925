"""What to do about what went wrong, in a sentence or two. The runbooks say more."""

from __future__ import annotations

from typing import Final

# Words of an error, in lower case, and what to do. The first one that fits.
_REFUSALS: Final = (
    (
        ("too large", "msg_size", "record_list_too_large"),
        "Too large: raise max.message.bytes of the topic and message.max.bytes of the brokers and "
        "of the relay, or make the event smaller.",
    ),
    (
        ("unknown_topic", "unknown topic"),
        "The topic is not there: create it with the partitions you want for good, or let the "
        "brokers create topics.",
    ),
    (
        ("authorization", "authorisation"),
        "Kafka denies the write: give the relay's user WRITE and DESCRIBE on the topic.",
    ),
    (
        ("invalid_record", "policy", "invalid timestamp"),
        "The topic refuses such records: look at its configuration (timestamps, schema checks, "
        "compaction needs a key).",
    ),
    (
        ("headers", "topic name", "aggregate_id", "aggregate_type", "template"),
        "The row cannot become a record: mend the row, or the service that writes it.",
    ),
)
_ELSE: Final = "Read the reason, mend its cause, and let the row be tried again."

_REASONS: Final = (
    (
        ("loop has not turned", "has not come back"),
        "A thread is stuck. Restart the relay: nothing is lost. Keep its log.",
    ),
    (
        ("nothing was heard", "look at the database"),
        "The wire to the database, or the server, hangs. Is the server up? Does a firewall drop "
        "idle connections?",
    ),
    (
        ("kafka", "broker"),
        "The brokers are away or refuse. The relay waits, and goes on by itself; events stay in "
        "the table. Look at the brokers first.",
    ),
    (
        ("database", "mysql"),
        "The database is away or refuses. The relay goes on by itself when it is back; look at the "
        "server, its grants and its connection limit.",
    ),
    (("starting",), "It joins its group: that takes some seconds."),
    (("not started",), "It connects to the database; its log says what it waits for."),
)


def advice(reason: str, *, dead: bool) -> str:
    """What to do about a row that was refused for ``reason``."""
    lower = reason.lower()
    what = next((text for words, text in _REFUSALS if any(w in lower for w in words)), _ELSE)
    return f"{what} Then: cdc-relay dead retry --all." if dead else what


def reason_advice(reason: str) -> str:
    """What to do where the relay is stuck or not ready for ``reason``."""
    lower = reason.lower()
    return next((text for words, text in _REASONS if any(w in lower for w in words)), "")
