"""One engine in a process of its own: `python -m tests.vllm.e2e.engine JOB`, where JOB is a file that says what to run.

A job is JSON: `model`, `connector` (its extra config, or null for none), `llm` (more arguments of vllm.LLM), `rounds`,
and `out`, where the answers go. A round has `prompts` (token ids), `serial` or not (then perhaps `fresh`: the engine's
own cache has nothing of any prompt), `sampling`, perhaps a `mutant` (mutants.py; with `at_rank` in that worker's
process, until it ends), an `adapter` or a `cache_salt`. Before it, weights may change (`nudge`), the engine be `reset`,
and its weights be given a `version` as a training loop does, or a `weights` name by the operator's command. With
`capture` the KV of its prompts is kept as well (capture.py).
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from kvcluster.engines.ray_serve import kv_transfer_config

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What makes an engine on a CPU exact and quiet (docs/vllm.md)."""

LLM_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
}
OF_MODEL: dict[str, dict[str, Any]] = {
    "mla": {"block_size": 16, "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}},
    "e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "chunks": {"disable_hybrid_kv_cache_manager": False},
    "sinks": {"disable_hybrid_kv_cache_manager": False},
    "conv": {
        "enable_prefix_caching": True,
        "prefix_cache_retention_interval": 32,
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    },
    "gdn": {"enable_prefix_caching": True, "prefix_cache_retention_interval": 64, "dtype": "bfloat16"},
}
"""Where the engines of a model differ: vLLM's attention for MLA on a CPU has blocks of 16 tokens alone, and the rotary
kernel of vLLM 0.32 misreads the tensors that MLA and LFM2 give it, so that torch computes that. The checkpoint of
"e4m3" says by itself that its KV is in fp8. vLLM keeps the recurrent state of block boundaries for its own prefix cache
alone, here of every one at which a step ends; its kernel for GDN on a CPU takes bfloat16. Without a connector it keeps
all blocks of layers that attend in chunks or slide, unless it is told otherwise."""

ON_SERVE: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 4,
    "enable_prefix_caching": True,
}
"""Where replicas differ from it: longer prompts, computed whole, and the engine's own cache before the cluster's."""

_FEW_BLOCKS = {"mla": 90, "chunks": 66, "sinks": 46, "conv": 90}
"""Of smaller blocks eight requests waste less; further groups of layers and recurrent states take their own."""

JOIN_S = 60.0


def arguments_of(model: str) -> dict[str, Any]:
    """The arguments of vllm.LLM for the model of that name."""
    return LLM_ARGUMENTS | OF_MODEL.get(model, {})


def few_blocks(model: str) -> int:
    """So few that batches are preempted."""
    return _FEW_BLOCKS.get(model, 60)


def transfer_config(extra: dict[str, Any], role: str = "kv_both") -> dict[str, Any]:
    """The --kv-transfer-config of docs/vllm.md."""
    return kv_transfer_config(**({"address": "127.0.0.1:7070"} | extra), role=role)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The job's answers, by round."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    from tests.vllm.e2e import capture, mutants

    arguments = arguments_of(Path(job["model"]).name) | job.get("llm", {})
    if job.get("connector") is not None:
        arguments["kv_transfer_config"] = transfer_config(job["connector"])
    if job.get("capture"):
        capture.begin()
    llm = LLM(model=job["model"], **arguments)
    if arguments.get("pipeline_parallel_size", 1) > 1:
        llm.collective_rpc(_make_buffers)
    answers: dict[str, Any] = {"rounds": []}
    scheduler = None
    if job.get("connector") is not None:
        scheduler = _scheduler_side(llm)
        if scheduler is not None:
            answers["spec"] = pickle.dumps(_joined(scheduler)).hex()
    kept: list[dict[str, Any]] = []
    for number, one in enumerate(job["rounds"]):
        each = one.get("samplings") or [one.get("sampling", {})] * len(one["prompts"])
        params = [SamplingParams(**{"temperature": 0, "logprobs": 0, "max_tokens": 32, **given}) for given in each]
        prompts = [TokensPrompt(prompt_token_ids=p) for p in one["prompts"]]
        if one.get("cache_salt"):
            for prompt in prompts:
                prompt["cache_salt"] = one["cache_salt"]
        lora = LoRARequest("tuned", one["adapter_number"], one["adapter"]) if one.get("adapter") else None
        if one.get("reset"):
            llm.llm_engine.reset_prefix_cache(reset_connector=True)
        if one.get("nudge"):
            _nudge(llm)
        if one.get("version"):
            llm.update_weight_version(one["version"])
            if scheduler is not None:
                _joined(scheduler)
                _until_workers_use(llm, scheduler._registration.wanted)
        if one.get("weights"):
            _name_weights(llm, job, one["weights"])
        began = time.perf_counter()
        if one.get("at_rank") is not None:
            llm.collective_rpc(mutants.plant_at, args=(one["at_rank"], one["mutant"]))
        with mutants.planted("" if one.get("at_rank") is not None else one.get("mutant", "")):
            if one.get("serial"):
                outputs = []
                for prompt, of_prompt in zip(prompts, params, strict=True):
                    if one.get("fresh"):
                        _forget(llm)
                    outputs += llm.generate([prompt], of_prompt, use_tqdm=False, lora_request=lora)
                    if job.get("capture"):
                        kept.append(capture.take(arguments["block_size"]))
            else:
                outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
        told = [_answer(output) for output in outputs]
        answers["rounds"].append({"number": number, "seconds": time.perf_counter() - began, "answers": told})
    answers["metrics"] = {metric.name: _value(metric) for metric in llm.get_metrics()}
    if job.get("capture"):
        import torch

        torch.save(kept, job["out"] + ".kv")
    if scheduler is not None:
        _flush(scheduler)
    return answers


def _make_buffers(worker: Any) -> None:
    """Called in each worker: makes what a pipeline rank receives from the one before it. vLLM makes these buffers when
    it warms up a model, which its worker for CPUs does not where nothing is compiled; then it fails in the first step,
    with or without a connector."""
    from vllm.distributed import get_pp_group

    runner = worker.model_runner
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _answer(output: Any) -> dict[str, Any]:
    choices = [
        {"ids": list(c.token_ids), "logprobs": [d[t].logprob for t, d in zip(c.token_ids, c.logprobs, strict=True)]}
        for c in output.outputs
    ]
    told = (output.kv_transfer_params or {}).get("kvcluster")
    return {"choices": choices, "report": told, "prompt": len(output.prompt_token_ids)}


def _value(metric: Any) -> Any:
    return getattr(metric, "value", None)


def _scheduler_side(llm: Any) -> Any:
    core = llm.llm_engine.engine_core
    core = getattr(core, "engine_core", None)
    return None if core is None else core.scheduler.connector._scheduler


def _joined(scheduler: Any) -> Any:
    """The spec, once the engine has a cluster."""
    until = time.monotonic() + JOIN_S
    while scheduler._registration.spec is None and time.monotonic() < until:
        threading.Event().wait(0.01)
    assert scheduler._registration.spec is not None, scheduler._registration.why
    return scheduler._registration.spec


def _flush(scheduler: Any) -> None:
    """Every store of this process has ended before it does."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():  # ranks in processes of their own flush as they close
        return
    client = get_kv_transfer_group()._worker._registration.client
    if client is not None:
        client.flush(deadline_ms=10_000)


def _forget(llm: Any) -> None:
    """Empties the engine's own prefix cache, once no store reads a block of it any more, which a step tells."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    until = time.monotonic() + JOIN_S
    while not llm.llm_engine.reset_prefix_cache():
        assert time.monotonic() < until, "blocks stay in use"
        llm.generate([TokensPrompt(prompt_token_ids=[1])], SamplingParams(max_tokens=1), use_tqdm=False)


def _nudge(llm: Any) -> None:
    """Changes one weight in memory, as training does."""

    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "layers.0.input_layernorm" in name:  # a linear layer's weights are packed on a CPU
                parameter.data[0] += 1.0

    llm.apply_model(change)


def _name_weights(llm: Any, job: dict[str, Any], weights: str) -> None:
    """As an operator does."""
    from kvcluster.cli.main import main as kvcluster

    given = job["connector"]
    token = ("--token-from", given["token_file"]) if "token_file" in given else ()
    name = f"{socket.gethostname()}:{os.getpid()}"
    command = ("weights", "set", Path(job["model"]).name, weights, "--engine", name, "--address", given["address"])
    assert kvcluster([*command, *token]) == 0
    _until_workers_use(llm, weights)


def _until_workers_use(llm: Any, weights: str) -> None:
    """Has the engine make steps, by which workers hear of its weights, until they cache under them."""
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.inputs import TokensPrompt

    worker = get_kv_transfer_group()._worker._registration
    until = time.monotonic() + JOIN_S
    while (worker.spec is None or worker.spec.weights != weights) and time.monotonic() < until:
        llm.generate([TokensPrompt(prompt_token_ids=[1])], SamplingParams(max_tokens=1), use_tqdm=False)
    assert worker.spec is not None and worker.spec.weights == weights, worker.why


def main() -> None:
    """Runs the job that the first argument names."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answers = run(job)
    Path(job["out"]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main()
