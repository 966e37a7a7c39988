"""The recorded blocks that directly follow a block: none, one or many. Most have one, and then it is one reference."""

from __future__ import annotations

from collections.abc import Iterable

from kvcluster.core.ids import BlockHash

Followers = BlockHash | dict[BlockHash, None] | None


def with_follower(followers: Followers, block: BlockHash) -> Followers:
    """Returns these followers with one more."""
    if followers is None:
        return block
    if isinstance(followers, dict):
        followers[block] = None
        return followers
    return {followers: None, block: None}


def without_follower(followers: Followers, block: BlockHash) -> Followers:
    """Returns these followers without one of them."""
    if isinstance(followers, dict):
        del followers[block]
        return followers if len(followers) > 1 else next(iter(followers))
    assert followers == block, "a block that followed was not noted"
    return None


def each_follower(followers: Followers) -> Iterable[BlockHash]:
    """Returns the followers, in the order in which they came."""
    if isinstance(followers, dict):
        return followers
    return () if followers is None else (followers,)
