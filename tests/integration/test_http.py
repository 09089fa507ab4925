"""What a relay serves over HTTP: numbers that equal those in table and topic, probes that turn red
for what they should and for nothing else, a page that is safe by default."""

from __future__ import annotations

import base64
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.brokers import ProxiedKafka
from tests.support.harness import CHECKOUT, Harness, Process
from tests.support.proxy import Proxy
from tests.support.sql import Database
from tests.support.web import Web

SERVED = {"HTTP": "127.0.0.1:0", "SAMPLE_INTERVAL": "100ms"}
# Short, so that the tests are; one after the other, so that each has its turn.
QUICK = {**SERVED, "HEARTBEAT": "300ms", "READ_TIMEOUT": "2s", "HEALTH_TIMEOUT": "3s"}
TOKEN = "a-token-of-twenty-six-chars"

MakeHarness = Callable[..., Harness]


def serve(shop: Harness, *arguments: str, **extra: str) -> tuple[Process, Web]:
    process = shop.relay(*arguments, **extra)
    return process, Web(shop, process)


# --- numbers --------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_table_and_topic(database: Database, harness: MakeHarness) -> None:
    shop = harness(database, **SERVED, KAFKA_MESSAGE_MAX_BYTES="20000", MAX_TRIES="1")
    shop.create_topic()
    _, web = serve(shop)
    for number in range(30):
        shop.ins(f"k{number}", {"n": number})
    shop.ins("big", {"text": "x" * 30_000})
    shop.wait_sent(30)
    shop.until(lambda: shop.count(2) == 1)
    shop.ins("big", {"n": "behind"})
    shop.ins("young", {"n": 1})
    shop.wait_sent(31)
    assert shop.count(0) == 1

    in_topic = len(shop.messages())
    wanted = {
        "cdc_relay_received_total": 33,
        "cdc_relay_sent_total": in_topic,
        "cdc_relay_marked_total": shop.count(1),
        "cdc_relay_dead_total": shop.count(2),
        "cdc_relay_dead_rows": shop.count(2),
        "cdc_relay_pending_rows": shop.count(0),
        "cdc_relay_parked_total": 2,
        "cdc_relay_retries_total": 1,
        "cdc_relay_held_total": 1,
        "cdc_relay_lag_seconds_count": in_topic,
        "cdc_relay_closed_aggregates": 1,
        'cdc_relay_role{role="owner"}': 1,
        "cdc_relay_reader_up": 1,
        "cdc_relay_database_up": 1,
        "cdc_relay_broker_up": 1,
        "cdc_relay_alive": 1,
        "cdc_relay_ready": 1,
        "cdc_relay_members": 1,
    }

    def shown() -> dict[str, float | None]:
        metrics = web.metrics()
        return {name: metrics.get(name) for name in wanted}

    shop.until(lambda: shown() == wanted)
    metrics = web.metrics()
    [[age]] = database.sql(
        f"SELECT TIMESTAMPDIFF(MICROSECOND, MIN(created_at), UTC_TIMESTAMP(6)) / 1e6"
        f" FROM {shop.table} WHERE status = 0"
    )
    assert abs(metrics["cdc_relay_oldest_pending_age_seconds"] - float(age)) < 30
    assert metrics["cdc_relay_lag_seconds_sum"] >= 0
    checkpoint = shop.checkpoint()
    assert checkpoint is not None
    assert metrics["cdc_relay_position_offset_bytes"] <= checkpoint.position.offset
    assert "cdc_relay_purge_horizon_seconds" in metrics or database.is_mariadb

    page = web.figures()
    assert page["sent"] == in_topic
    assert page["marked"] == shop.count(1)
    assert page["pending"] == shop.count(0)
    assert page["dead"] == shop.count(2)
    data = web.ask("/data.json").json
    assert {name: data["figures"][name]["value"] for name in ("sent", "pending", "dead")} == {
        "sent": in_topic,
        "pending": shop.count(0),
        "dead": shop.count(2),
    }
    [row] = data["troubled"]
    assert row[0] == "dead"
    assert row[1] == "order / big"
    assert "too large" in row[5].lower()
    assert "max.message.bytes" in web.ask("/").body
    shop.until(lambda: len(web.ask("/data.json?range=15m").json["history"]["time"]) > 3)


def test_rules_and_dashboard_ask_for_metrics_that_there_are(mysql_shop: Harness) -> None:
    _, web = serve(mysql_shop, **SERVED)
    mysql_shop.ins("a")
    mysql_shop.wait_sent(1)
    names = {"cdc_relay_sample_age_seconds", "cdc_relay_purge_horizon_seconds"}
    mysql_shop.until(lambda: names <= web.metrics().keys())
    there = {name.partition("{")[0] for name in web.metrics()}
    asked: set[str] = set()
    for file in ("prometheus-alerts.yml", "grafana-dashboard.json"):
        text = (CHECKOUT / "deploy" / file).read_text()
        asked |= set(re.findall(r"\b(?:cdc_relay|process)_[a-z0-9_]+", text))
    assert len(asked) > 30
    assert asked <= there


def test_without_marks_nothing_is_said_of_pending_rows(
    mysql: Database, harness: MakeHarness
) -> None:
    shop = harness(mysql, **SERVED, MARK="none")
    _, web = serve(shop)
    shop.ins("a")
    shop.until(lambda: web.metrics()["cdc_relay_sent_total"] == 1)
    metrics = web.metrics()
    assert "cdc_relay_dead_rows" in metrics
    assert "cdc_relay_pending_rows" not in metrics
    assert "not told without marks" in web.ask("/").body


def test_the_lag_is_counted_from_the_commit_not_from_the_insert(mysql_shop: Harness) -> None:
    _, web = serve(mysql_shop, **SERVED)
    with closing(mysql_shop.database.connect()) as connection, connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {mysql_shop.table} (event_id, aggregate_type, aggregate_id, event_type,"
            " payload) VALUES ('e', 'order', '1', 'T', '{}')"
        )
        time.sleep(3)
        connection.commit()
    mysql_shop.wait_sent(1)
    mysql_shop.until(lambda: web.metrics()["cdc_relay_lag_seconds_count"] == 1)
    assert web.metrics()["cdc_relay_lag_seconds_sum"] < 2.9


def test_a_standby_says_so(mysql_shop: Harness) -> None:
    mysql_shop.relay()
    standby = mysql_shop.spawn("start", **QUICK)
    web = Web(mysql_shop, standby)
    mysql_shop.until(lambda: web.metrics()['cdc_relay_role{role="standby"}'] == 1)
    mysql_shop.until(web.ready)
    assert web.healthy()
    mysql_shop.until(lambda: web.metrics().get("cdc_relay_members") == 2)
    assert "Standing by" in web.ask("/").body


# --- probes ---------------------------------------------------------------------------------------


@pytest.fixture
def proxied(database: Database, kafka: str, tmp_path: Path) -> Iterator[tuple[Harness, Proxy]]:
    """An outbox whose relay reaches the database through a proxy, and nothing else does."""
    with ExitStack() as stack:
        assert database.url.port is not None
        proxy = stack.enter_context(Proxy(database.url.port))
        url = database.url.set(host="127.0.0.1", port=proxy.port)
        settings = {**QUICK, "DATABASE_URL": url.render_as_string(hide_password=False)}
        yield stack.enter_context(Harness(database, kafka, tmp_path, settings)), proxy


def test_an_idle_relay_stays_green_and_silent(shop: Harness) -> None:
    relay, web = serve(shop, **QUICK)
    shop.until(web.ready)
    # Seven times the silence that would turn it red; only heartbeats come.
    deadline = time.monotonic() + 22
    while time.monotonic() < deadline:
        answer = web.ask("/healthz")
        assert answer.status == 200, answer.body
        answer = web.ask("/readyz")
        assert answer.status == 200, answer.body
        time.sleep(0.1)
    # Progress is told every ten seconds, where there is any.
    told = [{**one, "timestamp": ""} for one in relay.logged("progress")]
    assert all(one != next_one for one, next_one in pairwise(told))


def test_a_hanging_dump_connection_turns_it_red_and_green_again(
    proxied: tuple[Harness, Proxy],
) -> None:
    shop, proxy = proxied
    process, web = serve(shop)
    shop.ins("a")
    shop.until(lambda: web.metrics()["cdc_relay_marked_total"] == 1)
    shop.until(web.ready)
    proxy.swallow()
    shop.until(lambda: not web.healthy())
    answer = web.ask("/healthz")
    assert answer.status == 503
    assert answer.json["status"] == "failing"
    assert "heartbeat" in " ".join(answer.json["reasons"])
    assert not web.ready()
    assert web.metrics()["cdc_relay_alive"] == 0
    assert "Stuck" in web.ask("/").body
    shop.ins("b")
    proxy.restore()
    shop.until(web.healthy, 60)
    # A look at the table that was under way has to give up first (120 s without an answer).
    shop.until(web.ready, 150)
    shop.wait_sent(2)
    assert process.running


def test_a_database_that_is_away_is_no_reason_to_be_killed(
    proxied: tuple[Harness, Proxy],
) -> None:
    shop, proxy = proxied
    _, web = serve(shop)
    shop.until(web.ready)
    proxy.cut()
    shop.until(lambda: not web.ready())
    # Longer than the silence that turns it red, and than the longest pause between two tries.
    deadline = time.monotonic() + 14
    while time.monotonic() < deadline:
        answer = web.ask("/healthz")
        assert answer.status == 200, answer.body
        answer = web.ask("/readyz")
        assert answer.status == 503, answer.body
        time.sleep(0.2)
    assert "database" in " ".join(web.ask("/readyz").json["reasons"])
    metrics = web.metrics()
    assert metrics["cdc_relay_database_up"] == 0
    assert metrics["cdc_relay_reader_up"] == 0
    proxy.mend()
    shop.until(web.ready, 60)
    shop.ins("a")
    shop.wait_sent(1)


def test_a_broker_that_is_away_is_no_reason_to_be_killed(
    mysql: Database, quick_kafka: ProxiedKafka, tmp_path: Path
) -> None:
    with Harness(mysql, quick_kafka.bootstrap, tmp_path, QUICK) as shop:
        shop.create_topic()
        _, web = serve(shop, KAFKA_BOOTSTRAP=quick_kafka.proxied)
        shop.ins("a")
        shop.wait_sent(1)
        shop.until(web.ready)
        quick_kafka.proxy.cut()
        try:
            shop.ins("b")
            shop.until(lambda: not web.ready())
            deadline = time.monotonic() + 8
            while time.monotonic() < deadline:
                answer = web.ask("/healthz")
                assert answer.status == 200, answer.body
                time.sleep(0.2)
            shop.until(lambda: web.metrics()["cdc_relay_broker_up"] == 0)
        finally:
            quick_kafka.proxy.mend()
        shop.wait_sent(2, 60)
        shop.until(web.ready, 60)


def test_a_stuck_loop_turns_it_red(mysql_shop: Harness) -> None:
    process, web = serve(mysql_shop, **QUICK)
    mysql_shop.until(web.ready)
    with closing(mysql_shop.database.connect(autocommit=True)) as blocker:
        with blocker.cursor() as cursor:
            # The relay's own look at the table waits for this, for as long as it takes.
            cursor.execute(f"LOCK TABLES {mysql_shop.table} WRITE")
        mysql_shop.until(lambda: not web.healthy())
        assert "loop has not turned" in " ".join(web.ask("/healthz").json["reasons"])
    mysql_shop.until(web.healthy)
    mysql_shop.ins("a")
    mysql_shop.wait_sent(1)
    assert process.running


# --- the address ----------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_one_line_and_exit_code_2(mysql_shop: Harness) -> None:
    _, web = serve(mysql_shop, **SERVED)
    other = mysql_shop.run("start", HTTP=f"127.0.0.1:{web.port}")
    assert other.wait() == 2
    [line] = other.text().splitlines()
    assert line.startswith(f"error: http: 127.0.0.1:{web.port} is taken")


def test_off_serves_nothing(mysql_shop: Harness) -> None:
    relay = mysql_shop.relay()
    mysql_shop.ins("a")
    mysql_shop.wait_sent(1)
    assert relay.terminate() == 0
    assert not relay.logged("serving HTTP")


def test_it_ends_with_the_relay(mysql_shop: Harness) -> None:
    relay, web = serve(mysql_shop, **SERVED)
    assert relay.terminate() == 0, relay.text()
    with pytest.raises(ConnectionError):
        web.ask("/healthz")


# --- the page -------------------------------------------------------------------------------------


def test_the_page_is_read_only_and_asks_nobody_else(mysql_shop: Harness) -> None:
    _, web = serve(mysql_shop, **SERVED)
    page = web.ask("/")
    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    assert page.headers["X-Frame-Options"] == "DENY"
    assert page.headers["Referrer-Policy"] == "no-referrer"
    assert page.headers["Cache-Control"] == "no-store"
    assert "Server" not in page.headers
    assert not re.search(r"https?://", page.body)
    assert not re.search(r"<script(?! src=\"/static/)|\sstyle=|\son\w+=", page.body)
    for path in re.findall(r'(?:src|href)="(/[^"]+)"', page.body):
        assert web.ask(path).status == 200, path
    assert not re.search(r"https?://", web.ask("/static/page.js").body)
    for method in ("POST", "PUT", "DELETE"):
        answer = web.ask("/", method=method)
        assert answer.status == 405
        assert answer.headers["Allow"] == "GET, HEAD"
    assert web.ask("/", method="HEAD").body == ""
    for path in ("/nothing", "/static/../server.py", "/static/%2e%2e/server.py", "/static/"):
        assert web.ask(path).status == 404, path


def test_a_foreign_name_that_points_here_is_refused(mysql_shop: Harness) -> None:
    _, web = serve(mysql_shop, **SERVED)
    for name in ("localhost", "127.0.0.1", f"localhost:{web.port}", f"[::1]:{web.port}"):
        assert web.ask("/data.json", {"Host": name}).status == 200, name
    for name in ("evil.example", f"evil.example:{web.port}", "localhost.evil.example", ""):
        assert web.ask("/data.json", {"Host": name}).status == 403, name
    assert web.ask("/healthz", {"Host": "10.0.0.7:8080"}).status == 200


def test_connections_that_ask_nothing_hold_up_no_probe(mysql_shop: Harness) -> None:
    _, web = serve(mysql_shop, **SERVED)
    with ExitStack() as stack:
        for _ in range(300):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", web.port), 10))
            one.sendall(b"GET /healthz HT")  # and no more: the server has to wait
        for path in ("/healthz", "/metrics", "/"):
            assert web.ask(path).status == 200


def test_beyond_loopback_the_page_needs_a_token(mysql_shop: Harness, tmp_path: Path) -> None:
    relay, web = serve(mysql_shop, **{**SERVED, "HTTP": "0.0.0.0:0"})
    for path in ("/", "/data.json", "/static/page.js"):
        assert web.ask(path).status == 403
    for path in ("/metrics", "/healthz", "/readyz"):
        assert web.ask(path).status == 200
    assert relay.terminate() == 0
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    _, web = serve(mysql_shop, **{**SERVED, "HTTP": "0.0.0.0:0", "HTTP_TOKEN_FILE": str(file)})
    basic = base64.b64encode(f"anybody:{TOKEN}".encode()).decode()
    wrong = base64.b64encode(b"anybody:wrong").decode()
    for given, status in (
        ("", 401),
        ("Bearer wrong", 401),
        (f"Basic {wrong}", 401),
        ("Basic %%%", 401),
        (f"Bearer {TOKEN}", 200),
        (f"Basic {basic}", 200),
    ):
        for path in ("/", "/data.json"):
            answer = web.ask(path, {"Authorization": given, "Host": "relay.internal"})
            assert answer.status == status, given
            assert ("WWW-Authenticate" in answer.headers) == (status == 401)
    assert web.ask("/metrics").status == 200
    short = mysql_shop.run("start", HTTP_TOKEN="short")
    assert short.wait() == 2
    assert "http_token has 5 characters" in short.text()


def test_no_secret_is_shown_anywhere(proxied: tuple[Harness, Proxy]) -> None:
    shop, proxy = proxied
    database = shop.database
    password = "pa55-w0rd-0f-the-relay"
    user = f"relay_{database.name}"[:32]
    database.sql(f"CREATE USER '{user}'@'%' IDENTIFIED BY '{password}'")
    try:
        database.sql(f"GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO '{user}'@'%'")
        database.sql(f"GRANT SELECT, UPDATE ON `{database.name}`.* TO '{user}'@'%'")
        url = database.url.set(host="127.0.0.1", port=proxy.port, username=user, password=password)
        relay, web = serve(
            shop,
            DATABASE_URL=url.render_as_string(hide_password=False),
            HTTP_TOKEN=TOKEN,
            KAFKA_SASL_PASSWORD="kafka-pa55-w0rd",
        )
        shop.ins("a")
        shop.wait_sent(1)
        seen = []

        def look() -> None:
            bearer = {"Authorization": f"Bearer {TOKEN}"}
            for path in ("/", "/data.json", "/metrics", "/healthz", "/readyz", "/nothing"):
                answer = web.ask(path, bearer)
                seen.append(answer.body + str(answer.headers))
                seen.append(web.ask(path).body)

        look()
        proxy.cut()
        shop.until(lambda: not web.ready())
        look()
        database.sql(f"DROP USER '{user}'@'%'")
        proxy.mend()
        assert relay.wait() == 3  # access denied, in one line
        text = "\n".join(seen) + relay.text()
        for secret in (password, TOKEN, "kafka-pa55-w0rd"):
            assert secret not in text
    finally:
        database.sql(f"DROP USER IF EXISTS '{user}'@'%'")
