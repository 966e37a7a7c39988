"""`kvcluster report`: what a cluster would have given engines that ran in observe mode, from their traces.

No cluster is needed. `figures` computes, `view` shows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcluster.cli.command_parser import positive
from kvcluster.cli.picture import drawing
from kvcluster.cli.report.figures import LoadLink, ReportOptions, TierSize, figures_of
from kvcluster.cli.report.view import lines, panels
from kvcluster.config import loading
from kvcluster.config.loading import size
from kvcluster.core.breakeven import LinkRate
from kvcluster.core.tiers import Tier
from kvcluster.errors import ConfigError
from kvcluster.observe.trace_file import DEFAULT_FOLDER, read_traces
from kvcluster.release import docs_page

_TIERS = {tier.name.lower(): tier for tier in Tier}

ASSUMED = LoadLink("assumed", LinkRate(5_000_000, 1_000_000_000), measured=False)
"""A load over a network of 10 Gbit/s: 5 ms, and 1 GB a second."""


def add(commands: Any) -> None:
    """Adds the command."""
    report = commands.add_parser(
        "report",
        help="predict what a cluster would save engines that run in observe mode",
        description="Reads the traces of engines in observe mode and predicts what a cluster would give them: tokens "
        "loaded in place of computed, the time that saves, and the hit rate by capacity. It needs no cluster. "
        f"{docs_page('observe.md')} says how to read the figures.",
        examples=[
            "kvcluster report",
            "kvcluster report --tier ram=64GiB --tier host=256GiB --plot report.png",
            "kvcluster report --link link.json --json traces/",
        ],
    )
    report.add_argument(
        "traces", nargs="*", metavar="TRACE", help=f"trace files, or folders of them (default {DEFAULT_FOLDER})"
    )
    report.add_argument(
        "--tier",
        action="append",
        default=[],
        type=_tier,
        metavar="NAME=SIZE",
        help=f"bytes of a tier ({', '.join(_TIERS)}), all shards together, such as host=64GiB; repeat for each tier "
        "(default: a cluster without limit)",
    )
    report.add_argument(
        "--capacity",
        action="append",
        default=[],
        type=_size,
        metavar="SIZE",
        help="a capacity for the table of hit rates, such as 64GiB; repeat for more (default: ten of them)",
    )
    _add_speeds(report)
    report.add_argument("--by-request", action="store_true", help="with --json, also each request's figures")
    report.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    report.add_argument(
        "--plot", metavar="FILE", help="also draw the figures into this PNG; needs matplotlib (default: none)"
    )
    report.set_defaults(run=_run)


def _add_speeds(report: Any) -> None:
    link = report.add_mutually_exclusive_group()
    link.add_argument(
        "--link",
        metavar="FILE",
        help="how fast loads are, measured: the output of `kvcluster breakeven --json` "
        "(default: what --gb-per-s and --fixed-ms say)",
    )
    link.add_argument("--gb-per-s", type=float, metavar="RATE", help="how fast loads are, in GB per second (default 1)")
    report.add_argument(
        "--fixed-ms", type=float, default=5.0, metavar="MS", help="with --gb-per-s: ms that any load takes (default 5)"
    )
    report.add_argument(
        "--prefill",
        type=positive,
        default=0,
        metavar="TOKENS_PER_S",
        help="prefill rate of engines that did not measure theirs (default: their loads count as saving nothing)",
    )


def _run(options: argparse.Namespace) -> int:
    draw = drawing(options.plot) if options.plot else None  # first, so that what is missing is reported at once
    chosen = ReportOptions(
        link=_link(options),
        tiers=_ordered(options.tier),
        capacities=tuple(sorted(options.capacity)),
        prefill_tokens_per_s=options.prefill,
        by_request=options.by_request,
    )
    traces, strange = read_traces([Path(path) for path in options.traces] or [DEFAULT_FOLDER.expanduser()])
    figures = figures_of(traces, strange, chosen)
    print(json.dumps(figures, indent=2) if options.json else "\n".join(lines(figures)))
    if draw is not None:
        draw(*panels(figures), options.plot)
    return 0 if figures["groups"] else 1


# ------------------------------------------------------------------------------------------------- arguments


def _size(text: str) -> int:
    try:
        return size(text, "SIZE")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _tier(text: str) -> TierSize:
    name, _, given = text.partition("=")
    if name in loading.TIERS:
        loading.warn(f"the tier {name}", loading.TIERS[name])
        name = loading.TIERS[name]
    if name not in _TIERS:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=SIZE with NAME one of {', '.join(_TIERS)}")
    return TierSize(_TIERS[name], _size(given))


def _ordered(given: list[TierSize]) -> tuple[TierSize, ...]:
    """Returns the tiers from the fastest down, as pages are demoted. Raises ConfigError if one is given twice."""
    tiers = [one.tier for one in given]
    if len(set(tiers)) < len(tiers):
        raise ConfigError("--tier names a tier twice; give the sum of all shards")
    return tuple(sorted(given, key=lambda one: one.tier))


def _link(options: argparse.Namespace) -> LoadLink:
    if options.link:
        return _measured(Path(options.link))
    if options.gb_per_s is None:
        return ASSUMED
    if not 0 < options.gb_per_s < 1e9 or not 0 <= options.fixed_ms < 1e9:
        raise ConfigError("--gb-per-s must be above 0, --fixed-ms at least 0, and both below a billion")
    return LoadLink(
        "given", LinkRate(round(options.fixed_ms * 1e6), max(1, round(options.gb_per_s * 1e9))), measured=False
    )


def _measured(path: Path) -> LoadLink:
    """Returns the link that a client takes according to `kvcluster breakeven --json`: the first one that works."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        works: Mapping[str, Any] = next(one for one in given["paths"] if one["why"] is None)
        rate = LinkRate(round(works["fixed_ms"] * 1e6), round(works["bytes_per_s"]))
        return LoadLink(str(works["path"]), rate, measured=True)
    except OSError as error:
        raise ConfigError(f"cannot read --link {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AssertionError, StopIteration, OverflowError, RecursionError):
        raise ConfigError(
            f"--link {path} is not the output of `kvcluster breakeven --json` with a path that works"
        ) from None
