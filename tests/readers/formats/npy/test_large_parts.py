"""Large parts of arrays are read directly into their slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import IndexChangedError
from penstock.readers import Dataset, loose_files
from penstock.readers.formats import array_windows
from tests.readers.formats.npy.arrays import check_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

X = np.random.default_rng(5).normal(size=(80, 3, 5)).astype("f4")


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Treat every part as large; record the bytes of each read into a slot."""
    monkeypatch.setattr(array_windows, "DIRECT_BYTES", 1)
    recorded: list[int] = []
    fill = loose_files.LooseFiles.fill

    def counted(self: Any, starts: Any, slots: Any, mode: Any) -> None:
        recorded.extend(len(slot) for slot in slots)
        fill(self, starts, slots, mode)

    monkeypatch.setattr(loose_files.LooseFiles, "fill", counted)
    return recorded


def write(root: Path) -> None:
    for number, array in enumerate(X):
        np.save(root / f"{number:03}.npy", array)


def test_files_are_read_into_their_slots(
    root: Path, opened: Callable[..., Dataset], sizes: list[int], request: pytest.FixtureRequest
) -> None:
    write(root)
    check_rows(opened("*.npy", sample="file"), {"array": X})
    is_local = "local" in request.node.name
    assert sizes == ([X[0].nbytes] * 81 if is_local else [])


def test_windows_of_one_file_are_read_into_their_slots(root: Path, sizes: list[int]) -> None:
    np.save(root / "x.npy", X)
    with Dataset(root / "x.npy", sample=(4,), stride=(4,)) as dataset:
        rows = dataset.rows(np.array([7, 0, 19]))
        found = dataset.read(rows, mode="pread").columns["array"].values
    np.testing.assert_array_equal(found, X.reshape(20, 4, 3, 5)[[7, 0, 19]])
    assert sizes == [4 * X[0].nbytes] * 3


def test_parts_of_several_ranges_or_another_byte_order_are_copied(
    root: Path, sizes: list[int]
) -> None:
    np.save(root / "x.npy", X)
    np.save(root / "y.npy", X.astype(">f4"))
    with Dataset(root / "x.npy", sample=(4, None, 2), stride=(4, None, 2)) as dataset:
        rows = dataset.rows(np.array([2]))
        found = dataset.read(rows, mode="pread").columns["array"].values
    wanted = np.lib.stride_tricks.sliding_window_view(X, (4, 3, 2))[::4, :, ::2].reshape(
        -1, 4, 3, 2
    )
    np.testing.assert_array_equal(found[0], wanted[2])
    with Dataset(root / "y.npy") as dataset:
        found = dataset.read(dataset.rows(np.array([9])), mode="pread").columns["array"].values
        np.testing.assert_array_equal(found[0], X[9])
    assert not sizes


@pytest.mark.parametrize("cost", [1, 2**40])
def test_removed_and_truncated_files_are_named(
    root: Path, cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_windows, "DIRECT_BYTES", cost)
    write(root)
    with Dataset(root / "*.npy", sample="file") as dataset:
        rows = dataset.rows(np.arange(80))
        (root / "041.npy").unlink()
        with pytest.raises(IndexChangedError, match=r"041\.npy"):
            dataset.read(rows)
        np.save(root / "041.npy", X[41][:2])
        with pytest.raises(IndexChangedError, match=r"041\.npy"):
            dataset.read(rows)
        np.save(root / "041.npy", X[41])
        np.testing.assert_array_equal(dataset.read(rows).columns["array"].values, X)
