"""What every transport has to hold, as tests to inherit.

    class TestMine(TransportConformance):
        @pytest.fixture
        def world(self) -> Iterator[World]:
            with open_world(serve_mine) as world:
                yield world

`serve_mine(host)` puts the transport before a shard and returns a Served (world.py). The claims: what is stored is what
is loaded, each page has an outcome of its own, and nobody gets a wrong byte (moving.py); what lies encoded travels so
(encoded.py); strangers get nothing, and what is flushed is visible (asking.py); whoever stops, for whatever reason,
leaves nothing behind, and a shard that is gone is told as such (stopping.py). To see values where a claim fails, let
pytest rewrite its asserts, in a conftest.py: `pytest.register_assert_rewrite("kvcluster.testing.conformance")`.
"""

from kvcluster.testing.conformance.asking import AskingClaims
from kvcluster.testing.conformance.encoded import EncodedClaims
from kvcluster.testing.conformance.moving import MovingClaims
from kvcluster.testing.conformance.stopping import StoppingClaims
from kvcluster.testing.conformance.world import Served, World, open_world


class TransportConformance(MovingClaims, EncodedClaims, AskingClaims, StoppingClaims):
    """Inherit it, and provide the fixture `world`, which is opened anew for each test."""


__all__ = ["Served", "TransportConformance", "World", "open_world"]
