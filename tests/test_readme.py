"""Test that the README is short. tests/docs/test_figures.py tests its figures."""

from __future__ import annotations

from tests.layers import ROOT


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 10_000
