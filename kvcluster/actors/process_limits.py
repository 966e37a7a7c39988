"""Limits of the operating system that an actor sets for its own process."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)


def set_limits() -> None:
    """Takes all descriptors that the process may have, and leaves no core file: it would hold the credential of the
    cluster and pages of all tenants."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of descriptors cannot be raised: %s", error)
