"""`explain`: for every block of a prompt, where it is or why it cannot be loaded.

The coordinator knows whether a hash is cached, or why not. It cannot know that the same tokens are cached under another
spec, since every hash is rooted in its namespace. So this module hashes the tokens again under each other spec of the
same tenant, and names the fields that differ. Specs of other tenants are never revealed.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import Need, Siblings, SiblingSpecs
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec, differing_fields
from kvcluster.errors import KVClusterError
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.layouts import check_hashes
from kvcluster.transfers.long_chains import Prompt, fates_of
from kvcluster.transfers.transfer import BlockExplanation
from kvcluster.transport.base import Deadline, Unavailable


def explain(
    control: CoordinatorClient, spec: KVSpec, need: Need, prompt: Prompt, deadline: Deadline
) -> list[BlockExplanation]:
    """Returns one entry per full block, and one for tokens at the end that fill no block. If the coordinator does not
    answer, every full block has that miss. Raises LimitError if there are more than limits.BLOCKS_PER_PROMPT blocks."""
    full, rest = divmod(len(prompt.token_ids), spec.block_tokens)
    try:
        hashes = prompt.hashes(control.namespace(spec, deadline), spec.block_tokens)
        check_hashes(hashes)
        out = _ask(control, spec, need, hashes, deadline)
        if any(e.reason is MissReason.NEVER_SEEN for e in out):
            out = _name_siblings(control, spec, out, prompt, deadline)
    except Unavailable as trouble:
        out = [_missed(block, trouble.miss) for block in range(full)]
    if rest:
        detail = f"{rest} tokens fill no block of {spec.block_tokens}"
        out.append(_missed(full, Miss(MissReason.BELOW_BLOCK, detail)))
    return out


def _ask(
    control: CoordinatorClient, spec: KVSpec, need: Need, hashes: Sequence[BlockHash], deadline: Deadline
) -> list[BlockExplanation]:
    out: list[BlockExplanation] = []
    for fate in fates_of(control, spec, need, hashes, deadline):
        for _ in range(fate.count):
            if fate.miss is not None or fate.plan is None:
                out.append(_missed(len(out), fate.miss or Miss(MissReason.NEVER_SEEN)))
                continue
            sources = [source for of_group in fate.plan for source in of_group or ()]
            tier = max((source.tier for source in sources), default=None)
            shards = dict.fromkeys(source.shard.shard for source in sources)
            out.append(
                BlockExplanation(len(out), True, tier.name.lower() if tier is not None else "", ", ".join(shards))
            )
    return out


def _name_siblings(
    control: CoordinatorClient, spec: KVSpec, out: list[BlockExplanation], prompt: Prompt, deadline: Deadline
) -> list[BlockExplanation]:
    """Replaces "never seen" by "cached under another spec" for blocks that are; names the most similar spec."""
    try:
        siblings = control.ask(SiblingSpecs, spec, Siblings(), deadline).specs
        for sibling in siblings:
            cached = _cached_tokens(control, sibling, prompt, deadline)
            named = Miss(MissReason.NAMESPACE, ", ".join(differing_fields(spec, sibling)))
            out = _replace_never_seen(out, named, cached // spec.block_tokens)
    except Unavailable as trouble:  # keeps the explanations that are already known
        unknown = Miss(MissReason.NEVER_SEEN, f"other specs not compared: {trouble.miss}")
        out = _replace_never_seen(out, unknown, len(out))
    return out


def _replace_never_seen(out: list[BlockExplanation], miss: Miss, blocks: int) -> list[BlockExplanation]:
    """Returns the explanations with `miss` in place of "never seen" among the first `blocks`."""
    return [_missed(e.block, miss) if e.reason is MissReason.NEVER_SEEN and e.block < blocks else e for e in out]


def _cached_tokens(control: CoordinatorClient, sibling: KVSpec, prompt: Prompt, deadline: Deadline) -> int:
    """Returns the number of leading tokens that are cached under `sibling`, as any part and with any loss."""
    try:
        hashes = prompt.hashes(control.namespace(sibling, deadline), sibling.block_tokens)[: limits.BLOCKS_PER_PROMPT]
        need = Need(sibling.whole_parts(), Loss.Q4)
        blocks = 0
        for fate in fates_of(control, sibling, need, hashes, deadline):
            # For this question, blocks of which only a part is stored count as cached.
            if fate.plan is None and (fate.miss is None or fate.miss.reason is not MissReason.PART):
                break
            blocks += fate.count
    except Unavailable:
        raise
    except KVClusterError:
        return 0
    return blocks * sibling.block_tokens


def _missed(block: int, miss: Miss) -> BlockExplanation:
    return BlockExplanation(block, False, reason=miss.reason, detail=miss.detail)
