"""What the checks of one run have looked at: values file x objects x checks, for the table at its end."""

from __future__ import annotations

_objects: dict[str, int] = {}
_checks: dict[str, set[str]] = {}


def note(name: str, objects: int, check: str) -> None:
    """Notes that this check of this values file has passed."""
    _objects[name] = objects
    _checks.setdefault(name, set()).add(check)


def lines() -> list[str]:
    """Returns the table; [] if nothing was checked."""
    if not _objects:
        return []
    rows = [f"{name:<14} {_objects[name]:>7} {len(_checks[name]):>6}" for name in sorted(_objects)]
    return [f"{'values file':<14} {'objects':>7} {'checks':>6}", *rows, f"{'in all':<14} {sum(_objects.values()):>7}"]
