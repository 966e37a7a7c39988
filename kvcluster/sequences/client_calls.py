"""Level 3 of the client: the calls that open sequences, and report how much they take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcluster.core import limits
from kvcluster.sequences.opener import SequenceOpener
from kvcluster.sequences.sequence import Sequence
from kvcluster.sequences.statistics import ResidentUse, ShippedCounts
from kvcluster.sequences.window_policy import WindowPolicy
from kvcluster.transfers.layouts import check_tokens
from kvcluster.transfers.long_chains import Prompt, TokenIds, as_prompt
from kvcluster.transport.base import Deadline
from kvcluster.transport.forks import OwnProcess


class SequenceCalls:
    """A part of Client, which has the sequences."""

    _process: OwnProcess
    _sequences: SequenceOpener

    if TYPE_CHECKING:

        def _call(self, deadline_ms: float | None) -> Deadline: ...

    def sequence(
        self,
        prompt: Prompt | TokenIds = (),
        *,
        max_tokens: int = limits.TOKENS_PER_SEQUENCE,
        drop_oldest: bool = False,
        policy: WindowPolicy | None = None,
        publish: bool = True,
        prefetch: bool = True,
        deadline_ms: float | None = None,
    ) -> Sequence:
        """Opens a sequence, which begins with the cached prefix of `prompt`: its `length` tokens need not be computed.
        Close it, or use `with`: until then it keeps its pages.

        Its KV is kept in the resident set (`ClientConfig.resident_bytes`), and leaves it for the cluster by `policy`.
        With `publish=False` it never leaves this process: nothing of it is stored or can be found, and what is encoded
        frees its raw page at once. Its forks are like it.

        It takes at most `max_tokens` tokens; with `drop_oldest` it takes more, and keeps that many: the oldest behind
        the policy's sinks are dropped, positions stay, and what is made from then on is its own. The prefix is loaded
        as far as there is room, or with `prefetch=False` when it is needed. It begins empty if the coordinator does not
        answer. Raises CallerError for a spec of several groups, or without torch; as `hashes`.
        """
        return self._sequences.open(
            as_prompt(prompt),
            check_tokens("max_tokens", max_tokens),
            policy or WindowPolicy(),
            self._call(deadline_ms),
            drop_oldest=drop_oldest,
            publish=publish,
            prefetch=prefetch,
            client=self,
        )

    def prewarm_resident(self, tokens: int, *, deadline_ms: float | None = None) -> None:
        """Has the operating system provide memory for `tokens` tokens of sequences now, so that no step waits for it.
        Raises as `sequence`; CallerError for more than the resident set holds; ResidentSetFull if encoded pages have
        taken the memory of some."""
        self._sequences.prewarm(check_tokens("tokens", tokens), self._call(deadline_ms))

    def shipped(self) -> ShippedCounts:
        """Returns what attention of this client's sequences has chosen, sent and received so far."""
        return self._sequences.shipped()

    def resident(self) -> ResidentUse:
        """Returns how large the resident set is, and what the open sequences of this client take of it."""
        self._process.check("client")
        return self._sequences.use()
