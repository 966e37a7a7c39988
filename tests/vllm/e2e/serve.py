"""Two engines on Ray Serve, on two hosts with a shard each, and the router that sends a prompt where its prefix lies.

The hosts are this machine under two names: each Ray node has a UTS namespace of its own. Conversations are computed at
one of the two engines, as it comes; then each is gone on with, by the router or by power of two choices in turns, over
the same engines. Then replicas are full and the coordinator hangs and dies, and every answer must still be the same.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcluster.actors.own_ray import own_ray
from kvcluster.cli.coordinator_args import read_status
from kvcluster.transfers.coordinator_client import GrpcPort
from kvcluster.transport.base import Unavailable
from kvcluster.transport.rpc import Connection
from tests.actors.processes import descendants
from tests.chaos import victims
from tests.ports import free_port
from tests.vllm.e2e.engine import ENVIRONMENT, ON_SERVE
from tests.vllm.e2e.run import ALWAYS, BLOCK, ROOT, House, answers, differences, eventually, tokens

HOSTS = ("kv-east", "kv-west")
MODEL = "deep"
CONVERSATIONS, PREFIX, TURN = 8, 1_088, 48
"""Of each of both ways to route; tokens that were computed before, and that are new."""

AT_ONCE = 2
"""As tests.vllm.e2e.serve_app, which imports what is in the engines' environment alone."""

HELD_TOKENS = 200
"""A request that keeps its replica at work while another comes."""

FAULTED = 12
"""Requests under each fault."""

BOUND_MS = 5.0
"""Bound of the average time that the router may keep a request. Two cores that ten processes share do not wake a
process to the millisecond, so the longest time is only reported and fails nothing."""

ANSWER_S = 60.0
CLUSTER: dict[str, Any] = {
    "shards": len(HOSTS),
    "shard": {"ram_bytes": "1GiB", "report_interval_ms": 100},
    "coordinator": {"hot_replicas": 1},
}


@dataclass
class Answered:
    """One answer: what it says, how long its only token took, and what the engine did not compute."""

    number: int
    choice: Any
    seconds: float
    cached: int
    loaded: int


@dataclass
class Serving:
    """The application and the cluster, while they run."""

    url: str
    coordinator: str
    said: Path
    nodes: list[subprocess.Popen[str]]
    asked: int = 0
    right: dict[tuple[int, ...], Any] = field(default_factory=dict)
    homes: dict[tuple[int, ...], str] = field(default_factory=dict)

    def next_number(self) -> int:
        self.asked += 1
        return self.asked

    def pids(self, kind: str) -> list[int]:
        return victims.actors([pid for node in self.nodes for pid in descendants(node.pid)], kind)

    def told(self, number: int) -> dict[str, Any]:
        """What the router said of that request: "host", "outcome" and "waited", nanoseconds."""

        def found() -> list[dict[str, Any]]:
            lines = self.said.read_text(encoding="utf-8").splitlines() if self.said.exists() else []
            return [told for told in map(json.loads, lines) if told["number"] == str(number)]

        eventually(found, 10, f"the router says where request {number} went")
        return found()[-1]

    def blocks(self) -> int:
        """How many blocks the cluster holds; 0 while its coordinator is away."""
        connection = Connection(self.coordinator)
        try:
            return int(read_status(GrpcPort(connection), 2_000)["blocks"])
        except Unavailable:
            return 0
        finally:
            connection.close()


def check(house: House) -> None:
    """Every figure; those that must hold fail where they do not."""
    _control(house)
    with _serving(house) as serving:
        _prefixes(house, serving)
        _full(house, serving)
        _away(house, serving)


# ------------------------------------------------------------------------------------------------------ what is seen


def _control(house: House) -> None:
    """Whether an engine computes a prompt whole or goes on from its own cache makes no difference, or every comparison
    below is of no use."""
    rng = random.Random(2)
    round_ = {"prompts": [tokens(rng, PREFIX) for _ in range(3)], "serial": True, "sampling": {"max_tokens": 1}}
    outcome = house.run({"model": house.model(MODEL), "llm": ON_SERVE, "rounds": [round_, round_]})
    differ = differences(answers(outcome, 1), answers(outcome, 0))
    house.table.add(
        "serve: control pair, without a cluster: computed, and cached by the engine",
        f"{differ} of 3 differ",
        not differ,
    )


def _prefixes(house: House, serving: Serving) -> None:
    rng = random.Random(1)
    begun = [tokens(rng, PREFIX) for _ in range(2 * CONVERSATIONS)]
    first = [_ask(serving, prompt, plain=True) for prompt in begun]
    serving.homes = {tuple(p): serving.told(one.number)["host"] for p, one in zip(begun, first, strict=True)}
    wanted = len(begun) * (PREFIX // BLOCK)
    eventually(lambda: serving.blocks() >= wanted, 30, f"{wanted} blocks are stored")
    # The router finds the first of them before any is timed: its connection is made, its namespaces are read.
    _found_again(serving, begun[0])
    asked: dict[str, list[tuple[Answered, str, bool]]] = {"router": [], "power of two": []}
    for number, prompt in enumerate(begun):
        turn = prompt + tokens(rng, TURN)
        answered = _ask(serving, turn, plain=bool(number % 2))
        told = serving.told(answered.number)
        way = "power of two" if number % 2 else "router"
        asked[way].append((answered, told["outcome"], told["host"] == serving.homes[tuple(prompt)]))
    middle = {}
    for way, of_way in asked.items():
        home = sum(at_home for _, _, at_home in of_way)
        middle[way] = statistics.median(answered.seconds for answered, _, _ in of_way)
        cached = statistics.mean(answered.cached for answered, _, _ in of_way)
        loaded = statistics.mean(answered.loaded for answered, _, _ in of_way)
        found = [at_home for _, outcome, at_home in of_way if outcome == "found"]
        # On a busy machine the coordinator is late for some, which then go as Serve would have it.
        preferred = bool(found) and 4 * sum(found) >= 3 * len(found)
        house.table.add(
            f"serve: {way}",
            f"{home} of {len(of_way)} to the host that holds the prefix, which {len(found)} were told; of "
            f"{PREFIX + TURN} tokens {cached:.0f} were not computed, {loaded:.0f} of them loaded; "
            f"first token after {1e3 * middle[way]:.0f} ms",
            2 * cached > PREFIX and (preferred or way != "router"),
        )
    computed = statistics.median(one.seconds for one in first)
    ratio = middle["router"] / middle["power of two"]
    house.table.add(
        "serve: first token by the router, of power of two's",
        f"{ratio:.2f} (median; a prompt that is not cached: {1e3 * computed:.0f} ms)",
        True,
    )


def _full(house: House, serving: Serving) -> None:
    """The replica that holds the prefix has as many requests as it takes."""
    known = [prompt for prompt in serving.right if len(prompt) == PREFIX]
    home = serving.homes[tuple(known[0])]
    answered = None
    for _ in range(5):
        with ThreadPoolExecutor(2 * AT_ONCE) as threads:
            went = Counter[str]()
            while went[home] < AT_ONCE and went.total() - went[home] < AT_ONCE:
                number = serving.next_number()
                threads.submit(_ask, serving, known[0], new=HELD_TOKENS, number=number)
                went[serving.told(number)["host"]] += 1
            if went.total() - went[home] < AT_ONCE:  # else those that the router had no time for have filled the other
                answered = _ask(serving, known[0])
                break
    assert answered is not None, "the replica that holds the prefix was never full by itself"
    host = serving.told(answered.number)["host"]
    wrong = _wrong(serving, [(known[0], answered)])
    house.table.add(
        "serve: the preferred replica is full", f"went to {host}, not {home}; {wrong} wrong", host != home and not wrong
    )


def _away(house: House, serving: Serving) -> None:
    """The coordinator hangs, and is killed: what that costs in the router, and when it is in use again."""
    known = [prompt for prompt in serving.right if len(prompt) == PREFIX]
    for what in (signal.SIGSTOP, signal.SIGKILL):
        coordinators = serving.pids(victims.COORDINATOR)
        assert len(coordinators) == 1, coordinators
        victims.send(coordinators, what)
        asked = [(known[n % len(known)], _ask(serving, known[n % len(known)])) for n in range(FAULTED)]
        if what == signal.SIGSTOP:
            victims.send(coordinators, signal.SIGCONT)
        told = [serving.told(answered.number) for _, answered in asked]
        outcomes = Counter(one["outcome"] for one in told)
        waited_ms = [one["waited"] / 1e6 for one in told]
        wrong = _wrong(serving, asked)
        slowest = max(answered.seconds for _, answered in asked)
        began = time.monotonic()
        _found_again(serving, known[0])
        house.table.add(
            f"serve: the coordinator gets {what.name} under {FAULTED} requests",
            f"{dict(outcomes)}; the router took {statistics.mean(waited_ms):.2f} ms each, {max(waited_ms):.1f} at most"
            f"; {wrong} wrong; slowest answer {slowest:.1f} s; in use again after {time.monotonic() - began:.1f} s",
            statistics.mean(waited_ms) <= BOUND_MS and not wrong,
        )


def _found_again(serving: Serving, prompt: Sequence[int]) -> None:
    """The router is told where that prompt's prefix lies."""
    outcomes = Counter[str]()

    def found() -> bool:
        outcomes[serving.told(_ask(serving, prompt).number)["outcome"]] += 1
        return outcomes["found"] > 0

    try:
        eventually(found, 60, "the router finds a prefix")
    except AssertionError as error:
        raise AssertionError(f"{error}, but {dict(outcomes)}; the cluster holds {serving.blocks()} blocks") from None


def _wrong(serving: Serving, asked: Sequence[tuple[Sequence[int], Answered]]) -> int:
    return sum(answered.choice != serving.right[tuple(prompt)] for prompt, answered in asked)


def _ask(serving: Serving, prompt: Sequence[int], *, plain: bool = False, new: int = 1, number: int = 0) -> Answered:
    """One request. What was first answered to a prompt is what is right: it was computed, and nothing was broken."""
    number = number or serving.next_number()
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": new, "temperature": 0, "logprobs": 1}
    body["return_token_ids"] = True
    headers = {"Content-Type": "application/json", "x-number": str(number)} | ({"x-plain": "1"} if plain else {})
    request = urllib.request.Request(f"{serving.url}/v1/completions", json.dumps(body).encode(), headers)
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        answer = json.load(response)
    seconds = time.perf_counter() - began
    [choice] = answer["choices"]
    what = (choice["token_ids"], choice["logprobs"]["token_logprobs"])
    if new == 1:
        serving.right.setdefault(tuple(prompt), what)
    report = (answer.get("kv_transfer_params") or {}).get("kvcluster") or {}
    details = answer["usage"].get("prompt_tokens_details") or {}
    return Answered(number, what, seconds, details.get("cached_tokens") or 0, report.get("loaded_tokens", 0))


# ------------------------------------------------------------------------------------------------------ what runs


def settings_of_cluster() -> str:
    """Returns the settings of the cluster, at a port that is free."""
    return json.dumps(CLUSTER | {"server": {"port": 0}})


@contextmanager
def _serving(house: House) -> Iterator[Serving]:
    """Two nodes, a cluster over both, and the application; all of it goes at the end."""
    port, said = free_port(), house.folder / "router.json"
    with ExitStack() as stack:
        stack.enter_context(own_ray())
        head, ray_address = _node(stack, house, HOSTS[0], "")
        nodes = [head, *(_node(stack, house, host, ray_address)[0] for host in HOSTS[1:])]
        started = subprocess.run(
            [
                str(house.python),
                "-m",
                "tests.vllm.e2e.start_cluster",
                ray_address,
                settings_of_cluster(),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert started.returncode == 0, started.stderr[-4000:]
        coordinator = started.stdout.split()[-1]
        connector = {"address": coordinator, "report": True, "prefill_tokens_per_s": ALWAYS}
        app = {"ray": ray_address, "port": port, "model": house.model(MODEL), "connector": connector}
        command = [str(house.python), "-m", "tests.vllm.e2e.serve_app", json.dumps(app | {"said": str(said)})]
        application = _program(stack, house, "application", command)
        assert application.stdout is not None
        up = next((line for line in application.stdout if line == "up\n"), "")
        assert up, f"the application did not start: {_text(house, 'application')[-4000:]}"
        yield Serving(f"http://127.0.0.1:{port}", coordinator, said, nodes)


def _node(stack: ExitStack, house: House, host: str, head: str) -> tuple[subprocess.Popen[str], str]:
    """A Ray node on a host of that name, and where the head is."""
    has = {"num_cpus": 4, "memory": 2**30, "resources": {"engine": 1}}
    unshare = ["unshare", "--uts"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--uts"]
    named = [*unshare, "sh", "-c", 'hostname "$0" && exec "$@"', host]
    program = [str(house.python), "-m", "tests.engines.ray_serve.nodes", str(house.folder / "ray"), head]
    process = _program(stack, house, host, [*named, *program, json.dumps(has)])
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"no Ray node on {host}: {_text(house, host)[-4000:]}"
    return process, json.loads(line)["address"]


def _program(stack: ExitStack, house: House, name: str, command: Sequence[str]) -> subprocess.Popen[str]:
    """A program that goes when its stdin ends; what it leaves of its own is ended too."""
    with open(house.folder / f"{name}.txt", "wb") as said:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT | house.surroundings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    below = descendants(process.pid)
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    victims.send(below, signal.SIGKILL)


def _text(house: House, name: str) -> str:
    return (house.folder / f"{name}.txt").read_text(encoding="utf-8", errors="replace")
