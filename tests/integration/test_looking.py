"""diagnose, status --watch, tail and replay, on real servers."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.support.harness import Harness, Process
from tests.support.proxy import Proxy


def out(process: Process) -> str:
    return process.stdout.decode()


def diagnosis(shop: Harness, *arguments: str, **extra: str) -> dict[str, dict[str, Any]]:
    process = shop.run("diagnose", "--json", *arguments, **extra)
    assert process.wait() == 0, process.text()
    return {one["name"]: one for one in json.loads(out(process))["findings"]}


def test_diagnose(shop: Harness) -> None:
    assert list(diagnosis(shop)) == ["well"]
    for number in range(4):
        shop.ins(f"k{number}", {"n": number})
    sql = shop.database.sql
    sql("UPDATE outbox_event SET created_at = UTC_TIMESTAMP(6) - INTERVAL 1 HOUR")
    assert list(diagnosis(shop)) == ["no_relay", "no_compensator"]
    sql("UPDATE outbox_event SET retry_count = 5, last_error = 'too large' WHERE aggregate_id='k0'")
    sql("UPDATE outbox_event SET status = 2, retry_count = 11 WHERE aggregate_id = 'k1'")
    sql(
        "UPDATE outbox_event SET status = 1, created_at = UTC_TIMESTAMP(6) - INTERVAL 30 DAY"
        " WHERE aggregate_id = 'k2'"
    )
    found = diagnosis(shop, DELIVERY="at_least_once")
    assert list(found) == [
        *("no_relay", "no_compensator", "bad_rows", "dead", "no_purge", "repetitions"),
    ]
    assert "too large" in found["bad_rows"]["text"]
    assert "CREATED of order" in found["dead"]["text"]
    away = diagnosis(shop, KAFKA_BOOTSTRAP="127.0.0.1:1")
    assert list(away) == ["kafka_away", "dead", "no_purge"]

    shown = shop.run("diagnose")
    assert "no_relay: 1 rows are pending that nobody has tried" in out(shown)
    assert "    next: cdc-relay start" in out(shown).splitlines()
    assert "\x1b" not in out(shown)


def test_diagnose_reads_no_payload(shop: Harness) -> None:
    """A payload beyond sort_buffer_size can be sorted by no server ("Out of sort memory")."""
    for key in ("failing", "dead"):
        shop.ins(key, "x" * 3_000_000)
    sql = shop.database.sql
    sql("UPDATE outbox_event SET retry_count = 5, last_error = 'too large'")
    sql("UPDATE outbox_event SET status = 2 WHERE aggregate_id = 'dead'")
    assert list(diagnosis(shop)) == ["bad_rows", "dead"]


def test_what_diagnose_names_next_is_a_command(shop: Harness) -> None:
    shop.ins("a")
    shop.database.sql("UPDATE outbox_event SET created_at = UTC_TIMESTAMP(6) - INTERVAL 1 HOUR")
    found = diagnosis(shop)
    assert found["no_compensator"]["next"] == "cdc-relay compensate"
    assert shop.run("compensate", "--older-than", "10m").wait() == 0
    assert list(diagnosis(shop)) == ["well"]
    # Passes come, as the last one's record says: they are not what is wrong.
    shop.ins("a")
    shop.database.sql(
        "UPDATE outbox_event SET created_at = UTC_TIMESTAMP(6) - INTERVAL 1 HOUR WHERE status = 0"
    )
    assert list(diagnosis(shop)) == ["no_relay"]


def test_a_dead_row_is_shown_without_an_index_on_its_event_id(mysql_shop: Harness) -> None:
    """MySQL refuses to sort a JSON column that is larger than its sort buffer."""
    shop = mysql_shop
    large = shop.ins("a", {"x": "y" * 3_000_000})
    shop.database.sql("ALTER TABLE outbox_event DROP KEY uk_event_id")
    shop.database.sql("UPDATE outbox_event SET status = 2, retry_count = 11")
    shown = shop.run("dead", "show", large)
    assert shown.wait() == 0, shown.text()
    assert len(out(shown)) > 3_000_000


def test_status_is_watched(mysql_shop: Harness) -> None:
    process = mysql_shop.spawn("status", "--json", "--watch", "--every", "100ms")
    stdout = process._process.stdout
    assert stdout is not None
    first = json.loads(stdout.readline())
    mysql_shop.ins("a")
    mysql_shop.until(lambda: json.loads(stdout.readline())["pending"] == 1)
    assert first["pending"] == 0
    process.signal(signal.SIGINT)
    assert process.wait(20) == 0


def test_status_is_watched_while_the_database_is_away(mysql_shop: Harness) -> None:
    url = mysql_shop.database.url
    assert url.port is not None
    with Proxy(url.port) as proxy:
        url = url.set(host="127.0.0.1", port=proxy.port)
        process = mysql_shop.spawn(
            *("status", "--json", "--watch", "--every", "100ms"),
            DATABASE_URL=url.render_as_string(hide_password=False),
        )
        stdout = process._process.stdout
        assert stdout is not None

        def shown() -> dict[str, Any]:
            report: dict[str, Any] = json.loads(stdout.readline())
            return report

        mysql_shop.until(lambda: shown().get("pending") == 0)
        proxy.cut()
        mysql_shop.until(lambda: "does not answer" in shown().get("error", ""))
        proxy.mend()
        mysql_shop.until(lambda: shown().get("pending") == 0)
        process.signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_replay_and_tail(mysql_shop: Harness) -> None:
    shop = mysql_shop
    shop.create_topic()
    first, second, third = (shop.ins(key, {"n": n}) for n, key in enumerate("aba"))
    assert shop.run("start", "--until-current").wait() == 0
    before = shop.messages()

    dry = shop.run("replay", "--aggregate", "order/a", "--dry-run")
    assert dry.wait() == 0
    assert [line.split()[1] for line in out(dry).splitlines()[:2]] == [first, third]
    # Nobody there to confirm.
    refused = shop.run("replay", "--aggregate", "order/a")
    assert refused.wait() == 130
    assert "Consumers will see them again" in refused.text()
    assert len(shop.messages()) == 3

    done = shop.run("replay", "--aggregate", "order/a", "--yes", "--json")
    assert json.loads(out(done)) == {"chosen": 2, "sent": 2, "dry_run": False}
    [(second_id,)] = shop.database.sql("SELECT id FROM outbox_event WHERE event_id = %s", (second,))
    assert shop.run("replay", "--id", str(second_id), "--id", first, "--yes").wait() == 0
    assert shop.run("replay", "--since", "1h", "--until", "0s", "--yes").wait() == 0
    after = shop.messages()
    assert [m.event_id for m in after[3:]] == [first, third, first, second, first, second, third]
    same = {message.event_id: message[3:] for message in before}
    assert all(message[3:] == same[message.event_id] for message in after)

    tail = shop.run("tail", "--since", "1h", "--until-current", "--json")
    lines = [json.loads(line) for line in out(tail).splitlines()]
    assert [line["event_id"] for line in lines] == [message.event_id for message in after]
    assert lines[0]["payload"] == '{"n": 0}'
    keyed = shop.run("tail", "--since", "1h", "--until-current", "--key", "b")
    assert keyed.wait() == 0
    assert len(out(keyed).splitlines()) == 3
    assert f" b CREATED {second} " in out(keyed)

    following = shop.spawn("tail")
    stdout = following._process.stdout
    assert stdout is not None
    shop.run("replay", "--id", third, "--yes")
    # It may have begun after that one.
    shop.until(lambda: shop.run("replay", "--id", third, "--yes").wait() == 0)
    assert third in stdout.readline().decode()
    following.signal(signal.SIGINT)
    assert following.wait(20) == 0


def test_tail_follows_topics_that_are_made_meanwhile(mysql_shop: Harness) -> None:
    shop = mysql_shop
    none = shop.run("tail", "--until-current")
    assert none.wait() == 2
    assert "no topic is named like" in none.text()
    following = shop.spawn("tail")
    shop.until(lambda: "waiting for it" in following.text())
    first = shop.ins("a", {"n": 1})
    assert shop.run("start", "--until-current").wait() == 0
    stdout = following._process.stdout
    assert stdout is not None
    assert first in stdout.readline().decode()
    second = shop.ins("a", {"n": 2}, kind="later")
    assert shop.run("start", "--until-current").wait() == 0
    assert second in stdout.readline().decode()
    following.signal(signal.SIGINT)
    assert following.wait(20) == 0


def test_what_rows_hold_gives_the_terminal_no_orders(mysql_shop: Harness) -> None:
    shop = mysql_shop
    shop.create_topic()
    red = "\x1b[31mred\x07\x9b2J\n"
    event_id = shop.ins(red, {"n": 1}, event_type=red)
    assert shop.run("start", "--until-current").wait() == 0
    pages = [
        shop.run("tail", "--since", "1h", "--until-current"),
        shop.run("replay", "--id", event_id, "--dry-run"),
    ]
    shop.database.sql("UPDATE outbox_event SET status = 2, last_error = event_type")
    shop.ins(red, {"n": 2}, event_type=red)  # missing
    pages += [shop.run("dead", "list"), shop.run("diagnose")]
    pages.append(shop.run("audit", "--until", "0s"))
    for page in pages:
        page.wait()
        shown = page.text() + out(page)
        assert r"\x1b[31mred\x07\x9b2J" in shown, shown
        assert not set(shown) & set("\x1b\x07\x9b"), shown


@pytest.mark.parametrize(
    "arguments", [[], ["--aggregate", "order"], ["--id", "nobody"], ["--since", "soon"]]
)
def test_replay_needs_a_choice(mysql_shop: Harness, arguments: list[str]) -> None:
    process = mysql_shop.run("replay", *arguments)
    assert process.wait() == 2
    assert process.text().count("error:") == 1
