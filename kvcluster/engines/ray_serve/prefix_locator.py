"""Asks the coordinator where a prompt's leading blocks are, and bounds the time that a request waits for the answer.

The question is `Explain`, which grants nothing and does not count as a use of the blocks. For each block it names the
pages that a load would read.

Threads ask the questions. A request waits for its answer at most `patience_ms`; after consecutive failures, requests
get AWAY at once, until a probe that no request waits for finds that the coordinator answers again (bounded_calls.py). A
probe runs beside the request that did not wait for it, possibly on the same cores, so a probe's deadline is longer.

Text is tokenised first, which takes longer than any answer. A request waits for that only while the coordinator
answers: it is pinged first, and if it does not answer the ping within the patience, the wait ends.

`Hosts` finds the host on which a replica runs: Serve knows the replica's node, Ray's head node knows the node's host
name. A thread asks the head node, and only when an unknown node is looked up; until the answer arrives, that node's
host is "".
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from kvcluster.client.bounded_calls import BoundedCalls, Call, CallPolicy
from kvcluster.core.messages import Explain, Explained, GetNamespaces, Namespaces, Need
from kvcluster.core.miss import Loss, Miss
from kvcluster.core.placement import name_of
from kvcluster.core.spec import KVSpec
from kvcluster.engines.ray_serve.prompts import NoTokens, PromptTokenizer, RequestPrompt
from kvcluster.engines.ray_serve.replica_choice import Stretch
from kvcluster.engines.ray_serve.settings import RouterSettings
from kvcluster.errors import KVClusterError
from kvcluster.transfers.coordinator_client import CoordinatorClient, GrpcPort
from kvcluster.transfers.long_chains import Prompt
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.rpc import Connection
from kvcluster.transport.thread_start import start_thread
from kvcluster.wire.methods import COORDINATOR

T = TypeVar("T")

THREADS = 2
"""One tokenises text while the other asks the coordinator."""

_PROBE_PATIENCES = 10
_ANSWER_MS = 250.0
"""Deadline of a question to the coordinator, which goes on after its request has stopped waiting."""

_NAMESPACES_MS = 2_000.0
_REFRESH_NS = 5_000_000_000
"""Maximum age of the known namespaces: new weights appear less often than this."""

_RETRY_NS = 1_000_000_000
"""The same while no engine has registered the model."""


class LocateOutcome(Enum):
    """How locating a prefix ended."""

    FOUND = "found"
    NOTHING = "nothing"  # no leading block is cached
    SHORT = "short"  # the prompt fills no block
    UNKNOWN = "unknown"  # no engine has registered this model, or the coordinator has not answered yet
    NO_TOKENS = "no_tokens"  # text without a tokenizer
    LATE = "late"  # the coordinator took longer than the patience
    LONG = "long"  # tokenising the text took longer than `text_ms` allows
    AWAY = "away"  # the coordinator failed to answer recent calls: no request waits for it
    FAILED = "failed"  # the coordinator refused, or this module has a bug
    BUSY = "busy"  # this process did not get to ask in time


@dataclass(frozen=True, slots=True)
class PrefixLocation:
    """Where the leading cached blocks lie; `stretches` is empty unless FOUND."""

    outcome: LocateOutcome
    stretches: tuple[Stretch, ...] = ()


class PrefixLocator:
    """Locates the prefixes of one model's prompts. `find` is called on one event loop and never blocks it."""

    def __init__(self, settings: RouterSettings, log: Callable[[str], object]) -> None:
        self._settings = settings
        self._log = log
        self._connection = Connection(settings.address, settings.credentials)
        self._control = CoordinatorClient(GrpcPort(self._connection))
        self._tokens = PromptTokenizer(settings.tokenizer, log)
        self._patience_s = settings.patience_ms / 1e3
        policy = CallPolicy(patience_ns=settings.patience_ms * 1_000_000, probe_patiences=_PROBE_PATIENCES)
        self._calls: BoundedCalls[PrefixLocation] = BoundedCalls("kvcluster-where", policy, threads=THREADS)
        self._refresher = ThreadPoolExecutor(1, thread_name_prefix="kvcluster-namespaces")
        self._lock = threading.Lock()  # over what follows
        self._spec: KVSpec | None = None
        self._refreshed_ns = -_REFRESH_NS
        self._refreshing = False
        self._logged: set[str] = set()

    def start(self) -> None:
        """Begins to load the tokenizer and to read the namespaces. The coordinator need not run yet."""
        self._tokens.start()
        self._refresh(time.monotonic_ns())

    def close(self) -> None:
        self._calls.close()
        self._refresher.shutdown(wait=False, cancel_futures=True)
        self._connection.close()

    @property
    def ready(self) -> bool:
        """Whether a namespace of the model is known, and the tokenizer is loaded if one is configured."""
        return self._spec is not None and (self._tokens.ready or not self._settings.tokenizer)

    async def find(self, prompt: RequestPrompt) -> PrefixLocation:
        """Returns where the prompt's leading blocks are, or why that is not known in time."""
        text = prompt.tokens is None
        began = time.monotonic()
        pinged: Future[None] = Future()
        call = self._begin(prompt, pinged)
        if isinstance(call, PrefixLocation):
            return call
        if text and not await _within(pinged, self._patience_s):
            return self._gave_up(call, LocateOutcome.BUSY)
        allowed = self._patience_s + (self._settings.text_ms / 1e3 if text else 0)
        if not await _within(call.done, allowed - (time.monotonic() - began)):
            return self._gave_up(call, LocateOutcome.LONG if text else LocateOutcome.BUSY)
        return call.result or PrefixLocation(LocateOutcome.FAILED)

    # ------------------------------------------------------------------------------------------ the asker's side

    def _begin(self, prompt: RequestPrompt, pinged: Future[None]) -> Call[PrefixLocation] | PrefixLocation:
        now = time.monotonic_ns()
        self._refresh(now)
        if prompt.tokens is None and not self._tokens.ready:
            return PrefixLocation(LocateOutcome.NO_TOKENS)
        with self._lock:
            spec = self._spec
        if spec is None:
            return PrefixLocation(LocateOutcome.UNKNOWN)
        call = self._calls.start(lambda call: self._run(call, prompt, spec, pinged), now)
        if call is None:
            return PrefixLocation(LocateOutcome.BUSY)
        if isinstance(call, Miss) or call.admission.probe:
            return PrefixLocation(LocateOutcome.AWAY)
        return call

    def _gave_up(self, call: Call[PrefixLocation], otherwise: LocateOutcome) -> PrefixLocation:
        """Ends the wait: returns LATE if the call is waiting for the coordinator, otherwise `otherwise`."""
        if not call.asking:
            return PrefixLocation(otherwise)
        self._calls.late(call, time.monotonic_ns())
        return PrefixLocation(LocateOutcome.LATE)

    def _refresh(self, now: int) -> None:
        with self._lock:
            due = self._refreshed_ns + (_REFRESH_NS if self._spec is not None else _RETRY_NS)
            if self._refreshing or now < due:
                return
            self._refreshing = True
        self._refresher.submit(self._read_namespaces)

    # ------------------------------------------------------------------------------------------ on a thread

    def _read_namespaces(self) -> None:
        try:
            question = GetNamespaces()
            known = self._control.request(Namespaces, question, Deadline.after_ms(_NAMESPACES_MS)).known
            spec = _fullest(known, self._settings)
            if spec is not None:  # attach here, so that no request has to wait for it
                self._control.namespace(spec, Deadline.after_ms(_NAMESPACES_MS))
            with self._lock:
                self._spec = spec
        except Exception as error:  # the last known spec stays in use; a thread must not die silently
            self._log_once(error)
        finally:
            with self._lock:
                self._refreshed_ns = time.monotonic_ns()
                self._refreshing = False

    def _run(
        self, call: Call[PrefixLocation], prompt: RequestPrompt, spec: KVSpec, pinged: Future[None]
    ) -> PrefixLocation:
        """Catches every exception, because a request waits for the result."""
        try:
            return self._locate(call, prompt, spec, pinged)
        except NoTokens as error:
            self._log_once(error)
            return PrefixLocation(LocateOutcome.NO_TOKENS)
        except Unavailable as trouble:
            call.failure = trouble.miss
            return PrefixLocation(LocateOutcome.LATE)
        except Exception as error:
            self._log_once(error)
            return PrefixLocation(LocateOutcome.FAILED)
        finally:
            if not pinged.done():
                pinged.set_result(None)

    def _locate(
        self, call: Call[PrefixLocation], prompt: RequestPrompt, spec: KVSpec, pinged: Future[None]
    ) -> PrefixLocation:
        settings = self._settings
        if prompt.tokens is None:
            with _asking(call):
                self._connection.ask(COORDINATOR["Ping"], None, Deadline.after_ms(_ANSWER_MS))
            pinged.set_result(None)
        tokens = self._tokens.of(prompt, settings.max_blocks * spec.block_tokens)
        deadline = Deadline.after_ms(_ANSWER_MS)
        namespace = self._control.namespace(spec, deadline)
        hashes = Prompt(tokens, prompt.salt).hashes(namespace, spec.block_tokens)
        if not hashes:
            return PrefixLocation(LocateOutcome.SHORT)
        need = Need(spec.whole_parts(), Loss.Q4)
        message = Explain(tuple(hashes), need)
        with _asking(call):
            explained = self._control.ask(Explained, spec, message, deadline)
        stretches = tuple(_stretches(explained))
        return PrefixLocation(LocateOutcome.FOUND if stretches else LocateOutcome.NOTHING, stretches)

    def _log_once(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        with self._lock:
            if type(error).__name__ in self._logged:
                return
            self._logged.add(type(error).__name__)
        self._log(f"routing without prefix locations: {text}")


@contextmanager
def _asking(call: Call[PrefixLocation]) -> Iterator[None]:
    """Wraps a question to the coordinator: records how long the answer took, unless the question raises."""
    began = time.monotonic_ns()
    call.asking = True
    try:
        yield
    finally:
        call.asking = False
    call.answered(time.monotonic_ns() - began)


async def _within(future: Future[T], seconds: float) -> bool:
    """Returns whether the future is done after at most `seconds`. Does not cancel it."""
    if not future.done() and seconds > 0:
        await asyncio.wait([asyncio.wrap_future(future)], timeout=seconds)
    return future.done()


def _fullest(known: tuple[tuple[KVSpec, int], ...], settings: RouterSettings) -> KVSpec | None:
    """Returns the spec of the matching namespace with the most blocks; None if none matches the model, the adapter and
    the beginning of the weights."""
    meant = [
        (spec, blocks)
        for spec, blocks in known
        if (spec.model, spec.adapter) == (settings.model, settings.adapter)
        and spec.weights.startswith(settings.weights)
    ]
    return max(meant, key=lambda one: one[1], default=(None, 0))[0]


def _stretches(explained: Explained) -> list[Stretch]:
    """Returns the cached leading blocks, up to the first block that is a miss."""
    found: list[Stretch] = []
    for fate in explained.fates:
        if fate.plan is None:
            break
        hosts = tuple(name_of(source.shard.host) for of_group in fate.plan for source in of_group or ())
        if hosts:
            found.append(Stretch(fate.count, hosts))
    return found


_RETRY_S = 1.0


class Hosts:
    """Caches host names by node. `read` returns those of all nodes, and may block."""

    def __init__(self, read: Callable[[], Mapping[str, str]], log: Callable[[str], object]) -> None:
        self._read = read
        self._log = log
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()
        self._reading = False
        self._read_at = -_RETRY_S

    def of(self, node: str | None) -> str:
        """Returns the node's host name, or "" while it is not known. Never blocks."""
        name = self._names.get(node or "", "")
        if node and not name:
            self._begin()
        return name

    def _begin(self) -> None:
        with self._lock:
            if self._reading or time.monotonic() < self._read_at + _RETRY_S:
                return
            self._reading = True
        try:
            start_thread(threading.Thread(target=self._run, name="kvcluster-hosts", daemon=True))
        except KVClusterError as error:
            self._ended(error)

    def _run(self) -> None:
        try:
            self._names = dict(self._read())
        except Exception as error:  # a thread must not die silently
            self._ended(error)
        else:
            self._ended()

    def _ended(self, error: Exception | None = None) -> None:
        if error is not None:
            self._log(f"cannot find out on which hosts replicas run: {type(error).__name__}: {error}")
        with self._lock:
            self._read_at = time.monotonic()
            self._reading = False
