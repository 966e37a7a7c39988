"""Two OpenAI-compatible servers behind one cluster: mixed traffic, and faults while it runs.

Every answer is held against that of an engine without a cache. What a fault may cost is time, up to a bound that is the
same for all, and what is loaded; never an id, a logprob or an answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

import kvcluster
from kvcluster.cli.coordinator_args import read_status
from kvcluster.cli.main import main
from kvcluster.transfers.coordinator_client import GrpcPort
from kvcluster.transfers.layouts import Dense
from kvcluster.transport.rpc import Connection
from tests.chaos import victims
from tests.ports import free_port
from tests.vllm.e2e.audit import dense
from tests.vllm.e2e.engine import ENVIRONMENT, arguments_of, few_blocks, transfer_config
from tests.vllm.e2e.run import CLIENT, ROOT, House, answers, eventually, prompts
from tests.vllm.e2e.told import listening

UP_S, ANSWER_S = 180.0, 30.0
"""A server is up in the first; an answer that takes longer than the second is late, whatever happens to the cluster."""

AT_ONCE = 8
"""At each server."""
REQUESTS, FAULTED = 200, 100


@dataclass
class Server:
    """One server and what it has said."""

    url: str
    process: subprocess.Popen[bytes]
    said: Path

    def text(self) -> str:
        return self.said.read_text(encoding="utf-8", errors="replace")


@dataclass
class Ask:
    """One request. `abort`: its asker goes away after the first token."""

    prompt: list[int]
    sampling: dict[str, Any]
    abort: bool = False


@dataclass
class Traffic:
    """What came of many requests: by request its choices, and how long each took."""

    choices: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextmanager
def servers(
    house: House, model: str, count: int = 2, role: str = "kv_both", blocks: int = 0, **connector: Any
) -> Iterator[list[Server]]:
    """Servers of one model over the house's cluster, ended at the end. `blocks` is 0 for few."""
    blocks = blocks or few_blocks(model)
    with ExitStack() as stack:
        started = [stack.enter_context(_server(house, model, role, blocks, connector)) for _ in range(count)]
        for one in started:
            eventually(lambda one=one: healthy(one), UP_S, f"{one.url} is up: {one.text()[-2000:]}")
        yield started


@contextmanager
def _server(house: House, model: str, role: str, blocks: int, connector: dict[str, Any]) -> Iterator[Server]:
    port = free_port()
    said = house.folder / f"server-{port}.txt"
    command = [str(house.python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", house.model(model), "--served-model-name", model, "--host", "127.0.0.1", "--port", str(port)]
    arguments = arguments_of(model)
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    command += ["--block-size", str(arguments["block_size"])]
    if "compilation_config" in arguments:
        command += ["--compilation-config", json.dumps(arguments["compilation_config"])]
    command += ["--max-num-batched-tokens", "256", "--max-num-seqs", str(AT_ONCE), "--no-enable-prefix-caching"]
    command += ["--num-gpu-blocks-override", str(blocks)]
    command += ["--kv-transfer-config", json.dumps(transfer_config(house.connector(**connector), role))]
    with open(said, "wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT | house.surroundings,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", process, said)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def healthy(server: Server) -> bool:
    """Is it up? Raises AssertionError with what it said if it has ended."""
    assert server.process.poll() is None, f"the server ended:\n{server.text()[-4000:]}"
    import urllib.request

    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------------- traffic


def mixed(count: int, seed: int) -> list[Ask]:
    """Shared and unshared prefixes, forks, and askers that go away."""
    rng = random.Random(seed)
    asks = []
    for number, prompt in enumerate(prompts(count, seed, shared=6)):
        sampling: dict[str, Any] = {"max_tokens": rng.randrange(12, 48)}
        if number % 10 == 3:
            sampling |= {"n": 2, "temperature": 1.0, "top_k": 1}  # nothing to draw, and not called greedy
        asks.append(Ask(prompt, sampling, abort=number % 20 == 7))
    return asks


def expected(house: House, model: str, asks: Sequence[Ask]) -> list[list[dict[str, Any]]]:
    """What an engine without a cache answers, one after the other."""
    round_ = {"prompts": [a.prompt for a in asks], "samplings": [a.sampling for a in asks], "serial": True}
    outcome = house.run({"model": house.model(model), "rounds": [round_]})
    return [one["choices"] for one in answers(outcome)]


def drive(
    to: Sequence[Server], model: str, asks: Sequence[Ask], during: Callable[[int], None] | None = None
) -> Traffic:
    """Asks them all, AT_ONCE at a time of each server, in turn. `during` hears how many have been answered."""
    traffic = Traffic()

    async def all_of_them() -> None:
        gate = asyncio.Semaphore(AT_ONCE * len(to))
        timeout = aiohttp.ClientTimeout(total=4 * ANSWER_S)
        # A connection each: a server closes one that was idle for 5 s, perhaps when it is about to be used again.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

            async def one(number: int, ask: Ask) -> None:
                async with gate:
                    began = time.monotonic()
                    try:
                        await _ask(session, to[number % len(to)], model, number, ask, traffic)
                    except (aiohttp.ClientError, asyncio.TimeoutError, KeyError, ValueError) as error:
                        traffic.errors.append(f"{number}: {type(error).__name__}: {error}")
                    traffic.seconds.append(time.monotonic() - began)
                if during is not None:
                    during(len(traffic.seconds))

            await asyncio.gather(*(one(number, ask) for number, ask in enumerate(asks)))

    asyncio.run(all_of_them())
    return traffic


async def _ask(
    session: aiohttp.ClientSession, server: Server, model: str, number: int, ask: Ask, traffic: Traffic
) -> None:
    body = {"model": model, "prompt": ask.prompt, "temperature": 0, "logprobs": 0, "return_token_ids": True}
    body |= ask.sampling | ({"stream": True} if ask.abort else {})
    async with session.post(f"{server.url}/v1/completions", json=body) as answer:
        if ask.abort:
            await answer.content.readany()
            answer.close()
            return
        told = await answer.json()
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {str(told)[:300]}")
        traffic.choices[number] = [
            {"ids": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]} for choice in told["choices"]
        ]
        traffic.reports[number] = (told.get("kv_transfer_params") or {}).get("kvcluster") or {}


def wrong(traffic: Traffic, asks: Sequence[Ask], right: Sequence[list[dict[str, Any]]]) -> int:
    """Answers that differ in the least, or never came."""
    return sum(traffic.choices.get(number) != right[number] for number, ask in enumerate(asks) if not ask.abort)


def metric(server: Server, name: str) -> float:
    """The sum of a counter over its labels."""
    import urllib.request

    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line)
    )


# -------------------------------------------------------------------------------------------------------- checks


def check(house: House, model: str) -> None:
    """Mixed traffic, and for the plain model all faults."""
    asks = mixed(REQUESTS, seed=5)
    right = expected(house, model, asks)
    with listening(house) as told, servers(house, model) as two:
        traffic = drive(two, model, asks)
        proved = told.proved
        preempted = sum(metric(server, "vllm:num_preemptions_total") for server in two)
        resumed = sum(1 for report in traffic.reports.values() if report["resumed_tokens"])
        hits = _hits(traffic)
        promised = sum(report["loaded_bytes"] for report in traffic.reports.values())
        counted = sum(metric(server, "kvcluster:loaded_bytes_total") for server in two)
        exceptions = sum(server.text().count("Traceback") for server in two)
        bad = wrong(traffic, asks, right)
        house.table.add(
            f"{model}: two servers, {REQUESTS} mixed requests",
            f"{bad} wrong; {hits} loaded; {preempted:.0f} preemptions, {resumed} of them resumed from the cluster; "
            f"{exceptions} exceptions, {len(traffic.errors)} errors; longest {max(traffic.seconds):.1f} s; "
            f"{counted / 2**20:.0f} MiB by /metrics, {promised / 2**20:.0f} by answers"
            + (f"; the first error: {traffic.errors[0]}" if traffic.errors else ""),
            not bad and hits > 0 and preempted > 0 and resumed > 0 and not exceptions and not traffic.errors,
        )
        if model == "llama":
            _faults(house, model, two)
        with suppress(AssertionError):
            eventually(lambda: len(told.anywhere) == _blocks(house), 20, "a listener knows what is cached")
        there = _blocks(house)
        house.table.add(
            f"{model}: KV events, heard all the while",
            f"{len(told.anywhere)} blocks, where the cluster has {there}; token ids prove {proved} blocks of the mixed "
            f"traffic, and are false for {told.false} of all",
            len(told.anywhere) == there > 0 and proved > 0 and not told.false,
        )


def _blocks(house: House) -> int:
    with closing(Connection(house.site.address)) as connection:
        blocks: int = read_status(GrpcPort(connection), 10_000)["blocks"]
        return blocks


def _hits(traffic: Traffic) -> int:
    return sum(1 for report in traffic.reports.values() if report["loaded_tokens"])


def _faults(house: House, model: str, two: Sequence[Server]) -> None:
    asks = [ask for ask in mixed(FAULTED, seed=6) if not ask.abort]
    right = expected(house, model, asks)
    house.run({"model": house.model(model), "connector": house.connector(), "rounds": []})  # tells the spec
    drive(two, model, asks)  # so that there is something to lose
    for name, harm in {
        "a shard killed": _kill_shard,
        "the coordinator killed": _kill_coordinator,
        "a shard stopped for 8 s": _stop_shard,
        "pages corrupted": _corrupt,
    }.items():
        done: list[str] = []
        begun = threading.Event()

        def during(answered: int, harm: Any = harm, done: list[str] = done, begun: threading.Event = begun) -> None:
            if answered >= len(asks) // 5 and not begun.is_set():
                begun.set()
                threading.Thread(target=lambda: done.append(harm(house, asks)), daemon=True).start()

        traffic = drive(two, model, asks, during)
        eventually(lambda done=done: done, 60, f"{name} was done")
        bad, late = wrong(traffic, asks, right), sum(seconds > ANSWER_S for seconds in traffic.seconds)
        again = _in_use_again(two, model, seed=len(name))
        house.table.add(
            f"{model}: {name} under {len(asks)} requests",
            f"{done[0]}; {bad} wrong, {late} late, {len(traffic.errors)} errors; longest {max(traffic.seconds):.1f} s; "
            f"{_hits(traffic)} loaded; in use again after {again:.1f} s",
            not bad and not late and not traffic.errors,
        )
    _switch(house, model, two, asks[:24], right[:24])
    exceptions = sum(server.text().count("Traceback") for server in two)
    house.table.add(f"{model}: exceptions in the servers under faults", str(exceptions), not exceptions)


def _switch(house: House, model: str, two: Sequence[Server], asks: Sequence[Ask], right: Sequence[Any]) -> None:
    """Off, engines go on and compute; on, they load again."""
    hits = {}
    for cache in ("off", "on", "on"):  # once more: what is found corrupted the first time is stored again
        assert main([cache, "--address", house.site.address]) == 0
        traffic = drive(two, model, asks)
        hits[cache] = _hits(traffic)
        assert not wrong(traffic, asks, right), cache
    house.table.add(
        f"{model}: kvcluster off, and on again",
        f"0 wrong; {hits['off']} of {len(asks)} loaded while off, {hits['on']} afterwards",
        not hits["off"] and hits["on"] > 0,
    )


def _in_use_again(two: Sequence[Server], model: str, seed: int) -> float:
    """How long until a new prefix that one server computed is loaded by the other."""
    began = time.monotonic()
    for number in range(60):
        prompt = prompts(2, seed=1_000 * seed + number, longest=200)[1][:150]
        drive(two[:1], model, [Ask(prompt, {"max_tokens": 2})])
        threading.Event().wait(0.5)
        second = drive(two[1:], model, [Ask(prompt, {"max_tokens": 2})])
        if second.reports.get(0, {}).get("loaded_tokens"):
            return time.monotonic() - began
    raise AssertionError("the cache did not come into use again")


def _shards(house: House) -> list[int]:
    return victims.actors(house.site.pids(), victims.SHARD)


def _kill_shard(house: House, asks: Sequence[Ask]) -> str:
    victims.send(_shards(house)[:1], signal.SIGKILL)
    return "SIGKILL"


def _kill_coordinator(house: House, asks: Sequence[Ask]) -> str:
    victims.send(victims.actors(house.site.pids(), victims.COORDINATOR), signal.SIGKILL)
    return "SIGKILL"


def _stop_shard(house: House, asks: Sequence[Ask]) -> str:
    stopped = _shards(house)[:1]
    victims.send(stopped, signal.SIGSTOP)
    threading.Event().wait(8)
    victims.send(stopped, signal.SIGCONT)
    return "SIGSTOP"


def _corrupt(house: House, asks: Sequence[Ask]) -> str:
    """Flips a bit in pages of the first blocks of many prompts, wherever they lie."""
    flipped = 0
    spec = house.spec
    with kvcluster.connect(house.site.address, spec, token=house.site.token or None, config=CLIENT) as client:
        pages = []
        for ask in asks[:40]:
            with client.prepare_load(client.hashes(ask.prompt)[:1]) as ticket:
                if ticket.blocks:
                    into = dense(spec, 0, 1)
                    client.begin_load(ticket, [Dense(into)]).result()
                    pages.append(into.numpy().tobytes())
    for pid in _shards(house):
        flipped += victims.flip_pages(pid, dict.fromkeys(pages), 2**20)
    return f"{flipped} pages flipped"
