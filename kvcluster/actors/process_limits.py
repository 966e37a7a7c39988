"""Limits that an actor sets for its own process."""

from __future__ import annotations

import logging
import resource
import sys

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
