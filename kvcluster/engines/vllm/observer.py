"""The scheduler's side in mode "observe": notes each request's block hashes and times, and moves nothing.

The notes go into a trace (observe/trace_file.py), from which `kvcluster report` predicts what a cluster would have
given this engine and others. No cluster is needed, none is asked, and an engine that is not served runs as well. The
hooks of vLLM store a few numbers for each request; when a request ends, its tokens are copied once, and the writer's
thread hashes them.

Hashes are rooted in the salt and adapter of the request, as in a cluster, but not in the namespace, since reading the
weights for it takes a while: the report compares the headers instead. Adapters are told apart by their paths here.
Nothing in this module may raise at the engine: a mistake ends the observing, and is logged once.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import kvcluster.engines.vllm.compat as compat
import kvcluster.engines.vllm.weights as weights
from kvcluster.core import hashing, limits
from kvcluster.core.ids import NamespaceId
from kvcluster.engines.texts import error_text, process_name
from kvcluster.engines.vllm.idle import IdleScheduler
from kvcluster.engines.vllm.registration import spec_of
from kvcluster.engines.vllm.settings import ConnectorSettings
from kvcluster.engines.vllm.stats import PrefillRate
from kvcluster.engines.vllm.step_metadata import Step, StepReport
from kvcluster.errors import KVClusterError
from kvcluster.observe.reuse_prediction import ObservedRequest
from kvcluster.observe.trace_file import UNREAD_WEIGHTS, TraceHeader, request_line, shortened
from kvcluster.observe.trace_writer import Log, TraceWriter, gentle_chain
from kvcluster.transport.thread_start import start_thread

_ROOT = NamespaceId(hashlib.sha256(b"kvcluster-observe-v1").digest())
"""The root of all observed hashes: equal in every process."""


def observer(settings: ConnectorSettings, config: Any, kv: Any, log: Log) -> IdleScheduler:
    """Returns the side for a VllmConfig and a KVCacheConfig, and begins its trace. An engine that kvcluster does not
    serve is not observed: its trace contains the reason."""
    name, facts = process_name(), {"vllm": compat.release(), "device": compat.device()}
    header = TraceHeader(os.urandom(8).hex(), name, facts=facts)
    try:
        layout = compat.layout(config, kv)
        spec = spec_of(config, layout, settings, settings.pinned_weights or UNREAD_WEIGHTS)
        stores, loads = compat.roles(config)
    except Exception as error:  # the engine starts whatever it is
        log(f"observes nothing: {error_text(error)}")
        writer = _started(settings, header, log)
        writer.keep({"note": f"{name} is not observed: {error_text(error)}"})
        return UnservedScheduler(writer)
    writer = _started(settings, replace(header, spec=spec, parts=layout.largest), log)
    if settings.pinned_weights:
        writer.keep({"weights": settings.weights})
    else:
        reading = threading.Thread(target=_fingerprint, args=(config, writer, log), daemon=True)
        reading.name = "kvcluster-fingerprint"
        try:
            start_thread(reading)
        except KVClusterError as error:
            log(f"the weights are not read, and the trace does not name them: {error}")
    log(f"observing {spec.model}: nothing is loaded or stored; the trace is {writer.path}")
    prefill = PrefillRate(settings.prefill_tokens_per_s)
    return ObservingScheduler(writer, name, layout.block_tokens, prefill, log, stores=stores, loads=loads)


def _started(settings: ConnectorSettings, header: TraceHeader, log: Log) -> TraceWriter:
    folder = Path(settings.trace_dir).expanduser()
    writer = TraceWriter(folder, header, limit_bytes=settings.trace_bytes, log=log)
    writer.start()
    return writer


def _fingerprint(config: Any, writer: TraceWriter, log: Log) -> None:
    try:
        writer.keep({"weights": weights.fingerprint(compat.checkpoint(config))})
    except Exception as error:  # a thread must not die silently
        log(f"the weights have no fingerprint, so the report takes this engine for itself: {error_text(error)}")


class UnservedScheduler(IdleScheduler):
    """The side of an engine that is not served: its trace contains the reason, and nothing else."""

    def __init__(self, writer: TraceWriter) -> None:
        super().__init__()
        self._writer = writer

    def close(self) -> None:
        self._writer.close()


@dataclass(eq=False, slots=True)
class _Seen:
    """A request since its lookup, until it ends or is preempted."""

    of_engine: Any
    preemptions: int
    at_ns: int
    local_tokens: int
    asked_tokens: int
    computed: list[tuple[int, int]] = field(default_factory=list)  # times, and tokens that have KV since


class ObservingScheduler(IdleScheduler):
    """Notes what the scheduler's side of a connector would look up and store. Every method returns at once."""

    def __init__(
        self,
        writer: TraceWriter,
        engine: str,
        block_tokens: int,
        prefill: PrefillRate,
        log: Log,
        *,
        stores: bool = True,
        loads: bool = True,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__()
        self._writer = writer
        self._engine = engine
        self._block_tokens = block_tokens
        self._log = log
        self._stores = stores
        self._loads = loads
        self._clock = clock
        self._prefill = prefill
        self._requests: dict[str, _Seen] = {}
        self._prefilling: dict[str, _Seen] = {}
        self._own = os.urandom(16)  # in the hashes of blocks that no other engine may share
        self._private_salt = b""  # not empty once the weights may have changed in memory
        self._failed = False

    # ------------------------------------------------------------------------------------------------- the hooks

    def matched(self, of_engine: Any, local_tokens: int) -> tuple[int | None, bool]:
        self._timed_request(lambda: self._looked_up(of_engine, local_tokens))
        return 0, False

    def step(self, output: Any) -> Step:
        step = super().step(output)
        self._writer.cost.steps += 1
        self._timed_step(lambda: self._began(step.number, output))
        return step

    def reported(self, report: StepReport) -> None:
        self._timed_step(lambda: self._ended(report.step))

    def finished(self, of_engine: Any) -> tuple[bool, dict[str, Any] | None]:
        self._timed_request(lambda: self._leave(of_engine.request_id))
        self._writer.cost.requests += 1
        return False, None

    def reset(self, *, ready: bool = False) -> None:
        """The weights may have changed in memory: later blocks share nothing with earlier ones."""
        self._private_salt = os.urandom(16)
        self._requests.clear()
        self._prefilling.clear()

    def close(self) -> None:
        for name in list(self._requests):
            self._guarded(lambda name=name: self._leave(name))  # type: ignore[misc]
        self._writer.close()

    # ---------------------------------------------------------------------------------------------- what they note

    def _looked_up(self, of_engine: Any, local_tokens: int) -> None:
        """vLLM asks in each step until the request runs; the last time counts."""
        if compat.is_private(of_engine):
            return
        self._leave_if_preempted(of_engine.request_id)
        asked = of_engine.num_tokens - 1 if self._loads and compat.reads_cache(of_engine) else 0
        seen = _Seen(of_engine, compat.preemptions(of_engine), self._clock(), local_tokens, asked)
        self._requests[of_engine.request_id] = seen
        self._prefilling[of_engine.request_id] = seen

    def _leave_if_preempted(self, name: str) -> None:
        """Ends the note of a request that was preempted since its lookup. Called in a step and before a lookup,
        whichever comes first."""
        seen = self._requests.get(name)
        if seen is not None and seen.preemptions < compat.preemptions(seen.of_engine):
            self._leave(name)

    def _began(self, step: int, output: Any) -> None:
        self._prefill.began(step, compat.scheduled_tokens(output), time.monotonic_ns())
        for name in compat.preempted(output):
            self._leave_if_preempted(name)

    def _ended(self, step: int) -> None:
        self._prefill.ended(step, time.monotonic_ns())
        if not self._prefilling:
            return
        for name, seen in list(self._prefilling.items()):
            tokens = seen.of_engine.num_prompt_tokens
            if compat.validated_tokens(seen.of_engine) >= tokens:
                seen.computed.append((self._clock(), tokens))
                del self._prefilling[name]

    def _leave(self, name: str) -> None:
        """The request has ended, or was preempted: its note goes to the writer."""
        seen = self._requests.pop(name, None)
        self._prefilling.pop(name, None)
        if seen is None:
            return
        tokens = compat.validated_tokens(seen.of_engine)
        tokens = min(seen.of_engine.num_tokens - 1, tokens if tokens else self._computed_before(seen))
        if tokens:
            seen.computed.append((self._clock(), tokens))
        step = self._block_tokens
        blocks = min(max(tokens, seen.asked_tokens) // step, limits.BLOCKS_PER_PROMPT)
        copied = list(seen.of_engine.all_token_ids[: blocks * step])
        extra = compat.extra_keys(seen.of_engine, step, 0, blocks, self._own)
        adapter = compat.as_bytes(compat.adapter(seen.of_engine)[1])
        salt = self._private_salt + compat.salt(seen.of_engine) + b"\0" + adapter
        request = ObservedRequest(
            engine=self._engine,
            at_ns=seen.at_ns,
            prompt_tokens=seen.of_engine.num_prompt_tokens,
            asked=min(seen.asked_tokens // step, blocks),
            local=min(seen.local_tokens // step, blocks),
            computed=tuple((at, min(n // step, blocks)) for at, n in seen.computed) if self._stores else (),
            chain=(),
            prefill_tokens_per_s=self._prefill.known() or 0,
        )
        self._writer.add(lambda: _line(request, copied, step, extra, salt), len(copied))

    def _computed_before(self, seen: _Seen) -> int:
        """Returns the tokens that had KV when the prompt was computed: vLLM has reset its own count by now."""
        return seen.computed[-1][1] if seen.computed else 0

    # ------------------------------------------------------------------------------------------- guards and clocks

    def _timed_request(self, work: Callable[[], None]) -> None:
        began = time.perf_counter_ns()
        self._guarded(work)
        self._writer.cost.request_ns += time.perf_counter_ns() - began

    def _timed_step(self, work: Callable[[], None]) -> None:
        began = time.perf_counter_ns()
        self._guarded(work)
        cost, took_ns = self._writer.cost, time.perf_counter_ns() - began
        cost.step_ns += took_ns
        cost.worst_step_ns = max(cost.worst_step_ns, took_ns)

    def _guarded(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except Exception as error:  # an observer never disturbs what it observes
            self._failed = True
            self._requests.clear()
            self._prefilling.clear()
            self._log(f"observes nothing more, after a mistake of its own: {error_text(error)}")


def _line(
    request: ObservedRequest, tokens: list[int], block_tokens: int, extra: Mapping[int, bytes], salt: bytes
) -> dict[str, Any]:
    """Makes a request's line, on the writer's thread."""
    chain = shortened(gentle_chain(hashing.root(_ROOT, salt), tokens, block_tokens, extra))
    return request_line(replace(request, chain=chain))
