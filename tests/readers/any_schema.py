"""A dataset of every kind of field, as a format whose candidates a test makes: spans and noted
values, dense and ragged, some that samples lack."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image as Pillow

from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    Bytes,
    ClassLabel,
    DenseColumn,
    EncodedColumn,
    Image,
    Mask,
    MultiLabel,
    RaggedColumn,
    Schema,
    Text,
    Value,
)
from penstock.readers.formats import MISSING, Candidates, Format, Snapshot, Spans
from tests import images
from tests.files import npy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.readers.fieldtypes import Column
    from penstock.readers.origin import Entry, Origin

SAMPLES = 9
SPANS = {
    "image": "jpg",
    "mask": "png",
    "depth": "depth.jpg",
    "caption": "txt",
    "flow": "flow.npy",
    "points": "points.npy",
    "grid": "grid.npy",
    "raw": "raw",
}


def content(row: int) -> dict[str, Any]:
    """Return a field of a sample: bytes of spans, values of others; None if it lacks the field."""
    rng = np.random.default_rng(row)
    height, width = 16 + row % 3, 20 + row % 4
    mask = Pillow.fromarray(rng.integers(0, 9, (height, width), np.uint8))
    flow = rng.random((2, 3), np.float32)
    return {
        "image": images.jpeg(row, height, width),
        "mask": images.encoded(mask, "PNG") if row % 4 else None,
        "depth": images.jpeg(row + 50, 8, 9),
        "caption": f"Bild {row}: é ".encode() * (row % 3) if row % 5 else None,
        # Of the same values in other byte orders, columns first: delivered alike.
        "flow": npy((flow, flow.astype(">f4"), np.asfortranarray(flow))[row % 3]),
        "points": npy(rng.integers(-9, 9, (row % 4, 2), np.int16)) if row % 3 else None,
        "grid": npy(rng.random((row % 2 + 1, row % 3))),
        "raw": bytes(range(row)),
        "label": row % 3,
        "score": np.float32(row) / 3 if row % 4 else None,
        "tags": np.array([row % 2, 1, 0], np.float32),
        "boxes": np.array([[0, 0, row, 7.5]] * (row % 3), np.float32).reshape(-1, 4),
        "note": f"Notiz {row}" if row % 2 else None,
        "vector": rng.random(4),
    }


SCHEMA = Schema(
    {
        "image": Image(),
        "mask": Mask(of="image"),
        "depth": Image(),
        "caption": Text(),
        "flow": Array(),
        "points": Array("int16", (None, 2)),
        "grid": Array(),
        "raw": Bytes(),
        "label": ClassLabel(("a", "b", "c")),
        "score": Value("float32"),
        "tags": MultiLabel(("x", "y", "z")),
        "boxes": Boxes(of="image"),
        "note": Text(),
        "vector": Array("float64", (4,)),
    }
)


def write_files(root: Path) -> Path:
    """A file each: 03.jpg, 03.png, 03.txt …"""
    root.mkdir()
    for row in range(SAMPLES):
        for name, extension in SPANS.items():
            if (data := content(row)[name]) is not None:
                (root / f"{row:02d}.{extension}").write_bytes(data)
    return root


def write_archives(root: Path) -> Path:
    """All spans of three samples end to end in one file, with odd bytes between."""
    root.mkdir()
    for number in range(0, SAMPLES, 3):
        data = b"".join(b"#" + part for part in parts(number))
        (root / f"{number:02d}.all").write_bytes(data)
    return root


def parts(number: int) -> Iterator[bytes]:
    for row in range(number, number + 3):
        for name in SPANS:
            if (data := content(row)[name]) is not None:
                yield data


class _Listing:
    def __init__(self, files: list[Entry], *, is_file_per_sample: bool) -> None:
        self._files, self._is_file_per_sample = files, is_file_per_sample

    def snapshot(self) -> Snapshot:
        return Snapshot.of(self._files, {})

    def candidates(self, *, workers: int) -> Candidates:
        del workers
        find = self._in_files if self._is_file_per_sample else self._in_archives
        rows = [content(row) for row in range(SAMPLES)]
        boxes = [row["boxes"] for row in rows]
        noted: dict[str, Column] = {
            "label": DenseColumn(np.array([row["label"] for row in rows], np.int64)),
            "score": DenseColumn(np.array([row["score"] or 0 for row in rows], np.float32)),
            "tags": DenseColumn(np.stack([row["tags"] for row in rows])),
            "boxes": RaggedColumn(
                np.concatenate(boxes), np.cumsum([0, *map(len, boxes)], dtype=np.int64)
            ),
            "note": EncodedColumn(
                [np.frombuffer((row["note"] or "").encode(), np.uint8) for row in rows]
            ),
            "vector": DenseColumn(np.stack([row["vector"] for row in rows])),
        }
        return Candidates(
            schema=SCHEMA,
            files=self._files,
            names=[b"%02d" % row for row in range(SAMPLES)],
            spans={name: find(name) for name in SPANS},
            values=noted,
            present={
                name: np.array([row[name] is not None for row in rows])
                for name in ("score", "note")
            },
            shards=np.split(np.arange(SAMPLES), range(3, SAMPLES, 3)),
        )

    def _in_files(self, name: str) -> Spans:
        numbers = {entry.name.decode(): number for number, entry in enumerate(self._files)}
        names = [f"{row:02d}.{SPANS[name]}" for row in range(SAMPLES)]
        files = np.array([numbers.get(each, MISSING) for each in names], np.int64)
        sizes = [0 if n == MISSING else self._files[n].size_bytes for n in files.tolist()]
        return Spans(files=files, starts=np.zeros_like(files), sizes=np.array(sizes, np.int64))

    def _in_archives(self, name: str) -> Spans:
        found = []
        for row in range(SAMPLES):
            at, place = 0, (MISSING, 0, 0)
            for other in range(row - row % 3, row + 1):
                for field in SPANS:
                    data = content(other)[field]
                    if data is None:
                        continue
                    if (other, field) == (row, name):
                        place = (row // 3, at + 1, len(data))
                    at += 1 + len(data)
            found.append(place)
        files, starts, sizes = np.array(found, np.int64).T
        return Spans(files=files, starts=starts, sizes=sizes)

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        del name, total
        yield self.candidates(workers=workers), number


class Files(Format):
    """A file a span."""

    name = "any-files"
    is_file_per_sample = True
    keeps_facts = True

    def list(self, origin: Origin) -> _Listing:
        entries = origin.entries(lambda name: not name.startswith(b"."))
        return _Listing(entries, is_file_per_sample=self.is_file_per_sample)

    def recognises(self, origin: Origin) -> bool:
        del origin
        return False


class Archives(Files):
    """All spans of some samples in one file."""

    name = "any-archives"
    is_file_per_sample = False


class _NotedListing(_Listing):
    def candidates(self, *, workers: int) -> Candidates:
        found = super().candidates(workers=workers)
        schema = found.schema.only(tuple(name for name in found.values if name != "boxes"))
        values = {name: found.values[name] for name in schema}
        return replace(found, schema=schema, spans={}, values=values)


class Noted(Files):
    """Nothing lies in files."""

    name = "any-noted"

    def list(self, origin: Origin) -> _Listing:
        entries = origin.entries(lambda name: not name.startswith(b"."))
        return _NotedListing(entries, is_file_per_sample=True)


FILES, ARCHIVES, NOTED = Files(), Archives(), Noted()
