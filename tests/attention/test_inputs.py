"""What does not fit is refused by name, before a page is read."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

import pytest
import torch

from kvcluster.attention import ROOT, PageAddresses, PageLayout, PageSpan, Partial, QueryRow, Subtree, merge, partial
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Group, Plane
from kvcluster.errors import CallerError
from tests.attention.references import context, layout_of

LAYOUT = layout_of()
POOL = torch.zeros(4, 2, 2, 16, 2, 32, dtype=torch.bfloat16)
IDS = torch.tensor([0, 3, 1], dtype=torch.int32)
PAGES = PageAddresses.from_pool(LAYOUT, POOL, IDS)
QUERY = torch.zeros(2, 4, 32)
ROW = QueryRow([0, 1], [PageSpan(PAGES, 0, 48)])
BUFFER = memoryview(bytearray(LAYOUT.layer_bytes(Codec.RAW) * 2))


def group(*planes: Plane) -> Group:
    return Group((0, 1), planes)


def released() -> memoryview:
    view = memoryview(bytearray(BUFFER))
    view.release()
    return view


def of_call(**changed: object) -> Callable[[], object]:
    arguments: dict[str, object] = {"query": QUERY, "rows": [ROW], "layout": LAYOUT, "layer": 1} | changed
    return lambda: partial(**arguments)  # type: ignore[arg-type]


K, V = Plane("k", 2, 32, "bfloat16"), Plane("v", 2, 32, "bfloat16")
REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "one plane of no latent": ("planes", lambda: PageLayout(group(K), 16, 2, 2)),
    "three planes": ("planes", lambda: PageLayout(group(K, V, Plane("x", 2, 32, "bfloat16")), 16, 2, 2)),
    "two dtypes": ("dtype", lambda: PageLayout(group(K, Plane("v", 2, 32, "float16")), 16, 2, 2)),
    "float8": ("dtype", lambda: PageLayout(group(Plane("k", 2, 32, "uint8"), Plane("v", 2, 32, "uint8")), 16, 2, 2)),
    "more values than a latent has": ("latent_values", lambda: PageLayout(group(K), 16, 2, 2, 33)),
    "heads that the group has not": ("heads", lambda: PageLayout(group(K, V), 16, 2, 3)),
    "no tokens in a block": ("block_tokens", lambda: PageLayout(group(K, V), 0, 2, 2)),
    "a pool of another dtype": ("pool", lambda: PageAddresses.from_pool(LAYOUT, POOL.float(), IDS)),
    "a pool of another shape": ("pool", lambda: PageAddresses.from_pool(LAYOUT, POOL[:, :1], IDS)),
    "a pool with gaps": ("contiguous", lambda: PageAddresses.from_pool(LAYOUT, POOL[::2], IDS[:1])),
    "wide page ids": ("int32", lambda: PageAddresses.from_pool(LAYOUT, POOL, IDS.long())),
    "a page id behind the pool": ("page id", lambda: PageAddresses.from_pool(LAYOUT, POOL, IDS + 1)),
    "a negative page id": ("page id", lambda: PageAddresses.from_pool(LAYOUT, POOL, IDS - 1)),
    "a layer that pages do not have": ("layer 2", of_call(layer=2)),
    "a negative layer": ("layer -1", of_call(layer=-1)),
    "a short page": ("bytes", lambda: PageAddresses.from_buffers(LAYOUT, [BUFFER[:-1]])),
    "a raw page that is said to be q8": ("bytes", lambda: PageAddresses.from_buffers(LAYOUT, [BUFFER], Codec.Q8)),
    "a codec too many": ("codecs", lambda: PageAddresses.from_buffers(LAYOUT, [BUFFER], [Codec.RAW] * 2)),
    "released memory": ("memory", lambda: PageAddresses.from_buffers(LAYOUT, [released()])),
    "memory with gaps": ("memory", lambda: PageAddresses.from_buffers(LAYOUT, [BUFFER[::2]])),
    "a tensor with gaps": ("contiguous", lambda: PageAddresses.from_buffers(LAYOUT, [POOL[0, :, :, ::2]])),
    "more tokens than pages hold": ("hold", lambda: PageSpan(PAGES, 0, 49)),
    "a negative position": ("range", lambda: PageSpan(PAGES, -1, 4)),
    "a position behind all": ("range", lambda: PageSpan(PAGES, 512 << 31, 1)),
    "pages to keep that descend": ("ascend", lambda: PageSpan(PAGES, 0, 48).select([1, 0])),
    "a page to keep that is not there": ("ascend", lambda: PageSpan(PAGES, 0, 48).select([3])),
    "spans that overlap": ("overlap", lambda: QueryRow([0], [PageSpan(PAGES, 0, 48), PageSpan(PAGES, 47, 1)])),
    "spans out of order": ("order", lambda: QueryRow([0], [PageSpan(PAGES, 48, 1), PageSpan(PAGES, 0, 48)])),
    "a query of another dim": ("query", of_call(query=torch.zeros(2, 4, 31))),
    "a flat query": ("query", of_call(query=torch.zeros(2, 128))),
    "a query of integers": ("query", of_call(query=QUERY.int())),
    "a query elsewhere": ("CPU", of_call(query=QUERY.to("meta"))),
    "query heads that make no groups": ("grouped", of_call(query=torch.zeros(2, 3, 32))),
    "no query heads": ("grouped", of_call(query=torch.zeros(2, 0, 32))),
    "heads out of range": ("heads", of_call(heads=(1, 3))),
    "no heads": ("heads", of_call(heads=(1, 1))),
    "fewer positions than tokens": ("positions", of_call(rows=[QueryRow([0], ROW.spans)])),
    "a negative query position": ("position", of_call(rows=[QueryRow([0, -1], ROW.spans)])),
    "pages of another layout": ("layout", of_call(layout=layout_of(block_tokens=8))),
    "a window of nothing": ("window", of_call(window=0)),
    "a window that is not causal": ("window", of_call(window=3, causal=False)),
    "a softcap of nothing": ("softcap", of_call(softcap=0.0)),
    "a scale that is no number": ("scale", of_call(scale=math.nan)),
    "no threads": ("threads", of_call(threads=0)),
    "a subtree outside the tree": ("outside", of_call(within=Subtree(3, 1 << 29))),
    "nothing to merge": ("no partials", lambda: merge([])),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(what: str) -> None:
    named, call = REFUSED[what]
    with pytest.raises(CallerError, match=named):
        call()


def test_partials_that_cannot_be_merged_are_refused() -> None:
    def made(subtree: Subtree, heads: int = 4) -> Partial:
        return Partial(subtree, torch.zeros(1, heads, 8), torch.zeros(1, heads))

    for named, others in {
        "overlap": [made(Subtree(1, 0)), made(Subtree(0, 1))],
        "twice": [made(Subtree(0, 1)), made(Subtree(0, 1))],
        "shapes": [made(Subtree(0, 0)), made(Subtree(0, 1), heads=2)],
    }.items():
        with pytest.raises(CallerError, match=named):
            merge(others)
    with pytest.raises(CallerError, match="sinks"):
        merge([made(ROOT)], sinks=torch.zeros(3))
    with pytest.raises(CallerError, match="overlap"):
        merge([merge([made(Subtree(0, 0))], sinks=torch.zeros(4)), made(Subtree(0, 1))])


def test_pages_keep_their_memory_until_they_go() -> None:
    of = context(LAYOUT, 16, 1)
    mapped = mmap.mmap(-1, len(of.pages[0]))
    mapped[:] = of.pages[0]
    view = memoryview(mapped)
    pages = PageAddresses.from_buffers(LAYOUT, [view])
    view.release()
    with pytest.raises(BufferError):
        mapped.close()
    rows = [QueryRow([3], [PageSpan(pages, 0, 16)])]
    expected = partial(QUERY[:1] + 1, [QueryRow([3], [of.span()])], LAYOUT, 1)
    assert torch.equal(partial(QUERY[:1] + 1, rows, LAYOUT, 1).out, expected.out)
    del pages, rows
    mapped.close()
