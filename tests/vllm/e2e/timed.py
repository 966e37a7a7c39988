"""An engine that stays up and takes the time of every step: `python -m tests.vllm.e2e.timed JOB`, rounds on stdin."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from kvcluster.engines.vllm.idle import IdleScheduler
from tests.vllm.e2e.engine import LLM_ARGUMENTS, transfer_config


def main() -> None:
    """Says `{}` when it is up, and answers each line of stdin by one of stdout."""
    from vllm import LLM

    job = json.loads(sys.argv[1])
    arguments = LLM_ARGUMENTS | job["llm"]
    if job["connector"] is not None:
        arguments["kv_transfer_config"] = transfer_config(job["connector"])
    llm = LLM(model=job["model"], **arguments)
    _round(llm, [[1] * 200], 4, "warm")
    threading.Event().wait(2)  # for the fingerprint and the cluster
    _say({})
    sides: dict[bool, Any] = {False: IdleScheduler()}  # of a connector in mode "observe", by whether it observes
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        if "observing" in asked:
            connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
            sides.setdefault(True, connector._scheduler)
            connector._scheduler = sides[asked["observing"]]
        _say(_round(llm, asked["prompts"], asked["new_tokens"], str(number)))


def _round(llm: Any, prompts: list[list[int]], new_tokens: int, name: str) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    began, cpu = time.perf_counter(), time.process_time()
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{name}-{number}", TokensPrompt(prompt_token_ids=prompt), params)
    last: dict[str, float] = {}
    counts: dict[str, int] = {}
    first: list[float] = []
    between: list[float] = []
    steps: list[float] = []
    reports: list[dict[str, Any]] = []
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        if outputs:
            steps.append(now - start)
        for output in outputs:
            if output.finished and (told := (output.kv_transfer_params or {}).get("kvcluster")):
                reports.append(told)
            tokens = len(output.outputs[0].token_ids)
            if tokens == counts.get(output.request_id, 0):
                continue
            counts[output.request_id] = tokens
            if output.request_id in last:
                between.append(now - last[output.request_id])
            else:
                first.append(now - began)
            last[output.request_id] = now
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    until = time.perf_counter() + 0.3  # what is delayed, such as blocks that are held, is no part of the round
    while engine.engine_core.engine_core.scheduler.has_requests() and time.perf_counter() < until:
        engine.step()
    times = {"seconds": seconds, "cpu_seconds": cpu, "began": began, "first": first, "between": between, "steps": steps}
    return times | {"reports": reports}


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
