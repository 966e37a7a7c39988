"""What `kvcluster doctor --engine vllm` finds of an installation, by vLLM's own configuration of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcluster.engines.vllm import compat, examine, kv_plan
from tests.vllm.build import GEMMA, LATENT, LLAMA, MLA, engine_config, kv_config, model_folder, transfer

QUIET = ("--skip-tokenizer-init", "--dtype", "float32", "--block-size", "4", "--max-model-len", "256")


def found(model: Path, given: dict[str, Any] | None = None, *more: str, read: bool = False) -> dict[str, Any]:
    return examine.examine(str(model), given, [*QUIET, *more], read_weights=read)


def states(findings: dict[str, Any]) -> dict[str, str]:
    return {feature: state for feature, state, _ in findings["features"]}


def test_an_engine_that_is_served_is_told_what_it_will_cache(llama: Path) -> None:
    one = found(llama, transfer(mode="on"))
    assert (one["refused"], one["unknown"]) == ([], [])
    assert one["model"]["layers"] == 2 and one["model"]["kv_heads"] == 2 and one["model"]["head_dim"] == 8
    assert (one["layout"]["block_tokens"], one["layout"]["token_bytes"], one["layout"]["model"]) == (4, 256.0, "llama")
    assert one["settings"]["mode"] == "on" and one["settings"]["address"] == "cluster:1"
    assert one["identity"]["weights"] == "sha256:1"
    assert one["releases"]["vllm"] == compat.release() and "run by the tests" in one["releases"]["tried"]


def test_without_a_transfer_config_observe_mode_is_examined(llama: Path) -> None:
    one = found(llama)
    assert one["refused"] == [] and one["settings"]["mode"] == "observe"


def test_windows_ranks_and_roles_are_told(gemma: Path) -> None:
    two_ranks = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    one = found(gemma, transfer("kv_producer"), *two_ranks)
    assert one["refused"] == []
    told = states(one)
    assert (told["sliding windows"], told["tensor parallel ranks"]) == (examine.SERVED, examine.SERVED)
    assert told["layer-by-layer loads"] == examine.UNUSED, "several block tables"
    assert ["role", examine.SERVED, "stores only"] in one["features"]
    assert "2 layers with a window of 16" in one["layout"]["groups"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--prefix-caching-hash-algo", "xxhash"), "prefix_caching_hash_algo is xxhash"),
        (("--kv-cache-dtype", "int8_per_token_head"), "group 0 keeps KV as int8_per_token_head (INT8_PER_TOKEN_HEAD)"),
        (("--max-model-len", "100000"), "vLLM refuses this engine by itself"),
        (("--no-such-option", "1"), "of the arguments behind --: unrecognized arguments: --no-such-option 1"),
    ],
)
def test_what_is_refused_is_named_as_the_connector_names_it(llama: Path, more: tuple[str, ...], reason: str) -> None:
    one = found(llama, transfer(), *more)
    assert [reason in line for line in one["refused"]] == [True]


def test_latents_are_told_and_what_a_rank_holds_of_them(mla: Path) -> None:
    one = found(mla, transfer(), "--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    assert (one["refused"], one["unknown"]) == ([], [])
    assert one["layout"]["token_bytes"] == 2 * 4 * LATENT and one["layout"]["kv_format"] == "one latent of a token"
    assert ["latents (MLA)", examine.SERVED, "stored once for all ranks, and read by each"] in one["features"]


def test_sparse_attention_is_refused_before_anything_is_planned(tmp_path: Path) -> None:
    one = found(model_folder(tmp_path / "sparse", MLA | {"index_topk": 2048}))
    assert ["its attention is sparse" in line for line in one["refused"]] == [True]
    assert one["unknown"] == []


def test_what_the_settings_of_a_model_do_not_tell_is_not_guessed(tmp_path: Path) -> None:
    content = LLAMA | {"attention_chunk_size": 8}
    one = found(model_folder(tmp_path / "strange", content))
    assert one["refused"] == [] and one["layout"] is None
    assert ["attention_chunk_size does not say which" in line for line in one["unknown"]] == [True]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (transfer(mode="om"), "mode must be one of on, observe, off"),
        (transfer(address=""), 'kv_connector_extra_config needs "address"'),
        (transfer() | {"kv_load_failure_policy": "fail"}, 'kv_load_failure_policy must be "recompute"'),
        (transfer() | {"kv_connector_module_path": "elsewhere"}, "kv_connector_module_path is 'elsewhere'"),
    ],
)
def test_a_mistake_in_the_transfer_config_is_named(llama: Path, given: dict[str, Any], reason: str) -> None:
    refused = found(llama, given)["refused"]
    assert any(reason in line for line in refused), refused


def test_weights_are_told_when_they_are_known_and_read_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine.weights, "_user_cache", lambda: tmp_path / "cache")
    model = model_folder(tmp_path / "llama", LLAMA)
    before = found(model)["identity"]
    assert (before["weights"], before["bytes"]) == (None, (model / "config.json").stat().st_size)
    assert "--read-weights" in before["how"]
    read = found(model, read=True)["identity"]
    assert read["weights"].startswith("sha256:") and read["how"] == "read now"
    again = found(model)["identity"]
    assert (again["weights"], again["how"]) == (read["weights"], "read before")


def test_of_a_hubs_snapshot_the_commit_is_told(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "snapshots" / ("a" * 40), LLAMA)
    assert found(model)["identity"]["weights"] == "commit:" + "a" * 40


@pytest.mark.parametrize("content", [LLAMA, GEMMA])
def test_what_is_planned_is_what_the_connector_gets(tmp_path: Path, content: dict[str, Any]) -> None:
    model = model_folder(tmp_path / "model", content)
    planned = compat.layout(config := engine_config(model), kv_plan.planned_kv(config))
    assert planned == compat.layout(config, kv_config(config))


def test_kv_on_a_gpu_is_served_and_said_not_to_have_run(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "device", lambda: "cuda")
    seen = found(llama, transfer())
    assert seen["refused"] == []
    assert "no engine of it has run with its KV on a GPU" in seen["releases"]["tried"]
    assert ["layer-by-layer loads", "not used", "all loads run beside the forward passes"] in seen["features"]
