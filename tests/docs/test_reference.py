"""The pages of the reference are those that the code makes, and name everything that is public."""

from __future__ import annotations

import re

import griffe
import pytest

import penstock
import penstock.testing
from benchmarks import reference
from benchmarks.site_docstrings import sections
from tests.layers import ROOT

API = ROOT / "docs" / "reference" / "api"


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_is_as_the_code_makes_it(name: str) -> None:
    """Run `python -m benchmarks.reference` after a change of help, counters or errors."""
    assert (reference.REFERENCE / name).read_text() == reference.PAGES[name]()


def test_the_api_names_everything_public_once() -> None:
    pages = "".join(path.read_text() for path in API.glob("*.md"))
    named = re.findall(r"^::: penstock\.(\S+)$", pages, re.M)
    assert sorted(named) == sorted(set(named))
    modules = {"errors", "testing", "version"}
    public = {name for name in dir(penstock) if not name.startswith("_")} - modules
    public -= {*penstock.errors.__all__}
    public |= {f"testing.{name}" for name in penstock.testing.__all__}
    assert public <= {*named}
    assert {name for name in named if "." not in name} <= public


def test_every_error_says_what_to_do() -> None:
    for name in penstock.errors.__all__:
        paragraphs = (getattr(penstock.errors, name).__doc__ or "").split("\n\n")
        assert len(paragraphs) > 1, f"{name}: add a paragraph that says what to do"


def test_entries_of_a_docstring_become_tables() -> None:
    """Several in a paragraph, two names that share a text, lists, and prose around them."""
    text = (
        "Read numbers.\n\nfirst: what comes first; it ends. second, third: see\nthe other: text.\n"
        "fourth: (docs/howto/tokens.md).\n\nRaises nothing.\n\n```python\nfirst: int = 1\n```"
    )
    names = ("first", "second", "third", "fourth")
    parameters = griffe.Parameters(*(griffe.Parameter(name) for name in names))
    before, table, *after = sections(text, {p.name: p for p in parameters})
    assert before.value == "Read numbers."
    assert [(row.name, row.description) for row in table.value] == [
        ("first", "what comes first; it ends."),
        ("second", "see the other: text."),
        ("third", "See `second`."),
        ("fourth", "([howto/tokens](../../howto/tokens.html))."),
    ]
    assert [part.value for part in after] == ["Raises nothing.", "```python\nfirst: int = 1\n```"]


def test_llms_txt_lists_every_page_with_its_first_line() -> None:
    text = reference.llms()
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs").with_suffix(".html")) in text
    assert not re.findall(r"\.html\): *$", text, re.M)
