"""Selects what is measured: our own paths, the peers that can run here, and the plan that `interleave` carries out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvcluster.cli.bench.transfer import baselines, end_to_end, interleave, pages, transported
from kvcluster.cli.bench.transfer.interleave import FLOOR, PEER, TRANSPORT, WHOLE, Lane, TurnsPlan
from kvcluster.cli.bench.transfer.processes import probe
from kvcluster.cli.bench.transfer.thresholds import verdicts
from kvcluster.errors import ConfigError

OWN = ("shm", "tcp", "grpc")
CLIENTS = (1, 2, 4)
DRIVER = "_driver.py"
SWEPT_BYTES = 256 * 2**20
"""More than most CPU caches hold."""

SIZES = pages.SIZES
"""Page sizes that can be measured."""

_LEVELS = {FLOOR: baselines, TRANSPORT: transported, WHOLE: end_to_end}
_CHECKOUT = Path(__file__).parents[4]


def peers_folder() -> Path | None:
    """Returns a checkout's folder of peer drivers; None if kvcluster was installed from a wheel."""
    folder = _CHECKOUT / "benchmarks"
    return folder if folder.is_dir() else None


def measure(
    *,
    rounds: int,
    moved_bytes: int,
    sizes: Sequence[int],
    clients: Sequence[int],
    paths: Sequence[str],
    single_pages: int,
    peers: Path | None,
    peer_python: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Returns all figures, with the verdicts. `paths` names which of OWN and of the peers are measured; empty means
    all. Raises ConfigError for an unknown name, PartyError if a path of our own fails."""
    drivers = {file.name.removesuffix(DRIVER): file for file in sorted(peers.glob(f"*{DRIVER}"))} if peers else {}
    for page_bytes in sizes:
        pages.shape(page_bytes)
    unknown = [name for name in paths if name not in (*OWN, *drivers)]
    if unknown:
        raise ConfigError(f"there is no path {unknown[0]!r}; there is {', '.join([*OWN, *drivers])}")
    wanted = paths or [*OWN, *drivers]
    lanes = [
        Lane(driver.__name__, path, level, about["over"], about["note"])
        for level, driver in _LEVELS.items()
        for path, about in driver.PATHS.items()
        if level == FLOOR or path.removeprefix("client ") in wanted
    ]
    left_out = {}
    for name, file in drivers.items():
        if name in wanted:
            found = probe(str(file), peer_python)
            if found["missing"]:
                left_out[name] = found["missing"]
            else:
                lanes += [
                    Lane(str(file), path, PEER, about["over"], about["note"], found["rests"])
                    for path, about in found["paths"].items()
                ]
    plan = TurnsPlan(lanes, sizes, clients, rounds, moved_bytes, SWEPT_BYTES, single_pages, peer_python, say)
    figures = interleave.run(plan)
    figures.left_out |= left_out
    judged = verdicts(figures.paths, figures.latencies)
    return {"rounds": rounds, "moved_bytes": moved_bytes, **asdict(figures), "verdicts": judged}
