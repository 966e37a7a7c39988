"""The figures of `kvcluster report`: the totals of the traces of several engines, as plain values.

Engines whose specs are equal, weights included, form a *group*: they would share. An engine whose weights never got a
fingerprint shares with none, as in a cluster. The figures of a group come from observe/reuse_prediction.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvcluster.cli.weights import kept_apart
from kvcluster.core import codecs
from kvcluster.core.breakeven import Breakeven, LinkRate
from kvcluster.core.codecs import Codec
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import Takes, Tier
from kvcluster.observe.reuse_prediction import (
    LoadCost,
    ObservedRequest,
    PredictedOutcome,
    PredictedRequest,
    outcome,
    predict,
)
from kvcluster.observe.trace_file import EngineTrace

_MS = 1e6
_CAPACITIES = 10
_MIB = 2**20

SHARES = (
    (0.0, "nothing"),
    (0.25, "up to a quarter"),
    (0.5, "up to half"),
    (0.75, "up to three quarters"),
    (1.0, "more"),
)
"""By the share of its prompt that a request would have loaded: the upper bound of each row, and its name."""


@dataclass(frozen=True, slots=True)
class LoadLink:
    """How fast loads are. `name`: the path that was measured, or the source of the rate."""

    name: str
    rate: LinkRate
    measured: bool


@dataclass(frozen=True, slots=True)
class TierSize:
    """The bytes of a tier, all shards together."""

    tier: Tier
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What was asked. `tiers`: the fastest first; () for a cluster without limit. `capacities`: () for a choice by what
    was used. `prefill_tokens_per_s`: for engines that did not measure theirs; 0 for none."""

    link: LoadLink
    tiers: tuple[TierSize, ...] = ()
    capacities: tuple[int, ...] = ()
    prefill_tokens_per_s: int = 0
    by_request: bool = False


def figures_of(traces: Sequence[EngineTrace], strange: Sequence[str], options: ReportOptions) -> dict[str, Any]:
    """Returns all figures for JSON: `groups` of engines that would share, `engines` with what observing took, and
    `notes` for people. `strange`: sentences about files that are no traces."""
    groups = list(_groups(traces))
    sizes = [(spec, _distinct(of_group)) for spec, of_group in groups]
    return {
        "groups": [_group(spec, of_group, options) for spec, of_group in groups],
        "engines": [_engine(trace) for trace in traces],
        "notes": [
            *strange,
            *(line for trace in traces for line in (*trace.dropped, *trace.notes)),
            *_notes(traces),
            *kept_apart(sizes),
        ],
    }


def _groups(traces: Sequence[EngineTrace]) -> Iterator[tuple[KVSpec, list[EngineTrace]]]:
    """Yields the traces that would share, with their spec; those without requests are left out."""
    by_spec: dict[tuple[KVSpec, str], list[EngineTrace]] = {}
    for trace in traces:
        if trace.requests and trace.spec is not None:
            alone = "" if trace.weights else trace.header.id
            by_spec.setdefault((trace.spec, alone), []).append(trace)
    for (spec, _), of_group in by_spec.items():
        yield spec, of_group


def _distinct(traces: Sequence[EngineTrace]) -> int:
    return len({block for trace in traces for one in trace.requests for block in one.chain})


def _notes(traces: Sequence[EngineTrace]) -> Iterator[str]:
    for trace in traces:
        engine = trace.header.engine
        if trace.spec is not None and not trace.requests:
            yield f"{engine} noted no request yet"
        if trace.spec is not None and trace.requests and not trace.weights:
            yield f"{engine}: the fingerprint of its weights is not known, so it is taken to share with no other engine"
        if trace.header.facts.get("device", "cpu") != "cpu":
            yield (
                f"{engine} keeps its KV in {trace.header.facts['device']} memory, from where this release "
                "has moved none on a card: the figures say what it would save"
            )
        if trace.cost.dropped:
            yield f"{engine}: {trace.cost.dropped:,} line(s) of its trace were dropped, so it has gaps"


def _engine(trace: EngineTrace) -> dict[str, Any]:
    cost = trace.cost
    return {
        "engine": trace.header.engine,
        "model": trace.spec.model if trace.spec is not None else None,
        "weights": trace.weights or None,
        "facts": dict(trace.header.facts),
        "noted_requests": len(trace.requests),
        "requests": cost.requests,
        "steps": cost.steps,
        "us_per_request": cost.request_ns / 1e3 / cost.requests if cost.requests else None,
        "us_per_step": cost.step_ns / 1e3 / cost.steps if cost.steps else None,
        "worst_step_us": cost.worst_step_ns / 1e3 if cost.steps else None,
        "dropped_lines": cost.dropped,
    }


# ------------------------------------------------------------------------------------------------------ a group


def _group(spec: KVSpec, traces: Sequence[EngineTrace], options: ReportOptions) -> dict[str, Any]:
    requests = sorted((one for trace in traces for one in trace.requests), key=lambda one: one.at_ns)
    parts = traces[0].header.parts or spec.whole_parts()
    cost = LoadCost(spec, parts, options.link.rate, options.prefill_tokens_per_s)
    predicted, distinct = predict(requests)
    predicted = [one for one in predicted if one.request.prompt_tokens]  # without lines that only record a store
    capacity = sum(_blocks(tier, spec) for tier in _with_codecs(options.tiers)) if options.tiers else None
    seen = outcome(predicted, cost, capacity)
    rates = [cost.rate(one) for one in requests if cost.rate(one)]
    prefill = round(statistics.median(rates)) if rates else None
    return {
        "model": spec.model,
        "weights": spec.weights,
        "engines": list(dict.fromkeys(one.engine for one in requests)),
        "from_ns": requests[0].at_ns,
        "until_ns": max([requests[-1].at_ns, *(at for one in requests for at, _ in one.computed)]),
        "block_tokens": spec.block_tokens,
        "block_bytes": spec.block_bytes,
        "working_set_bytes": distinct * spec.block_bytes,
        "prefill_tokens_per_s": prefill,
        "link": _link(options.link, Breakeven(spec, parts, prefill) if prefill else None),
        **_totals(seen),
        "alone_found_tokens": _alone(requests, cost),
        "capacity": _by_capacity(predicted, cost, distinct, options.capacities),
        "tiers": _by_tier(predicted, spec, options.tiers),
        "by_share": _by_share(predicted, seen),
        "by_request": _by_request(predicted, seen, capacity, spec) if options.by_request else [],
    }


def _link(link: LoadLink, even: Breakeven | None) -> dict[str, Any]:
    return {
        "path": link.name,
        "measured": link.measured,
        "bytes_per_s": link.rate.bytes_per_s,
        "fixed_ms": link.rate.fixed_ns / _MS,
        "pays_from_tokens": even.least_tokens(link.rate) if even is not None else None,
    }


def _totals(seen: PredictedOutcome) -> dict[str, Any]:
    saved_ms = sorted(one.saved_ns / _MS for one in seen.requests if one.loaded_tokens)
    return {
        "requests": len(seen.requests),
        "loads": len(saved_ms),
        "prompt_tokens": seen.prompt_tokens,
        "local_tokens": seen.local_tokens,
        "found_tokens": seen.found_tokens,
        "loaded_tokens": seen.loaded_tokens,
        "saved_ms": seen.saved_ns / _MS,
        "prefill_ms": seen.prefill_ns / _MS,
        "saved_ms_by_load": {
            name: saved_ms[min(len(saved_ms) - 1, int(share * len(saved_ms)))] if saved_ms else None
            for name, share in (("median", 0.5), ("p90", 0.9), ("most", 1.0))
        },
    }


def _alone(requests: Sequence[ObservedRequest], cost: LoadCost) -> int:
    """Returns the tokens that would be found if each engine had an unlimited cache of its own, and shared nothing."""
    found = 0
    for engine in dict.fromkeys(one.engine for one in requests):
        predicted, _ = predict([one for one in requests if one.engine == engine])
        found += outcome(predicted, cost, None).found_tokens
    return found


def _by_capacity(
    predicted: Sequence[PredictedRequest], cost: LoadCost, distinct: int, asked: Sequence[int]
) -> list[dict[str, Any]]:
    """Returns a row for each capacity, if its blocks were raw and if they were encoded with q8."""
    spec = cost.spec
    prompt = max(1, sum(one.request.prompt_tokens for one in predicted))
    rows = []
    for nbytes in asked or _capacities(distinct * spec.block_bytes, spec.block_bytes):
        raw, encoded = (
            outcome(predicted, cost, nbytes // _block_bytes(codec, spec)) for codec in (Codec.RAW, Codec.Q8)
        )
        rows.append(
            {
                "bytes": nbytes,
                "found_tokens": raw.found_tokens,
                "loaded_tokens": raw.loaded_tokens,
                "saved_ms": raw.saved_ns / _MS,
                "hit_rate": raw.found_tokens / prompt,
                "q8_hit_rate": encoded.found_tokens / prompt,
            }
        )
    return rows


def _capacities(working_set: int, block_bytes: int) -> list[int]:
    """Returns powers of two up to the first one that holds everything."""
    top = max(_MIB, block_bytes)
    while top < working_set:
        top *= 2
    return [top >> shift for shift in reversed(range(_CAPACITIES)) if top >> shift >= block_bytes]


def _by_tier(predicted: Sequence[PredictedRequest], spec: KVSpec, tiers: Sequence[TierSize]) -> list[dict[str, Any]]:
    """Returns what each tier would have had. A block is in the first tier while it is among the most recently used ones
    that fit there, then it is demoted: so tiers are consecutive ranges of stack distances."""
    prompt = max(1, sum(one.request.prompt_tokens for one in predicted))
    rows, above, before = [], 0, 0
    for tier, codec in _with_codecs(tiers):
        above += _blocks((tier, codec), spec)
        found = sum(one.found(above) for one in predicted) * spec.block_tokens
        rows.append(
            {
                "tier": tier.tier.name.lower(),
                "codec": codec.name.lower(),
                "bytes": tier.nbytes,
                "found_tokens": found - before,
                "hit_rate": (found - before) / prompt,
            }
        )
        before = found
    return rows


def _with_codecs(tiers: Sequence[TierSize]) -> list[tuple[TierSize, Codec]]:
    """Returns each tier with the codec of its pages: q8 where they are encoded, which is the default."""
    codec, rows = Codec.RAW, []
    for one in tiers:
        takes = one.tier.spec.takes
        codec = {Takes.RAW: Codec.RAW, Takes.ENCODED: Codec.Q8, Takes.UNCHANGED: codec}[takes]
        rows.append((one, codec))
    return rows


def _blocks(tier: tuple[TierSize, Codec], spec: KVSpec) -> int:
    size, codec = tier
    return size.nbytes // _block_bytes(codec, spec)


def _block_bytes(codec: Codec, spec: KVSpec) -> int:
    return sum(codecs.page_bytes(codec, spec, group, part) for group, part in enumerate(spec.whole_parts()))


def _by_share(predicted: Sequence[PredictedRequest], seen: PredictedOutcome) -> list[dict[str, Any]]:
    rows = [{"share": name, "requests": 0, "loaded_tokens": 0, "saved_ms": 0.0} for _, name in SHARES]
    for of_request, one in zip(predicted, seen.requests, strict=True):
        share = one.loaded_tokens / of_request.request.prompt_tokens
        row = next((row for (most, _), row in zip(SHARES, rows, strict=True) if share <= most), rows[-1])
        row["requests"] += 1  # type: ignore[operator]
        row["loaded_tokens"] += one.loaded_tokens  # type: ignore[operator]
        row["saved_ms"] += one.saved_ns / _MS  # type: ignore[operator]
    return rows


def _by_request(
    predicted: Sequence[PredictedRequest], seen: PredictedOutcome, capacity: int | None, spec: KVSpec
) -> list[dict[str, Any]]:
    return [
        {
            "engine": one.request.engine,
            "at_ns": one.request.at_ns,
            "prompt_tokens": one.request.prompt_tokens,
            "local_tokens": one.request.local * spec.block_tokens,
            "found_tokens": one.found(capacity) * spec.block_tokens,
            "loaded_tokens": result.loaded_tokens,
            "saved_ms": result.saved_ns / _MS,
        }
        for one, result in zip(predicted, seen.requests, strict=True)
    ]
