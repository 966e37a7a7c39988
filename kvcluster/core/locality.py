"""Where a process runs, as others are told: two facts that the name of a host does not say.

*Same node*: both run on one machine, so that bytes between them cross no network. *May share memory*: one can connect
to the other's local socket, over which memory is handed, which needs the same network namespace as well; two containers
of one machine are on the same node and may not. The text is `NAME@MACHINE/NAMESPACE`; the name is for people.
"""

from __future__ import annotations


def host_text(name: str, machine: str, namespace: str) -> str:
    """Returns the text for a process on this machine and in this network namespace."""
    return f"{name}@{machine}/{namespace}"


def name_of(host: str) -> str:
    """Returns the name in a text, such as Ray knows the host by."""
    return host.partition("@")[0]


def same_node(one: str, other: str) -> bool:
    """Whether both texts are of processes on one machine. An empty text is nowhere."""
    return bool(one) and _machine(one) == _machine(other)


def may_share_memory(one: str, other: str) -> bool:
    """Whether both texts are of processes that can hand one another memory."""
    return bool(one) and _place(one) == _place(other)


def _place(text: str) -> str:
    """Returns machine and namespace; the whole of a text that is only a name."""
    return text.partition("@")[2] or text


def _machine(text: str) -> str:
    return _place(text).partition("/")[0]
