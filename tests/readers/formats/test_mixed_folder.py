"""A folder that holds images and tar files: `format` says which of them are the dataset."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache import ConfigError
from penstock.pipeline.cli import main
from penstock.readers import build_index, open_index, pack
from tests import images
from tests.conftest import write_photographs
from tests.tars import tar_folder

if TYPE_CHECKING:
    from pathlib import Path

IN_TARS, IN_FOLDERS = 6, 8


@pytest.fixture
def both(tmp_path: Path) -> Path:
    root = tar_folder(tmp_path / "both", samples=IN_TARS, archives=2)
    return write_photographs(root, samples=IN_FOLDERS, classes=2)


def told(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
def test_every_command_takes_what_the_error_asks_for(
    both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nvidia.dali")
    for command in (["index", both], ["pack", both, tmp_path / "p"], ["inspect", both]):
        assert main(list(map(str, command))) == 2
        assert "--format" in capsys.readouterr().err
    # One after the other in the same place: an index of the other kind is no answer.
    for kind, samples in (("tar", IN_TARS), ("folder", IN_FOLDERS), ("tar", IN_TARS)):
        asked = ("--format", kind)
        assert told(capsys, "inspect", both, *asked)["samples"] == samples
        assert told(capsys, "index", both, *asked)["samples"] == samples
        found = told(capsys, "inspect", both, *asked)
        assert (found["kind"], found["samples"]) == (kind, samples)
        assert told(capsys, "inspect", both, *asked, "--batch", 3)["samples"]
    for kind, samples in (("tar", IN_TARS), ("folder", IN_FOLDERS)):
        packed = told(capsys, "pack", both, tmp_path / kind, "--format", kind)
        assert packed["samples"] == samples
        assert told(capsys, "inspect", tmp_path / kind)["samples"] == samples


def test_a_format_that_is_none_is_refused(both: Path, tmp_path: Path) -> None:
    wrong: Any = "zip"
    for call in (
        lambda: build_index(both, format=wrong, verify=images.verify),
        lambda: pack(both, tmp_path / "p", format=wrong, verify=images.verify),
        lambda: open_index(both, format=wrong, verify=images.verify),
    ):
        with pytest.raises(ConfigError, match=r"'zip'.*'folder'"):
            call()
    assert main(["index", str(both), "--format", "zip"]) == 2


def test_a_pack_is_no_format_of_an_index(both: Path) -> None:
    with pytest.raises(ConfigError, match="has its own index"):
        build_index(both, format="pack", verify=images.verify)


def test_tar_files_that_were_named_are_no_folder(both: Path, tmp_path: Path) -> None:
    some = f"{both}/train-{{000000..000001}}.tar"
    with pytest.raises(ConfigError, match="names tar files"):
        build_index(some, format="folder", verify=images.verify)
    with pytest.raises(ConfigError, match="names tar files"):
        pack(some, tmp_path / "p", format="folder", verify=images.verify)
    assert build_index(some, format="tar", verify=images.verify).samples == IN_TARS
