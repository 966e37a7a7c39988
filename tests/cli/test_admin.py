"""`kvcluster drain`, `clear`, `purge`, `off` and `on` as a person uses them: what they ask, print and exit with."""

from __future__ import annotations

import io
import json
import socket
import sys
import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from kvcluster.cli import admin
from kvcluster.cli.admin import progress
from kvcluster.cli.main import main
from kvcluster.cli.prompt_args import layout_id
from kvcluster.cli.status_view import add_status
from kvcluster.cli.text_page import TextPage
from kvcluster.client import Client
from kvcluster.client.status import status_dict
from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import ShardInfo, ShardStatus, Status
from kvcluster.testing import MemoryCluster
from tests.cli.front import Served
from tests.client.build import SPEC, kv, prompt, spec_of
from tests.waiting import eventually


def shown(status: dict[str, Any]) -> list[str]:
    """The lines of the status, each sentence in one."""
    page = TextPage(None, colour=False)
    add_status(page, status, "there:7070")
    return str(page).splitlines()


class Terminal(io.StringIO):
    """Answers a question by typing this."""

    def isatty(self) -> bool:
        return True


def blocks(client: Client) -> int:
    return sum(client.lookup(prompt(8, seed)).blocks for seed in range(10))


# ------------------------------------------------------------------------------------------- forgetting


@pytest.mark.parametrize("answer", ["y\n", "Yes\n"])
def test_clear_asks_and_forgets_what_this_tenant_has(
    served: Served, client: Client, answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = served.cluster.client(SPEC, tenant="other")
    assert other.store(prompt(8), kv(8)).blocks == 8
    assert other.flush()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert served.run("clear") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"purge every block that this credential can see, at {served.address}? [y/N] ")
    assert said.endswith("80 block(s) purged\n")
    assert blocks(client) == 0
    assert other.lookup(prompt(8)).blocks == 8


@pytest.mark.parametrize("answer", ["\n", "n\n", "yikes\n"])
def test_without_a_yes_nothing_is_purged(
    served: Served, client: Client, answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert served.run("clear") == 1
    assert capsys.readouterr().err == "nothing was purged\n"
    assert blocks(client) == 80


@pytest.mark.parametrize("command", [["clear"], ["purge", "--model", "tiny"]])
def test_without_a_terminal_nothing_is_forgotten_unless_yes_is_said(
    served: Served,
    client: Client,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert served.run(*command) == 1
    assert "standard input is no terminal; give --yes" in capsys.readouterr().err
    assert blocks(client) == 80
    assert served.run(*command, "--yes") == 0
    assert capsys.readouterr().out == "80 block(s) purged\n"
    assert blocks(client) == 0


@pytest.mark.parametrize(
    ("filters", "forgotten"),
    [
        (["--model", "tiny"], {"tiny", "tiny+lora"}),
        (["--model", "tiny", "--adapter", ""], {"tiny"}),
        (["--adapter", "sha256:9"], {"tiny+lora"}),
        (["--weights", "sha256:2"], {"big"}),
        (["--weights", "sha256:1", "--model", "big"], set()),
    ],
)
def test_purge_forgets_what_it_names_and_nothing_else(
    served: Served, filters: list[str], forgotten: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    specs = {
        "tiny": SPEC,
        "tiny+lora": spec_of(adapter="sha256:9"),
        "big": spec_of(model="big", weights="sha256:2"),
    }
    clients = {name: served.cluster.client(spec) for name, spec in specs.items()}
    for client in clients.values():
        assert client.store(prompt(8), kv(8)).blocks == 8
        assert client.flush()
    assert served.run("purge", *filters, "--yes") == 0
    assert capsys.readouterr().out == f"{8 * len(forgotten)} block(s) purged\n"
    assert {name for name, client in clients.items() if not client.lookup(prompt(8)).blocks} == forgotten


def test_purge_says_what_it_is_about_to_forget(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("no\n"))
    assert served.run("purge", "--model", "tiny", "--adapter", "") == 1
    assert "purge every block of model 'tiny', adapter '' that this credential can see" in capsys.readouterr().out


def test_purge_of_nothing_in_particular_is_refused(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.run("purge", "--yes") == 1
    assert "give at least one of --model, --weights and --adapter; `kvcluster clear`" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------- draining


def test_drain_shows_how_far_it_is_until_the_shard_is_gone(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run("drain", "shard-0", token="operator") == 0
    said = capsys.readouterr()
    assert said.out.startswith("shard-0 is gone; other shards have copied ")
    assert all(line.startswith("shard-0 is draining: ") for line in said.err.splitlines())
    assert served.cluster.drained == ["shard-0"]
    assert blocks(client) == 80


def test_the_last_shard_is_not_drained_unasked(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run("drain", "shard-0", token="operator") == 0
    monkeypatch.setattr(sys, "stdin", Terminal("no\n"))
    assert served.run("drain", "shard-1", token="operator") == 1
    assert (
        "shard-1 is the only shard: 80 pages will be lost, and nothing can be stored until `kvcluster up`"
        in capsys.readouterr().out
    )
    assert blocks(client) == 80
    assert served.run("drain", "shard-1", "--yes", token="operator") == 0
    assert served.cluster.drained == ["shard-0", "shard-1"]


def test_without_a_terminal_the_last_shard_is_not_drained_unless_yes_is_said(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert served.run("drain", "shard-0", token="operator") == 0
    assert served.run("drain", "shard-1", token="operator") == 1
    assert "give --yes. It asks: shard-1 is the only shard: 80 pages will be lost" in capsys.readouterr().err
    assert blocks(client) == 80
    assert served.run("drain", "shard-1", "--yes", token="operator") == 0


def test_the_last_shard_is_not_drained_unasked_when_it_is_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with MemoryCluster(shards=1, ram_bytes="4MiB") as cluster, closing(Served(cluster)) as served:
        monkeypatch.setattr(sys, "stdin", Terminal("no\n"))
        assert served.run("drain", "shard-0", token="operator") == 1
        said = capsys.readouterr()
        assert "shard-0 is the only shard: afterwards nothing can be stored until `kvcluster up`" in said.out
        assert said.err == "nothing was drained\n"
        assert sorted(cluster.shards) == ["shard-0"]


def test_a_cluster_without_a_shard_is_not_well(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    for shard in ("shard-0", "shard-1"):
        assert served.run("status", token="operator") == 0
        assert served.run("drain", shard, "--yes", token="operator") == 0
    capsys.readouterr()
    assert served.run("status", token="operator") == 1
    assert "no shard: nothing can be loaded or stored; `kvcluster up` starts" in capsys.readouterr().out


def test_drain_that_does_not_wait_says_where_to_look(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run("drain", "shard-0", "--no-wait", token="operator") == 0
    assert capsys.readouterr().out == "shard-0 is draining; `kvcluster status` shows it until it is gone\n"
    eventually(lambda: served.cluster.drained == ["shard-0"])


def test_drain_of_a_shard_that_is_not_there_names_those_that_are(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run("drain", "shard-7", token="operator") == 1
    assert "there is no shard 'shard-7' to drain; existing shards: shard-0, shard-1" in capsys.readouterr().err


def test_drain_is_for_operators(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.run("drain", "shard-0") == 1
    assert "draining a shard is for operators" in capsys.readouterr().err
    assert sorted(served.cluster.shards) == ["shard-0", "shard-1"]


def test_drain_waits_no_longer_than_it_was_told(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcluster.core.coordinator.report_handler.ReportHandler._may_go", lambda *_: False)
    assert served.run("drain", "shard-0", "--timeout", "0.2", token="operator") == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "shard-0 is still draining; `kvcluster status` shows it until it is gone"
    )


def test_drain_outlives_the_coordinator(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go = threading.Event()
    monkeypatch.setattr("kvcluster.core.coordinator.report_handler.ReportHandler._may_go", lambda *_: may_go.is_set())
    ended: list[int] = []
    command = threading.Thread(target=lambda: ended.append(served.run("drain", "shard-0", token="operator")))
    command.start()
    draining = served.cluster.shards[ShardId("shard-0")]
    eventually(lambda: draining.core.state.draining)
    served.cluster.stop_coordinator()
    served.cluster.start_coordinator()
    may_go.set()
    command.join()
    assert ended == [0]
    assert "shard-0 is gone" in capsys.readouterr().out


def test_a_coordinator_that_stays_away_is_not_waited_for(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcluster.core.coordinator.report_handler.ReportHandler._may_go", lambda *_: False)
    monkeypatch.setattr(admin, "PATIENCE_S", 0.3)
    ended: list[int] = []
    command = threading.Thread(target=lambda: ended.append(served.run("drain", "shard-0", token="operator")))
    command.start()
    draining = served.cluster.shards[ShardId("shard-0")]
    eventually(lambda: draining.core.state.draining)
    served.cluster.stop_coordinator()
    command.join()
    assert ended == [1]
    assert "the coordinator has not answered for 0 s" in capsys.readouterr().err
    served.cluster.start_coordinator()


def status(*shards: tuple[str, str, int, int], state: str = "serving") -> dict[str, Any]:
    """Shards by name, state, epoch and pages pulled."""
    return {
        "state": state,
        "shards": [
            {"shard": name, "state": state, "epoch": epoch, "pages": 9, "counters": {"pulled": pulled}}
            for name, state, epoch, pulled in shards
        ],
    }


BEFORE = status(("a", "up", 1, 70), ("b", "up", 1, 100))


@pytest.mark.parametrize(
    ("now", "said", "ended"),
    [
        (status(("a", "draining", 1, 70), ("b", "up", 1, 103)), "a is draining: 9 page(s) left; other shards", None),
        (status(("a", "draining", 1, 70), ("b", "up", 2, 0)), "a is draining: 9 page(s) left; other shards", None),
        (status(("b", "up", 1, 1_200)), "a is gone; other shards have copied 1,100 page(s)", 0),
        (status(("b", "up", 2, 0)), "a is gone; other shards have copied 0 page(s)", 0),
        (status(("b", "up", 1, 105), state="rebuilding"), "the coordinator is rebuilding", None),
        (status(("a", "lost", 1, 70)), "a was lost before it was drained; other shards have copied", 1),
        (status(("a", "up", 2, 0), ("b", "up", 1, 105)), "a died before it was drained, and has restarted empty", 1),
    ],
)
def test_what_is_said_of_a_drain(now: dict[str, Any], said: str, ended: int | None) -> None:
    line, status = progress(BEFORE, now, "a")
    assert line.startswith(said)
    assert status == ended


# -------------------------------------------------------------------------------------------- everywhere


@pytest.mark.parametrize("command", [["drain", "shard-0"], ["clear", "--yes"], ["purge", "--model", "m", "--yes"]])
def test_where_nothing_listens_it_is_said_so(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "ANSWER_MS", 100)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main([*command, "--port", str(port)]) == 1
    assert f"nothing listens at 127.0.0.1:{port}: `kvcluster up` starts a cluster" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ status


def test_status_shows_what_drains_what_is_lost_and_what_rotted() -> None:
    counters = (("verified", 1_000), ("suspected", 20), ("corrupt", 3), ("pulled", 4), ("evicted", 50))
    info = ShardInfo(ShardId("a"), Epoch(1), "here:1", "host", 2**30, 2**29, 7, 1, counters)
    shards = (
        ShardStatus(info, "up", 0),
        ShardStatus(replace(info, shard=ShardId("b"), draining=True), "draining", 0),
        ShardStatus(replace(info, shard=ShardId("c")), "lost", 0),
    )
    told = (("asked_blocks", 0), ("hit_blocks", 0), ("write_blocks", 0), ("duplicate_blocks", 0))
    plain = status_dict(Status(Epoch(1), "serving", 10**9, 1, 8, 0, shards, told))
    assert plain["totals"] == {"verified": 3_000, "suspected": 60, "corrupt": 9, "pulled": 12, "evicted": 150}
    assert plain["lost_shards"] == ["c"]
    assert [shard["draining"] for shard in plain["shards"]] == [False, True, False]

    _, integrity, lost, columns, *rows, of_a, of_b, _ = shown(plain)
    assert integrity == (
        "pages: 3,000 re-verified, 60 of them after reader checksum mismatches, 9 were corrupt; "
        "12 copied between shards"
    )
    assert lost == "no reports from c: blocks held only there are misses"
    assert columns.split() == ["shard", "state", "tier", "used", "size", "pages", "address"]
    up, draining, gone = (row.split() for row in rows)
    assert up[:3] == ["a", "up", "ram"]
    assert up[-2:] == ["7", "here:1"]
    assert draining[:2] == ["b", "draining"]
    assert gone == ["c", "lost", "here:1"]
    assert of_a == "a: 1 lease; pages: 50 evicted, 4 copied from other shards, 3 corrupt"
    assert of_b.startswith("b: ")


def test_status_shows_what_the_cluster_waits_for_and_which_volumes_are_orphans() -> None:
    waiting = "a shard of group shard waits for a node with kvcluster_shard 1: no node is of that kind"
    plain = told_by(a_shard("a"), waiting=(waiting,), orphans=((ShardId("shard-7"), "10.0.0.3"),))
    assert plain["waiting"] == [waiting]
    assert plain["orphans"] == [{"shard": "shard-7", "node": "10.0.0.3"}]
    said = shown(plain)
    assert f"waiting: {waiting}" in said
    assert any(line.startswith("orphan: the volume of shard-7 on node 10.0.0.3 belongs to no running") for line in said)


def told_by(*shards: ShardStatus, **coordinator: Any) -> dict[str, Any]:
    """The status of these shards, for a view."""
    counters = (("asked_blocks", 0), ("hit_blocks", 0), ("write_blocks", 0), ("duplicate_blocks", 0))
    return status_dict(Status(Epoch(1), "serving", 10**9, 1, 8, 0, shards, counters, **coordinator))


def a_shard(name: str, **process: Any) -> ShardStatus:
    info = ShardInfo(ShardId(name), Epoch(1), "here:1", "host", 2**30, 2**29, 7, 1, **process)
    return ShardStatus(info, "up", 0)


def test_status_shows_what_each_process_runs_and_who_differs() -> None:
    new = {"node": "n1", "release": "3.0", "config_hash": "aa", "protocol": 3}
    other = {**new, "config_hash": "bb", "node": "n2"}
    plain = told_by(a_shard("same", **new), a_shard("changed", **other), a_shard("old"), **new)
    assert plain["differing"] == {
        "changed": "configuration bb, the coordinator aa",
        "old": "release unknown, an older one, the coordinator 3.0",
    }
    said = shown(plain)
    assert "release 3.0, configuration aa on n1: coordinator, same" in said
    assert "release 3.0, configuration bb on n2: changed" in said
    assert "release unknown: old" in said
    assert "changed differs: configuration bb, the coordinator aa" in said
    assert "old differs: release unknown, an older one, the coordinator 3.0" in said


def test_status_names_the_processes_that_the_next_version_would_refuse() -> None:
    plain = told_by(a_shard("new", protocol=4), a_shard("old", protocol=3), protocol=4)
    engine = {"name": "host:7", "model": "m", "protocol": 0}
    expected = (
        "upgrade next: old, host:7 speak no version 4 of the protocol, as others do; a release of version 5 will "
        "refuse them"
    )
    assert expected in shown({**plain, "engines": [engine]})


def test_a_cluster_that_says_nothing_of_its_releases_is_shown_without_them() -> None:
    said = "\n".join(shown(told_by(a_shard("old"), a_shard("older"))))
    assert "release" not in said and "upgrade" not in said and "differs" not in said


def test_a_tenant_s_status_has_no_figures_of_the_cluster(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    client.lookup(prompt(8, 0))
    assert served.run("status") == 0
    own = capsys.readouterr().out
    assert "80 blocks in 1 namespace" in own
    assert "figures of tenant default" in own and "ram" not in own
    assert served.run("status", token="other") == 0
    assert "nothing is cached" in capsys.readouterr().out
    assert served.run("status", token="operator") == 0
    assert "ram" in capsys.readouterr().out


def test_status_shows_open_sequences_in_its_first_line_where_there_are_any() -> None:
    told = (("asked_blocks", 0), ("hit_blocks", 0), ("write_blocks", 0), ("duplicate_blocks", 0))
    plain = status_dict(Status(Epoch(1), "serving", 10**9, 1, 8, 0, (), told))
    for sequences, private, words in (
        (0, 0, "8 blocks in 1 namespace"),
        (3, 0, "namespace; 3 open sequences of 1,200 blocks"),
        (0, 7, "namespace; 7 private blocks"),
    ):
        numbers = {"sequences": sequences, "claimed_blocks": 1_200, "private_blocks": private}
        assert shown(plain | numbers)[0].endswith(words)


def test_off_and_on_are_said_and_shown(served: Served, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.run("off") == 0
    assert "engines compute everything; cached blocks stay" in capsys.readouterr().out
    missed = client.lookup(prompt(8, 0))
    assert missed.blocks == 0 and "turned the cache off" in str(missed.reason)
    assert client.store(prompt(2, 99), kv(2, 99)).blocks == 0
    assert served.run("status") == 0
    assert "off: nothing is loaded or stored" in capsys.readouterr().out
    assert served.run("on") == 0
    assert client.lookup(prompt(8, 0)).blocks == 8


def test_status_says_which_engines_of_one_model_can_never_share(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = served.cluster.client(spec_of(weights="sha256:2"))
    stranger.store(prompt(2), kv(2))
    assert served.run("status") == 0
    said = capsys.readouterr().out
    assert (
        "never shared: tiny: 2 blocks cannot be shared with 80 others; different weights (sha256:2, not sha256:1)"
        in said
    )


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "system.json"
    file.write_text(json.dumps(prompt(8, 0)), encoding="utf-8")
    return file


def test_a_prompt_is_pinned_by_the_name_of_its_model(
    served: Served, client: Client, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run("pin", "--model", "tiny", "--prompt-file", str(token_file), "--ttl", "60") == 0
    assert "32 of 32 tokens are pinned for 60 s" in capsys.readouterr().out
    assert served.run("unpin", "--model", "tiny", "--prompt-file", str(token_file)) == 0
    assert "may be evicted again" in capsys.readouterr().out


def test_pins_are_listed_to_their_tenant_and_to_an_operator(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    client.pin(prompt(8, 0), 60.0)

    def listed(token: str) -> list[dict[str, Any]]:
        assert served.run("pins", "--json", token=token) == 0
        pins: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["pins"]
        return pins

    assert listed("other") == []
    [pin] = listed("default")
    assert (pin["tenant"], pin["model"], pin["tokens"], pin["blocks"], pin["first_token"]) == (
        *("default", "tiny"),
        *(32, 8, 0),
    )
    assert pin["pin"] == client.hashes(prompt(8, 0))[-1].hex() and pin["layout"] == layout_id(client.spec)
    assert [each["pin"] for each in listed("operator")] == [pin["pin"]]
    assert served.run("pins", "--model", "big") == 0
    assert capsys.readouterr().out == "nothing is pinned\n"


def test_a_listed_pin_is_unpinned_by_its_id(served: Served, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    longer = [*prompt(8, 0), *prompt(2, 300)]
    client.store(longer, kv(10))
    assert client.flush()
    for tokens in (longer, prompt(8, 1)):
        client.pin(tokens, 60.0)
    assert served.run("pins") == 0
    shown = capsys.readouterr().out
    pin = client.hashes(longer)[-1].hex()
    assert f"{pin[:12]}  default  tiny" in shown and "40" in shown
    assert served.run("unpin", "--pin", pin[:12]) == 0
    assert capsys.readouterr().out == "40 tokens may be evicted again\n"
    assert [each.block for each in client.pins().pins] == [client.hashes(prompt(8, 1))[-1].hex()]
    assert served.run("unpin", "--pin", pin[:12]) == 1
    assert f"no pin has an id that begins with '{pin[:12]}'" in capsys.readouterr().err
    assert served.run("unpin", "--pin", "") == 1, "the one that is left is not meant"
    assert "no pin has an id that begins with ''" in capsys.readouterr().err


def test_a_pin_of_another_tenant_and_an_id_of_several_are_refused(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(300, 317):  # more than there are first digits
        client.store(prompt(1, seed), kv(1))
        assert client.flush() and client.pin(prompt(1, seed), 60.0).blocks == 1
    ids = [pin.block for pin in client.pins().pins]
    digit, count = Counter(pin[0] for pin in ids).most_common(1)[0]
    assert served.run("unpin", "--pin", digit) == 1
    assert f"{count} pins have an id that begins with '{digit}'" in capsys.readouterr().err
    assert served.run("unpin", "--pin", ids[0], token="operator") == 1
    assert "the pin is of tenant 'default': unpin it with a token of that tenant" in capsys.readouterr().err
    assert [pin.block for pin in client.pins().pins] == ids


def test_what_another_pin_needs_stays_pinned_and_is_counted(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    forks = [[*prompt(8, 0), *prompt(2, seed)] for seed in (300, 301)]
    for tokens in forks:
        client.store(tokens, kv(10))
        assert client.flush() and client.pin(tokens, 60.0).blocks == 10
    assert served.run("unpin", "--pin", client.hashes(forks[0])[-1].hex()) == 0
    assert capsys.readouterr().out == "8 tokens may be evicted again; 8 blocks of it stay pinned with others\n"


def test_what_is_not_cached_is_not_pinned(
    served: Served, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps(prompt(8, 99)), encoding="utf-8")
    assert served.run("pin", "--model", "tiny", "--prompt-file", str(file)) == 1
    assert "let an engine compute them first" in capsys.readouterr().err


def test_the_weights_are_named_where_engines_run_different_ones(
    served: Served, client: Client, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.cluster.client(spec_of(weights="sha256:2")).store(prompt(2), kv(2))
    assert served.run("pin", "--model", "tiny", "--prompt-file", str(token_file)) == 1
    assert "give one of them as --weights: sha256:1, sha256:2" in capsys.readouterr().err
    assert served.run("pin", "--model", "tiny", "--weights", "sha256:1", "--prompt-file", str(token_file)) == 0


@pytest.mark.parametrize(
    ("content", "model", "said"),
    [
        ("[1, 2]", "gigantic", "no client has connected with model 'gigantic' and adapter ''; known models: tiny"),
        ("a text", "tiny", "no JSON list of token ids; for text give --tokenizer"),
        ('["a"]', "tiny", "no JSON list of token ids"),
        ("[" * 100_000, "tiny", "no JSON list of token ids"),
    ],
)
def test_what_cannot_be_pinned_is_said(
    served: Served,
    client: Client,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    model: str,
    said: str,
) -> None:
    file = tmp_path / "prompt"
    file.write_text(content, encoding="utf-8")
    assert served.run("pin", "--model", model, "--prompt-file", str(file)) == 1
    assert said in capsys.readouterr().err


def test_a_file_that_is_not_there_is_said(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.run("pin", "--model", "tiny", "--prompt-file", "nowhere.txt") == 1
    assert "cannot read nowhere.txt" in capsys.readouterr().err


def test_text_is_made_token_ids_of_by_the_models_tokenizer(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "be", "kind"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    served.cluster.client(SPEC).store([1, 2] * 4, kv(2))
    file = tmp_path / "system.txt"
    file.write_text("be kind " * 4, encoding="utf-8")
    eventually(
        lambda: served.run("pin", "--model", "tiny", "--prompt-file", str(file), "--tokenizer", str(tmp_path)) == 0
    )
    assert "8 of 8 tokens are pinned" in capsys.readouterr().out
