"""The development servers' housekeeping, without a server and without a download."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dev import __main__, cache, docker, handshake, ports, process, stack, workers
from dev.broker import new_uuid
from dev.console import DevError, run
from dev.kafka import Kafka
from dev.mysql import MySQL
from dev.server import ProcessServer

SERVE = (
    "import signal, socket, sys, time\n"
    "home, port, mode = sys.argv[1:4]\n"
    "if mode == 'deaf': signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "if mode == 'broken': sys.exit('no such flag')\n"
    "listener = socket.create_server(('127.0.0.1', int(port)))\n"
    "print('serving', flush=True)\n"
    "while True: listener.accept()[0].close()\n"
)


class Sleeper(ProcessServer):
    """A server that accepts and says nothing."""

    title = "Sleeper"

    def command(self, options: Sequence[str]) -> list[str]:
        mode = options[0] if options else "plain"
        return [sys.executable, "-S", "-c", SERVE, f"{self.home}/data", str(self.port), mode]

    def probe(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CDC_RELAY_DEV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Sleeper]:
    server = Sleeper(tmp_path / "sleeper", die_with_parent=True)
    yield server
    server.kill()


def fail(path: Path) -> None:
    (path / "half").write_text("half")
    raise DevError("network is down")


# The cache


def test_cache_directory_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.directory() == tmp_path / "cache"
    monkeypatch.delenv("CDC_RELAY_DEV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.directory() == tmp_path / "xdg/cdc-relay"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.directory() == tmp_path / ".cache/cdc-relay"


def test_failed_build_leaves_nothing_and_the_next_one_works(cache_directory: Path) -> None:
    with pytest.raises(DevError, match="network"):
        cache.artefact("thing", fail)
    assert [path.name for path in cache_directory.iterdir()] == ["thing.lock"]
    tree = cache.artefact("thing", lambda path: (path / "file").touch())
    assert [path.name for path in tree.iterdir()] == ["file"]


def test_killed_build_leaves_nothing_that_counts(cache_directory: Path) -> None:
    code = (
        "import os\nfrom dev import cache\n"
        "def build(path):\n (path / 'half').write_text('half')\n os.kill(os.getpid(), 9)\n"
        "cache.artefact('thing', build)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(cache_directory.glob("thing.partial-*"))) == 1
    tree = cache.artefact("thing", lambda path: None)
    assert list(tree.iterdir()) == []
    assert list(cache_directory.glob("thing.partial-*")) == []


def test_two_who_want_the_same_build_it_once() -> None:
    built = []

    def build(path: Path) -> None:
        built.append(path)
        time.sleep(0.1)

    with ThreadPoolExecutor(4) as pool:
        trees = list(pool.map(lambda _: cache.artefact("thing", build), range(4)))
    assert len(built) == 1
    assert len(set(trees)) == 1


# Ports


def test_port_is_chosen_once_and_kept(tmp_path: Path) -> None:
    port = ports.kept(tmp_path / "home")
    assert ports.FIRST <= port <= ports.LAST
    assert ports.kept(tmp_path / "home") == port
    assert ports.kept(tmp_path / "home", wanted=port + 1) == port + 1
    assert ports.kept(tmp_path / "home") == port + 1


def test_port_of_another_home_or_in_use_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        taken = busy.getsockname()[1]
        first, second = ports.kept(tmp_path / "first"), 0
        candidates = [first, taken, first - 1, first + 1]
        monkeypatch.setattr("dev.ports.random.sample", lambda *_: candidates)
        second = ports.kept(tmp_path / "second")
    assert second in candidates[2:]


def test_port_of_a_removed_home_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = ports.kept(tmp_path / "first")
    (tmp_path / "first/port").unlink()
    monkeypatch.setattr("dev.ports.random.sample", lambda *_: [port])
    assert ports.kept(tmp_path / "second") == port
    with pytest.raises(DevError, match="no free loopback port"):
        ports.kept(tmp_path / "third")


# Processes


def test_foreign_process_is_neither_seen_nor_signalled(sleeper: Sleeper) -> None:
    other = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        sleeper.home.mkdir()
        (sleeper.home / "pid").write_text(str(other.pid))
        assert sleeper.pid is None
        sleeper.kill()
        sleeper.stop()
        time.sleep(0.05)
        assert other.poll() is None
    finally:
        other.communicate(b"\n")
    assert other.returncode == 0


def test_home_with_a_longer_name_is_another_home(tmp_path: Path) -> None:
    code = "import sys; sys.stdin.read()"
    argv = [sys.executable, "-S", "-c", code, f"{tmp_path}/mysql2/data"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as other:
        assert not process.is_ours(other.pid, tmp_path / "mysql")
        assert process.is_ours(other.pid, tmp_path / "mysql2")


def test_server_keeps_port_over_stop_and_kill(sleeper: Sleeper) -> None:
    sleeper.start()
    first, port = sleeper.pid, sleeper.port
    assert first is not None
    sleeper.start()
    assert sleeper.pid == first
    with pytest.raises(DevError, match="already running"):
        sleeper.start(["deaf"])
    sleeper.kill()
    assert not sleeper.alive
    sleeper.start()
    assert sleeper.pid != first
    sleeper.stop()
    assert not sleeper.alive
    assert Sleeper(sleeper.home).port == port


def test_another_object_controls_the_same_server(sleeper: Sleeper) -> None:
    sleeper.start()
    other = Sleeper(sleeper.home)
    assert other.pid == sleeper.pid
    other.stop()
    assert not sleeper.alive


def test_stop_kills_what_does_not_listen(sleeper: Sleeper) -> None:
    sleeper.start(["deaf"])
    began = time.monotonic()
    sleeper.stop(0.2)
    assert not sleeper.alive
    assert time.monotonic() - began < 5


def test_paused_server_can_be_resumed_and_stopped(sleeper: Sleeper) -> None:
    sleeper.start()
    sleeper.pause()
    state = Path(f"/proc/{sleeper.pid}/stat")
    deadline = time.monotonic() + 5
    while ") T " not in state.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ") T " in state.read_text()
    sleeper.resume()
    sleeper.wait_ready(5)
    sleeper.pause()
    began = time.monotonic()
    sleeper.stop(60)
    assert not sleeper.alive
    assert time.monotonic() - began < 30


def test_failed_start_shows_the_log(sleeper: Sleeper) -> None:
    with pytest.raises(DevError, match=r"(?s)Sleeper in .* ended:.*no such flag.*server\.log"):
        sleeper.start(["broken"])


def test_silence_is_an_error_after_the_timeout(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper.start()
    monkeypatch.setattr(sleeper, "probe", lambda: False)
    with pytest.raises(DevError, match="does not answer"):
        sleeper.wait_ready(0.1)


def test_two_starts_at_once_make_one_server(sleeper: Sleeper) -> None:
    twins = [sleeper, Sleeper(sleeper.home)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.start(), twins))
        assert twins[0].pid == twins[1].pid
        assert sleeper.log.read_text().count("serving") == 1


def test_server_dies_with_its_parent_only_when_asked(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.unit.test_dev import Sleeper\n"
        "for name in ('dies', 'stays'):\n"
        " Sleeper(Path(sys.argv[1]) / name, die_with_parent=name == 'dies').start()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    dies, stays = Sleeper(tmp_path / "dies"), Sleeper(tmp_path / "stays")
    try:
        deadline = time.monotonic() + 5
        while dies.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not dies.alive
        assert stays.alive
    finally:
        stays.delete()
    assert not stays.home.exists()


# Readiness


def serve_once(*packets: bytes) -> int:
    """Play a database that sends these packets, the first at once, the others one per question."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        with listener, listener.accept()[0] as wire:
            for number, packet in enumerate(packets):
                wire.sendall(len(packet).to_bytes(3, "little") + bytes([number]) + packet)
                wire.recv(1000)

    threading.Thread(target=talk, daemon=True).start()
    return int(listener.getsockname()[1])


GREETING = b"\x0a9.7.4\0" + bytes(40)


@pytest.mark.parametrize(
    ("packets", "ready"),
    [
        ([GREETING, b"\0\0\0\2\0\0\0", b"\1"], True),
        ([GREETING, b"\xfemysql_native_password\0salt", b"\0\0\0\2\0\0\0", b"\1"], True),
        ([GREETING, b"\xff" + struct.pack("<H", 1045) + b"#28000denied"], True),
        ([GREETING, b"\xff" + struct.pack("<H", 1053) + b"#08S01shutdown"], False),
        ([GREETING, b"\0\0\0\2\0\0\0", b"\xff\x15\x04"], False),
        ([b"\xff\x6a\x04Host is blocked"], False),
        ([], False),
    ],
)
def test_database_is_ready_when_it_runs_a_statement(packets: list[bytes], ready: bool) -> None:
    assert handshake.answers(serve_once(*packets)) is ready


def test_closed_port_is_not_ready(tmp_path: Path) -> None:
    assert not handshake.answers(ports.kept(tmp_path))


# Names, clusters, commands


def test_database_url_quotes_what_needs_it(tmp_path: Path) -> None:
    server = MySQL(tmp_path)
    assert server.url() == f"mysql+pymysql://root@127.0.0.1:{server.port}/shop"
    assert server.url("x", "a b", "p@s/s").startswith("mysql+pymysql://a%20b:p%40s%2Fs@")


def test_kafka_cluster_of_three(tmp_path: Path) -> None:
    cluster = Kafka(tmp_path, brokers=3)
    again = Kafka(tmp_path)
    assert len(again.brokers) == 3
    assert again.bootstrap == cluster.bootstrap
    assert again.cluster_id() == cluster.cluster_id()
    assert not again.alive
    settings = cluster.settings(cluster.brokers[1])
    assert settings["transaction.state.log.min.isr"] == "2"
    assert settings["offsets.topic.replication.factor"] == "3"
    assert settings["node.id"] == "2"
    assert settings["controller.quorum.voters"].count("@127.0.0.1:") == 3


def test_single_broker_needs_no_copies(tmp_path: Path) -> None:
    cluster = Kafka(tmp_path)
    settings = cluster.settings(cluster.brokers[0])
    assert settings["transaction.state.log.min.isr"] == "1"
    assert {value for key, value in settings.items() if "replication.factor" in key} == {"1"}


def test_kafka_ids_are_no_options() -> None:
    ids = {new_uuid() for _ in range(500)}
    assert len(ids) == 500
    assert all(len(one) == 22 and not one.startswith("-") for one in ids)


@pytest.mark.parametrize(
    ("available", "group", "expected"),
    [(23, "max", 3), (9, "max", 2), (1, "max", 1), (23, "9", 2), (23, None, 3), (None, None, 3)],
)
def test_workers_fit_into_memory(
    tmp_path: Path, available: int | None, group: str | None, expected: int
) -> None:
    cgroup = tmp_path / "sys/fs/cgroup"
    for folder in (tmp_path / "proc", cgroup):
        folder.mkdir(parents=True)
    if available is not None:
        line = f"MemTotal: 1 kB\nMemAvailable: {available * 1024**2} kB\n"
        (tmp_path / "proc/meminfo").write_text(line)
    if group is not None:
        limit = group if group == "max" else str(int(group) * 1024**3)
        (cgroup / "memory.max").write_text(limit + "\n")
        (cgroup / "memory.current").write_text("1000\n")
    assert workers.count(tmp_path) == expected


def test_failed_command_is_one_error_with_its_output() -> None:
    with pytest.raises(DevError, match="exit code 3:\nboom"):
        run([sys.executable, "-S", "-c", "import sys; print('boom'); sys.exit(3)"])
    with pytest.raises(DevError, match="no-such-command is not installed"):
        run(["no-such-command"])


def test_env_without_servers_says_what_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["env", "--home", str(tmp_path / "none")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "python3 -m dev up" in err


def test_env_prints_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ports.kept(tmp_path / "mysql", wanted=21001)
    ports.kept(tmp_path / "kafka/broker-1", wanted=21002)
    assert __main__.main(["env", "--home", str(tmp_path)]) == 0
    url = "mysql+pymysql://root@127.0.0.1:21001/shop"
    assert capsys.readouterr().out.splitlines() == [
        f"export CDC_RELAY_DATABASE_URL={url}",
        "export CDC_RELAY_KAFKA_BOOTSTRAP=127.0.0.1:21002",
        f"export CDC_RELAY_TEST_MYSQL_URL={url}",
        "export CDC_RELAY_TEST_KAFKA_BOOTSTRAP=127.0.0.1:21002",
    ]


def test_unknown_server_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["up", "--only", "postgres"])
    assert "'postgres' is none of mysql, kafka, mariadb" in capsys.readouterr().err


# Docker


DOCKER = """#!/bin/sh
echo "$*" >>"$DOCKER_CALLS"
case "$*" in
  info) exit ${DOCKER_INFO:-0} ;;
  *" ps "*) echo mysql; echo kafka ;;
  *" port mysql "*) echo 127.0.0.1:3306 ;;
  *" port kafka "*) echo 127.0.0.1:9092 ;;
esac
"""


@pytest.fixture
def docker_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a docker command on PATH that only notes what it is asked."""
    command = tmp_path / "bin/docker"
    command.parent.mkdir()
    command.write_text(DOCKER)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def test_docker_gives_the_same_environment(
    docker_calls: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(tmp_path / "home")]
    assert __main__.main(["up", "--docker", "--only", "mysql,kafka", *home]) == 0
    assert "up --detach --wait mysql kafka" in docker_calls.read_text()
    assert capsys.readouterr().out.splitlines() == [
        "export CDC_RELAY_DATABASE_URL=mysql+pymysql://root@127.0.0.1:3306/shop",
        "export CDC_RELAY_KAFKA_BOOTSTRAP=127.0.0.1:9092",
        "export CDC_RELAY_TEST_MYSQL_URL=mysql+pymysql://root@127.0.0.1:3306/shop",
        "export CDC_RELAY_TEST_KAFKA_BOOTSTRAP=127.0.0.1:9092",
    ]
    assert __main__.main(["status", *home]) == 0
    assert __main__.main(["down", "--delete", *home]) == 0
    assert "down --volumes" in docker_calls.read_text()
    assert not (tmp_path / "home").exists()


def test_docker_is_taken_where_nothing_can_be_fetched(
    docker_calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dev.apt.is_debian", lambda: False)
    stack.up(tmp_path / "home", ["mysql"])
    assert stack.in_docker(tmp_path / "home")
    monkeypatch.setenv("DOCKER_INFO", "1")
    with pytest.raises(DevError, match="install Docker"):
        stack.up(tmp_path / "other", ["mysql"])
    assert not (tmp_path / "other").exists()


def test_docker_without_a_daemon_is_one_clear_error(
    docker_calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_INFO", "1")
    assert not docker.answers()
    with pytest.raises(DevError, match="no Docker daemon answers"):
        docker.up(["mysql"])
