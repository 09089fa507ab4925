"""Who has to go alone, by what a topic has refused."""

from __future__ import annotations

from cdc_relay.router import Record
from cdc_relay.sizes import Sizes


def of(size: int, topic: str = "t") -> Record:
    return Record(topic, b"", bytes(size), [], 0)


def test_what_is_half_as_large_as_what_was_refused_goes_alone() -> None:
    sizes = Sizes()
    assert not sizes.is_suspect(of(10_000))
    sizes.refused(of(1000))
    assert [sizes.is_suspect(of(size)) for size in (499, 500, 5000)] == [False, True, True]
    assert not sizes.is_suspect(of(5000, "another"))
    sizes.refused(of(2000))  # what is larger tells nothing new
    assert sizes.is_suspect(of(500))


def test_what_was_taken_is_not_too_large() -> None:
    sizes = Sizes()
    sizes.taken(of(1000))  # of no meaning without a refusal
    sizes.refused(of(1000))
    sizes.taken(of(600))
    assert [sizes.is_suspect(of(size)) for size in (600, 601)] == [False, True]
    sizes.refused(of(1001))
    assert sizes.is_suspect(of(500))


def test_a_tombstone_has_the_size_of_its_key() -> None:
    sizes = Sizes()
    sizes.refused(of(2))
    assert sizes.is_suspect(Record("t", b"key", None, [], 0))
