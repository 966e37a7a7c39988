"""Versions of weights that change in memory, and which of them an engine caches under.

vLLM counts no changes itself. After a training loop has changed the weights, it sets a text of the engine core
(`EngineCore.set_weight_version`). vLLM puts that text into answers. It tells no connector, and neither a request nor a
step carries the text. So `watch` has the core call its connectors, on the core's own thread and hence between two
steps:

    - before each call to the workers (`EngineCore.collective_rpc`), since such calls change weights. Steps and calls
      reach the workers in the order in which the core makes them. So a step that was scheduled before the call has
      computed with the previous weights, also if it is still under way, and a later step may have computed with others;
    - after each `set_weight_version`: what is scheduled from now on computes with that version.

Between the two the weights are unknown, and nothing is loaded or stored. After them a version is used only at a moment
when the engine holds no KV of earlier weights: no request has a block, and its own prefix cache is emptied. Requests
that have run before that moment share nothing more: their KV is of several versions.

A version is a name that people give, and two training runs may both have a version "7". So versions are used only by
engines whose `weights` setting names the run, as "run:NAME"; engines of a run must mean the same weights by a version.
Another engine shares with no other after such a change, as after a reset (registration.py).
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from kvcluster.engines.vllm.compat import as_bytes

VERSION_BYTES = 256
"""UTF-8 bytes of a version. vLLM gives it no limit, and loops use a step's number or a commit."""

_SHOWN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DOMAIN = b"kvcluster-weight-version-v1"
_WATCHED = "_kvcluster_watched"

_HARMLESS = frozenset(
    {
        *("check_health", "compute_weight_checksums", "get_encoder_timing_stats", "get_model_inspection", "profile"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "update_max_model_len"),
    }
)
"""Calls to workers, by vLLM itself, that leave the weights as they are."""


def version_fault(version: object) -> str:
    """Returns why weights of this version cannot be cached, "" if they can."""
    if not isinstance(version, str) or not version:
        return f"a version must be a text, not {type(version).__name__}" if version != "" else "the version is empty"
    if len(version) > VERSION_BYTES or len(as_bytes(version)) > VERSION_BYTES:
        return f"a version takes at most {VERSION_BYTES} bytes of UTF-8; this one has {len(version):,} characters"
    return ""


def version_weights(run: str, base: str, version: str) -> str:
    """Returns the weights id of a version of a run, of an engine that started with the weights `base`. Equal exactly if
    all three are: a digest of them is part of it."""
    digest = hashlib.sha256(_DOMAIN)
    for text in map(as_bytes, (run, base, version)):
        digest.update(len(text).to_bytes(8, "little") + text)
    shown = version if _SHOWN.fullmatch(version) else "-"
    return f"{run}/{shown}/{digest.hexdigest()[:40]}"


# ------------------------------------------------------------------------------------------------- the engine core


class WatchesWeights(Protocol):
    """What is told of an engine's weights. Both are called on the thread of the engine's core, between two steps."""

    def before_rpc(self, method: object) -> None:
        """The workers are about to carry out `method`, a name or a function."""

    def weight_version_set(self, version: object) -> None:
        """The engine's weights have this version from now on."""


_LISTENERS: WeakKeyDictionary[Any, ref[WatchesWeights]] = WeakKeyDictionary()
"""By connector."""


def watch(connector: object, listener: WatchesWeights) -> None:
    """Has the engine core that owns this connector tell `listener`, as long as both exist. A call of the core whose
    listener raises is not carried out."""
    _LISTENERS[connector] = ref(listener)
    _watch_cores()


def _watch_cores() -> None:
    """Has every engine core of this process tell the listeners of its connectors."""
    from vllm.v1.engine.core import EngineCore  # of the scheduler's process alone: it imports the whole engine

    if hasattr(EngineCore, _WATCHED):
        return
    setattr(EngineCore, _WATCHED, True)
    call, set_version = EngineCore.collective_rpc, EngineCore.set_weight_version

    @functools.wraps(call)
    def collective_rpc(core: Any, method: Any, *given: Any, **named: Any) -> Any:
        _each(core, lambda one: one.before_rpc(method))
        return call(core, method, *given, **named)

    @functools.wraps(set_version)
    def set_weight_version(core: Any, weight_version: Any) -> None:
        set_version(core, weight_version)
        _each(core, lambda one: one.weight_version_set(weight_version))

    setattr(EngineCore, "collective_rpc", collective_rpc)  # noqa: B010
    setattr(EngineCore, "set_weight_version", set_weight_version)  # noqa: B010


def _each(core: Any, tell: Callable[[WatchesWeights], None]) -> None:
    """Tells the listeners of a core's connector, also of those within a MultiConnector; none while the core is being
    made."""
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    for one in (connector, *getattr(connector, "_connectors", ())):
        known = _LISTENERS.get(one) if one is not None else None
        listener = known() if known is not None else None
        if listener is not None:
            tell(listener)


# ------------------------------------------------------------------------------------------------------ one engine


class RunsVersions(Protocol):
    """What is decided here is carried out by the engine's Registration."""

    @property
    def run(self) -> str: ...

    def use_version(self, version: str) -> None: ...


class WeightVersions:
    """Which version one engine caches under. `stop` ends all sharing of the engine until a version is used;
    `empty_own_cache` returns whether the engine holds no KV that a request could continue from, after it has emptied
    its prefix cache."""

    def __init__(
        self,
        registration: RunsVersions,
        *,
        stop: Callable[[], object],
        empty_own_cache: Callable[[], bool],
        log: Callable[[str], object],
    ) -> None:
        self._registration = registration
        self._stop = stop
        self._empty_own_cache = empty_own_cache
        self._log = log
        self._last: str | None = None  # the last version that was set and accepted
        self._known = False  # it is the weights' version, as far as is known
        self._changed = False  # the weights may have changed since it was set
        self.waiting: str | None = None
        """The version that will be used once the engine holds no KV of earlier weights."""

    def before_rpc(self, method: object) -> None:
        """Stops sharing if that call to the workers may change weights. Outside of a run only calls that say so by
        their name are taken for one: any other change is reported by a reset."""
        named = isinstance(method, str)
        if not (named and method in _HARMLESS) and (self._registration.run or (named and "weight" in str(method))):
            self._changed = True
            self._stop()

    def stopped(self) -> None:
        """Records that sharing has ended for whatever reason: the weights have no known version."""
        self._known, self.waiting = False, None

    def set(self, version: object) -> None:
        """Uses this version as soon as the engine holds no KV of earlier weights."""
        if not self._registration.run or (self._known and version == self._last):
            return
        fault = version_fault(version)
        if not fault and self._changed and version == self._last:
            fault = f"the workers were called since, and the version is {version!r} as before"
        self._stop()
        if fault:
            self._log(f"neither loads nor stores until another version of the weights is set: {fault}")
            return
        assert isinstance(version, str)
        self._last, self._changed, self._known, self.waiting = version, False, True, version
        if not self.use_waiting():
            self._log(
                f"neither loads nor stores under version {version!r} of the weights while requests hold KV of earlier "
                "ones: pause generation with clear_cache before weights change"
            )

    def use_waiting(self) -> bool:
        """Uses the version that waits, if there is one and the engine holds no KV of earlier weights. Returns whether
        none waits any more. Call it only while no request is being given blocks of the engine's own cache."""
        if self.waiting is None:
            return True
        if not self._empty_own_cache():
            return False
        version, self.waiting = self.waiting, None
        self._registration.use_version(version)
        return True
