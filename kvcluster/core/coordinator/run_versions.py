"""Which versions of a training run's weights are superseded: no engine uses them any more, and another is in use.

A training run changes the weights of its engines in memory, and each version has a namespace of its own (core/spec.py,
`run_of`). Its KV is of no use once the last engine has left the version. So its blocks are evicted before all others
(block_facts.py), unless an engine returns to it: nothing is forgotten here, and a superseded version is only one whose
blocks go first.

This knows what engines report when they register (engine_registry.py), not what they do. A version is superseded while
at least one engine of its tenant, model and run uses another one; if all engines of a run are silent, none is.
"""

from __future__ import annotations

from kvcluster.core.ids import Tenant
from kvcluster.core.spec import KVSpec, run_of

_Run = tuple[Tenant, str, str]


class RunVersions:
    """The number of live engines of each version, by tenant, model and run."""

    def __init__(self) -> None:
        self._engines: dict[_Run, dict[str, int]] = {}
        self._changed = False

    def __len__(self) -> int:
        """Returns the number of versions that engines use."""
        return sum(map(len, self._engines.values()))

    def add(self, tenant: Tenant, model: str, weights: str) -> None:
        """Records one more engine with these weights. Does nothing if they are no version of a run."""
        run = run_of(weights)
        if run:
            versions = self._engines.setdefault((tenant, model, run), {})
            self._changed = self._changed or weights not in versions
            versions[weights] = versions.get(weights, 0) + 1

    def remove(self, tenant: Tenant, model: str, weights: str) -> None:
        """Records one engine less with these weights, which `add` was given."""
        run = run_of(weights)
        if not run:
            return
        versions = self._engines[tenant, model, run]
        versions[weights] -= 1
        if not versions[weights]:
            del versions[weights]
            self._changed = True
        if not versions:
            del self._engines[tenant, model, run]

    def take_changed(self) -> bool:
        """Returns whether other versions are in use than when this was last called."""
        changed, self._changed = self._changed, False
        return changed

    def superseded(self, tenant: Tenant, spec: KVSpec) -> bool:
        """Returns whether blocks of this spec are to be evicted before others."""
        run = run_of(spec.weights)
        versions = self._engines.get((tenant, spec.model, run)) if run else None
        return versions is not None and spec.weights not in versions
