"""`python -m benchmarks KIND`, one of _KINDS: reproducible measurements, run from the root of a checkout.

Each prints the setting it ran in. Times are printed as ratios within one run, since machines differ and are noisy: the
measured code and its baseline take turns, and their medians are compared. Each starts what it needs and stops it again;
no running cluster is touched. docs/benchmarks.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any, NamedTuple

from benchmarks.arguments import OPTIONS
from kvcluster.cli.figures import setting, show
from kvcluster.cli.picture import drawing
from kvcluster.config import size
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.extras import needs


class _Kind(NamedTuple):
    """One benchmark. `quick`: what --quick measures, "" for no such option. `plots`: it can draw its figures."""

    run: Callable[[argparse.Namespace], None]
    help: str
    description: str
    example: str = ""
    quick: str = ""
    plots: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except KVClusterError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = whole.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, kind in _KINDS.items():
        example = f"example: python -m benchmarks {name} {kind.example}".rstrip()
        parser = kinds.add_parser(name, help=kind.help, description=kind.description, epilog=example)
        OPTIONS[name](parser.add_argument)
        if kind.quick:
            parser.add_argument("--quick", action="store_true", help=f"measure less: {kind.quick}")
        parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
        if kind.plots:
            help_ = "also draw the figures into this PNG file; needs matplotlib (default: no picture)"
            parser.add_argument("--plot", metavar="FILE", help=help_)
        parser.set_defaults(run=kind.run)
    return whole


def _lookup(options: argparse.Namespace) -> None:
    with needs("ray", "torch"):
        from benchmarks import lookup
    _report(options, lookup, lookup.measure, sizes=options.blocks)


def _transfer(options: argparse.Namespace) -> None:
    with needs("ray", "torch"):
        from benchmarks.transfer import measuring, table
    quick = options.quick
    pages = options.pages or (["64KiB", "2MiB"] if quick else ["64KiB", "llama-3-8b", "llama-3-70b", "deepseek-v3"])
    _report(
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
    from benchmarks.specs import BY_PAGE_BYTES, MODELS

    if text in MODELS:
        return MODELS[text].page_bytes(0, MODELS[text].whole(0))
    nbytes = size(text, "--pages")
    if nbytes not in BY_PAGE_BYTES:
        raise ConfigError(f"--pages {text}: only 64KiB, 2MiB, 16MiB and pages of {', '.join(MODELS)} are measured")
    return nbytes


def _codec(options: argparse.Namespace) -> None:
    with needs("torch"):
        from benchmarks.codec import measuring, table
    if any(dim % 8 for dim in options.dims):
        raise ConfigError("--dims: each must be a multiple of 8, since codecs encode no other heads")
    quick = options.quick
    _report(
        options,
        table,
        measuring.measure,
        rounds=options.rounds or (3 if quick else 7),
        dims=options.dims,
        moved_bytes=(8 if quick else 64) * 2**20,
        seeds=1 if quick else 5,
        prefix_tokens=256 if quick else 1_024,
    )


def _tiers(options: argparse.Namespace) -> None:
    with needs("ray", "torch"):
        from benchmarks.tiers import measuring, table
    rounds, blocks, stores = (3, 32, 60) if options.quick else (9, 64, 200)
    _report(options, table, measuring.measure, rounds=rounds, blocks=blocks, stores=stores, folder=options.disk_dir)


def _attend(options: argparse.Namespace) -> None:
    with needs("ray", "torch"):
        from benchmarks.attention import measuring, table
        from benchmarks.specs import MODELS
    if options.model not in MODELS:
        raise ConfigError(f"--model {options.model}: expected one of {', '.join(MODELS)}")
    quick = options.quick
    if options.links:
        _generations(options)
        return
    _report(
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


def _generations(options: argparse.Namespace) -> None:
    from benchmarks.attention import generations, generations_table, links

    quick = options.quick
    _report(
        options,
        generations_table,
        generations.measure,
        links=[links.link(text) for text in options.links],
        tokens=max(options.tokens or [4_096 if quick else 32_768]),
        lengths=sorted(set(options.new or ([1, 4] if quick else [1, 64, 1_024]))),
        batches=sorted(set(options.batch or ([1, 2] if quick else [1, 8]))),
    )


def _sequences(options: argparse.Namespace) -> None:
    with needs("ray", "torch"):
        from benchmarks.sequences import measuring, table
    quick = options.quick
    tokens = sorted(set(options.tokens or ([1_024, 4_096] if quick else [4**n for n in range(5, 11)])))
    if tokens[0] < 1_024:
        raise ConfigError("--tokens: each must be at least 1024, the window that is attended to")
    _report(
        options,
        table,
        measuring.measure,
        tokens=tokens,
        calls=max(2, options.calls or (20 if quick else 100)),
        decoded=options.decoded or (512 if quick else 4_096),
    )


def _encryption(options: argparse.Namespace) -> None:
    with needs("ray", "torch", "cryptography"):
        from benchmarks import encryption
    rounds, blocks, calls = (5, 32, 200) if options.quick else (15, 128, 1_000)
    _report(options, encryption, encryption.measure, rounds=options.rounds or rounds, blocks=blocks, calls=calls)


def _report(options: argparse.Namespace, view: Any, measure: Callable[..., dict[str, Any]], **given: Any) -> None:
    """Measures, and prints and draws the figures. `view` is a module with `lines`, and with `panels` for `--plot`."""
    file = getattr(options, "plot", None)
    draw = drawing(file) if file else None  # first, so that what is missing is reported before the measurement
    with redirect_stdout(sys.stderr):  # Ray prints there what happens to its workers; only figures belong on ours
        figures = {"setting": setting(), **measure(**given)}
    if draw:
        draw(*view.panels(figures), file)
    show(figures, view.lines, as_json=options.json)


_KINDS = {
    "lookup": _Kind(
        _lookup,
        "measure the prefix index, and lookups over gRPC",
        "Measures lookups in the coordinator's prefix index beside a bare dictionary, and whole lookups over gRPC "
        "beside empty calls. Needs Ray and torch.",
        "--blocks 10000 100000",
    ),
    "transfer": _Kind(
        _transfer,
        "measure loads and stores over every path",
        "Measures loads and stores over shared memory, TCP and gRPC beside memory copies and bare sockets, and beside "
        "other caches where they are installed (docs/benchmarks.md). Needs Ray and torch.",
        "--quick --pages llama-3-8b",
        quick="3 rounds of 32 MiB, one client",
        plots=True,
    ),
    "codec": _Kind(
        _codec,
        "measure speed and error of the page codecs",
        "Measures how fast pages are encoded and decoded in q8 and q4, and by how much that changes values and the "
        "demo model's output. Needs torch and transformers.",
        "--quick",
        quick="3 rounds of 8 MiB, one seed, 256 tokens of KV",
        plots=True,
    ),
    "tiers": _Kind(
        _tiers,
        "measure loads from lower tiers, stores during demotion",
        "Measures loads from the host and disk tiers beside loads of raw pages, stores while pages are demoted, and a "
        "restart with a disk tier. Needs Ray and torch.",
        "--quick --disk-dir /mnt/nvme",
        quick="3 rounds of 32 pages, 60 stores",
    ),
    "attend": _Kind(
        _attend,
        "measure attention over the pages of sequences",
        "Measures one layer of a decode step, and of a prefill, over pages as they lie, beside torch's attention over "
        "dense tensors; with --links whole generations over a context on four shards, which are fetched, or "
        "attended to there. Needs Ray and torch.",
        "--quick --tokens 4096",
        quick="3 rounds over 1,024 tokens, prefill of 64",
        plots=True,
    ),
    "encryption": _Kind(
        _encryption,
        "measure what TLS costs loads, stores and control calls",
        "Measures whole loads and stores over TCP, and control calls, of two clusters that run side by side, one of "
        "which speaks TLS. Needs Ray, torch and cryptography.",
        "--quick",
        quick="5 rounds of 64 MiB, 200 calls",
    ),
    "sequences": _Kind(
        _sequences,
        "measure a sequence as it grows to a million tokens",
        "Measures the calls of one sequence at several lengths: do they take longer as it grows? Needs Ray and torch.",
        "--quick",
        quick="1,024 and 4,096 tokens, 20 calls each",
        plots=True,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
