"""Make notebooks from pages of the documentation: `python -m benchmarks.notebooks`.

The text of a page becomes Markdown cells and its code becomes code cells, so a notebook says what
the page says. The page's own folder of photographs is replaced by that of `make demo`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTEBOOKS = DOCS / "notebooks"
PAGES = {
    "first-steps": "tutorial/first-steps.md",
    "looking-at-data": "howto/looking-at-data.md",
    "why-is-it-slow": "howto/slow.md",
    "resuming": "howto/resuming.md",
}
"""The page of each notebook, by the notebook's name."""

PHOTOGRAPHS = "demo/photographs"
_PLACES = {"photos/train": f"{PHOTOGRAPHS}/train", "photos/val": f"{PHOTOGRAPHS}/eval"}
_FIRST = f"""\
# Make the photographs, unless `make demo` has made them. The notebook needs a clone.
import os
import sys
from pathlib import Path

while not Path("benchmarks").exists() and Path.cwd() != Path("/"):
    os.chdir("..")
sys.path.insert(0, os.getcwd())
from benchmarks.photographs import make_photographs

make_photographs(Path("{PHOTOGRAPHS}"), train_images=2560, eval_images=320, workers=2)"""
_FENCE = re.compile(r"^```(python|console)\n(.*?)^```\n", re.M | re.S)
_HIDDEN = re.compile(r"<!---.*?-->\n*", re.S)


def notebook(page: str) -> dict[str, Any]:
    """Return the notebook of a page (a path below docs/) as the values of its JSON."""
    text = _HIDDEN.sub("", (DOCS / page).read_text())
    for place, ours in _PLACES.items():
        text = text.replace(place, ours)
    # Relative links lead from docs/notebooks.
    folder = page.rpartition("/")[0]
    text = re.sub(r"\]\((?!https?:|#|\.\./)([^)]+)\)", rf"](../{folder}/\1)", text)
    cells = [_cell(_FIRST, is_code=True)]
    end = 0
    for fence in _FENCE.finditer(text):
        cells.append(_cell(text[end : fence.start()], is_code=False))
        code = fence[2]
        if fence[1] == "console":
            code = re.sub(r"^\$ ", "!", code, flags=re.M)
        cells.append(_cell(code, is_code=True))
        end = fence.end()
    cells.append(_cell(text[end:], is_code=False))
    kept = [cell for cell in cells if cell["source"]]
    title = next(i for i, cell in enumerate(kept) if cell["cell_type"] == "markdown")
    kept.insert(0, kept.pop(title))
    for number, cell in enumerate(kept):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": kept,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def written(page: str) -> str:
    """Return the text of a page's notebook."""
    return json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all notebooks."""
    for name, page in PAGES.items():
        (NOTEBOOKS / f"{name}.ipynb").write_text(written(page))


def _cell(text: str, *, is_code: bool) -> dict[str, Any]:
    source = text.strip("\n").splitlines(keepends=True)
    cell: dict[str, Any] = {"cell_type": "code" if is_code else "markdown", "id": ""}
    if is_code:
        cell |= {"execution_count": None, "outputs": []}
    return cell | {"metadata": {}, "source": source}


if __name__ == "__main__":
    main()
