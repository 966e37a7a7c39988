"""Selects what is measured: our own paths, the peers that can run here, and the plan that `interleave` carries out."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.transfer import baselines, end_to_end, interleave, transported
from benchmarks.transfer.interleave import FLOOR, PEER, TRANSPORT, WHOLE, BenchDriver, TransferPlan
from benchmarks.transfer.layout import LAYOUTS
from benchmarks.transfer.processes import peer_command
from benchmarks.transfer.thresholds import verdicts
from benchmarks.transfer.worker import DENSE
from kvcluster.cli.child_process import ChildError, ChildProcess
from kvcluster.errors import ConfigError

OWN = ("shm", "tcp", "grpc")
DRIVER = "_driver.py"
PEERS = Path(__file__).parents[1]
"""The folder of the drivers of peers."""


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
    """Returns all figures, with the verdicts. `paths` names which of OWN, of the peers and of their paths are measured;
    empty means all. `layouts`: those of whole calls and peers. Raises ConfigError for an unknown name, ChildError if a
    path of our own fails."""
    for name in layouts:
        if name not in (*LAYOUTS, DENSE):
            raise ConfigError(f"there is no layout {name!r}; there is {', '.join((*LAYOUTS, DENSE))}")
    files = {file.name.removesuffix(DRIVER): file for file in sorted(peers.glob(f"*{DRIVER}"))}
    peers_wanted = wanted_peers(paths, {name: paths_of(file) for name, file in files.items()})
    wanted = [name for name in OWN if name in paths or not paths]
    drivers = [BenchDriver(baselines.__name__, FLOOR, baselines.PATHS)]
    for level, module in ((TRANSPORT, transported), (WHOLE, end_to_end)):
        of_level = {path: about for path, about in module.PATHS.items() if path.removeprefix("client ") in wanted}
        drivers += [BenchDriver(module.__name__, level, of_level)] if of_level else []
    missing = {}
    for name, chosen in peers_wanted.items():
        try:
            of_peer = peer_drivers(files[name], peer_python)
            drivers += [driver for driver in of_peer if not chosen or driver.paths.keys() <= set(chosen)]
        except ChildError as error:
            missing[name] = str(error)
    figures = interleave.run(TransferPlan(drivers, layouts, sizes, clients, rounds, moved_bytes, single_pages))
    figures.left_out |= missing
    judged = verdicts(figures.paths, figures.latencies)
    return {"rounds": rounds, "moved_bytes": moved_bytes, **asdict(figures), "verdicts": judged}


def wanted_peers(paths: Sequence[str], peers: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Returns the peers that `paths` asks for, with those of their paths that it names; [] for all of a peer. `peers`:
    the paths of each. Raises ConfigError for a name that is neither one of OWN, nor a peer, nor a peer's path."""
    known = dict.fromkeys([*OWN, *(name for peer, its in peers.items() for name in (peer, *its))])
    for name in paths:
        if name not in known:
            raise ConfigError(f"there is no path {name!r}; there is {', '.join(known)}")
    named = {peer: [path for path in its if path in paths] for peer, its in peers.items()}
    whole = {peer for peer in peers if peer in paths or not paths}
    return {peer: [] if peer in whole else its for peer, its in named.items() if its or peer in whole}


def paths_of(file: Path) -> tuple[str, ...]:
    """Returns the names of the paths of a peer's driver, whether or not the peer is installed: of PATHS in its source,
    if that is a plain dict."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Dict)
            and ast.unparse(node.targets[0]) == "PATHS"
        ):
            return tuple(str(ast.literal_eval(key)) for key in node.value.keys if isinstance(key, ast.Constant))
    return ()


def peer_drivers(file: Path, python: str) -> list[BenchDriver]:
    """Returns a driver for each path of a peer. Raises ChildError, saying why, if the peer cannot run here."""
    command = peer_command(python)
    with ChildProcess(command) as worker:
        about = worker.ask("describe", driver=str(file))
    return [BenchDriver(str(file), PEER, {path: of}, command, about["rests"]) for path, of in about["paths"].items()]
