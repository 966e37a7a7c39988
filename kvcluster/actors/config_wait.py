"""Waiting until the head runs the configuration that a joining node was given.

Where files reach hosts at different times, such as a ConfigMap's the pods that mount it, a node that starts with a
changed configuration may find a head that has not read it yet. Its shards would start with the settings of before.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

from kvcluster.config import Config, as_values

_LOOK_S = 1.0


def wait_for_config(
    config: Config,
    published: Callable[[], str | None],
    wait_s: float,
    say: Callable[[str], object],
    stop: threading.Event,
) -> bool:
    """Waits until `published` returns this configuration as JSON, for `wait_s` at most or until `stop` is set, and
    returns whether it has. `published` may raise, as where no head answers: then it is asked again."""
    wanted, give_up, waits = as_values(config), time.monotonic() + wait_s, False
    while not stop.is_set():
        try:
            text = published()
        except Exception:  # whatever Ray's client raises
            text = None
        if text is not None and json.loads(text) == wanted:
            return True
        if time.monotonic() >= give_up:
            break
        if not waits:
            say(f"waiting until the head runs this configuration, for {wait_s:g} s at most")
            waits = True
        stop.wait(_LOOK_S)
    if waits:
        say("the head runs another configuration; joining all the same, and shards start with what the head has")
    return False
