"""What a restarted actor waits for."""

from __future__ import annotations

import pytest

from kvcluster.actors.actor_process import waited_for
from kvcluster.errors import ConfigError
from kvcluster.runtime.metric_samples import CallMetrics


class Port:
    """Taken for the first few tries."""

    def __init__(self, taken: int) -> None:
        self._taken = taken
        self.pauses: list[float] = []

    def bind(self) -> int:
        if self._taken:
            self._taken -= 1
            raise ConfigError("the port is in use")
        return 7070


def test_a_restarted_actor_tries_again_until_it_can_serve(caplog: pytest.LogCaptureFixture) -> None:
    port, calls = Port(taken=10), CallMetrics(())
    assert waited_for(port.bind, patient=True, pause=port.pauses.append, failed=calls.start_failed) == 7070
    assert {sample.name: sample for sample in calls.samples()}["kvcluster_start_retries_total"].value == 10
    assert port.pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]
    assert "cannot serve yet: the port is in use" in caplog.text


def test_the_first_start_of_an_actor_fails_at_once() -> None:
    port = Port(taken=1)
    with pytest.raises(ConfigError, match="in use"):
        waited_for(port.bind, patient=False, pause=port.pauses.append)
    assert port.pauses == []
