"""Engines that use the cache: what they report about themselves, and the weights that an operator sets for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One running engine. `engine` is a random id of this incarnation, `name` is for people: its host and process.

    `facts` are (name, value) pairs that its KV depends on or might: versions, hash algorithm, dtype, layout. `weights`
    is what it caches under now. `withdrawn` is the number of times that its weights have changed in memory; while it is
    `private` after such a change, it shares with no other engine. It is `ready` to share again once it holds nothing
    that the previous weights have computed. `protocol` is the newest version of the protocol that it speaks, 0 from an
    engine of a version before 3.
    """

    engine: str
    name: str
    model: str
    weights: str
    facts: tuple[tuple[str, str], ...] = ()
    private: bool = False
    withdrawn: int = 0
    ready: bool = True
    protocol: int = 0


@dataclass(frozen=True, slots=True)
class RegisterEngine:
    """Registers a running engine, which does so again before `Registered.ttl_ns` has passed."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Registered:
    """`weights`: what this engine is to cache under from now on, "" if no operator has set it. It holds for the
    withdrawal that the question named, and for no later one."""

    ttl_ns: int
    weights: str = ""


@dataclass(frozen=True, slots=True)
class GetEngines:
    """Asks for the running engines of this tenant. Answered by Engines."""


@dataclass(frozen=True, slots=True)
class SetWeights:
    """Orders the engines of that model that are private now and ready to cache under `weights`; if `engine` is given,
    only the one with that id or name. Answered by Engines: those that will receive the order."""

    model: str
    weights: str
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines, by model and name, each with the nanoseconds since it last registered."""

    known: tuple[tuple[EngineInfo, int], ...]
