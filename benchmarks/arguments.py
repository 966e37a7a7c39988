"""The options of each benchmark, apart from those that several have (`--quick`, `--json`, `--plot`).

A default that depends on `--quick` is left to what runs the benchmark (__main__.py); its help names that of a
full run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kvcluster.cli.command_parser import positive


def _lookup(option: Callable[..., object]) -> None:
    option(
        "--blocks",
        type=positive,
        nargs="+",
        default=[10_000, 100_000, 1_000_000, 2_000_000],
        metavar="N",
        help="sizes of the index in blocks (default 10000 100000 1000000 2000000)",
    )


def _transfer(option: Callable[..., object]) -> None:
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
    option(
        "--paths",
        nargs="+",
        metavar="PATH",
        default=[],
        help="paths: shm, tcp, grpc, a peer, or a path of one as the table prints it (default: all)",
    )
    option("--peers", type=Path, metavar="FOLDER", help="folder of the peers' drivers (default: benchmarks)")
    option(
        "--peer-python",
        default=sys.executable,
        metavar="PYTHON",
        help="Python in whose environment the peers are installed (default: this one)",
    )


def _encryption(option: Callable[..., object]) -> None:
    option("--rounds", type=positive, metavar="N", help="rounds of loads and stores (default 15)")


def _codec(option: Callable[..., object]) -> None:
    option("--rounds", type=positive, metavar="N", help="rounds of each speed measurement (default 7)")
    option(
        "--dims",
        type=positive,
        nargs="+",
        default=[64, 128],
        metavar="N",
        help="sizes of an attention head, multiples of 8 (default 64 128)",
    )


def _tiers(option: Callable[..., object]) -> None:
    option(
        "--disk-dir", type=Path, metavar="FOLDER", help="folder on the drive to measure (default: a temporary folder)"
    )


def _attend(option: Callable[..., object]) -> None:
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


def _sequences(option: Callable[..., object]) -> None:
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


OPTIONS: Mapping[str, Callable[[Callable[..., object]], None]] = {
    "lookup": _lookup,
    "transfer": _transfer,
    "codec": _codec,
    "encryption": _encryption,
    "tiers": _tiers,
    "attend": _attend,
    "sequences": _sequences,
}
"""By the name of a benchmark the function that declares its options; its argument is the `add_argument` of a parser."""
