"""The command-line options that name a prompt: whose engines' (a spec that the cluster knows), and which tokens.

A block is known by its tokens under a spec. The specs come from the cluster: the user names the model and, if engines
with different weights run it, also the weights. Tokens are given as ids, or as text with the folder of a tokenizer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcluster.cli.measured_model import MODEL
from kvcluster.cli.weights import Known, field_text
from kvcluster.core.spec import KVSpec, differing_fields
from kvcluster.errors import CallerError
from kvcluster.extras import needs
from kvcluster.transfers.long_chains import Prompt

ID_CHARS = 12


def add_prompt_args(command: Any, *, or_pin: bool = False) -> None:
    """Adds the options. `or_pin`: a pin may be named by its id in place of the prompt."""
    options = command.add_argument_group("which prompt")
    which = options.add_mutually_exclusive_group(required=True) if or_pin else options
    which.add_argument(
        "--prompt-file",
        required=not or_pin,
        metavar="FILE",
        help="file of token ids as a JSON list, or of text with --tokenizer; - for standard input",
    )
    if or_pin:
        which.add_argument(
            "--pin",
            metavar="ID",
            help="in place of a prompt, the id of a pin or its beginning, as `kvcluster pins` lists",
        )
    options.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="folder of the model's tokenizer, to make token ids of text; needs transformers (default: none)",
    )
    options.add_argument("--salt", default="", help="cache_salt of the engines' requests (default: none)")
    _add_engine_args(command)


def _add_engine_args(command: Any) -> None:
    engines = command.add_argument_group("of which engines")
    engines.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="model as the engines registered it (default: the only one that the cluster knows)",
    )
    engines.add_argument(
        "--weights",
        default="",
        metavar="ID",
        help="id of the weights or its beginning, where engines of this model run different ones (default: the only "
        "ones)",
    )
    engines.add_argument(
        "--adapter", default="", metavar="HASH", help="content hash of the engines' LoRA (default: none)"
    )
    engines.add_argument(
        "--layout",
        default="",
        metavar="ID",
        help="id of the spec or its beginning, where engines with the same weights differ in other settings; the error "
        "names them (default: the only one)",
    )
    engines.add_argument(
        "--spec",
        metavar="FILE",
        help="in place of these, the whole spec: a JSON object of the arguments of KVSpec.uniform (default: none)",
    )


def spec_of(options: argparse.Namespace, known: Known) -> KVSpec:
    """Returns the spec that the options name, of those that the cluster knows. Raises CallerError as `read_spec` and
    `choose_spec`."""
    if options.spec:
        return read_spec(options.spec, known)
    return choose_spec(known, options.model, options.weights, options.adapter, options.layout)


def layout_id(spec: KVSpec) -> str:
    """Returns the id by which `--layout` names a spec: the same for every tenant, release and process."""
    return hashlib.sha256(spec.canonical()).hexdigest()[:ID_CHARS]


def read_prompt(options: argparse.Namespace) -> Prompt:
    """Returns the prompt. Raises CallerError if the file cannot be read or has no token ids."""
    return Prompt(_tokens(options.prompt_file, options.tokenizer), salt=options.salt.encode())


def read_spec(file: str, known: Known) -> KVSpec:
    """Returns the spec that a file describes. Raises CallerError if the file cannot be read, or if no engine has
    registered this spec: a question under it would register it. The error says how the most similar one differs."""
    try:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
        spec = KVSpec.uniform(**values)
    except (OSError, UnicodeDecodeError) as error:
        raise CallerError(f"cannot read {file}: {error}") from None
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        wanted = (
            "model, weights, num_layers, num_kv_heads, head_dim, dtype and perhaps block_tokens, adapter, rope, extra"
        )
        raise CallerError(f"{file} must be a JSON object of {wanted}: {error}") from None
    others = [other for other, _ in known]
    if spec in others:
        return spec
    if not others:
        raise CallerError("no client has connected to this cluster, with this spec or another one")
    nearest = min(others, key=lambda other: len(differing_fields(spec, other)))
    raise CallerError(
        f"no client has connected with the spec of {file}, so nothing is cached under it. The most similar one, of "
        f"{nearest.model} with weights {nearest.weights}, differs in {', '.join(differing_fields(spec, nearest))}"
    )


def choose_spec(known: Known, model: str, weights: str, adapter: str, layout: str = "") -> KVSpec:
    """Returns the spec of this model, of weights whose id begins with `weights`, of this adapter, and whose own id
    begins with `layout`; of any model if `model` is "". Raises CallerError if there is none, or more than one."""
    engines = [spec for spec, _ in known if spec.model != MODEL or model == MODEL]
    of_model = [spec for spec in engines if model in ("", spec.model) and spec.adapter == adapter]
    models = list(dict.fromkeys(spec.model for spec in of_model))
    if not model and len(models) > 1:
        raise CallerError(f"clients of several models have connected; give one of them as --model: {', '.join(models)}")
    model = model or "".join(models)
    alike = [spec for spec in of_model if spec.weights.startswith(weights)]
    found = [spec for spec in alike if layout_id(spec).startswith(layout)]
    if len(found) == 1:
        return found[0]
    if not of_model:
        models = list(dict.fromkeys(spec.model for spec in engines)) or ["none yet"]
        named = f"model {model!r}" if model else "a model"
        raise CallerError(
            f"no client has connected with {named} and adapter {adapter!r}; known models: {', '.join(models)}"
        )
    names = ", ".join(dict.fromkeys(spec.weights for spec in (alike or of_model)))
    if len({spec.weights for spec in alike}) == 1:
        blocks = dict(known)
        each = "; ".join(_described(spec, alike, blocks[spec]) for spec in alike)
        raise CallerError(
            f"engines of {model!r} with these weights differ in other settings: give one of them as --layout: {each}"
        )
    raise CallerError(f"engines of {model!r} run different weights; give one of them as --weights: {names}")


def _described(spec: KVSpec, alike: Sequence[KVSpec], blocks: int) -> str:
    """Returns the id of a spec, and what it has in the fields in which these specs differ."""
    fields = dict.fromkeys(name for other in alike for name in differing_fields(spec, other))
    values = ", ".join(f"{name} {field_text(name, spec)}" for name in fields)
    return f"{layout_id(spec)} ({values}; {blocks:,} blocks)"


def _tokens(file: str, tokenizer: str | None) -> list[int]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CallerError(f"cannot read {file}: {error}") from None
    if tokenizer is None:
        try:
            ids = json.loads(text)
        except (ValueError, RecursionError):
            ids = None
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise CallerError(f"{file} is no JSON list of token ids; for text give --tokenizer, the model's folder")
        return ids
    with needs("transformers", instead="or give token ids as a JSON list"):
        from transformers import AutoTokenizer
    try:
        made = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        first, *_ = str(error).splitlines() or [""]
        raise CallerError(f"no tokenizer can be read from {tokenizer}: {first}") from None
    return list(made(text)["input_ids"])
