"""SGLang's own storage interface, host pools and controllers in this process, from its wheel, without a GPU.

All that is stood in for stands here. What tests use of SGLang is what the wheel has: `hicache_storage`,
`backend_factory`, `pool_host.*`, `cache_controller`, `hybrid_cache_controller`. Stood in for are packages that want a
GPU or half of SGLang's hundred requirements to be imported, and of which those need a name or an answer:

- `sglang` itself, whose first act is to patch transformers and to import the server: an empty package over its folder;
- `srt.utils`: `is_cuda()` and the like, answered with False;
- `srt.runtime_context.process_model_config()`: a model of text alone, which a test may exchange;
- device pools, layers, allocators, radix trees and kernels: classes without content, for `isinstance` and annotations.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

STAND_INS = (
    "sglang.srt.utils",
    "sglang.srt.layers",
    "sglang.kernels.ops.kvcache.mla_buffer",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.mem_cache.deepseek_v4_memory_pool",
    "sglang.srt.mem_cache.allocator",
    "sglang.srt.mem_cache.base_prefix_cache",
    "sglang.srt.mem_cache.radix_cache",
    "sglang.srt.mem_cache.page_interleave",
    "sglang.srt.mem_cache.pool_host.page_interleave",
    "sglang.srt.mem_cache.pool_host.unified",
)
OURS = "kvcluster.engines.sglang"


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = (lambda *_: False) if name.startswith("is_") else type(name, (), {})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> Any:
        if any(fullname == name or fullname.startswith(name + ".") for name in STAND_INS):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


@contextmanager
def imported(folder: Path) -> Iterator[SimpleNamespace]:
    """What tests use of SGLang, and of our engine, which has found it. All of it is forgotten afterwards, so that no
    other test finds an SGLang here."""
    finder, beside = _Finder(), str(folder / "with")
    package = ModuleType("sglang")
    package.__spec__ = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
    package.__path__ = [str(folder / "sglang")]
    _forget("sglang", OURS)
    sys.modules["sglang"] = package
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, beside)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _gather()
        yield found
    finally:
        sys.path.remove(beside)
        sys.meta_path.remove(finder)
        _forget("sglang", OURS)


def _gather() -> SimpleNamespace:
    names: dict[str, dict[str, str]] = {
        "sglang.srt.mem_cache.hicache_storage": {
            "config": "HiCacheStorageConfig",
            "extra_info": "HiCacheStorageExtraInfo",
            "base": "HiCacheStorage",
            "pool_name": "PoolName",
            "transfer": "PoolTransfer",
            "file": "HiCacheFile",
        },
        "sglang.srt.mem_cache.storage.backend_factory": {"factory": "StorageBackendFactory"},
        "sglang.srt.mem_cache.pool_host.mha": {
            "mha": "MHATokenToKVPoolHost",
            "asymmetric": "AsymmetricMHATokenToKVPoolHost",
        },
        "sglang.srt.mem_cache.pool_host.mla": {"mla": "MLATokenToKVPoolHost"},
        "sglang.srt.mem_cache.pool_host.base": {"budget": "host_memory_budget_scope"},
        "sglang.srt.mem_cache.pool_host": {"pool_group": "HostPoolGroup", "pool_entry": "PoolEntry"},
        "sglang.srt.mem_cache.memory_pool_host": {"logical": "LogicalHostPool"},
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller": {"controller": "HybridCacheController"},
        OURS: {"storage": "KVClusterStorage"},
        f"{OURS}.storage": {"lossy_pages": "LossyPages"},
    }
    modules = (
        "sglang.srt.mem_cache.device_pool_info",
        *(f"{OURS}.{name}" for name in ("compat", "settings")),
    )
    context = importlib.import_module("sglang.srt.runtime_context")
    context.process_model_config = lambda: SimpleNamespace(is_multimodal=False, is_audio_model=False)  # type: ignore[attr-defined]
    found = {key: getattr(importlib.import_module(m), name) for m, keys in names.items() for key, name in keys.items()}
    return SimpleNamespace(
        context=context, **found, **{m.rpartition(".")[2]: importlib.import_module(m) for m in modules}
    )


def _forget(*roots: str) -> None:
    """Removes these packages and all in them. Their parents hold them as attributes, where `import a.b.c as c` would
    still find them."""
    for name in list(sys.modules):
        if any(name == root or name.startswith(root + ".") for root in roots):
            del sys.modules[name]
    for parent, _, name in (root.rpartition(".") for root in roots):
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(name, None)
