"""What a message means if its sender has left out a field."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from kvcluster.core.codecs import Codec
from kvcluster.core.messages import Tier, common, coordinator, effects, exchange, orders, reports, shard
from kvcluster.core.miss import Loss
from kvcluster.core.quotas import NO_QUOTA
from kvcluster.release import PROTOCOL_VERSION

MODULES = (common, coordinator, effects, effects, coordinator, reports, exchange, orders, orders, reports, shard)
NOTHING = [
    (type(value), value)
    for value in (
        None,
        False,
        0,
        "",
        b"",
        (),
        frozenset(),
        Loss.EXACT,
        Codec.RAW,
        Tier.RAM,
        orders.NO_ORDERS,
        orders.ProcessFacts(),
        NO_QUOTA,
    )
]
OTHERWISE = {
    ("Done", "ok"): True,
    ("Caller", "version"): PROTOCOL_VERSION,  # imported by the messages
    ("PrepareLoad", "hold"): True,
    ("EngineInfo", "ready"): True,
    ("PinBlocks", "replicas"): 1,
    ("Offer", "protocol_version"): PROTOCOL_VERSION,  # not sent: the version of the answer that it came in
    ("Offers", "protocol_version"): PROTOCOL_VERSION,
}


def defaults() -> Iterator[tuple[str, str, Any]]:
    """Each field that may be left out: its message, its name, and what it is then."""
    kinds = {kind for module in MODULES for _, kind in inspect.getmembers(module, inspect.isclass)}
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        if is_dataclass(kind):
            yield from ((kind.__name__, f.name, f.default) for f in fields(kind) if f.default is not MISSING)
        else:
            yield from ((kind.__name__, name, value) for name, value in getattr(kind, "_field_defaults", {}).items())


def test_a_field_that_is_left_out_says_nothing() -> None:
    found = {(message, name): value for message, name, value in defaults()}
    assert len(found) > 50
    says_something = {field: value for field, value in found.items() if (type(value), value) not in NOTHING}
    assert says_something == OTHERWISE
