"""The command line as a person uses it: what it prints, what it refuses, and with which words."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import kvcluster
from kvcluster.cli.main import main
from kvcluster.core.messages import GetStatus, Status
from kvcluster.errors import CallerError, CredentialError
from kvcluster.runtime.auth import digest, new_token, parse_tokens, token_line
from kvcluster.runtime.private_files import ACTORS, derived_key
from kvcluster.transport.base import Deadline
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.rpc import Connection
from kvcluster.wire.methods import COORDINATOR
from tests.actors.processes import processes, title
from tests.actors.worker import PATIENT, SPEC, kv, tokens
from tests.ports import free_port
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
HIDE = "import sys; sys.modules[{0!r}] = None; from kvcluster.cli.main import main; sys.exit(main(sys.argv[1:]))"


def kvc(*arguments: str, hidden: str = "", token: str | None = None) -> subprocess.CompletedProcess[str]:
    """`kvcluster ARGUMENTS` in a process of its own; in a Python without the package `hidden`, if one is named."""
    program = ["-c", HIDE.format(hidden)] if hidden else ["-m", "kvcluster.cli.main"]
    env = {name: value for name, value in os.environ.items() if name != "KVCLUSTER_TOKEN"}
    if token is not None:
        env["KVCLUSTER_TOKEN"] = token
    return subprocess.run(
        [sys.executable, *program, *arguments], capture_output=True, text=True, cwd=ROOT, env=env, check=False
    )


# ------------------------------------------------------------------------------------- without a cluster


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        (["up", "--shard", "2"], "usage: kvcluster up "),
        (["stauts"], "usage: kvcluster COMMAND "),
        (["status", "foo"], "usage: kvcluster status "),
        (["bench", "trace", "a.jsonl", "foo"], "usage: kvcluster bench trace "),
        (["--json", "status"], "usage: kvcluster COMMAND "),
    ],
)
def test_an_unknown_command_or_option_is_named_with_the_usage_of_its_command_and_never_guessed(
    arguments: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(usage)
    assert any(word in said.splitlines()[1] for word in arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["stauts"], "kvcluster: error: there is no command 'stauts'; did you mean 'status'?"),
        (["xyzzy"], "kvcluster: error: there is no command 'xyzzy'"),
        (["bench", "trase"], "kvcluster bench: error: there is no command 'trase'; did you mean 'trace'?"),
    ],
)
def test_a_command_that_does_not_exist_gets_the_name_of_the_nearest(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[1] == error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ram-bytes", "1Gig"], "shard.ram_bytes: '1Gig' is no size; write bytes, or a number with KiB, MiB"),
        (["--ram-bytes", "1KiB"], "shard.ram_bytes must be at least 4KiB"),
        (["--ram-bytes", "1024TiB"], "1 shard(s) with 1024 TiB of pools in all do not fit"),
        (["--shards", "0"], "shards must be at least 1"),
        (["--port", "0"], "needs a fixed port, so that later commands find it: give --port"),
        (["--port", "70000"], "server.port must be between 0 and 65535"),
        (["--host", "0.0.0.0", "--encryption", "none"], "refusing to listen on 0.0.0.0 without a token file"),
        (["--host", "0.0.0.0", "--insecure"], "nothing says how their traffic is encrypted"),
        (["--token-file", "nowhere"], f"cannot read the token file {Path('nowhere').absolute()}"),
        (["--config", "nowhere.toml"], "cannot read the configuration nowhere.toml"),
    ],
)
def test_up_says_what_is_wrong_with_a_setting(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--port", str(free_port()), *arguments]) == 1
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.err.startswith("kvcluster: ")
    assert said.out == ""


def test_up_says_that_a_port_is_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["up", "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_status_and_down_say_that_nothing_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    port = str(free_port())
    assert main(["status", "--port", port]) == 1
    assert f"no cluster answers at 127.0.0.1:{port}; `kvcluster up` starts one" in capsys.readouterr().err
    assert main(["down", "--port", port]) == 1
    assert f"nothing to stop: `kvcluster up` started nothing on port {port}" in capsys.readouterr().err


def test_status_refuses_an_address_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", "localhost"]) == 1
    assert "'localhost' is not host:port" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["up", "down"])
def test_a_missing_extra_is_named_with_the_command_that_mends_it(command: str) -> None:
    done = kvc(command, "--port", "7071", hidden="ray")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "kvcluster: this needs ray, which is not installed: pip install 'kvcluster[cluster]'\n"


def test_token_makes_a_secret_and_the_line_that_admits_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "--tenant", "team-a"]) == 0
    first = Credential.parse(capsys.readouterr().out)
    assert main(["token", "--tenant", "team-a"]) == 0
    assert Credential.parse(capsys.readouterr().out).secret != first.secret
    assert first.line.endswith("  team-a")
    assert first.secret not in first.line


def test_token_refuses_a_tenant_that_no_file_can_hold(capsys: pytest.CaptureFixture[str]) -> None:
    for tenant in ("team a", "team operator"):
        assert main(["token", "--tenant", tenant]) == 1
        assert f"{tenant!r} is not a valid tenant name" in capsys.readouterr().err


def test_token_makes_an_operators_line_when_asked_and_only_then(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "--tenant", "ops", "--operator"]) == 0
    printed = capsys.readouterr().out
    credential = Credential.parse(printed)
    assert printed.startswith("token (give it to the operator")
    tenants, operators, *_ = parse_tokens(credential.line)
    assert (tenants, operators) == ({digest(credential.secret): "ops"}, {digest(credential.secret)})
    assert main(["token", "--tenant", "ops"]) == 0
    assert parse_tokens(Credential.parse(capsys.readouterr().out).line).operators == frozenset()


def test_token_writes_a_new_file_that_its_owner_alone_reads_and_the_program_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret, token = tmp_path / "secret", tmp_path / "token"
    before = os.umask(0)  # as lax as it may be
    try:
        assert main(["token", "--secret", "--to", str(secret)]) == 0
        assert main(["token", "--tenant", "team-a", "--to", str(token)]) == 0
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (secret, token)] == [0o600] * 2
    assert len(derived_key(str(secret), ACTORS)) == 64
    printed = capsys.readouterr().out
    wrote, line = printed.splitlines()
    assert wrote == f"wrote {secret}" and parse_tokens(line).tenants == {digest(token.read_text().strip()): "team-a"}
    assert secret.read_text().strip() not in printed and token.read_text().strip() not in printed
    kept = secret.read_text()
    assert main(["token", "--secret", "--to", str(secret)]) == 1
    assert "is there already" in capsys.readouterr().err and secret.read_text() == kept
    assert main(["token", "--secret", "--to", str(tmp_path / "none" / "secret")]) == 1
    assert "cannot write" in capsys.readouterr().err


# ----------------------------------------------------------------------------- with one, and two tenants


@dataclass(frozen=True)
class Credential:
    """The output of `kvcluster token`."""

    secret: str
    line: str

    @classmethod
    def parse(cls, printed: str) -> Credential:
        _, secret, _, line = printed.splitlines()
        return cls(secret.strip(), line.strip())


@dataclass(frozen=True)
class Up:
    """A cluster that the command line started."""

    port: str
    said: list[str]
    tenants: Mapping[str, Credential]
    token_file: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Two shards for two tenants, started by two impatient people at once."""
    tenants = {name: Credential.parse(kvc("token", "--tenant", name).stdout) for name in ("red", "blue")}
    token_file = tmp_path_factory.mktemp("credentials") / "tokens"
    token_file.write_text("# who may\n" + "".join(f"{t.line}\n" for t in tenants.values()), encoding="utf-8")
    port = str(free_port())
    up = ["up", "--shards", "2", "--ram-bytes", "64MiB", "--port", port, "--token-file", str(token_file)]
    command = [sys.executable, "-m", "kvcluster.cli.main", *up]
    try:
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
        said = [process.communicate()[0] for process in both]
        assert [process.returncode for process in both] == [0, 0]
        yield Up(port, said, tenants, token_file)
    finally:
        kvc("down", "--port", port)


@pytest.mark.cluster
def test_up_starts_one_cluster_however_many_ask_and_says_how_to_go_on(cluster: Up) -> None:
    first, *rest = zip(*(said.splitlines() for said in cluster.said), strict=True)
    assert sorted(first) == [f"already up at {cluster.address}: 2 shard(s)", f"up at {cluster.address}: 2 shard(s)"]
    on = f"`kvcluster status --port {cluster.port}` shows it, `kvcluster down --port {cluster.port}` stops it"
    assert rest == [(on, on)]


def admits(cluster: Up, token: str) -> bool:
    connection = Connection(cluster.address, Credentials(token))
    try:
        return isinstance(connection.ask(COORDINATOR["GetStatus"], GetStatus(), Deadline.after_ms(20_000)), Status)
    except CredentialError:
        return False
    finally:
        connection.close()


@pytest.mark.cluster
def test_a_token_is_added_and_revoked_while_the_cluster_runs(cluster: Up) -> None:
    lines, green = cluster.token_file.read_text(), new_token()
    assert not admits(cluster, green)
    cluster.token_file.write_text(lines + token_line(green, "green") + "\n")
    eventually(lambda: admits(cluster, green))
    cluster.token_file.write_text(lines)
    eventually(lambda: not admits(cluster, green))
    assert admits(cluster, cluster.tenants["red"].secret)


@pytest.mark.cluster
def test_status_prints_a_row_a_shard(cluster: Up) -> None:
    done = kvc("status", "--port", cluster.port, token=cluster.tenants["red"].secret)
    assert (done.returncode, done.stderr) == (0, "")
    head, whose, *releases, columns, one, two = done.stdout.splitlines()
    assert head.startswith(f"{cluster.address}  serving, up ")
    assert whose.startswith("figures of tenant red alone")
    assert columns.split() == ["shard", "state", "address"], "what the shards hold is other tenants', too"
    assert [row.split()[:2] for row in (one, two)] == [["shard-0", "up"], ["shard-1", "up"]]
    (alike,) = releases  # no process differs
    assert alike.startswith(f"release {kvcluster.__version__}")
    assert alike.endswith("coordinator, shard-0, shard-1")


@pytest.mark.cluster
def test_status_as_json_says_the_same_to_machines(cluster: Up, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(cluster.tenants["red"].secret + "\n")
    done = kvc("status", "--address", cluster.address, "--json", "--token-from", str(token))
    status = json.loads(done.stdout)
    assert [(shard["shard"], shard["capacity_bytes"]) for shard in status["shards"]] == [
        ("shard-0", 64 * 2**20),
        ("shard-1", 64 * 2**20),
    ]
    assert {"hit_rate", "state", "counters"} <= status.keys()


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("token", "sentence"),
    [(None, "this cluster requires a token"), ("forged", "the cluster does not know this token")],
)
def test_a_missing_or_wrong_token_is_refused_in_a_sentence(cluster: Up, token: str | None, sentence: str) -> None:
    done = kvc("status", "--port", cluster.port, token=token)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"kvcluster: {sentence}")
    with pytest.raises(CredentialError, match=sentence):
        kvcluster.connect(cluster.address, SPEC, token=token)


@pytest.mark.cluster
def test_two_tenants_do_not_share_and_cannot_tell(cluster: Up) -> None:
    red, blue = (
        kvcluster.connect(cluster.address, SPEC, token=t.secret, config=PATIENT) for t in cluster.tenants.values()
    )
    with red, blue:
        assert red.store(tokens(1), kv(1)).blocks == 8
        assert red.flush()
        assert red.lookup(tokens(1)).blocks == 8
        assert blue.lookup(tokens(1)).blocks == 0
        assert [str(block) for block in blue.explain(tokens(1))] == [str(block) for block in blue.explain(tokens(2))]
        assert blue.store(tokens(1), kv(3)).deduplicated == 0


@pytest.mark.cluster
def test_a_grant_lets_another_tenant_read_until_it_is_taken_back(cluster: Up) -> None:
    """And a token that is read-only reads its own tenant's KV: over gRPC and tcp, of processes of their own."""
    lines, looks = cluster.token_file.read_text(), new_token()
    red, blue = cluster.tenants["red"].secret, cluster.tenants["blue"].secret
    with kvcluster.connect(cluster.address, SPEC, token=red, config=PATIENT) as owner:
        assert owner.store(tokens(5), kv(5)).blocks == 8 and owner.flush()
        granted = lines + token_line(looks, "red", read_only=True) + "\ngrant  blue  reads  red\n"
        cluster.token_file.write_text(granted)
        eventually(lambda: admits(cluster, looks))
        for token, reads in ((blue, "red"), (looks, None)):
            with kvcluster.connect(cluster.address, SPEC, token=token, reads=reads, config=PATIENT) as reader:
                out = torch.zeros_like(kv(5))
                eventually(lambda at=reader, into=out: at.load(tokens(5), into) == len(tokens(5)))
                assert torch.equal(out, kv(5)) and reader.read_only
                with pytest.raises(CallerError):
                    reader.store(tokens(6), kv(6))
        with pytest.raises(CallerError, match="may not read the KV of tenant 'blue'"):
            kvcluster.connect(cluster.address, SPEC, token=red, reads="blue", config=PATIENT)
        with kvcluster.connect(cluster.address, SPEC, token=blue, reads="red", config=PATIENT) as reader:
            cluster.token_file.write_text(lines)
            eventually(lambda: "grant  blue  reads  red" in str(reader.lookup(tokens(5)).reason))
            assert reader.load(tokens(5), torch.zeros_like(kv(5))) == 0, "a miss, which breaks no application"
        assert owner.lookup(tokens(5)).blocks == 8


@pytest.mark.cluster
def test_down_ends_it_and_keeps_its_logs(cluster: Up) -> None:
    done = kvc("down", "--port", cluster.port)
    assert (done.returncode, done.stdout) == (0, "down\n")
    for process in ("coordinator", "shard-0", "ray"):
        logs = kvc("logs", process, "--port", cluster.port)
        assert logs.stdout.startswith(f"==> {process}: "), logs.stderr
    assert kvc("status", "--port", cluster.port, token=cluster.tenants["red"].secret).returncode == 1


@pytest.mark.cluster
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_up_that_is_ended_half_way_leaves_nothing(end: signal.Signals) -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "kvcluster.cli.main", "up", "--port", port, "--ram-bytes", "16MiB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as up:
        assert up.stderr is not None
        assert up.stderr.readline().startswith("starting Ray")
        folder = Path(tempfile.gettempdir(), f"kvcluster-{os.getuid()}")
        eventually(lambda: (folder / port).exists() and list((folder / "logs" / port).glob("*/ray.log")))
        up.send_signal(end)
        up.communicate()
    assert up.returncode == 128 + end
    assert [path for path in folder.iterdir() if path.name.startswith(port)] == []
    assert not [pid for pid in processes() if str(folder / port) in title(pid)]
