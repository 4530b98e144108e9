"""Numbers that don't fit the schema make bad samples with a reason, and never wrap around."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from penstock.cache import CorruptSampleError, DatasetError
from penstock.readers import Dataset
from penstock.readers.fieldtypes import Array, ClassLabel, Value
from tests.readers.formats.tables import plain

if TYPE_CHECKING:
    from pathlib import Path

CASES: list[tuple[Any, Any, str]] = [
    ([1, 300, 3], Value("int8"), "300 doesn't fit Value(dtype='int8')"),
    ([1.0, 1e300, 3.0], Value("float32"), "1e+300 doesn't fit Value(dtype='float32')"),
    ([0, 7, 2], ClassLabel(("a", "b", "c")), "7 is none of the 3 classes ('a', 'b', 'c')"),
    ([0, -1, 2], ClassLabel(("a", "b", "c")), "-1 is none of the 3 classes"),
    ([0, -1, 2], ClassLabel(), "-1 isn't a class number: classes are numbered from 0"),
    ([[1, 2], [3, -129], [5, 6]], Array("int8", (2,)), "-129 doesn't fit Array(dtype='int8'"),
]


def write(root: Path, kind: str, values: Any) -> None:
    array = np.array(values)
    root.mkdir()
    if kind == "zarr":
        zarr.open_group(str(root), mode="w").create_array("x", data=array, chunks=array.shape)
    else:
        save: Any = np.savez_compressed if kind == "compressed npz" else np.savez
        save(root / "a.npz", x=array)


@pytest.mark.parametrize("kind", ["npz", "compressed npz", "zarr"])
@pytest.mark.parametrize(("values", "type", "reason"), CASES)
def test_a_number_that_doesnt_fit_is_named(
    tmp_path: Path, kind: str, values: Any, type: Any, reason: str
) -> None:
    write(tmp_path / "set", kind, values)
    with Dataset(tmp_path / "set", schema={"x": type}) as dataset:
        bad: dict[int, str] = {}
        order = dataset.rows(np.array([2, 1, 0]))
        found = plain(dataset.read(order, bad=bad).columns["x"])
        assert [found[0], found[2]] == [values[2], values[0]]
        assert list(bad) == [1]
        assert bad[1].startswith(f"x: {reason}")
        with pytest.raises(CorruptSampleError) as caught:
            dataset.read(order)
        assert reason in str(caught.value)
        assert "Get that file again" not in str(caught.value)


@pytest.mark.parametrize("kind", ["npz", "zarr"])
def test_arrays_whose_samples_are_empty_are_refused(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "set", kind, np.zeros((5, 0, 3)))
    with (
        Dataset(tmp_path / "set") as dataset,
        pytest.raises(DatasetError, match=r"are empty.*0, 3"),
    ):
        dataset.open()
