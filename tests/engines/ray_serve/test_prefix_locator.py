"""A prompt is located through a real coordinator, and no failure there delays a request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcluster.client.bounded_calls import LIMIT
from kvcluster.engines.ray_serve import prefix_locator
from kvcluster.engines.ray_serve.prefix_locator import THREADS, LocateOutcome, PrefixLocation, PrefixLocator
from kvcluster.engines.ray_serve.prompts import RequestPrompt
from kvcluster.engines.ray_serve.replica_choice import Stretch
from kvcluster.engines.ray_serve.settings import RouterSettings
from tests.cli.served import Served
from tests.client.build import BLOCK, SPEC, prompt, spec_of
from tests.engines.ray_serve.build import save_tokenizer, store
from tests.ports import free_port
from tests.test_project import ROOT
from tests.waiting import eventually

HOST = "another"
"""Where tests.cli.served says that its shard is."""

PATIENT = {"patience_ms": 20_000, "text_ms": 20_000}
"""What is found must not depend on how busy this machine is."""

CACHED = prompt(6, seed=1)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("127.0.0.1") as served:
        store(served.coordinator, SPEC, CACHED)
        yield served


@contextmanager
def looking(address: str, ready: bool = True, **settings: Any) -> Iterator[PrefixLocator]:
    said: list[str] = []
    given = RouterSettings(address=address, **{"model": SPEC.model, **PATIENT, **settings})
    with closing(PrefixLocator(given, said.append)) as where:
        where.start()
        if ready:
            eventually(lambda: where.ready or said)
            assert not said
        yield where


def find(where: PrefixLocator, **prompt: Any) -> PrefixLocation:
    return asyncio.run(where.find(RequestPrompt(**prompt)))


def found(blocks: int) -> PrefixLocation:
    return PrefixLocation(LocateOutcome.FOUND, (Stretch(blocks, (HOST,)),))


def test_the_leading_cached_blocks_are_found_with_their_host(served: Served) -> None:
    with looking(served.coordinator) as where:
        assert find(where, tokens=CACHED) == found(6)
        assert find(where, tokens=CACHED[: 3 * BLOCK] + prompt(3, seed=2)) == found(3)
        assert find(where, tokens=prompt(3, seed=2)) == PrefixLocation(LocateOutcome.NOTHING)
        assert find(where, tokens=CACHED[: BLOCK - 1]) == PrefixLocation(LocateOutcome.SHORT)


def test_of_a_long_prompt_only_the_beginning_is_looked_for(served: Served) -> None:
    with looking(served.coordinator, max_blocks=2) as where:
        assert find(where, tokens=CACHED) == found(2)


def test_what_is_salted_is_found_with_its_salt_alone(served: Served) -> None:
    salted = prompt(2, seed=3)
    store(served.coordinator, SPEC, salted, salt=b"mine")
    with looking(served.coordinator) as where:
        assert find(where, tokens=salted) == PrefixLocation(LocateOutcome.NOTHING)
        assert find(where, tokens=salted, salt=b"mine") == found(2)


def test_to_look_counts_as_no_use(served: Served) -> None:
    import kvcluster

    with kvcluster.connect(served.coordinator, SPEC) as client, looking(served.coordinator) as where:
        before = client.status()["counters"]
        assert find(where, tokens=CACHED) == found(6)
        after = client.status()["counters"]
    assert {name: after[name] - before[name] for name in after if "hit" in name or "load" in name} == {
        name: 0 for name in after if "hit" in name or "load" in name
    }


def test_of_several_weights_the_fullest_or_the_named_ones_are_looked_in(served: Served) -> None:
    one, other = spec_of(model="two", weights="sha256:11"), spec_of(model="two", weights="sha256:22")
    store(served.coordinator, one, CACHED)
    store(served.coordinator, other, CACHED[: 2 * BLOCK])
    with looking(served.coordinator, model="two") as where:
        assert find(where, tokens=CACHED) == found(6)
    with looking(served.coordinator, model="two", weights="sha256:22") as where:
        assert find(where, tokens=CACHED) == found(2)


def test_an_adapters_blocks_are_found_by_its_content_alone(served: Served) -> None:
    store(served.coordinator, replace(SPEC, model="tuned", adapter="sha256:9"), CACHED)
    with looking(served.coordinator, model="tuned", adapter="sha256:9") as where:
        assert find(where, tokens=CACHED) == found(6)
    with looking(served.coordinator, model="tuned", ready=False) as where:
        assert find(where, tokens=CACHED) == PrefixLocation(LocateOutcome.UNKNOWN)


def test_text_is_looked_for_as_its_tokens(served: Served, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    with looking(served.coordinator, tokenizer=str(tmp_path)) as where:
        text = "Once upon a time there was a cache."
        tokens = where._tokens.of(RequestPrompt(text=text), 1_000)
        store(served.coordinator, SPEC, tokens)
        assert find(where, text=text) == found(len(tokens) // BLOCK)
        assert find(where, messages=[{"role": "user", "content": text}]) == PrefixLocation(LocateOutcome.NOTHING)
    with looking(served.coordinator) as where:
        assert find(where, text=text) == PrefixLocation(LocateOutcome.NO_TOKENS)


def test_a_model_that_no_engine_serves_yet_is_unknown_until_one_does(served: Served) -> None:
    with looking(served.coordinator, ready=False, model="late") as where:
        assert find(where, tokens=CACHED) == PrefixLocation(LocateOutcome.UNKNOWN)
        store(served.coordinator, spec_of(model="late"), CACHED)
        eventually(lambda: find(where, tokens=CACHED) == found(6))


def test_a_router_starts_without_a_coordinator_and_no_request_waits() -> None:
    with looking(f"127.0.0.1:{free_port()}", ready=False) as where:
        assert find(where, tokens=CACHED) == PrefixLocation(LocateOutcome.UNKNOWN)


class Held:
    """A tokenizer that takes until it is let go."""

    ready = True

    def __init__(self) -> None:
        self.go = threading.Event()

    def of(self, prompt: RequestPrompt, most: int) -> list[int]:
        assert self.go.wait(20)
        return CACHED


def test_text_that_takes_too_long_is_given_up_and_says_nothing_of_the_coordinator(served: Served) -> None:
    held = Held()
    with looking(served.coordinator, patience_ms=500, text_ms=0) as where:
        where._tokens = held  # type: ignore[assignment]
        outcomes = [find(where, text="Once").outcome for _ in range(THREADS + 2)]
        assert outcomes == [LocateOutcome.LONG] * THREADS + [LocateOutcome.BUSY] * 2
        held.go.set()
        eventually(lambda: find(where, tokens=CACHED) == found(6))


def test_one_question_too_many_is_answered_at_once(served: Served) -> None:
    held = Held()
    with looking(served.coordinator) as where:
        where._tokens = held  # type: ignore[assignment]

        async def all_of_them() -> list[PrefixLocation]:
            asked = {asyncio.ensure_future(where.find(RequestPrompt(text="Once"))) for _ in range(LIMIT + 1)}
            at_once, others = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert [one.result() for one in at_once] == [PrefixLocation(LocateOutcome.BUSY)]
            held.go.set()
            return await asyncio.gather(*others)

        assert asyncio.run(all_of_them()) == [found(6)] * LIMIT


@contextmanager
def apart() -> Iterator[tuple[str, Callable[[int], None]]]:
    """A coordinator in a process of its own, and what sends it a signal."""
    command = [sys.executable, "-m", "tests.cli.served", "127.0.0.1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["coordinator"]
            store(address, SPEC, CACHED)

            def send(number: int) -> None:
                process.send_signal(number)
                if number == signal.SIGSTOP:
                    os.waitpid(process.pid, os.WUNTRACED)  # until all of its threads have stopped

            yield address, send
        finally:
            process.kill()


def test_a_coordinator_that_hangs_costs_two_requests_their_patience_until_it_is_back() -> None:
    with apart() as (address, send), looking(address, patience_ms=500) as where:
        eventually(lambda: find(where, tokens=CACHED) == found(6))
        send(signal.SIGSTOP)
        outcomes = [find(where, tokens=CACHED).outcome for _ in range(4)]
        assert outcomes == [LocateOutcome.LATE, LocateOutcome.LATE, LocateOutcome.AWAY, LocateOutcome.AWAY]
        send(signal.SIGCONT)
        eventually(lambda: find(where, tokens=CACHED) == found(6))


def test_who_tries_whether_it_is_back_gives_it_longer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with looking(served.coordinator, patience_ms=20) as where:
        ask = where._control.ask

        def slowly(*given: Any) -> Any:
            threading.Event().wait(0.03)
            return ask(*given)

        monkeypatch.setattr(where._control, "ask", slowly)
        eventually(lambda: find(where, tokens=CACHED).outcome is LocateOutcome.AWAY)
        eventually(lambda: find(where, tokens=CACHED).outcome is LocateOutcome.LATE)  # a request waited again


def test_text_waits_for_no_tokenizer_while_the_coordinator_hangs() -> None:
    held = Held()
    with apart() as (address, send), looking(address, patience_ms=500) as where:
        where._tokens = held  # type: ignore[assignment]
        send(signal.SIGSTOP)
        outcomes = [find(where, text="Once").outcome for _ in range(3)]
        assert outcomes == [LocateOutcome.LATE, LocateOutcome.LATE, LocateOutcome.AWAY]
        assert not held.go.is_set()
        send(signal.SIGCONT)
        held.go.set()
        eventually(lambda: find(where, text="Once") == found(6))


def test_a_coordinator_that_is_killed_is_soon_left_alone() -> None:
    with apart() as (address, send), looking(address) as where:
        assert find(where, tokens=CACHED) == found(6)
        send(signal.SIGKILL)
        eventually(lambda: find(where, tokens=CACHED) == PrefixLocation(LocateOutcome.AWAY))


def test_a_mistake_of_ours_is_said_once_and_answered(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    where = PrefixLocator(RouterSettings(address=served.coordinator, model=SPEC.model, **PATIENT), said.append)
    with closing(where):
        where.start()
        eventually(lambda: where.ready)

        def broken(*_: object) -> None:
            raise ZeroDivisionError("oops")

        monkeypatch.setattr(prefix_locator, "Prompt", broken)
        assert [find(where, tokens=CACHED).outcome for _ in range(2)] == [LocateOutcome.FAILED] * 2
    assert said == ["routing without prefix locations: ZeroDivisionError: oops"]
