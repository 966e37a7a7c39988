"""One seed's world: the cores in their processes, on nodes, with their clocks, and the supervisors that restart them.

This module builds the world from its parts, which know it only through the protocols that it satisfies
(surroundings.py). phases.py runs it, faults.py breaks it, liveness.py waits until it is at rest.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from kvcluster.core.ids import Epoch, Holder, ShardId
from kvcluster.core.invariants import check_coordinator, check_shard
from kvcluster.core.messages import SetQuotas, TicketBody, Tier, Tombstone
from kvcluster.core.quotas import NO_QUOTAS
from kvcluster.replay.kernel import MS, SECOND, Clock, Kernel, Process
from tests.sim import content, scenario, sequence_attention, sequence_workload, workload
from tests.sim.content import Model
from tests.sim.coordinator import CoordinatorProcess
from tests.sim.coordinator_oracle import CoordinatorOracle
from tests.sim.disk import Disk
from tests.sim.journal import Journal
from tests.sim.network import Network
from tests.sim.oracle import Oracle
from tests.sim.quota_oracle import QuotaOracle
from tests.sim.sequence_oracle import SequenceOracle
from tests.sim.sequence_worker import SequenceWorker
from tests.sim.shard import ShardProcess
from tests.sim.violation import require
from tests.sim.worker import Worker

EVERY = 64
"""Steps between two checks of all invariants."""
MOST_STEPS = 60_000
"""Three times the longest of a hundred thousand seeds: beyond it, cores send one another messages without end."""
_BIRTH_NS = 10**15
"""What clocks show when a world begins: epochs are wall-clock time, and never near zero."""


class SimulatedWorld:
    """Everything of one seed. phases.run runs it, once."""

    def __init__(self, seed: int, *, whole_journal: bool = False) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.later = random.Random(f"{seed}, drawn later")
        self.sequence_rng = random.Random(f"{seed}, sequences")
        self.attention_rng = random.Random(f"{seed}, attends")
        self.revoke_rng = random.Random(f"{seed}, revokes")
        apart = (random.Random(f"{seed}, {of}") for of in ("strangers", "grants", "runs"))
        self.stranger_rng, self.grant_rng, self.train_rng = apart
        self.scenario = drawn = self._drawn()
        self.kernel = Kernel()
        self.journal = Journal(whole=whole_journal)
        self.faults: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.network = Network(
            self.kernel, rng, self.faults, delay_ns=drawn.delay_ns, loss=drawn.loss, twice=drawn.twice
        )
        self.steps, self.working = 0, True
        self.bad_wire_until, self._next_check = 0, EVERY
        self._clocks = [
            Clock(_BIRTH_NS + rng.randint(-2 * SECOND, 2 * SECOND), drawn.drift_ppm * rng.choice((-1, 1)))
            for _ in range(drawn.nodes)
        ]
        models = rng.sample(content.MODELS, drawn.models)
        self.models = [content.TRAINED.get(model, model) if drawn.trains else model for model in models]
        self.grants: list[tuple[Model, TicketBody]] = []
        self.told_to_go: dict[ShardId, None] = {}
        self.kept: tuple[Tombstone, ...] = ()
        self.disks: dict[tuple[ShardId, int, Tier], Disk] = {}  # by shard, node and tier
        self.names = [ShardId(f"s{number}") for number in range(drawn.config.shards)]
        self.oracle = Oracle(self.kernel, membership_ttl_ns=drawn.config.membership_ttl_ms * MS)
        self.coordinators: list[CoordinatorProcess] = []
        self.workers: list[Worker] = []
        self.sequence_oracle = SequenceOracle(self)
        self.quota_rng, self.quotas = random.Random(f"{seed}, times of quotas"), NO_QUOTAS
        self.quota_oracle = QuotaOracle(self)
        self.coordinator_oracle = CoordinatorOracle(self, self.oracle.placed)
        self._bound: dict[int, CoordinatorProcess] = {}
        self.incarnations: dict[tuple[ShardId, Epoch], ShardProcess] = {}
        self.shards: dict[ShardId, ShardProcess] = {}
        self._addresses: dict[str, ShardProcess] = {}
        self._holders = 0
        self.start_coordinator(rng.randrange(drawn.nodes))
        self._put_quotas(0)
        for number, name in enumerate(self.names):
            self.start_shard(name, number % drawn.nodes)
        for number in range(drawn.workers):
            self.workers.append(self._worker(f"w{number}", rng.randrange(drawn.nodes)))
        for number in range(drawn.sequences.workers if drawn.sequences is not None else 0):
            self.workers.append(self._sequence_worker(f"q{number}", self.sequence_rng.randrange(drawn.nodes)))

    def _drawn(self) -> scenario.Scenario:
        """Draws what the seed stands for."""
        windows, flushes, stops = (random.Random(f"{self.seed}, {what}") for what in ("windows", "flushes", "stops"))
        drawn = scenario.with_sequences(scenario.draw(self.rng, self.later), self.sequence_rng, windows)
        drawn = scenario.with_attention(scenario.with_flushes(drawn, flushes), self.attention_rng)
        drawn = scenario.with_late_revokes(scenario.with_stops(drawn, stops), self.revoke_rng)
        if self.seed >= scenario.FIRST_WITH_GPUS:
            drawn = scenario.with_gpus(drawn, random.Random(f"{self.seed}, gpus"))
        if self.seed >= scenario.FIRST_WITH_QUOTAS:
            drawn = scenario.with_quotas(drawn, random.Random(f"{self.seed}, quotas"))
        if self.seed >= scenario.FIRST_WITH_GRANTS:
            drawn = scenario.with_grants(drawn, self.grant_rng)
        if self.seed >= scenario.FIRST_WITH_RUNS:
            drawn = scenario.with_runs(drawn, self.train_rng)
        return scenario.with_strangers(drawn, self.stranger_rng)

    def check(self) -> None:
        """Checks all invariants of all cores."""
        require(self.steps < MOST_STEPS, f"{MOST_STEPS:,} steps, without an end")
        for coordinator in self.coordinators:
            if not coordinator.dead:
                check_coordinator(coordinator.core)
                self.sequence_oracle.check_index(coordinator)
                if self.scenario.announces:
                    coordinator.listener.judge(coordinator.core)
        for shard in self.incarnations.values():
            if not shard.dead:
                check_shard(shard.core)
                self.oracle.check_pages(shard)
        for worker in self.workers:
            if isinstance(worker, SequenceWorker) and not worker.dead:
                self.sequence_oracle.check(worker)

    def stepped(self) -> None:
        """Counts a step of a core, and checks all invariants every EVERY steps."""
        self.steps += 1
        if self.steps >= self._next_check:
            self._next_check = self.steps + EVERY
            self.kernel.at(self.kernel.now, None, self.check)

    def count(self, operation: str, outcome: str) -> None:
        self.operations[f"{operation}: {outcome}"] += 1

    def wire_flips(self) -> bool:
        """Draws whether the wire flips a bit of this layer."""
        if self.kernel.now >= self.bad_wire_until or self.rng.random() > 0.1:
            return False
        self.faults["bit flipped on the wire"] += 1
        return True

    # ------------------------------------------------------------------------------------------- processes

    def processes(self) -> Iterator[Process]:
        """Returns all processes that are not dead."""
        everyone: list[Process] = [*self.coordinators, *self.incarnations.values(), *self.workers]
        return (process for process in everyone if not process.dead)

    def start_coordinator(self, node: int) -> None:
        clock = self._clocks[node]
        epoch = Epoch(clock.read(self.kernel.now))
        self.coordinator = CoordinatorProcess(self, len(self.coordinators), node, clock, epoch)
        self.coordinators.append(self.coordinator)
        self._began(self.coordinator.name, node, epoch)
        if self.scenario.quotas:  # its host reads them before it starts
            self.coordinator.step(SetQuotas(self.quotas))
        self.coordinator.start_driver()

    def _put_quotas(self, number: int) -> None:
        """Puts the next quotas in force, if there are any: each coordinator reads them within a while."""
        if number >= len(self.scenario.quotas):
            return
        self.quotas = self.scenario.quotas[number]
        for coordinator in self.coordinators:
            if not coordinator.dead:
                at = self.kernel.now + self.quota_rng.randint(0, 200 * MS)
                self.kernel.at(at, coordinator, coordinator.step, SetQuotas(self.quotas))
        self.count("quotas", "put in force")
        self.kernel.at(self.kernel.now + self.scenario.quota_ns, None, self._put_quotas, number + 1)

    def start_shard(self, name: ShardId, node: int) -> None:
        clock = self._clocks[node]
        epoch = Epoch(clock.read(self.kernel.now))
        shard = ShardProcess(self, name, node, clock, epoch)
        self.shards[name] = self.incarnations[name, epoch] = self._addresses[shard.address.address] = shard
        self._began(name, node, epoch)
        shard.start_driver()

    def _worker(self, name: str, node: int) -> Worker:
        worker = Worker(self, name, node, self._clocks[node], self._next_holder())
        self._began(name, node, self._holders)
        for _ in range(self.rng.randint(1, 2)):
            worker.slots.append(worker.start(workload.slot(self, worker)))
        worker.slots.append(worker.start(workload.redeemer(self, worker)))
        if self.scenario.strangers and name == "w0":
            worker.slots.append(worker.start(workload.stranger(self, worker)))
        if self.scenario.trains and name == "w0":
            worker.slots.append(worker.start(workload.trainer(self, worker)))
        return worker

    def _sequence_worker(self, name: str, node: int) -> SequenceWorker:
        load = self.scenario.sequences
        assert load is not None
        holder = self._next_holder()
        model = self.sequence_rng.choice(content.SEQUENCE_MODELS)
        worker = SequenceWorker(self, name, node, self._clocks[node], holder, load=load, model=model)
        self._began(name, node, self._holders)
        worker.slots += [worker.start(worker.keep_tables()), worker.start(worker.keep_storing())]
        worker.slots += [worker.start(sequence_workload.user(self, worker)) for _ in range(load.users)]
        if self.scenario.attends:
            worker.slots.append(worker.start(sequence_attention.attender(self, worker)))
        return worker

    def _next_holder(self) -> Holder:
        self._holders += 1
        return Holder(self._holders.to_bytes(16, "big"))

    def _began(self, name: str, node: int, epoch: int) -> None:
        self.journal.add((self.kernel.now, name, "begins", (f"on node {node}, epoch", epoch)))

    def kill(self, process: Process) -> None:
        """Kills a process; after a while its supervisor starts the next incarnation, if the process was still the
        current one."""
        self.network.reset(process)
        process.kill()
        self.journal.add((self.kernel.now, process.name, "dies", ()))
        delay = self.rng.choice((20, 200, 800, 2_000)) * MS if self.working else 20 * MS
        self.kernel.at(self.kernel.now + delay, None, self._start_again, process)

    def left(self, process: Process, *, for_good: bool) -> None:
        """Handles a process that has ended itself."""
        self.kill(process)
        if for_good:
            assert isinstance(process, ShardProcess)
            require(process.shard in self.told_to_go, f"{process.name} leaves permanently, but no operator drained it")
            if process is self.shards[process.shard]:
                self.names.remove(process.shard)

    def _start_again(self, process: Process) -> None:
        match process:
            case CoordinatorProcess() if process is self.coordinator:
                self.start_coordinator(process.node)
            case ShardProcess() if process is self.shards[process.shard] and process.shard in self.names:
                self.start_shard(process.shard, process.node)
            case Worker() if process in self.workers:
                start = self._sequence_worker if isinstance(process, SequenceWorker) else self._worker
                self.workers[self.workers.index(process)] = start(process.name, process.node)

    def replace_coordinator(self) -> None:
        """Starts another coordinator on another node. Nodes that know the old one's address may keep using it for a
        while."""
        old = self.coordinator
        node = self.rng.choice([node for node in range(self.scenario.nodes) if node != old.node])
        for other in range(self.scenario.nodes):
            if other == old.node or self.rng.random() < 0.5:
                self._bound[other] = old
        self.start_coordinator(node)

    def replace_shard(self, old: ShardProcess) -> None:
        """Starts the shard's next incarnation on another node, while the old one lives."""
        node = self.rng.choice([node for node in range(self.scenario.nodes) if node != old.node])
        self.start_shard(old.shard, node)

    def end_superseded(self) -> None:
        """Supervisors end the processes that they could not reach: coordinators that were replaced, and cut-off
        incarnations of shards that were drained. Other old shards are the coordinator's to send away."""
        for coordinator in self.coordinators:
            if coordinator is not self.coordinator and not coordinator.dead:
                self.kill(coordinator)
        for shard in self.incarnations.values():
            if shard.shard not in self.names and not shard.dead:
                self.kill(shard)

    def bind(self, node: int, coordinator: CoordinatorProcess | None) -> None:
        """Makes the coordinator's name point to this one on that node; None: to the newest again."""
        if coordinator is None:
            self._bound.pop(node, None)
        else:
            self._bound[node] = coordinator

    def coordinator_seen_by(self, process: Process) -> CoordinatorProcess:
        """Returns the coordinator that its name points to on the node of this process. A node that can reach the newest
        one learns of it in the end."""
        bound = self._bound.get(process.node)
        if bound is None:
            return self.coordinator
        if bound.dead or (self.network.reaches(process.node, self.coordinator.node) and self.rng.random() < 0.05):
            self._bound.pop(process.node, None)
        return bound

    def shard_at(self, address: str) -> ShardProcess | None:
        """Returns the process that listens at that address."""
        return self._addresses.get(address)
