"""`kvcluster bench lookup | transfer | codec | tiers | trace`: figures that anyone can measure again.

Each states its setting. Times are printed as ratios within one run, since machines differ and are noisy: what is
measured and what it is compared with take turns, and medians are compared. A trace is replayed for counts alone.
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
    lookup = kinds.add_parser("lookup", help="the prefix index, and lookups over gRPC", allow_abbrev=False)
    lookup.add_argument("--blocks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 2_000_000])
    transfer = kinds.add_parser("transfer", help="loads and stores of pages, by every path", allow_abbrev=False)
    _add_transfer(transfer)
    codec = kinds.add_parser("codec", help="encoding and decoding of pages: speed and error", allow_abbrev=False)
    _add_codec(codec)
    tiers = kinds.add_parser("tiers", help="loads out of the tiers below, and stores beside them", allow_abbrev=False)
    tiers.add_argument("--quick", action="store_true", help="a first impression: 3 turns of 32 pages, 60 stores")
    tiers.add_argument("--disk-dir", help="folder on the drive to measure (default: one for temporary files)")
    trace = kinds.add_parser("trace", help="hit rates of a request trace, by tiers and codecs", allow_abbrev=False)
    _add_trace(trace)
    runs = ((lookup, _lookup), (transfer, _transfer), (codec, _codec), (tiers, _tiers), (trace, _trace))
    for kind, run in runs:
        kind.add_argument("--json", action="store_true", help="the figures, as one JSON object")
        kind.set_defaults(run=run)


def _add_transfer(transfer: Any) -> None:
    option = transfer.add_argument
    option("--quick", action="store_true", help="a first impression: 3 turns of 32 MiB, one client")
    option("--rounds", type=_positive, help="turns of each measurement (default 7)")
    option("--moved", metavar="SIZE", help="what a client moves in a turn (default 64MiB)")
    option("--pages", nargs="+", metavar="SIZE", help="sizes of pages (default 64KiB 2MiB 16MiB)")
    option("--clients", nargs="+", type=_positive, metavar="N", help="numbers of client processes (default 1 2 4)")
    option("--paths", nargs="+", metavar="PATH", default=[], help="of shm, tcp, grpc and the peers (default all)")
    option("--peers", metavar="FOLDER", help="with drivers of peers (default: benchmarks/ of a checkout)")
    option(
        "--peer-python", default=sys.executable, metavar="PYTHON", help="in whose environment the peers are installed"
    )
    option("--plot", metavar="FILE", help="draw the figures into a PNG")


def _add_codec(codec: Any) -> None:
    option = codec.add_argument
    option("--quick", action="store_true", help="a first impression: 3 turns of 8 MiB, one seed, 256 tokens of KV")
    option("--rounds", type=_positive, help="turns of each measurement of speed (default 7)")
    option("--dims", type=_positive, nargs="+", default=[64, 128], help="channels of a head (64 128)")
    option("--plot", metavar="FILE", help="draw the figures into a PNG")


def _add_trace(trace: Any) -> None:
    option = trace.add_argument
    option("file", metavar="FILE", help="a trace as Mooncake publishes them: JSON lines of timestamp and hash_ids")
    option("--capacity", type=_share, default=0.10, metavar="SHARE", help="bytes of the device tier, all shards")
    option("--host", type=_share, default=0.05, metavar="SHARE", help="bytes of the host tier, all shards")
    option("--shards", type=_positive, default=1, metavar="N", help="shards that the bytes are divided among (1)")
    option("--requests", type=_positive, metavar="N", help="only the first N requests (default all)")
    option("--as-tokens", type=_positive, default=16, metavar="N", help="tokens that a block of the trace is (16)")
    option("--eviction-policy", default="lru", metavar="NAME", help=f"of {', '.join(POLICIES)} (lru)")


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 100:
        raise argparse.ArgumentTypeError("a share of the bytes of all blocks of the trace, above 0, such as 0.1")
    return share


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _lookup(options: argparse.Namespace) -> int:
    with needs("cluster", "ray", "torch"):
        from kvcluster.cli.bench import lookup
    return _print(lambda: lookup.measure(options.blocks), lookup.lines, as_json=options.json)


def _transfer(options: argparse.Namespace) -> int:
    with needs("cluster", "ray", "torch"):
        from kvcluster.cli.bench.transfer import measuring, table
    draw = None
    if options.plot:  # what is missing is said before anything is measured
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
        raise ConfigError("--dims: heads of other than a multiple of 8 channels are not encoded")
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
    """How far it is, beside the figures."""
    print(line, file=sys.stderr, flush=True)


def _into(file: str, draw: Callable[[Mapping[str, Any], str], None]) -> Callable[[Mapping[str, Any]], None]:
    if not Path(file).absolute().parent.is_dir():
        raise ConfigError(f"cannot draw into {file}: there is no such folder")
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
    """Where this runs, as far as it bears on the figures."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
