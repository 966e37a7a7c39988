"""Asks the coordinator where a prompt's leading blocks lie, and keeps no request waiting for long.

Questions are asked on threads; whoever routes waits for the answer as long as its patience goes. Who waits in vain
twice, or hears that nobody is there, opens a breaker: from then on requests are answered "away" at once, and now and
then one question, for which nobody waits, finds out whether the coordinator answers again, and is given longer: it runs
beside the request that was not kept waiting for it, maybe on the same cores. So one that is gone or hangs costs a few
requests a patience each, and after that none; one that is slow, now and then two.

Text has to become tokens first, which takes longer than any answer. That time is given only while the coordinator is
seen to be there: it is knocked at before, and not to be heard within the patience ends the wait.

`Explain` promises and touches nothing: to look is not to use. Of each block it names the pages that a load would read.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from kvcluster.client.arguments import prompt_hashes
from kvcluster.client.breaker import FREE_DOUBLINGS, Breaker, Leave, State
from kvcluster.client.control import NO_CALL, NOBODY, Control, GrpcPort
from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import Explain, Explained, GetNamespaces, Namespaces, Need
from kvcluster.core.reasons import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.engines.ray_serve.policy import Stretch
from kvcluster.engines.ray_serve.prompts import Prompt
from kvcluster.engines.ray_serve.settings import Settings
from kvcluster.engines.ray_serve.tokens import NoTokens, Tokens
from kvcluster.transport.rpc import Connection
from kvcluster.transport.seam import Deadline, Trouble
from kvcluster.wire.methods import COORDINATOR

T = TypeVar("T")

THREADS = 2
"""One turns text into tokens while another asks."""

MOST = 64
"""Questions under way. One more is answered "busy": those before it take longer than anybody waits."""

_FAILURES = 2
"""In a row: one may be this process's own, that had no time to hear."""

_OPEN_NS = 500_000_000
_PROBE_PATIENCES = 10
_ANSWER_MS = 250.0
"""When a question is broken off that nobody waits for any more."""

_NAMESPACES_MS = 2_000.0
_REFRESH_NS = 5_000_000_000
"""How old what is known of namespaces may be: new weights come more rarely."""

_RETRY_NS = 1_000_000_000
"""The same, while no engine has named the model."""


class Outcome(Enum):
    """How a question ended."""

    FOUND = "found"
    NOTHING = "nothing"  # no leading block is cached
    SHORT = "short"  # the prompt fills no block
    UNKNOWN = "unknown"  # no engine has named this model, or nobody has answered yet
    NO_TOKENS = "no_tokens"  # text without a tokenizer
    LATE = "late"  # the coordinator took longer than the patience
    LONG = "long"  # text took longer to become tokens than it may
    AWAY = "away"  # it has not answered lately: nobody waits
    FAILED = "failed"  # it refused, or this side has a mistake
    BUSY = "busy"  # this process had no time to ask


@dataclass(frozen=True, slots=True)
class Answer:
    """Where the leading cached blocks lie; `stretches` is empty unless FOUND."""

    outcome: Outcome
    stretches: tuple[Stretch, ...] = ()


class _Question:
    """`there` is done when the coordinator has been heard, `answer` when all is known. Neither ever raises."""

    def __init__(self, leave: Leave, allowed_s: float) -> None:
        self.leave = leave
        self.allowed_s = allowed_s  # what the coordinator may take
        self.there: Future[None] = Future()
        self.answer: Future[Answer] = Future()
        self.asking = False  # does its thread wait for the coordinator?
        self.judged = False


class Whereabouts:
    """Of one model's prompts. `find` is called on an event loop and never blocks it."""

    def __init__(self, settings: Settings, log: Callable[[str], object]) -> None:
        self._settings = settings
        self._log = log
        self._connection = Connection(settings.address, settings.token)
        self._control = Control(GrpcPort(self._connection))
        self._tokens = Tokens(settings.tokenizer, log)
        self._patience_s = settings.patience_ms / 1e3
        self._lock = threading.Lock()
        self._breaker = Breaker(failures=_FAILURES, open_ns=_OPEN_NS, doublings=FREE_DOUBLINGS)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvcluster-where")
        self._under_way = 0
        self._spec: KVSpec | None = None
        self._refreshed_ns = -_REFRESH_NS
        self._refreshing = False
        self._said: set[str] = set()

    def start(self) -> None:
        """Begins to find out what there is. Needs no coordinator yet."""
        self._tokens.start()
        self._refresh(time.monotonic_ns())

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._connection.close()

    @property
    def ready(self) -> bool:
        """Is a namespace of the model known, and its tokenizer loaded where there is to be one?"""
        return self._spec is not None and (self._tokens.ready or not self._settings.tokenizer)

    async def find(self, prompt: Prompt) -> Answer:
        """Where its blocks lie, or why that is not known in time."""
        question = self._begin(prompt)
        if isinstance(question, Answer):
            return question
        began = time.monotonic()
        if prompt.tokens is None and not await _within(question.there, self._patience_s):
            return self._gave_up(question, Outcome.BUSY)
        allowed = self._patience_s + (self._settings.text_ms / 1e3 if prompt.tokens is None else 0)
        if not await _within(question.answer, allowed - (time.monotonic() - began)):
            return self._gave_up(question, Outcome.BUSY if prompt.tokens is not None else Outcome.LONG)
        return question.answer.result()

    # ------------------------------------------------------------------------------------------ the asker's side

    def _begin(self, prompt: Prompt) -> _Question | Answer:
        now = time.monotonic_ns()
        self._refresh(now)
        if prompt.tokens is None and not self._tokens.ready:
            return Answer(Outcome.NO_TOKENS)
        with self._lock:
            spec = self._spec
            if spec is None:
                return Answer(Outcome.UNKNOWN)
            if self._under_way >= MOST:
                return Answer(Outcome.BUSY)
            leave = self._breaker.ask(now)
            if isinstance(leave, Miss):
                return Answer(Outcome.AWAY)
            probe = self._breaker.state is State.PROBING
            self._under_way += 1
        question = _Question(leave, self._patience_s * (_PROBE_PATIENCES if probe else 1))
        self._threads.submit(self._run, question, prompt, spec)
        return Answer(Outcome.AWAY) if probe else question

    def _gave_up(self, question: _Question, otherwise: Outcome) -> Answer:
        """Waited long enough. It is the coordinator's fault where its answer is what is missing."""
        if not question.asking:
            return Answer(otherwise)
        self._judge(question, Miss(MissReason.DEADLINE, "it took longer than the router's patience"))
        return Answer(Outcome.LATE)

    def _refresh(self, now: int) -> None:
        with self._lock:
            due = self._refreshed_ns + (_REFRESH_NS if self._spec is not None else _RETRY_NS)
            if self._refreshing or now < due:
                return
            self._refreshing = True
        self._threads.submit(self._read_namespaces)

    # ------------------------------------------------------------------------------------------ on a thread

    def _read_namespaces(self) -> None:
        try:
            question = GetNamespaces(NO_CALL, NOBODY)
            known = self._control.say(Namespaces, question, Deadline.after_ms(_NAMESPACES_MS)).known
            spec = _fullest(known, self._settings)
            if spec is not None:  # attached here, so that no request has to wait for that
                self._control.namespace(spec, Deadline.after_ms(_NAMESPACES_MS))
            with self._lock:
                self._spec = spec
        except Exception as error:  # what was known stays known; a thread that dies silently would be a riddle
            self._say_once(error)
        finally:
            with self._lock:
                self._refreshed_ns = time.monotonic_ns()
                self._refreshing = False

    def _run(self, question: _Question, prompt: Prompt, spec: KVSpec) -> None:
        answer = Answer(Outcome.FAILED)
        try:
            answer = self._answer(question, prompt, spec)
        except NoTokens as error:
            answer = Answer(Outcome.NO_TOKENS)
            self._say_once(error)
        except Trouble as trouble:
            answer = Answer(Outcome.LATE)
            self._judge(question, trouble.miss)
        except Exception as error:  # it must be answered: a request waits
            self._say_once(error)
        finally:
            question.asking = False
            self._leave_alone(question)
            with self._lock:
                self._under_way -= 1
            if not question.there.done():
                question.there.set_result(None)
            question.answer.set_result(answer)

    def _answer(self, question: _Question, prompt: Prompt, spec: KVSpec) -> Answer:
        settings = self._settings
        if prompt.tokens is None:
            with self._timed(question):
                self._connection.ask(COORDINATOR["Ping"], None, Deadline.after_ms(_ANSWER_MS))
            question.there.set_result(None)
        tokens = self._tokens.of(prompt, settings.max_blocks * spec.block_tokens)
        deadline = Deadline.after_ms(_ANSWER_MS)
        namespace = self._control.namespace(spec, deadline)
        hashes = prompt_hashes(namespace, tokens, spec.block_tokens, prompt.salt, None)
        if not hashes:
            return Answer(Outcome.SHORT)
        need = Need(tuple(spec.whole(group) for group in range(len(spec.groups))), Loss.Q4)
        message = Explain(NO_CALL, NOBODY, NamespaceId(b""), tuple(hashes), need)
        with self._timed(question):
            explained = self._control.ask(Explained, spec, message, deadline)
        stretches = tuple(_stretches(explained))
        return Answer(Outcome.FOUND, stretches) if stretches else Answer(Outcome.NOTHING)

    @contextmanager
    def _timed(self, question: _Question) -> Iterator[None]:
        """A question to the coordinator: how long it took is the verdict. What it raises, its caller judges."""
        began = time.monotonic()
        question.asking = True
        try:
            yield
        finally:
            question.asking = False
        late = time.monotonic() - began > question.allowed_s
        self._judge(question, Miss(MissReason.DEADLINE, "it answers too slowly") if late else None)

    def _judge(self, question: _Question, why: Miss | None) -> None:
        """Once a question: it was answered in time, or not."""
        with self._lock:
            if question.judged:
                return
            question.judged = True
            if why is None:
                self._breaker.succeeded(question.leave)
            else:
                self._breaker.failed(question.leave, why, time.monotonic_ns())

    def _leave_alone(self, question: _Question) -> None:
        """It ended and says nothing of the coordinator; where it was the probe, the next one is."""
        with self._lock:
            if not question.judged:
                question.judged = True
                self._breaker.gave_up(question.leave)

    def _say_once(self, error: Exception) -> None:
        said = f"{type(error).__name__}: {error}"
        with self._lock:
            if type(error).__name__ in self._said:
                return
            self._said.add(type(error).__name__)
        self._log(f"routes without knowing where prefixes lie: {said}")


async def _within(future: Future[T], seconds: float) -> bool:
    """Is it done by then? It goes on in any case."""
    if not future.done() and seconds > 0:
        await asyncio.wait([asyncio.wrap_future(future)], timeout=seconds)
    return future.done()


def _fullest(known: tuple[tuple[KVSpec, int], ...], settings: Settings) -> KVSpec | None:
    """The namespace that is meant, of several the one that holds most. Another adapter is never meant."""
    meant = [
        (spec, blocks)
        for spec, blocks in known
        if (spec.model, spec.adapter) == (settings.model, settings.adapter)
        and spec.weights.startswith(settings.weights)
    ]
    return max(meant, key=lambda one: one[1], default=(None, 0))[0]


def _stretches(explained: Explained) -> list[Stretch]:
    """The leading blocks that are cached, as far as each follows the one before."""
    found: list[Stretch] = []
    for fate in explained.fates:
        if fate.plan is None:
            break
        hosts = tuple(source.shard.host for of_group in fate.plan for source in of_group or ())
        if hosts:
            found.append(Stretch(fate.count, hosts))
    return found
