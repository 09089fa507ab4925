"""What each picture means, in words, with the next command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc_relay.diagnose import Group, Kind, Picture, judge

DAY = 86_400
PENDING, SENT, DEAD = 0, 1, 2


def names(picture: Picture, **arguments: object) -> list[str]:
    return [one.name for one in judge(picture, **arguments)]  # type: ignore[arg-type]


def late(age: float) -> list[Group]:
    return [Group(PENDING, 0, 7, age), Group(SENT, 0, 10, 3)]


TOO_LARGE = Kind("CREATED", "order", 5, "too large")

PICTURES = {
    "nothing": (Picture([]), ["well"]),
    "at work": (Picture([Group(PENDING, 0, 900, 2)], members=1, checkpoint_age_s=1), ["well"]),
    "no relay": (Picture(late(60)), ["no_relay"]),
    "nobody at all": (Picture(late(3000)), ["no_relay", "no_compensator"]),
    "relay stuck": (Picture(late(60), members=1, checkpoint_age_s=90), ["relay_stuck"]),
    "rows the relay cannot see": (Picture(late(60), members=1, checkpoint_age_s=1), ["missed"]),
    "no compensator": (
        Picture(late(3000), members=1, checkpoint_age_s=1),
        ["no_compensator"],
    ),
    "the last pass was long ago": (
        Picture(late(3000), members=1, checkpoint_age_s=1, pass_age_s=2000),
        ["no_compensator"],
    ),
    "passes come, and fail": (
        Picture(late(3000), members=1, checkpoint_age_s=90, pass_age_s=60, pass_error="no grant"),
        ["relay_stuck", "pass_failed"],
    ),
    "passes come, and leave the rows": (
        Picture(late(3000), members=1, checkpoint_age_s=1, pass_age_s=60),
        ["missed"],
    ),
    "kafka away": (Picture(late(60), kafka_error="no answer"), ["kafka_away"]),
    "a payload at fault": (
        Picture([Group(PENDING, 5, 5, 900)], failing=[TOO_LARGE], members=1),
        ["bad_rows"],
    ),
    "brokers unwell": (
        Picture(
            [Group(PENDING, 4, 30, 900)],
            failing=[Kind("CREATED", kind, 10, "not enough replicas") for kind in ("a", "b", "c")],
            members=1,
        ),
        ["kafka_unwell"],
    ),
    "dead": (Picture([Group(DEAD, 11, 5, DAY)], dead=[TOO_LARGE]), ["dead"]),
    "no purge": (Picture([Group(SENT, 0, 10, 5)], oldest_sent_s=40 * DAY), ["no_purge"]),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture(name: str) -> None:
    picture, meaning = PICTURES[name]
    assert names(picture) == meaning
    assert all(one.next.startswith("cdc-relay ") for one in judge(picture))


def test_rows_that_are_young_are_said_to_be_on_their_way() -> None:
    [well] = judge(Picture([Group(PENDING, 0, 2, 1.0), Group(PENDING, 2, 1, 6.0)]))
    assert well.text.endswith("; 3 rows are on their way")
    [idle] = judge(Picture([]))
    assert idle.text == "nothing waits, fails or is dead"


def test_the_most_frequent_type_is_named() -> None:
    [dead] = judge(Picture([Group(DEAD, 11, 6, 1)], dead=[TOO_LARGE, Kind("X", "y", 1, "")]))
    assert "6 rows are dead, 5 of them CREATED of order (last error: too large)" in dead.text


def test_schedules_count() -> None:
    picture = Picture(late(400), members=1, checkpoint_age_s=1)
    assert names(picture) == ["missed"]
    assert names(picture, older_than_s=60, schedule_s=60) == ["no_compensator"]


def test_repetitions_are_told_where_they_are_possible() -> None:
    assert names(Picture([]), at_least_once=True) == ["well", "repetitions"]


def test_an_idle_relay_is_not_stuck() -> None:
    """It writes no checkpoint while nothing moves."""
    idle = Picture(late(400), members=1, checkpoint_age_s=600, behind=False)
    assert names(idle) == ["missed"]
    assert names(replace(idle, behind=True)) == ["relay_stuck"]


def test_pending_says_nothing_where_nothing_is_marked() -> None:
    picture = Picture(late(100_000), members=1, checkpoint_age_s=600, behind=False)
    assert names(picture, marks=False) == ["well"]
    assert names(replace(picture, members=0), marks=False) == ["no_relay"]
    assert names(replace(picture, behind=True), marks=False) == ["relay_stuck"]
