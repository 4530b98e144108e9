"""A column called "id" keeps its name in every format; the sample's number is "sample_id" there."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr

from penstock import DataLoader, Map, pack
from penstock.readers import Dataset
from penstock.readers.fieldtypes import Value
from tests.readers.formats.tables import jpeg

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OWN = [70, 80, 90, 60]


def _parquet(root: Path) -> None:
    pq.write_table(pa.table({"id": OWN, "x": range(4)}), root / "a.parquet")


def _arrow(root: Path) -> None:
    table = pa.table({"id": OWN, "x": range(4)})
    with pa.ipc.new_file(str(root / "a.arrow"), table.schema) as writer:
        writer.write_table(table)


def _zarr(root: Path) -> None:
    group = zarr.open_group(str(root), mode="w")
    for name, values in (("id", np.array(OWN)), ("x", np.arange(4))):
        group.create_array(name, data=values)


def _npz(root: Path) -> None:
    np.savez(root / "a.npz", id=np.array(OWN), x=np.arange(4))


def _csv(root: Path) -> None:
    for number in range(4):
        (root / f"{number}.jpg").write_bytes(jpeg(number))
    rows = "".join(f"{number}.jpg,{own},{number}\n" for number, own in enumerate(OWN))
    (root / "metadata.csv").write_text(f"file_name,id,x\n{rows}")


def _jsonl(root: Path) -> None:
    for number in range(4):
        (root / f"{number}.jpg").write_bytes(jpeg(number))
    rows = [{"file_name": f"{n}.jpg", "id": own, "x": n} for n, own in enumerate(OWN)]
    (root / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _tar(root: Path) -> None:
    with tarfile.open(root / "a.tar", "w") as file:
        for number, own in enumerate(OWN):
            report = json.dumps({"id": own, "x": number}).encode()
            for name, body in ((f"{number}.jpg", jpeg(number)), (f"{number}.json", report)):
                info = tarfile.TarInfo(name)
                info.size = len(body)
                file.addfile(info, io.BytesIO(body))


@pytest.mark.parametrize("write", [_parquet, _arrow, _zarr, _npz, _csv, _jsonl, _tar])
def test_a_column_called_id_keeps_its_name(tmp_path: Path, write: Callable[[Path], None]) -> None:
    root = tmp_path / "set"
    root.mkdir()
    write(root)
    pack(root, tmp_path / "pack", shuffle=False)
    for place in (root, tmp_path / "pack"):
        with DataLoader(Dataset(place, fields=("id", "x", "sample_id")), batch_size=4) as loader:
            own, x, numbers = next(iter(loader))
        assert own.tolist() == OWN
        assert x.tolist() == numbers.tolist() == [0, 1, 2, 3]
        assert own.dtype == numbers.dtype == torch.int64


def test_all_fields_are_those_of_the_table(tmp_path: Path) -> None:
    _parquet(tmp_path)
    with Dataset(tmp_path, schema={"id": Value("int32")}) as dataset:
        assert dataset.fields == ("id", "x")
        assert dataset.column("id").tolist() == OWN  # type: ignore[union-attr]
    doubled = Map(
        lambda id, sample_id: 2 * id + sample_id,
        fields=("id", "sample_id"),
        returns={"sum": Value("int64")},
    )
    options: dict[str, Any] = {"augment": [doubled], "as_dict": True, "batch_size": 4}
    with DataLoader(Dataset(tmp_path, fields=("id",)), **options) as loader:
        batch = next(iter(loader))
    assert batch["id"].tolist() == OWN
    assert batch["sum"].tolist() == [2 * own + number for number, own in enumerate(OWN)]


def test_a_dataset_without_such_a_column_has_its_number_under_both_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(4), sample_id=np.array(OWN))
    with DataLoader(Dataset(tmp_path, fields=("id", "sample_id")), batch_size=4) as loader:
        numbers, own = next(iter(loader))
    assert (numbers.tolist(), own.tolist()) == ([0, 1, 2, 3], OWN)
