"""A worker's side of the connector alone: real clients, memory as vLLM allocates it, and orders made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvcluster.client.client import Client
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.engines.vllm import compat
from kvcluster.engines.vllm.settings import ConnectorSettings
from kvcluster.engines.vllm.step_metadata import BlockIds, LoadOrder, Step, StepReport, StoreOrder
from kvcluster.engines.vllm.worker import WorkerSide
from kvcluster.testing import MemoryCluster
from kvcluster.transport.base import Deadline
from tests.client.build import BOUND_S, UNWRITTEN, Steps, ended, watched_client
from tests.vllm.build import engine_config, kv_caches, kv_config, spec_of

BLOCKS = 160


@dataclass
class Member:
    """A registration that has its client, or none."""

    client: Client | None
    why: str = ""
    used: list[str] = field(default_factory=list)

    @property
    def spec(self) -> KVSpec | None:
        return None if self.client is None else self.client.spec

    @property
    def wanted(self) -> str:
        return self.used[-1] if self.used else "" if self.client is None else self.client.spec.weights

    def use(self, weights_id: str) -> None:
        self.used.append(weights_id)
        self.client, left = None, self.client
        if left is not None:
            left.close()

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


@dataclass
class Outcome:
    """What a step came to, as vLLM asks for it."""

    sent: set[str]
    received: set[str]
    failed: set[str]
    invalid: set[int]
    report: StepReport


class Mover:
    """One rank of an engine over a cluster. Its memory holds its own random KV, or bytes that were never written."""

    def __init__(
        self,
        cluster: MemoryCluster,
        model: Path,
        *,
        seed: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        steps: Steps | None = None,
        joined: bool = True,
        **settings: Any,
    ) -> None:
        config = engine_config(model, tensor_parallel_size=ranks)
        kv = kv_config(config, BLOCKS)
        config.parallel_config.rank = rank
        self.layout = compat.layout(config, kv)
        self.spec = spec_of(self.layout)
        parts = dict(enumerate(self.layout.parts))
        client = watched_client(cluster, steps, self.spec, part=parts) if joined else None
        self.member = Member(client)
        self.side = WorkerSide(ConnectorSettings(address="cluster:1", **settings), self.layout, self.member)  # type: ignore[arg-type]
        self.caches = kv_caches(config, kv)
        self.side.register(self.caches)
        self.number = 0
        self.total = StepReport()
        """All that its steps have told together."""
        memory = self.memory
        memory.copy_(noise(memory.numel(), seed) if seed is not None else torch.full_like(memory, UNWRITTEN))

    @property
    def client(self) -> Client:
        assert self.member.client is not None
        return self.member.client

    @property
    def memory(self) -> torch.Tensor:
        """All of it, as bytes: one allocation, over which the groups lie."""
        return torch.tensor([], dtype=torch.uint8).set_(next(iter(self.caches.values())).untyped_storage())

    def blocks(self, ids: Sequence[int], group: int = 0) -> list[torch.Tensor]:
        """A copy of these blocks in each layer of a group."""
        return [self.caches[name][list(ids)].clone() for name in self.layout.layers[group]]

    def unwritten(self, ids: Sequence[int], group: int = 0) -> bool:
        return all(bool((layer.view(torch.uint8) == UNWRITTEN).all()) for layer in self.blocks(ids, group))

    def step(self, **orders: Any) -> Step:
        self.number += 1
        return Step(number=self.number, weights=self.spec.weights, **orders)

    def do(self, **orders: Any) -> Outcome:
        """One step from its beginning to its end, in vLLM's order."""
        step = self.step(**orders)
        self.side.before(step)
        if any(order.layerwise for order in step.loads):
            self.side.load(step)
            for names in self.layout.layers:
                for name in names:
                    self.side.wait_layer(name)
        else:
            self.side.load(step)
        return self.end(step)

    def end(self, step: Step) -> Outcome:
        """What follows the forward pass."""
        self.side.after(step)
        sent, received, failed = self.side.settle()
        report = self.side.take_report()
        self.total.merge(report)
        return Outcome(sent, received, failed, self.side.invalid_blocks(), report)

    def until_idle(self) -> Outcome:
        """Steps without orders, when nothing moves any more; what they came to together."""
        assert self.side.wait_idle(Deadline.after_ms(BOUND_S * 1e3))
        return self.do()

    def hashes(self, tokens: Sequence[int]) -> list[BlockHash]:
        return self.client.hashes(tokens)

    def store(
        self, tokens: Sequence[int], source: BlockIds, *, first: int = 0, name: str = "a", **orders: Any
    ) -> Outcome:
        """Orders the blocks of a prompt from `first` on to be stored after a step."""
        hashes = self.hashes(tokens)
        order = StoreOrder(self.number + 1, name, "", first, source, Loss.EXACT)
        return self.do(chains=((name, 0, tuple(hashes)),), stores=(order,), **orders)

    def stored(self, tokens: Sequence[int], source: BlockIds, *, first: int = 0) -> StepReport:
        """The same, and waits until others see it."""
        self.store(tokens, source, first=first)
        self.until_idle()
        assert ended(self.client)
        return self.total

    def loaded(self, order: LoadOrder) -> Outcome:
        """Orders a load and waits for it: the step with which its end was told."""
        outcome = self.do(loads=(order,))
        return outcome if outcome.report.loads else self.until_idle()

    def order(
        self, tokens: Sequence[int], into: BlockIds, *, first: int = 0, layerwise: bool = False, name: str = "b"
    ) -> LoadOrder:
        """The load of all that the cluster has of a prompt, as its scheduler would order it."""
        ticket = self.client.prepare_load(self.hashes(tokens), whole=True)
        assert ticket.blocks == first + len(into[0]), ticket.miss
        made = LoadOrder(name, "", bytes(ticket), first, into, layerwise, deadline_ms=int(BOUND_S * 1e3))
        ticket.release()  # that is the scheduler's to keep, and a hint
        return made

    def close(self) -> None:
        self.side.close()


def noise(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Bit for bit, whatever the bits mean."""
    return all(
        torch.equal(mine.contiguous().view(torch.uint8), yours.contiguous().view(torch.uint8))
        for mine, yours in zip(one, other, strict=True)
    )
