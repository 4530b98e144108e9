"""--sample, --stride and their like: windows of arrays and tokens, as words of the command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.cache.errors import ConfigError
from penstock.pipeline.cli.main import app
from penstock.pipeline.cli.options import parse_sampling

if TYPE_CHECKING:
    from pathlib import Path

NOTHING: dict[str, Any] = {
    "sample": None,
    "stride": None,
    "dtype": None,
    "documents": None,
    "vocabulary": None,
}


def test_lengths_by_axis_for_all_arrays_or_by_name() -> None:
    one = parse_sampling(**{**NOTHING, "sample": ["8,-,256"], "stride": ["4,-,128"]})
    assert one.window("image") == (8, None, 256)
    assert one.step("image") == (4, None, 128)
    two = parse_sampling(**{**NOTHING, "sample": ["a=8,-", "b=8"], "dtype": "uint16"})
    assert (two.window("a"), two.window("b"), two.window("c")) == ((8, None), (8,), None)
    assert parse_sampling(**NOTHING).to_json() == ""


@pytest.mark.parametrize(
    "told", [["8", "9"], ["a=8", "a=9"], ["=8"], ["eight"], ["0"], ["-"], [""], ["a=8", "9"]]
)
def test_what_is_no_window_is_refused(told: list[str]) -> None:
    with pytest.raises(ConfigError, match="sample"):
        parse_sampling(**{**NOTHING, "sample": told})


def test_each_command_that_opens_a_dataset_takes_them(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    np.arange(1_000, dtype=np.uint16).tofile(corpus / "a.bin")
    told = ["--format", "tokens", "--dtype", "uint16", "--sample", "64", "--json"]
    runner = CliRunner()
    for command in ("inspect", "index"):
        found = runner.invoke(app, [command, str(corpus), *told])
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["samples"] == 15
    found = runner.invoke(app, ["inspect", str(corpus), "--batch", "2", *told])
    assert found.exit_code == 0, found.output
