"""A subscriber to KV events: ours, and those of any engine that uses vLLM's event format and sockets.

Importing this needs no ZMQ; making a subscriber does (event_reader.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

from kvcluster.client.event import Event
from kvcluster.config import ClientConfig, client_config
from kvcluster.extras import needs
from kvcluster.transport.credentials import tls_credentials

__all__ = ["REPLAY_SILENCE_S", "Event", "EventSubscriber"]

REPLAY_SILENCE_S = 2.0
"""A replay ends after this long without a message: the publisher has no more to replay, or cannot be reached."""

_LINGERING_S = 1.0
"""The longest wait of one iteration step, so that an interrupt is delayed at most this long."""


class EventSubscriber:
    """Subscribes to the topics that begin with `topic` at `endpoint`, such as "tcp://127.0.0.1:5557"; "" means all
    topics. With `replay`, the publisher's other endpoint, it first replays the batches that are kept there, and later
    requests the batches that it missed.

        with kvcluster.EventSubscriber("tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558") as subscriber:
            event = subscriber.next(timeout_s=0.5)           # None on a timeout; `for event in subscriber` has no end

    Each topic's events are delivered in order and once. A picture of the cache made from them is as right as the
    publisher's, if it drops a topic's blocks at every AllBlocksCleared, including those with a `why`. The subscriber
    waits for a publisher that is down, and reconnects when it is up again. `config`: settings of a client, of which
    those about TLS are used (ClientConfig.ca_file, cert_file, key_file, server_name): a cluster that speaks TLS lets in
    who shows a certificate of an operator or a reader of events. For one thread; `with` closes it. Raises ConfigError
    for an invalid endpoint, KVClusterError if the extra `events` is not installed.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str = "",
        topic: str = "kv@",
        *,
        replay_silence_s: float = REPLAY_SILENCE_S,
        config: ClientConfig | None = None,
    ) -> None:
        with needs("zmq", "msgspec"):
            from kvcluster.client.event_reader import EventReader

        self._endpoint = endpoint
        tls = tls_credentials(client_config(config))
        with ExitStack() as house:

            def local(publisher: str) -> str:
                """Returns where a socket of ZeroMQ reaches this publisher."""
                if tls.certificates is None or not publisher:
                    return publisher
                from kvcluster.client.event_tunnel import EventTunnel

                return house.enter_context(closing(EventTunnel(publisher, tls.certificates, tls.server_name))).endpoint

            ends = local(endpoint), local(replay)
            self._reader = EventReader(*ends, topic, replay_silence_s=replay_silence_s)
            house.callback(self._reader.close)
            self._house = house.pop_all()

    def __enter__(self) -> EventSubscriber:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<EventSubscriber of {self._endpoint}>"

    def close(self) -> None:
        """Closes the sockets. May be called again."""
        self._house.close()

    def counters(self) -> dict[str, int]:
        """Returns the numbers of unreadable messages (`malformed`), of AllBlocksCleared that stood for missed batches
        (`resets`), and of replays requested (`replays`)."""
        return self._reader.counters()

    def next(self, timeout_s: float) -> Event | None:
        """Returns the next event; None if none arrives within `timeout_s` seconds."""
        return self._reader.next(timeout_s)

    def __iter__(self) -> Iterator[Event]:
        """Yields every event, without end."""
        while True:
            event = self.next(_LINGERING_S)
            if event is not None:
                yield event
