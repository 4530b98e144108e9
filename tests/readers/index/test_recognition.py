"""The format of a dataset is recognised by the names at its root."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.cache import ConfigError, DatasetNotFoundError
from penstock.readers import Dataset
from tests import images

if TYPE_CHECKING:
    from pathlib import Path

TABLE = pa.table({"a": [1, 2, 3]})


def kind_of(root: Path | str) -> str:
    with Dataset(root) as dataset:
        return dataset.open(verify=images.verify).format.name


@pytest.mark.parametrize("format", ["auto", "tokens", "tar", "zarr", "pack", "folder"])
def test_a_path_that_does_not_exist_is_named(tmp_path: Path, format: str) -> None:
    more = {"sample": (512,), "dtype": "uint16"} if format in ("auto", "tokens") else {}
    for name in ("weeb/train.bin", "weeb"):
        with pytest.raises(DatasetNotFoundError, match="no such file or folder"):
            Dataset(tmp_path / name, format=format, **more).open(verify=images.verify)


def test_files_of_several_kinds_need_a_format(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.arange(3))
    pq.write_table(TABLE, tmp_path / "y.parquet")
    with pytest.raises(ConfigError, match='format="parquet" or format="npy"'):
        kind_of(tmp_path)
    assert kind_of(tmp_path / "x.npz") == "npy"
    assert kind_of(f"{tmp_path}/*.parquet") == "parquet"
    with Dataset(tmp_path, format="npy") as dataset:
        assert len(dataset) == 3
    with pytest.raises(ConfigError, match=r"no format recognises.*1 \.npz"):
        kind_of(f"{tmp_path}/*.*")
    with pytest.raises(ConfigError, match="npy files"):
        Dataset(tmp_path / "x.npz", format="folder").open()


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
def test_a_folder_of_images_is_recognised_with_other_files(tmp_path: Path) -> None:
    root = images.write_folder(tmp_path / "set", {"1.jpg": images.jpeg(1), "2.jpg": images.jpeg(2)})
    np.savez(root / "x.npz", x=np.arange(3))
    pq.write_table(TABLE, root / "y.parquet")
    assert kind_of(root) == "folder"
    classes = images.write_folder(tmp_path / "c", {"a/1.jpg": images.jpeg(1)})
    np.savez(classes / "x.npz", x=np.arange(3))
    assert kind_of(classes) == "folder"


def test_selected_images_are_read_as_a_folder(tmp_path: Path) -> None:
    files = {f"{k}/{n}.jpg": images.jpeg(n) for n, k in enumerate(("cat", "dog", "cow"))}
    root = images.write_folder(tmp_path / "set", files)
    for url in (f"{root}/c*/*.jpg", [f"{root}/cow/2.jpg", root / "cat" / "0.jpg"]):
        with Dataset(url) as dataset:
            index = dataset.open(verify=images.verify)
            assert (index.format.name, len(dataset)) == ("folder", 2)
            assert dataset.names([0, 1]) == ["cat/0.jpg", "cow/2.jpg"]
            assert list(index.schema["label"].class_names) == ["cat", "cow"]


def test_a_folder_of_images_loads_no_other_format(tmp_path: Path) -> None:
    root = images.write_folder(tmp_path / "set", {"a/1.jpg": images.jpeg(1)})
    code = (
        "import json, sys\n"
        "from penstock.readers import Dataset\n"
        f"Dataset({str(root)!r}).open(verify=lambda samples: [None for _ in samples])\n"
        "print(json.dumps([n for n in sys.modules if '.formats.' in n]))"
    )
    kind_of(root)  # its index is there then
    report = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=60
    )
    loaded = json.loads(report.stdout)
    others = ("npy", "zarr", "parquet", "arrow", "tokens")
    assert not [name for name in loaded if name.split(".formats.")[1].split(".")[0] in others]
