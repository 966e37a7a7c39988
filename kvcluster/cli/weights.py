"""`kvcluster weights`: shows the live engines and the weights under which each caches, and names changed weights.

An engine whose weights were changed in memory, and that was notified (vLLM: `/reset_prefix_cache?reset_external=true`),
shares with no other engine, because the cluster cannot know its weights. The operator who changed them can name them:
`kvcluster weights set` sends the name to all engines of a model that are in this state, and they share from then on.

For `status` and `doctor`, `kept_apart` finds namespaces of one model that cannot share KV, and the fields that differ.
A client's spec names everything that must match. Two namespaces of one model mean two sets of engines, or one set whose
weights or settings have changed; each computes what the other has cached. That is correct but often unintended, so it
is reported with the field that differs. Different adapters are intended and not reported, nor are the private
namespaces of engines that share with no other (`alone` reports those), nor namespaces without blocks: a purge leaves
them behind, and nothing is computed twice for them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from kvcluster.cli.coordinator_args import ANSWER_MS, add_coordinator_args, coordinator
from kvcluster.cli.status_view import add_engines
from kvcluster.cli.text_page import TextPage
from kvcluster.core.groups import Group
from kvcluster.core.messages import EngineInfo, Engines, GetEngines, GetNamespaces, Namespaces, SetWeights
from kvcluster.core.spec import PRIVATE_WEIGHTS, KVSpec, check_weights, differing_fields
from kvcluster.transfers.coordinator_client import GrpcPort, expect
from kvcluster.transport.base import Deadline

Living = Sequence[tuple[EngineInfo, int]]
_SAYS_S = 3.0
"""How long the name is sent again, since an engine that was just reset registers as private a moment later."""

_CONFIRM_S = 15.0
"""How long to wait for engines to take the name: each gets it with its next registration, within a few seconds, unless
it has ended."""


_DESCRIPTION = """
Shows the engines that are registered with the cluster, and the weights under which each caches; or names the weights of
engines whose weights changed in memory. An engine that was told so, as vLLM is by a reset of its prefix cache with
reset_external=true, shares with no other until its weights have a name: `weights set` gives one to all such engines of
a model.

exit status of `set`: 0 if every engine has confirmed, 1 otherwise.
"""


def add(commands: Any) -> None:
    """Adds the command."""
    weights = commands.add_parser(
        "weights",
        help="show engines and their weights, or name changed weights",
        description=_DESCRIPTION,
        examples=[
            "kvcluster weights",
            "kvcluster weights set llama-3-8b sha256:4f1c...",
            "kvcluster weights set llama-3-8b sha256:4f1c... --engine host-1:4711",
        ],
    )
    weights.add_argument(
        "action", nargs="?", choices=["set"], metavar="set", help="name weights (default: show engines)"
    )
    weights.add_argument(
        "names",
        nargs="*",
        metavar="MODEL WEIGHTS",
        help="model and id of its weights, such as llama-3-8b sha256:4f1c2a",
    )
    weights.add_argument(
        "--engine",
        default="",
        metavar="NAME",
        help="name or id of one engine whose weights changed (default: all such engines of the model)",
    )
    weights.add_argument("--json", action="store_true", help="print the engines as a JSON list")
    add_coordinator_args(weights)
    weights.set_defaults(run=lambda options: _weights(options, weights))


def read_engines(port: GrpcPort, wait_ms: int) -> Living:
    """Returns the engines of this credential's tenant, each with the nanoseconds since it last registered. Raises
    Unavailable if the coordinator does not answer in time."""
    return expect(Engines, port.ask(GetEngines(), Deadline.after_ms(wait_ms))).known


def engines_dict(engines: Living) -> list[dict[str, Any]]:
    """Returns the engines as plain values for JSON."""
    return [
        {
            "engine": info.engine,
            "name": info.name,
            "model": info.model,
            "weights": info.weights,
            "facts": dict(info.facts),
            "private": info.private,
            "withdrawn": info.withdrawn,
            "ready": info.ready,
            "protocol": info.protocol,
            "seen_ns_ago": ago,
        }
        for info, ago in engines
    ]


def alone(engines: Living) -> Iterator[str]:
    """Yields a sentence for each engine that shares with no other, with what to do about it."""
    for info, _ in engines:
        if info.private and info.ready:
            yield (
                f"{info.model}: {info.name} shares with no other engine since its weights changed in memory; "
                f"name them with `kvcluster weights set {info.model} WEIGHTS`"
            )
        elif info.private:
            yield (
                f"{info.model}: {info.name} shares with no other engine: it was reset while requests ran, so it may "
                "hold KV of its previous weights; reset it again when it is idle"
            )


def _weights(options: argparse.Namespace, command: argparse.ArgumentParser) -> int:
    if options.action != "set":
        if options.names or options.engine:
            command.error("give `set MODEL WEIGHTS` to name weights, or no arguments to show the engines")
        return _show(options)
    if len(options.names) != 2:
        command.error("give the model and its weights, such as `kvcluster weights set llama-3-8b sha256:4f1c...`")
    model, weights = options.names
    check_weights(weights)
    with coordinator(options, wait_ms=ANSWER_MS) as port:
        engines = _set(port, SetWeights(model, weights, options.engine))
        if not engines:
            print(_why_none(read_engines(port, ANSWER_MS), model), file=sys.stderr)
            return 1
    for name, has_taken in engines.values():
        print(f"{name}: {'caches under these weights' if has_taken else 'has not confirmed in time'}")
    return 0 if all(has_taken for _, has_taken in engines.values()) else 1


def _show(options: argparse.Namespace) -> int:
    with coordinator(options, wait_ms=ANSWER_MS) as port:
        engines = read_engines(port, ANSWER_MS)
    if options.json:
        print(json.dumps(engines_dict(engines), indent=2))
    elif not engines:
        print(
            "no engine has registered; vLLM engines do so a few seconds after they start, and other clients do not "
            "(`kvcluster status`)"
        )
    else:
        page = TextPage.of_terminal()
        add_engines(page, engines_dict(engines))
        for line in alone(engines):
            page.say(line)
        page.print()
    return 0


def _set(port: GrpcPort, message: SetWeights) -> dict[str, tuple[str, bool]]:
    """Sends the name of the weights, and waits until the engines have taken it. Returns by engine id its name, and
    whether it has."""
    began = time.monotonic()
    engines: dict[str, tuple[str, bool]] = {}
    while True:
        waited = time.monotonic() - began
        if waited < _SAYS_S:
            answer = expect(Engines, port.ask(message, Deadline.after_ms(ANSWER_MS)))
            engines |= {info.engine: (info.name, False) for info, _ in answer.known}
        for info, _ in read_engines(port, ANSWER_MS):
            if info.engine in engines and info.weights == message.weights and not info.private:
                engines[info.engine] = (info.name, True)
        if waited >= _SAYS_S and (waited >= _CONFIRM_S or all(has_taken for _, has_taken in engines.values())):
            return engines
        time.sleep(0.2)


def _why_none(engines: Living, model: str) -> str:
    of_model = [info for info, _ in engines if info.model == model]
    if not of_model:
        known = ", ".join(dict.fromkeys(info.model for info, _ in engines))
        return f"no engine of {model} has registered" + (f"; there are engines of: {known}" if known else "")
    if not any(info.private for info in of_model):
        return (
            f"no engine of {model} is private: they know their weights themselves. Weights that change in memory are "
            "named after the engine was reset (vLLM: /reset_prefix_cache?reset_external=true)"
        )
    if not any(info.private and info.ready for info in of_model):
        return "\n".join(alone(engines))
    return f"no private engine of {model} has that name; `kvcluster weights` shows them"


Known = Sequence[tuple[KVSpec, int]]
_SHOWN = 40


def read_namespaces(port: GrpcPort, wait_ms: int) -> Known:
    """Returns the namespaces of this credential's tenant, each with its number of blocks. Raises Unavailable if the
    coordinator does not answer in time."""
    return expect(Namespaces, port.ask(GetNamespaces(), Deadline.after_ms(wait_ms))).known


def kept_apart(known: Known) -> Iterator[str]:
    """Yields a sentence for each namespace that cannot share with the fullest namespace of its model."""
    known = [(spec, blocks) for spec, blocks in known if blocks and not spec.weights.startswith(PRIVATE_WEIGHTS)]
    for model, of_model in groupby(sorted(known, key=lambda one: one[0].model), key=lambda one: one[0].model):
        (fullest, most), *others = sorted(of_model, key=lambda one: -one[1])
        for spec, blocks in others:
            fields = [name for name in differing_fields(fullest, spec) if name != "adapter"]
            if fields:
                what = "; ".join(_difference(name, fullest, spec) for name in fields)
                yield f"{model}: {blocks:,} blocks cannot be shared with {most:,} others; different {what}"


def _difference(name: str, one: KVSpec, other: KVSpec) -> str:
    what = "layout of layers and heads" if name == "layout" else name.removeprefix("extra.")
    return f"{what} ({field_text(name, other)}, not {field_text(name, one)})"


def field_text(name: str, spec: KVSpec) -> str:
    """Returns what a spec has in a field that differing_fields names, short enough for a sentence."""
    if name.startswith("extra."):
        return _short(dict(spec.extra).get(name.removeprefix("extra.")))
    if name == "packing":
        return _packings(spec)
    if name == "dtype":
        return _dtypes(spec)
    if name == "layout":
        return " and ".join(map(_shape, spec.groups))
    return _short(getattr(spec, name))


def _shape(group: Group) -> str:
    planes = dict.fromkeys(f"{plane.heads} heads of {plane.dim}" for plane in group.planes)
    tokens = f" of {group.reuse.tokens} tokens" if group.reuse.tokens else ""
    return f"{len(group.layers)} layers, {', '.join(planes)}, {group.reuse.kind}{tokens}"


def _dtypes(spec: KVSpec) -> str:
    return " and ".join(dict.fromkeys(plane.dtype for group in spec.groups for plane in group.planes))


def _packings(spec: KVSpec) -> str:
    packed = dict.fromkeys(plane.packing for group in spec.groups for plane in group.planes if plane.packing)
    return " and ".join(packed) or "none"


def _short(value: object) -> str:
    text = "none" if value in (None, "") else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
