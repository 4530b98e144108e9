"""No figure stands on a page without its kept result.

docs/benchmarks.md isn't looked at: `python -m benchmarks.page` makes it from the results.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.docs.figures import FIGURES, Figure
from tests.docs.quantities import API, EXEMPT, HELD, LIMITS, PAGES, Limit, named, prose, quantities
from tests.layers import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

Span = tuple[int, int]


def in_a_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.page}-{figure.result}")
def test_a_figure_is_that_of_a_kept_result(figure: Figure) -> None:
    assert in_a_line(figure.text) in prose(figure.page)


def places(texts: Iterable[str], page: str) -> list[Span]:
    """Return where texts lie in a page."""
    return [found.span() for text in texts for found in re.finditer(re.escape(text), page)]


def unheld(page: str) -> list[Span]:
    """Return the quantities of a page that no result and no other test holds."""
    text = prose(page)
    held = places([in_a_line(figure.text) for figure in FIGURES if figure.page == page], text)
    patterns = [patterns[page] for patterns in HELD.values() if page in patterns]
    held += [each.span() for pattern in patterns for each in re.finditer(pattern, text)]
    return [
        (start, end)
        for start, end in quantities(text)
        if not any(low <= start and end <= high for low, high in held)
    ]


def unheld_words(page: str) -> set[str]:
    text = prose(page)
    return {named(text[start:end]) for start, end in unheld(page)}


@pytest.mark.parametrize("page", [*PAGES, API])
def test_every_quantity_is_measured_or_a_limit_or_an_example(page: str) -> None:
    """Keep the result of a new figure in benchmarks/results and add its sentence to
    tests/docs/figures.py. A limit goes with its constant into tests/docs/quantities.py."""
    text = prose(page)
    known = {named(limit.shown) for limit in LIMITS if page in limit.pages}
    known |= {named(each) for pages in EXEMPT.values() for each in pages.get(page, ())}
    strange = [
        f"{text[start:end]}: …{text[max(0, start - 60) : end + 40]}…"
        for start, end in unheld(page)
        if named(text[start:end]) not in known
    ]
    assert strange == []


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.constant)
def test_a_limit_is_on_a_page(limit: Limit) -> None:
    assert any(named(limit.shown) in unheld_words(page) for page in limit.pages)


@pytest.mark.parametrize("reason", EXEMPT)
def test_an_exemption_is_needed(reason: str) -> None:
    for page, exempt in EXEMPT[reason].items():
        found = unheld_words(page)
        assert [each for each in exempt if named(each) not in found] == [], page


@pytest.mark.parametrize("test", HELD)
def test_a_test_that_holds_a_figure_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^ *def {name}\(", (ROOT / file).read_text(), re.M)
    for page, pattern in HELD[test].items():
        assert re.search(pattern, prose(page)), f"{page} doesn't have {pattern!r} any more"


@pytest.mark.parametrize(
    "text",
    [
        *("1.5 to 3 µs an image", "7.0 times the CPU time", "97 % of it", "97% of it", "14 ms"),
        *("starts in less than a second", "half the CPU", "twice the memory", "two times as fast"),
        *("1,832 images/s", "2 million tokens/s", "0.63 CPU-s a GB", "30 MB", "| 1.35 |", "3.1 h"),
    ],
)
def test_a_quantity_is_seen(text: str) -> None:
    assert len(quantities(f"Penstock takes {text} here.")) == 1


@pytest.mark.parametrize(
    "text",
    [
        *("`0.5`", "[7](../a-7.5.md)", "Python 3.11", "numpy below 2.2", "3 x 32 pixels"),
        *("the second half of the lanes", "10^6 samples", "4 batches", "1 of 255", "`16 MiB`"),
    ],
)
def test_what_is_no_quantity_is_not_seen(text: str) -> None:
    assert quantities(f"It needs {text} here.") == []
