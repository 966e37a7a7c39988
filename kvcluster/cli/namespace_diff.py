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

from kvcluster.client.coordinator_client import GrpcPort, expect
from kvcluster.core.messages import GetNamespaces, Namespaces
from kvcluster.core.spec import PRIVATE_WEIGHTS, KVSpec, differing_fields
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
