"""A parser as the fuzzer sees it: its input, valid examples to begin from, and the contract that it must keep.

Of the contract three things are known: which types of values valid inputs give, which errors the parser documents,
and, where there is an encoder, that what was read can be written, and is then read as the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fuzz.trees import Node, Tree


@dataclass(frozen=True)
class Parser:
    """One reader. `trees` makes its valid inputs; `write` is the encoder, None where there is none; `words` are what a
    reader of text listens to; `memory` is what it may take for an empty input."""

    name: str
    read: Callable[[bytes], object]
    trees: Callable[[], list[Tree]]
    raises: tuple[type[Exception], ...]
    write: Callable[[Any], bytes] | None = None
    words: Sequence[bytes] = ()
    memory: int = 128 * 1024


def trees(inputs: Sequence[bytes], dissect: Callable[[bytes], Node]) -> list[Tree]:
    """Each distinct input once."""
    return [Tree(dissect(data)) for data in dict.fromkeys(inputs)]
