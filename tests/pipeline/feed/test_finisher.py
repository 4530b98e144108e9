"""Batches are pinned on another thread, and resident images leave room on a GPU."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock.augment import (
    HELD_RUNS,
    RUN_PIXELS,
    RUN_SAMPLES,
    RUNS_IN_FLIGHT,
    DaliPipeline,
    FullImageDecoder,
    GraphPlan,
    check_recipe,
    imagenet_eval,
)
from penstock.pipeline import DataLoader
from penstock.pipeline.feed import ResidentImages, dali_needs_bytes, memory_budget, resident_bytes
from penstock.pipeline.feed import resident_images as resident_room
from penstock.readers import Dataset, ImageRange
from tests.pipeline.feed.resident.resident_loaders import room_options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EVAL = imagenet_eval(32, resize=36)
ANY = ImageRange(min_height=36, max_height=400, min_width=36, max_width=400)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, torch.Tensor]]:
    """A torch with two GPUs that notes who pins what on which of them."""
    told: list[tuple[str, int, torch.Tensor]] = []
    here = threading.local()

    @contextlib.contextmanager
    def device(number: int):
        here.number = number
        yield
        del here.number

    def pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        told.append((threading.current_thread().name, here.number, tensor))
        return tensor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return told


def test_batches_are_pinned_off_the_training_thread(
    pack: Path, pinned: list[tuple[str, int, torch.Tensor]]
) -> None:
    with Dataset(pack) as dataset, DataLoader(dataset, 16, augment=EVAL, pin_memory=True) as loader:
        batches = list(loader)
    handed = {id(tensor) for batch in batches for tensor in batch}
    assert handed == {id(tensor) for _, _, tensor in pinned}
    assert {number for _, number, _ in pinned} == {1}  # the training thread's GPU
    assert threading.current_thread().name not in {name for name, _, _ in pinned}


def test_nothing_is_pinned_unasked(pack: Path, pinned: list[tuple[str, int, torch.Tensor]]) -> None:
    with Dataset(pack) as dataset, DataLoader(dataset, 16, augment=EVAL) as loader:
        list(loader)
    assert not pinned


# -- resident


def test_the_images_of_a_run_are_stored_before_the_next_run_is_decoded(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Dataset(pack) as dataset:
        samples = min(150, len(dataset))
        sizes = dataset.index.sizes.tolist()
        rows = [(shard, row) for shard, n in enumerate(sizes) for row in range(n)]
        store = ResidentImages(
            GraphPlan(
                check_recipe(EVAL, images=dataset.index.images["image"]),
                batch_size=RUN_SAMPLES,
                threads=2,
            ),
            image="image",
            samples=len(dataset),
            max_bytes=10**8,
        )
        stored: list[int] = []
        decode = FullImageDecoder.__call__

        def counted(self: FullImageDecoder, *arguments: Any) -> Iterator[Any]:
            for run in decode(self, *arguments):
                stored.append(store.facts().samples)
                yield run

        monkeypatch.setattr(FullImageDecoder, "__call__", counted)
        ids = np.arange(samples)
        store.read(ids, {}, lambda ids, bad: dataset.read(np.array(rows)[ids], bad=bad))
        assert stored == list(range(0, samples, RUN_SAMPLES))
        assert all(image is not None for image in store.images(ids))
        store.close()


class Fed(Exception):
    pass


def test_resident_images_are_fed_by_one_kernel() -> None:
    told: dict[str, Any] = {}

    class Pipe:
        def feed_input(self, name: str, _: Any, **options: Any) -> None:
            told[name] = options
            raise Fed

    pipe = object.__new__(DaliPipeline)
    pipe._pipe, pipe._resident = Pipe(), lambda *_, **__: None
    with pytest.raises(Fed):
        pipe.schedule(())
    assert told == {"encoded": {"use_copy_kernel": True}}


def room_on_cuda(free: int, monkeypatch: pytest.MonkeyPatch, *, batch: int, depth: int) -> int:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    options = room_options(True, device="cuda:0", per_rank=batch, depth=depth)
    return memory_budget(options, check_recipe(EVAL, images=ANY)).most_bytes


def test_the_rule_on_cuda_leaves_what_runs_and_batches_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = check_recipe(EVAL, images=ANY)
    batch_bytes = 4 * 8 * 3 * 32 * 32
    runs = (RUNS_IN_FLIGHT + HELD_RUNS) * RUN_PIXELS * 3
    assert dali_needs_bytes(recipe, batch_size=8, depth=2) == runs + 2 * (2 + 2) * batch_bytes
    free = 10**9
    left = room_on_cuda(free, monkeypatch, batch=8, depth=2)
    assert left == int((free - runs - 8 * batch_bytes) * resident_room.ASKED_SHARE)
    assert room_on_cuda(runs, monkeypatch, batch=8, depth=2) == 0


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("fed", [0, 16, 64])
def test_a_decoded_batch_for_each_in_dali_is_left_room_for(
    pack: Path, share: float, fed: int
) -> None:
    """DALI copies resident images into batches of its own: only contiguous ones can be shared."""
    recipe = check_recipe(EVAL, images=ANY)
    with Dataset(pack) as dataset:
        total = resident_room.decoded_bytes(
            dataset, image="image", channels=3, most=1e12, only_near=False
        )
        assert total is not None

        def fits(most: int, *, cuda: bool) -> bool:
            room = resident_room.MemoryBudget(most_bytes=most, reason="")
            found = resident_bytes(
                room_options("auto", device="cuda" if cuda else "cpu", per_rank=fed),
                room,
                dataset,
                recipe,
                image="image",
                share=share,
            )
            return found is not None

        def least(*, cuda: bool) -> int:
            low, high = 0, 4 * total + 10**6
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if fits(middle, cuda=cuda) else (middle + 1, high)
            return low

        beside = resident_room.SAMPLE_BYTES_CUDA - resident_room.SAMPLE_BYTES_CPU
        more = least(cuda=True) - least(cuda=False) - beside * len(dataset)
        mean = total / len(dataset)
        assert more == pytest.approx(fed * mean * resident_room.SPARE, abs=4)
