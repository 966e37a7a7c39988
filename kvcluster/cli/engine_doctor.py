"""`kvcluster doctor --engine vllm`: examines the engine's installation before anything is started.

The engine's own modules are imported in a process of their own (`kvcluster.engines.vllm.examine`): importing them takes
seconds, prints, and may fail in ways that end a process. Run it with the Python of the engine's environment. If the
settings name a cluster, or --address does, it is examined as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from kvcluster.child_python import module_command
from kvcluster.cli.coordinator_args import credentials_of
from kvcluster.client.credential import read_token
from kvcluster.config import ClientConfig
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.transport.credentials import CONNECTION, Credentials, client_credentials

ENGINES = {"vllm": "kvcluster.engines.vllm.examine"}
"""By engine: the module that examines it."""

WIDTH = 80
_PATIENCE_S = 600.0
"""For imports on a cold disk, and with --read-weights for weights of some hundred GB."""

Examine = Callable[[str, Credentials], Mapping[str, Any]]
"""Examines the cluster at an address, with credentials (doctor.examine)."""


def add_arguments(doctor: Any) -> None:
    """Adds the options of this part to `kvcluster doctor`."""
    group = doctor.add_argument_group("an engine's installation, before it starts, in its environment")
    group.add_argument(
        "--engine", choices=list(ENGINES), help="examine this engine's installation (default: check the cluster)"
    )
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="model, as the engine is given it; without --engine a checkpoint's folder, of which config.json alone is "
        "examined, without the engine (default: none)",
    )
    group.add_argument(
        "--kv-transfer-config",
        metavar="JSON",
        help="value of the engine's option of that name (default: that of observe mode)",
    )
    group.add_argument(
        "--read-weights",
        action="store_true",
        help="read the weights for their fingerprint now, about a second per GB, if it is not known",
    )
    group.add_argument(
        "engine_arguments", nargs="*", metavar="-- ARGUMENT", help="more of the engine's own arguments, behind `--`"
    )


def is_asked(options: argparse.Namespace) -> bool:
    """Whether the options ask for an engine. Raises ConfigError for options of this part without --engine."""
    if options.engine:
        return True
    for given, name in (
        (options.engine_arguments, " ".join(options.engine_arguments)),
        (options.kv_transfer_config, "--kv-transfer-config"),
        (options.read_weights, "--read-weights"),
    ):
        if given:
            raise ConfigError(f"{name} belongs to the examination of an engine: give --engine {'|'.join(ENGINES)}, too")
    return False


def run(options: argparse.Namespace, examine: Examine) -> int:
    """Runs the examination that the options ask for. Returns the exit status: 0 if the engine is served, and its
    cluster, if it has one, can be used."""
    if not options.model:
        raise ConfigError("--engine needs --model: the model, as the engine is given it")
    found = examined(options.engine, _request(options))
    found["cluster"] = _cluster(options, found["settings"], examine)
    healthy = not found["refused"] and (found["cluster"] is None or found["cluster"]["healthy"])
    found |= {"healthy": healthy, "verdict": _verdict(found)}
    print(json.dumps(found, indent=2) if options.json else "\n".join(lines(found)))
    return 0 if healthy else 1


def examined(engine: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the findings about an engine, which a process of its own makes. Raises KVClusterError if it cannot."""
    if find_spec(engine) is None:
        raise KVClusterError(
            f"{engine} is not installed beside this kvcluster ({sys.executable}): run this command in the engine's "
            "environment, with kvcluster installed there from the same wheel or checkout"
        )
    with tempfile.TemporaryFile() as answer:
        process = subprocess.Popen(
            module_command(ENGINES[engine], str(answer.fileno())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(answer.fileno(),),
            env={"VLLM_LOGGING_LEVEL": "ERROR"} | os.environ,
        )
        try:
            said, _ = process.communicate(json.dumps(request).encode(), timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        answer.seek(0)
        found = answer.read()
    if process.returncode or not found:
        last = said.decode(errors="replace").strip().splitlines()[-8:]
        raise KVClusterError(
            f"{engine} could not be examined: the process that imports it ended with {process.returncode}, and said:\n"
            + "\n".join(last)
        )
    result: dict[str, Any] = json.loads(found)
    return result


def _request(options: argparse.Namespace) -> dict[str, Any]:
    transfer = None
    if options.kv_transfer_config is not None:
        try:
            transfer = json.loads(options.kv_transfer_config)
        except ValueError as error:
            raise ConfigError(f"--kv-transfer-config is not JSON: {error}") from None
        if not isinstance(transfer, dict):
            raise ConfigError("--kv-transfer-config must be a JSON object, as the engine takes it")
    return {
        "model": options.model,
        "transfer": transfer,
        "arguments": options.engine_arguments,
        "read_weights": options.read_weights,
    }


def _cluster(
    options: argparse.Namespace, settings: Mapping[str, Any] | None, examine: Examine
) -> Mapping[str, Any] | None:
    """Returns the findings about the cluster that --address names, or the engine's settings; None if neither does."""
    if options.address:
        return examine(options.address, credentials_of(options))
    if settings is None or not settings["address"] or settings["mode"] == "off":
        return None
    try:
        client = ClientConfig(**{name: settings[name] for name in CONNECTION})
        token = read_token(settings["token_file"])
        return examine(settings["address"], client_credentials(settings["address"], token, client))
    except ConfigError as error:
        return {"address": settings["address"], "healthy": False, "verdict": str(error)}


def _verdict(found: Mapping[str, Any]) -> str:
    if found["refused"]:
        return "kvcluster does not serve this engine; what is refused stands above"
    mode = found["settings"]["mode"]
    if found["cluster"] is not None and not found["cluster"]["healthy"]:
        return "kvcluster serves this engine, but its cluster cannot be used: it would compute everything"
    rest = ", as far as its configuration tells" if found["unknown"] else ""
    return f"kvcluster serves this engine{rest}; its mode is {mode!r}"


# ---------------------------------------------------------------------------------------------------- as text


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields the findings as text of at most 80 columns, but for paths and digests."""
    releases = found["releases"]
    yield f"vLLM {releases['vllm']}, torch {releases['torch']}, on {releases['device']}"
    yield f"kvcluster {releases['kvcluster']}, Python {releases['python']}"
    yield from _wrapped(releases["tried"])
    if found["model"] is not None:
        yield from ("", *_model(found["model"], found["layout"], found["identity"]))
    if found["features"]:
        yield ""
        yield from _features(found["features"])
    if found["cluster"] is not None:
        yield ""
        yield from _wrapped(f"cluster at {found['cluster']['address']}: {found['cluster']['verdict']}")
    if found["settings"] is not None and found["settings"]["mode"] == "observe":
        yield from ("", f"observe mode: traces go to {found['settings']['trace_dir']}")
    yield ""
    for reason in found["refused"]:
        yield from _wrapped(f"refused: {reason}")
    for reason in found["unknown"]:
        yield from _wrapped(f"not known before it starts: {reason}")
    yield from _wrapped(found["verdict"])


def _model(
    model: Mapping[str, Any], layout: Mapping[str, Any] | None, identity: Mapping[str, Any] | None
) -> Sequence[str]:
    rows = [
        ("model", model["path"]),
        ("", f"{', '.join(model['architectures'])}, {model['dtype']}, up to {model['max_tokens']:,} tokens"),
        ("", f"{model['layers']} layers, {model['kv_heads']} KV heads of {model['head_dim']}"),
    ]
    if layout is not None:
        kib = layout["token_bytes"] / 1024
        rows += [
            ("KV", f"{layout['groups']}; {kib:,.1f} KiB a token, blocks of {layout['block_tokens']} tokens"),
            ("", layout["kv_format"]),
        ]
    if identity is not None:
        rows += [("weights", identity["weights"] or "not known yet"), ("", identity["how"])]
    return [line for name, text in rows for line in _row(name, str(text))]


def _features(features: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [2 + max(len(row[column]) for row in features) for column in range(2)]
    for feature, state, detail in features:
        start = feature.ljust(widths[0]) + state.ljust(widths[1])
        yield from textwrap.wrap(detail, WIDTH, initial_indent=start, subsequent_indent=" " * sum(widths))


def _row(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{name:<9}", subsequent_indent=" " * 9, break_long_words=False)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
