"""Engines of one model that can never share, and what keeps them apart: what `status` and `doctor` say of namespaces.

Whoever attaches names everything that must match. Two namespaces of one model are two sets of engines, or one set whose
weights or settings have changed; each computes what the other has. That is right, and often not what was meant: so it
is said, with the field that differs. Adapters are meant to be apart and are passed over, and so is what an engine has
cached for itself alone (weights.py tells of those that do).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from kvcluster.client.coordinator_client import GrpcPort, expect
from kvcluster.core.messages import GetNamespaces, Namespaces
from kvcluster.core.spec import PRIVATE_WEIGHTS, KVSpec, differing_fields
from kvcluster.transport.base import Deadline

Known = Sequence[tuple[KVSpec, int]]
_SHOWN = 40


def read_namespaces(port: GrpcPort, wait_ms: int) -> Known:
    """The namespaces of this credential's tenant. Raises Trouble where nobody answers in time."""
    return expect(Namespaces, port.ask(GetNamespaces(), Deadline.after_ms(wait_ms))).known


def kept_apart(known: Known) -> Iterator[str]:
    """A sentence for each namespace that cannot share with the fullest of its model."""
    known = [(spec, blocks) for spec, blocks in known if not spec.weights.startswith(PRIVATE_WEIGHTS)]
    for model, of_model in groupby(sorted(known, key=lambda one: one[0].model), key=lambda one: one[0].model):
        (fullest, most), *others = sorted(of_model, key=lambda one: -one[1])
        for spec, blocks in others:
            fields = [name for name in differing_fields(fullest, spec) if name != "adapter"]
            if fields:
                what = "; ".join(_difference(name, fullest, spec) for name in fields)
                yield f"{model}: {blocks:,} blocks are apart from {most:,} others, by {what}"


def _difference(name: str, one: KVSpec, other: KVSpec) -> str:
    if name.startswith("extra."):
        key = name.removeprefix("extra.")
        return f"{key} ({_short(dict(other.extra).get(key))}, not {_short(dict(one.extra).get(key))})"
    if name == "packing":
        return f"packing ({_packings(other)}, not {_packings(one)})"
    if name == "dtype":
        return f"dtype ({_dtypes(other)}, not {_dtypes(one)})"
    if name == "layout":
        return "layout of layers and heads"
    return f"{name} ({_short(getattr(other, name))}, not {_short(getattr(one, name))})"


def _dtypes(spec: KVSpec) -> str:
    return " and ".join(dict.fromkeys(plane.dtype for group in spec.groups for plane in group.planes))


def _packings(spec: KVSpec) -> str:
    packed = dict.fromkeys(plane.packing for group in spec.groups for plane in group.planes if plane.packing)
    return " and ".join(packed) or "none"


def _short(value: object) -> str:
    text = "none" if value in (None, "") else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
