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
from typing import Any, NamedTuple

from kvcluster.cli.argument_types import positive
from kvcluster.config import size
from kvcluster.errors import ConfigError
from kvcluster.eviction import POLICIES
from kvcluster.extras import needs

_DESCRIPTION = """
Measures on this machine what the cache costs and gives, or replays a trace of requests. Each benchmark starts what it
needs and stops it again; no running cluster is touched. Times are printed as ratios within one run, since machines
differ: the measured code and its baseline take turns, and their medians are compared.
"""


class _Kind(NamedTuple):
    """One benchmark. `quick`: what --quick measures, "" for no such option. `plots`: it can draw its figures."""

    run: Callable[[argparse.Namespace], int]
    options: Callable[[Callable[..., object]], None]
    does: str
    description: str
    example: str = ""
    quick: str = ""
    plots: bool = False


def add(commands: Any) -> None:
    """Adds the commands."""
    bench = commands.add_parser(
        "bench",
        help="measure lookups, transfers and codecs here, or replay a trace",
        description=_DESCRIPTION,
        listed={"kinds": tuple(_KINDS)},
        examples=["kvcluster bench transfer --quick", "kvcluster bench trace conversation_trace.jsonl"],
    )
    kinds = bench.add_subparsers(dest="kind", metavar="KIND")
    for name, kind in _KINDS.items():
        example = f"kvcluster bench {name} {kind.example}".rstrip()
        parser = kinds.add_parser(name, help=kind.does, description=kind.description, examples=[example])
        kind.options(parser.add_argument)
        if kind.quick:
            parser.add_argument("--quick", action="store_true", help=f"measure less: {kind.quick}")
        parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
        if kind.plots:
            help_ = "also draw the figures into this PNG file; needs matplotlib (default: no picture)"
            parser.add_argument("--plot", metavar="FILE", help=help_)
        parser.set_defaults(run=kind.run)


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
    option("--moved", metavar="SIZE", help="how much each client moves in a round, such as 128MiB (default 128MiB)")
    option(
        "--pages",
        nargs="+",
        metavar="PAGE",
        help="sizes of pages: 64KiB, 2MiB, 16MiB, or a model, whose 16-token pages are moved: llama-3-8b (2 MiB), "
        "llama-3-70b (5 MiB), deepseek-v3 (1.07 MiB) (default 64KiB and the models)",
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
    option(
        "--dims",
        type=positive,
        nargs="+",
        default=[64, 128],
        metavar="N",
        help="sizes of an attention head, multiples of 8 (default 64 128)",
    )


def _add_tiers(option: Callable[..., object]) -> None:
    option(
        "--disk-dir", type=Path, metavar="FOLDER", help="folder on the drive to measure (default: a temporary folder)"
    )


def _add_attend(option: Callable[..., object]) -> None:
    option("--tokens", type=positive, nargs="+", metavar="N", help="tokens of context (default 1024 8192 65536)")
    option("--rounds", type=positive, metavar="N", help="rounds of each measurement (default 11)")
    option(
        "--model",
        default="llama-3-8b",
        metavar="NAME",
        help="model whose shapes are used: llama-3-8b, llama-3-70b or deepseek-v3 (default llama-3-8b)",
    )
    option("--threads", type=positive, default=2, metavar="N", help="threads where several attend together (default 2)")
    option(
        "--forks",
        type=positive,
        default=8,
        metavar="N",
        help="forks of a sequence where several attend together (default 8)",
    )
    option("--prefill", type=positive, metavar="N", help="tokens of the measured prefill (default 512)")
    option(
        "--links",
        nargs="+",
        default=[],
        metavar="LINK",
        help="measure whole generations instead, over links of a speed and round trip, as in 1gbit/2ms (default none)",
    )
    option("--new", type=positive, nargs="+", metavar="N", help="new tokens of a generation (default 1 64 1024)")
    option("--batch", type=positive, nargs="+", metavar="N", help="rows of a generation (default 1 8)")


def _add_sequences(option: Callable[..., object]) -> None:
    option(
        "--tokens",
        type=positive,
        nargs="+",
        metavar="N",
        help="lengths in tokens at which calls are measured, 1024 or more (default 1024 4096 16384 65536 262144 "
        "1048576)",
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
    option(
        "--eviction-policy",
        default="lru",
        metavar="NAME",
        help=f"which blocks go first: {' or '.join(POLICIES)} (default lru)",
    )


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
    if options.links:
        return _generations(options)
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


def _generations(options: argparse.Namespace) -> int:
    from kvcluster.cli.bench.attend import generations, generations_table, links

    quick = options.quick
    return _report(
        options,
        generations_table,
        generations.measure,
        links=[links.link(text) for text in options.links],
        tokens=max(options.tokens or [4_096 if quick else 32_768]),
        lengths=sorted(set(options.new or ([1, 4] if quick else [1, 64, 1_024]))),
        batches=sorted(set(options.batch or ([1, 2] if quick else [1, 8]))),
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
    draw = drawing(file) if file else None  # first, so that what is missing is reported before the measurement
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


def drawing(file: str) -> Callable[..., None]:
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


_KINDS = {
    "lookup": _Kind(
        _lookup,
        _add_lookup,
        "measure the prefix index, and lookups over gRPC",
        "Measures lookups in the coordinator's prefix index beside a bare dictionary, and whole lookups over gRPC "
        "beside empty calls. Needs Ray and torch.",
        "--blocks 10000 100000",
    ),
    "transfer": _Kind(
        _transfer,
        _add_transfer,
        "measure loads and stores over every path",
        "Measures loads and stores over shared memory, TCP and gRPC beside memory copies and bare sockets, and beside "
        "other caches where they are installed (docs/benchmarks.md). Needs Ray and torch.",
        "--quick --pages llama-3-8b",
        quick="3 rounds of 32 MiB, one client",
        plots=True,
    ),
    "codec": _Kind(
        _codec,
        _add_codec,
        "measure speed and error of the page codecs",
        "Measures how fast pages are encoded and decoded in q8 and q4, and by how much that changes values and the "
        "demo model's output. Needs torch and transformers.",
        "--quick",
        quick="3 rounds of 8 MiB, one seed, 256 tokens of KV",
        plots=True,
    ),
    "tiers": _Kind(
        _tiers,
        _add_tiers,
        "measure loads from lower tiers, stores during demotion",
        "Measures loads from the host and disk tiers beside loads of raw pages, stores while pages are demoted, and a "
        "restart with a disk tier. Needs Ray and torch.",
        "--quick --disk-dir /mnt/nvme",
        quick="3 rounds of 32 pages, 60 stores",
    ),
    "attend": _Kind(
        _attend,
        _add_attend,
        "measure attention over the pages of sequences",
        "Measures one layer of a decode step, and of a prefill, over pages as they lie, beside torch's attention over "
        "dense tensors; with --links whole generations over a context on four shards, which are fetched, attended to "
        "there, or what the planner chooses. Needs Ray and torch.",
        "--quick --tokens 4096",
        quick="3 rounds over 1,024 tokens, prefill of 64",
        plots=True,
    ),
    "sequences": _Kind(
        _sequences,
        _add_sequences,
        "measure a sequence as it grows to a million tokens",
        "Measures the calls of one sequence at several lengths: do they take longer as it grows? Needs Ray and torch.",
        "--quick",
        quick="1,024 and 4,096 tokens, 20 calls each",
        plots=True,
    ),
    "trace": _Kind(
        _trace,
        _add_trace,
        "replay a request trace for hit rates by tier and codec",
        "Replays a trace of requests through the real core without moving pages, and prints the hit rate by tier and "
        "codec. Figures are counts, the same on every machine. Needs only the base install.",
        "conversation_trace.jsonl --capacity 0.2",
    ),
}
