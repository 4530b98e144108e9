"""Formats of blocks as other packages write them: the documented one, and one of compressed JSON
lines."""

from __future__ import annotations

import gc
import gzip
import json
import sys
import types
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from penstock import Map, RandomCrop
from penstock.cache import CorruptSampleError, CorruptShardError, DatasetError, DatasetNotFoundError
from penstock.pipeline import DataLoader
from penstock.readers import Dataset
from penstock.readers.fieldtypes import Array, ClassLabel, FieldType, Image, Text, Value
from penstock.readers.formats import Block, BlockFormat, ChunkFormat, format_registry
from penstock.testing import FormatConformance
from tests import images
from tests.files import uploaded
from tests.layers import ROOT
from tests.readers.formats.guests import install

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.readers import Encoded
    from penstock.readers.formats import DataFile
    from penstock.readers.origin import Entry

pytestmark = pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")

COUNT = 40


class Lines(BlockFormat):
    """Small gzip files of one JSON object per line; a file is a block."""

    name = "lines"
    extensions: ClassVar[frozenset[str]] = frozenset(("gz",))
    in_folders = True

    def blocks(
        self, file: DataFile, entry: Entry
    ) -> tuple[Mapping[str, FieldType], Sequence[Block]]:
        text = gzip.decompress(file.read_at(0, entry.size_bytes))
        schema = {
            "title": Text(),
            "image": Image(),
            "points": Array("float32", (None, 2)),
            "score": Value("float64"),
        }
        rows, null = text.count(b"\n"), text.count(b'"score": null')
        whole = Block(
            start=0,
            size_bytes=entry.size_bytes,
            rows=rows,
            missing={"score": null},
            note={"rows": rows},
        )
        return schema, [whole]

    def decode(self, data: Encoded, block: Block) -> Mapping[str, Any]:
        rows = [json.loads(line) for line in gzip.decompress(data).splitlines()]
        assert block.note == {"rows": len(rows)}
        return {
            "title": [row["title"] for row in rows],
            "image": [bytes.fromhex(row["image"]) for row in rows],
            "points": [np.reshape(row["points"], (-1, 2)) for row in rows],
            "score": [row["score"] for row in rows],
        }


FORMAT = Lines()


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = types.ModuleType("documented_zipped")
    text = (ROOT / "docs" / "reference" / "formats.md").read_text()
    (source,) = (
        block.split("```")[0] for block in text.split("```python\n") if "(BlockFormat)" in block
    )
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    install(monkeypatch, zipped=module.__name__, lines=__name__)
    monkeypatch.setattr("penstock.readers.formats.block_format.PART_BYTES", 4000)
    yield
    format_registry.format_named.cache_clear()


def records() -> np.ndarray[Any, Any]:
    found = np.zeros(COUNT, [("pixels", "u1", (8, 8, 3)), ("label", "<i8")])
    found["pixels"] = np.random.default_rng(2).integers(0, 256, (COUNT, 8, 8, 3))
    found["label"] = np.arange(COUNT) % 7
    return found


def write_zipped(folder: Path) -> Path:
    folder.mkdir()
    for number, part in enumerate(np.array_split(records(), 3)):
        data, blocks = b"", []
        for start in range(0, len(part), 6):
            packed = zlib.compress(part[start : start + 6].tobytes())
            blocks.append([len(data), len(packed), len(part[start : start + 6])])
            data += packed
        footer = json.dumps({"blocks": blocks}).encode()
        tail = len(footer).to_bytes(8, "little")
        (folder / f"part-{number}.zrec").write_bytes(data + footer + tail)
    return folder


class TestZipped(FormatConformance):
    format = "zipped"

    def write(self, folder: Path) -> Path:
        return write_zipped(folder)

    def samples(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            f"part-{number}.zrec[{row}]": {"pixels": each["pixels"], "label": int(each["label"])}
            for number, part in enumerate(np.array_split(records(), 3))
            for row, each in enumerate(part)
        }


class TestLines(FormatConformance):
    format = "lines"
    has_checksums = True

    def row(self, number: int) -> dict[str, Any]:
        return {
            "title": f"row {number}",
            "image": images.jpeg(number),
            "points": np.arange(2 * (number % 4), dtype=np.float32).reshape(-1, 2),
            "score": None if number % 5 == 0 else number / 3,
        }

    def write(self, folder: Path) -> Path:
        for number in range(4):
            rows = [self.row(4 * number + at) for at in range(4)]
            lines = [
                {**row, "image": row["image"].hex(), "points": row["points"].ravel().tolist()}
                for row in rows
            ]
            folder.mkdir(exist_ok=True)
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        return folder

    def samples(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            f"{number}.jsonl.gz[{at}]": {
                name: value
                for name, value in self.row(4 * number + at).items()
                if value is not None
            }
            for number in range(4)
            for at in range(4)
        }


def labels(root: Any, **more: Any) -> list[int]:
    with Dataset(root, **more) as data, DataLoader(data, 8, shuffle=True, seed=3) as loader:
        return [int(label) for _, batch in loader for label in batch]


def test_a_job_maps_crops_and_resumes_locally_and_remotely(tmp_path: Path) -> None:
    root = write_zipped(tmp_path / "data")
    everything = labels(root)
    assert sorted(everything) == sorted(records()["label"].tolist())
    with uploaded(root) as url:
        assert labels(url, cache=tmp_path / "cache") == everything
        assert labels(url, cache=tmp_path / "cache", fields=("pixels", "label")) == everything
    augment: Any = [
        Map(lambda each: each + 1, fields="label"),
        RandomCrop((4, 4, 3), fields="pixels"),
    ]
    with Dataset(root, fields=("pixels", "label")) as data:
        with DataLoader(data, 8, shuffle=True, seed=3, augment=augment) as loader:
            batches = iter(loader)
            pixels, label = next(batches)
            assert pixels.shape == (8, 4, 4, 3)
            assert (label - 1).tolist() == everything[:8]
            state = loader.state_dict()
        with DataLoader(data, 8, shuffle=True, seed=3, augment=augment) as loader:
            loader.load_state_dict(state)
            rest = [int(label) - 1 for _, batch in loader for label in batch]
    assert rest == everything[8:]


def test_selected_files_and_one_field_are_read(tmp_path: Path) -> None:
    root = write_zipped(tmp_path / "data")
    with Dataset(f"{root}/part-[12].zrec", fields=("label",)) as data:
        assert data.index.kind == "zipped"
        assert data.column("label").tolist() == records()["label"][14:].tolist()
    with (
        uploaded(root) as url,
        Dataset(url, cache=tmp_path / "cache") as data,
        data.select("label") as chosen,
    ):
        assert chosen.index.shard_bytes.tolist() == data.index.shard_bytes.tolist()
        assert chosen.column("label").tolist() == records()["label"].tolist()


def test_a_file_that_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    root = write_zipped(tmp_path / "data")
    whole = (root / "part-1.zrec").read_bytes()
    for wrong in (b"", whole[:-9], b"\xff" * 100, whole[:-8] + b"\0" * 8, whole[100:]):
        (root / "part-1.zrec").write_bytes(wrong)
        with Dataset(root) as data, pytest.raises(DatasetError, match=r"part-1\.zrec"):
            data.open()
    (root / "part-1.zrec").write_bytes(whole)
    with Dataset(root) as data:
        data.open()
        damaged = bytearray(whole)
        damaged[20] ^= 1
        with (root / "part-1.zrec").open("r+b") as file:
            file.write(damaged)
        bad: dict[int, str] = {}
        data.read(data.contents.rows(np.arange(COUNT)), bad=bad)
        assert sorted(bad) == list(range(14, 20))
        with pytest.raises(CorruptSampleError, match=r"zrec\[0\] .*: pixels: its block is damaged"):
            data.read(data.contents.rows(np.array([14])))


def test_files_in_subfolders_belong_to_a_format_that_says_so(tmp_path: Path) -> None:
    root = TestLines().write(tmp_path / "data")
    (root / "more").mkdir()
    for number in (1, 3):
        (root / f"{number}.jsonl.gz").rename(root / "more" / f"{number}.jsonl.gz")
    with Dataset(root, format="lines") as data:
        names = data.names(range(len(data)))
        assert names[:5] == [*(f"0.jsonl.gz[{at}]" for at in range(4)), "2.jsonl.gz[0]"]
        assert names[-1] == "more/3.jsonl.gz[3]"


def test_a_folder_without_such_files_or_records_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with (
        Dataset(tmp_path / "none", format="zipped") as data,
        pytest.raises(DatasetNotFoundError, match=r"no file \*\.zrec"),
    ):
        data.open()
    footer = b'{"blocks": []}'
    (tmp_path / "none" / "a.zrec").write_bytes(footer + len(footer).to_bytes(8, "little"))
    with (
        Dataset(tmp_path / "none") as data,
        pytest.raises(DatasetNotFoundError, match="no records"),
    ):
        data.open()


def test_users_rename_fields_and_name_classes(tmp_path: Path) -> None:
    root, names = write_zipped(tmp_path / "data"), tuple("abcdefg")
    with Dataset(
        root, fields={"x": "pixels", "kind": "label"}, schema={"kind": ClassLabel(names)}
    ) as data:
        assert list(data.schema) == ["x", "kind"]
        assert data.schema["kind"] == ClassLabel(names)
        assert data.column("kind").tolist() == records()["label"].tolist()


def test_values_that_are_missing_or_do_not_fit_make_bad_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, good = TestLines().write(tmp_path / "data"), Lines.decode
    with Dataset(root, fields=("score", "score.present", "points", "title")) as data:
        data.open()
    for name, wrong, reason in (
        ("title", [None] * 4, "is missing, which the index doesn't record"),
        ("title", ["a"] * 3, "3 values, and the index has 4 records"),
        ("points", [np.zeros((2, 3))] * 4, "shape"),
        ("points", [np.full((1, 2), 1e300)] * 4, "a number doesn't fit"),
        ("points", [np.zeros((1, 2), "c8")] * 4, "complex64 of shape"),
    ):

        def decode(
            self: Lines, data: Encoded, block: Block, name: str = name, wrong: Any = wrong
        ) -> Mapping[str, Any]:
            return {**good(self, data, block), name: wrong}

        monkeypatch.setattr(Lines, "decode", decode)
        bad: dict[int, str] = {}
        with Dataset(root, fields=("score", "score.present", "points", "title")) as data:
            data.read(data.contents.rows(np.arange(16)), bad=bad)
        assert len(bad) == 16
        assert reason in bad[3]


@pytest.mark.parametrize("notes", [b"", b"1", b"[]", b"{}", b"null", b"[[], [], 3]", b"[" * 9999])
@pytest.mark.parametrize("format", ["zipped", "tokens"])
def test_a_damaged_note_of_a_shard_is_refused(
    tmp_path: Path, format: str, notes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {}
    if format == "zipped":
        root = write_zipped(tmp_path / "data")
    else:
        root = tmp_path / "a.bin"
        np.arange(99, dtype=np.uint16).tofile(root)
        options = {"format": "tokens", "dtype": "uint16", "sample": (9,)}
    opened = ChunkFormat.open

    def damaged(self: ChunkFormat, entry: Any, sidecar: Any, place: Any) -> Any:
        return opened(self, entry, lambda: replace(sidecar(), notes=notes), place)

    monkeypatch.setattr(ChunkFormat, "open", damaged)
    wanted = f"entry of a {format} shard is damaged"
    gc.collect()  # earlier tests' garbage would be finalised while notes nest 9,999 deep, and fail
    with Dataset(root, **options) as data, pytest.raises(CorruptShardError, match=wanted):
        data.read(data.contents.rows(np.arange(3)))
