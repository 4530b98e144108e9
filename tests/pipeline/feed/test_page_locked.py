"""Large arrays are read into torch's page-locked memory and delivered as tensors of it."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock import DataLoader, Dataset
from penstock.pipeline.feed import PageLocked, in_storage, tensor_of
from penstock.readers import Blocks

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES, SHAPE = 24, (300_000,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("arrays")
    with (place / "metadata.jsonl").open("w") as lines:
        for number in range(SAMPLES):
            np.save(place / f"{number:03d}.npy", np.full(SHAPE, number, np.float32))
            line = {"file_name": f"{number:03d}.npy", "label": number}
            lines.write(json.dumps(line) + "\n")
    return place


class Made:
    """torch's memory, though not page-locked; it says what it made."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def __call__(self, size_bytes: int) -> np.ndarray:
        self.tensors.append(torch.empty(size_bytes, dtype=torch.uint8))
        return self.tensors[-1].numpy()


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int64", "uint16", "float16", "float64", "complex64"]
)
def test_a_tensor_is_of_the_storage_that_its_array_lies_in(dtype: str) -> None:
    made, kind = Made(), np.dtype(dtype)
    array = Blocks(allocate=made).array((3, 2**20), kind)
    array[:] = np.arange(3).astype(kind).reshape(3, 1)
    tensor = tensor_of(array)
    (own,) = made.tensors
    assert tensor.untyped_storage()._cdata == own.untyped_storage()._cdata
    assert tensor.data_ptr() == own.data_ptr()
    assert (tensor.shape, tensor.dtype) == ((3, 2**20), torch.from_numpy(array).dtype)
    assert np.array_equal(tensor.numpy(), array)
    part = tensor_of(array[1:])
    assert part.untyped_storage()._cdata == own.untyped_storage()._cdata
    assert np.array_equal(part.numpy(), array[1:])


def test_other_arrays_are_wrapped_as_before() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    theirs = torch.arange(12, dtype=torch.float32).numpy()
    made = Blocks(allocate=Made()).array((4, 2**20), np.dtype(np.uint8))
    for values in (array, array[:, 1:], theirs, theirs[2:], made[:, ::2], np.float32(3) + array):
        assert in_storage(values) is None
        assert np.array_equal(tensor_of(values).numpy(), values)
    block = Blocks().array((2**20,), np.dtype(np.uint8))
    assert in_storage(block) is None


def test_where_no_memory_can_be_locked_other_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def empty(*arguments: Any, **options: Any) -> Any:
        tries.append((arguments, options))
        raise RuntimeError("out of memory")

    memory = PageLocked(torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", empty)
    blocks = Blocks(allocate=memory)
    first, second = (blocks.array((2**20,), np.dtype(np.float32)) for _ in range(2))
    assert first.shape == second.shape == (2**20,)
    assert len(tries) == 1
    assert "ulimit -l" in caplog.text


def test_a_loader_hands_out_tensors_of_such_storages(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made()
    monkeypatch.setattr(PageLocked, "of", classmethod(lambda *_, **__: None))
    array = Blocks.array

    def own(self: Blocks, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        self._allocate = made
        return array(self, shape, dtype)

    monkeypatch.setattr(Blocks, "array", own)
    with (
        Dataset(folder, fields=("array", "id")) as dataset,
        DataLoader(dataset, 4, shuffle=True, seed=1) as loader,
    ):
        batches = list(loader)
    storages = {each.untyped_storage()._cdata for each in made.tensors}
    for values, ids in batches:
        assert values.untyped_storage()._cdata in storages
        assert torch.equal(values[:, 7], ids.float())


@pytest.mark.gpu
def test_on_a_gpu_no_copy_is_overtaken_by_the_next_read(folder: Path) -> None:
    with (
        Dataset(folder, fields=("array", "id")) as dataset,
        DataLoader(dataset, 4, shuffle=True, seed=1, device="cuda") as loader,
    ):
        for _ in range(20):
            for values, ids in loader:
                torch.cuda._sleep(20_000_000)  # what comes next on this stream waits
                assert values.is_cuda
                right = (values == ids.float()[:, None]).all()
                assert bool(right)


@pytest.mark.gpu
def test_page_locked_batches_may_be_copied_and_dropped_at_once(folder: Path) -> None:
    stream = torch.cuda.Stream()
    found = []
    with (
        Dataset(folder, fields=("array", "id")) as dataset,
        DataLoader(dataset, 4, shuffle=True, seed=1, pin_memory=True) as loader,
    ):
        for _ in range(10):
            for values, ids in loader:
                assert values.is_pinned()
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(20_000_000)
                    moved = values[1:].to("cuda", non_blocking=True)  # a view, long before it runs
                    found.append(moved[:, ::1000].amin(1) - ids[1:].to("cuda").float())
                    found.append(moved[:, ::1000].amax(1) - ids[1:].to("cuda").float())
                del values, moved
                gc.collect()
    torch.cuda.synchronize()
    assert not torch.stack(found).any()
