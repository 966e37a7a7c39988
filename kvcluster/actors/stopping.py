"""Stopping shards so that they keep what they hold: each saves its hottest pages to its disk tier before it ends,
within `shard.stop_ms`, and the next incarnation finds them there (core/shard/shutdown_saver.py).

A shard saves when its actor's `save` is called, or when its process gets SIGTERM. Ray's loop lets Python
call the handler; but Ray itself sends no SIGTERM: a raylet that ends kills its workers at once. So the shards must be
stopped before Ray is.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from kvcluster.config import Config, ShardConfig
from kvcluster.errors import KVClusterError
from kvcluster.transport.thread_start import start_thread

log = logging.getLogger(__name__)

_MARGIN_S = 10.0
"""How long after its deadline a shard may take to report that it has saved, or to end."""

_POLL_S = 0.05
_TITLE = b"ray::ShardActor"


def save_ms(shard: ShardConfig) -> int:
    """Returns for how long shards of this configuration save when they are stopped; 0 if they do not."""
    return shard.stop_ms if shard.disk_bytes else 0


def longest_save_ms(config: Config) -> int:
    """Returns for how long the shards of any group save when they are stopped."""
    return max(save_ms(group.shard) for group in config.shard_groups.values())


def save_shards(shards: Sequence[Any], config: ShardConfig) -> None:
    """Has these actors save their pages, all at the same time, and waits until they have. Does nothing if this
    configuration saves nothing; a shard that does not answer is only logged."""
    stop_ms = save_ms(config)
    if not stop_ms:
        return
    asked = [shard.save.remote() for shard in shards]
    done, late = ray.wait(asked, num_returns=len(asked), timeout=stop_ms / 1_000 + _MARGIN_S)
    for answer in done:
        try:
            ray.get(answer)
        except Exception as error:
            log.warning("a shard has not saved its pages: %s", error)
    if late:
        log.warning("%d shards have not said in time that their pages are saved", len(late))


def end_shards(pids: Iterable[int], stop_ms: int) -> None:
    """Sends SIGTERM to the shards among these processes, so that they save their pages and end, and waits until they
    have ended. Does nothing if `stop_ms` is 0."""
    shards = [pid for pid in pids if stop_ms and is_shard(pid)]
    for pid in shards:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    give_up = time.monotonic() + stop_ms / 1_000 + _MARGIN_S
    while any(map(is_shard, shards)) and time.monotonic() < give_up:
        time.sleep(_POLL_S)


def on_sigterm(stop: Callable[[], object]) -> None:
    """Has SIGTERM call `stop` in a thread of its own, or in the main thread where there is no room for one; and once:
    later ones change nothing. Must be called in the main thread; elsewhere Python takes no handler, and SIGTERM does
    what it did before."""
    if threading.current_thread() is not threading.main_thread():
        log.warning("this actor does not run in its process's main thread: SIGTERM ends it without saving its pages")
        return
    thread = threading.Thread(target=stop, name="kvcluster-stop", daemon=True)
    called = False

    def handle(number: int, frame: object) -> None:
        nonlocal called
        if called:
            return
        called = True
        try:
            start_thread(thread)
        except KVClusterError as error:
            log.warning("the main thread saves the pages of this shard: %s", error)
            stop()

    signal.signal(signal.SIGTERM, handle)


def is_shard(pid: int) -> bool:
    """Whether that process runs and is the actor of a shard: Ray names its workers after what they run."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_TITLE)
    except OSError:
        return False
