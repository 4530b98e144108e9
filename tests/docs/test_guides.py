"""Both columns of each migration guide run, and deliver the same samples.

The column with Penstock always runs. The other one runs where its libraries are installed, as
`make guides` does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.docs.guides import Guide, assert_same, assert_same_set, column, rows
from tests.images import jpeg, write_folder
from tests.servers import serving
from tests.tars import archive

if TYPE_CHECKING:
    from collections.abc import Sequence

PIXELS = 0.02  # of float32 normalised pixels: decoders round and upsample colours differently


@pytest.fixture(autouse=True)
def _a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def photographs(
    folder: str, samples: int, classes: int, *, heights: Sequence[int] = range(60, 67)
) -> None:
    """Write a class folder of small photographs of different sizes."""
    files = {
        f"class-{i % classes:02d}/{i:04d}.jpg": jpeg(
            i, heights[i % len(heights)], 80 + 4 * (i % 5), quality=95
        )
        for i in range(samples)
    }
    write_folder(Path(folder), files)


def test_pytorch() -> None:
    photographs("photos/train", 24, 12)
    photographs("photos/val", 21, 5)
    guide = Guide("pytorch", ("train_step", "eval_step", "own_step"))
    after = guide.run("After")
    assert len(rows(after["train_step"])) == 4 * 24
    assert sorted(column(after["own_step"], 1)) == list(range(21))
    before = guide.before("torchvision")
    assert_same_set(before["train_step"], after["train_step"], places=(1,))
    assert_same(before["eval_step"], after["eval_step"], tolerance=PIXELS)
    assert_same_set(before["own_step"], after["own_step"], places=(1,))


def test_torchdata() -> None:
    photographs("photos/train", 24, 3)
    photographs("photos/web", 18, 3)
    photographs("photos/val", 21, 5)
    steps = ("train_step", "node_step", "mixed_step", "eval_step")
    guide = Guide("torchdata", steps)
    after = guide.run("After")
    assert sorted(column(after["train_step"], 1)) == [*range(24)]
    assert column(after["eval_step"], 1) == [*range(21)]
    parts = column(after["mixed_step"], 0)
    assert (parts.count(0), parts.count(1)) == (24, 8)

    before = guide.before("torchdata", "torchvision")
    assert_same_set(before["train_step"], after["train_step"], places=(1,))
    assert_same_set(before["node_step"], after["node_step"], places=(1,))
    assert column(before["mixed_step"], 0).count(0) <= 24


def test_webdataset(monkeypatch: pytest.MonkeyPatch) -> None:
    for shard in range(4):
        numbers = range(shard * 6, shard * 6 + 6)
        write_folder(Path("store/bucket/train"), {f"{shard:06d}.tar": street(numbers)})
    Path("val.tar").write_bytes(street(range(21)))
    guide = Guide("webdataset", ("train_step", "pair_step", "eval_step"))
    with serving(Path("store")) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kkkkkkkk")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ssssssss")
        after = guide.run("After")
    assert sorted(column(after["train_step"], 1)) == sorted([*range(24)] * 2)
    assert column(after["eval_step"], 1) == [*range(21)]

    program = b'#!/bin/sh\ncat "store/${3#s3://}"\n'  # aws s3 cp URL -
    aws = write_folder(Path("bin"), {"aws": program}) / "aws"
    aws.chmod(0o755)
    monkeypatch.setenv("PATH", f"{aws.parent.absolute()}:{os.environ['PATH']}")
    before = guide.before("webdataset", "torchvision")
    assert_same_set(before["train_step"], after["train_step"], places=(1,))
    assert_same(before["eval_step"], after["eval_step"], tolerance=PIXELS)
    assert_same(before["pair_step"], after["pair_step"], tolerance=2)


def test_huggingface() -> None:
    for shard in range(4):
        numbers = range(shard * 6, shard * 6 + 6)
        hub_table(f"train-{shard:05d}-of-00004.parquet", numbers)
    hub_table("val.parquet", range(21))
    steps = ("train_step", "stream_step", "text_step", "eval_step", "keep_step")
    guide = Guide("huggingface", steps)
    after = guide.run("After")
    assert sorted(column(after["train_step"], 1)) == sorted([*range(24)] * 2)
    assert column(after["eval_step"], 1) == [*range(21)]

    before = guide.before("datasets", "torchvision")
    for step in ("train_step", "stream_step"):
        assert_same_set(before[step], after[step], places=(1,))
    assert_same(before["text_step"], after["text_step"])
    assert_same(before["eval_step"], after["eval_step"], tolerance=PIXELS)
    kept = guide.before("datasets", side="Keep")
    assert sorted(column(kept["keep_step"], 1)) == [1, *range(10, 20), 21]


def hub_table(name: str, numbers: range) -> None:
    """Write photographs as a dataset of the hub has them, with a class each."""
    features = {
        "image": {"_type": "Image"},
        "label": {"_type": "ClassLabel", "names": [f"class {i}" for i in range(24)]},
        "caption": {"_type": "Value", "dtype": "string"},
    }
    photos = [{"bytes": jpeg(i, 60 + i % 7, 80 + i % 5, quality=95), "path": None} for i in numbers]
    table = pa.table(
        {
            "image": pa.array(photos, pa.struct({"bytes": pa.binary(), "path": pa.string()})),
            "label": pa.array(numbers, pa.int64()),
            "caption": [f"photograph {i}" for i in numbers],
        }
    )
    info = json.dumps({"info": {"features": features}})
    pq.write_table(table.replace_schema_metadata({"huggingface": info}), name)


def street(numbers: range) -> bytes:
    """Return an archive of photographs with a class, a caption and a city."""
    files: dict[str, bytes] = {}
    for i in numbers:
        files[f"{i:05d}.jpg"] = jpeg(i, 60 + i % 7, 80 + i % 5, quality=95)
        files[f"{i:05d}.cls"] = str(i).encode()
        files[f"{i:05d}.txt"] = f"street {i}".encode()
        files[f"{i:05d}.json"] = json.dumps({"city": f"city {i % 3}"}).encode()
    return archive(files)


def test_dali() -> None:
    photographs("photos/train", 24, 12)
    photographs("photos/val", 21, 5, heights=(64,))  # no middle lies on half a pixel
    steps = ("train_step", "eval_step", "resumed_step", "own_step", "distorted_step")
    guide = Guide("dali", steps)
    after = guide.run("After")
    assert len(rows(after["resumed_step"])) == 16
    assert len(rows(after["distorted_step"])) == 24
    before = guide.before("nvidia.dali")
    assert_same_set(before["train_step"], after["train_step"], places=(1,))
    assert len(rows(before["resumed_step"])) == 16
    assert_same(before["eval_step"], after["eval_step"], tolerance=PIXELS)
    assert_same(before["own_step"], after["own_step"], tolerance=1)
