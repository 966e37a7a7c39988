"""Operations that are refused, and must have changed nothing."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch

import kvcluster
from kvcluster.errors import CallerError
from tests.fuzz.sequences.episode import Episode, Live
from tests.fuzz.sequences.growing import append, new_step
from tests.fuzz.sequences.operations import operation


@operation(5)
def misuse(ep: Episode, rng: Random) -> None:
    """A call with arguments that do not fit."""
    live = ep.pick(rng)
    if live is None:
        return
    what, call = rng.choice(wrong_calls(ep, rng, live))
    ep.attempt(what.split("(")[0], f"{live.name}.{what}", call, must=CallerError)
    ep.unchanged(live, rng)


def wrong_calls(ep: Episode, rng: Random, live: Live) -> list[tuple[str, Callable[[], Any]]]:
    sequence, text, layers = live.sequence, live.text, ep.profile.layers
    heads, (dim, v_dim), length = ep.profile.heads, ep.dims, text.length

    def kv(tokens: int, heads: int = heads, dim: int = dim, dtype: torch.dtype = ep.dtype) -> torch.Tensor:
        return torch.ones(tokens, heads, dim, dtype=dtype)

    def both(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return kv(tokens), kv(tokens, dim=v_dim)

    other = torch.float16 if ep.dtype is not torch.float16 else torch.float32
    there = text.layer(0).shape[1]
    query = torch.zeros(there + 1, 2 * heads, dim)
    policy: Any = "raw"
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("append(a layer that is not there)", lambda: sequence.append(layers, *both(1))),
        ("append(layer -1)", lambda: sequence.append(-1, *both(1))),
        ("append(more heads)", lambda: sequence.append(0, kv(1, heads + 1), kv(1, heads + 1, v_dim))),
        ("append(another dim)", lambda: sequence.append(0, kv(1, dim=dim + 8), kv(1, dim=v_dim + 8))),
        ("append(another dtype)", lambda: sequence.append(0, kv(1, dtype=other), kv(1, dim=v_dim, dtype=other))),
        ("append(K longer than V)", lambda: sequence.append(0, kv(2), kv(1, dim=v_dim))),
        ("append(no V)", lambda: sequence.append(0, kv(1))),
        ("advance(-1)", lambda: sequence.advance(-1)),
        ("advance(True)", lambda: sequence.advance(True)),
        ("advance(one more than the step has)", lambda: sequence.advance(1 + (len(text.step.ids) if text.step else 0))),
        ("truncate(more than there are)", lambda: sequence.truncate(length + 1)),
        ("truncate(-1)", lambda: sequence.truncate(-1)),
        ("read(beyond the end)", lambda: sequence.read(0, length, len(text.step.ids) + 1 if text.step else 1)),
        ("read(position -1)", lambda: sequence.read(0, -1, 1)),
        ("read(a layer that is not there)", lambda: sequence.read(layers, 0, 0)),
        ("write(beyond the end)", lambda: sequence.write(0, length, *both(1))),
        ("write(another dtype)", lambda: sequence.write(0, 0, kv(1, dtype=other), kv(1, dim=v_dim, dtype=other))),
        ("reserve(-1)", lambda: sequence.reserve(-1)),
        ("load(beyond the end)", lambda: sequence.load(0, length + 1)),
        ("attend(more queries than tokens)", lambda: sequence.attend(0, query)),
        ("attend(a layer that is not there)", lambda: sequence.attend(layers, query[:1])),
        ("attend(another dim)", lambda: sequence.attend(0, query[:1, :, : dim - 1])),
        ("policy(no policy)", lambda: setattr(sequence, "policy", policy)),
        ("batch(a sequence twice)", lambda: kvcluster.SequenceBatch([sequence, sequence])),
    ]
    if text.step is not None and text.step.layers:
        there = next(iter(text.step.layers))
        tokens = len(text.step.ids)
        calls += 3 * [("append(a layer that has appended)", lambda: sequence.append(there, *both(tokens)))]
        left = [layer for layer in range(layers) if layer not in text.step.layers]
        if left:
            calls += 3 * [
                ("append(unlike other layers)", lambda: sequence.append(left[0], *both(tokens + 1))),
                ("advance(before all layers)", lambda: sequence.advance(text.step.ids if text.step else 0)),
            ]
    if text.step is None or text.step.ids:
        ids = text.step.ids if text.step else []
        calls.append(("advance(no token id)", lambda: sequence.advance([-1, *ids[1:]] if ids else [2**32])))
    return calls


@operation(3)
def step_of_unlike_layers(ep: Episode, rng: Random) -> None:
    """One layer appends nothing, the next appends some: the second is refused, or `advance` is."""
    live = ep.pick(rng, idle=True)
    if live is None or ep.profile.layers < 2:
        return
    empty, full = new_step(ep, rng, live.text, 0), new_step(ep, rng, live.text, rng.randint(1, 2 * ep.block))
    if live.text.length + len(full.ids) > live.text.max_tokens:
        return
    sequence = live.sequence
    if not append(ep, rng, live, 0, empty):
        return
    ep.attempt(
        "append",
        f"{live.name}.append(1, {len(full.ids)} tokens), behind none in layer 0",
        lambda: sequence.append(1, *ep.planes(full.kv[1])),
        must=CallerError,
    )
    ep.unchanged(live, rng)


@operation(2)
def misuse_batch(ep: Episode, rng: Random) -> None:
    """A call of a batch with arguments that do not fit: no row has changed."""
    first = ep.pick(rng)
    if first is None:
        return
    rows = [live for live in ep.live if live.client == first.client]
    batch = kvcluster.SequenceBatch([row.sequence for row in rows])
    count, kv = len(rows), ep.planes(new_step(ep, rng, first.text, 2 * len(rows)).kv[0])
    steps = [len(row.text.step.ids) if row.text.step else 0 for row in rows]
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("append(tokens of fewer rows)", lambda: batch.append(0, *kv, tokens=[2] * (count - 1))),
        ("append(tokens that add up to less)", lambda: batch.append(0, *kv, tokens=[2] * (count - 1) + [1])),
        ("append(a negative number)", lambda: batch.append(0, *kv, tokens=[2] * (count - 1) + [-2])),
        ("advance(fewer rows)", lambda: batch.advance(steps[:-1])),
        ("advance(one token too many in the last row)", lambda: batch.advance([*steps[:-1], steps[-1] + 1])),
        ("attend(tokens of fewer rows)", lambda: batch.attend(0, torch.zeros(1, 2, ep.profile.dim), tokens=[])),
    ]
    stepping = next((row for row in rows if row.text.step is not None and row.text.step.layers), None)
    if stepping is not None and stepping.text.step is not None:
        there = next(iter(stepping.text.step.layers))
        calls += 3 * [("append(a layer that one row has)", lambda: batch.append(there, *kv, tokens=[2] * count))]
    what, call = rng.choice(calls)
    ep.attempt(f"batch.{what.split('(')[0]}", f"SequenceBatch.{what}", call, must=CallerError)
    for row in rows:
        ep.unchanged(row, rng)
