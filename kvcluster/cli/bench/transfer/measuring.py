"""Selects what is measured: our own paths, the peers that can run here, and the plan that `interleave` carries out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvcluster.cli.bench.transfer import baselines, end_to_end, interleave, transported
from kvcluster.cli.bench.transfer.interleave import FLOOR, PEER, TRANSPORT, WHOLE, BenchDriver, TransferPlan
from kvcluster.cli.bench.transfer.layout import LAYOUTS
from kvcluster.cli.bench.transfer.processes import peer_command
from kvcluster.cli.bench.transfer.thresholds import verdicts
from kvcluster.cli.bench.transfer.worker import DENSE
from kvcluster.cli.child_process import ChildError, ChildProcess
from kvcluster.errors import ConfigError

OWN = ("shm", "tcp", "grpc")
DRIVER = "_driver.py"
PEERS = Path(__file__).parents[4] / "benchmarks"
"""A checkout's folder of peer drivers; it does not exist if kvcluster was installed from a wheel."""


def measure(
    *,
    rounds: int,
    moved_bytes: int,
    sizes: Sequence[int],
    clients: Sequence[int],
    paths: Sequence[str],
    layouts: Sequence[str],
    single_pages: int,
    peers: Path,
    peer_python: str,
) -> dict[str, Any]:
    """Returns all figures, with the verdicts. `paths` names which of OWN and of the peers are measured; empty means
    all. `layouts`: those of whole calls and peers. Raises ConfigError for an unknown name, ChildError if a path of our
    own fails."""
    for name in layouts:
        if name not in (*LAYOUTS, DENSE):
            raise ConfigError(f"there is no layout {name!r}; there is {', '.join((*LAYOUTS, DENSE))}")
    files = {file.name.removesuffix(DRIVER): file for file in sorted(peers.glob(f"*{DRIVER}"))}
    known = [*OWN, *files]
    for name in paths:
        if name not in known:
            raise ConfigError(f"there is no path {name!r}; there is {', '.join(known)}")
    wanted = [name for name in known if name in paths or not paths]
    drivers = [BenchDriver(baselines.__name__, FLOOR, baselines.PATHS)]
    for level, module in ((TRANSPORT, transported), (WHOLE, end_to_end)):
        of_level = {path: about for path, about in module.PATHS.items() if path.removeprefix("client ") in wanted}
        drivers += [BenchDriver(module.__name__, level, of_level)] if of_level else []
    missing = {}
    for name in wanted:
        if name in files:
            try:
                drivers += peer_drivers(files[name], peer_python)
            except ChildError as error:
                missing[name] = str(error)
    figures = interleave.run(TransferPlan(drivers, layouts, sizes, clients, rounds, moved_bytes, single_pages))
    figures.left_out |= missing
    judged = verdicts(figures.paths, figures.latencies)
    return {"rounds": rounds, "moved_bytes": moved_bytes, **asdict(figures), "verdicts": judged}


def peer_drivers(file: Path, python: str) -> list[BenchDriver]:
    """Returns a driver for each path of a peer. Raises ChildError, saying why, if the peer cannot run here."""
    command = peer_command(python)
    with ChildProcess(command) as worker:
        about = worker.ask("describe", driver=str(file))
    return [BenchDriver(str(file), PEER, {path: of}, command, about["rests"]) for path, of in about["paths"].items()]
