"""--sample, --stride and their like: windows of arrays and tokens, as words of the command line."""

from __future__ import annotations

import inspect
import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

import penstock
from penstock.cache import ConfigError
from penstock.pipeline.cli import app, main, parse_sampling
from penstock.pipeline.cli import index as index_command

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


def test_a_word_says_whether_files_or_steps_are_samples() -> None:
    for word in ("file", "row"):
        assert parse_sampling(**{**NOTHING, "sample": [word]}).unit == word
    with pytest.raises(ConfigError, match="--stride"):
        parse_sampling(**{**NOTHING, "stride": ["file"]})


def test_inspect_tells_shapes_and_what_is_no_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No sample is looked at, but the types tell what is known of all; so does the log."""
    for number, depth in enumerate((3, 5)):
        volume = np.zeros((1, depth, 4), np.float32)
        np.savez(tmp_path / f"{number}.npz", x=volume, names=np.array(["a"] * 1))
    assert main(["inspect", str(tmp_path), "--sample", "file"]) == 0
    told = capsys.readouterr()
    assert "1 x any x 4" in told.out
    assert "2 samples, which are files" in told.err
    assert logging.getLogger("penstock").level == logging.NOTSET


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


def test_options_of_the_command_are_arguments_of_the_function() -> None:
    options = set(inspect.signature(index_command).parameters)
    arguments = set(inspect.signature(penstock.index).parameters)
    assert options - {"on", "storage_option", "as_json"} < arguments
