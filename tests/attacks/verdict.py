"""What an attack did to the honest tenant: its samples during the attack, beside those while the same CPU was burnt.

The bounds are those that docs/security.md states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

P99_RATIO = 3.0
HIT_POINTS = 2.0
LIMITED_P99_RATIO = 1.5
LIMITED_HIT_POINTS = 1.0
"""The bounds on what a tenant with quotas does to others."""
MEMORY_RATIO = 1.10
GROWTH_BYTES = 64 * 2**20

KINDS = ("load", "store", "probe")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of the honest tenant: `blocks` of the blocks `of` were loaded or stored. A probe is 1 of 1 if the
    process is alive."""

    at: float
    kind: str
    ms: float
    blocks: int
    of: int


@dataclass(slots=True)
class Outcome:
    """One attack. `done` and `refused` count its acts; `cores` is the CPU that it burnt, in cores; memory in bytes
    of all processes of the cluster, and `growth` of the one that grew the most, which is named."""

    name: str
    what: str
    seconds: float = 0.0
    done: int = 0
    refused: int = 0
    cores: float = 0.0
    attacked: list[Sample] = field(default_factory=list)
    control: list[Sample] = field(default_factory=list)
    memory: tuple[int, int, int] = (0, 0, 0)  # before, the most, afterwards
    growth: tuple[int, str] = (0, "")
    limited: bool = False

    def failures(self) -> list[str]:
        """Returns each bound that the attack broke, in words; none if it did nothing to the honest tenant."""
        found = []
        if not self.attacked or not self.control:
            return ["the honest tenant made no request"]
        if not self.done + self.refused:
            found.append("the attacker did nothing")
        ratio, points = (LIMITED_P99_RATIO, LIMITED_HIT_POINTS) if self.limited else (P99_RATIO, HIT_POINTS)
        p99, bound = percentile(self.attacked, 99), ratio * percentile(self.control, 99)
        if p99 > bound:
            found.append(f"p99 {p99:.1f} ms exceeds {bound:.1f} ms")
        for kind in KINDS:
            during, beside = rate(self.attacked, kind), rate(self.control, kind)
            if during < beside - points:
                found.append(f"done of what each {kind} wanted: {during:.1f} % beside {beside:.1f} %")
        before, _, after = self.memory
        if after > MEMORY_RATIO * before:
            found.append(f"memory {_mib(after)} MiB exceeds {MEMORY_RATIO:.2f} times {_mib(before)} MiB")
        grown, process = self.growth
        if grown > GROWTH_BYTES:
            found.append(f"growth of the {process} by {_mib(grown)} MiB exceeds {_mib(GROWTH_BYTES)} MiB")
        return found


def percentile(samples: Iterable[Sample], percent: float) -> float:
    """Returns this percentile of the milliseconds, by the nearest rank."""
    ordered = sorted(sample.ms for sample in samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def rate(samples: Iterable[Sample], kind: str) -> float:
    """Returns the percentage of wanted blocks that were loaded (or stored); 100 if none were wanted."""
    those = [sample for sample in samples if sample.kind == kind]
    of = sum(sample.of for sample in those)
    return 100.0 * sum(sample.blocks for sample in those) / of if of else 100.0


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns the outcomes as a table in Markdown, and a line for each bound that was broken."""
    rows = [
        "| attack | acts a second | refused | cores | p50 | p99 | ratio of p99 | longest | hits | stored | alive | MiB "
        "| a process grew by |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        p50, p99 = ([percentile(samples, percent) for samples in (each.attacked, each.control)] for percent in (50, 99))
        longest = " / ".join(f"{percentile(samples, 100):.0f}" for samples in (each.attacked, each.control))
        rates = " | ".join(f"{rate(each.attacked, kind):.1f} / {rate(each.control, kind):.1f} %" for kind in KINDS)
        grown, process = each.growth
        memory = " / ".join(map(_mib, each.memory))
        rows.append(
            f"| {each.what} | {each.done / each.seconds:,.1f} | {each.refused / each.seconds:,.1f} | {each.cores:.2f} "
            f"| {p50[0]:.1f} / {p50[1]:.1f} ms | {p99[0]:.1f} / {p99[1]:.1f} ms | {p99[0] / p99[1]:.2f} "
            f"| {longest} ms | {rates} | {memory} | {_mib(grown)} MiB: {process} |"
        )
    broken = [f"{each.name}: {failure}" for each in outcomes for failure in each.failures()]
    return "\n".join([*rows, "", *broken])


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f}"
