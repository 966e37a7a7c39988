"""Attention over KV pages where they lie: partial results with their log-sum-exp, and the merge (docs/attention.md)."""

from kvcluster.attention.call import QueryRow, Scoring
from kvcluster.attention.page_span import PageAddresses, PageLayout, PageSpan
from kvcluster.attention.partial import Partial, merge, partial, uses_fused
from kvcluster.attention.subtree_partials import SubtreeRow, merge_rows, subtree_partials
from kvcluster.core.position_tree import CUT_TOKENS, ROOT, Subtree, subtrees, subtrees_beside, subtrees_of

__all__ = [
    "CUT_TOKENS",
    "ROOT",
    "PageAddresses",
    "PageLayout",
    "PageSpan",
    "Partial",
    "QueryRow",
    "Scoring",
    "Subtree",
    "SubtreeRow",
    "merge",
    "merge_rows",
    "partial",
    "subtree_partials",
    "subtrees",
    "subtrees_beside",
    "subtrees_of",
    "uses_fused",
]
