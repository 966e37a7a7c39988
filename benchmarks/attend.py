"""Measures attention over pages, beside what the machine can read and torch's flash kernel.

    .venv/bin/python -m benchmarks.attend --turns 21

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
from dataclasses import dataclass

import torch

from benchmarks.attention import baselines
from benchmarks.attention.baselines import DTYPES, Step
from benchmarks.attention.contexts import model
from benchmarks.codec.coded import CodedPages
from benchmarks.rounds import paired
from kvcluster.attention import PageAddresses, PageLayout, PageSpan, QueryRow, partial
from kvcluster.core.codecs import Codec
from kvcluster.memory import native

MODEL = model("llama-3-8b")
BLOCK, NO_RATIO = MODEL.spec.block_tokens, "-"


@dataclass
class Case:
    """`sets`: the instruction sets that our kernel uses. `beside`: the name of the case that it is compared with, ""
    for the floor, or NO_RATIO."""

    name: str
    step: Step
    sets: str = ""
    beside: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} ({self.sets})" if self.sets else self.name


class CodedContext:
    """The KV of a context in pages of one codec, each page at its own place."""

    def __init__(self, values: list[torch.Tensor], which: Codec) -> None:
        group, tokens = MODEL.spec.groups[0], len(values[0])
        self.layout = PageLayout(group, BLOCK, 1, MODEL.heads)
        padded = [torch.nn.functional.pad(plane, (0, 0, 0, 0, 0, -tokens % BLOCK)) for plane in values]
        raw = torch.stack([plane.view(-1, BLOCK, MODEL.heads, MODEL.dim) for plane in padded], 1)
        coded = CodedPages(which, group, BLOCK, memoryview(raw.view(-1).view(torch.uint8).numpy()))
        coded.encode()
        pages = [torch.frombuffer(page, dtype=torch.uint8) for page in coded.coded_pages()]
        random.shuffle(pages)
        self.span = PageSpan(PageAddresses.from_buffers(self.layout, pages, which), 0, tokens)

    def attend(self, positions: range, rows: int = 1, threads: int = 1) -> Step:
        """Returns the attention of rows that share these pages."""
        query = MODEL.query(rows * len(positions))
        return lambda: partial(query, [QueryRow(positions, [self.span])] * rows, self.layout, 0, threads=threads)


def cases_of(options: argparse.Namespace) -> list[Case]:
    values = MODEL.values(options.tokens)
    contexts = {which: CodedContext(values, which) for which in Codec}
    raw, last = contexts[Codec.RAW], range(options.tokens - 1, options.tokens)
    cases = [Case(f"flash {dtype}, decode", baselines.flash(MODEL, values, getattr(torch, dtype))) for dtype in DTYPES]
    for name, which in itertools.product(options.sets, Codec):
        cases.append(Case(f"{which.name.lower()}, decode", contexts[which].attend(last), name))
    best, ends = options.sets[-1], range(options.tokens - options.prefill, options.tokens)
    alone = f"raw, decode ({best})"
    cases.append(Case("raw, decode, two threads", raw.attend(last, threads=2), best, alone))
    cases.append(Case("raw, decode, 8 forks", raw.attend(last, rows=8), best, alone))
    for dtype in DTYPES:
        flash = baselines.flash_prefill(MODEL, values, options.prefill, getattr(torch, dtype))
        cases.append(Case(f"flash {dtype}, prefill", flash, beside=NO_RATIO))
    return cases + [Case("raw, prefill", raw.attend(ends), name, "flash float32, prefill") for name in options.sets]


def main() -> None:
    """Prints one row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=11, help="number of turns (default 11)")
    parser.add_argument("--tokens", type=int, default=8_192, help="tokens of context (default 8192)")
    parser.add_argument("--prefill", type=int, default=512, help="query tokens of prefill (default 512)")
    parser.add_argument("--sets", nargs="+", default=["avx2", "avx512"], help="instruction sets, the fastest last")
    options = parser.parse_args()
    kernels = native.KERNELS
    assert kernels is not None, "there is no native core"
    torch.set_num_threads(1)
    nbytes = options.tokens * MODEL.token_bytes
    cases = {case.title: case for case in cases_of(options)}
    took = paired(
        baselines.read(nbytes),
        {title: case.step for title, case in cases.items()},
        options.turns,
        before=lambda title: kernels.choose(cases[title].sets or options.sets[-1]),
    )
    floor = statistics.median(of_floor for pairs in took.values() for of_floor, _ in pairs)
    print(f"{options.turns} turns; one thread reads {nbytes / floor / 1e9:.1f} GB/s")
    for title, case in cases.items():
        own = [seconds for _, seconds in took[title]]
        if case.beside == NO_RATIO:
            note = ""
        elif case.beside:
            others = (seconds for _, seconds in took[case.beside])
            ratio = statistics.median(mine / theirs for mine, theirs in zip(own, others, strict=True))
            note = f"{ratio:.2f} times {case.beside}"
        else:
            note = f"{statistics.median(of_floor / mine for of_floor, mine in took[title]):.2f} of the floor"
        print(f"{title:36} {statistics.median(own) * 1e3:8.2f} ms  {note}", flush=True)


if __name__ == "__main__":
    main()
