"""Remote datasets for tests: their contents, and how they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers import Dataset
from tests import images

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import SampleBatch

SAMPLES = 24
KINDS = {"set": "set", "pack": "pack", "tars": "tars/train-{000000..000002}.tar"}
QUICK = {"retry_timeout": 0.2, "connect_timeout": 60}


def rows_of(dataset: Dataset) -> NDArray[np.int64]:
    sizes = dataset.index.sizes.tolist()
    return np.array([(shard, row) for shard, n in enumerate(sizes) for row in range(n)], np.int64)


def samples_of(batch: SampleBatch) -> list[tuple[bytes, int, list[int]]]:
    """Return the image, label and shape of each sample of a batch."""
    labels, dims = batch.columns["label"].values.tolist(), batch.columns["image"].dims.tolist()
    return list(zip(map(bytes, batch.columns["image"].samples), labels, dims, strict=True))


def everything(dataset: Dataset, mode: Any = "copy") -> list[tuple[bytes, int, list[int]]]:
    dataset.open(verify=images.verify)
    return samples_of(dataset.read(rows_of(dataset), mode=mode))


def locally(built: Path, kind: str, tmp_path: Path) -> list[tuple[bytes, int, list[int]]]:
    index = None if kind == "pack" else tmp_path / f"index-{kind}"
    with Dataset(built / KINDS[kind], index=index) as dataset:
        return everything(dataset)


def blobs_of(cache: Path, dataset: Dataset) -> list[Path]:
    """Return the files of the dataset's shards in a cache."""
    keys = dataset.index.keys
    return [cache / "blobs" / key for key in keys]


def filled(dataset: Dataset) -> list[tuple[bytes, int, list[int]]]:
    """Read everything, and fill the rest of the blobs."""
    found = everything(dataset)
    assert dataset.remote is not None
    for shard in range(len(dataset.index.sizes)):
        source = dataset.index.source(shard)
        dataset.remote.fill(source)
        assert dataset.remote.is_whole(source)
    return found


def flip(path: Path) -> None:
    """Invert one bit in the first image."""
    data = bytearray(path.read_bytes())
    data[data.index(b"\xff\xd8\xff") + 40] ^= 1
    replace(path, bytes(data))


def replace(path: Path, data: bytes) -> None:
    """Write a file in place, like a failing disk; no process maps it."""
    with path.open("r+b") as file:
        file.truncate(len(data))
        file.write(data)
