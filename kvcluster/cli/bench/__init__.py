"""`kvcluster bench lookup | transfer | codec | tiers | attend | sequences | trace`: reproducible measurements.

Each prints the setting it ran in. Times are printed as ratios within one run, since machines differ and are noisy: the
measured code and its baseline take turns, and their medians are compared. A trace is replayed only for counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from kvcluster.cli.argument_types import positive
from kvcluster.config import size
from kvcluster.errors import ConfigError
from kvcluster.eviction import POLICIES
from kvcluster.extras import needs


def add(commands: Any) -> None:
    """Adds the commands."""
    bench = commands.add_parser(
        "bench", help="measure lookups, transfers and codecs on this machine, or replay a trace", allow_abbrev=False
    )
    kinds = bench.add_subparsers(dest="kind", metavar="KIND", required=True)

    def kind(
        name: str, run: Callable[[argparse.Namespace], int], does: str, *, quick: str = "", plot: bool = False
    ) -> Any:
        parser = kinds.add_parser(name, help=does, allow_abbrev=False)
        parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
        if quick:
            parser.add_argument("--quick", action="store_true", help=f"measure less: {quick}")
        if plot:
            parser.add_argument("--plot", metavar="FILE", help="draw the figures into this PNG file (default: no plot)")
        parser.set_defaults(run=run)
        return parser.add_argument

    _add_lookup(kind("lookup", _lookup, "measure the prefix index, and lookups over gRPC"))
    quick = "3 rounds of 32 MiB, one client"
    _add_transfer(kind("transfer", _transfer, "measure loads and stores over every path", quick=quick, plot=True))
    quick = "3 rounds of 8 MiB, one seed, 256 tokens of KV"
    _add_codec(kind("codec", _codec, "measure speed and error of the page codecs", quick=quick, plot=True))
    quick = "3 rounds of 32 pages, 60 stores"
    _add_tiers(kind("tiers", _tiers, "measure loads from lower tiers, stores during demotion", quick=quick))
    quick = "3 rounds over 1,024 tokens, prefill of 64"
    _add_attend(kind("attend", _attend, "measure attention over the pages of sequences", quick=quick, plot=True))
    does, quick = "measure a sequence as it grows to a million tokens", "1,024 and 4,096 tokens, 20 calls each"
    _add_sequences(kind("sequences", _sequences, does, quick=quick, plot=True))
    _add_trace(kind("trace", _trace, "replay a request trace for hit rates by tier and codec"))


def _add_lookup(option: Callable[..., object]) -> None:
    option(
        "--blocks",
        type=positive,
        nargs="+",
        default=[10_000, 100_000, 1_000_000, 2_000_000],
        metavar="N",
        help="sizes of the index in blocks (default 10000 100000 1000000 2000000)",
    )


def _add_transfer(option: Callable[..., object]) -> None:
    option("--rounds", type=positive, metavar="N", help="rounds of each measurement (default 7)")
    option("--moved", metavar="SIZE", help="bytes that each client moves in a round (default 128MiB)")
    option(
        "--pages",
        nargs="+",
        metavar="PAGE",
        help="64KiB, 2MiB, 16MiB, or a model, whose 16-token pages are moved: llama-3-8b (2 MiB), llama-3-70b (5 MiB), "
        "deepseek-v3 (1.07 MiB) (default 64KiB and the models)",
    )
    option(
        "--layouts",
        nargs="+",
        metavar="LAYOUT",
        default=["nhd", "dense"],
        help="engine's layouts of whole calls and peers: nhd, hnd, cpu, transformers, dense (default nhd dense)",
    )
    option("--clients", nargs="+", type=positive, metavar="N", help="numbers of client processes (default 1 2)")
    option("--paths", nargs="+", metavar="PATH", default=[], help="paths: shm, tcp, grpc, or a peer (default: all)")
    option("--peers", type=Path, metavar="FOLDER", help="folder of the peers' drivers (default: that of a checkout)")
    option(
        "--peer-python",
        default=sys.executable,
        metavar="PYTHON",
        help="Python in whose environment the peers are installed (default: this one)",
    )


def _add_codec(option: Callable[..., object]) -> None:
    option("--rounds", type=positive, metavar="N", help="rounds of each speed measurement (default 7)")
    option("--dims", type=positive, nargs="+", default=[64, 128], metavar="N", help="head dims (default 64 128)")


def _add_tiers(option: Callable[..., object]) -> None:
    option("--disk-dir", type=Path, help="folder on the drive to measure (default: a temporary folder)")


def _add_attend(option: Callable[..., object]) -> None:
    option("--tokens", type=positive, nargs="+", metavar="N", help="tokens of context (default 1024 8192 65536)")
    option("--rounds", type=positive, metavar="N", help="rounds of each measurement (default 11)")
    option("--model", default="llama-3-8b", help="llama-3-8b, llama-3-70b or deepseek-v3 (default llama-3-8b)")
    option("--threads", type=positive, default=2, metavar="N", help="threads of the row with several (default 2)")
    option("--forks", type=positive, default=8, metavar="N", help="forks of the row with several (default 8)")
    option("--prefill", type=positive, metavar="N", help="query tokens of prefill (default 512)")


def _add_sequences(option: Callable[..., object]) -> None:
    option(
        "--tokens",
        type=positive,
        nargs="+",
        metavar="N",
        help="lengths at which calls are measured, 1024 or more (default 1024 4096 16384 65536 262144 1048576)",
    )
    option("--calls", type=positive, metavar="N", help="calls of each measurement (default 100)")
    option("--decoded", type=positive, metavar="N", help="tokens decoded to count calls (default 4096)")


def _add_trace(option: Callable[..., object]) -> None:
    option("file", metavar="FILE", help="trace in Mooncake's format: JSON lines of timestamp and hash_ids")
    tier = "bytes of the {} tier of all shards, as a share of the bytes of all distinct blocks (default {})"
    option("--capacity", type=_share, default=0.10, metavar="SHARE", help=tier.format("device", 0.1))
    option("--host", type=_share, default=0.05, metavar="SHARE", help=tier.format("host", 0.05))
    option("--shards", type=positive, default=1, metavar="N", help="number of shards (default 1)")
    option("--requests", type=positive, metavar="N", help="replay only the first N requests (default: all)")
    option("--as-tokens", type=positive, default=16, metavar="N", help="tokens per block of the trace (default 16)")
    option("--eviction-policy", default="lru", metavar="NAME", help=f"one of {', '.join(POLICIES)} (default lru)")


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 100:
        raise argparse.ArgumentTypeError("must be a share of the bytes of all blocks, above 0 and up to 100, e.g. 0.1")
    return share


def _lookup(options: argparse.Namespace) -> int:
    with needs("cluster", "ray", "torch"):
        from kvcluster.cli.bench import lookup
    return _report(options, lookup, lookup.measure, sizes=options.blocks)


def _transfer(options: argparse.Namespace) -> int:
    with needs("cluster", "ray", "torch"):
        from kvcluster.cli.bench.transfer import measuring, table
    quick = options.quick
    pages = options.pages or (["64KiB", "2MiB"] if quick else ["64KiB", "llama-3-8b", "llama-3-70b", "deepseek-v3"])
    return _report(
        options,
        table,
        measuring.measure,
        rounds=options.rounds or (3 if quick else 7),
        moved_bytes=size(options.moved or ("32MiB" if quick else "128MiB"), "--moved"),
        sizes=list(dict.fromkeys(map(_page_bytes, pages))),
        clients=sorted(set(options.clients or ((1,) if quick else (1, 2)))),
        paths=options.paths,
        layouts=list(dict.fromkeys(options.layouts)),
        single_pages=100 if quick else 400,
        peers=options.peers or measuring.PEERS,
        peer_python=options.peer_python,
    )


def _page_bytes(text: str) -> int:
    """Returns the page size that `--pages` names. Raises ConfigError if no pages of that size are measured."""
    from kvcluster.cli.bench.specs import BY_PAGE_BYTES, MODELS

    if text in MODELS:
        return MODELS[text].page_bytes(0, MODELS[text].whole(0))
    nbytes = size(text, "--pages")
    if nbytes not in BY_PAGE_BYTES:
        raise ConfigError(f"--pages {text}: only 64KiB, 2MiB, 16MiB and pages of {', '.join(MODELS)} are measured")
    return nbytes


def _codec(options: argparse.Namespace) -> int:
    with needs("transformers", "torch"):
        from kvcluster.cli.bench.codec import measuring, table
    if any(dim % 8 for dim in options.dims):
        raise ConfigError("--dims: each must be a multiple of 8, since codecs encode no other heads")
    quick = options.quick
    return _report(
        options,
        table,
        measuring.measure,
        rounds=options.rounds or (3 if quick else 7),
        dims=options.dims,
        moved_bytes=(8 if quick else 64) * 2**20,
        seeds=1 if quick else 5,
        prefix_tokens=256 if quick else 1_024,
    )


def _tiers(options: argparse.Namespace) -> int:
    with needs("cluster", "ray", "torch"):
        from kvcluster.cli.bench.tiers import measuring, table
    rounds, blocks, stores = (3, 32, 60) if options.quick else (9, 64, 200)
    return _report(
        options, table, measuring.measure, rounds=rounds, blocks=blocks, stores=stores, folder=options.disk_dir
    )


def _attend(options: argparse.Namespace) -> int:
    with needs("cluster", "ray", "torch"):
        from kvcluster.cli.bench.attend import measuring, table
        from kvcluster.cli.bench.specs import MODELS
    if options.model not in MODELS:
        raise ConfigError(f"--model {options.model}: expected one of {', '.join(MODELS)}")
    quick = options.quick
    return _report(
        options,
        table,
        measuring.measure,
        rounds=options.rounds or (3 if quick else 11),
        tokens=sorted(set(options.tokens or ([1_024] if quick else [1_024, 8_192, 65_536]))),
        name=options.model,
        threads=options.threads,
        forks=options.forks,
        prefill=options.prefill or (64 if quick else 512),
    )


def _sequences(options: argparse.Namespace) -> int:
    with needs("cluster", "ray", "torch"):
        from kvcluster.cli.bench.sequences import measuring, table
    quick = options.quick
    tokens = sorted(set(options.tokens or ([1_024, 4_096] if quick else [4**n for n in range(5, 11)])))
    if tokens[0] < 1_024:
        raise ConfigError("--tokens: each must be at least 1024, the window that is attended to")
    return _report(
        options,
        table,
        measuring.measure,
        tokens=tokens,
        calls=max(2, options.calls or (20 if quick else 100)),
        decoded=options.decoded or (512 if quick else 4_096),
    )


def _trace(options: argparse.Namespace) -> int:
    from kvcluster.cli.bench.trace import measuring, reading, table

    return _report(
        options,
        table,
        measuring.measure,
        trace=reading.read(options.file, most=options.requests),
        capacity=options.capacity,
        host=options.host,
        shards=options.shards,
        block_tokens=options.as_tokens,
        eviction_policy=options.eviction_policy,
    )


def _report(options: argparse.Namespace, view: Any, measure: Callable[..., dict[str, Any]], **arguments: Any) -> int:
    """Measures, and prints and draws the figures. `view` is a module with `lines`, and with `panels` for `--plot`."""
    file = getattr(options, "plot", None)
    draw = _drawing(file) if file else None  # first, so that what is missing is reported before the measurement
    with redirect_stdout(sys.stderr):  # Ray prints there what happens to its workers; only figures belong on ours
        figures = {"setting": setting(), **measure(**arguments)}
    if draw:
        draw(*view.panels(figures), file)
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        print("  ".join(f"{key} {value}" for key, value in figures["setting"].items()))
        print("\n".join(view.lines(figures)))
    return 0


def _drawing(file: str) -> Callable[..., None]:
    """Returns `picture.draw`. Raises KVClusterError if it is missing, or if it could not write that file."""
    with needs("bench", "matplotlib"):
        from kvcluster.cli.bench.picture import draw
    if not Path(file).absolute().parent.is_dir():
        raise ConfigError(f"cannot draw into {file}: its folder does not exist; create it, or give another file")
    return draw


def setting() -> dict[str, Any]:
    """Returns the facts about this machine that affect the figures."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
