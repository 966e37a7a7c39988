"""Sequences: the third level of the client. See sequence.py, which users see; machine.py decides, runner.py acts."""

from kvcluster.client.sequences.policy import WindowPolicy
from kvcluster.client.sequences.sequence import Sequence

__all__ = ["Sequence", "WindowPolicy"]
