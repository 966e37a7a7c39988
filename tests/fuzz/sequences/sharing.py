"""Operations that open, share, cut, overwrite and close sequences."""

from __future__ import annotations

import warnings
from random import Random

from kvcluster.errors import CallerError, ResidentSetFull
from kvcluster.sequences.window_policy import WindowPolicy
from tests.fuzz.sequences.episode import MOST_OPEN, Episode, Finding, Live
from tests.fuzz.sequences.model import Text, Window, names_of
from tests.fuzz.sequences.operations import operation


@operation(1)
def open_one(ep: Episode, rng: Random) -> None:
    """A sequence is opened, with a prompt that may be cached."""
    if len(ep.live) >= MOST_OPEN:
        close_one(ep, rng)
    number = rng.choice((0, 0, 0, 1))
    texts = [live.text for live in ep.live] + ep.texts
    origin, ids = rng.choice((1, 1, 2)), [rng.randrange(ep.profile.alphabet) for _ in range(rng.randint(0, ep.block))]
    if texts and rng.random() < 0.6:
        text = rng.choice(texts)
        origin, ids = text.origin, text.ids + ids * rng.randint(0, 1)
    longest = 4_000 if ep.profile.long else 400
    max_tokens = rng.choice((longest, longest, rng.randint(1, 6 * ep.block)))
    drops = rng.random() < (0.8 if max_tokens < longest else 0.1)
    policy, window = ep.policy(rng)
    prefetch, local = rng.random() < 0.7, rng.random() < 0.1
    ep.opened += 1
    name = f"s{ep.opened}"
    client = ep.client(number)
    _, sequence = ep.attempt(
        "client.sequence",
        f"{name} = client {number}.sequence({ids[:40]}, origin {origin}, {max_tokens=}, drop_oldest={drops}, "
        f"{policy}, {prefetch=}, {local=})",
        lambda: client.sequence(
            ep.prompt(origin, ids),
            max_tokens=max_tokens,
            drop_oldest=drops,
            policy=policy,
            prefetch=prefetch,
            publish=not local,
        ),
    )
    assert sequence is not None
    ids = ids[: sequence.length]
    names = names_of(origin, ids)
    text = Text(origin, ep.block, ep.contents.of(names), window, max_tokens, drops, ep.dims, ids, names)
    live = Live(name, sequence, text, number)
    ep.live.append(live)
    if len(ids) != sequence.length or len(ids) % ep.block:
        ep.fail(live, f"begins with {sequence.length} tokens")
    opened(ep, live, names)
    if local:
        text.local, text.public = True, -1
        ep.tally.events["local"] += 1
    ep.check_numbers(live)


def opened(ep: Episode, live: Live, names: list[int]) -> None:
    """Takes into the text what a cached prefix is."""
    text = live.text
    text.pure = text.public = text.length
    text.raw_blocks = text.length // ep.block  # they left the tail before it was opened
    ep.tally.events["cached prefix"] += bool(names)
    for depth, name in enumerate(names[ep.block - 1 :: ep.block]):
        known, stop = ep.published.get(name), (depth + 1) * ep.block
        if known is None:
            ep.fail(live, f"begins with block {depth}, which was never advanced under these ids")
        assert known is not None
        if not known.exact and text.lossy_from is None:
            text.lossy_from = stop - ep.block
        text.exact &= len(ep.profile.codecs) == 1
        text.under.append(name)
        for layer in range(ep.profile.layers):
            text.take(layer, stop - ep.block, known.versions[0][layer])


@operation(8)
def fork(ep: Episode, rng: Random) -> None:
    """A sequence is forked; in the middle of a step that is refused."""
    live = ep.pick(rng)
    if live is None:
        return
    if len(ep.live) >= MOST_OPEN:
        close_one(ep, rng)
        if live not in ep.live:
            return
    ep.opened += 1
    name = f"s{ep.opened}"
    stepping = live.text.step is not None and bool(live.text.step.ids)
    done, sequence = ep.attempt(
        "fork",
        f"{name} = {live.name}.fork()",
        live.sequence.fork,
        must=CallerError if stepping else None,
        may=(CallerError,) if live.text.step is not None else (),
    )
    if not done:
        ep.unchanged(live, rng)
        return
    assert sequence is not None
    live.text.reserved = 0  # the first of both that appends to a shared block needs one page more
    child = Live(name, sequence, live.text.fork(), live.client)
    ep.live.append(child)
    ep.check_numbers(child)


@operation(9)
def truncate(ep: Episode, rng: Random) -> None:
    """The end of a sequence is dropped, with its present step."""
    live = ep.pick(rng)
    if live is None:
        return
    text = live.text
    length = text.length
    to = rng.choice(
        (length, max(0, length - 1), max(0, length - ep.block), rng.randint(0, length), rng.randint(0, length))
    )
    cut_to(ep, rng, live, to)


def cut_to(ep: Episode, rng: Random, live: Live, to: int) -> None:
    text = live.text
    if not ep.settle(live):
        return
    within = text.dropped.start < to < text.dropped.stop
    reset = not to and rng.random() < 0.5
    done, _ = ep.attempt(
        "reset" if reset else "truncate",
        f"{live.name}.reset()" if reset else f"{live.name}.truncate({to})",
        live.sequence.reset if reset else lambda: live.sequence.truncate(to),
        may=ep.absent(live, ep.block),
        must=CallerError if within else None,
    )
    if done:
        ep.lose_names(text, to // ep.block)
        text.truncate(to)
        ep.check_numbers(live)
        ep.know_end(live)
    else:
        ep.unchanged(live, rng)


def position_away(ep: Episode, rng: Random, live: Live) -> int:
    """Returns a position within a block that has left the resident set, if there is one, or else any."""
    text = live.text
    entries = live.sequence.block_table[: text.length // ep.block].tolist()
    away = [depth for depth, page in enumerate(entries) if page < 0 and depth * ep.block not in text.dropped]
    if not away:
        return rng.randint(text.dropped.stop, text.length)
    return min(text.length, rng.choice((away[0], rng.choice(away))) * ep.block + rng.randint(0, ep.block - 1))


@operation(6)
def write(ep: Episode, rng: Random) -> None:
    """Tokens of one layer, or of all, are overwritten."""
    live = ep.pick(rng)
    if live is None or not live.text.length:
        return
    text = live.text
    first, stop = sorted(rng.randint(0, text.length) for _ in "ab")
    if rng.random() < 0.6:
        first = max(first, text.length - 2 * ep.block)
        stop = max(stop, first)
    overwrite(ep, rng, live, first, stop)


def overwrite(ep: Episode, rng: Random, live: Live, first: int, stop: int) -> None:
    if not ep.settle(live):
        return
    text, layers = live.text, range(ep.profile.layers)
    kept = first >= text.dropped.stop or not text.dropped or text.length <= text.dropped.start
    for layer in layers if rng.random() < 0.5 else [rng.choice(layers)]:
        values = ep.contents.of([rng.getrandbits(64) for _ in range(stop - first)])[layer]
        done, _ = ep.attempt(
            "write",
            f"{live.name}.write({layer}, {first}, {stop - first} tokens)",
            lambda layer=layer, values=values: live.sequence.write(layer, first, *ep.planes(values)),
            may=(*ep.full(live, text.length), *((CallerError,) if not kept else ()), *ep.absent(live, text.length)),
        )
        if not done:
            ep.unchanged(live, rng)
            return
        if stop > first:
            ep.lose_names(text, first // ep.block)
            text.write(layer, first, values)
    ep.check_numbers(live)


@operation(4)
def set_policy(ep: Episode, rng: Random) -> None:
    """The policy is changed, at any time."""
    live = ep.pick(rng)
    if live is None:
        return
    set_to(ep, live, *ep.policy(rng))


def set_to(ep: Episode, live: Live, policy: WindowPolicy, window: Window) -> None:
    ep.attempt(
        "policy",
        f"{live.name}.policy = {policy}",
        lambda: setattr(live.sequence, "policy", policy),
    )
    live.text.set_window(window)
    if live.sequence.policy != policy:
        ep.fail(live, f"policy is {live.sequence.policy}")


@operation(3)
def close_one(ep: Episode, rng: Random) -> None:
    """A sequence is closed; its forks go on."""
    live = ep.pick(rng)
    if live is None:
        return
    ep.forget(live)
    ep.attempt("close", f"{live.name}.close()", live.sequence.close)
    if rng.random() < 0.3:
        live.sequence.close()
        ep.attempt("read", f"{live.name}.read, closed", lambda: live.sequence.read(0, 0, 0), must=CallerError)
        ep.attempt("advance", f"{live.name}.advance, closed", lambda: live.sequence.advance(0), must=CallerError)
        ep.attempt("fork", f"{live.name}.fork, closed", live.sequence.fork, must=CallerError)


@operation(1)
def abandon(ep: Episode, rng: Random) -> None:
    """A sequence is collected without having been closed: it is closed then, with a warning."""
    live = ep.pick(rng)
    if live is None:
        return
    ep.forget(live)
    ep.last = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ep.log.append(f"del {live.name}")
        del live.sequence
    ep.tally.events["collected"] += 1
    if not any(issubclass(warning.category, ResourceWarning) for warning in caught):
        raise Finding(f"{live.name} was not closed, and is collected without a warning")


@operation(1)
def prewarm(ep: Episode, rng: Random) -> None:
    """Memory is taken before it is needed; figures of the resident set are in range."""
    client, tokens = ep.client(rng.choice((0, 0, 0, 1))), rng.randint(1, 2 * ep.block * ep.profile.pages)
    ep.attempt(
        "client.prewarm_resident",
        f"client.prewarm_resident({tokens})",
        lambda: client.prewarm_resident(tokens),
        may=(ResidentSetFull,) if len(ep.profile.codecs) > 1 else (),  # encoded pages take the room
        must=CallerError if tokens > ep.block * ep.profile.pages else None,
    )
    use = client.resident()
    ep.tally.verbs["client.resident"] += 1
    if not use.pages_used <= use.pages == ep.profile.pages or use.used_bytes > use.pages * use.page_bytes:
        raise Finding(f"the resident set of {ep.profile.pages} pages has {use}")


@operation(1)
def erase(ep: Episode, rng: Random) -> None:
    """The coordinator gets every table, and its shards erase what no table names; open sequences read on. Before that a
    fork may have sealed the blocks of another sequence, and closed."""
    if ep.profile.racing or ep.profile.lossy or ep.world.scant:
        return
    idle = [live for live in ep.live if live.text.step is None]
    if idle and rng.random() < 0.9:
        parent = max(idle, key=lambda live: live.text.length - live.sequence.sealed)
        ep.log.append(f"{parent.name}.fork(), flush and close")
        with parent.sequence.fork() as child:
            if not child.flush():
                ep.fail(parent, "flush() of a fork returned False")
        parent.text.reserved = 0
    ep.wait_for_tables()
    ep.wait_until(lambda: not ep.unclaimed() or ep.world.report())
    ep.tally.events["erased"] += 1
    for live in ep.live:
        tokens = live.text.length - live.text.dropped.stop
        if tokens and not live.text.dropped.start and ep.settle(live):
            ep.read(live, rng.randrange(ep.profile.layers), live.text.dropped.stop, tokens)
