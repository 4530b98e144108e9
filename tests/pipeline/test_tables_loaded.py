"""A loader delivers the same photographs from Parquet and Arrow as from their folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks import parquet
from penstock import DataLoader, Dataset, imagenet_eval, imagenet_train
from penstock.cache import ConfigError, PenstockWarning
from tests.readers.formats.tables import features

if TYPE_CHECKING:
    from pathlib import Path


def table_of(folder: Path) -> Any:
    """Return a table of a class folder's images with Hugging Face's features, in its order."""
    paths = sorted(folder.glob("*/*"))
    names = sorted({path.parent.name for path in paths})
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.table(
        {
            "image": pa.array([{"bytes": p.read_bytes(), "path": p.name} for p in paths], picture),
            "label": pa.array([names.index(path.parent.name) for path in paths]),
        }
    ).replace_schema_metadata(
        features(image={"_type": "Image"}, label={"_type": "ClassLabel", "names": names})
    )


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_photographs_equal_those_of_their_folder(tmp_path: Path, folder: Path, kind: str) -> None:
    root = tmp_path / "set"
    root.mkdir()
    table = table_of(folder)
    if kind == "parquet":
        pq.write_table(table, root / "a.parquet", row_group_size=30)
    else:
        with pa.ipc.new_file(root / "a.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    found: list[Any] = []
    for url in (root, folder):
        with (
            Dataset(url, index=tmp_path / f"index-{url.name}") as dataset,
            DataLoader(dataset, 32, augment=imagenet_eval(64)) as loader,
        ):
            found.append(list(loader))
    for (images, labels), (others, theirs) in zip(*found, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, theirs)


def test_an_image_that_doesnt_decode_is_a_bad_sample(tmp_path: Path, folder: Path) -> None:
    root = tmp_path / "set"
    root.mkdir()
    rows = table_of(folder).to_pylist()[:64]
    rows[5]["image"]["bytes"] = b"no picture at all"
    rows[9]["image"]["bytes"] = rows[9]["image"]["bytes"][:300]
    table = pa.Table.from_pylist(rows, table_of(folder).schema)
    pq.write_table(table, root / "a.parquet", row_group_size=16)
    with (
        Dataset(root) as dataset,
        DataLoader(
            dataset, 16, shuffle=True, seed=3, augment=imagenet_train(64), max_bad=0.5
        ) as loader,
    ):
        with pytest.warns(PenstockWarning, match="is bad"):
            batches = list(loader)
        assert sum(len(labels) for _, labels in batches) == 64
        assert loader.statistics().bad == 2
    with Dataset(root) as dataset, pytest.raises(ConfigError, match="resident"):
        DataLoader(dataset, 16, augment=imagenet_train(64), resident=True)


def test_the_benchmark_runs(tmp_path: Path, folder: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    assert parquet.write_files(files, folder) == len(list(folder.glob("*/*")))
    rows = list(parquet.arrow_rows(files))
    assert len(rows) == len({image for image, _ in rows})
    side = parquet.penstock_side(files, "bytes")
    try:
        rate, cpu_s = parquet.play(side)
        assert rate > 0
        assert np.isfinite(cpu_s)
    finally:
        side.close()
