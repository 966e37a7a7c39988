"""Operations that make sequences longer: of one sequence, and of batches."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

import kvcluster
from kvcluster.errors import CallerError, LimitError
from tests.fuzz.sequences.episode import MOST_OPEN, Episode, Live
from tests.fuzz.sequences.judging import is_kept, wrong_values
from tests.fuzz.sequences.looking import DrawnPlanner, attend, check_rows, queries
from tests.fuzz.sequences.model import Step, Text, names_of
from tests.fuzz.sequences.operations import operation
from tests.fuzz.sequences.sharing import cut_to, overwrite, position_away, set_to

SPAN_TOKENS = 512
"""The positions of a span that is shipped (docs/attention.md)."""


def some_tokens(ep: Episode, rng: Random) -> int:
    block = ep.block
    if ep.profile.long and rng.random() < 0.5:
        return rng.choice((100, 256, 300, 512))
    most = block * rng.choice((1, 1, 2, 3))
    return rng.choice((0, 1, 1, 2, 3, block - 1, block, block + 1, rng.randint(0, most)))


def new_step(ep: Episode, rng: Random, text: Text, count: int) -> Step:
    """Returns the tokens that a sequence gets next."""
    return step_of(ep, rng, text, [rng.randrange(ep.profile.alphabet) for _ in range(count)])


def step_of(ep: Episode, rng: Random, text: Text, ids: list[int]) -> Step:
    """Returns these tokens, with the KV of their ids, or of their own where the ids before are not those of the KV."""
    names = names_of(text.origin_name, ids) if text.pure == text.length else [rng.getrandbits(64) for _ in ids]
    return Step(ids, names, ep.contents.of(names))


def limit(ep: Episode, text: Text, count: int) -> tuple[tuple[type[Exception], ...], type[Exception] | None]:
    """Returns what `count` more tokens may raise, and what they must: LimitError."""
    if text.length - len(text.dropped) + count <= text.max_tokens:
        return (), None
    if not text.drop_oldest:
        return (), LimitError
    kept = text.dropped.start if text.dropped else -(-text.window.sinks // ep.block) * ep.block
    return ((LimitError,) if kept + count + 2 * ep.block > text.max_tokens else ()), None


def append(ep: Episode, rng: Random, live: Live, layer: int, step: Step, *, graph: bool = False) -> bool:
    """Appends the step to one layer; as a `graph`, from tensors that require grad."""
    text, before, count = live.text, live.sequence.dropped, len(step.ids)
    first = text.step is None
    may, must = limit(ep, text, count) if first else ((), None)
    k, v = ep.planes(step.kv[layer])
    if graph:
        k = k.clone().requires_grad_()
    done, _ = ep.attempt(
        "append",
        f"{live.name}.append({layer}, {count} tokens)",
        lambda: live.sequence.append(layer, k, v),
        may=(*may, *(ep.full(live, count) if first and count > text.reserved else ())),
        must=must,
    )
    if done:
        if first:
            ep.note_dropped(live, before, count)
            text.step = step
        step.layers[layer] = None
    else:
        ep.unchanged(live, rng)
    return done


def advance(ep: Episode, rng: Random, live: Live) -> bool:
    """Makes the step count, which every layer has appended."""
    text, step = live.text, live.text.step
    assert step is not None
    by_ids = rng.random() < 0.85
    given = step.ids if by_ids else len(step.ids)
    if by_ids:
        ep.may_publish(text)
    done, _ = ep.attempt(
        "advance",
        f"{live.name}.advance({step.ids if by_ids and len(step.ids) <= 40 else len(step.ids)})",
        lambda: live.sequence.advance(given),
        may=ep.full(live),
    )
    if done:
        count(ep, live, by_ids)
    else:
        ep.unchanged(live, rng)
    return done


def count(ep: Episode, live: Live, by_ids: bool) -> None:
    text, pure = live.text, live.text.pure
    text.advance(by_ids=by_ids and not text.local)
    ep.published_now(text, pure)


@operation(24)
def grow(ep: Episode, rng: Random) -> None:
    """A whole step: every layer appends and perhaps attends, then the tokens count."""
    live = ep.pick(rng)
    if live is None:
        return
    text = live.text
    step = text.step or new_step(ep, rng, text, some_tokens(ep, rng))
    layers = [layer for layer in range(ep.profile.layers) if layer not in step.layers]
    if rng.random() < 0.2:
        rng.shuffle(layers)
    attends = rng.random() < 0.3
    for layer in layers:
        if not append(ep, rng, live, layer, step):
            return
        if attends:
            attend(ep, rng, live, layer)
    advance(ep, rng, live)


@operation(1)
def grow_from_graph(ep: Episode, rng: Random) -> None:
    """A step of tensors that require grad: values are copied, never a graph."""
    live = ep.pick(rng, idle=True)
    if live is None:
        return
    step = new_step(ep, rng, live.text, some_tokens(ep, rng))
    for layer in range(ep.profile.layers):
        if not append(ep, rng, live, layer, step, graph=True):
            return
    advance(ep, rng, live)


@operation(4)
def append_one_layer(ep: Episode, rng: Random) -> None:
    """One layer of a step appends."""
    live = ep.pick(rng)
    if live is None:
        return
    step = live.text.step or new_step(ep, rng, live.text, some_tokens(ep, rng))
    left = [layer for layer in range(ep.profile.layers) if layer not in step.layers]
    if left:
        append(ep, rng, live, rng.choice(left), step)


@operation(2)
def advance_now(ep: Episode, rng: Random) -> None:
    """Advances whatever the step has: refused unless every layer has appended."""
    live = ep.pick(rng)
    if live is None:
        return
    step = live.text.step
    if step is not None and len(step.layers) == ep.profile.layers:
        advance(ep, rng, live)
        return
    have = len(step.ids) if step is not None else 0
    given = have or rng.choice((0, 1))
    harmless = step is None and not given
    _done, _ = ep.attempt(
        "advance",
        f"{live.name}.advance({given}), which is refused",
        lambda: live.sequence.advance(given),
        may=(CallerError,) if harmless else (),
        must=None if harmless else CallerError,
    )
    ep.unchanged(live, rng)


@operation(4)
def update(ep: Episode, rng: Random) -> None:
    """A whole step by `update`, which returns all of each layer."""
    live = ep.pick(rng, idle=True)
    if live is None:
        return
    step = new_step(ep, rng, live.text, some_tokens(ep, rng))
    for layer in range(ep.profile.layers):
        if not update_layer(ep, rng, live, layer, step):
            return
    advance(ep, rng, live)


def update_layer(ep: Episode, rng: Random, live: Live, layer: int, step: Step) -> bool:
    text, tokens, before = live.text, len(step.ids), live.sequence.dropped
    if not ep.settle(live):
        return False
    first = text.step is None
    may, must = limit(ep, text, tokens) if first else ((), None)
    done, got = ep.attempt(
        "update",
        f"{live.name}.update({layer}, {tokens} tokens)",
        lambda: live.sequence.update(layer, *ep.planes(step.kv[layer])),
        may=(*may, *ep.absent(live, tokens)),
        must=must,
    )
    if not done:
        ep.unchanged(live, rng)
        return False
    if first:
        ep.note_dropped(live, before, tokens)
        text.step = step
    step.layers[layer] = None
    assert got is not None
    check_update(ep, live, layer, got)
    return True


def check_update(ep: Episode, live: Live, layer: int, got: list[torch.Tensor]) -> None:
    """What `update` has returned are the tokens that are kept."""
    if not is_kept(ep, live.text, layer, ep.joined(got)):
        ep.fail(live, f"update of layer {layer} returned other values, or not all: {got[0].shape}")


@operation(5)
def reserve(ep: Episode, rng: Random) -> None:
    """Pages are taken for tokens to come: appending these cannot fail for want of room."""
    live = ep.pick(rng)
    if live is not None:
        reserve_for(ep, rng, live)


def reserve_for(ep: Episode, rng: Random, live: Live) -> None:
    text, tokens, before = live.text, some_tokens(ep, rng), live.sequence.dropped
    may, must = limit(ep, text, tokens)
    stepping = text.step is not None
    done, _ = ep.attempt(
        "reserve",
        f"{live.name}.reserve({tokens})",
        lambda: live.sequence.reserve(tokens),
        may=(*may, *ep.full(live, tokens), *((CallerError,) if stepping else ())),
        must=CallerError if stepping and text.step.ids else must,  # type: ignore[union-attr]
    )
    if done:
        ep.note_dropped(live, before, tokens)
        text.reserved, text.held = max(text.reserved, tokens), max(text.held, tokens)
    ep.check_numbers(live)


@operation(9)
def grow_batch(ep: Episode, rng: Random) -> None:
    """A step of some sequences of one client, each with as many tokens as it likes."""
    first = ep.pick(rng, idle=True)
    if first is None:
        return
    others = [live for live in ep.live if live.client == first.client and live is not first and live.text.step is None]
    rows = [first, *rng.sample(others, min(len(others), rng.choice((0, 1, 1, 2, 3))))]
    equal = some_tokens(ep, rng) if rng.random() < 0.5 else None
    steps = [new_step(ep, rng, row.text, some_tokens(ep, rng) if equal is None else equal) for row in rows]
    counts = [len(step.ids) for step in steps]
    batch = kvcluster.SequenceBatch([row.sequence for row in rows])
    name = f"SequenceBatch([{', '.join(row.name for row in rows)}])"
    limits = [limit(ep, row.text, tokens) for row, tokens in zip(rows, counts, strict=True)]
    for layer in range(ep.profile.layers):
        kv = torch.cat([step.kv[layer] for step in steps], 1)
        must = next((must for _, must in limits if must is not None), None) if layer == 0 else None
        may = [error for each, _ in limits for error in each] if layer == 0 else []
        before = [row.sequence.dropped for row in rows]
        done, _ = ep.attempt(
            "batch.append",
            f"{name}.append({layer}, tokens={counts})",
            lambda kv=kv, layer=layer: batch.append(
                layer, *ep.planes(kv), tokens=None if equal is not None else counts
            ),
            may=(*may, *(ep.full(first, sum(counts)) if layer == 0 else ())),
            must=(must, *ep.full(first)) if must is not None else None,
        )
        if not done:
            for row in rows:
                ep.unchanged(row, rng)
            return
        for row, step, dropped in zip(rows, steps, before, strict=True):
            if layer == 0:
                ep.note_dropped(row, dropped, len(step.ids))
                row.text.step = step
            step.layers[layer] = None
        if rng.random() < 0.4:
            check_rows(ep, rng, batch, name, rows, layer, queries(ep, rng, rows, layer))
    by_ids = [rng.random() < 0.85 for _ in rows]
    given = [step.ids if ids else len(step.ids) for step, ids in zip(steps, by_ids, strict=True)]
    for row, ids in zip(rows, by_ids, strict=True):
        if ids:
            ep.may_publish(row.text)
    done, _ = ep.attempt("batch.advance", f"{name}.advance({given})", lambda: batch.advance(given), may=ep.full(first))
    for row, ids in zip(rows, by_ids, strict=True):
        if done:
            count(ep, row, ids)
        ep.unchanged(row, rng) if not done else ep.check_numbers(row)


def grow_by(ep: Episode, rng: Random, live: Live, tokens: int) -> bool:
    """Makes a whole step of so many tokens."""
    return grow_with(ep, rng, live, new_step(ep, rng, live.text, tokens))


def grow_with(ep: Episode, rng: Random, live: Live, step: Step) -> bool:
    if live.text.step is not None or live.text.length + len(step.ids) > live.text.max_tokens:
        return False
    for layer in range(ep.profile.layers):
        if not append(ep, rng, live, layer, step):
            return False
    return advance(ep, rng, live)


@operation(5)
def press(ep: Episode, rng: Random) -> None:
    """A sequence takes nearly all of the resident set, so that blocks of others leave it."""
    live = ep.pick(rng, idle=True)
    if live is not None and len(ep.live) > 1:
        press_with(ep, rng, live)


def press_with(ep: Episode, rng: Random, live: Live) -> None:
    chunk = max(1, ep.profile.pages // 2) * ep.block
    for _ in range(2):
        if not grow_by(ep, rng, live, chunk):
            break
        if rng.random() < 0.3:
            ep.attempt("flush", f"{live.name}.flush()", live.sequence.flush)
    if rng.random() < 0.7:
        cut_to(ep, rng, live, rng.choice((0, 0, live.text.dropped.stop, min(live.text.length, ep.block))))


@operation(5)
def rewrite(ep: Episode, rng: Random) -> None:
    """What has left the resident set is attended to, made anew, has to leave it again, and is attended to once more."""
    live = ep.pick(rng, idle=True)
    if live is None or not live.text.length:
        return
    if rng.random() < 0.7:
        attend(ep, rng, live, rng.randrange(ep.profile.layers))
    first = position_away(ep, rng, live)
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.6:
            cut_to(ep, rng, live, first)
        else:
            overwrite(ep, rng, live, first, min(live.text.length, first + rng.randint(1, ep.block)))
        first = min(live.text.length, max(first // ep.block * ep.block, first - rng.choice((0, 0, 1))))
    grow_by(ep, rng, live, rng.choice((1, ep.block, 2 * ep.block)))
    ep.attempt("flush", f"{live.name}.flush()", live.sequence.flush)
    others = [each for each in ep.live if each is not live and each.client == live.client]
    if others:
        press_with(ep, rng, rng.choice(others))
    for layer in range(ep.profile.layers):
        attend(ep, rng, live, layer)


@operation(4)
def remake(ep: Episode, rng: Random) -> None:
    """The end of a sequence is made anew under the same ids, behind tokens that may have been encoded: so a name has
    blocks of unlike values. Then it has to leave the resident set."""
    live = ep.pick(rng, idle=True)
    if live is None or live.text.dropped:
        return
    text, pure = live.text, live.text.pure
    to = rng.randint(max(0, pure - 3 * ep.block), pure)
    if text.encoded is not None and text.encoded[:pure].any():
        to = rng.choice(text.encoded[:pure].nonzero().flatten().tolist())
    ids = text.ids[to:pure]
    if rng.random() < 0.5:
        ep.attempt("flush", f"{live.name}.flush()", live.sequence.flush)
    cut_to(ep, rng, live, to)
    if rng.random() < 0.7:
        set_to(ep, live, *ep.policy(rng, ("raw",)))
    if text.length != to or not grow_with(ep, rng, live, step_of(ep, rng, text, ids)):
        return
    ep.attempt("flush", f"{live.name}.flush()", live.sequence.flush)
    others = [each for each in ep.live if each is not live and each.client == live.client]
    if others:
        press_with(ep, rng, rng.choice(others))
    layer = rng.randrange(ep.profile.layers)
    if rng.random() < 0.5:
        attend(ep, rng, live, layer)
    if ep.settle(live):
        ep.read(live, layer, 0, text.length)


@operation(4)
def mark_written(ep: Episode, rng: Random) -> None:
    """Another writer fills reserved pages by the block table, for all layers or one after the other."""
    live = ep.pick(rng, idle=True)
    if live is None:
        return
    text, sequence = live.text, live.sequence
    if not text.reserved and rng.random() < 0.8:
        reserve_for(ep, rng, live)
    tokens = min(sequence.reserved, some_tokens(ep, rng))
    if text.length + tokens > text.max_tokens or sequence.reserved < text.reserved:
        if sequence.reserved < text.reserved:
            ep.fail(live, f"reserved is {sequence.reserved}; expected at least {text.reserved}")
        return
    step, table, pages = new_step(ep, rng, text, tokens), sequence.block_table, ep.resident_planes(sequence)
    for at in range(tokens):
        page, slot = table[(text.length + at) // ep.block], (text.length + at) % ep.block
        if page < 0:
            ep.fail(live, f"reserved position {text.length + at} has no page")
        for plane, values in zip(pages, ep.planes(step.kv[:, :, at].transpose(0, 1)), strict=True):
            plane[page, :, slot] = values
    layers = [None] if rng.random() < 0.5 else list(range(ep.profile.layers))
    for layer in layers:
        ep.attempt(
            "mark_written",
            f"{live.name}.mark_written({tokens}, {layer})",
            lambda layer=layer: sequence.mark_written(tokens, layer),
        )
        text.step = step
        for each in range(ep.profile.layers) if layer is None else [layer]:
            step.layers[each] = None
        if rng.random() < 0.3:
            attend(ep, rng, live, rng.choice(list(step.layers)))
    advance(ep, rng, live)


@operation(3)
def grow_batch_by_update(ep: Episode, rng: Random) -> None:
    """A step of a batch by `update`, which returns what each row keeps."""
    rows = some_rows(ep, rng)
    if not rows or not all(ep.settle(row) for row in rows):
        return
    steps = [new_step(ep, rng, row.text, some_tokens(ep, rng)) for row in rows]
    counts = [len(step.ids) for step in steps]
    batch, name = batch_of(rows)
    limits = [limit(ep, row.text, tokens) for row, tokens in zip(rows, counts, strict=True)]
    for layer in range(ep.profile.layers):
        kv = torch.cat([step.kv[layer] for step in steps], 1)
        must = next((must for _, must in limits if must is not None), None) if layer == 0 else None
        may = [error for each, _ in limits for error in each] if layer == 0 else []
        before = [row.sequence.dropped for row in rows]
        full = ep.absent(rows[0], sum(counts))
        done, got = ep.attempt(
            "batch.update",
            f"{name}.update({layer}, tokens={counts})",
            lambda kv=kv, layer=layer: batch.update(layer, *ep.planes(kv), tokens=counts),
            may=(*may, *full),
            must=(must, *full) if must is not None else None,
        )
        if not done or got is None:
            for row in rows:
                ep.unchanged(row, rng)
            return
        for row, step, dropped, found in zip(rows, steps, before, got, strict=True):
            if layer == 0:
                ep.note_dropped(row, dropped, len(step.ids))
                row.text.step = step
            step.layers[layer] = None
            check_update(ep, row, layer, found)
    for row in rows:
        advance(ep, rng, row)


def some_rows(ep: Episode, rng: Random) -> list[Live]:
    """Draws sequences of one client that are between two steps."""
    first = ep.pick(rng, idle=True)
    if first is None:
        return []
    others = [live for live in ep.live if live.client == first.client and live is not first and live.text.step is None]
    return [first, *rng.sample(others, min(len(others), rng.choice((0, 1, 1, 2, 3))))]


def batch_of(rows: list[Live]) -> tuple[kvcluster.SequenceBatch, str]:
    return kvcluster.SequenceBatch(
        [row.sequence for row in rows]
    ), f"SequenceBatch([{', '.join(r.name for r in rows)}])"


@operation(6)
def verb_of_batch(ep: Episode, rng: Random) -> None:
    """Any other verb of a batch: all rows, or none."""
    rows = some_rows(ep, rng)
    if not rows or not all(ep.settle(row) for row in rows):
        return
    batch, name = batch_of(rows)
    verb = rng.choice(("read", "write", "truncate", "fork", "reserve", "load", "flush", "reset"))
    layer, kept = rng.randrange(ep.profile.layers), [max(0, row.text.dropped.stop) for row in rows]
    spans = [sorted(rng.randint(first, row.text.length) for _ in "ab") for row, first in zip(rows, kept, strict=True)]
    starts, counts = [first for first, _ in spans], [stop - first for first, stop in spans]
    may = ep.absent(rows[0], sum(row.text.length for row in rows))
    result: Any = None
    if verb == "read":
        done, result = ep.attempt(
            "batch.read",
            f"{name}.read({layer}, {starts}, {counts})",
            lambda: batch.read(layer, starts, counts),
            may=may,
        )
        for row, start, count_, found in zip(rows, starts, counts, result or (), strict=bool(result)):
            if found[0].shape[0] != count_ or (wrong := wrong_values(ep, row.text, layer, start, ep.joined(found))):
                ep.fail(row, f"batch.read({layer}, {start}, {count_}): {wrong or 'other tokens'}")
    elif verb == "write":
        values = [ep.contents.of([rng.getrandbits(64) for _ in range(tokens)])[layer] for tokens in counts]
        kv = torch.cat(values, 1)
        done, _ = ep.attempt(
            "batch.write",
            f"{name}.write({layer}, {starts}, tokens={counts})",
            lambda: batch.write(layer, starts, *ep.planes(kv), tokens=counts),
            may=may,
        )
        for row, start, each in zip(rows, starts, values, strict=True):
            if done and each.shape[1]:
                ep.lose_names(row.text, start // ep.block)
                row.text.write(layer, start, each)
    elif verb in ("truncate", "reset"):
        cuts = starts if verb == "truncate" else [0] * len(rows)
        done, _ = ep.attempt(
            f"batch.{verb}",
            f"{name}.truncate({cuts})",
            (lambda: batch.truncate(cuts)) if verb == "truncate" else batch.reset,
            may=may,
        )
        for row, to in zip(rows, cuts, strict=True):
            if done:
                ep.lose_names(row.text, to // ep.block)
                row.text.truncate(to)
    elif verb == "fork":
        if len(ep.live) + len(rows) > MOST_OPEN + 2:
            return
        done, result = ep.attempt("batch.fork", f"{name}.fork()", batch.fork)
        for row, child in zip(rows, result.sequences, strict=True):
            ep.opened += 1
            row.text.reserved = 0
            ep.live.append(Live(f"s{ep.opened}", child, row.text.fork(), row.client))
    elif verb == "reserve":
        limits = [limit(ep, row.text, tokens) for row, tokens in zip(rows, counts, strict=True)]
        must = next((must for _, must in limits if must is not None), None)
        before = [row.sequence.dropped for row in rows]
        done, _ = ep.attempt(
            "batch.reserve",
            f"{name}.reserve({counts})",
            lambda: batch.reserve(counts),
            may=(*may, *(e for each, _ in limits for e in each)),
            must=(must, *may) if must else None,
        )
        for row, tokens, dropped in zip(rows, counts, before, strict=True):
            if done:
                ep.note_dropped(row, dropped, tokens)
                row.text.reserved, row.text.held = max(row.text.reserved, tokens), max(row.text.held, tokens)
    elif verb == "load":
        done, _ = ep.attempt(
            "batch.load", f"{name}.load({starts}, {counts})", lambda: batch.load(starts, counts), may=may
        )
    else:
        done, result = ep.attempt("batch.flush", f"{name}.flush()", batch.flush)
    for row in rows:
        ep.check_numbers(row) if done else ep.unchanged(row, rng)
    for row in rows:
        ep.know_end(row)


@operation(5)
def attend_remotely(ep: Episode, rng: Random) -> None:
    """A context that shards have in whole spans is attended to by planners, while all or little of it is here."""
    long = [live for live in ep.live if live.text.step is None]
    if not ep.profile.long or not long:
        return
    live = max(long, key=lambda each: each.text.length)
    if live.text.length < SPAN_TOKENS + ep.block and not grow_by(ep, rng, live, SPAN_TOKENS + rng.randint(0, ep.block)):
        return
    ep.attempt("flush", f"{live.name}.flush()", live.sequence.flush)
    others = [each for each in ep.live if each is not live and each.client == live.client]
    if others and rng.random() < 0.6:
        press_with(ep, rng, rng.choice(others))
    drawn = DrawnPlanner(Random(rng.getrandbits(32)))
    for _ in range(rng.randint(1, 2)):
        for layer in range(ep.profile.layers):
            how = rng.choice((drawn, drawn, kvcluster.ShipAbsent()))
            check_rows(ep, rng, None, live.name, [live], layer, queries(ep, rng, [live], layer), by=how)
        grow_by(ep, rng, live, 1)
