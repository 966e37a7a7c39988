"""The key of a page within a namespace."""

from __future__ import annotations

from typing import NamedTuple

from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash


class PageKey(NamedTuple):
    """A page: the bytes of one block for one group and part."""

    hash: BlockHash
    group: int
    part: Part
