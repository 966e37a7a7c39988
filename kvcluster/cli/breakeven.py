"""`kvcluster breakeven`: finds the paths on which loading KV is faster than computing it, and from how many tokens on.

The bytes of a token come from the model's config.json, the prefill rate is given, and the paths are measured: random
blocks of the model's own sizes are stored under a separate model name, loaded over each path in turn, and purged. A
small load and a large one separate a path's fixed time from its rate. Loads are whole calls into paged caches, as an
engine has them. The verdict is computed by core/breakeven.py, as connectors do for each request.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcluster.cli.command_parser import positive
from kvcluster.cli.coordinator_args import SelectedCluster, selected
from kvcluster.cli.figures import table
from kvcluster.cli.measured_paths import MeasuredPath, add_measuring_args, block_count, measured_paths, spec_of
from kvcluster.core.breakeven import Breakeven
from kvcluster.core.groups import DTYPE_BYTES, Group
from kvcluster.core.model_config import read_kv
from kvcluster.errors import ConfigError

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
        help="tokens of the largest load (default 1,024, or fewer if they exceed 256 MiB)",
    )
    add_measuring_args(breakeven)
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
    read = read_kv(config_of(Path(options.model)), options.dtype)
    spec = spec_of(read.groups, options.block_tokens)
    even = Breakeven(spec, spec.whole_parts(), options.prefill)
    blocks = block_count(spec, options.tokens)
    measured = measure(selected(options), even, blocks, options.rounds)
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
    reuse = f" over {group.reuse.span}" if group.reuse.span else ""
    return f"{len(group.layers)} layers of {planes}{reuse}"


# ----------------------------------------------------------------------------------------- measurement


def measure(cluster: SelectedCluster, even: Breakeven, blocks: int, rounds: int) -> list[dict[str, Any]]:
    """Returns every path's figures, or why it has none. Raises KVClusterError if the cluster cannot be used."""
    with measured_paths(cluster, even.spec, blocks) as paths:
        for _ in range(rounds):
            for path in paths:
                path.take_turn()
    return [_figures(path, even) for path in paths]


def _figures(path: MeasuredPath, even: Breakeven) -> dict[str, Any]:
    if path.why is not None:
        return {"path": path.name, "why": path.why}
    step = even.spec.block_tokens
    link = path.link(lambda blocks: even.nbytes(blocks * step))
    return {
        "path": path.name,
        "why": None,
        "measured_tokens": path.large * step,
        "bytes_per_s": link.bytes_per_s,
        "fixed_ms": link.fixed_ns / 1e6,
        "loaded_tokens_per_s": link.bytes_per_s / even.spec.token_bytes,
        "pays_from_tokens": even.least_tokens(link),
    }


# --------------------------------------------------------------------------------------------- helpers


def config_of(path: Path) -> Mapping[str, Any]:
    """Returns a model's config.json, which lies at `path` or in that folder. Raises ConfigError."""
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
