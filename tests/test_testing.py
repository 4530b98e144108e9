"""The public conformance class passes on built-in formats and on another package's, and fails for a
format that violates its contract."""

from __future__ import annotations

import io
import json
import struct
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import PenstockError
from penstock.readers.fieldtypes import PRESENT, DenseColumn
from penstock.readers.formats import Extents
from penstock.testing import FormatConformance
from tests import field_sets, images, tars
from tests.layers import ROOT
from tests.readers.formats import blocks
from tests.readers.formats.guests import RECORD_BYTES, Cifar, Frames, Points, install
from tests.readers.formats.test_record_format import GUESTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

COUNT = 13

pytestmark = pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")


@pytest.fixture
def _guests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from penstock.readers.formats import format_registry
    from tests.readers.formats import guests

    for each in (Cifar, Frames, Points):
        monkeypatch.setattr(guests, each.name.upper(), each(), raising=False)
    names = [each.name for each in (Cifar, Frames, Points)]
    install(monkeypatch, **{name: f"{GUESTS}:{name.upper()}" for name in names})
    yield
    format_registry.format_named.cache_clear()


@pytest.mark.usefixtures("_guests")
class TestCifar(FormatConformance):
    format = "cifar"

    @property
    def records(self) -> np.ndarray:
        data = np.random.default_rng(5).integers(0, 256, (COUNT, RECORD_BYTES), np.uint8)
        data[:, 0] %= 10
        return data

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        for number, part in enumerate(np.array_split(self.records, 3)):
            (folder / f"batch_{number}.bin").write_bytes(part.tobytes())
        return folder

    def samples(self) -> Mapping[str, Mapping[str, Any]]:
        parts = enumerate(np.array_split(self.records, 3))
        return {
            f"batch_{number}.bin[{row}]": {
                "pixels": record[1:].reshape(3, 32, 32),
                "label": int(record[0]),
            }
            for number, part in parts
            for row, record in enumerate(part)
        }


class TestBlocks(FormatConformance):
    """Data in chunks, with several shards per file; some samples lack a number."""

    format = "blocks"
    has_checksums = False

    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        lacking = sum(row % 5 == 0 for row in range(blocks.ROWS))
        monkeypatch.setattr(blocks, "MISSING", {"y": lacking})
        monkeypatch.setattr(blocks.Blocks, "reader_class", Lacking)
        yield from blocks.install(monkeypatch)

    def write(self, folder: Path) -> Path:
        return blocks.write(folder)

    def samples(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            f"row {row}": {
                field: blocks.value(field, row)
                for field in blocks.FIELDS
                if field != "y" or row % 5
            }
            for row in range(blocks.ROWS)
        }


class Lacking(blocks.Reader):
    """A reader whose samples lack "y" if their number is a multiple of 5."""

    def read_rows(self, rows: Any, fields: Any, **more: Any) -> Any:
        found = dict(super().read_rows(rows, fields, **more))
        if "y" in fields:
            found["y" + PRESENT] = DenseColumn((rows + self._first) % 5 != 0)
        return found


class TestTar(FormatConformance):
    """Captions that some lack, arrays of many shapes, a vector."""

    format = "tar"

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        for number in range(2):
            files: dict[str, bytes] = {}
            for each in map(field_sets.street, range(number, COUNT, 2)):
                files[f"{each.name}.png"] = each.image
                if each.number % 3:
                    files[f"{each.name}.txt"] = each.caption.encode()
                buffer = io.BytesIO()
                np.save(buffer, each.points)
                files[f"{each.name}.points.npy"] = buffer.getvalue()
                files[f"{each.name}.json"] = b'{"speed": %d.5}' % each.number
            (folder / f"street-{number}.tar").write_bytes(tars.archive(files))
        return folder

    def samples(self) -> Mapping[str, Mapping[str, Any]]:
        found = {}
        for each in map(field_sets.street, range(COUNT)):
            values: dict[str, Any] = {
                "image": each.image,
                "points": each.points,
                "speed": np.float32(each.number + 0.5),
            }
            if each.number % 3:
                values["caption"] = each.caption
            found[f"street-{each.number % 2}.tar/{each.name}.png"] = values
        return found


@pytest.mark.usefixtures("_guests")
class TestFrames(FormatConformance):
    format = "frames"

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        for number, some in enumerate(np.array_split(np.arange(COUNT), 2)):
            data = b""
            for values in map(self.values, some.tolist()):
                small = values.pop("small", b"")
                facts = {name: value for name, value in values.items() if name != "image"}
                head = json.dumps({**facts, "small": len(small)}).encode()
                content = small + values["image"]
                data += struct.pack("<II", len(head), len(content)) + head + content
            (folder / f"{number}.frames").write_bytes(data)
        return folder

    @staticmethod
    def values(n: int) -> dict[str, Any]:
        found = {"image": images.jpeg(n), "small": images.jpeg(n + 50, 8, 8), "score": n / 2}
        found["caption"] = f"photo {n}"
        lacking = ("small", "caption", "score", "")[n % 4]
        return {name: value for name, value in found.items() if name != lacking}

    def samples(self) -> Mapping[str, Mapping[str, Any]]:
        first = COUNT - COUNT // 2
        names = [f"{n // first}.frames[{n % first}]" for n in range(COUNT)]
        return {name: self.values(n) for n, name in enumerate(names)}


@pytest.mark.usefixtures("_guests")
class TestPoints(FormatConformance):
    format = "points"
    options: Mapping[str, Any] = {"format": "points"}  # files in subfolders aren't recognised
    has_checksums = False

    def write(self, folder: Path) -> Path:
        for name, values in self.samples().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            rows = [" ".join(map(str, row)) for row in values["points"].tolist()]
            (folder / name).write_text("\n".join([values.get("title", ""), *rows]))
        return folder

    def samples(self) -> Mapping[str, Mapping[str, Any]]:
        random = np.random.default_rng(4)
        found: dict[str, dict[str, Any]] = {}
        for n in range(COUNT):
            points = random.integers(0, 99, (2 + n % 3, 3)).astype(np.float32) / 4
            found[f"{'ab'[n % 2]}/{n}.xyz"] = {"points": points}
            if n % 3:
                found[f"{'ab'[n % 2]}/{n}.xyz"]["title"] = f"cloud {n}"
        return found

    def test_an_invalid_file_is_left_out(self, root: Path) -> None:
        (root / "a" / "bad.xyz").write_text("a title\n1 2")
        with self.open(root, allow_left_out=1) as dataset:
            assert len(dataset) == COUNT
        (root / "a" / "odd.xyz").write_bytes(b"\xff")
        with self.open(root, allow_left_out=1) as dataset:
            assert sum(dataset.left_out.values()) == 2


class TestFolder(FormatConformance):
    format = "folder"

    @pytest.fixture(autouse=True)
    def _small_shards(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.readers.formats.candidates.PART_BYTES", 3000)

    def write(self, folder: Path) -> Path:
        for number in range(COUNT):
            place = folder / f"class-{number % 3}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number:03d}.jpg").write_bytes(images.jpeg(number))
        return folder

    def samples(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            f"class-{n % 3}/{n:03d}.jpg": {"image": images.jpeg(n), "label": n % 3}
            for n in range(COUNT)
        }


@pytest.mark.usefixtures("_guests")
def test_a_format_that_violates_its_contract_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans that are off by one byte are noticed."""
    from tests.readers.formats import guests

    records_of = Cifar.records

    def shifted(self: Cifar, *arguments: Any) -> Any:
        records = records_of(self, *arguments)
        starts: Any = records.spans["pixels"].starts
        starts[0] -= 1
        return records

    monkeypatch.setattr(guests.Cifar, "records", shifted)
    conformance = TestCifar()
    root = conformance.write(tmp_path / "data")
    with pytest.raises(AssertionError, match="pixels of batch_0"):
        conformance.test_every_sample_is_what_was_written(root, "copy")


def test_extents_that_are_off_by_one_byte_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(**columns: Any) -> Any:
        columns["starts"] = columns["starts"] + 1
        return Extents(**columns)

    monkeypatch.setattr(blocks, "Extents", shifted)
    root = blocks.write(tmp_path / "data")
    conformance = TestBlocks()
    for _ in blocks.install(monkeypatch):
        with pytest.raises((AssertionError, PenstockError)):
            conformance.test_every_sample_is_what_was_written(root, "copy")


def test_the_documented_format_works_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "reference" / "formats.md").read_text()
    module = types.ModuleType("documented_cifar")
    exec(text.split("```python\n", 1)[1].split("```", 1)[0], module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    install(monkeypatch, cifar=module.__name__)
    conformance = TestCifar()
    root = conformance.write(tmp_path / "data")
    conformance.test_every_sample_is_what_was_written(root, "copy")
