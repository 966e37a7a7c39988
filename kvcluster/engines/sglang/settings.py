"""Settings: kvcluster's keys in `--hicache-storage-backend-extra-config`, all checked while the engine starts.

SGLang passes one flat JSON object that contains its own keys and ours. Mistakes in ours raise before anything connects,
and an unknown key is refused by name: an ignored key would only show in a low hit rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvcluster import config
from kvcluster.client.credential import read_token
from kvcluster.config import ClientConfig
from kvcluster.core import limits
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ConfigError
from kvcluster.observe.trace_file import DEFAULT_FOLDER, MODES
from kvcluster.transfers.deadlines import OTHER_MS
from kvcluster.transport.addresses import check_address

_WHERE = "--hicache-storage-backend-extra-config"

_SGLANG = (
    *("backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path", "tp_lcm_size"),
    *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
    "hicache_storage_pass_prefix_keys",
)
"""SGLang's own keys, some of which it removes before it passes the object on."""

SHARED_MEDIA = "share"

_OURS = {
    "mode": f"one of {', '.join(MODES)}",
    "trace_dir": "the folder of traces in mode observe",
    "trace_bytes": "the limit of a trace in mode observe, in bytes",
    "address": "host:port of the coordinator",
    "weights": "a fingerprint of the exact weights",
    "model": "the model's name, if replicas serve it under different names",
    "token_file": "a file that holds this engine's token and nothing else",
    "kv_cache_dtype": "the value of --kv-cache-dtype, if the host pool's own dtype does not tell it",
    "kv_heads": "the number of KV heads of the whole model, if each rank has one",
    "draft_weights": "a fingerprint of the draft model's weights, if its layers are packed into the host pool",
    "rope": "the rotary settings, if the command line overrides those of the checkpoint",
    "extra": "names and values of anything else that KV depends on",
    "multimodal": f'"{SHARED_MEDIA}" to share KV of images, sound and video by the hashes that SGLang has of them',
    "lookup_ms": "the deadline of a lookup, in milliseconds",
    "retry_ms": "the time for which a cluster that did not answer is not asked again, in milliseconds",
    "client": "settings of the client: deadline_ms, connect_ms, accept, transports...",
}


_WEIGHTS = (
    "a fingerprint of the exact weights, such as the commit of the checkpoint or the digest of its files: without it "
    "KV of other weights under the same name would be taken for this model's"
)
_NEEDED = {
    "on": (("address", 'the coordinator\'s "host:port", such as "127.0.0.1:7070"'), ("weights", _WEIGHTS)),
    "observe": (("weights", _WEIGHTS),),
}
"""By mode: the keys that must be given, and what to give."""

_LOOKUP_MS = 1_000
"""A request waits for the lookup, which transfers no pages."""

_RETRY_MS = 1_000
"""A cluster that is back may stay unused for this long."""


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """`mode`: with "off" no other setting is read. `client.deadline_ms` is the deadline of transferring one batch of
    pages, `lookup_ms` that of a lookup; after the cluster did not answer, it is not asked again for `retry_ms`. `_OURS`
    describes the others."""

    address: str
    weights: str
    model: str
    client: ClientConfig
    mode: str = "on"
    trace_dir: str = str(DEFAULT_FOLDER)
    trace_bytes: int = limits.TRACE_BYTES
    token: str | None = None
    kv_cache_dtype: str = ""
    kv_heads: int = 0
    draft_weights: str = ""
    rope: str = ""
    extra: tuple[tuple[str, str], ...] = ()
    multimodal: str = ""
    lookup_ms: int = _LOOKUP_MS
    retry_ms: int = _RETRY_MS


def parse_settings(given: Mapping[str, object], model_name: str) -> StorageSettings:
    """Returns the settings in SGLang's extra config. Raises ConfigError, or SpecError for weights that are not
    pinned."""
    for key in given:
        if key not in _OURS and key not in _SGLANG:
            raise ConfigError(f"{_WHERE} has the unknown key {key!r}; kvcluster knows {', '.join(_OURS)}")
    mode = _text(given, "mode") or "on"
    if mode not in MODES:
        raise ConfigError(f"{_WHERE}: mode must be one of {', '.join(MODES)}, not {mode!r}")
    if mode == "off":
        return StorageSettings(address="", weights="", model="", client=ClientConfig(), mode=mode)
    for key, advice in _NEEDED[mode]:
        if not given.get(key):
            raise ConfigError(f'{_WHERE} lacks "{key}": give {advice}')
    settings = StorageSettings(
        address=_text(given, "address"),
        weights=_text(given, "weights"),
        model=_text(given, "model") or model_name,
        client=_client(given.get("client", {})),
        mode=mode,
        trace_dir=_text(given, "trace_dir") or str(DEFAULT_FOLDER),
        trace_bytes=_number(given, "trace_bytes", limits.TRACE_BYTES, least=limits.LEAST_TRACE_BYTES),
        token=read_token(_text(given, "token_file")),
        kv_cache_dtype=_text(given, "kv_cache_dtype"),
        kv_heads=_number(given, "kv_heads", 0, least=0),
        draft_weights=_text(given, "draft_weights"),
        rope=_text(given, "rope"),
        extra=_pairs(given.get("extra", {})),
        multimodal=_multimodal(given),
        lookup_ms=_number(given, "lookup_ms", _LOOKUP_MS, least=1),
        retry_ms=_number(given, "retry_ms", _RETRY_MS, least=1),
    )
    if not settings.model:
        raise ConfigError(f'SGLang gives no model name: add "model" to {_WHERE}, the same for all replicas')
    if settings.address:
        check_address(settings.address)
    for weights in (settings.weights, settings.draft_weights or settings.weights):
        # The pool, and so the rest of the spec, is not known before registration; the texts can be checked now.
        KVSpec.uniform(
            model=settings.model,
            weights=weights,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            dtype="uint8",
            rope=settings.rope,
            extra=dict(settings.extra),
        )
    return settings


def _text(given: Mapping[str, object], key: str) -> str:
    value = given.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"{_WHERE}: {key} must be text ({_OURS[key]}), not {value!r}")
    return value


def _multimodal(given: Mapping[str, object]) -> str:
    value = _text(given, "multimodal")
    if value not in ("", SHARED_MEDIA):
        raise ConfigError(f'{_WHERE}: multimodal may be "{SHARED_MEDIA}" or left out, not {value!r}')
    return value


def _number(given: Mapping[str, object], key: str, default: int, *, least: int) -> int:
    value = given.get(key, default)
    if type(value) is not int or not least <= value < 2**31:
        raise ConfigError(f"{_WHERE}: {key} must be an integer of at least {least} ({_OURS[key]}), not {value!r}")
    return value


def _pairs(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for pair in value.items() for text in pair):
        raise ConfigError(
            f'{_WHERE}: extra must be an object of strings, such as {{"lora": "sha256:..."}}, not {value!r}'
        )
    return tuple(sorted(value.items()))


def _client(value: object) -> ClientConfig:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{_WHERE}: client must be an object ({_OURS['client']}), not {value!r}")
    client = config.load(overrides={"client": dict(value)}).client
    return client if client.deadline_ms else replace(client, deadline_ms=OTHER_MS)
