"""What a shard computes for one Attend: results over registered spans, as the bytes that travel (docs/adr/0061).

A request is checked whole before a page is read: what it names, how many bytes its results take, and how many
multiplications they are. The spans of a row are those of its request, cut so that they do not overlap: a block that
lies in two cuts of positions is named by the spans of both.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvcluster.attention.call import Scoring
from kvcluster.attention.page_span import PageAddresses, PageLayout, PageSpan
from kvcluster.attention.partial import Partial
from kvcluster.attention.pieces import cuts_before
from kvcluster.attention.subtree_partials import SubtreeRow, subtree_partials
from kvcluster.core import limits
from kvcluster.core.attend_work import attend_work
from kvcluster.core.ids import SpanId
from kvcluster.core.messages import AttendRequest, AttendRow, PageKey, PageSlot, SpanPages
from kvcluster.core.position_tree import ROOT, Subtree
from kvcluster.errors import CallerError, LimitError, ProtocolError
from kvcluster.memory import checksum
from kvcluster.memory.codec_torch import DTYPES

View = Callable[[PageSlot], memoryview]
"""Returns the bytes of a pinned page."""

_KNOWN: WeakKeyDictionary[SpanPages, PageSpan] = WeakKeyDictionary()
"""The addresses of spans, made once for all layers and steps in which their pages do not move."""

_VERIFIED: WeakKeyDictionary[SpanPages, dict[int, None]] = WeakKeyDictionary()
"""The layers of spans that have been verified, where their pages lie now."""


def corrupt_pages(
    layer: int, spans: Iterable[SpanPages], view: View, between: Callable[[], object] = lambda: None
) -> dict[SpanId, list[PageKey]]:
    """Returns the pages whose bytes of a layer do not match their checksums, by span. A layer is verified when it is
    first attended to, as a borrowed page is: after that the pin keeps it as it was. `between` is called between pages,
    and may raise."""
    found: dict[SpanId, list[PageKey]] = {}
    for pages in spans:
        verified = _VERIFIED.setdefault(pages, {})
        if layer in verified or layer >= pages.part.layers:
            continue
        wrong: list[PageKey] = []
        for slot in pages.slots:
            between()
            if not _is_sound(pages, slot, layer, view(slot)):
                wrong.append(slot.key)
        if wrong:
            found[pages.span] = wrong
        else:
            verified[layer] = None
    return found


def attend_spans(
    request: AttendRequest,
    query: memoryview,
    spans: Mapping[SpanId, SpanPages],
    view: View,
    *,
    between: Callable[[], object],
    deadline_ns: int = 0,
) -> memoryview:
    """Returns the results of a request, in the order in which they travel (Attended). `spans` are all that it names,
    pinned. `between` is called between pieces of at most limits.ATTEND_PIECE_WORK, and may raise. Raises CallerError
    for what does not fit, LimitError for too much; then nothing was read. TimeoutError once `deadline_ns` of the
    monotonic clock has passed; 0 for none."""
    layout = _layout(request, next(iter(spans.values())))
    rows = []
    for row in request.rows:
        between()
        rows.append(_row(row, layout, spans, view))
    _check_bounds(request, layout, rows)
    raw = torch.frombuffer(query, dtype=DTYPES[request.dtype]) if query.nbytes else torch.zeros(0)
    asked = raw.view(request.tokens, request.heads, request.dim).float()
    scoring = Scoring(request.scale, request.softcap or None, request.window or None)
    most, layer = limits.ATTEND_PIECE_WORK, request.layer
    results = subtree_partials(
        asked, rows, layout, layer, scoring, between=between, most_work=most, deadline_ns=deadline_ns
    )
    return pack_results(results)


def result_bytes(tokens: int, heads: int, value_dim: int) -> int:
    """Returns the bytes of the result of one subtree for so many query tokens."""
    return tokens * heads * (value_dim + 1) * torch.float32.itemsize


def pack_results(results: Sequence[Sequence[Partial]]) -> memoryview:
    """Returns the results of all rows, one after the other: of each `out`, then `lse`."""
    parts = [tensor.reshape(-1) for row in results for each in row for tensor in (each.out, each.lse)]
    data = bytearray(sum(part.nbytes for part in parts))
    if data:
        torch.cat(parts, out=torch.frombuffer(data, dtype=torch.float32))
    return memoryview(data)


def pack_query(query: Tensor) -> tuple[str, memoryview]:
    """Returns the dtype in which a query travels, and its bytes. It loses nothing: what is wider than float32 is made
    float32, as attention does."""
    name = str(query.dtype).removeprefix("torch.")
    if name not in DTYPES:
        name, query = "float32", query.float()
    data = bytearray(query.nbytes)
    if data:
        torch.frombuffer(data, dtype=DTYPES[name]).copy_(query.detach().reshape(-1))
    return name, memoryview(data)


def unpack_results(
    data: memoryview, rows: Sequence[tuple[int, Sequence[Subtree]]], heads: int, value_dim: int
) -> list[list[Partial]]:
    """Returns the results of rows of so many query tokens and with these subtrees. Raises ProtocolError if `data`
    has not exactly their bytes."""
    nbytes = sum(len(subtrees) * result_bytes(tokens, heads, value_dim) for tokens, subtrees in rows)
    if data.nbytes != nbytes:
        raise ProtocolError(f"{data.nbytes} bytes of results came; {nbytes} were asked for")
    floats = torch.frombuffer(data, dtype=torch.float32) if data.nbytes else torch.zeros(0)
    at, found = 0, []
    for tokens, subtrees in rows:
        mine = []
        for subtree in subtrees:
            out, at = floats[at : at + tokens * heads * value_dim], at + tokens * heads * value_dim
            lse, at = floats[at : at + tokens * heads], at + tokens * heads
            mine.append(Partial(subtree, out.view(tokens, heads, value_dim), lse.view(tokens, heads)))
        found.append(mine)
    return found


# ------------------------------------------------------------------------------------------- helpers


def _layout(request: AttendRequest, one: SpanPages) -> PageLayout:
    group, part = one.spec.groups[one.group], one.part
    return PageLayout(group, one.spec.block_tokens, part.layers, part.heads, request.latent_values or None)


def _row(row: AttendRow, layout: PageLayout, spans: Mapping[SpanId, SpanPages], view: View) -> SubtreeRow:
    whole = [_page_span(spans[span], layout, view) for span in row.spans]
    mine = []
    for span, after in itertools.zip_longest(whole, whole[1:]):
        if after is not None and span.position < after.position < span.stop:
            span = PageSpan(span.pages, span.position, after.position - span.position)
        mine.append(span)
    if any(span.stop > after.position for span, after in itertools.pairwise(mine)):
        raise CallerError("the spans of a row are out of order")
    subtrees = [Subtree(level, index) for level, index in row.subtrees]
    if not all(ROOT.contains(subtree) for subtree in subtrees):
        raise CallerError("a subtree is outside the tree")
    return SubtreeRow(range(row.position, row.position + row.tokens), mine, subtrees)


def _page_span(pages: SpanPages, layout: PageLayout, view: View) -> PageSpan:
    known = _KNOWN.get(pages)
    if known is None or known.pages.layout != layout:
        slots, block_tokens = pages.slots, layout.block_tokens
        addresses = PageAddresses.from_buffers(layout, [view(slot) for slot in slots], [slot.codec for slot in slots])
        known = _KNOWN[pages] = PageSpan(addresses, pages.depth * block_tokens, len(slots) * block_tokens)
    return known


def _is_sound(pages: SpanPages, slot: PageSlot, layer: int, data: memoryview) -> bool:
    nbytes = slot.nbytes // slot.key.part.layers
    identity = checksum.identity(pages.namespace, slot.key, slot.codec)
    sums = (checksum.unpack_sums(slot.sums)[layer],)
    return checksum.first_mismatch(identity, layer, sums, data[layer * nbytes : (layer + 1) * nbytes]) is None


def _check_bounds(request: AttendRequest, layout: PageLayout, rows: Sequence[SubtreeRow]) -> None:
    nbytes = work = 0
    channels = layout.key.dim + layout.value_dim
    for row in rows:
        tokens = len(row.positions)
        nbytes += len(row.subtrees) * result_bytes(tokens, request.heads, layout.value_dim)
        before = cuts_before(row.spans)
        for subtree in row.subtrees:
            first = bisect_right(row.spans, subtree.start, key=attrgetter("stop"))
            stop = bisect_left(row.spans, subtree.stop, key=attrgetter("position"))
            cuts = max(0, before[max(first, stop)] - before[first])
            work += attend_work(tokens, max(cuts, stop > first), heads=request.heads, channels=channels)
    if nbytes > limits.ATTEND_BYTES:
        raise LimitError(f"the results take {nbytes} bytes, more than {limits.ATTEND_BYTES}; ask for fewer at a time")
    if work > limits.ATTEND_WORK:
        raise LimitError(f"this takes {work} multiplications, more than {limits.ATTEND_WORK}; ask for fewer at a time")
