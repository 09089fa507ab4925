"""What is judged and drawn of a relay, without one."""

from __future__ import annotations

import math
import time

import pytest

from cdc_relay.binlog.retention import Retention
from cdc_relay.config import Settings, load
from cdc_relay.errors import ConfigError
from cdc_relay.http import health
from cdc_relay.http.advice import advice, reason_advice
from cdc_relay.http.history import COLUMNS, Ring, percentile
from cdc_relay.http.looks import Look
from cdc_relay.http.page import _troubled_row, duration
from cdc_relay.http.server import Listener, _is_given
from cdc_relay.position import GtidSet, MariaGtidPosition, Position
from cdc_relay.store import Troubled
from cdc_relay.vitals import Distribution, Vitals

SETTINGS = load(
    environ={}, flags={"heartbeat": "5s", "read_timeout": "20s", "health_timeout": "15s"}
)


def working() -> Vitals:
    """A relay that streams."""
    vitals = Vitals(role="owner")
    vitals.reading.begin()
    vitals.reading.found()
    return vitals


# --- alive ----------------------------------------------------------------------------------------


def test_a_relay_that_works_is_alive() -> None:
    assert health.alive(working(), SETTINGS, time.monotonic()) == []


def test_the_default_silence_is_read_timeout_and_heartbeat() -> None:
    assert load(environ={}).silence() == 25.0
    assert SETTINGS.silence() == 15.0


def test_a_loop_that_does_not_turn_is_stuck() -> None:
    vitals = working()
    vitals.reading.heard += 100
    [reason] = health.alive(vitals, SETTINGS, vitals.turned + 16)
    assert reason == "the relay's loop has not turned for 16 s"


def test_a_database_that_is_silent_is_stuck() -> None:
    vitals = working()
    vitals.turned += 100
    [reason] = health.alive(vitals, SETTINGS, vitals.reading.heard + 16)
    assert reason.startswith("nothing was heard from the database for 16 s")


def test_it_stays_stuck_while_new_connections_are_silent_too() -> None:
    vitals = working()
    vitals.turned += 100
    heard = vitals.reading.heard
    vitals.reading.lost("timed out", silent=True)
    assert health.alive(vitals, SETTINGS, heard + 16)
    vitals.reading.found()
    assert not health.alive(vitals, SETTINGS, time.monotonic())


def test_a_database_that_says_it_is_away_is_no_reason_to_be_killed() -> None:
    vitals = working()
    vitals.turned += 100
    vitals.reading.lost("connection refused", silent=False)
    heard = vitals.reading.heard
    assert not health.alive(vitals, SETTINGS, heard + 16)
    assert not health.alive(vitals, SETTINGS, heard + 15 + 20 + 9)
    # Unless the next try does not come back.
    assert health.alive(vitals, SETTINGS, heard + 15 + 20 + 11)


def test_a_reader_that_is_not_asked_for_more_is_not_silent() -> None:
    vitals = working()
    vitals.turned += 1000
    vitals.reading.handing_on = True
    assert not health.alive(vitals, SETTINGS, vitals.reading.heard + 500)


def test_without_a_reader_nothing_is_to_be_heard() -> None:
    vitals = Vitals(role="standby")
    vitals.turned += 1000
    assert not health.alive(vitals, SETTINGS, vitals.reading.heard + 500)


def test_a_mark_that_does_not_come_back_is_stuck() -> None:
    vitals = working()
    vitals.marking_since = now = time.monotonic()
    vitals.turned = vitals.reading.heard = now + 300
    assert not health.alive(vitals, SETTINGS, now + 130)
    assert health.alive(vitals, SETTINGS, now + 300)


# --- history --------------------------------------------------------------------------------------


def test_a_ring_keeps_the_last_points_in_order() -> None:
    ring = Ring(3)
    assert ring.columns() == {name: [] for name in COLUMNS}
    for number in range(5):
        ring.add([float(number), *([math.nan] * (len(COLUMNS) - 1))])
    assert ring.columns()["time"] == [2.0, 3.0, 4.0]
    assert ring.columns()["pending"] == [None, None, None]
    assert ring.columns(since=3.5)["time"] == [4.0]
    assert ring.columns(since=9)["time"] == []


def test_percentiles_come_from_buckets() -> None:
    values = Distribution([0.01, 0.1, 1.0])
    assert math.isnan(percentile(values.bounds, values.counts, 0.5))
    values.note(0.01, 98)
    values.note(0.5)
    values.note(7.0)
    assert values.total == pytest.approx(0.98 + 7.5)
    assert percentile(values.bounds, values.counts, 0.5) == pytest.approx(0.0051, abs=0.0001)
    assert percentile(values.bounds, values.counts, 0.99) == 1.0
    assert percentile(values.bounds, values.counts, 1.0) == 1.0


# --- the purge horizon ----------------------------------------------------------------------------


def at(file: str, server: str = "s") -> Position:
    return Position("mysql", server, file, 4, "")


@pytest.mark.parametrize(
    ("keeps_s", "position", "commit", "wanted"),
    [
        (3600, at("b.000007"), 0.0, 3600.0),  # the file that is being written
        (3600, at("b.000005"), 1000.0, 3600.0),
        (3600, at("b.000005"), 400.0, 3000.0),
        (3600, at("b.000005"), -9000.0, 0.0),
        (3600, at("b.000005"), 0.0, None),  # nothing was read yet
        (None, at("b.000005"), 900.0, None),  # nothing is purged by age
        (3600, at("b.000005", "another"), 900.0, None),
    ],
)
def test_the_horizon(
    keeps_s: int | None, position: Position, commit: float, wanted: float | None
) -> None:
    assert Retention(at("b.000007"), keeps_s).horizon_s(position, commit, 1000.0) == wanted


def test_the_last_transactions_of_a_position() -> None:
    uuid = "4774b109-ec3c-11f1-863d-02fc00000001"
    assert GtidSet(f"{uuid}:1-7:9:tag:1-3").last() == [(uuid, 9), (f"{uuid}:tag", 3)]
    assert MariaGtidPosition("0-1-12,1-2-7").last() == [("0", 12), ("1", 7)]


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0.4 ms"),
        (0.012, "12 ms"),
        (0.25, "0.2 s"),
        (5, "5.0 s"),
        (75, "75 s"),
        (150, "2 min 30 s"),
        (3600, "1 h"),
        (5400, "1 h 30 min"),
        (86400 * 30, "30 d"),
        (86400 * 3 + 7200, "3 d 2 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_advice_names_the_setting_or_the_command() -> None:
    assert "max.message.bytes" in advice(
        "Broker: Message size too large (MSG_SIZE_TOO_LARGE)", dead=False
    )
    assert advice("whatever", dead=True).endswith("cdc-relay dead retry --all.")
    assert "create it" in advice("Local: Unknown topic (_UNKNOWN_TOPIC)", dead=False)
    assert "Restart" in reason_advice("the relay's loop has not turned for 40 s")
    assert "brokers" in reason_advice("Kafka has not acknowledged a group for 12 s")


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("http", "address"),
    [
        ("off", None),
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("localhost:0", ("localhost", 0)),
        (":9090", ("0.0.0.0", 9090)),
        ("[::1]:9090", ("::1", 9090)),
    ],
)
def test_addresses(http: str, address: tuple[str, int] | None) -> None:
    assert load(environ={}, flags={"http": http}).http_address() == address


@pytest.mark.parametrize(
    "http", ["8080", "localhost", "127.0.0.1:99999", "http://localhost:80", ""]
)
def test_what_is_no_address_is_refused(http: str) -> None:
    with pytest.raises(ConfigError, match=r"--http: http: .*is not an address; write host:port"):
        load(environ={}, flags={"http": http})


def test_a_token_is_long_enough_and_never_shown() -> None:
    settings = Settings(http_token="0123456789abcdef")
    assert settings.page_token() == "0123456789abcdef"
    assert "0123456789abcdef" not in repr(settings)
    with pytest.raises(ConfigError, match="http_token has 3 characters"):
        Settings(http_token="abc").page_token()


def test_an_address_that_is_not_here_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"http: 203.0.113.7:80 cannot be had"):
        Listener("203.0.113.7", 80)
    with pytest.raises(ConfigError, match=r"http: no.such.host.invalid is not an address here"):
        Listener("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("due_in_s", "text"),
    [(None, "never by itself"), (30.0, "in 30 s"), (0.0, "now"), (-3, "now")],
)
def test_when_a_parked_row_is_tried_again(due_in_s: float | None, text: str) -> None:
    row = Troubled("e", "order", "a", "CREATED", 2, False, due_in_s, "too large")
    assert _troubled_row(row)[4] == text


@pytest.mark.parametrize(
    ("costs", "pauses"),
    [
        ([0.0, 100.0, 0.0], [5.0, 5.0, 5.0]),
        ([100.0, 0.0, 0.0], [5.0, 5.0, 5.0]),
        ([1.0, 2.0, 3.0], [5.0, 20.0, 40.0]),
    ],
)
def test_a_look_that_hung_once_blinds_nobody(
    costs: list[float], pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    left = list(costs)
    waited: list[float] = []

    def take() -> None:
        nonlocal clock
        clock += left.pop(0)

    def wait(pause: float) -> bool:
        waited.append(pause)
        return not left

    monkeypatch.setattr("cdc_relay.http.looks.time.monotonic", lambda: clock)
    look = Look("the database", take, 5.0)
    monkeypatch.setattr(look._ended, "wait", wait)
    look._run()
    assert waited == pauses


def test_a_token_may_be_any_text() -> None:
    token = "pässwört-für-alle"
    header = f"Bearer {token}".encode().decode("latin-1")  # as WSGI gives it
    assert _is_given(header, token)
    assert not _is_given(header, "another-token-of-16")
