"""Operations that compare: reading, attention, tables, and what other clients find."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

import kvcluster
from kvcluster.core.miss import Loss
from kvcluster.sequences.attend_planner import SpanChoice, StepFacts
from tests.fuzz.sequences.episode import Episode, Finding, Live
from tests.fuzz.sequences.judging import Readings, is_page
from tests.fuzz.sequences.model import Text, attention, names_of
from tests.fuzz.sequences.operations import operation

QUERY_HEADS = 2
"""Query heads of one head of K and V."""


class DrawnPlanner:
    """Chooses anything for every span."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, step: StepFacts) -> list[SpanChoice]:
        return [self._rng.choice(tuple(SpanChoice)) for _ in step.spans]


def planner(ep: Episode, rng: Random) -> Any:
    if rng.random() > (0.6 if ep.profile.long else 0.15):
        return None
    drawn = rng.choice((kvcluster.ShipAbsent, kvcluster.ShipAbsent, None))
    return DrawnPlanner(Random(rng.getrandbits(32))) if drawn is None else drawn()


def scoring(ep: Episode, rng: Random) -> dict[str, Any]:
    """Draws how scores are computed: mostly the default."""
    drawn: dict[str, Any] = {}
    if rng.random() < 0.15:
        drawn["scale"] = rng.choice((0.1, 1.0))
    if rng.random() < 0.1:
        drawn["softcap"] = 2.5
    if rng.random() < 0.2:
        drawn["window"] = rng.choice((1, 2, ep.block, 3 * ep.block + 1))
    if rng.random() < 0.1:
        drawn["sinks"] = torch.linspace(-1, 1, ep.profile.heads * QUERY_HEADS)
    return drawn


def queries(ep: Episode, rng: Random, rows: Sequence[Live], layer: int) -> list[Tensor]:
    """Draws the queries of each row, no more than it has tokens."""
    drawn = []
    for row in rows:
        there = row.text.layer(layer).shape[1] - row.text.dropped.stop
        count = min(there, rng.choice((0, 1, 1, 1, 2, ep.block + 1))) if there > 0 else 0
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        shape = (count, ep.profile.heads * QUERY_HEADS, ep.profile.dim)
        drawn.append(torch.randn(shape, generator=generator))
    return drawn


def check_attention(ep: Episode, live: Live, layer: int, query: Tensor, out: Tensor, how: dict[str, Any]) -> None:
    text = live.text
    if out.shape != (*query.shape[:2], ep.profile.v_dim) or out.dtype != query.dtype:
        ep.fail(live, f"attend returned {out.dtype} {tuple(out.shape)} for {tuple(query.shape)}")
    how, readings, least = {"scale": None, "softcap": None, "window": None, "sinks": None, **how}, 0, float("inf")
    seen = Readings(ep, text, layer)
    for readings, kv in enumerate(seen):
        expected = attention(query, kv, text.dropped, dims=ep.dims, **how)
        error = (out.double() - expected).abs()
        bound = 2e-5 + torch.finfo(query.dtype).eps * expected.abs()
        if bool((error <= bound).all()):
            ep.tally.events["another version attended to"] += readings > 0
            return
        least = min(least, float(error.max()))
    if seen.all:
        ep.fail(live, f"attend({layer}) of {len(query)} queries is off by {least:.3}, of {readings + 1} readings")
    ep.tally.events["too many versions to judge"] += 1


def check_rows(
    ep: Episode,
    rng: Random,
    batch: kvcluster.SequenceBatch | None,
    name: str,
    rows: Sequence[Live],
    layer: int,
    drawn: list[Tensor],
    by: Any = None,
) -> None:
    """Attends with a batch, or with the one row, and compares each row."""
    rows_ready = [ep.settle(row) for row in rows]
    if not all(rows_ready):
        return
    how, by, threads = scoring(ep, rng), by or planner(ep, rng), rng.choice((1, 1, 2))
    whole = torch.cat(drawn)
    if rng.random() < 0.1:
        whole = whole.bfloat16()
    counts = [len(each) for each in drawn]
    text = f"{name}.attend({layer}, queries of {counts}, {', '.join(f'{k}={v}' for k, v in how.items())}, {by})"
    more = {**how, "planner": by, "threads": threads}
    if batch is None:
        call, verb = (lambda: rows[0].sequence.attend(layer, whole, **more)), "attend"
    else:
        call, verb = (lambda: batch.attend(layer, whole, tokens=counts, **more)), "batch.attend"
    # Streaming needs room for one layer of 1,024 tokens, which few of these resident sets have.
    done, out = ep.attempt(verb, text, call, may=ep.absent(rows[0], 1_024))
    if by is not None:
        ep.tally.verbs["explain_attention"] += 1
        str((rows[0].sequence if batch is None else batch).explain_attention())
    if not done:
        for row in rows:
            ep.check_numbers(row)
        return
    assert out is not None
    for row, query, part in zip(rows, whole.split(counts), out.split(counts), strict=True):
        if len(query):
            check_attention(ep, row, layer, query, part, how)
        if "window" not in how and row.sequence.statistics().encoded and row.text.lossy_from is None:
            row.text.lossy_from = row.text.length + (len(row.text.step.ids) if row.text.step else 0)
            ep.tally.events["lossy from here"] += 1


def attend(ep: Episode, rng: Random, live: Live, layer: int) -> None:
    check_rows(ep, rng, None, live.name, [live], layer, queries(ep, rng, [live], layer))


@operation(14)
def attend_now(ep: Episode, rng: Random) -> None:
    """One layer attends, or all of them, as in a step."""
    live = ep.pick(rng)
    if live is None or not live.text.length:
        return
    layers = [rng.randrange(ep.profile.layers)] if rng.random() < 0.6 else range(ep.profile.layers)
    for layer in layers:
        attend(ep, rng, live, layer)


@operation(4)
def attend_batch(ep: Episode, rng: Random) -> None:
    """Several sequences of one client attend in one call."""
    first = ep.pick(rng)
    if first is None:
        return
    others = [live for live in ep.live if live.client == first.client and live is not first]
    rows = [first, *rng.sample(others, min(len(others), rng.choice((1, 2, 3))))]
    batch = kvcluster.SequenceBatch([row.sequence for row in rows])
    layer = rng.randrange(ep.profile.layers)
    name = f"SequenceBatch([{', '.join(row.name for row in rows)}])"
    check_rows(ep, rng, batch, name, rows, layer, queries(ep, rng, rows, layer))


@operation(8)
def read(ep: Episode, rng: Random) -> None:
    """Some tokens of a layer are read, or all of every layer, block by block."""
    live = ep.pick(rng)
    if live is None or not ep.settle(live):
        return
    text = live.text
    if rng.random() < 0.3:
        for layer in range(ep.profile.layers):
            there = text.layer(layer).shape[1]
            for first in range(0, there, ep.block):
                if first not in text.dropped and not ep.read(live, layer, first, min(ep.block, there - first)):
                    return
        return
    layer = rng.randrange(ep.profile.layers)
    first, stop = sorted(rng.randint(text.dropped.stop, text.layer(layer).shape[1]) for _ in "ab")
    ep.read(live, layer, first, stop - first)


@operation(2)
def load(ep: Episode, rng: Random) -> None:
    """Blocks are loaded into the resident set."""
    live = ep.pick(rng)
    if live is None:
        return
    text = live.text
    first, stop = sorted(rng.randint(text.dropped.stop, text.length) for _ in "ab")
    ep.attempt(
        "load",
        f"{live.name}.load({first}, {stop - first})",
        lambda: live.sequence.load(first, stop - first),
        may=ep.absent(live),
    )


@operation(2)
def missing(ep: Episode, rng: Random) -> None:
    """What is lost is named; nothing is while the cluster has lost nothing."""
    live = ep.pick(rng)
    if live is None:
        return
    _, ranges = ep.attempt("missing", f"{live.name}.missing()", live.sequence.missing)
    if ranges and not ep.lost:
        ep.fail(live, f"missing() is {ranges}")
    ep.tally.events["missing"] += bool(ranges)


@operation(6)
def table(ep: Episode, rng: Random) -> None:
    """Pages that the block table names have what it says; sinks stay there."""
    live = ep.pick(rng)
    if live is None or not ep.settle(live):
        return
    ep.check_numbers(live)
    for verb in ("block_table", "resident_pages", "statistics"):
        ep.tally.verbs[verb] += 1
    sequence, text = live.sequence, live.text
    entries = sequence.block_table[: -(-text.length // ep.block)].tolist()
    for depth, page in enumerate(entries):
        first, stop = depth * ep.block, min(text.length, (depth + 1) * ep.block)
        if first in text.dropped:
            continue
        if page >= 0:
            found = ep.joined([plane[page, :, : stop - first] for plane in ep.resident_planes(sequence)])
            if not is_page(ep, text, depth, found.transpose(0, 1)):
                ep.fail(live, f"page {page} of block {depth} has other values")


@operation(10)
def published(ep: Episode, rng: Random) -> None:
    """What another client finds under token ids is the KV of these tokens, and was advanced under these ids."""
    texts = [live.text for live in ep.live] + ep.texts
    if not texts:
        return
    text = rng.choice(texts)
    ids = text.ids + (text.step.ids if text.step is not None else [])
    if rng.random() < 0.3:
        ids = ids + [rng.randrange(ep.profile.alphabet) for _ in range(ep.block)]
    check_published(ep, text.origin, ids, ep.client(rng.choice((0, 1, 1, 1))))


def check_published(ep: Episode, origin: int, ids: list[int], client: Any) -> int:
    """Loads whatever is there of a prompt. Returns how many tokens that is."""
    prompt, block = ep.prompt(origin, ids), ep.block
    blocks = len(ids) // block
    if not blocks:
        return 0
    shape = (blocks, ep.profile.layers, block, ep.profile.heads)
    planes = [torch.full((*shape, dim), 77.0, dtype=ep.dtype) for dim in ep.dims]
    into = kvcluster.Paged([tuple(plane[:, layer] for plane in planes) for layer in range(shape[1])], range(blocks))
    _, loaded = ep.attempt("client.load", f"client.load({ids[:40]}...)", lambda: client.load(prompt, into))
    _, exact = ep.attempt("client.lookup", "client.lookup(EXACT)", lambda: client.lookup(prompt, accept=Loss.EXACT))
    assert loaded is not None and exact is not None
    names = names_of(origin, ids)[block - 1 :: block]
    out = ep.joined(planes).permute(1, 2, 0, 3, 4, 5)
    for depth, name in enumerate(names[: loaded // block]):
        known = ep.published.get(name)
        if known is None:
            raise Finding(f"block {depth} of {ids[:loaded]} is published, and was never advanced under these ids")
        if depth < exact.blocks and not known.exact:
            raise Finding(f"block {depth} of {ids[:loaded]} counts as exact; it was computed over encoded KV")
        if not any(torch.equal(out[depth], version) for version in known.versions):
            off = min((out[depth].double() - version.double()).abs().max() for version in known.versions)
            raise Finding(f"block {depth} of {ids[:loaded]} has other KV, off by {off:.3}")
        ep.stored[name] = None
        ep.tally.events["published block"] += 1
    return loaded


@operation(7)
def flush(ep: Episode, rng: Random) -> None:
    """All full blocks are sealed and stored, and others find those that are public."""
    live = ep.pick(rng)
    if live is None:
        return
    _done, stored = ep.attempt("flush", f"{live.name}.flush()", live.sequence.flush)
    if not stored and not ep.world.worn:
        ep.fail(live, "flush() returned False")
    ep.check_numbers(live)
    if rng.random() < 0.5:
        check_flushed(ep, live.text)


def check_flushed(ep: Episode, text: Text) -> None:
    if ep.lost or text.public < ep.block:
        return
    loaded = check_published(ep, text.origin, text.ids[: text.public], ep.client(1))
    whole = text.public // ep.block * ep.block
    if loaded != whole:
        raise Finding(f"{loaded} of {whole} public tokens are found after a flush: {text.ids[: text.public]}")
    if text.exact:
        prompt = ep.prompt(text.origin, text.ids[: text.public])
        exact = ep.client(1).lookup(prompt, accept=Loss.EXACT)
        if exact.tokens != whole:
            raise Finding(f"{exact.tokens} of {whole} exact tokens are found as exact: {text.ids[: text.public]}")
