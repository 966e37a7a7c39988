"""Where a process runs, as others are told: two facts that the name of a host does not say.

*Same node*: both run on one machine, so that bytes between them cross no network. *May share memory*: one can connect
to the other's local socket, over which memory is handed, which needs the same network namespace as well; two containers
of one machine are on the same node and may not. The text is `NAME@MACHINE/NAMESPACE`; the name is for people.
"""

from __future__ import annotations

from collections.abc import Callable


def host_text(name: str, machine: str, namespace: str) -> str:
    """Returns the text for a process on this machine and in this network namespace."""
    return f"{name}@{machine}/{namespace}"


def name_of(host: str) -> str:
    """Returns the name in a text, such as Ray knows the host by."""
    return host.partition("@")[0]


def same_node(one: str, other: str) -> bool:
    """Whether both texts are of processes on one machine. An empty text is nowhere."""
    return bool(one) and _alike(one, other, lambda host: _place(host).partition("/")[0])


def may_share_memory(one: str, other: str) -> bool:
    """Whether both texts are of processes that can hand one another memory."""
    return bool(one) and _alike(one, other, _place)


def _alike(one: str, other: str, of: Callable[[str], str]) -> bool:
    """Whether both texts have the same part; the same name, if one is of a release that told its name alone."""
    if "@" in one and "@" in other:
        return of(one) == of(other)
    return name_of(one) == name_of(other)


def _place(host: str) -> str:
    """Returns machine and namespace."""
    return host.partition("@")[2]
