"""The project's long description: README.md with absolute links, since a package index has none of the files beside it.

pyproject.toml names it as a provider of scikit-build-core's dynamic metadata, so it runs wherever the project is built
and needs nothing installed. Links lead to the files of the release's tag; those of a development version to the main
branch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r'(?P<before>\]\(|(?:href|src|srcset)=")(?P<path>(?!\#|[a-z]+:)[^)\s"]+)')
_PICTURE = re.compile(r"\.(svg|png|jpe?g|gif|webp)$")


def with_absolute_links(text: str, repository: str, version: str) -> str:
    """Returns Markdown whose links and pictures are addresses of the repository. `version` chooses the tag, such as
    v1.2.0. Anchors of the page itself, addresses and code blocks stay as they are."""
    ref = "main" if "dev" in version else f"v{version}"

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if _PICTURE.search(match["path"]) else "blob"
        return f"{match['before']}{repository}/{kind}/{ref}/{match['path'].removeprefix('./')}"

    parts = _FENCE.split(text)  # code blocks are the odd ones
    return "".join(part if number % 2 else _TARGET.sub(absolute, part) for number, part in enumerate(parts))


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the field `readme`; called by scikit-build-core. `settings` has `input`, a Markdown file."""
    text = Path(settings["input"]).read_text(encoding="utf-8")
    absolute = with_absolute_links(text, project["urls"]["Source"], project["version"])
    return {"readme": {"content-type": "text/markdown", "text": absolute}}
