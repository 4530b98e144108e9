"""Test that the notebooks are their pages, and that their cells run in order."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import notebooks
from penstock.pipeline.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from tests.docs.data import Data


@pytest.mark.parametrize("name", notebooks.PAGES)
def test_a_notebook_is_its_page(name: str) -> None:
    """Run `python -m benchmarks.notebooks` if this fails."""
    kept = (notebooks.NOTEBOOKS / f"{name}.ipynb").read_text()
    assert kept == notebooks.written(notebooks.PAGES[name])


@pytest.mark.grid  # their pages run in tests/docs/test_pages.py
@pytest.mark.parametrize("name", notebooks.PAGES)
def test_the_cells_of_a_notebook_run(
    name: str, tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = json.loads((notebooks.NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(codes) > 3
    data.provide("\n".join(codes), tmp_path)
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr("benchmarks.photographs.make_photographs", lambda *_, **__: None)
    namespace: dict[str, Any] = {}
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(io.StringIO()):
        for code in codes:
            if not code.startswith("!"):
                exec(compile(code, name, "exec"), namespace)
                continue
            for line in code.splitlines():
                words = shlex.split(line.removeprefix("!penstock"))
                words += ["--seconds", "0.5"] if words[0] == "bench" else []
                assert main(words) in ((0, 1) if words[0] == "doctor" else (0,))
