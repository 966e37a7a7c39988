"""Engine ranks as tests know them: one of SGLang's host pools on the CPU, and the storage that its factory makes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from kvcluster.client import Client
from kvcluster.core.spec import KVSpec
from kvcluster.testing import MemoryCluster
from tests.waiting import eventually

TOKENS, PAGES, LAYERS, HEADS, DIM = 4, 8, 3, 2, 16
UNWRITTEN = 0x5A
CONFIG = {
    "backend_name": "kvcluster",
    "module_path": "kvcluster.engines.sglang",
    "class_name": "KVClusterStorage",
    "interface_v1": 1,
    "address": "127.0.0.1:7070",
    "weights": "sha256:1",
}
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
WIDE_LAYOUTS = ("page_first", "page_first_direct")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def keys_of(pages: int, seed: str = "") -> list[str]:
    """A chain of page hashes, as SGLang makes them: SHA-256 over the one before and the page's tokens."""
    keys, digest = [], b""
    for page in range(pages):
        digest = hashlib.sha256(digest + f"{seed}:{page}".encode()).digest()
        keys.append(digest.hex())
    return keys


def mha_pool(
    sglang: SimpleNamespace,
    layout: str = "page_first",
    *,
    heads: int = HEADS,
    dim: int = DIM,
    v_dim: int | None = None,
    layers: int = LAYERS,
    first_layer: int = 0,
    drafts: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    order: str = "nhd",
    tokens: int = TOKENS,
) -> Any:
    """Of K and V, whose dims differ where `v_dim` is given. `drafts`: layers of a draft model, packed behind."""
    v_dim, info = v_dim or dim, sglang.device_pool_info

    def buffer_info(layers: int) -> Any:
        k, v = ([torch.zeros(tokens, heads, d, dtype=dtype) for _ in range(layers)] for d in (dim, v_dim))
        order_of = info.KVBufferLayout(order)
        buffers = info.KVBuffers(k=(*k,), v=(*v,), k_data_ptrs=_starts(k), v_data_ptrs=_starts(v), layout=order_of)
        return info.MHABufferInfo(
            buffers=buffers,
            page_size=tokens,
            head_num=heads,
            head_dim=dim,
            v_head_dim=v_dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )

    return _built(
        sglang,
        sglang.mha if v_dim == dim else sglang.asymmetric,
        buffer_info(layers),
        tokens,
        layout,
        start_layer=first_layer,
        end_layer=first_layer + layers,
        draft_buffer_infos=tuple(buffer_info(1) for _ in range(drafts)),
    )


def mla_pool(
    sglang: SimpleNamespace,
    layout: str = "page_first",
    *,
    layers: int = LAYERS,
    dtype: torch.dtype = torch.bfloat16,
    sharded: bool = False,
    tokens: int = TOKENS,
) -> Any:
    """Of one latent, 16 + 8 numbers a token."""
    buffers = [torch.zeros(tokens, 1, 24, dtype=dtype) for _ in range(layers)]
    info = sglang.device_pool_info.MLABufferInfo(
        buffers=(*buffers,),
        data_ptrs=_starts(buffers),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=tokens,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        kv_cache_dim=24,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return _built(
        sglang,
        sglang.mla,
        info,
        tokens,
        layout,
        start_layer=0,
        end_layer=layers,
        target_layer_num=layers,
        layer_shard_enabled=sharded,
    )


def _built(sglang: SimpleNamespace, kind: Any, info: Any, tokens: int, layout: str, **geometry: Any) -> Any:
    with sglang.budget(1 << 30):
        pool = kind(
            info,
            1.0,
            0,
            tokens,
            layout,
            pin_memory=False,
            device="cpu",
            device_capacity_tokens=tokens,
            host_token_capacity=PAGES * tokens,
            **geometry,
        )
    for buffer in _buffers(pool):
        buffer.view(torch.uint8).fill_(UNWRITTEN)
    return pool


def _starts(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def _buffers(pool: Any) -> tuple[torch.Tensor, ...]:
    return pool.kv_buffer if isinstance(pool.kv_buffer, tuple) else (pool.kv_buffer,)


def scramble(pool: Any, seed: int = 0) -> Any:
    """Fills all of it with random bits."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in _buffers(pool):
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.randint(256, raw.shape, dtype=torch.uint8, generator=generator))
    return pool


def slots(pages: Iterable[int], tokens: int = TOKENS) -> torch.Tensor:
    """The slots of these pages, as SGLang names them."""
    return torch.tensor([page * tokens + token for page in pages for token in range(tokens)], dtype=torch.int64)


def page(pool: Any, number: int) -> bytes:
    """All bytes of a page, found without any address: each token of each layer and head, K before V."""
    out = b""
    for buffer in _buffers(pool):
        kinds = buffer.unbind(0) if len(_buffers(pool)) == 1 and hasattr(pool, "head_num") else [buffer]
        for kind in kinds:
            axis = 1 if pool.layout == "layer_first" else 0
            step = pool.page_size if pool.layout in ("layer_first", "page_first") else 1
            part = kind.narrow(axis, number * step, step).contiguous()
            out += part.view(torch.uint8).numpy().tobytes()
    return out


def logical(pool: Any) -> torch.Tensor:
    """K and V of a pool in place, as `[2, pages, tokens, layers, heads, dim]` whatever the layout."""
    if pool.layout == "layer_first":
        return pool.kv_buffer.unflatten(2, (PAGES, pool.page_size)).permute(0, 2, 3, 1, 4, 5)
    if pool.layout == "page_first":
        return pool.kv_buffer.unflatten(1, (PAGES, pool.page_size))
    return pool.kv_buffer.permute((0, 1, 3, 2, 4, 5) if pool.layout == "page_first_direct" else (0, 1, 3, 4, 2, 5))


def untouched(pool: Any, number: int) -> bool:
    return set(page(pool, number)) == {UNWRITTEN}


class Connect:
    """Stands in for `kvcluster.connect`: clients of a cluster in this process, while `up`."""

    def __init__(self, cluster: MemoryCluster, *, up: bool = True, port: Any = None) -> None:
        self.specs: list[KVSpec] = []
        self.clients: list[Client] = []
        self.calls = 0
        self.up = up
        self._cluster = cluster
        self._port = port

    def __call__(self, address: str, spec: KVSpec, *, token: str | None, part: Any, config: Any) -> Client:
        from kvcluster.errors import Unreachable

        self.calls += 1
        if not self.up:
            raise Unreachable(f"no server answers at {address}")
        self.specs.append(spec)
        port = self._port or self._cluster.port()
        self.clients.append(Client(port, self._cluster.opener(), spec, part=part, config=config))
        return self.clients[-1]


def storage_config(sglang: SimpleNamespace, *, rank: int = 0, ranks: int = 1, mla: bool = False, **more: Any) -> Any:
    """As SGLang's controller makes it. What is not a field of it is extra config."""
    fields = {name: more.pop(name) for name in list(more) if name in sglang.config.__dataclass_fields__}
    return sglang.config(
        **{
            "tp_rank": rank,
            "tp_size": ranks,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": mla,
            "enable_storage_metrics": False,
            "is_page_first_layout": False,
            "model_name": "tiny",
            "extra_config": {**CONFIG, **more},
            **fields,
        }
    )


def create(sglang: SimpleNamespace, pool: Any, connect: Callable[..., Client], **settings: Any) -> Any:
    """A storage of the factory's, its pool registered."""
    mla = type(pool).__name__.startswith("MLA")
    config = storage_config(sglang, **{"mla": mla, **settings})
    storage = sglang.factory.create_backend("dynamic", config, pool, connect=connect)
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()
    return storage


def connected(storage: Any) -> Any:
    eventually(storage._client.connected)
    return storage


def seen(storage: Any, keys: Sequence[str]) -> bool:
    """Waits until the cluster tells of all these pages, which it does a moment after they were stored."""
    return bool(eventually(lambda: storage.batch_exists(keys) == len(keys)))
