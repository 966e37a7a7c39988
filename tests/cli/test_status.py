"""`kvcluster status`: again and again, with its exit status, and where nothing listens."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcluster import Client
from kvcluster.cli import coordinator_args, status
from kvcluster.cli.main import main
from kvcluster.cli.status import StatusExit, exit_of
from kvcluster.core.ids import ShardId
from tests.cli import screens
from tests.cli.front import Served

ROOT = Path(__file__).parents[2]


def looks(monkeypatch: pytest.MonkeyPatch, *between: Callable[[], object]) -> list[float]:
    """Has the watch look once more than there are `between`, which are called in its pauses; then a person interrupts
    it. Returns the pauses."""
    pauses: list[float] = []

    def pause(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) > len(between):
            raise KeyboardInterrupt
        between[len(pauses) - 1]()

    monkeypatch.setattr(status, "_pause", pause)
    return pauses


def test_watch_shows_it_again_until_it_is_interrupted(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses = looks(monkeypatch, client.clear)
    assert served.run("status", "--watch", "5", token="operator") == 0
    said = capsys.readouterr().out
    assert said.count("serving, up") == 2 and "80 blocks" in said and "\x1b" not in said
    assert pauses == [5.0, 5.0]


def test_watch_on_a_terminal_clears_it_first(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    looks(monkeypatch)
    assert served.run("status", "--watch") == 0
    assert capsys.readouterr().out.startswith("\x1b[H\x1b[2J")


def test_watch_for_machines_is_an_object_a_line(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks(monkeypatch, lambda: None)
    assert served.run("status", "--watch", "--json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["blocks"] for line in lines] == [80, 80]


def test_watch_outlives_the_coordinator(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks(monkeypatch, served.cluster.stop_coordinator, served.cluster.start_coordinator)
    assert served.run("status", "--watch") == 0
    said = capsys.readouterr()
    assert said.out.count(f"{served.address}  ") == 2
    assert said.err == f"kvcluster: no cluster answers at {served.address}; `kvcluster up` starts one\n"


@pytest.mark.parametrize("pause", ["0", "-1", "soon", "nan"])
def test_a_pause_is_a_number_of_seconds(pause: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["status", f"--watch={pause}"])
    assert end.value.code == 2
    assert f"'{pause}' is no number of seconds above 0" in capsys.readouterr().err


def test_the_exit_status_says_whether_the_cluster_is_as_configured() -> None:
    assert exit_of(screens.well()) is StatusExit.AS_CONFIGURED
    assert exit_of(screens.fresh()) is StatusExit.AS_CONFIGURED
    assert exit_of(screens.in_trouble()) is StatusExit.DEGRADED == 3
    trouble = screens.in_trouble()
    well = {"lost_shards": [], "waiting": []}
    shards = [shard for shard in trouble["shards"] if shard["state"] != "lost"]
    assert exit_of(trouble | well | {"shards": shards}) is StatusExit.DEGRADED, "a shard is without its disk tier"
    lost = [shard | {"state": "lost"} for shard in trouble["shards"]]
    assert exit_of(trouble | {"shards": lost}) is StatusExit.NOT_SERVING == 1


@pytest.mark.parametrize(
    "command",
    [
        *(["off"], ["on"], ["clear", "--yes"], ["purge", "--model", "m", "--yes"], ["policy"], ["weights"]),
        *(["pins"], ["unpin", "--pin", "3fa9c1"]),
        *(["drain", "shard-0"], ["pin", "--model", "m", "--prompt-file", "FILE"], ["status"]),
        *(["unpin", "--model", "m", "--prompt-file", "FILE"], ["lookup", "--prompt-file", "FILE"], ["doctor"]),
        *(["explain", "--prompt-file", "FILE"], ["breakeven", "--model", "CONFIG", "--prefill", "100"]),
    ],
    ids=lambda command: command[0],
)
def test_a_refused_connection_is_not_waited_for(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def waited(*_: object) -> None:
        raise AssertionError("it waits for a coordinator that is not there")

    monkeypatch.setattr("kvcluster.transport.rpc.Connection.wait_ready", waited)
    (tmp_path / "FILE").write_text("[1, 2, 3]", encoding="utf-8")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    (tmp_path / "CONFIG").write_text(json.dumps({**sizes, "dtype": "float32"}), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main([*command, "--port", str(port)]) == 1
    said = capsys.readouterr()
    assert f"127.0.0.1:{port}" in said.out + said.err and "kvcluster up" in said.out + said.err


def test_a_host_that_is_not_known_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "--address", "no-such-host.invalid:7070", "--encryption", "none"]) == 1
    assert "the host of no-such-host.invalid:7070 is not known" in capsys.readouterr().err


def test_a_host_that_is_silent_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    coordinator_args.check_listens("10.255.255.1:7070", 100)


@pytest.mark.parametrize("command", [["status"], ["doctor"], ["weights"], ["explain", "--prompt-file", "-"]])
def test_what_is_shown_needs_only_the_base_install(served: Served, client: Client, command: list[str]) -> None:
    absent = ("rich", "ray", "torch", "transformers", "numpy", "zmq", "msgspec", "matplotlib", "cryptography")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r})); "
        "from kvcluster.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--address", served.address],
        capture_output=True,
        text=True,
        cwd=ROOT,
        input="[1, 2, 3, 4]",
        env={"KVCLUSTER_TOKEN": "default", "PATH": ""},
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == (1 if command == ["doctor"] else 0)  # its shards here have no address
    assert done.stdout


def test_a_shard_that_restarted_is_shown_with_when(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run("status", token="operator") == 0
    assert "restarted" not in capsys.readouterr().out
    for count in (1, 2):
        served.cluster.stop_shard(ShardId("shard-0"))
        served.cluster.start_shard(0)
        served.cluster.wait_until(lambda count=count: client.status()["shards"][0]["restarts"] == count)
    for token in ("operator", "default"):
        assert served.run("status", token=token) == 0
        assert "restarted 2 times, the last time" in capsys.readouterr().out
    assert served.run("status", "--json") == 0
    shards = {shard["shard"]: shard for shard in json.loads(capsys.readouterr().out)["shards"]}
    assert {name: shard["restarts"] for name, shard in shards.items()} == {"shard-0": 2, "shard-1": 0}
    assert shards["shard-0"]["restarted_ns_ago"] > 0
