"""The example of docs/attention.md runs."""

from __future__ import annotations

from tests.docs.snippets import run_twice, snippets_of


def test_the_example_of_the_documentation_runs() -> None:
    (example,) = snippets_of("docs/attention.md", "python")
    run_twice(example.code, str(example), {})
