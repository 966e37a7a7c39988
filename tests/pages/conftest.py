"""Tests of codecs run once with each implementation."""

from __future__ import annotations

from tests.pages.implementations import implementation

__all__ = ["implementation"]
