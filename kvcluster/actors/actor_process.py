"""What every actor of a cluster does in its process before it serves: it sets limits for itself, and it waits for what
a restarted actor cannot get yet, and says why. Ray never tries again with an actor whose constructor has raised.
"""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import ray

from kvcluster.errors import ConfigError

log = logging.getLogger(__name__)


_SWITCH_S = 0.0005
"""How long a thread runs while others wait for the interpreter, a tenth of Python's own choice. A call takes the
interpreter some six times, and each time waits for a thread that decodes another's long message."""


def set_limits() -> None:
    """Has threads take turns quickly, takes all descriptors that the process may have, and leaves no core file: it
    would hold the credential of the cluster and pages of all tenants."""
    sys.setswitchinterval(_SWITCH_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of descriptors cannot be raised: %s", error)


T = TypeVar("T")
_FIRST_S = 0.1
_LONGEST_S = 10.0


def restarted() -> bool:
    """Whether Ray has restarted this actor. The first start of an actor fails at once, and its caller gets the
    error."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def waited_for(
    make: Callable[[], T],
    *,
    patient: bool,
    pause: Callable[[float], None] = time.sleep,
    failed: Callable[[], None] = lambda: None,
) -> T:
    """Returns what `make` returns. If `patient`, it is called again after each ConfigError, with longer and longer
    pauses between, and `failed` is called before each; otherwise the error is raised."""
    pause_s = _FIRST_S
    while True:
        try:
            return make()
        except ConfigError as error:
            if not patient:
                raise
            failed()
            log.error("this actor has restarted and cannot serve yet: %s. Next try in %g s", error, pause_s)
        pause(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
