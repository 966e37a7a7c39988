"""Whether a checkpoint can be served by vLLM with kvcluster, from its config.json alone.

Two things are asked. What does vLLM's model of that architecture keep? This was found over vLLM's own objects and
stands in architectures.py. And does config.json, as model_config.py reads it, describe KV of these kinds? Only if both
agree, a checkpoint is called served; whatever is not known is called unknown, never served. vLLM, asked by `kvcluster
doctor --engine vllm`, has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcluster.core import architectures as examined
from kvcluster.core.groups import Group
from kvcluster.core.model_config import read_kv
from kvcluster.core.model_kinds import CHUNKED, FULL, LATENTS, SEVERAL_WINDOWS, TRAITS, UNLIKE, WINDOWS
from kvcluster.errors import ConfigError, SpecError

PROVED = "served and proved"
CONTRACT = "served, by contract"
REFUSED = "refused"
UNKNOWN = "unknown"

_READ = (FULL, WINDOWS, SEVERAL_WINDOWS, CHUNKED, LATENTS, UNLIKE)
"""The kinds that config.json can tell; an architecture has the others whatever the file says."""

_BY_REUSE = {"prefix": FULL, "window": WINDOWS, "chunk": CHUNKED}

_NO_DTYPE = "config.json gives no dtype: bfloat16 is assumed"


@dataclass(frozen=True, slots=True)
class ExaminedArchitectures:
    """What is known of vLLM's architectures. `served` are tuples of kinds and the architectures that have just these,
    `refused` the same with the reason between them. `unread` are served, and their config.json does not describe their
    KV to model_config.py; `not_examined` could not be built."""

    served: tuple[tuple[tuple[str, ...], str], ...]
    refused: tuple[tuple[tuple[str, ...], str, str], ...]
    unread: str
    not_examined: str


EXAMINED = ExaminedArchitectures(examined.SERVED, examined.REFUSED, examined.UNREAD, examined.NOT_EXAMINED)


@dataclass(frozen=True, slots=True)
class ModelOutcome:
    """What was found of a checkpoint: `outcome` is PROVED, CONTRACT, REFUSED or UNKNOWN, `why` the reason of the latter
    two, `kinds` those of its KV. `groups` are () unless it is served. `assumed` are in words the defaults that were
    assumed for settings missing in its file."""

    architecture: str
    outcome: str
    why: str = ""
    kinds: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def is_served(self) -> bool:
        """Whether it is served, proved or by contract."""
        return self.outcome in (PROVED, CONTRACT)

    @property
    def token_bytes(self) -> int | None:
        """Bytes of KV that one token adds within all windows; None if they are not known."""
        if not self.groups:
            return None
        return sum(len(group.layers) * group.layer_bytes(block_tokens=1, heads=group.heads) for group in self.groups)


def served_outcome(kinds: Iterable[str]) -> str:
    """Returns the outcome of KV of these kinds that is not refused: PROVED if real engines prove each of them."""
    return PROVED if all(TRAITS[kind].proved_by for kind in kinds) else CONTRACT


def model_outcome(config: Mapping[str, Any], known: ExaminedArchitectures = EXAMINED) -> ModelOutcome:
    """Returns what is known of a checkpoint with this config.json. Raises ConfigError if it names no architecture."""
    names = config.get("architectures")
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError("config.json names no architectures: a list of texts, such as ['LlamaForCausalLM']")
    for name in names:  # vLLM takes the first that it has
        for kinds, why, those in known.refused:
            if name in those.split():
                return ModelOutcome(name, REFUSED, why, kinds)
        for kinds, those in known.served:
            if name in those.split():
                return _outcome_by_settings(name, kinds, config, known)
        if name in known.not_examined.split():
            return ModelOutcome(name, UNKNOWN, "vLLM's model of this architecture could not be examined")
    return ModelOutcome(names[0], UNKNOWN, "none of its architectures is among those of vLLM that were examined")


def _outcome_by_settings(
    name: str, kinds: tuple[str, ...], config: Mapping[str, Any], known: ExaminedArchitectures
) -> ModelOutcome:
    """Returns the outcome for an architecture that is served with kinds that its examination found."""
    if name in known.unread.split():
        return ModelOutcome(name, UNKNOWN, "config.json does not describe the KV of this architecture", kinds)
    try:
        has_dtype = any(isinstance(each.get(key), str) for each in _texts(config) for key in ("dtype", "torch_dtype"))
        kv = read_kv(config, None if has_dtype else "bfloat16")
        read = kinds_of(kv.groups)
    except (ConfigError, SpecError) as error:
        return ModelOutcome(name, UNKNOWN, f"of its config.json: {error}", kinds)
    if (LATENTS in read) != (LATENTS in kinds):
        why = f"config.json reads as {', '.join(read)}, and vLLM's model keeps {', '.join(kinds)}"
        return ModelOutcome(name, UNKNOWN, why, kinds)
    rest = [kind for kind in kinds if kind not in _READ]
    all_kinds = tuple(kind for kind in TRAITS if kind in (*read, *rest))
    assumed = kv.assumed if has_dtype else (*kv.assumed, _NO_DTYPE)
    return ModelOutcome(name, served_outcome(all_kinds), "", all_kinds, kv.groups, assumed)


def _texts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    nested = config.get("text_config")
    return [nested, config] if isinstance(nested, Mapping) else [config]


def kinds_of(groups: Iterable[Group]) -> tuple[str, ...]:
    """Returns the kinds of KV of these groups. Raises ConfigError for a group of another kind than config.json can
    tell."""
    found: list[str] = []
    windows: list[int] = []
    for group in groups:
        if group.reuse.kind == "window":
            windows.append(group.reuse.tokens)
        elif group.reuse.kind not in _BY_REUSE:
            raise ConfigError(f"a group of layers is reused by the rule {group.reuse.kind!r}")
        names = [plane.name for plane in group.planes]
        if names == ["latent"]:
            found.append(LATENTS)
        elif names == ["k", "v"]:
            found.append(_BY_REUSE[group.reuse.kind])
            found += [UNLIKE] if group.planes[0].dim != group.planes[1].dim else []
        else:
            raise ConfigError(f"a group of layers keeps {', '.join(names)}")
    found += [SEVERAL_WINDOWS] if len(windows) > 1 else []
    return tuple(kind for kind in TRAITS if kind in found)
