"""Commands that run another under a wrong clock. The monotonic clock stays right, as it does on a real host."""

from __future__ import annotations

from pathlib import Path

_LATE = "read = time.time_ns\ntime.time_ns = lambda: read() - 3_600 * 10**9\n"

# libfaketime 0.9.10 refuses Python's sleeps if it leaves the monotonic clock alone, and otherwise waits with a timeout
# never end.
_SLEEPS = "import threading\ntime.sleep = lambda seconds: threading.Event().wait(seconds) and None\n"


def an_hour_late(folder: Path) -> list[str]:
    """Runs a command whose Python processes read the clock an hour late. Needs no `faketime`."""
    return _patched(folder, _LATE)


def an_hour_late_by_faketime(folder: Path) -> list[str]:
    """Runs a command whose processes, Ray's own as well, read the clock an hour late."""
    return [*_patched(folder, _SLEEPS), "faketime", "--exclude-monotonic", "-f", "-1h"]


def _patched(folder: Path, code: str) -> list[str]:
    """Runs a command whose Python processes run this code when they start."""
    late = folder / "late"
    late.mkdir()
    (late / "sitecustomize.py").write_text(f"import time\n{code}", encoding="ascii")
    return ["env", f"PYTHONPATH={late}"]
