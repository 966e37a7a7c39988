"""The model under which `kvcluster breakeven` and `bench paths` store their blocks, which no command takes for one
of an engine's."""

from __future__ import annotations

MODEL = "kvcluster-breakeven"
"""Always the same, so that purging leaves one tombstone and not one per run."""
