"""Every page runs: its Python in order in one namespace, its commands, in a folder with the data
that it names."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.docs.snippets import REASONS, Failed, loose_commands, parsed, run, skips, unlabelled
from tests.layers import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.docs.data import Data

ELSEWHERE = "docs/migrate/"
"""Both sides of the guides run in tests/docs/test_guides.py."""

PAGES = [
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "SKILL.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.exists() and not str(path.relative_to(ROOT)).startswith(ELSEWHERE)
]


def check(page: str, place: Path, data: Data) -> None:
    text = (ROOT / page).read_text()
    if fences := unlabelled(text):
        raise Failed(f"{page}: these fences need a language: {fences}")
    if lines := loose_commands(text):
        raise Failed(f"{page}: write these commands in a ```console block after `$ `: {lines}")
    document = parsed(text, ROOT / page)
    if strange := [reason for reason in skips(document) if reason not in REASONS]:
        raise Failed(f"{page}: skips give a reason of tests/docs/snippets.py, not {strange}")
    run(document, place, data)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_as_printed(page: str, tmp_path: Path, data: Data) -> None:
    check(page, tmp_path, data)


def test_few_blocks_are_skipped() -> None:
    counts = Counter(
        reason for page in PAGES for reason in skips(parsed((ROOT / page).read_text(), ROOT / page))
    )
    assert {r: n for r, n in counts.items() if n > REASONS.get(r, 0)} == {}
