"""The conformance suite that every transport must pass, as tests to inherit.

    class TestMine(TransportConformance):
        @pytest.fixture
        def world(self) -> Iterator[World]:
            with open_world(serve_mine) as world:
                yield world

`serve_mine(host)` starts the serving side of the transport for a shard and returns a ServedShard (world.py). The
claims: loads return the bytes that were stored, each page has an outcome of its own, and no reader gets a wrong byte
(moving.py); encoded pages travel encoded (encoded.py); other tenants get nothing, and what is flushed is visible
(asking.py); a reader or writer that stops, for any reason, leaves no lease and no half-written page, and a shard that
has ended is reported as lost (stopping.py). A transport that is served at an address inherits WireClaims too, or
NetworkClaims if its server copies the bytes into the arena: they say what each end does when the other sends malformed
data (wire.py). To see values when a claim fails, let pytest rewrite its asserts, in a conftest.py:
`pytest.register_assert_rewrite("kvcluster.testing.conformance")`.
"""

from kvcluster.testing.conformance.asking import AskingClaims
from kvcluster.testing.conformance.encoded import EncodedClaims
from kvcluster.testing.conformance.moving import MovingClaims
from kvcluster.testing.conformance.stopping import StoppingClaims
from kvcluster.testing.conformance.wire import NetworkClaims, Wire, WireClaims
from kvcluster.testing.conformance.world import ServedShard, World, open_world


class TransportConformance(MovingClaims, EncodedClaims, AskingClaims, StoppingClaims):
    """Inherit it, and provide the fixture `world`, which is opened afresh for each test."""


__all__ = ["NetworkClaims", "ServedShard", "TransportConformance", "Wire", "WireClaims", "World", "open_world"]
