"""The torch datasets of `benchmarks.dlio`, as a user would write them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.dlio_data import files_below

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from benchmarks.dlio_task import Task

CROP, DETECT = 224, 800
"""Pixels of a square that images are cropped, and resized, to."""


class Arrays:
    """A dataset of .npy files, or of x in .npz files. Samples: (uint8 tensor, its number)."""

    def __init__(self, folder: str) -> None:
        self.paths = [str(path) for path in files_below(Path(folder))]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import torch

        found = np.load(self.paths[index])
        return torch.from_numpy(found if isinstance(found, np.ndarray) else found["x"]), index


class RowGroups:
    """A dataset of Parquet rows. A row group is read when one of its rows is needed, and the last
    one is kept. Samples: a tensor per column, and the number of the row."""

    def __init__(self, folder: str) -> None:
        import pyarrow.parquet as pq

        self.paths = [str(path) for path in files_below(Path(folder))]
        groups = [pq.read_metadata(path).num_row_groups for path in self.paths]
        self.places = [
            (path, g) for path, count in zip(self.paths, groups, strict=True) for g in range(count)
        ]
        first = pq.ParquetFile(self.paths[0])
        self.rows: int = first.metadata.row_group(0).num_rows
        self.samples: int = sum(pq.read_metadata(path).num_rows for path in self.paths)
        self._number, self._columns = -1, dict[str, Any]()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        import pyarrow.parquet as pq
        import torch

        number, row = divmod(index, self.rows)
        if number != self._number:
            path, group = self.places[number]
            table = pq.ParquetFile(path).read_row_group(group)
            self._columns = {
                name: np.stack(table[name].combine_chunks().to_numpy(zero_copy_only=False))
                for name in table.column_names
            }
            self._number = number
        return (*(torch.from_numpy(each[row]) for each in self._columns.values()), index)


class GroupOrder:
    """A sampler with row groups in random order and their rows shuffled, so that each group is read
    once."""

    def __init__(self, data: RowGroups, seed: int) -> None:
        self._data, self._rng = data, np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[int]:
        groups = np.arange(-(-len(self._data) // self._data.rows))
        self._rng.shuffle(groups)
        for group in groups.tolist():
            end = min(len(self._data), (group + 1) * self._data.rows)
            rows = np.arange(group * self._data.rows, end)
            self._rng.shuffle(rows)
            yield from rows.tolist()


class EncodedFiles:
    """A dataset that reads files without decoding them. Samples: number and length."""

    def __init__(self, folder: str) -> None:
        self.paths = [str(path) for path in files_below(Path(folder))]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[int, int]:
        with open(self.paths[index], "rb") as file:
            return index, len(file.read())


class Detected:
    """A dataset that decodes JPEGs to a square with Pillow and mirrors them at random."""

    def __init__(self, folder: str) -> None:
        self.paths = [str(path) for path in files_below(Path(folder))]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import torch
        from PIL import Image

        with Image.open(self.paths[index]) as image:
            image.draft("RGB", (DETECT, DETECT))
            resized = image.convert("RGB").resize((DETECT, DETECT), Image.Resampling.BILINEAR)
            pixels = np.asarray(resized)
        if torch.rand(()) < 0.5:
            pixels = pixels[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), index


def torch_dataset(task: Task) -> Any:
    """Return the dataset for torch's DataLoader."""
    if task.work == "arrays":
        return Arrays(task.files)
    if task.work == "columns":
        return RowGroups(task.files)
    if task.work == "bytes":
        return EncodedFiles(task.files)
    if task.work == "detect":
        return Detected(task.files)
    from penstock.pipeline.bench.adapters import FolderImages, list_files
    from penstock_bench_loaders.simplejpeg import fastest_crop

    return FolderImages(list_files(Path(task.files)), fastest_crop(CROP))
