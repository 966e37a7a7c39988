"""The ports of shards: an error names the setting by which they are chosen."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from kvcluster.actors.shard import _served
from kvcluster.config import load
from kvcluster.errors import ConfigError
from kvcluster.runtime.auth import Authenticator
from kvcluster.runtime.metric_samples import CallMetrics

HOST = "127.0.0.1"


def test_when_the_ports_of_shards_are_used_up_their_setting_is_named() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        plain = load()
        config = replace(plain, server=replace(plain.server, host=HOST, shard_ports=f"{port}-{port}"))
        with pytest.raises(ConfigError, match=r"Choose another port \(server.shard_ports\)") as refused:
            _served(config, {}, Authenticator(None, "s" * 32), CallMetrics(()))
        assert "--port" not in str(refused.value)
