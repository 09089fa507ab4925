"""``cdc-relay tail``: records as they come."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, Final

import click

from cdc_relay.cli.options import KAFKA, LOGGING, settings_options
from cdc_relay.cli.text import printable
from cdc_relay.cli.times import Moment, moment
from cdc_relay.config import Settings
from cdc_relay.errors import ConfigError
from cdc_relay.kafka.reader import Read, Reader

_SHOWN: Final = 120


@click.command(
    "tail",
    epilog="Examples: `cdc-relay tail`; `cdc-relay tail --since 10m --until-current`; "
    "`cdc-relay tail --topic outbox.event.order --json | jq .event_id`.",
)
@settings_options("topic", *KAFKA, *LOGGING)
@click.option("--only", "topics", multiple=True, metavar="TOPIC", help="This topic only.")
@click.option("--key", help="Records of this key (aggregate id) only.")
@click.option("--since", callback=moment, metavar="WHEN", help="Begin at a time, or so long ago.")
@click.option("--until-current", is_flag=True, help="End at the present end of the topics.")
@click.option("--no-payload", is_flag=True, help="Leave the payloads out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, whole.")
def command(
    settings: Settings,
    topics: tuple[str, ...],
    key: str | None,
    since: Moment | None,
    until_current: bool,
    no_payload: bool,
    as_json: bool,
) -> None:
    """Follow the records of the topics that the topic template names, one line each, as a
    read_committed consumer sees them. Topics that are made meanwhile are followed, too. Nothing is
    committed and no group is joined. Ctrl-C ends."""
    settings.require("kafka_bootstrap")
    with closing(Reader(settings)) as reader:

        def chosen(there: Mapping[str, int]) -> list[str]:
            return list(topics) or settings.routing().topics_of(there)

        there = reader.topics()
        names = chosen(there)
        missing = [name for name in topics if name not in there]
        if not names:
            missing = [f"like {one}" for one in settings.routing().templates]
        if missing:
            text = f"topic: no topic is named {', '.join(missing)} yet"
            if until_current:
                raise ConfigError(text)
            click.echo(f"{printable(text)}: waiting for it", err=True)
        since_ms = since.at(time.time_ns() // 1000) // 1000 if since else None
        batches = (
            reader.since(names, since_ms or 0) if until_current else reader.follow(chosen, since_ms)
        )
        try:
            for batch in batches:
                for one in batch:
                    if key is None or one.key == key.encode():
                        click.echo(_line(one, as_json, no_payload))
        except (KeyboardInterrupt, BrokenPipeError):
            return


def _line(one: Read, as_json: bool, no_payload: bool) -> str:
    value = None if one.value is None else one.value.decode("utf-8", "backslashreplace")
    if as_json:
        fields: dict[str, Any] = {
            "topic": one.topic,
            "partition": one.partition,
            "offset": one.offset,
            "timestamp_ms": one.timestamp_ms,
            "event_id": one.event_id,
            "key": one.key.decode("utf-8", "backslashreplace"),
            "headers": {
                name: None if content is None else content.decode("utf-8", "backslashreplace")
                for name, content in one.headers
            },
        }
        if not no_payload:
            fields["payload"] = value
        return json.dumps(fields, ensure_ascii=False)
    at = datetime.fromtimestamp(one.timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds")
    kinds = [content for name, content in one.headers if name in ("event_type", "ce_type")]
    kind = (kinds[0] or b"").decode("utf-8", "backslashreplace") if kinds else "-"
    key = one.key.decode("utf-8", "backslashreplace")
    text = f"{at} {one.topic}[{one.partition}]@{one.offset} {key} {kind} {one.event_id or '-'}"
    if no_payload:
        return printable(text)
    shown = "null" if value is None else " ".join(value.split())
    return printable(f"{text} {shown[: _SHOWN - 1] + '…' if len(shown) > _SHOWN else shown}")
