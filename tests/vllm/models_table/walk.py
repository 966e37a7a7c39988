"""Examines architectures one after another, each in a process of its own that is bounded in time and memory."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIME_S = 120
"""A model is built in a second or two."""

MEMORY_BYTES = 48 * 2**30
"""Address space of a process, most of which is never touched."""

_DECIDING = re.compile(
    r"layer|head|hidden_size|window|rank|_dim|index|type|mamba|ssm|linear|conv|chunk|attn|attention|kv|block|state|embd"
    r"|encoder|interval|pattern|quer|cla$"
)
"""What decides about KV in a config.json; the rest is not kept in result.json."""


def examined(architecture: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns what examine.py found of an architecture and `config`, the deciding part of its configuration; or
    `error`, why it could not be examined. `given` is a config.json to take in place of a small configuration."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _run(architecture, given, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        found = answer.read()
    _, status = os.waitpid(child, 0)
    if found:
        return dict(json.loads(found))
    code = os.waitstatus_to_exitcode(status)
    return {"error": f"no answer within {TIME_S} s" if code == -signal.SIGALRM else f"its process ended with {code}"}


def _run(architecture: str, given: Mapping[str, Any] | None, writer: int) -> None:
    """Examines in this process, which ends."""
    from tests.vllm.models_table import configs, examine

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.alarm(TIME_S)
    folder = tempfile.mkdtemp()
    try:
        content, source = (given, "") if given else configs.config_of(architecture)
        found = examine.examine(content, Path(folder))
        found |= {} if given else {"source": source, "config": deciding(content)}
    except BaseException as error:
        if "-v" in sys.argv:
            traceback.print_exc()
        found = {"error": first_line(error).replace(folder, "FOLDER")}
    shutil.rmtree(folder, ignore_errors=True)
    sys.stderr.flush()
    with os.fdopen(writer, "wb") as answer:
        answer.write(json.dumps(found).encode())
    os._exit(0)


def first_line(error: BaseException) -> str:
    """Returns the line of an error that says what is wrong, at most 160 characters; its type if it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = lines[1] if len(lines) > 1 and "validation error" in lines[0] else (lines or [""])[0]
    told = re.sub(r" \[type=.*| Please check the logs.*", "", told)
    return told[:160] or type(error).__name__


def deciding(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a config.json that decides about KV."""
    kept = {
        name: value
        for name, value in content.items()
        if name in ("architectures", "torch_dtype", "dtype")
        or (_DECIDING.search(name) and value is not None and not isinstance(value, dict))
    }
    nested = content.get("text_config")
    return kept | {"text_config": deciding(nested)} if isinstance(nested, dict) else kept


def architectures() -> tuple[list[str], list[str]]:
    """Returns the generative architectures of vLLM's registry, and its draft models."""
    from vllm.model_executor.models import registry

    generative = (
        registry._TEXT_GENERATION_MODELS,
        registry._MULTIMODAL_MODELS,
        registry._TRANSFORMERS_SUPPORTED_MODELS,
    )
    return sorted({name for part in generative for name in part}), sorted(registry._SPECULATIVE_DECODING_MODELS)


def later_architectures(source: Path) -> list[str]:
    """Returns the generative architectures of another release's registry, from its source alone."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        match node:
            case ast.Assign(
                targets=[
                    ast.Name(id="_TEXT_GENERATION_MODELS" | "_MULTIMODAL_MODELS" | "_TRANSFORMERS_SUPPORTED_MODELS")
                ],
                value=ast.Dict(keys=keys),
            ):
                found += [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return sorted(found)
