"""Each line of a JSONL file is a sample; folders in which such files are tables stay folders."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING

import pytest

from penstock.cache import PenstockWarning
from penstock.readers import Dataset
from penstock.readers.fieldtypes import Text
from penstock.readers.formats import jsonl_format
from tests import images
from tests.json_lines import conversation, json_lines
from tests.readers.remote_sets import rows_of

if TYPE_CHECKING:
    from pathlib import Path


def texts_of(dataset: Dataset) -> list[str]:
    column = dataset.read(rows_of(dataset)).columns["json"]
    return [bytes(sample).decode() for sample in column.samples]  # type: ignore[union-attr]


@pytest.mark.parametrize("piece_bytes", [7, 100, 2**24])
def test_lines_are_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(jsonl_format, "_PIECE_BYTES", piece_bytes)
    root = json_lines(tmp_path / "chats", samples=20, files=3)
    with Dataset(root) as dataset:
        assert dict(dataset.schema) == {"json": Text()}
        assert dataset.fields == ("json",)
        assert [json.loads(text) for text in texts_of(dataset)] == [*map(conversation, range(20))]
        assert dataset.names([0, 19]) == ["0.jsonl[1]", "2.jsonl[7]"]


def test_one_file_is_a_dataset_and_its_index_is_no_folder_of_the_others(tmp_path: Path) -> None:
    root = json_lines(tmp_path / "chats", samples=20, files=2)
    with Dataset(root / "1.jsonl") as one:
        assert len(one) == 10
    with Dataset(root) as both:
        assert len(both) == 20


def test_empty_lines_marks_and_line_ends_of_windows_are_no_values(tmp_path: Path) -> None:
    root = tmp_path / "chats"
    root.mkdir()
    (root / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"x": 1}\r\n\n  \n {"x": 2}\r\n{"x": 3}')
    with Dataset(root) as dataset:
        assert [json.loads(text)["x"] for text in texts_of(dataset)] == [1, 2, 3]
        assert dataset.names([0, 1, 2]) == ["a.jsonl[1]", "a.jsonl[4]", "a.jsonl[5]"]


def test_other_lines_are_left_out_by_name(tmp_path: Path) -> None:
    root = tmp_path / "chats"
    root.mkdir()
    lines = [b'{"x": %d}' % number for number in range(40)]
    lines[3], lines[7] = b"[1, 2]", b'{"x": "\xff"}'
    (root / "a.jsonl").write_bytes(b"\n".join(lines))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)
        with Dataset(root) as dataset:
            assert len(dataset) == 38
            reasons = "; ".join(dataset.left_out)
    assert "no JSON object" in reasons
    assert "UTF-8" in reasons


def test_tables_of_other_files_are_no_datasets(tmp_path: Path) -> None:
    root = images.class_folder(tmp_path / "set", samples=6)
    (root / "list.jsonl").write_text('{"path": "x.jpg"}\n')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)
        with Dataset(root) as dataset:
            assert "image" in dataset.schema
