"""Servers whose clock is wrong: the real programs, told another time of day by the C library."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from dev.broker import Broker
from dev.kafka import Kafka
from dev.mysql import MySQL

# Whoever asks for the time of day is told another; clocks that only count on are left alone.
_SHIM = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset(void) {
    const char *text = getenv("CLOCK_OFFSET");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *into) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (into) *into = exact.tv_sec;
    return exact.tv_sec;
}
"""


def told_another_time(argv: list[str], home: Path, offset_s: int) -> list[str]:
    """The command line of a program whose clock is ahead by so many seconds."""
    library = home / "clock.so"
    if not library.exists():
        home.mkdir(parents=True, exist_ok=True)
        source = home / "clock.c"
        source.write_text(_SHIM)
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)],
            check=True,
            timeout=60,
        )
    return ["/usr/bin/env", f"LD_PRELOAD={library}", f"CLOCK_OFFSET={offset_s}", *argv]


class WrongMySQL(MySQL):
    """``offset_s`` holds from the next start on."""

    offset_s = 0

    def command(self, options: Sequence[str]) -> list[str]:
        return told_another_time(super().command(options), self.home, self.offset_s)


class WrongKafka(Kafka):
    """One broker. ``offset_s`` holds from the next start on."""

    def __init__(self, home: Path, offset_s: int, *, die_with_parent: bool = False) -> None:
        super().__init__(home, die_with_parent=die_with_parent)
        self.offset_s = offset_s
        self.brokers = [
            _WrongBroker(self.home / "broker-1", 1, self, die_with_parent=die_with_parent)
        ]


class _WrongBroker(Broker):
    def command(self, options: Sequence[str]) -> list[str]:
        assert isinstance(self._cluster, WrongKafka)
        return told_another_time(super().command(options), self.home, self._cluster.offset_s)
