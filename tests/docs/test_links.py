"""Links of README and docs lead to a file and, with a `#`, to one of its headings; and every page can be found from the
README. (tools/tidy.py checks files for the rest of the repository.)"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from kvcluster.config import load
from kvcluster.core.quotas import parse_quotas
from tests.docs.snippets import PAGES, ROOT, Snippet, snippets_of, text_of

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors_of(text: str) -> set[str]:
    """Returns the anchors that GitHub makes of the headings of a page."""
    found = set[str]()
    for heading in re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    ):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().lower().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", [*PAGES, "SECURITY.md", "helm/kvcluster/README.md", "docs/adr/README.md"])
def test_every_link_leads_to_a_file_and_to_one_of_its_headings(page: str) -> None:
    wrong = []
    for link in LINK.findall(text_of(page)):
        target, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        file = (ROOT / page).parent / target if target else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors_of(file.read_text(encoding="utf-8"))):
            wrong.append(link)
    assert wrong == []


def test_the_readme_leads_to_every_page() -> None:
    linked = set(LINK.findall(text_of("README.md")))
    assert {page for page in PAGES if page.startswith("docs/")} - linked == set()


def test_the_readme_is_a_screen_and_a_half() -> None:
    assert len(text_of("README.md").splitlines()) <= 110


FILES = [snippet for page in PAGES for language in ("toml", "json", "yaml") for snippet in snippets_of(page, language)]


@pytest.mark.parametrize("snippet", FILES, ids=str)
def test_files_that_are_shown_can_be_read(snippet: Snippet, tmp_path: Path) -> None:
    """Settings of a cluster are loaded as a cluster loads them, but for the files that they name; and so are quotas."""
    if snippet.language == "json":
        assert json.loads(snippet.code)
    elif snippet.language == "yaml":
        assert list(yaml.safe_load_all(snippet.code))
    elif "[tenants." in snippet.code:
        assert parse_quotas(snippet.code).tenants
    else:
        file = tmp_path / "cluster.toml"
        file.write_text(snippet.code, encoding="utf-8")
        assert load(str(file))
