"""Settings: three layers, and one clear line for everything wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_relay.config import Settings, load, seconds
from cdc_relay.errors import ConfigError

URL = "mysql+pymysql://relay:secret@db:3307/shop"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500ms", 0.5), ("30s", 30), ("10m", 600), ("2h", 7200), ("7d", 604800), (" 1.5s ", 1.5)],
)
def test_durations(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize(
    "text", ["", "10", "10 m", "m", "-1s", "1w", "1m30s", "0x1s", 10, 1.5, True]
)
def test_wrong_durations(text: object) -> None:
    with pytest.raises(ValueError, match=r"500ms"):
        seconds(text)


def test_later_layers_win(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text('name = "file"\ntable = "file_table"\nolder_than = "1m"\n')
    settings = load(
        file,
        environ={"CDC_RELAY_NAME": "variable", "CDC_RELAY_TABLE": "variable_table", "HOME": "/"},
        flags={"name": "flag", "table": None},
    )
    assert (settings.name, settings.table, settings.older_than) == ("flag", "variable_table", 60)


def test_kafka_properties_of_file_and_environment_are_merged(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(
        '[kafka]\n"linger.ms" = 3\n"socket.keepalive.enable" = true\n"client.id" = "f"\n'
    )
    settings = load(file, environ={"CDC_RELAY_KAFKA_CLIENT_ID": "e"}, flags={})
    assert settings.kafka == {
        "linger.ms": "3",
        "socket.keepalive.enable": "true",
        "client.id": "e",
    }


def test_variables_that_are_not_settings_are_left_alone() -> None:
    load(environ={"CDC_RELAY_TEST_MYSQL_URL": "x", "CDC_RELAY_CONFIG": "y", "CDC_RELAY_DEV_X": "z"})


def message(environ: dict[str, str] | None = None, **flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(environ=environ or {}, flags=flags)
    text = str(caught.value)
    assert "\n" not in text
    assert "secret" not in text
    return text


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"database_url": "nonsense:secret"}, "--database-url: database_url: is not a SQLAlchemy"),
        ({"database_url": "postgresql://u:secret@h/d"}, "only mysql and mariadb"),
        ({"database_url": "mysql://u:secret@h"}, "names no schema"),
        ({"table": "a.b.c"}, "'a.b.c' is not a table name"),
        ({"table": ""}, "is not a table name"),
        ({"topic": "x.{payload}"}, "topic: column payload cannot be used here: it is in the"),
        ({"topic": "x.{status}"}, "topic: column status cannot be used here: it changes after"),
        ({"topic": "x.{}"}, "topic: '' is not a column name"),
        ({"topic_column": "retry_count"}, "topic_column: column retry_count cannot be used here"),
        ({"partition_column": "a b"}, "partition_column: 'a b' is not a column name"),
        ({"routes": "nonsense"}, "--routes: routes: is not JSON"),
        ({"routes": [{"match": "x"}]}, "a route is a table with match"),
        ({"routes": [{"match": "(", "topic": "t"}]}, "routes: '(' is not a regular expression"),
        ({"routes": [{"match": "x", "topic": "{1}"}]}, "routes: match has no group 1"),
        ({"routes": [{"match": "x", "topic": "a b"}]}, "routes: 'a b' is not a topic name"),
        ({"extra_columns": "tenant"}, "'tenant' is not column:header or column:envelope"),
        ({"extra_columns": "tenant:value"}, "'tenant:value' is not column:header"),
        ({"extra_columns": "a:header:x,b:header:x"}, "extra_columns: header 'x' is there twice"),
        ({"extra_columns": "a:header:id"}, "'id' is a header of the record's own: write a:header"),
        ({"extra_columns": "a:envelope:payload"}, "'payload' is the envelope's own"),
        ({"extra_columns": "a_b:envelope", "format": "cloudevents"}, "'a_b' is no name of a Cloud"),
        ({"extra_columns": "a:envelope:data", "format": "cloudevents-structured"}, "'data' is no"),
        ({"extra_columns": "a:header:ce_id", "format": "cloudevents"}, "'ce_id' is a header"),
        ({"topic": "sp ace"}, "is not a topic name"),
        (
            {"name": "no/slash"},
            "--name: name: 'no/slash' cannot be part of a topic's name; letters",
        ),
        ({"name": "-x"}, "64 at most, a letter or digit first"),
        ({"name": "x" * 65}, "64 at most"),
        ({"cloudevents_source": "a b"}, "'a b' is not a URI reference"),
        ({"batch": 0}, "--batch"),
        ({"batch": True}, "--batch: batch: true is not a number"),
        ({"server_id": False}, "server_id: false is not a number"),
        ({"delivery": "maybe"}, "exactly_once"),
        ({"older_than": "5"}, "write 500ms"),
        (
            {"transaction_timeout": "500ms"},
            "--transaction-timeout: transaction_timeout: 0.5 s is not between 1 s and 2147483 s",
        ),
        ({"transaction_timeout": "30d"}, "2592000 s is not between"),
        ({"session_timeout": "0s"}, "session_timeout: 0 s is not between 1 s and 300 s"),
        ({"session_timeout": "2h"}, "7200 s is not between"),
        ({"heartbeat": "30s"}, "read_timeout must be longer than heartbeat"),
        ({"kafka": {"acks": "1"}}, "nothing lost needs acks=all"),
        ({"kafka": {"linger": {"ms": 1}}}, "quote dotted names"),
    ],
)
def test_wrong_values(flags: dict[str, object], expected: str) -> None:
    assert expected in message(**flags)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"CDC_RELAY_TABEL": "x"},
            "CDC_RELAY_TABEL: unknown variable; did you mean CDC_RELAY_TABLE",
        ),
        ({"CDC_RELAY_KAFKA_ACKS": "1"}, "acks cannot be set"),
        ({"CDC_RELAY_BATCH": "many"}, "CDC_RELAY_BATCH: batch:"),
    ],
)
def test_wrong_variables(environ: dict[str, str], expected: str) -> None:
    assert expected in message(environ)


@pytest.mark.parametrize("service", ["CDC_RELAY", "CDC_RELAY_HTTP", "CDC_RELAY_KAFKA"])
def test_what_kubernetes_adds_for_a_service_is_no_setting(service: str) -> None:
    links = {
        "SERVICE_HOST": "10.0.0.11",
        "SERVICE_PORT": "8080",
        "SERVICE_PORT_WEB": "8080",
        "PORT": "tcp://10.0.0.11:8080",
        "PORT_8080_TCP": "tcp://10.0.0.11:8080",
        "PORT_8080_TCP_PROTO": "tcp",
        "PORT_8080_TCP_PORT": "8080",
        "PORT_8080_TCP_ADDR": "10.0.0.11",
    }
    assert load(environ={f"{service}_{name}": value for name, value in links.items()}) == load(
        environ={}
    )


@pytest.mark.parametrize("name", ["PORT", "HTTP_PORT", "PORT_8080", "SERVICE", "SERVICE_HOSTS"])
def test_what_only_looks_like_it_is_an_error(name: str) -> None:
    assert f"CDC_RELAY_{name}: unknown variable" in message({f"CDC_RELAY_{name}": "8080"})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('tabel = "x"', "unknown key 'tabel'; did you mean table?"),
        ("table = ", "not valid TOML"),
        ('batch = "many"', "batch:"),
    ],
)
def test_wrong_files(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(file, environ={})
    assert str(file) in str(caught.value)
    assert expected in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration: No such file"):
        load(tmp_path / "none.toml", environ={})


def test_require_says_how_to_set_it() -> None:
    with pytest.raises(ConfigError, match="pass --kafka-bootstrap, set CDC_RELAY_KAFKA_BOOTSTRAP"):
        Settings(database_url=URL).require("database_url", "kafka_bootstrap")


def test_url_has_our_driver_and_the_password_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("p@ss word\n")
    settings = Settings(database_url="mariadb://relay@db/shop", database_password_file=file)
    assert settings.url().drivername == "mysql+pymysql"
    assert settings.url().password == "p@ss word"
    gone = Settings(database_url=URL, database_password_file=tmp_path / "none")
    with pytest.raises(ConfigError, match="database_password_file: cannot read"):
        gone.url()


def test_schema_and_table() -> None:
    assert Settings(database_url=URL).schema_and_table() == ("shop", "outbox_event")
    other = Settings(database_url=URL, table="other.events")
    assert other.schema_and_table() == ("other", "events")


def test_settings_are_frozen_and_documented() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().name = "x"
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize("password", ["p@ss/w", "a b@c"])
def test_a_password_that_is_not_encoded_is_refused_and_not_shown(password: str) -> None:
    url = f"mysql+pymysql://relay:s3cret:{password}@127.0.0.1:3306/shop"
    with pytest.raises(ConfigError, match="percent-encode") as caught:
        load(environ={"CDC_RELAY_DATABASE_URL": url})
    assert "s3cret" not in str(caught.value)
    assert "127.0.0.1" not in str(caught.value)
