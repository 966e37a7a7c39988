"""Mode "observe": notes which pages SGLang asks for and would store, in a trace for `kvcluster report`; moves nothing.

SGLang's calls become lines of a trace (observe/trace_file.py): a lookup, or a store that ends at once. Its page hashes
are chained already, so they are noted as they are, cut. SGLang asks about a batch of pages at a time and stops at the
first that is missing, so of a longer prompt only the first batch is known. It does not report how fast it computes:
give `--prefill` to the report. Nothing here raises at SGLang's threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcluster.core.groups import Part
from kvcluster.core.spec import KVSpec
from kvcluster.engines.sglang.settings import StorageSettings
from kvcluster.engines.texts import process_name
from kvcluster.observe.reuse_prediction import ObservedRequest
from kvcluster.observe.trace_file import HASH_BYTES, TraceHeader, request_line
from kvcluster.observe.trace_writer import Log, TraceWriter


class StorageObserver:
    """The trace of one rank's storage. Thread-safe."""

    def __init__(
        self,
        settings: StorageSettings,
        spec: KVSpec,
        parts: Mapping[int, Part],
        version: str,
        log: Log,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._engine = process_name()
        self._page_tokens = spec.block_tokens
        self._clock = clock
        every = tuple(parts.get(group) for group in range(len(spec.groups)))
        header = TraceHeader(os.urandom(8).hex(), self._engine, spec, every, {"sglang": version})
        folder = Path(settings.trace_dir).expanduser()
        self._writer = TraceWriter(folder, header, limit_bytes=settings.trace_bytes, log=log)
        self._writer.start()
        self._writer.keep({"weights": spec.weights})

    def asked(self, keys: Sequence[str], prefix: Sequence[str] | None) -> None:
        """Notes a lookup of these pages, behind those of `prefix`, which the engine has."""
        before = list(prefix or ())
        self._note([*before, *keys], asked=len(before) + len(keys), local=len(before), computed=0)

    def stored(self, keys: Sequence[str], prefix: Sequence[str] | None) -> None:
        """Notes that these pages, behind those of `prefix`, would be stored."""
        chain = [*(prefix or ()), *keys]
        self._note(chain, asked=0, local=0, computed=len(chain))

    def close(self) -> None:
        self._writer.close()

    def _note(self, chain: list[str], *, asked: int, local: int, computed: int) -> None:
        began, now = time.perf_counter_ns(), self._clock()

        def line() -> dict[str, Any]:
            return request_line(
                ObservedRequest(
                    engine=self._engine,
                    at_ns=now,
                    prompt_tokens=asked * self._page_tokens,
                    asked=asked,
                    local=local,
                    computed=((now, computed),) if computed else (),
                    chain=tuple(bytes.fromhex(key[: 2 * HASH_BYTES]) for key in chain),
                )
            )

        self._writer.add(line, len(chain))
        self._writer.cost.requests += 1
        self._writer.cost.request_ns += time.perf_counter_ns() - began
