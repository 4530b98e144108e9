"""A folder that holds images and tar files: `format` chooses the dataset."""

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


def json_of(
    capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0
) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
def test_every_command_accepts_the_option_that_the_error_names(
    both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nvidia.dali")
    for command in (["index", both], ["pack", both, tmp_path / "p"], ["inspect", both]):
        assert main(list(map(str, command))) == 2
        assert "--format" in capsys.readouterr().err
    # One after the other in the same place: an index of the other kind must not be used.
    for kind, samples in (("tar", IN_TARS), ("folder", IN_FOLDERS), ("tar", IN_TARS)):
        option = ("--format", kind)
        assert json_of(capsys, "inspect", both, *option)["samples"] == samples
        assert json_of(capsys, "index", both, *option)["samples"] == samples
        found = json_of(capsys, "inspect", both, *option)
        assert (found["kind"], found["samples"]) == (kind, samples)
        assert json_of(capsys, "inspect", both, *option, "--batch", 3)["samples"]
    for kind, samples in (("tar", IN_TARS), ("folder", IN_FOLDERS)):
        packed = json_of(capsys, "pack", both, tmp_path / kind, "--format", kind)
        assert packed["samples"] == samples
        assert json_of(capsys, "inspect", tmp_path / kind)["samples"] == samples


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


def test_a_pattern_of_tar_files_is_no_folder(both: Path, tmp_path: Path) -> None:
    some = f"{both}/train-{{000000..000001}}.tar"
    with pytest.raises(ConfigError, match="names tar files"):
        build_index(some, format="folder", verify=images.verify)
    with pytest.raises(ConfigError, match="names tar files"):
        pack(some, tmp_path / "p", format="folder", verify=images.verify)
    assert build_index(some, format="tar", verify=images.verify).samples == IN_TARS
