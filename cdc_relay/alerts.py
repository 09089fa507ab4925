"""Alerts: somebody hears of it when a row goes dead.

Rows are gathered by reason, so that a fault which kills a thousand rows is one notification with a
count and the first few of them, not a thousand. Delivery is apprise's (chat, mail, webhooks, …),
which is loaded only where there are targets: it takes its time. A target that fails is logged and
never troubles the work. Targets hold secrets: no log line and no error shows more of one than its
scheme.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from cdc_relay.config import Settings
from cdc_relay.errors import ConfigError
from cdc_relay.outbox import OutboxEvent

log: Any = structlog.get_logger(__name__)

# Ten rows and their reason stay below the 4,096 bytes that a WeCom robot takes.
_SAMPLE: Final = 10
_FIELD_CHARACTERS: Final = 64
_REASON_CHARACTERS: Final = 512
# More kinds of reason than this become one.
_MOST_REASONS: Final = 20
_QUIET_S: Final = 60.0
_GATHER_S: Final = 1.0
_CLOSE_S: Final = 5.0
_LOOK_S: Final = 0.2
# A target that fails after so long hangs: it is left out of the rest of a round.
_HANGS_S: Final = 1.0

_DINGTALK_URL: Final = re.compile(
    r"https://oapi\.dingtalk\.com/robot/send\?access_token=([A-Za-z0-9]+)"
)


@dataclass(slots=True)
class _Digest:
    reason: str
    count: int = 0
    rows: list[str] = field(default_factory=list)
    sent_at: float = float("-inf")


class Alerts:
    """The targets of one process. ``dead`` may be called by any thread and never waits; whoever
    calls ``send`` waits for the targets, some seconds each at most."""

    def __init__(self, targets: Sequence[str], about: str) -> None:
        """``about`` names the outbox in every alert. Raises ``ConfigError`` for a target that
        apprise does not know; none of them is contacted."""
        self._about = about
        self._targets = [_Target(target, number + 1) for number, target in enumerate(targets)]
        self._digests: dict[str, _Digest] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, settings: Settings) -> Alerts:
        """The alerts of these settings."""
        table = ".".join(settings.schema_and_table()) if settings.database_url else settings.table
        return cls(settings.alert_targets(), f"{settings.name} ({table})")

    def dead(self, event: OutboxEvent, tries: int, reason: str) -> None:
        """Note a row that went dead."""
        if not self._targets:
            return
        reason = _line(reason, _REASON_CHARACTERS)
        kind = re.sub(r"\d+", "#", reason)  # sizes and ids differ from row to row
        with self._lock:
            if kind not in self._digests and len(self._digests) >= _MOST_REASONS:
                kind = reason = "many different reasons; cdc-relay dead list shows them"
            digest = self._digests.setdefault(kind, _Digest(reason))
            digest.count += 1
            if len(digest.rows) < _SAMPLE:
                fields = {
                    "event_id": event.event_id,
                    "aggregate_type": event.aggregate_type,
                    "aggregate_id": event.aggregate_id,
                    "event_type": event.event_type,
                }
                words = [
                    f"{name}={_line(text, _FIELD_CHARACTERS)}" for name, text in fields.items()
                ]
                digest.rows.append(" ".join([*words, f"tries={tries}"]))

    def send(self, *, everything: bool = True) -> None:
        """Send a digest for each reason that has new dead rows; unless ``everything``, only where
        the last one of that reason is a minute old. What no target has taken is kept for the next
        time. A target that hangs is waited for once. Never raises."""
        now = time.monotonic()
        hanging: set[_Target] = set()
        with self._lock:
            due = {
                kind: digest
                for kind, digest in self._digests.items()
                if digest.count and (everything or now - digest.sent_at >= _QUIET_S)
            }
            for kind, digest in due.items():
                self._digests[kind] = _Digest(digest.reason, sent_at=now)
        for kind, digest in due.items():
            if not self._notify(*self._text(digest), hanging):
                with self._lock:
                    newer = self._digests[kind]
                    newer.count += digest.count
                    newer.rows = (digest.rows + newer.rows)[:_SAMPLE]
        with self._lock:
            for kind in [kind for kind, one in self._digests.items() if _is_idle(one, now)]:
                del self._digests[kind]

    def test(self) -> list[tuple[str, str | None]]:
        """Send a test to each target; its name, and why it failed, None where it did not."""
        title = f"cdc-relay {self._about}: test"
        body = "This is a test alert of cdc-relay. Rows that went dead would be listed here."
        return [(target.name, target.notify(title, body)) for target in self._targets]

    def start(self) -> None:
        """Send from a thread of its own, until ``close``."""
        if self._targets:
            self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
            self._thread.start()

    def close(
        self, timeout: float = _CLOSE_S, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        """Send what is left, and return after ``timeout`` seconds at the latest; five seconds
        after ``stopping`` says that the process has to end."""
        if self._thread is None and self._digests:
            self.start()
        if self._thread is not None:
            self._closing.set()
            until = time.monotonic() + timeout
            hurried = False
            while self._thread.is_alive() and (left := until - time.monotonic()) > 0:
                if not hurried and stopping():
                    hurried, until = True, time.monotonic() + min(left, _CLOSE_S)
                self._thread.join(min(left, _LOOK_S))
            if self._thread.is_alive():
                log.warning("alert not delivered", reason="no target took it in time")

    def _run(self) -> None:
        while not self._closing.wait(_GATHER_S):
            self.send(everything=False)
        self.send()

    def _text(self, digest: _Digest) -> tuple[str, str]:
        rows = "1 row is" if digest.count == 1 else f"{digest.count} rows are"
        lines = [f"{rows} dead: refused too often, not sent.", f"reason: {digest.reason}", ""]
        lines += digest.rows
        if digest.count > len(digest.rows):
            lines.append(f"and {digest.count - len(digest.rows)} more")
        lines += ["", "Mend the cause, then: cdc-relay dead list, cdc-relay dead retry"]
        return f"cdc-relay {self._about}: {rows} dead", "\n".join(lines)

    def _notify(self, title: str, body: str, hanging: set[_Target]) -> bool:
        """Whether at least one target has taken it. Those that are ``hanging`` are not asked, and
        those that prove to be are added."""
        taken = False
        for target in self._targets:
            if target in hanging:
                continue
            began = time.monotonic()
            failure = target.notify(title, body)
            taken |= failure is None
            if failure is not None:
                log.warning("alert not delivered", target=target.name, reason=failure)
                if time.monotonic() - began > _HANGS_S:
                    hanging.add(target)
        return taken


class _Target:
    """One target."""

    def __init__(self, url: str, number: int) -> None:
        apprise = _apprise()
        # Never more of it: what has no scheme may be a token that was written alone.
        scheme = re.match(r"([A-Za-z0-9+.-]*)://", url)
        self.name = f"{number} ({scheme[1] if scheme else ''}://)"
        native = _DINGTALK_URL.fullmatch(url)  # as DingTalk shows it; apprise does not know it
        self._url = f"dingtalk://{native[1]}/" if native else url
        plugin = apprise.Apprise.instantiate(self._url, suppress_exceptions=True)
        if plugin is None:
            raise ConfigError(
                f"alerts: target {self.name} is not a complete target of a kind that apprise knows"
                " (slack://…, dingtalk://…, wecombot://…, mailtos://…, jsons://…)"
            )
        self._sender = apprise.Apprise()
        self._sender.add(plugin)

    def notify(self, title: str, body: str) -> str | None:
        """Send; why it failed, None where it did not. Never raises."""
        apprise = _apprise()
        try:
            with apprise.LogCapture(level=logging.WARNING, fmt="%(message)s") as captured:
                sent = self._sender.notify(
                    body=body,
                    title=title,
                    notify_type=apprise.NotifyType.FAILURE,
                    body_format=apprise.NotifyFormat.TEXT,
                )
                said = captured.getvalue().split("\n")
        except Exception as error:  # a plugin's bug is no reason to stop relaying
            return self._masked(f"{type(error).__name__}: {error}")
        if sent:
            return None
        return self._masked(next((line for line in said if line.strip()), "refused"))

    def _masked(self, text: str) -> str:
        """``text`` without any part of the target's URL."""
        parts = re.split(r"[/:@?&=#,;]+", self._url)[1:]
        for part in sorted((part for part in parts if len(part) > 2), key=len, reverse=True):
            text = text.replace(part, "***")
        return _line(text, _REASON_CHARACTERS)


def _apprise() -> Any:
    """The library, without its own log lines: they may show a token."""
    try:
        import apprise
    except ImportError:
        raise ConfigError("alerts: apprise is not installed: pip install apprise") from None
    logger = logging.getLogger("apprise")
    if logger.propagate:
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
    return apprise


def _is_idle(digest: _Digest, now: float) -> bool:
    return not digest.count and now - digest.sent_at >= _QUIET_S


def _line(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
