"""Fixtures of the tests of formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return an empty folder for a dataset, whose index is written next to it."""
    folder = tmp_path / "set"
    folder.mkdir()
    return folder
