"""Tests of codecs run once with each implementation."""

from __future__ import annotations

from tests.memory.implementations import implementation

__all__ = ["implementation"]
