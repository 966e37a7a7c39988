"""`kvcluster bench lookup | transfer | codec | tiers | trace`: reproducible measurements.

Each prints the setting it ran in. Times are printed as ratios within one run, since machines differ and are noisy: the
measured code and its baseline take turns, and their medians are compared. A trace is replayed only for counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvcluster.cli.extras import needs
from kvcluster.config import size
from kvcluster.errors import ConfigError
from kvcluster.eviction import POLICIES


def add(commands: Any) -> None:
    """Adds the commands."""
    bench = commands.add_parser(
        "bench", help="measure lookups, transfers and codecs on this machine, or replay a trace", allow_abbrev=False
    )
    kinds = bench.add_subparsers(dest="kind", metavar="KIND", required=True)
    lookup = kinds.add_parser("lookup", help="measure the prefix index, and lookups over gRPC", allow_abbrev=False)
    lookup.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        default=[10_000, 100_000, 1_000_000, 2_000_000],
        metavar="N",
        help="sizes of the index in blocks (default 10000 100000 1000000 2000000)",
    )
    transfer = kinds.add_parser("transfer", help="measure loads and stores over every path", allow_abbrev=False)
    _add_transfer(transfer)
    codec = kinds.add_parser("codec", help="measure speed and error of the page codecs", allow_abbrev=False)
    _add_codec(codec)
    tiers = kinds.add_parser("tiers", help="measure loads from lower tiers, stores during demotion", allow_abbrev=False)
    tiers.add_argument("--quick", action="store_true", help="measure less: 3 rounds of 32 pages, 60 stores")
    tiers.add_argument("--disk-dir", help="folder on the drive to measure (default: a temporary folder)")
    trace = kinds.add_parser("trace", help="replay a request trace for hit rates by tier and codec", allow_abbrev=False)
    _add_trace(trace)
    runs = ((lookup, _lookup), (transfer, _transfer), (codec, _codec), (tiers, _tiers), (trace, _trace))
    for kind, run in runs:
        kind.add_argument("--json", action="store_true", help="print the figures as one JSON object")
        kind.set_defaults(run=run)


def _add_transfer(transfer: Any) -> None:
    option = transfer.add_argument
    option("--quick", action="store_true", help="measure less: 3 rounds of 32 MiB, one client")
    option("--rounds", type=_positive, metavar="N", help="rounds of each measurement (default 7)")
    option("--moved", metavar="SIZE", help="bytes that each client moves in a round (default 64MiB)")
    option("--pages", nargs="+", metavar="SIZE", help="page sizes (default 64KiB 2MiB 16MiB)")
    option("--clients", nargs="+", type=_positive, metavar="N", help="numbers of client processes (default 1 2 4)")
    option("--paths", nargs="+", metavar="PATH", default=[], help="paths: shm, tcp, grpc, or a peer (default: all)")
    option("--peers", metavar="FOLDER", help="folder of the peers' drivers (default: benchmarks/ of a checkout)")
    option(
        "--peer-python",
        default=sys.executable,
        metavar="PYTHON",
        help="Python in whose environment the peers are installed (default: this one)",
    )
    option("--plot", metavar="FILE", help="draw the figures into this PNG file (default: no plot)")


def _add_codec(codec: Any) -> None:
    option = codec.add_argument
    option("--quick", action="store_true", help="measure less: 3 rounds of 8 MiB, one seed, 256 tokens of KV")
    option("--rounds", type=_positive, metavar="N", help="rounds of each speed measurement (default 7)")
    option("--dims", type=_positive, nargs="+", default=[64, 128], metavar="N", help="head dims (default 64 128)")
    option("--plot", metavar="FILE", help="draw the figures into this PNG file (default: no plot)")


def _add_trace(trace: Any) -> None:
    option = trace.add_argument
    option("file", metavar="FILE", help="trace in Mooncake's format: JSON lines of timestamp and hash_ids")
    tier = "bytes of the {} tier of all shards, as a share of the bytes of all distinct blocks (default {})"
    option("--capacity", type=_share, default=0.10, metavar="SHARE", help=tier.format("device", 0.1))
    option("--host", type=_share, default=0.05, metavar="SHARE", help=tier.format("host", 0.05))
    option("--shards", type=_positive, default=1, metavar="N", help="number of shards (default 1)")
    option("--requests", type=_positive, metavar="N", help="replay only the first N requests (default: all)")
    option("--as-tokens", type=_positive, default=16, metavar="N", help="tokens per block of the trace (default 16)")
    option("--eviction-policy", default="lru", metavar="NAME", help=f"one of {', '.join(POLICIES)} (default lru)")


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 100:
        raise argparse.ArgumentTypeError("must be a share of the bytes of all blocks, above 0 and up to 100, e.g. 0.1")
    return share


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _lookup(options: argparse.Namespace) -> int:
    with needs("cluster", "ray", "torch"):
        from kvcluster.cli.bench import lookup
    return _print(lambda: lookup.measure(options.blocks), lookup.lines, as_json=options.json)


def _transfer(options: argparse.Namespace) -> int:
    with needs("cluster", "ray", "torch"):
        from kvcluster.cli.bench.transfer import measuring, table
    draw = None
    if options.plot:  # so that a missing package is reported before the measurement
        with needs("bench", "matplotlib"):
            from kvcluster.cli.bench.transfer import picture
        draw = _into(options.plot, picture.draw)
    quick = options.quick

    def measure() -> dict[str, Any]:
        return measuring.measure(
            rounds=options.rounds or (3 if quick else 7),
            moved_bytes=size(options.moved or ("32MiB" if quick else "64MiB"), "--moved"),
            sizes=[size(text, "--pages") for text in options.pages] if options.pages else measuring.SIZES,
            clients=sorted(set(options.clients or ((1,) if quick else measuring.CLIENTS))),
            paths=options.paths,
            single_pages=100 if quick else 400,
            peers=Path(options.peers) if options.peers else measuring.peers_folder(),
            peer_python=options.peer_python,
            say=_say,
        )

    return _print(measure, table.lines, as_json=options.json, draw=draw)


def _codec(options: argparse.Namespace) -> int:
    with needs("transformers", "torch"):
        from kvcluster.cli.bench.codec import measuring, table
    if any(dim % 8 for dim in options.dims):
        raise ConfigError("--dims: each must be a multiple of 8, since codecs encode no other heads")
    draw = None
    if options.plot:
        with needs("bench", "matplotlib"):
            from kvcluster.cli.bench.codec import picture
        draw = _into(options.plot, picture.draw)
    quick = options.quick

    def measure() -> dict[str, Any]:
        return measuring.measure(
            rounds=options.rounds or (3 if quick else 7),
            dims=options.dims,
            moved_bytes=(8 if quick else 64) * 2**20,
            seeds=1 if quick else 5,
            prefix_tokens=256 if quick else 1_024,
        )

    return _print(measure, table.lines, as_json=options.json, draw=draw)


def _tiers(options: argparse.Namespace) -> int:
    with needs("cluster", "ray", "torch"):
        from kvcluster.cli.bench.tiers import measuring, table
    quick = options.quick

    def measure() -> dict[str, Any]:
        return measuring.measure(
            rounds=3 if quick else 9,
            blocks=32 if quick else 64,
            stores=60 if quick else 200,
            folder=Path(options.disk_dir) if options.disk_dir else None,
            say=_say,
        )

    return _print(measure, table.lines, as_json=options.json)


def _trace(options: argparse.Namespace) -> int:
    from kvcluster.cli.bench.trace import measuring, reading, table

    trace = reading.read(options.file, most=options.requests)

    def measure() -> dict[str, Any]:
        return measuring.measure(
            trace,
            capacity=options.capacity,
            host=options.host,
            shards=options.shards,
            block_tokens=options.as_tokens,
            eviction_policy=options.eviction_policy,
            say=_say,
        )

    return _print(measure, table.lines, as_json=options.json)


def _say(line: str) -> None:
    """Prints progress to standard error, apart from the figures."""
    print(line, file=sys.stderr, flush=True)


def _into(file: str, draw: Callable[[Mapping[str, Any], str], None]) -> Callable[[Mapping[str, Any]], None]:
    if not Path(file).absolute().parent.is_dir():
        raise ConfigError(f"cannot draw into {file}: its folder does not exist; create it, or give another file")
    return lambda figures: draw(figures, file)


def _print(
    measure: Callable[[], dict[str, Any]],
    lines: Callable[[Mapping[str, Any]], list[str]],
    *,
    as_json: bool,
    draw: Callable[[Mapping[str, Any]], None] | None = None,
) -> int:
    figures = {"setting": setting(), **measure()}
    if draw is not None:
        draw(figures)
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        print("  ".join(f"{key} {value}" for key, value in figures["setting"].items()))
        print("\n".join(lines(figures)))
    return 0


def setting() -> dict[str, Any]:
    """Returns the facts about this machine that affect the figures."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
