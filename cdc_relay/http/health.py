"""Alive and ready: judgements on what the relay shows of itself. Pure: no clock, no waits.

*Alive* is a real round trip: the loop turned lately, and the database was heard lately (a heartbeat
in the binlog connection, an event, or a plain word that it is away). Who is not alive is to be
started again. A broker or a database that is away is waited for by design: that is no reason to be
killed, only not *ready*.
"""

from __future__ import annotations

from typing import Final

from cdc_relay.config import Settings
from cdc_relay.http.looks import Looks
from cdc_relay.vitals import Vitals

# A statement of the marker is bounded by the read timeout of the database's connections (120 s).
_MARKING_S: Final = 180.0
# A reader that is away tries again within seconds; one try is bounded by the read timeout.
_TRY_AGAIN_S: Final = 10.0
_DELIVERING_S: Final = 10.0


def alive(vitals: Vitals, settings: Settings, now: float) -> list[str]:
    """Why the relay is stuck, in words; empty where it is alive. ``now``: ``time.monotonic()``."""
    reasons = []
    turned = now - vitals.turned
    if turned > settings.silence():
        reasons.append(f"the relay's loop has not turned for {turned:.0f} s")
    heard = _silent(vitals, settings, now)
    if heard:
        reasons.append(
            f"nothing was heard from the database for {heard:.0f} s, not even a heartbeat "
            f"(one is due every {settings.heartbeat:g} s)"
        )
    since = vitals.marking_since
    if since and now - since > _MARKING_S + settings.silence():
        reasons.append(f"a mark has not come back for {now - since:.0f} s")
    return reasons


def _silent(vitals: Vitals, settings: Settings, now: float) -> float:
    """Seconds since the reader got on, where those are too many; else 0."""
    reading = vitals.reading
    if not reading.running or reading.handing_on:
        return 0.0
    limit = settings.silence()
    if reading.away:
        limit += settings.read_timeout + _TRY_AGAIN_S
    heard = now - reading.heard
    return heard if heard > limit else 0.0


def up(vitals: Vitals, looks: Looks, settings: Settings, now: float) -> dict[str, bool]:
    """Whether reader, database and broker are well, as far as is known."""
    reading = vitals.reading
    patience = settings.silence()
    return {
        "reader": reading.connected and not _silent(vitals, settings, now),
        "database": looks.table.seen is not None
        and not looks.table.trouble(patience)
        and not (reading.running and reading.away),
        "broker": looks.group.seen is not None
        and not looks.group.trouble(patience)
        and not _delivering(vitals, now),
    }


def _delivering(vitals: Vitals, now: float) -> float:
    """Seconds for which a group is with the brokers, where those are too many; else 0."""
    since = vitals.delivering_since
    return now - since if since and now - since > _DELIVERING_S else 0.0


def ready(vitals: Vitals, looks: Looks, settings: Settings, now: float) -> list[str]:
    """Why the relay cannot carry events now, in words; empty where it does, or stands by for
    another one that does."""
    reasons = alive(vitals, settings, now)
    if vitals.role == "starting":
        reasons.append("starting: not a member of the relay's group yet")
    reading = vitals.reading
    if vitals.role == "owner" and not vitals.sweeping:
        if reading.away:
            reasons.append(f"database: {reading.away}")
        elif not reading.connected:
            reasons.append("the stream from the database has not started")
    if vitals.waiting:
        reasons.append(f"waiting {vitals.waiting}")
    delivering = _delivering(vitals, now)
    if delivering:
        reasons.append(f"Kafka has not acknowledged a group for {delivering:.0f} s")
    for name, look in (("database", looks.table), ("Kafka", looks.group)):
        trouble = look.trouble(settings.silence())
        if trouble:
            reasons.append(f"{name}: {trouble}")
    return reasons
