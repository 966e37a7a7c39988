"""Attention over KV pages where they lie: partial results with their log-sum-exp, and the merge (docs/attention.md)."""

from kvcluster.attention.call import QueryRow
from kvcluster.attention.page_span import PageAddresses, PageLayout, PageSpan
from kvcluster.attention.partial import Partial, merge, partial
from kvcluster.attention.tree import CUT_TOKENS, ROOT, Subtree, subtrees

__all__ = [
    "CUT_TOKENS",
    "ROOT",
    "PageAddresses",
    "PageLayout",
    "PageSpan",
    "Partial",
    "QueryRow",
    "Subtree",
    "merge",
    "partial",
    "subtrees",
]
