"""Each format passes the tests of all formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.readers import Dataset, pack
from penstock.readers.fieldtypes import EncodedColumn
from penstock.readers.formats import ChunkFormat, formats
from tests import images
from tests.annotated_sets import instances, roboflow_set, voc_set, yolo_set
from tests.json_lines import json_lines
from tests.readers.formats.conformance import SAMPLES, FormatConformance, IndexedFormatConformance
from tests.readers.remote_sets import rows_of
from tests.tars import tar_folder

if TYPE_CHECKING:
    from pathlib import Path


class TestFolder(IndexedFormatConformance):
    name = "folder"

    @pytest.fixture(autouse=True)
    def _small_shards(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.readers.formats.candidates.PART_BYTES", 3000)

    def write(self, folder: Path) -> Path:
        return images.class_folder(folder / "set", samples=SAMPLES)


class TestCoco(IndexedFormatConformance):
    name = "coco"

    @pytest.fixture(autouse=True)
    def _small_shards(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.readers.formats.candidates.PART_BYTES", 3000)

    def write(self, folder: Path) -> Path:
        return roboflow_set(folder / "set", instances(SAMPLES))

    def test_an_image_and_its_label_are_six_numbers_of_one_table(self, root: Path) -> None:
        """Test that an image and its id are."""
        columns = self.index(root).layout.table
        assert columns.spans["image"] == (0, 1, 5, 2, None, None)
        assert (columns.values, columns.present, columns.count) == ({"image_id": 4}, {}, 6)

    def everything(self, dataset: Dataset) -> list[object]:
        columns = dataset.read(rows_of(dataset)).columns
        return [
            [np.asarray(column.sample(row)).tolist() for column in columns.values()]
            for row in range(len(dataset))
        ]


class TestVoc(TestCoco):
    name = "voc"

    def write(self, folder: Path) -> Path:
        objects = {
            f"{i:06d}": [{"name": "dog", "box": (1, 2, 9, 9)}] * (i % 3) for i in range(SAMPLES)
        }
        return voc_set(folder / "set", objects)

    def test_an_image_and_its_label_are_six_numbers_of_one_table(self, root: Path) -> None:
        """Test that an image is five; its id is a text."""
        assert self.index(root).layout.table.spans["image"] == (0, 1, 4, 2, None, None)


class TestYolo(TestVoc):
    name = "yolo"

    def write(self, folder: Path) -> Path:
        labels = {f"{i:06d}": "0 0.5 0.5 0.25 0.25\n" * (i % 3) for i in range(SAMPLES)}
        names = "train: images/train\nnames: [dog]\n"
        return yolo_set(folder / "set", labels, names).parent


class TestTar(IndexedFormatConformance):
    name = "tar"

    def write(self, folder: Path) -> Path:
        return tar_folder(folder / "tars", samples=SAMPLES, archives=3)


class TestPack(FormatConformance):
    name = "pack"

    def write(self, folder: Path) -> Path:
        source = images.class_folder(folder / "set", samples=SAMPLES)
        pack(source, folder / "pack", shard_bytes=3000, verify=images.verify)
        return folder / "pack"


class TestJsonl(IndexedFormatConformance):
    name, field = "jsonl", "json"

    def write(self, folder: Path) -> Path:
        return json_lines(folder / "chats", samples=SAMPLES, files=3)

    def test_an_image_and_its_label_are_six_numbers_of_one_table(self, root: Path) -> None:
        """Test that a text is three."""
        columns = self.index(root).layout.table
        assert (columns.values, columns.present, columns.count) == ({}, {}, 3)

    def everything(self, dataset: Dataset) -> list[bytes]:
        column = dataset.read(rows_of(dataset)).columns[self.field]
        assert isinstance(column, EncodedColumn)
        return [bytes(sample) for sample in column.samples]


def test_every_format_is_tried() -> None:
    tried = {
        each.name
        for each in (TestFolder, TestCoco, TestVoc, TestYolo, TestTar, TestPack, TestJsonl)
    }
    # Formats in chunks have samples of other kinds, and tests of their own.
    assert tried == {each.name for each in formats() if not isinstance(each, ChunkFormat)}
