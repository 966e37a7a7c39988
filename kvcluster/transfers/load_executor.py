"""Carries out a load's plan (load_plan.py): exchanges with shards, questions to the coordinator, and the outcome.

One thread drives each exchange from its pin to its last byte: a thread that waits for missing bytes cannot be woken,
and while one waits others verify and copy. The bytes pass through load_sink.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvcluster.core.messages import Explain, Explained, ReadRequest
from kvcluster.errors import KVClusterError
from kvcluster.transfers.bound_memory import BoundMemory
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.load_progress import LoadProgress
from kvcluster.transfers.load_sink import LoadSink
from kvcluster.transfers.plan_messages import (
    Answered,
    FindReplicas,
    FinishLoad,
    LoadEffect,
    LoadEvent,
    ReadEnded,
    ReadStopped,
    ReportCorrupt,
    StartRead,
    StopRead,
)
from kvcluster.transfers.plan_runner import Job
from kvcluster.transfers.read_ranges import ReadRanges
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transfers.transfer import Loaded
from kvcluster.transport.base import Deadline, Unavailable, run_to_completion


class LoadExecutor:
    """Executes one load. Calls `finish` with the outcome, and `layer_completed` whenever a layer is complete."""

    def __init__(
        self,
        control: CoordinatorClient,
        shards: ShardConnections,
        into: BoundMemory,
        progress: LoadProgress,
        deadline: Deadline,
        layer_completed: Callable[[], object],
        finish: Callable[[Loaded | None, BaseException | None], object],
    ) -> None:
        self._control = control
        self._shards = shards
        self._into = into
        self._progress = progress
        self._deadline = deadline
        self._layer_completed = layer_completed
        self._finish = finish
        self._ranges: dict[int, ReadRanges] = {}

    def perform(self, effect: LoadEffect, jobs: list[Job[LoadEvent]]) -> LoadEvent | None:
        """As PlanExecutor."""
        match effect:
            case StartRead():
                self._ranges[effect.exchange] = effect.ranges
                jobs.append(partial(self._read, effect))
            case StopRead(exchange, items):
                self._ranges[exchange].stop(items)
                return ReadStopped(exchange, items)
            case FindReplicas():
                jobs.append(partial(self._ask, effect))
            case ReportCorrupt():
                jobs.append(partial(self._report, effect))
            case FinishLoad(loaded, error):
                self._ranges.clear()
                self._finish(loaded, error)
        return None

    def _read(self, start: StartRead) -> LoadEvent:
        """Runs one exchange."""
        spec, namespace = self._progress.spec, self._progress.body.namespace
        wants = start.ranges.pieces.wants
        request = ReadRequest(namespace, start.attempt, start.shard.epoch, wants, start.accept)
        sink = LoadSink(namespace, spec, self._into, start.ranges, self._progress, self._layer_completed)
        start.ranges.last_arrival_ns = time.monotonic_ns()  # the exchange may have waited for a thread
        try:
            progress = self._shards.read(start.shard, spec, request, sink, self._deadline)
            return ReadEnded(start.exchange, run_to_completion(progress))
        except Unavailable as trouble:
            return ReadEnded(start.exchange, error=trouble.with_traceback(None))  # it would hold the caller's memory
        except BaseException as error:
            return ReadEnded(start.exchange, error=error)

    def _ask(self, ask: FindReplicas) -> LoadEvent:
        answers: list[Explained] = []
        for question in ask.questions:
            explain = Explain(question.hashes, question.need)
            try:
                answers.append(self._control.ask(Explained, self._progress.spec, explain, Deadline(ask.until_ns)))
            except KVClusterError:  # earlier answers are used; the plan knows why the other blocks failed
                break
        return Answered(ask.number, answers)

    def _report(self, report: ReportCorrupt) -> None:
        progress = self._progress
        self._shards.suspect(report.shard, progress.spec, progress.body.namespace, report.keys, self._deadline)
