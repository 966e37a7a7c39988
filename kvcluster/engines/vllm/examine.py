"""Examines an installation of vLLM before an engine is started: what kvcluster would serve of it, and why not the rest.

    python -m kvcluster.engines.vllm.examine FD

reads a request from stdin, a JSON object with `model`, `transfer` (the value of --kv-transfer-config, or null),
`arguments` (more of vLLM's own) and `read_weights`, and writes the findings as JSON to the file descriptor FD: vLLM
prints to stdout what it likes. `kvcluster doctor --engine vllm` runs it (cli/engine_doctor.py). No weights are loaded,
nothing is allocated, and no cluster is asked.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

import kvcluster
import kvcluster.engines.vllm.compat as compat
import kvcluster.engines.vllm.refusals as refusals
import kvcluster.engines.vllm.settings as settings
import kvcluster.engines.vllm.weights as weights
from kvcluster.engines.texts import error_text
from kvcluster.engines.vllm.kv_plan import planned_kv
from kvcluster.engines.vllm.registration import spec_of
from kvcluster.engines.vllm.settings import ConnectorSettings
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.transport.credentials import CONNECTION

SERVED, REFUSED, UNKNOWN, UNUSED = "served", "refused", "unknown", "not used"

_RUN, _FITS = ("0.32",), ("0.33",)
"""Releases whose engines are run by the tests, and those of which only the interface is checked against ours
(docs/vllm.md)."""

_OBSERVING = {
    "kv_connector": "KVClusterConnector",
    "kv_connector_module_path": "kvcluster.engines.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"mode": "observe"},
}


def examine(
    model: str, transfer: Mapping[str, Any] | None, arguments: Sequence[str], *, read_weights: bool
) -> dict[str, Any]:
    """Returns the findings as plain values. `features` are rows of (feature, state, detail); `refused` are the reasons
    why this engine is not served, [] if it is; `unknown` is what is known only once it has started."""
    found: dict[str, Any] = {"releases": _releases(), "features": [], "refused": [], "unknown": []}
    found |= {"settings": None, "model": None, "layout": None, "identity": None}
    given = dict(transfer if transfer is not None else _OBSERVING)
    try:
        chosen = settings.parse_settings(given.get("kv_connector_extra_config") or {})
    except ConfigError as error:
        return found | {"refused": [str(error)]}
    named = ("mode", "address", "token_file", *CONNECTION)
    found["settings"] = {name: getattr(chosen, name) for name in named}
    found["settings"]["trace_dir"] = chosen.trace_dir
    if wrong := list(_wiring(given, chosen)):  # vLLM would make another connector, or none
        return found | {"refused": wrong}
    try:
        config = _config(model, given, arguments)
    except Exception as error:  # whatever vLLM or the model's library raises
        return found | {"refused": [f"vLLM refuses this engine by itself: {_first_line(error)}"]}
    found["model"] = _model(config)
    found["identity"] = _identity(config, chosen, read=read_weights)
    layout = None
    try:
        kv = planned_kv(config)
        found["refused"] += list(refusals.refusals(config, kv))
        if not found["refused"]:
            layout = compat.layout(config, kv)
            found["layout"] = _layout(config, layout, chosen)
    except ConfigError as error:
        found["refused"] += list(refusals.refusals_of_settings(config))
        if not found["refused"]:
            found["unknown"].append(f"its KV, which only its layers will tell: {error}")
    except Exception as error:  # of vLLM's planning
        found["unknown"].append(f"its KV, which cannot be planned before it starts: {_first_line(error)}")
    found["features"] = [list(row) for row in _features(config, layout, chosen)]
    found["unknown"] += [f"{feature}: {detail}" for feature, state, detail in found["features"] if state == UNKNOWN]
    return found


class _Parser(FlexibleArgumentParser):
    """Raises ConfigError where vLLM's own would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"of the arguments behind --: {message}")


def _config(model: str, transfer: Mapping[str, Any], arguments: Sequence[str]) -> Any:
    parser = _Parser()
    EngineArgs.add_cli_args(parser)
    named = ["--model", model, "--kv-transfer-config", json.dumps(transfer)]
    return EngineArgs.from_cli_args(parser.parse_args([*named, *arguments])).create_engine_config()


def _releases() -> dict[str, str]:
    minor = compat.version()
    tried = (
        "the interface of this release is checked; no engine of it has run with its KV on a GPU"
        if compat.device() != "cpu" and minor in (*_RUN, *_FITS)
        else "engines of this release are run by the tests"
        if minor in _RUN
        else "the interface of this release is checked, its engines are not run"
        if minor in _FITS
        else f"not tried with this release: {', '.join((*_RUN, *_FITS))} are"
    )
    return {
        "vllm": compat.release(),
        "tried": tried,
        "torch": str(torch.__version__),
        "kvcluster": kvcluster.__version__,
        "python": platform.python_version(),
        "device": compat.device(),
    }


def _model(config: Any) -> dict[str, Any]:
    model = config.model_config
    return {
        "path": str(model.model),
        "architectures": list(getattr(model.hf_config, "architectures", None) or ()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_tokens": int(model.max_model_len),
        "layers": int(model.get_total_num_hidden_layers()),
        "kv_heads": int(model.get_total_num_kv_heads()),
        "head_dim": int(model.get_head_size()),
    }


def _identity(config: Any, chosen: ConnectorSettings, *, read: bool) -> dict[str, Any]:
    """Returns the weights' fingerprint and its source; None for one that is not known without reading the weights."""
    if chosen.pinned_weights:
        return {"weights": chosen.weights, "how": "given in kv_connector_extra_config", "bytes": None}
    try:
        path = compat.checkpoint(config)
        known, nbytes = weights.known_fingerprint(path)
        how = "the commit in its path" if known.startswith("commit:") else "read before"
        if not known and read:
            known, how = weights.fingerprint(path), "read now"
    except (KVClusterError, OSError) as error:
        return {"weights": None, "how": str(error), "bytes": None}
    if not known:
        how = "the files are read once, in the background, when an engine first starts; or now, with --read-weights"
    return {"weights": known or None, "how": how, "bytes": nbytes}


def _wiring(given: Mapping[str, Any], chosen: ConnectorSettings) -> Iterator[str]:
    for key in ("kv_connector", "kv_connector_module_path"):
        if given.get(key) != _OBSERVING[key]:
            yield f"{key} is {given.get(key)!r} in --kv-transfer-config; give {_OBSERVING[key]!r}"
    if chosen.mode == "on" and given.get("kv_load_failure_policy") != "recompute":
        yield 'kv_load_failure_policy must be "recompute" in --kv-transfer-config, or a failed load fails its request'


def _layout(config: Any, layout: compat.Layout, chosen: ConnectorSettings) -> dict[str, Any]:
    spec = spec_of(config, layout, chosen, chosen.pinned_weights or "unread")
    facts = dict(compat.facts(config, layout))
    return {
        "model": spec.model,
        "block_tokens": layout.block_tokens,
        "token_bytes": spec.token_bytes,
        "groups": facts["groups"],
        "kv_format": facts["kv format"],
    }


def _features(config: Any, layout: compat.Layout | None, chosen: ConnectorSettings) -> Iterator[tuple[str, str, str]]:
    """Yields what this engine uses, and whether that is served."""
    cache, parallel = config.cache_config, config.parallel_config
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    yield "tensor parallel ranks", SERVED if ranks > 1 else UNUSED, f"{ranks}; each moves its own heads"
    yield "pipeline ranks", SERVED if stages > 1 else UNUSED, f"{stages}; each moves the KV of its own layers"
    latents = layout is not None and any(of_group.latent for of_group in layout.formats)
    yield "latents (MLA)", SERVED if latents else UNUSED, "stored once for all ranks, and read by each"
    kinds_of_reuse = set() if layout is None else {group.reuse.kind for group in layout.groups}
    windows, chunks = "window" in kinds_of_reuse, "chunk" in kinds_of_reuse
    yield "sliding windows", SERVED if windows else UNUSED, "only the blocks within a window are loaded"
    yield "chunked attention", SERVED if chunks else UNUSED, "only the blocks of the current chunk are loaded"
    own = cache.prefix_caching_hash_algo if cache.enable_prefix_caching else "off"
    yield "vLLM's own prefix cache", SERVED, f"{own}; it is asked first, and the cluster for what it lacks"
    yield "PYTHONHASHSEED", UNUSED, "blocks are hashed by kvcluster itself, equally in every process"
    lora = getattr(config, "lora_config", None)
    yield "LoRA", SERVED if lora is not None else UNUSED, "by content, never by name"
    kinds = getattr(config, "speculative_config", None)
    if kinds is not None:
        method = str(getattr(kinds, "method", ""))
        known = method == "ngram"
        detail = f"{method}" if known else f"{method}: a draft model's KV is refused when the engine starts"
        yield "speculative decoding", SERVED if known else UNKNOWN, detail
    within = chosen.layerwise_ms > 0 and compat.loads_within(config)
    within = within and layout is not None and layout.may_fail_in_part
    why = "short loads run within the forward pass" if within else "all loads run beside the forward passes"
    yield "layer-by-layer loads", SERVED if within else UNUSED, why
    stores, loads = compat.roles(config)
    both = "stores and loads" if stores and loads else "stores only" if stores else "loads only"
    yield "role", SERVED, both


def _first_line(error: Exception) -> str:
    return " ".join(error_text(error).split())[:400]


def main() -> None:
    """Reads the request, and writes the findings."""
    request = json.load(sys.stdin)
    found = examine(request["model"], request["transfer"], request["arguments"], read_weights=request["read_weights"])
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as out:
        json.dump(found, out)


if __name__ == "__main__":
    main()
