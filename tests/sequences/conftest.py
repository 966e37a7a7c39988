"""The clusters of the client's tests."""

from __future__ import annotations

from tests.client.conftest import cluster, start

__all__ = ["cluster", "start"]
