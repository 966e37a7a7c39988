"""Measures attention over pages, beside what the machine can read and torch's flash kernel.

    .venv/bin/python benchmarks/attend.py --turns 21

Every turn runs each case once, in random order, after the CPU caches were filled with other data. Of decode, one query
token over `--tokens` tokens of KV in pages of 16 tokens, 32 query heads on 8 heads of 128 channels, bfloat16, it prints
milliseconds and the median ratio to the floor: the time in which one thread reads as many raw bytes, taken right before
the case. Codecs count the bytes that they stand for. "flash" is torch's kernel over the same keys and values, gathered
into tensors; in float32 it has our precision, in bfloat16 it has not. Prefill is `--prefill` query tokens at the end of
the context.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcluster.attention import PageAddresses, PageLayout, PageSpan, QueryRow, partial
from kvcluster.cli.bench.rounds import sweep_caches
from kvcluster.core.codecs import Codec
from kvcluster.core.spec import Group, Plane
from kvcluster.pages import codec, native

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
Work = Callable[[], object]
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass
class Case:
    """`beside`: the name of the case that it is compared with, or "" for the floor."""

    name: str
    work: Work
    sets: str
    beside: str = ""
    threads: int = 1


class Context:
    """Random KV of so many tokens in pages of one codec, each page at its own place, and as tensors."""

    def __init__(self, tokens: int, which: Codec) -> None:
        planes = tuple(Plane(name, KV_HEADS, DIM, "bfloat16") for name in "kv")
        self.layout, self.tokens = PageLayout(Group((0,), planes), BLOCK, 1, KV_HEADS), tokens
        values = torch.randn(-(-tokens // BLOCK), 2, BLOCK, KV_HEADS, DIM).bfloat16()
        nbytes, pages = self.layout.layer_bytes(which), []
        memory = torch.empty(len(values) * nbytes, dtype=torch.uint8)
        coder = codec.coder(which, self.layout.group, block_tokens=BLOCK, heads=KV_HEADS)
        for number, page in enumerate(values):
            into = memory[number * nbytes : (number + 1) * nbytes]
            pages.append(into)
            assert coder.encode(memoryview(page.view(-1).view(torch.uint8).numpy()), memoryview(into.numpy()), 1)
        random.shuffle(pages)
        self.span = PageSpan(PageAddresses.from_buffers(self.layout, pages, which), 0, tokens)
        both = values.permute(1, 3, 0, 2, 4).reshape(2, 1, KV_HEADS, -1, DIM)[:, :, :, :tokens]
        self.key, self.value = both[0].contiguous(), both[1].contiguous()


def attend(context: Context, positions: range, rows: int = 1, threads: int = 1) -> Work:
    """Returns the work of rows that share the context's span."""
    query = torch.randn(rows * len(positions), HEADS, DIM).bfloat16()
    return lambda: partial(query, [QueryRow(positions, [context.span])] * rows, context.layout, 0, threads=threads)


def flash_decode(context: Context, dtype: torch.dtype) -> Work:
    """Returns torch's kernel with the query heads of a group folded into the query's length."""
    query = torch.randn(1, KV_HEADS, HEADS // KV_HEADS, DIM).to(dtype)
    key, value = context.key.to(dtype), context.value.to(dtype)
    return lambda: flash(query, key, value)


def flash_prefill(context: Context, tokens: int, dtype: torch.dtype) -> Work:
    """Returns torch's kernel under a mask that hides later positions."""
    query = torch.randn(1, HEADS, tokens, DIM).to(dtype)
    key, value = (each.to(dtype).repeat_interleave(HEADS // KV_HEADS, 1) for each in (context.key, context.value))
    seen = torch.arange(context.tokens)[None] <= torch.arange(context.tokens - tokens, context.tokens)[:, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).to(dtype)[None, None]
    return lambda: flash(query, key, value, 0.0, False, attn_mask=mask)


def floor(nbytes: int) -> Work:
    """Returns a read of so many bytes by one thread."""
    words = torch.zeros(nbytes // 8, dtype=torch.int64)
    return words.sum


def cases_of(options: argparse.Namespace) -> list[Case]:
    contexts = {which: Context(options.tokens, which) for which in Codec}
    raw, last = contexts[Codec.RAW], range(options.tokens - 1, options.tokens)
    cases = [
        Case(f"flash {dtype}, decode", flash_decode(raw, getattr(torch, dtype)), "")
        for dtype in ("bfloat16", "float32")
    ]
    for name, which in itertools.product(options.sets, Codec):
        cases.append(Case(f"{which.name.lower()}, decode", attend(contexts[which], last), name))
    best, ends = options.sets[-1], range(options.tokens - options.prefill, options.tokens)
    alone = f"raw, decode ({best})"
    cases.append(Case("raw, decode, two threads", attend(raw, last, threads=2), best, alone, 2))
    cases.append(Case("raw, decode, 8 forks", attend(raw, last, rows=8), best, alone))
    for dtype in ("bfloat16", "float32"):
        cases.append(
            Case(f"flash {dtype}, prefill", flash_prefill(raw, options.prefill, getattr(torch, dtype)), "", "-")
        )
    for name in options.sets:
        cases.append(Case("raw, prefill", attend(raw, ends), name, "flash float32, prefill"))
    return cases


def seconds(case: Case, warm: bool) -> float:
    if case.sets:
        native.KERNELS.choose(case.sets)  # type: ignore[union-attr]
    if not warm:
        sweep_caches()
    began = time.perf_counter()
    case.work()
    return time.perf_counter() - began


def main() -> None:
    """Prints one row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=11, help="number of turns (default 11)")
    parser.add_argument("--tokens", type=int, default=8_192, help="tokens of context (default 8192)")
    parser.add_argument("--prefill", type=int, default=512, help="query tokens of prefill (default 512)")
    parser.add_argument("--sets", nargs="+", default=["avx2", "avx512"], help="instruction sets, the fastest last")
    parser.add_argument("--warm", action="store_true", help="leave the CPU caches as the case before left them")
    options = parser.parse_args()
    assert native.KERNELS is not None, "there is no native core"
    torch.set_num_threads(1)
    nbytes = options.tokens * KV_HEADS * DIM * 2 * 2
    cases = cases_of(options)
    names = {case.name + (f" ({case.sets})" if case.sets else ""): case for case in cases}
    base = Case("floor", floor(nbytes), "")
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(options.turns + 1):
        for name in random.sample(list(names), len(names)):
            both = seconds(base, options.warm), seconds(names[name], options.warm)
            if turn:  # the first warms up
                took[name].append(both)
    floors = [before for pairs in took.values() for before, _ in pairs]
    print(f"{options.turns} turns; one thread reads {nbytes / statistics.median(floors) / 1e9:.1f} GB/s")
    for name, case in names.items():
        own = statistics.median(seconds for _, seconds in took[name])
        if case.beside and case.beside != "-":
            other = [seconds for _, seconds in took[case.beside]]
            ratio = statistics.median(mine / theirs for (_, mine), theirs in zip(took[name], other, strict=True))
            note = f"{ratio:.2f} times {case.beside}"
        else:
            note = "" if case.beside else f"{statistics.median(a / b for a, b in took[name]):.2f} of the floor"
        print(f"{name:36} {own * 1e3:8.2f} ms  {note}", flush=True)


if __name__ == "__main__":
    main()
