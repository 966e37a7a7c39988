"""What shipping has cost a batch of sequences: the seconds that it took longer than attending here would have."""

from __future__ import annotations


class ShippingAccount:
    """Attention adds to it after each call that shipped; a planner spends from it when it decides to fetch. Never
    negative."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Adds what one call took longer; negative if shipping was faster."""
        self.seconds = max(0.0, self.seconds + seconds)

    def spend(self, seconds: float) -> None:
        """Takes seconds away, as far as there are any."""
        self.seconds = max(0.0, self.seconds - seconds)
