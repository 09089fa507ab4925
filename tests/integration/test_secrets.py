"""No password, token or alert target in anything that a command prints or logs, at debug level,
while things go well and while they break."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.harness import Harness, Process
from tests.support.proxy import Proxy
from tests.support.sql import Database

DATABASE, KAFKA, TOKEN, ALERT = (
    f"{word}-Zx9%/:@{number}"
    for number, word in enumerate(("dbpw", "kafkapw", "tokenpw", "alertpw"))
)
# As it stands in a URL, and as it is.
WORDS = ("dbpw-Zx9", "kafkapw-Zx9", "tokenpw-Zx9", "alertpw-Zx9")
USER = "secretive"


@pytest.fixture
def proxy(mysql: Database) -> Iterator[Proxy]:
    port = mysql.url.port
    assert port is not None
    mysql.sql(f"CREATE USER '{USER}'@'%' IDENTIFIED BY '{DATABASE}'")
    mysql.sql(f"GRANT ALL ON *.* TO '{USER}'@'%'")
    with Proxy(port) as between:
        yield between
    mysql.sql(f"DROP USER '{USER}'@'%'")


@pytest.fixture
def secrets(mysql: Database, proxy: Proxy) -> dict[str, str]:
    url = mysql.url.set(port=proxy.port, username=USER, password=DATABASE)
    return {
        "DATABASE_URL": url.render_as_string(hide_password=False),
        "KAFKA_SASL_PASSWORD": KAFKA,
        "KAFKA_SASL_USERNAME": "relay",
        "HTTP_TOKEN": TOKEN,
        "ALERTS": f"json://me:{WORDS[3]}@127.0.0.1:9/{WORDS[3]}?+X-Token={WORDS[3]}",
        "LOG_LEVEL": "debug",
        "HTTP": "127.0.0.1:0",
        "HEARTBEAT": "1s",
        "READ_TIMEOUT": "3s",
        "SEND_TIMEOUT": "3s",
    }


def clean(process: Process) -> None:
    said = process.text() + (process.stdout or b"").decode(errors="replace")
    for word in WORDS:
        assert word not in said, said


def test_while_it_works_and_while_the_database_is_away(
    mysql_shop: Harness, proxy: Proxy, secrets: dict[str, str]
) -> None:
    shop = mysql_shop
    shop.create_topic(**{"max.message.bytes": "500"})
    relay = shop.relay(**{**secrets, "MAX_TRIES": "1"})
    shop.ins("good", {"n": 1})
    shop.ins("bad", {"n": os.urandom(3000).hex()})  # parked, dead, and an alert that reaches nobody
    shop.until(lambda: shop.count(2) == 1)
    proxy.cut()
    shop.until(lambda: relay.logged("binlog connection lost"))
    proxy.mend()
    shop.ins("good", {"n": 2})
    shop.wait_sent(2)
    for command in (
        ["status"],
        ["doctor"],
        ["diagnose"],
        ["position", "show"],
        ["dead", "list"],
        ["audit", "--since", "1h"],
        ["schema", "--grants"],
        ["alert", "test"],
        ["compensate", "--older-than", "0s"],
        ["version"],
    ):
        clean(shop.run(*command, **secrets))
    assert relay.terminate() == 0
    clean(relay)


def broken(secrets: dict[str, str]) -> Iterator[dict[str, str]]:
    url = secrets["DATABASE_URL"]
    yield {"DATABASE_URL": url.replace(USER, "root")}  # a password that is not root's
    yield {"DATABASE_URL": url.replace("mysql+pymysql", "postgresql")}
    yield {"DATABASE_URL": url.replace("mysql+pymysql://", "")}
    yield {"DATABASE_URL": url + "?ssl_caa=x"}
    yield {"DATABASE_URL": url.replace("127.0.0.1", "no-such-host.invalid")}
    yield {"DATABASE_URL": url.rpartition("/")[0]}
    yield {"KAFKA_BOOTSTRAP": "127.0.0.1:9"}
    yield {"KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT", "KAFKA_SASL_MECHANISMS": "PLAIN"}
    yield {"KAFKA_SASL_PASSWORDS": KAFKA}
    yield {"HTTP_TOKEN": TOKEN[:10]}
    yield {"ALERTS": f"nosuch://me:{WORDS[3]}@127.0.0.1/{WORDS[3]}"}
    yield {"ALERTS": WORDS[3]}
    yield {"TOPIC": "not a topic"}


def test_while_settings_are_wrong(
    mysql_shop: Harness, secrets: dict[str, str], tmp_path: Path
) -> None:
    shop = mysql_shop
    shop.ins("a", {"n": 1})
    for wrong in broken(secrets):
        for command in (["start", "--until-current"], ["compensate", "--older-than", "0s"]):
            process = shop.spawn(*command, **{**secrets, **wrong})
            process.wait(120)
            clean(process)
    file = tmp_path / "relay.toml"
    file.write_text(f'database_url = "{secrets["DATABASE_URL"]}"\nhttp_token = {WORDS[2]}\n')
    clean(shop.run("start", "--config", str(file), **secrets))
    file.write_text(f'http_tokn = "{WORDS[2]}"\n[kafka]\n"sasl.pasword" = "{WORDS[1]}"\n')
    clean(shop.run("start", "--config", str(file), **secrets))
