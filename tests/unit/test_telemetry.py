"""Logs: one line per event on stderr, no secrets."""

from __future__ import annotations

import json
import logging

import pytest
import structlog

from cdc_relay.config import Settings
from cdc_relay.telemetry import configure_logging, is_debugging


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    output = capsys.readouterr()
    assert output.out == ""
    return output.err.splitlines()


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Settings(log_format="json"))
    structlog.get_logger("x").info("sent", rows=3, key="ключ")
    [line] = lines(capsys)
    event = json.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {"event": "sent", "level": "info", "rows": 3, "key": "ключ"}


def test_console_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Settings(log_format="console"))
    structlog.get_logger("x").warning("row parked", tries=1)
    [line] = lines(capsys)
    assert "row parked" in line
    assert "tries=1" in line


def test_auto_is_json_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Settings())
    structlog.get_logger("x").info("x")
    assert json.loads(lines(capsys)[0])["event"] == "x"


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Settings(log_format="json", log_level="warning"))
    log = structlog.get_logger("x")
    log.debug("no")
    log.info("no")
    log.warning("yes")
    assert len(lines(capsys)) == 1
    assert not is_debugging()
    configure_logging(Settings(log_level="debug"))
    assert is_debugging()


def test_libraries_come_out_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Settings(log_format="json"))
    logging.getLogger("some.library").warning("about mysql://u:secret@h/d")
    logging.getLogger("some.library").info("quiet")
    [line] = lines(capsys)
    assert json.loads(line)["event"] == "about mysql://u:***@h/d"


def test_secrets_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Settings(log_format="json"))
    text = "mysql://relay:hunter2@db/shop"
    try:
        raise ValueError(text)
    except ValueError:
        structlog.get_logger("x").exception(
            "bad mysql+pymysql://relay:hunter2@db:3306/shop",
            url="mysql://relay:hunter2@db/shop?x=1",
            password="hunter2",
            kafka={"sasl.password": "hunter2", "sasl.username": "me", "deep": ["u://a:hunter2@b"]},
        )
    [line] = lines(capsys)
    assert "hunter2" not in line
    event = json.loads(line)
    assert event["url"] == "mysql://relay:***@db/shop?x=1"
    assert event["kafka"] == {
        "sasl.password": "***",
        "sasl.username": "me",
        "deep": ["u://a:***@b"],
    }
