"""Small batches that a thread reads at once have the same samples and memory of their own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock import DataLoader, Dataset, pack
from penstock.pipeline.feed import BatchReader, runner

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SAMPLES, BATCH = 100, 8


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vectors, texts, ragged lists and classes, in several shards."""
    folder = tmp_path_factory.mktemp("turns")
    source = folder / "source"
    source.mkdir()
    lines = []
    for number in range(SAMPLES):
        np.save(source / f"{number:03d}.npy", np.full((2, 3), number, np.float32))
        lines.append(
            {
                "file_name": f"{number:03d}.npy",
                "label": number % 7,
                "tokens": list(range(number % 4)),
                "caption": f"sample {number}",
            }
        )
    (source / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pack(source, folder / "pack", shard_bytes=4000)
    return folder / "pack"


def plain(batch: Sequence[Any]) -> list[Any]:
    return [
        value if isinstance(value, list) else [each.tolist() for each in value] for value in batch
    ]


def epochs(
    packed: Path, monkeypatch: pytest.MonkeyPatch, *, most: int, **options: Any
) -> tuple[list[Any], list[int]]:
    """Two epochs' batches, and how many of them each read gave."""
    monkeypatch.setattr(runner, "MOST_IN_A_TURN", most)
    monkeypatch.setattr(runner, "MOST_LARGE_IN_A_TURN", 1)
    read, sizes = BatchReader.read, list[int]()

    def counted(self: BatchReader, *arguments: Any, **more: Any) -> Any:
        found = read(self, *arguments, **more)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(BatchReader, "read", counted)
    fields = ("array", "label", "tokens", "caption", "id")
    with (
        Dataset(packed, fields=fields) as dataset,
        DataLoader(dataset, BATCH, seed=7, **options) as loader,
    ):
        found = [plain(batch) for _ in range(2) for batch in loader]
    monkeypatch.setattr(BatchReader, "read", read)
    return found, sizes


@pytest.mark.parametrize("options", [{"shuffle": True}, {}, {"shuffle": True, "pad": "mask"}])
def test_batches_of_one_read_are_those_of_many(
    packed: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    alone, ones = epochs(packed, monkeypatch, most=1, **options)
    together, sizes = epochs(packed, monkeypatch, most=5, **options)
    assert together == alone
    assert {*ones} == {1}
    assert max(sizes) == (1 if "pad" in options else 5)


def test_a_bad_sample_is_replaced_as_when_batches_are_read_alone(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Dataset.read

    def spoiled(self: Dataset, rows: Any, *, bad: dict[int, str], **options: Any) -> Any:
        content = read(self, rows, bad=bad, **options)
        bad |= dict.fromkeys(np.flatnonzero(content.ids == 17).tolist(), "spoiled")
        return content

    monkeypatch.setattr(Dataset, "read", spoiled)
    with pytest.warns(match="spoiled"):
        alone, _ = epochs(packed, monkeypatch, most=1, shuffle=True, max_bad=1.0)
    with pytest.warns(match="spoiled"):
        together, sizes = epochs(packed, monkeypatch, most=5, shuffle=True, max_bad=1.0)
    assert together == alone
    assert max(sizes) == 5
    assert not any(17 in batch[-1] for batch in together)


def test_a_batch_has_a_storage_of_its_own(packed: Path) -> None:
    with (
        Dataset(packed, fields=("array", "id")) as dataset,
        DataLoader(dataset, BATCH, shuffle=True, drop_last=True, seed=7) as loader,
    ):
        for values, ids in loader:
            for tensor in (values, ids):
                assert isinstance(tensor, torch.Tensor)
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
                tensor.zero_()
        assert all(values.any() for values, _ in loader)
