"""Engines without a model: vLLM's scheduler, our connector at both its sides, and KV with known values.

What a model would write as the KV of a token follows here from all tokens up to it, by a hash; so each time that
"attention" reads a block, every byte of it can be compared with what it should be. A step that reads anything else says
a word that no text has, and fails the test when the engine believes it. That is what a connector must never bring
about, and the only thing here that judges; what calls what, and in which order, is vLLM's own code.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.model_executor.models.utils import extract_layer_index
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheConfig, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from kvcluster.client.client import Client
from kvcluster.engines.vllm import compat
from kvcluster.engines.vllm.connector import KVClusterConnector
from kvcluster.engines.vllm.idle import IdleScheduler
from kvcluster.engines.vllm.registration import Registration
from kvcluster.engines.vllm.scheduler import SchedulerSide
from kvcluster.engines.vllm.step_metadata import Step, StepReport
from kvcluster.engines.vllm.worker import WorkerSide
from kvcluster.transport.base import Deadline
from tests.client.build import BOUND_S, ended
from tests.vllm.build import kv_caches, kv_of_stages, request_of
from tests.vllm.toy_state import Columns, StateColumns, state_of

WORDS = 250
NONSENSE = 251
"""What is said over KV that is wrong."""

ENCODER_TOKENS = 256
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Picture:
    """An image in a prompt: the name that vLLM knows it by, what is on it, and the positions of its placeholders."""

    name: str
    content: int
    offset: int
    length: int

    def feature(self) -> MultiModalFeatureSpec:
        """As the engine's core hands it to its scheduler."""
        data = MultiModalFieldElem(torch.full((3, 2, 2), float(self.content)), MultiModalBatchedField())
        place = PlaceholderRange(self.offset, self.length)
        return MultiModalFeatureSpec(MultiModalKwargsItem({"pixel_values": data}), "image", self.name, place, self.name)


class Text:
    """A prompt, and without end what is said behind it. Equal prompts with equal pictures go on alike, unless a `salt`
    keeps them apart: models do not know of salts, so no two must ever be read in place of one another."""

    def __init__(self, prompt: Sequence[int], pictures: Sequence[Picture] = (), salt: str | None = None) -> None:
        self._first = 1 + int.from_bytes((salt or "").encode("utf-8", "surrogatepass"), "little") % _MASK
        self.prompt = list(prompt)
        self._seen = {at: one.content for one in pictures for at in range(one.offset, one.offset + one.length)}
        self._tokens: list[int] = []
        self._states: list[int] = []

    def token(self, at: int) -> int:
        self._reach(at)
        return self._tokens[at]

    def values(self, start: int, stop: int) -> torch.Tensor:
        """int64, a position each: 31 bits that follow from all tokens up to it."""
        if stop > start:
            self._reach(stop - 1)
        return torch.tensor([state >> 33 for state in self._states[start:stop]], dtype=torch.int64)

    def _reach(self, at: int) -> None:
        while len(self._tokens) <= at:
            number = len(self._tokens)
            before = self._states[-1] if self._states else self._first
            token = self.prompt[number] if number < len(self.prompt) else (before >> 40) % WORDS
            self._tokens.append(token)
            before ^= self._seen.get(number, 0) << 8
            self._states.append(((before ^ (token + 1)) * 6364136223846793005 + 1442695040888963407) & _MASK)


def rows(values: torch.Tensor, layer: int, heads: range, width: int) -> torch.Tensor:
    """The KV of these positions in one layer, as bits: int32 `[positions, heads, width]`."""
    head = torch.tensor(list(heads), dtype=torch.int64)[None, :, None]
    column = torch.arange(width, dtype=torch.int64)[None, None, :]
    return ((values[:, None, None] + 1_000_003 * layer + 10_007 * head + column) & 0x7FFFFFFF).to(torch.int32)


class Rank:
    """A worker: its connector, its memory, and block tables as a model runner keeps them."""

    def __init__(self, config: VllmConfig, kv: KVCacheConfig, number: int) -> None:
        self.config = deepcopy(config)
        self.config.parallel_config.rank = number
        connector = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, deepcopy(kv))
        assert isinstance(connector, KVClusterConnector)
        self.connector = connector
        self.caches = self._allocated(kv)
        self._register()
        self.tables: dict[str, list[list[int]]] = {}
        self._kv = kv
        layout = compat.layout(self.config, deepcopy(kv))
        self._parts = [range(part.head_start, part.head_stop) if part else range(0) for part in layout.parts]
        self._state_columns = StateColumns(layout.block_tokens)
        self._columns: dict[str, Columns] = {}
        self._block = layout.block_tokens
        layers = [
            (extract_layer_index(name), name, at)
            for at, group in enumerate(kv.kv_cache_groups)
            for name in group.layer_names
        ]
        self._layers = sorted(layers)

    def _allocated(self, kv: KVCacheConfig) -> dict[str, torch.Tensor]:
        return kv_caches(self.config, kv)

    def _register(self) -> None:
        self.connector.register_kv_caches(self.caches)

    @property
    def side(self) -> WorkerSide:
        return self.connector._of_worker

    @property
    def member(self) -> Registration | None:
        return self.side._registration

    def execute(self, output: SchedulerOutput, texts: dict[str, Text]) -> tuple[KVConnectorOutput, dict[str, int]]:
        """One step as GPUModelRunner.execute_model goes through it; and what was said, by request."""
        output = deepcopy(output)
        output.kv_connector_metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        self.connector.handle_preemptions(output.kv_connector_metadata)
        self._update_tables(output)
        said: dict[str, int] = {}
        with (
            patch.multiple(mixin, get_kv_transfer_group=lambda: self.connector, get_forward_context=lambda: None),
            mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(output) as told,
        ):
            if output.total_num_scheduled_tokens:
                said = self._forward(output, texts)
        told.kv_connector_worker_meta = pickle.loads(pickle.dumps(told.kv_connector_worker_meta))
        return told, said

    def _update_tables(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self.tables.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(of_group) for of_group in new.block_ids]
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                assert blocks is not None
                self.tables[name] = [list(of_group) for of_group in blocks]
            elif blocks is not None:
                for mine, new in zip(self.tables[name], blocks, strict=True):
                    mine += new

    def _forward(self, output: SchedulerOutput, texts: dict[str, Text]) -> dict[str, int]:
        """A forward pass. Returns what is said, by request: to be looked at after `await_step`."""
        spans = spans_of(output, texts)
        self._columns = self._state_columns.step(output, spans)
        return self.compute(spans, texts, self.connector.wait_for_layer_load)

    def await_step(self) -> None:
        """Waits until the oldest step that is out has been computed."""

    def compute(
        self, spans: dict[str, tuple[int, int, int]], texts: dict[str, Text], wait: Callable[[str], object]
    ) -> dict[str, int]:
        wrong: set[str] = set()
        self._copy_states(spans)
        for layer, name, group in self._layers:
            wait(name)
            if self.state_bytes(group):
                wrong |= self._recur(spans, texts, (layer, name, group), wrong)
                continue
            for request, (start, stop, _) in spans.items():  # all write before any attends, as in a batch
                values = texts[request].values(start, stop)
                cache, blocks, offsets = self._cells(name, group, request, start, stop)
                cache[blocks, :, offsets] = rows(values + (request in wrong), layer, self._parts[group], cache.shape[3])
            for request, (_, stop, _) in spans.items():
                if not self.reads_right(request, texts[request], layer, name, group, stop):
                    wrong.add(request)
        said = {}
        for request, (_, stop, known) in spans.items():
            if stop >= known:
                said[request] = NONSENSE if request in wrong else texts[request].token(stop)
        return said

    def reads_right(self, request: str, text: Text, layer: int, name: str, group: int, stop: int) -> bool:
        """Does a query at `stop - 1` find what it needs of that layer?"""
        first = self._first_read(group, stop)
        cache, blocks, offsets = self._cells(name, group, request, first, stop)
        return torch.equal(
            cache[blocks, :, offsets], rows(text.values(first, stop), layer, self._parts[group], cache.shape[3])
        )

    def state_bytes(self, group: int) -> int:
        """The bytes of a layer's recurrent state; 0 for a group that keeps KV."""
        spec = self._kv.kv_cache_groups[group].kv_cache_spec
        return spec.state_content_size_bytes if isinstance(spec, MambaSpec) else 0

    def _copy_states(self, spans: dict[str, tuple[int, int, int]]) -> None:
        """As vLLM's preprocess_mamba."""
        for _, name, group in self._layers:
            for request in spans if self.state_bytes(group) else ():
                columns, table = self._columns[request], self.tables[request][group]
                if columns.before not in (-1, columns.after):
                    self.caches[name][table[columns.after]] = self.caches[name][table[columns.before]]

    def _recur(
        self,
        spans: dict[str, tuple[int, int, int]],
        texts: dict[str, Text],
        of_layer: tuple[int, str, int],
        wrong: set[str],
    ) -> set[str]:
        """Computes the states of a layer. Returns the requests whose state before the step was another."""
        (layer, name, group), found = of_layer, set[str]()
        for request, (start, stop, _) in spans.items():
            block = self.tables[request][group][self._columns[request].after]
            state = state_of(self.caches[name], block, self.state_bytes(group))
            heads, width = self._parts[group], len(state)
            text = texts[request]
            if start and not torch.equal(state, rows(text.values(start - 1, start), layer, heads, width).flatten()):
                found.add(request)
            spoilt = request in wrong or request in found
            state[:] = rows(text.values(stop - 1, stop) + spoilt, layer, heads, width).flatten()
        return found

    def blocks_of(self, group: int, request: str, start: int, stop: int) -> tuple[list[int], list[int]]:
        """The blocks that a step reads, and those that it writes."""
        table = self.tables[request][group]
        if self.state_bytes(group):
            columns = self._columns[request]
            return [table[at] for at in (columns.before, columns.after) if at >= 0], [table[columns.after]]
        last = -(-stop // self._block)
        return table[self._first_read(group, stop) // self._block : last], table[start // self._block : last]

    def _first_read(self, group: int, stop: int) -> int:
        """The first position that a query at `stop - 1` sees."""
        spec = self._kv.kv_cache_groups[group].kv_cache_spec
        if isinstance(spec, ChunkedLocalAttentionSpec):
            return (stop - 1) // spec.attention_chunk_size * spec.attention_chunk_size
        return max(0, stop - spec.sliding_window) if isinstance(spec, SlidingWindowSpec) else 0

    def _cells(self, name: str, group: int, request: str, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """A layer's memory, and for each position its block and its place in there."""
        at = torch.arange(start, stop)
        table = torch.tensor(self.tables[request][group])
        return self.caches[name].view(torch.int32), table[at // self._block], at % self._block

    def wait_idle(self) -> None:
        """Until nothing of this rank moves."""
        assert self.side.wait_idle(Deadline.after_ms(BOUND_S * 1e3))

    def close(self) -> None:
        self.connector.shutdown()


def spans_of(output: SchedulerOutput, texts: dict[str, Text]) -> dict[str, tuple[int, int, int]]:
    """By request: the first position that the step computes, the one behind its last, and how many tokens are known."""
    tokens, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    begun = [(new.req_id, new.num_computed_tokens, 0) for new in output.scheduled_new_reqs]
    begun += zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
    return {name: (computed, computed + tokens[name], len(texts[name].prompt) + said) for name, computed, said in begun}


class _AtOnce:
    """In place of the threads that ask the coordinator."""

    def submit(self, work: Callable[..., object], *arguments: object) -> None:
        work(*arguments)

    def shutdown(self, **how: object) -> None:
        """There are none."""


class Engine:
    """One engine replica, of pipeline ranks times tensor parallel ranks. `overlap`: each step is scheduled before the
    one before it is known, as on a GPU; with pipeline ranks as many steps are out as there are of them. A pipeline rank
    carries out a step when the one before it has carried out the next. `at_once`: lookups are answered when they are
    begun."""

    def __init__(
        self,
        config: VllmConfig,
        *,
        blocks: int = 160,
        overlap: bool = False,
        at_once: bool = False,
        rank: Callable[[VllmConfig, KVCacheConfig, int], Any] = Rank,
    ) -> None:
        config = deepcopy(config)
        config.scheduler_config.async_scheduling = overlap
        self.config = config
        of_stages = kv_of_stages(config, blocks)
        self.kv = generate_scheduler_kv_cache_config(of_stages)
        self._tensor = config.parallel_config.tensor_parallel_size
        self.ranks = [rank(config, of_stages[n // self._tensor], n) for n in range(self._tensor * len(of_stages))]
        made = AsyncScheduler if overlap else Scheduler
        self.scheduler: Scheduler = made(
            vllm_config=config,
            kv_cache_config=self.kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=config.cache_config.block_size,
            log_stats=True,
        )
        # As of a model with an encoder: its budget comes from a processor of images, which a toy has not.
        self.scheduler.max_num_encoder_input_tokens = ENCODER_TOKENS
        self.scheduler.encoder_cache_manager = EncoderCacheManager(ENCODER_TOKENS)
        if at_once:
            self.side._matcher.lookups._calls._threads = _AtOnce()  # type: ignore[assignment]
        self.texts: dict[str, Text] = {}
        self.requests: dict[str, Request] = {}
        self.params: dict[str, Any] = {}
        self.counts: Counter[str] = Counter()
        """What its connector has counted, as it comes out of vLLM's statistics."""
        self.steps: list[Step] = []
        self.reports: list[StepReport] = []
        self._aggregator = KVOutputAggregator(len(self.ranks))
        self._depth = len(of_stages) + overlap
        self._out: deque[tuple[SchedulerOutput, list[tuple[KVConnectorOutput, dict[str, int]]]]] = deque()
        """Steps that are out, with what came of their ranks so far."""
        self.on_step: Callable[[SchedulerOutput], None] = lambda output: None

    @property
    def side(self) -> SchedulerSide | IdleScheduler:
        connector = self.scheduler.connector
        assert isinstance(connector, KVClusterConnector)
        return connector._of_scheduler

    def join(self, wait_until: Callable[[Callable[[], bool]], None]) -> None:
        """Waits until every process of the engine has its client."""
        members = [self.side._registration, *(rank.member for rank in self.ranks)]
        wait_until(lambda: all(member is None or member.client is not None for member in members))

    @property
    def client(self) -> Client:
        client = self.side._registration.client
        assert client is not None
        return client

    @property
    def loaded_blocks(self) -> int:
        """Blocks that came with its loads at every rank; reports of several ranks may be of different steps."""
        return min(load.blocks for report in self.reports for load in report.loads.values())

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 1,
        pictures: Sequence[Picture] = (),
        **more: Any,
    ) -> Request:
        self.texts[name] = Text(prompt, pictures, more.get("cache_salt"))
        features = [picture.feature() for picture in pictures]
        request = request_of(name, list(prompt), max_tokens=max_tokens, mm_features=features, **more)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        """Schedules a step and carries it out; takes back what the one before it, or itself, came to."""
        output = self.scheduler.schedule()
        self.on_step(output)
        self.steps.append(output.kv_connector_metadata.step)
        self._out.append((output, []))
        for behind, (out, told) in enumerate(reversed(self._out)):
            self._advance(out, told, stages=behind + 1)
        if len(self._out) >= self._depth:
            self.take_back()
        return output

    def take_back(self) -> None:
        """The oldest step that is out ends."""
        output, told = self._out.popleft()
        self._advance(output, told, stages=len(self.ranks))
        result = self._result(output, told)
        meta = result.kv_connector_output.kv_connector_worker_meta if result.kv_connector_output else None
        if meta is not None:
            self.reports.append(meta.report)
        by_client = self.scheduler.update_from_output(output, result)
        for outputs in by_client.values():
            stats = outputs.scheduler_stats
            self.counts.update((stats and stats.kv_connector_stats) or {})
        for one in (one for outputs in by_client.values() for one in outputs.outputs):
            if one.kv_transfer_params:
                self.params[one.request_id] = one.kv_transfer_params
        for name, request in self.requests.items():
            text = self.texts[name]
            said, start = list(request.output_token_ids), len(text.prompt)
            assert said == [text.token(start + at) for at in range(len(said))], f"{name} was told nonsense"

    def _execute(self, output: SchedulerOutput) -> list[tuple[KVConnectorOutput, dict[str, int]]]:
        told: list[tuple[KVConnectorOutput, dict[str, int]]] = []
        self._advance(output, told, stages=len(self.ranks))
        return told

    def _advance(
        self, output: SchedulerOutput, told: list[tuple[KVConnectorOutput, dict[str, int]]], *, stages: int
    ) -> None:
        """The first so many pipeline ranks carry out the step, if they have not, and add what came of it."""
        for rank in self.ranks[len(told) : stages * self._tensor]:
            told.append(rank.execute(output, self.texts))

    def _result(
        self, output: SchedulerOutput, of_ranks: list[tuple[KVConnectorOutput, dict[str, int]]]
    ) -> ModelRunnerOutput:
        results = []
        for rank, (told, said) in zip(self.ranks, of_ranks, strict=True):
            rank.await_step()
            names = list(output.num_scheduled_tokens)
            results.append(
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: at for at, name in enumerate(names)},
                    sampled_token_ids=[[said[name]] if name in said else [] for name in names],
                    kv_connector_output=told,
                )
            )
        if len(results) == 1:
            return results[0]
        tokens = [result.sampled_token_ids for result in results]
        result = self._aggregator.aggregate(results, output_rank=len(results) - self._tensor)
        assert result is not None
        # A wrong byte at any rank spoils the answer of all.
        result.sampled_token_ids = [max(said) for said in zip(*tokens, strict=True)]
        return result

    def run(self, *names: str, most: int = 400) -> None:
        """Steps until these requests, or all, have ended and nothing is held back."""
        wanted = names or tuple(self.requests)
        for _ in range(most):
            if all(self.requests[name].is_finished() for name in wanted):
                return
            if not self.step().total_num_scheduled_tokens:
                self.wait_idle()
        raise AssertionError(f"{wanted} did not end in {most} steps")

    def finish(self) -> None:
        """Steps until no request is left and no block is held, as vLLM's core does where it has nothing to compute.
        Does not wait for anything else that moves."""
        for _ in range(10_000):
            if self._out:
                self.take_back()
            elif self.scheduler.has_requests():
                self.step()
                threading.Event().wait(0.001)
            else:
                return
        raise AssertionError("something is held for ever")

    def drain(self, most: int = 50, *, flush: bool = True) -> None:
        """Steps until nothing is out, held or moving, and what was stored is visible to all."""
        for _ in range(most):
            self.wait_idle()
            if not self.scheduler.has_requests() and not self._out and not self.side._planner._undrained:
                return self.flush() if flush else None
            if self.scheduler.has_requests() or not self._out:
                self.step()
            else:
                self.take_back()
        raise AssertionError("something is never given back")

    def flush(self) -> None:
        """Until what its ranks stored is visible to all."""
        for rank in self.ranks:
            client = rank.member and rank.member.client
            assert client is None or ended(client)

    def wait_idle(self) -> None:
        """Until every question is answered and nothing moves."""
        asks = isinstance(self.side, SchedulerSide)
        for lookup in list(self.side._matcher.lookups._calls._open) if asks else ():
            lookup.done.result(BOUND_S)
        for rank in self.ranks:
            rank.wait_idle()

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.scheduler.shutdown()
