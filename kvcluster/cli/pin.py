"""`kvcluster pin | unpin`: protects a common prefix, such as a system prompt, from eviction.

A pin covers blocks, and a block is identified by its tokens under a spec. The specs come from the cluster: the user
names the model and, if engines with different weights run it, also the weights. Tokens are given as ids, or as text
with the folder of a tokenizer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvcluster.cli.coordinator_args import ANSWER_MS, add_coordinator_args, address_of, coordinator
from kvcluster.cli.namespace_diff import Known, read_namespaces
from kvcluster.client.connect import connect
from kvcluster.client.prompt import Prompt
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.extras import needs

_TTL_S = 86_400.0


def add(commands: Any) -> None:
    """Adds both commands."""
    for name, does in (("pin", "protect a prompt from eviction"), ("unpin", "let a pinned prompt be evicted again")):
        command = commands.add_parser(name, help=does, allow_abbrev=False)
        command.add_argument("--model", required=True, help="name of the model, as the engines registered it")
        command.add_argument(
            "--weights", default="", help="beginning of the weights id, if engines run different weights (default '')"
        )
        command.add_argument("--adapter", default="", help="content hash of a LoRA (default '', for none)")
        command.add_argument("--salt", default="", help="cache_salt of the engines' requests (default '')")
        command.add_argument(
            "--prompt-file",
            required=True,
            metavar="FILE",
            help="file of token ids as a JSON list, or of text with --tokenizer",
        )
        command.add_argument(
            "--tokenizer", metavar="FOLDER", help="the model's tokenizer, to tokenise text (default none)"
        )
        if name == "pin":
            command.add_argument(
                "--ttl", type=float, default=_TTL_S, metavar="S", help="seconds until the pin ends (default 86400)"
            )
            command.add_argument("--replicas", type=int, default=1, metavar="N", help="number of shards (default 1)")
        add_coordinator_args(command)
        command.set_defaults(run=_run, verb=name)


def _run(options: argparse.Namespace) -> int:
    prompt = Prompt(_tokens(Path(options.prompt_file), options.tokenizer), salt=options.salt.encode())
    tokens = len(prompt.token_ids)
    with coordinator(options, wait_ms=ANSWER_MS) as port:
        spec = chosen(read_namespaces(port, ANSWER_MS), options.model, options.weights, options.adapter)
    with connect(address_of(options), spec, token=options.token) as client:
        if options.verb == "unpin":
            client.unpin(prompt)
            print("the prompt may be evicted again")
            return 0
        pinned = client.pin(prompt, options.ttl, replicas=options.replicas)
    whole = tokens // spec.block_tokens
    if not pinned.blocks:
        raise CallerError(
            f"none of these {tokens:,} tokens is cached ({pinned.miss or 'never seen, or no room for pins'}): "
            "let an engine compute them first"
        )
    print(f"{pinned.tokens:,} of {tokens:,} tokens are pinned for {options.ttl:,.0f} s")
    if pinned.blocks < whole:
        print(f"the other {whole - pinned.blocks:,} block(s) are not cached, or the limit of pinned bytes is reached")
    return 0


def chosen(known: Known, model: str, weights: str, adapter: str) -> KVSpec:
    """Returns the spec that matches. Raises CallerError if there is none, or more than one."""
    of_model = [spec for spec, _ in known if spec.model == model and spec.adapter == adapter]
    found = [spec for spec in of_model if spec.weights.startswith(weights)]
    if len(found) == 1:
        return found[0]
    if not of_model:
        models = ", ".join(dict.fromkeys(spec.model for spec, _ in known)) or "none yet"
        raise CallerError(f"no engine has registered model {model!r} with adapter {adapter!r}; known models: {models}")
    names = ", ".join(dict.fromkeys(spec.weights for spec in (found or of_model)))
    if len({spec.weights for spec in found}) == 1:
        raise CallerError(
            f"engines of {model!r} with these weights differ in other settings, so none of them can be chosen: "
            "`kvcluster status` shows in which"
        )
    raise CallerError(f"engines of {model!r} run different weights; give one of them as --weights: {names}")


def _tokens(file: Path, tokenizer: str | None) -> list[int]:
    try:
        text = file.read_text(encoding="utf-8")
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
    with needs("transformers", "transformers", instead="or give token ids as a JSON list"):
        from transformers import AutoTokenizer
    ids = AutoTokenizer.from_pretrained(tokenizer)(text)["input_ids"]
    return list(ids)
