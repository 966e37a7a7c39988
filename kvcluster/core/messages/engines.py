"""Engines that use the cache: who they are, as they tell of themselves, and what an operator has them do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One running engine. `engine` is a random id of this incarnation, `name` is for people: its host and process.

    `facts` are (name, value) pairs of what its KV depends on or might: versions, hash algorithm, dtype, layout.
    `weights` is what it caches under now. It has `withdrawn` so many times: its weights changed in memory, so that
    nobody shares with it, as long as it is `private`. It is `ready` to share again where nothing is left in it that the
    weights of before have computed.
    """

    engine: str
    name: str
    model: str
    weights: str
    facts: tuple[tuple[str, str], ...] = ()
    private: bool = False
    withdrawn: int = 0
    ready: bool = True


@dataclass(frozen=True, slots=True)
class RegisterEngine:
    """An engine lives, and says so again before `Registered.ttl_ns` has passed."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Registered:
    """`weights`: what this engine is to cache under from now on, "" where nobody has said. It holds for the
    withdrawal that the question named, and for no later one."""

    ttl_ns: int
    weights: str = ""


@dataclass(frozen=True, slots=True)
class GetEngines:
    """Which engines of this tenant live? Answered by Engines."""


@dataclass(frozen=True, slots=True)
class SetWeights:
    """Engines of that model which are private at this moment and ready are to cache under `weights`; `engine` means one
    of them alone, by id or name. Answered by Engines: those that will be told."""

    model: str
    weights: str
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines, by model and name, each with how long ago it was heard of."""

    known: tuple[tuple[EngineInfo, int], ...]
