"""The release of this code and the versions of the protocol that it speaks, where every layer may name them."""

__version__ = "0.3.0.dev0"

PROTOCOL_VERSION = 3
"""The newest version of the protocol that this release speaks. wire/versions.py says how two sides agree on one."""

OLDEST_VERSION = PROTOCOL_VERSION - 1
"""The oldest one: a cluster and its engines can be upgraded in any order, one release after the other."""


def docs_page(name: str) -> str:
    """Returns where a page of the documentation is read, since an installation has none: `docs_page("vllm.md")`."""
    return f"https://github.com/kvcluster/kvcluster/blob/main/docs/{name}"
