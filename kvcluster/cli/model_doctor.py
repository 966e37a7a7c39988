"""`kvcluster doctor --model PATH`: says from a checkpoint's config.json whether vLLM with kvcluster serves it.

Needs no vLLM, no weights and no cluster (core/model_outcome.py). With `--engine vllm` the installed vLLM is asked
instead (engine_doctor.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcluster.cli.text_page import TableColumn, TextPage, Tone, counted, print_figures
from kvcluster.config import size_text
from kvcluster.core.architectures import RELEASE
from kvcluster.core.groups import Group
from kvcluster.core.model_kinds import TRAITS
from kvcluster.core.model_outcome import PROVED, REFUSED, ModelOutcome, model_outcome
from kvcluster.errors import ConfigError

BLOCK_TOKENS = 16
"""Tokens of a block by vLLM's default on a GPU; an engine may choose others."""

_LARGEST_BYTES = 16 * 2**20
"""A config.json has some kilobytes. More is not read, since JSON takes many times its size in memory."""


def run(path: str, *, as_json: bool) -> int:
    """Prints the findings. Returns the exit status: 0 if the checkpoint is served. Raises ConfigError for a folder
    without a config.json that can be read."""
    found = findings(path, model_outcome(read_config(path)))
    print_figures(found, add_findings, as_json=as_json)
    return 0 if found["served"] else 1


def read_config(path: str) -> dict[str, Any]:
    """Returns the content of the config.json in a checkpoint's folder. Raises ConfigError, with what to do, if there is
    none or if it is not a JSON object."""
    folder = Path(path)
    file = folder / "config.json"
    try:
        if not folder.is_dir():
            raise ConfigError(
                f"--model {path}: there is no such folder; give that of a checkpoint, with its config.json, or let the "
                "engine resolve the name: --engine vllm"
            )
        with file.open("rb") as stream:
            content = stream.read(_LARGEST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        why = "there is none" if isinstance(error, FileNotFoundError) else str(error)
        raise ConfigError(f"{file} cannot be read: {why}; give the folder of a checkpoint") from None
    if len(content) > _LARGEST_BYTES:
        raise ConfigError(f"{file} has more than {size_text(_LARGEST_BYTES)}, which is no config.json of a checkpoint")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:  # also of bytes that are no text
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a JSON object, not a {type(config).__name__}")
    return config


def findings(path: str, found: ModelOutcome) -> dict[str, Any]:
    """Returns the findings as plain values for JSON. Bytes are those of all layers and heads, None if not known."""
    nbytes = found.token_bytes
    return {
        "path": path,
        "architecture": found.architecture,
        "vllm": RELEASE,
        "outcome": found.outcome,
        "served": found.is_served,
        "why": found.why,
        "kinds": [{"kind": kind, "about": TRAITS[kind].about, "check": TRAITS[kind].proved_by} for kind in found.kinds],
        "groups": [_group_text(group) for group in found.groups],
        "token_bytes": nbytes,
        "block_tokens": BLOCK_TOKENS,
        "block_bytes": None if nbytes is None else nbytes * BLOCK_TOKENS,
        "assumed": list(found.assumed),
    }


def _group_text(group: Group) -> str:
    planes = " and ".join(
        f"{plane.name.upper() if len(plane.name) == 1 else plane.name} of "
        f"{f'{plane.heads} x ' if plane.name != 'latent' else ''}{plane.dim} {plane.dtype}"
        for plane in group.planes
    )
    within = f" within {group.reuse.span}" if group.reuse.span else ""
    return f"{counted(len(group.layers), 'layer')}: {planes}{within}"


def add_findings(page: TextPage, found: dict[str, Any]) -> None:
    """Adds the architecture, the kinds of KV and their sizes, and the verdict."""
    page.table([TableColumn("checkpoint"), TableColumn(found["path"])], list(_rows(found)))
    page.say("")
    if found["outcome"] == REFUSED:
        page.say(found["why"], label="refused: ", tone=Tone.BAD)
        page.say("An engine with this model and the connector does not start.")
        return
    if found["served"]:
        page.say(_PROVED if found["outcome"] == PROVED else _CONTRACT, label="served: ", tone=Tone.GOOD)
    else:
        page.say(found["why"], label="not known: ", tone=Tone.BAD)
    page.say(f"kvcluster doctor --engine vllm --model {found['path']}", label="the installed vLLM knows more: ")


_PROVED = "real engines prove each of these kinds of KV, on CPUs"
_CONTRACT = "the connector accepts it, by contract: no real engine with all these kinds of KV has been compared"


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", f"{found['architecture']}, as of vLLM {found['vllm']}"
    for number, kind in enumerate(found["kinds"]):
        proved = f"; a real engine proves it: {kind['check']}" if kind["check"] else ""
        yield "" if number else "KV", f"{kind['kind']}: {kind['about']}{proved}"
    for number, text in enumerate(found["groups"]):
        yield "" if number else "layers", text
    if found["token_bytes"] is not None:
        yield "bytes", f"{found['token_bytes'] / 1024:,.1f} KiB a token, in all layers and heads"
        size = size_text(found["block_bytes"])
        yield "blocks", f"{size} for {found['block_tokens']} tokens, vLLM's default on a GPU"
    for assumed in found["assumed"]:
        yield "assumed", assumed
