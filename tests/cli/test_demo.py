"""What the demo promises: it fails where it must, ends what it starts, and accepts the user's own model."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kvcluster.cli
from kvcluster.cli import demo
from kvcluster.cli.child_process import ChildError, ChildProcess
from kvcluster.cli.demo import far as fourth_act
from kvcluster.cli.demo import gpu as fifth_act
from kvcluster.cli.demo import screen as screens
from kvcluster.cli.demo import tiers
from kvcluster.cli.demo.engine import Engine, llama
from kvcluster.cli.demo.signals import Signals
from kvcluster.cli.main import main
from kvcluster.engines.transformers import fingerprint

# ----------------------------------------------------------------------------------------- what it concludes


def answer(digest: str, logit: float = 1.0, cached: int = 0) -> dict[str, Any]:
    return {
        "first_token_ns": 2_000_000_000 - 400_000 * cached,
        "prompt_tokens": 4200,
        "cached_tokens": cached,
        "loaded_bytes": cached * 8192,
        "stored_bytes": 1 << 20,
        "digest": digest,
        "logits": [logit, -3.0],
    }


def assess(**other: Any) -> dict[str, Any]:
    replies = {
        "computed": [answer("a"), answer("b"), answer("c")],
        "stored": answer("a"),
        "loaded": [answer("a", cached=4096), answer("b", cached=4096), answer("c", 1.0001, cached=4096)],
        "spoiled": answer("z", 1.5, cached=4096),
        "trained": {"before": "sha256:" + "0" * 64, "after": "sha256:" + "1" * 64},
        "explained": {"tokens": 0, "misses": ["block 0: miss, namespace (weights)", "block 1: miss, namespace"]},
    }
    return demo.assess(**{**replies, **other})


def document(token: int = 7, logit: float = 1.0, **blocks: int) -> dict[str, Any]:
    return {"blocks": blocks, "cached_tokens": 16 * sum(blocks.values()), "logits": [logit, -3.0], "next": token}


def in_tiers(*loaded: dict[str, Any]) -> dict[str, Any]:
    """The third act, of two documents."""
    below = {"tier": "host", "capacity_bytes": 2 << 20, "free_bytes": 1 << 20, "pages": 8}
    status = {
        "shards": [{"capacity_bytes": 1 << 20, "below": [below]}],
        "policy": {"host.codec": "q8"},
        "totals": {"demoted": 12},
    }
    read = [document(nowhere=16), document(nowhere=16)]
    return tiers.assess(read, list(loaded or (document(host=15), document(ram=15))), status, 3 << 20)


def far(digest: str = "a", loaded: int = 900 << 20, shipped: int = 0) -> dict[str, Any]:
    return {
        "digest": digest,
        "resident_bytes": 2 << 20,
        "context_bytes": 33 << 20,
        "loaded_bytes": loaded,
        "shipped_bytes": shipped,
    }


def far_away(**other: Any) -> dict[str, Any]:
    """The fourth act."""
    lost = {"error": "LostTokens: the block at token 1024 of this sequence is lost"}
    replies = {"streamed": far(), "shipped": far(loaded=1 << 20, shipped=9 << 20), "cut_off": lost}
    return fourth_act.assess(**{**replies, **other}, right="a")


def on_gpu(**other: Any) -> dict[str, Any]:
    """The fifth act."""
    read = {"device": "a twin of a GPU", "is_card": False, "pages": 32, "copies": 0, "identical": True}
    return fifth_act.assess(read | other)


def others(**figures: Any) -> dict[str, Any]:
    """What is shown beside the answers."""
    return {"hit_rate": 0.74, "seconds": 48.0, "tiers": in_tiers(), "far": far_away(), "gpu": on_gpu()} | figures


def test_a_pool_on_a_gpu_is_a_success_if_all_comes_from_there_without_a_copy() -> None:
    assert on_gpu()["ok"] and on_gpu(is_card=True, device="NVIDIA H100")["ok"]
    assert not on_gpu(pages=31)["ok"] and not on_gpu(copies=1)["ok"] and not on_gpu(identical=False)["ok"]


def test_a_long_context_is_a_success_if_ids_are_the_same_and_queries_move_less() -> None:
    assert far_away()["ok"] and far_away(cut_off=far(shipped=1 << 20))["ok"]
    assert not far_away(streamed=far("b"))["ok"] and not far_away(shipped=far("b", 1, 1))["ok"]
    assert not far_away(shipped=far(loaded=901 << 20, shipped=1))["ok"], "it moved as much"
    assert not far_away(shipped=far())["ok"], "nothing was shipped"
    assert not far_away(cut_off=far("b"))["ok"], "another answer"
    assert not far_away(shipped={"error": "ResidentSetFull: x"})["ok"]


@pytest.mark.parametrize("of", [{}, {"shipped": {"error": "E: x"}}, {"cut_off": far("a", 0, 1 << 20)}])
def test_the_fourth_act_fits_eighty_columns(of: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with screens.Screen(silent=False) as screen:
        screen.show(assess() | others(far=far_away(**of)))
    shown = capsys.readouterr().out
    assert "Act 4" in shown and "Act 5" in shown and max(map(len, shown.splitlines())) <= 80


def test_a_working_set_that_comes_back_out_of_the_host_tier_is_a_success() -> None:
    figures = in_tiers()
    assert figures["ok"] and figures["blocks"] == {"host": 15, "ram": 15}
    assert (figures["same_next_token"], figures["demoted_pages"], figures["tokens_reused"]) == (2, 12, 480)
    assert in_tiers(document(8, 1.5, host=15), document(host=15))["logit_difference"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "loaded",
    [(document(ram=15), document(ram=15)), (document(host=15), document(nowhere=15))],
    ids=["nothing went down", "half of it is lost"],
)
def test_a_working_set_of_which_nothing_goes_down_or_too_little_comes_back_is_a_failure(
    loaded: tuple[dict[str, Any], ...],
) -> None:
    assert not in_tiers(*loaded)["ok"]


def test_identical_answers_and_a_refusal_are_a_success() -> None:
    figures = assess()
    assert figures["ok"] and figures["logit_difference"] == pytest.approx(1e-4)
    assert (figures["tokens_reused"], figures["tokens_asked"]) == (3 * 4096, 3 * 4200)


@pytest.mark.parametrize(
    "replies",
    [
        {"stored": answer("x")},
        {"loaded": [answer("a"), answer("b"), answer("x")]},
        {"spoiled": answer("c", 1.0002)},
        {"explained": {"tokens": 4096, "misses": ["block 256: miss, never_seen"]}},
        {"explained": {"tokens": 0, "misses": ["block 0: miss, never_seen"]}},
        {"explained": {"tokens": 4200, "misses": []}},
    ],
)
def test_a_changed_answer_a_mute_control_and_foreign_kv_are_failures(replies: dict[str, Any]) -> None:
    assert not assess(**replies)["ok"]


def test_the_control_counts_where_only_logits_move() -> None:
    assert assess(spoiled=answer("c", 1.5))["ok"]


@pytest.mark.parametrize("replies", [{}, {"stored": answer("x"), "explained": {"tokens": 4096, "misses": ["x"]}}])
def test_the_screen_fits_eighty_columns(replies: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with screens.Screen(silent=False) as screen:
        screen.show(assess(**replies) | others())
    shown = capsys.readouterr().out
    assert "second replica" in shown
    assert ("DIFFERENT" in shown) == bool(replies)
    assert max(map(len, shown.splitlines())) <= 80


def test_a_silent_screen_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with screens.Screen(silent=True) as screen:
        with screen.step("a step") as progress:
            progress(1, 2)
        screen.show(assess() | others())
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------------- what it ends

STUB = """
import sys
from kvcluster.cli.child_process import answer_requests, inherited_connection

connection = inherited_connection()

class Stub:
    def echo(self, word):
        connection.send({"progress": [1, 2]})
        return word

    def fail(self):
        raise ValueError("no such thing")

    def die(self):
        sys.exit("it hurts")

answer_requests(connection, Stub())
"""


def stub() -> ChildProcess:
    return ChildProcess((sys.executable, "-c", STUB), name="the stub", shown_lines=20, kill_on_error=True)


def test_a_replica_answers_and_tells_its_progress() -> None:
    told: list[tuple[int, int]] = []
    with stub() as replica:
        assert replica.ask("echo", lambda *part: told.append(part), word="x") == "x"
        assert told == [(1, 2)]
        with pytest.raises(ChildError, match="ValueError: no such thing"):
            replica.ask("fail")


def test_a_replica_that_dies_is_an_error_with_its_last_words() -> None:
    with stub() as replica:
        for _ in range(2):
            with pytest.raises(ChildError, match="the stub has ended: it hurts"):
                replica.ask("die")


def test_a_replica_ends_with_its_block_and_with_an_exception() -> None:
    with stub() as replica:
        process = replica.process
        assert process.poll() is None
    assert process.returncode == 0
    with pytest.raises(ZeroDivisionError), stub() as replica:
        process = replica.process
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signals_unwind_the_stack_and_wait_where_they_must(number: int, error: type[BaseException]) -> None:
    before = signal.getsignal(number)
    with Signals(), pytest.raises(error):
        os.kill(os.getpid(), number)
    reached = False
    with Signals() as signals, pytest.raises(error), signals.put_off():
        os.kill(os.getpid(), number)
        reached = True
    assert reached
    with Signals() as signals, pytest.raises(error), signals.put_off():
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        pytest.fail("a second signal ends it at once")
    assert signal.getsignal(number) is before


# ------------------------------------------------------------------------------------------- what it needs


@pytest.mark.parametrize("package", ["ray", "torch", "transformers"])
def test_a_missing_package_is_told_with_the_extra_that_brings_it(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    monkeypatch.delitem(sys.modules, "kvcluster.cli.demo")
    monkeypatch.delattr(kvcluster.cli, "demo")
    assert main(["demo"]) == 1
    assert f"needs {package}" in (shown := capsys.readouterr().err) and "kvcluster[cluster,transformers]" in shown


# ------------------------------------------------------------------------------------------------ all of it


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """A small model with a tokenizer of its own, saved as users save theirs."""
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_an_engine_reads_text_with_the_models_own_tokenizer(own_model: Path) -> None:
    told: list[tuple[int, int]] = []
    engine = Engine(lambda *part: told.append(part))
    assert engine.load(str(own_model), bytes_are_tokens=False)["model"] == "LlamaForCausalLM"
    out = engine.answer("Why?", cached=False)
    assert out["prompt_tokens"] > 4096 and out["cached_tokens"] == 0 and out["first_token_ns"] > 0
    assert told[0][0] == 0 and told[-1] == (26, 26) and told == sorted(told)


def test_the_model_of_the_demo_is_the_one_that_a_benchmark_runs(tmp_path: Path) -> None:
    made = tmp_path / "model"
    Engine(lambda *_: None).make(str(made))
    loaded = LlamaForCausalLM.from_pretrained(made, dtype=torch.float32)
    assert fingerprint(loaded) == fingerprint(llama(512))


def left_behind(marker: str) -> list[str]:
    """Processes that inherited the marker and do not end within a while."""
    out = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or marker.encode() not in (entry / "environ").read_bytes():
                continue
            ended = os.pidfd_open(int(entry.name))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
        try:
            if not select.select([ended], [], [], 30)[0]:
                out.append((entry / "cmdline").read_text().replace("\0", " "))
        finally:
            os.close(ended)
    return out


def run(code: str, model: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs code in a process of its own; what it printed, and what it left behind."""
    marker = str(uuid.uuid4())
    env = {**os.environ, "DEMO_MODEL": str(model), "KVCLUSTER_TEST_MARKER": marker}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, check=False)
    return done, left_behind(marker)


@pytest.mark.cluster
@pytest.mark.slow
def test_the_demo_succeeds_with_a_given_model_and_leaves_nothing(own_model: Path) -> None:
    done, left = run("from kvcluster.cli.main import main; raise SystemExit(main(['demo', '--json']))", own_model)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["ok"] and figures["tokens_reused"] > 3 * 4096 - 48
    assert figures["other_weights"]["explanation"].startswith("block 0: miss, namespace (weights)")
    assert figures["tiers"]["blocks"]["host"] > figures["tiers"]["blocks"]["ram"] > 0
    assert not left


@pytest.mark.cluster
@pytest.mark.slow
def test_ctrl_c_in_the_middle_leaves_nothing(own_model: Path) -> None:
    code = """
import os, signal
from kvcluster.cli.child_process import ChildProcess
from kvcluster.cli.main import main
ask = ChildProcess.ask
def interrupted(self, op, *args, **kwargs):
    if op == "connect":
        os.kill(os.getpid(), signal.SIGINT)
    return ask(self, op, *args, **kwargs)
ChildProcess.ask = interrupted
raise SystemExit(main(["demo", "--json"]))
"""
    done, left = run(code, own_model)
    assert done.returncode == 130 and "interrupted" in done.stderr
    assert not left
