"""Megatron's .idx: read as written, and rejected by name if it is invalid."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.cache import ConfigError, DatasetError
from penstock.readers import Dataset
from penstock.readers.formats.tokens import read_idx
from penstock.readers.origin import LocalFolder
from tests.token_files import CODES, draw_documents, write_megatron

if TYPE_CHECKING:
    from pathlib import Path

HEADER = 34


def lengths_of(root: Path) -> list[int]:
    origin = LocalFolder(bytes(root))
    idx, data = origin.entry(b"a.idx"), origin.entry(b"a.bin")
    assert idx is not None
    assert data is not None
    bounds = read_idx(origin, idx, data).documents
    assert bounds is not None
    return [int(each) for each in np.diff(bounds)]


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("sentences", [1, 3])
@pytest.mark.parametrize("modes", [False, True])
def test_documents_have_the_lengths_that_were_written(
    tmp_path: Path, dtype: str, sentences: int, modes: bool
) -> None:
    documents = draw_documents(40, end=100)
    write_megatron(tmp_path / "a", documents, dtype=dtype, sentences=sentences, modes=modes)
    assert lengths_of(tmp_path) == list(map(len, documents))


def damaged(root: Path, at: int, form: str, *values: int) -> None:
    write_megatron(root / "a", draw_documents(20))
    with open(root / "a.idx", "r+b") as file:
        file.seek(at)
        file.write(struct.pack(form, *values))


@pytest.mark.parametrize(
    ("at", "form", "values", "message"),
    [
        (0, "<Q", (1,), "MMIDIDX"),
        (9, "<Q", (2,), "version is 2"),
        (17, "<B", (77,), "dtype code 77"),
        (17, "<B", (7,), "dtype code 7; expected"),
        (18, "<Q", (10**18,), "claims 1,000,000,000,000,000,000 sequences"),
        (18, "<Q", (19,), r"claims 19 sequences .* and 21 borders"),
        (26, "<Q", (20,), "truncated"),
        (26, "<Q", (10**18,), "claims 20 sequences"),
        (HEADER, "<i", (-5,), "-5 tokens"),
        (HEADER, "<i", (2**31 - 1,), "begins at byte"),
        (HEADER + 80, "<q", (2,), "sequence 0 has .* begins at byte 2,"),
        (HEADER + 88, "<q", (2**62,), "sequence 1 has .* begins at byte"),
        (HEADER + 80 + 160, "<q", (1,), "borders of its documents don't ascend"),
        (HEADER + 80 + 160 + 8, "<q", (10**18,), "borders of its documents don't ascend"),
        (HEADER + 80 + 160 + 16, "<q", (-(10**18),), "borders of its documents don't ascend"),
        (HEADER + 80 + 160 + 160, "<q", (19,), "end at sequence 19"),
    ],
)
def test_an_invalid_index_is_rejected_by_name(
    tmp_path: Path, at: int, form: str, values: tuple[int, ...], message: str
) -> None:
    damaged(tmp_path, at, form, *values)
    with pytest.raises(DatasetError, match=message) as caught:
        lengths_of(tmp_path)
    assert "a.idx" in str(caught.value)


def test_a_truncated_index_or_another_bin_is_rejected(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", draw_documents(20))
    whole = (tmp_path / "a.idx").read_bytes()
    for end in (0, 8, 20, HEADER, len(whole) - 1):
        (tmp_path / "a.idx").write_bytes(whole[:end])
        with pytest.raises(DatasetError, match=r"a\.idx"):
            lengths_of(tmp_path)
    (tmp_path / "a.idx").write_bytes(whole)
    with open(tmp_path / "a.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DatasetError, match=r"a\.bin: its sequences end at byte"):
        lengths_of(tmp_path)


def test_modes_other_than_text_are_rejected(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", draw_documents(20), modes=True)
    with open(tmp_path / "a.idx", "r+b") as file:
        file.seek(-3, 2)
        file.write(b"\1")
    with pytest.raises(DatasetError, match="sequence 17 has mode 1"):
        lengths_of(tmp_path)


def test_an_idx_without_its_bin_or_a_bin_without_its_idx_is_rejected(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", draw_documents(20))
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "b.bin")
    with Dataset(tmp_path, sample=(8,)) as dataset, pytest.raises(DatasetError, match=r"b\.bin"):
        dataset.open()
    (tmp_path / "b.bin").unlink()
    (tmp_path / "c.idx").write_bytes(b"")
    with Dataset(tmp_path, sample=(8,)) as dataset, pytest.raises(DatasetError, match=r"c\.idx"):
        dataset.open()


def test_a_dtype_that_differs_from_the_index_is_rejected(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", draw_documents(20))
    with (
        Dataset(tmp_path, sample=(8,), dtype="int32") as dataset,
        pytest.raises(ConfigError, match="uint16"),
    ):
        dataset.open()
