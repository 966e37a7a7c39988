"""Runs scripts of operations, and shortens the one that fails."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from random import Random

from tests.fuzz.sequences import disturbing, growing, looking, misuse, sharing
from tests.fuzz.sequences.episode import Episode, Finding, Profile, Tally, World
from tests.fuzz.sequences.operations import OPERATIONS, Operation

MODULES = (growing, looking, sharing, misuse, disturbing)
"""They fill the table of operations."""

SCRIPT = 80
"""Operations of an episode."""

EPISODES_A_CLUSTER = 63
"""As many as one seed has in CI."""

SHRINKING_S = 40.0
LINES = 60
"""Lines of the log of an episode that are printed, from the end."""


def kind(error: BaseException) -> str:
    """Returns what two findings of one fault have in common: their type, and the words of their text."""
    words = re.sub(r"[^a-z ]+", "", str(error)[:400].lower()).split()
    return " ".join([type(error).__name__, *words[-5:]])


class Fuzz:
    """Makes the same scripts for the same seed. `without` are operations that are never drawn."""

    def __init__(self, seed: int, *, without: Sequence[str] = ()) -> None:
        self.seed = seed
        self.tally = Tally()
        self.done = 0
        self._names = [name for name in OPERATIONS if name not in without]
        self._weights = [OPERATIONS[name][0] for name in self._names]
        self._namespaces = count()
        self._world: World | None = None

    def script(self, number: int, most: int) -> tuple[Profile, list[Operation]]:
        rng = Random(f"{self.seed}/{number}")
        profile = Profile.drawn(rng)
        names = rng.choices(self._names, self._weights, k=min(most, SCRIPT))
        return profile, [Operation("open_one", rng.getrandbits(48))] + [
            Operation(name, rng.getrandbits(48)) for name in names[1:]
        ]

    def run(self, operations: int, first: int = 0) -> Tally:
        """Runs episodes from number `first` on. Raises Finding."""
        try:
            for number in count(first):
                if self.done >= operations:
                    return self.tally
                if (number - first) % EPISODES_A_CLUSTER == 0 or (self._world is not None and self._world.worn):
                    self._close()
                profile, script = self.script(number, operations - self.done)
                error, log = self._perform(profile, script, self.tally)
                if error is not None:
                    self._report(number, profile, script, error, log)
            raise AssertionError
        finally:
            self._close()

    def _perform(
        self, profile: Profile, script: Sequence[Operation], tally: Tally
    ) -> tuple[BaseException | None, list[str]]:
        """Returns what an episode raised, and its log."""
        if self._world is None:
            self._world = World()
        episode = Episode(self._world, profile, tally, f"sha256:{next(self._namespaces)}")
        try:
            for at in script:
                self.done += 1
                tally.events[f"operation {at.name}"] += 1
                OPERATIONS[at.name][1](episode, Random(at.seed))
                if not profile.racing:
                    episode.wait_for_stores()
                if episode.refused_in_a_row > 2:
                    sharing.close_one(episode, Random(at.seed))
                episode.count_events()
            episode.end(patient=not script[-1].seed % 16)
        except Exception as error:
            return error, episode.log
        finally:
            self._world.scant = 0
            with suppress(Exception):
                episode.close()
        return None, episode.log

    def _report(
        self, number: int, profile: Profile, script: list[Operation], error: BaseException, log: list[str]
    ) -> None:
        done = self.done
        script, error, log = self._shrunk(profile, script, error, log)
        lines = "\n".join(f"    {line[:300]}" for line in log[-LINES:])
        raise Finding(
            f"seed {self.seed}, episode {number}, operation {done:,}: {type(error).__name__}: {error!s:.2000}\n"
            f"  {profile}\n  shortened to {len(script)} operations, {len(log)} calls:\n{lines}\n"
            f"to find it again: python -m tests.fuzz.sequences --seed {self.seed} --first {number} "
            f"--operations {SCRIPT}"
        ) from error

    def _shrunk(
        self, profile: Profile, script: list[Operation], error: BaseException, log: list[str]
    ) -> tuple[list[Operation], BaseException, list[str]]:
        """Leaves out operations while what is left fails with an error of the same type."""
        until, step = time.monotonic() + SHRINKING_S, max(1, len(script) // 2)
        while True:
            at = 0
            while at < len(script):
                if time.monotonic() > until:
                    return script, error, log
                shorter = script[:at] + script[at + step :]
                again, its_log = self._perform(profile, shorter, Tally())
                if again is not None and kind(again) == kind(error):
                    script, error, log = shorter, again, its_log
                else:
                    at += step
            if step == 1:
                return script, error, log
            step = max(1, step // 2)

    def _close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None
