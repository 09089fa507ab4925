"""Alerts: digests, secrets, and real targets on loopback."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from email import message_from_bytes
from email.policy import default
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller

from cdc_relay.alerts import Alerts
from cdc_relay.cli import main
from cdc_relay.config import Settings, load
from cdc_relay.errors import ConfigError
from cdc_relay.outbox import OutboxEvent
from dev import ports
from tests.support.webhook import Webhook

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


def event(number: int = 1, event_type: str = "ORDER_CREATED") -> OutboxEvent:
    return OutboxEvent(number, f"e-{number}", "order", f"o-{number}", event_type, b"{}", None, None)


@pytest.fixture
def webhook() -> Iterator[tuple[Webhook, str]]:
    hook = Webhook()
    with hook.serving():
        yield hook, hook.url


class Mailbox:
    """A real SMTP server and what it has received."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802
        self.received.append(message_from_bytes(envelope.content, policy=default))
        return "250 OK"


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[tuple[Mailbox, str]]:
    box = Mailbox()
    port = ports.kept(tmp_path)
    controller = Controller(box, hostname="127.0.0.1", port=port)
    controller.start()
    try:
        yield box, f"mailto://127.0.0.1:{port}/?from=relay@example.com&to=team@example.com"
    finally:
        controller.stop()


def test_a_webhook_gets_one_digest_for_each_reason(webhook: tuple[Webhook, str]) -> None:
    hook, url = webhook
    alerts = Alerts([url], "shop (shop.outbox_event)")
    for number in range(25):
        alerts.dead(event(number), 11, f"record of {1000 + number} bytes is too large")
    alerts.dead(event(99, "ORDER_PAID"), 11, "no such topic")
    alerts.send()
    assert len(hook.received) == 2
    large, topic = hook.received
    assert large["title"] == "cdc-relay shop (shop.outbox_event): 25 rows are dead"
    assert large["type"] == "failure"
    assert "reason: record of 1000 bytes is too large" in large["message"]
    assert large["message"].count("event_id=") == 10
    assert "and 15 more" in large["message"]
    assert "reason: no such topic" in topic["message"]
    line = "event_id=e-99 aggregate_type=order aggregate_id=o-99 event_type=ORDER_PAID tries=11"
    assert line in topic["message"]
    alerts.send()
    assert len(hook.received) == 2


def test_mail(mailbox: tuple[Mailbox, str]) -> None:
    box, url = mailbox
    alerts = Alerts([url], "shop")
    alerts.dead(event(7), 11, "record <too> large & refused")
    alerts.close()
    [mail] = box.received
    assert mail["To"] == "team@example.com"
    assert mail["Subject"] == "cdc-relay shop: 1 row is dead"
    text = mail.get_body(("plain",)).get_content()
    for part in (
        "e-7",
        "order",
        "o-7",
        "ORDER_CREATED",
        "tries=11",
        "record <too> large & refused",
    ):
        assert part in text


def test_a_thread_of_its_own_sends_one_digest_a_minute(webhook: tuple[Webhook, str]) -> None:
    hook, url = webhook
    alerts = Alerts([url], "shop")
    alerts.start()
    alerts.dead(event(1), 11, "too large")
    assert hook.arrived.acquire(timeout=20)
    alerts.dead(event(2), 11, "too large")
    alerts.dead(event(3), 11, "another reason")
    assert hook.arrived.acquire(timeout=20)
    assert "reason: another reason" in hook.received[1]["message"]
    alerts.dead(event(4), 11, "too large")
    alerts.close()  # what was held back is not lost
    assert len(hook.received) == 3
    assert "2 rows are dead" in hook.received[2]["title"]


def test_a_target_that_fails_is_logged_and_the_others_get_it(
    webhook: tuple[Webhook, str], capsys: Capture
) -> None:
    hook, url = webhook
    other = Webhook()
    other.status = 500
    with other.serving():
        alerts = Alerts([other.url.replace("//", "//user:pa55word@"), url], "shop")
        alerts.dead(event(), 11, "too large")
        alerts.send()
    assert len(hook.received) == 1
    said = "".join(capsys.readouterr())
    assert "alert not delivered" in said
    assert "1 (json://)" in said
    assert "error=500" in said
    assert "s3cret-hook" not in said
    assert "pa55word" not in said


def test_a_target_that_hangs_is_waited_for_once(webhook: tuple[Webhook, str]) -> None:
    """It takes connections and never answers; the others get everything."""
    hook, url = webhook
    calls: list[socket.socket] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def take() -> None:
            with suppress(OSError):
                while True:
                    calls.append(listener.accept()[0])

        threading.Thread(target=take, daemon=True).start()
        hanging = f"json://127.0.0.1:{listener.getsockname()[1]}/x"
        alerts = Alerts([hanging, url], "shop")
        for number, reason in enumerate(("no topic", "too large", "no key", "no type")):
            alerts.dead(event(number), 11, reason)
        alerts.close(60)
    assert len(hook.received) == 4
    assert len(calls) == 1
    calls[0].close()


def test_a_process_that_has_to_end_waits_for_its_targets_no_longer_than_that() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:  # never answers
        alerts = Alerts([f"json://127.0.0.1:{listener.getsockname()[1]}/?rto=600"], "shop")
        alerts.dead(event(1), 11, "too large")
        alerts.close(3600, lambda: True)
        assert alerts._thread is not None
        assert alerts._thread.is_alive()  # the target still has its time


def test_what_nobody_has_taken_is_sent_again(webhook: tuple[Webhook, str]) -> None:
    hook, url = webhook
    hook.status = 503
    alerts = Alerts([url], "shop")
    alerts.dead(event(1), 11, "too large")
    alerts.send()
    alerts.dead(event(2), 11, "too large")
    hook.status = 200
    alerts.send()
    assert "2 rows are dead" in hook.received[-1]["title"]
    assert hook.received[-1]["message"].count("event_id=") == 2


def test_reasons_without_end_are_bounded(webhook: tuple[Webhook, str]) -> None:
    hook, url = webhook
    alerts = Alerts([url], "shop")
    for number in range(200):
        letters = "".join(chr(ord("a") + int(digit)) for digit in str(number))
        alerts.dead(event(number), 11, f"reason {letters}")
    alerts.send()
    assert len(hook.received) == 21
    assert "many different reasons" in hook.received[-1]["message"]
    assert "180 rows are dead" in hook.received[-1]["title"]


def test_a_digest_fits_into_a_wecom_message(webhook: tuple[Webhook, str]) -> None:
    hook, url = webhook
    alerts = Alerts([url], "shop")
    for number in range(20):
        long = OutboxEvent(number, "e" * 64, "t" * 64, "a\n" * 200, "x" * 128, b"", None, None)
        alerts.dead(long, 11, "r" * 3000)
    alerts.send()
    assert len(hook.received[0]["message"].encode()) < 4096


@pytest.mark.parametrize(
    "url",
    [
        "dingtalk://tokentoken123/",
        "dingtalk://SECsecretsecret@tokentoken123/",
        "https://oapi.dingtalk.com/robot/send?access_token=abc123abc123",
        "wecombot://693a91f6-7xxx-4bc4-97a0-0ec2sifa5aaa",
        "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=693a91f6-7xxx-4bc4-97a0-0ec2sifa5aaa",
        "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/#alerts",
        "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
        "mailtos://user:password@smtp.example.com:465/?from=relay@example.com&to=team@example.com",
        "jsons://hooks.example.com/outbox",
    ],
)
def test_the_targets_of_the_contract_are_known(url: str) -> None:
    Alerts([url], "shop")


@pytest.mark.parametrize("url", ["slack://s3cret", "nonsense", "foo://user:s3cret@x", ""])
def test_other_targets_are_refused_without_showing_them(url: str, capsys: Capture) -> None:
    with pytest.raises(ConfigError, match=r"^alerts: target 1 \(") as raised:
        Alerts([url], "shop")
    assert "s3cret" not in str(raised.value) + "".join(capsys.readouterr())


def test_settings(tmp_path: Path) -> None:
    secrets = tmp_path / "alerts"
    secrets.write_text("# the team\nslack://a/b/c\n\n  json://host/x,y  \n")
    config = tmp_path / "relay.toml"
    config.write_text(f'alerts = ["json://one"]\nalerts_file = "{secrets}"\n')
    settings = load(config, environ={})
    assert settings.alert_targets() == ("json://one", "slack://a/b/c", "json://host/x,y")
    environ = {"CDC_RELAY_ALERTS": "json://h/a,b, slack://a/b/c\nmailto://u:s3cret@example.com"}
    settings = load(environ=environ)
    expected = ("json://h/a,b", "slack://a/b/c", "mailto://u:s3cret@example.com")
    assert settings.alert_targets() == expected
    assert "s3cret" not in repr(settings)
    with pytest.raises(ConfigError, match="alerts_file: cannot read"):
        load(environ={}, flags={"alerts_file": str(tmp_path / "none")}).alert_targets()
    assert Settings().alert_targets() == ()


def test_alert_test(webhook: tuple[Webhook, str], capsys: Capture, tmp_path: Path) -> None:
    hook, url = webhook
    secrets = tmp_path / "alerts"
    secrets.write_text(f"{url}\njson://127.0.0.1:9/s3cret\n")
    assert main(["alert", "test", "--alerts-file", str(secrets)]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "1 (json://): sent"
    assert out.splitlines()[1].startswith("2 (json://): failed: ")
    assert "s3cret" not in out + err
    assert "test" in hook.received[0]["title"]
    secrets.write_text(url)
    assert main(["alert", "test", "--alerts-file", str(secrets), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"target": "1 (json://)", "error": None}
    secrets.write_text("# none\n")
    assert main(["alert", "test", "--alerts-file", str(secrets)]) == 2
    assert "no alert target" in capsys.readouterr().err


def test_a_bug_in_the_library_does_no_harm(
    webhook: tuple[Webhook, str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    import apprise

    def broken(*_: object, **__: object) -> bool:
        raise ValueError("broken s3cret-hook")

    alerts = Alerts([webhook[1]], "shop")
    monkeypatch.setattr(apprise.Apprise, "notify", broken)
    alerts.dead(event(), 11, "too large")
    alerts.send()
    said = "".join(capsys.readouterr())
    assert "ValueError: broken ***" in said


def test_apprise_is_not_loaded_without_targets() -> None:
    code = (
        "import sys; from cdc_relay.alerts import Alerts; from cdc_relay.config import Settings;"
        "import cdc_relay.cli.start, fallback; alerts = Alerts.of(Settings()); alerts.start();"
        "alerts.close(); sys.exit('apprise' in sys.modules)"
    )
    assert subprocess.call([sys.executable, "-c", code], cwd=ROOT, timeout=60) == 0


def test_the_library_logs_nothing_by_itself(webhook: tuple[Webhook, str]) -> None:
    Alerts([webhook[1]], "shop")
    logger = logging.getLogger("apprise")
    assert not logger.propagate
    assert any(isinstance(one, logging.NullHandler) for one in logger.handlers)
