"""Finds namespaces of one model that cannot share KV, and the fields that differ, for `status` and `doctor`.

A client's spec names everything that must match. Two namespaces of one model mean two sets of engines, or one set whose
weights or settings have changed; each computes what the other has cached. That is correct but often unintended, so it
is reported with the field that differs. Different adapters are intended and not reported, nor are the private
namespaces of engines that share with no other (weights.py reports those), nor namespaces without blocks: a purge leaves
them behind, and nothing is computed twice for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from kvcluster.core.groups import Group
from kvcluster.core.messages import GetNamespaces, Namespaces
from kvcluster.core.spec import PRIVATE_WEIGHTS, KVSpec, differing_fields
from kvcluster.transfers.coordinator_client import GrpcPort, expect
from kvcluster.transport.base import Deadline

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
