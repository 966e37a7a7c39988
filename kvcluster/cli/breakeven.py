"""`kvcluster breakeven`: finds the paths on which loading KV is faster than computing it, and from how many tokens on.

The bytes of a token come from the model's config.json, the prefill rate is given, and the paths are measured: random
blocks of the model's own sizes are stored under a separate model name, loaded over each path in turn, and purged. A
small load and a large one separate a path's fixed time from its rate. Loads are whole calls into paged caches, as an
engine has them. The verdict is computed by core/breakeven.py, as connectors do for each request.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcluster.cli.argument_types import positive
from kvcluster.cli.bench.report import table
from kvcluster.cli.breakeven_model import MODEL
from kvcluster.cli.coordinator_args import ANSWER_MS, add_coordinator_args, address_of, check_listens
from kvcluster.client.client import Client
from kvcluster.client.connect import connect
from kvcluster.config import TRANSPORTS, ClientConfig
from kvcluster.core import limits
from kvcluster.core.breakeven import Breakeven, LinkRate
from kvcluster.core.groups import DTYPE_BYTES, Group
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.model_config import read_kv
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ConfigError, KVClusterError, Unreachable
from kvcluster.extras import needs
from kvcluster.transport.base import Deadline

if TYPE_CHECKING:
    from kvcluster.cli.breakeven_memory import BreakevenMemory

_TOKENS = 1_024
_STORED_BYTES = 256 * 2**20
"""The limit of stored bytes unless --tokens asks for more: they may evict other clients' cold blocks."""

_LONG_NS = 300_000_000
"""A load that takes this long is large enough to measure a rate."""

_DEADLINE_MS = 60_000
"""Deadline of one load or store: a slower path is of no use."""

_PATIENCE_MS = 10_000
_PAUSE_S = 0.1


_DESCRIPTION = """
Measures on a running cluster from how many tokens on loading KV is faster than computing it, for each path between this
machine and the shards. Random blocks of the model's own sizes are stored under a model name of their own, loaded over
each path in turn, and purged; they may evict cold blocks of others meanwhile. It needs torch, and no engine.

exit status: 0; 1 if no path could be measured.
"""


def add(commands: Any) -> None:
    """Adds the command."""
    breakeven = commands.add_parser(
        "breakeven",
        help="measure from how many tokens on loading is faster than computing",
        description=_DESCRIPTION,
        examples=[
            "kvcluster breakeven --model ./llama/config.json --prefill 8000",
            "kvcluster breakeven --model ./llama --prefill 8000 --address 10.0.0.5:7070",
        ],
    )
    breakeven.add_argument(
        "--model",
        required=True,
        metavar="CONFIG",
        help="the model's Hugging Face config.json, or the folder it lies in",
    )
    breakeven.add_argument(
        "--prefill",
        required=True,
        type=_rate,
        metavar="TOKENS_PER_S",
        help="prefill rate of your engine in tokens per second, as its log or a benchmark says",
    )
    breakeven.add_argument(
        "--block-tokens",
        type=positive,
        default=16,
        metavar="N",
        help="tokens per block, as in your engine (default 16)",
    )
    breakeven.add_argument(
        "--dtype",
        choices=[name for name in DTYPE_BYTES if name != "opaque"],
        metavar="NAME",
        help="dtype of the KV, such as bfloat16 (default: that of the config)",
    )
    breakeven.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help=f"tokens of the largest load (default {_TOKENS:,}, or fewer if they exceed {_STORED_BYTES >> 20} MiB)",
    )
    breakeven.add_argument(
        "--rounds", type=positive, default=5, metavar="N", help="rounds, of which medians are taken (default 5)"
    )
    breakeven.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    add_coordinator_args(breakeven)
    breakeven.set_defaults(run=_run)


def _rate(text: str) -> int:
    """Parses a rate and rounds it to whole tokens per second, which does not change the verdict."""
    try:
        rate = round(float(text))
    except (ValueError, OverflowError):
        rate = 0
    if rate < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens a second, at least 1")
    return rate


def _run(options: argparse.Namespace) -> int:
    read = read_kv(_config(Path(options.model)), options.dtype)
    spec = KVSpec(
        model=MODEL, weights=f"random:{os.urandom(16).hex()}", block_tokens=options.block_tokens, groups=read.groups
    )
    even = Breakeven(spec, spec.whole_parts(), options.prefill)
    try:
        check_listens(address_of(options), ANSWER_MS)
        measured = measure(address_of(options), options.token, even, _blocks(spec, options.tokens), options.rounds)
    except Unreachable as error:
        raise Unreachable(
            f"{error}; this measures a running cluster: `kvcluster up` starts one, --port or --address names another"
        ) from None
    figures = {
        "model": options.model,
        "groups": [_group_text(group) for group in spec.groups],
        "assumed": list(read.assumed),
        "block_tokens": spec.block_tokens,
        "token_bytes": spec.token_bytes,
        "prefill_tokens_per_s": options.prefill,
        "paths": measured,
    }
    print(json.dumps(figures, indent=2) if options.json else "\n".join(lines(figures)))
    return 0 if any(path["why"] is None for path in measured) else 1


# ----------------------------------------------------------------------------------------------- output


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields the figures as lines of text."""
    yield f"{figures['model']}: {'; '.join(figures['groups'])}"
    yield from (f"  {what}" for what in figures["assumed"])
    block_kib = figures["token_bytes"] * figures["block_tokens"] / 1024
    prefill = figures["prefill_tokens_per_s"]
    yield (
        f"{figures['token_bytes'] / 1024:,.1f} KiB a token, {block_kib:,.1f} KiB a block of {figures['block_tokens']}; "
        f"computed: {prefill:,} tokens/s, as given\n"
    )
    nothing = dict.fromkeys(("gb_per_s", "fixed_ms", "loaded_tokens_per_s", "of_computed"))
    rows = [
        {**nothing, **path, "verdict": path["why"]}
        if path["why"] is not None
        else {
            **path,
            "gb_per_s": path["bytes_per_s"] / 1e9,
            "of_computed": path["loaded_tokens_per_s"] / prefill,
            "verdict": verdict(path["pays_from_tokens"]),
        }
        for path in figures["paths"]
    ]
    columns = {
        "path": "{path}",
        "GB/s": "{gb_per_s:.3f}",
        "fixed ms": "{fixed_ms:.2f}",
        "tokens/s loaded": "{loaded_tokens_per_s:,.0f}",
        "of computed": "{of_computed:.2f}",
        "verdict": "{verdict}",
    }
    yield from table(rows, columns)
    chosen = (f"a client here takes {row['path']}; {row['verdict']}" for row in rows if row["why"] is None)
    yield "\n" + next(chosen, "no path could be measured: see `kvcluster status`")


def verdict(least_tokens: int | None) -> str:
    """Returns the verdict as text, for the fewest tokens from which loads are faster; None if they never are."""
    return "never: computing is faster" if least_tokens is None else f"loads pay from {least_tokens:,} tokens on"


def _group_text(group: Group) -> str:
    planes = " and ".join(f"{plane.name} [{plane.heads} x {plane.dim}, {plane.dtype}]" for plane in group.planes)
    reuse = f" over a window of {group.reuse.tokens:,} tokens" if group.reuse.kind == "window" else ""
    return f"{len(group.layers)} layers of {planes}{reuse}"


# ----------------------------------------------------------------------------------------- measurement


def measure(address: str, token: str | None, even: Breakeven, blocks: int, rounds: int) -> list[dict[str, Any]]:
    """Returns every path's figures, or why it has none. Paths take turns; figures are medians of `rounds` rounds.
    Raises KVClusterError if the cluster cannot be used."""
    with needs("torch"):
        from kvcluster.cli.breakeven_memory import BreakevenMemory
    with ExitStack() as house:
        content = BreakevenMemory(even.spec, blocks)
        paths: list[_Path] = []
        for name in TRANSPORTS:
            config = ClientConfig(deadline_ms=_DEADLINE_MS, transports=(name,))
            client = house.enter_context(connect(address, even.spec, token=token, config=config))
            if not paths:
                house.callback(_forget, client)
            paths.append(_Path(name, client, content))
        for path in paths:
            path.warm_up()
        for _ in range(rounds):
            for path in paths:
                path.take_turn()
        content.check()
        return [path.figures(even) for path in paths]


class _Path:
    """One path: a client that uses only this path, and the times of its loads."""

    def __init__(self, name: str, client: Client, content: BreakevenMemory) -> None:
        self._name = name
        self._client = client
        self._content = content
        self._hashes = client.hashes(content.tokens)
        self._large = 1
        self._took: dict[int, list[int]] = {}
        self._why: str | None = None

    def warm_up(self) -> None:
        """Stores the blocks that are missing, and finds the size at which a load takes long enough."""
        try:
            self._store(1)
            self._load(1)
            took = self._load(1)
            while took < _LONG_NS and self._large < self._content.blocks:
                self._large = min(4 * self._large, self._content.blocks)
                self._store(self._large)
                took = self._load(self._large)
        except _Missed as missed:
            self._why = self._refused() or str(missed)

    def take_turn(self) -> None:
        """Times one small load and one large load."""
        try:
            for blocks in (1, self._large):
                if self._why is None:
                    self._took.setdefault(blocks, []).append(self._load(blocks))
        except _Missed as missed:
            self._why = str(missed)

    def figures(self, even: Breakeven) -> dict[str, Any]:
        if self._why is not None:
            return {"path": self._name, "why": self._why}
        step = even.spec.block_tokens
        small, large = (
            (even.nbytes(blocks * step), int(statistics.median(self._took[blocks]))) for blocks in (1, self._large)
        )
        link = LinkRate.through(small, large)
        return {
            "path": self._name,
            "why": None,
            "measured_tokens": self._large * step,
            "bytes_per_s": link.bytes_per_s,
            "fixed_ms": link.fixed_ns / 1e6,
            "loaded_tokens_per_s": link.bytes_per_s / even.spec.token_bytes,
            "pays_from_tokens": even.least_tokens(link),
        }

    def _store(self, blocks: int) -> None:
        """Stores the blocks that are missing. Waits while the shards carry out a purge, possibly of the last run."""
        patience = Deadline.after_ms(_PATIENCE_MS)
        while True:
            stored = self._client.begin_store(self._hashes[:blocks], self._content.source(blocks)).result()
            if stored.blocks + stored.deduplicated == blocks and self._client.flush():
                return
            if stored.miss is None or stored.miss.reason is not MissReason.REBUILDING or not patience.remaining_s():
                raise self._missed("stored", stored.miss, blocks)
            time.sleep(_PAUSE_S)

    def _load(self, blocks: int) -> int:
        """Loads blocks and returns the time in nanoseconds, lookup included."""
        room = self._content.room(blocks)
        began = time.perf_counter_ns()
        with self._client.prepare_load(self._hashes[:blocks]) as ticket:
            loaded = self._client.begin_load(ticket, room).result()
            took = time.perf_counter_ns() - began
        if loaded.blocks < blocks:
            raise self._missed("loaded", loaded.miss or ticket.miss, blocks)
        return took

    def _missed(self, what: str, why: Miss | None, blocks: int) -> Exception:
        if why is not None and why.reason in (MissReason.FULL, MissReason.EVICTED):
            return KVClusterError(f"the cluster has no room for {blocks} blocks of this model; give a smaller --tokens")
        return _Missed(f"nothing is {what}: {why or 'the cluster gives no reason'}")

    def _refused(self) -> str | None:
        """Returns why the client refuses its only path to some shard; None if it does not."""
        ways = self._client.status()["transports"].values()
        return next((way["refused"][self._name] for way in ways if self._name in way["refused"]), None)


class _Missed(Exception):
    """A block could not be stored or loaded over this path."""


def _forget(client: Client) -> None:
    try:
        client.purge(model=MODEL, deadline_ms=_PATIENCE_MS)
    except Unreachable as error:
        print(f"kvcluster: blocks of {MODEL} remain until they are evicted: {error}", file=sys.stderr)


# --------------------------------------------------------------------------------------------- helpers


def _config(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a JSON object, not {type(config).__name__}")
    return config


def _blocks(spec: KVSpec, tokens: int | None) -> int:
    """Returns the number of blocks of the largest load."""
    if tokens is None:
        tokens = min(_TOKENS, int(_STORED_BYTES / spec.token_bytes))
    return max(1, min(tokens // spec.block_tokens, limits.BLOCKS_PER_PROMPT))
