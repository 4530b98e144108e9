"""Test mixtures of images: substitutes of bad ones, parts that are the same dataset."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock import DataLoader, Dataset, DiskCache, World, imagenet_train, mix
from penstock.readers import ImageFacts
from tests.files import uploaded
from tests.images import class_folder, encoded, picture, truncated

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.readers import Encoded, Rejection

SAMPLES, BATCH = 48, 12
FIELDS = ("image", "label", "id", "part")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sample .* is bad"),
    pytest.mark.filterwarnings("ignore:.*is remote and cache= isn't given"),
]


def credulous(samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
    """Accept anything as an image of one size."""
    return [ImageFacts(height=24, width=32, channels=3, codec="png") for _ in samples]


def write_flawed(folder: Path) -> Path:
    """Every third image is truncated, which shows when it is decoded."""
    for number in range(SAMPLES):
        data = encoded(picture(number), "PNG")
        path = folder / f"class-{number % 2}" / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(truncated(data) if number % 3 == 0 else data)
    Dataset(str(folder)).open(verify=credulous)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("images")
    return {
        "flawed": write_flawed(root / "flawed"),
        "good": class_folder(root / "good", samples=SAMPLES, classes=2),
    }


def job(source: Any, **arguments: Any) -> DataLoader:
    given: dict[str, Any] = {
        "shuffle": True,
        "seed": 4,
        "batch_size": BATCH,
        "augment": imagenet_train(16),
        "drop_last": True,
        "max_bad": 1.0,
        "as_dict": True,
        **arguments,
    }
    return DataLoader(source, **given)


def global_batches(source: Any, world: int, *, epochs: int = 1) -> list[dict[str, torch.Tensor]]:
    """Return the global batches, joined from those of all ranks."""
    ranks: list[list[dict[str, torch.Tensor]]] = []
    for rank in range(world):
        with job(source, batch_size=BATCH // world, world=World(rank, world)) as one:
            ranks.append([batch for _ in range(epochs) for batch in one])
    return [
        {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        for batches in zip(*ranks, strict=True)
    ]


class TestSubstitutes:
    @pytest.fixture
    def source(self, folders: dict[str, Path]) -> Any:
        flawed = Dataset(str(folders["flawed"]), allow_left_out=True)
        parts = {"good": Dataset(str(folders["good"])), "flawed": flawed}
        with parts["good"], flawed:
            yield mix(parts, weights={"good": 1, "flawed": 2}, epoch=6 * SAMPLES, fields=FIELDS)

    def test_they_come_from_the_same_part_at_their_own_draws(self, source):
        found: dict[int, list[int]] = defaultdict(list)
        pixels: dict[int, list[torch.Tensor]] = defaultdict(list)
        with job(source) as loader:
            for step, batch in enumerate(loader):
                own = loader.samples_of(step).tolist()
                for row, (sample, got) in enumerate(zip(own, batch["id"].tolist(), strict=True)):
                    part = sample // SAMPLES
                    assert batch["part"][row] == part == got // SAMPLES
                    if got != sample:
                        found[sample].append(got)
                        pixels[sample].append(batch["image"][row])
        bad = {SAMPLES + place for place in range(SAMPLES) if _is_flawed(source, SAMPLES + place)}
        assert found.keys() == bad
        assert all(not {*each} & bad for each in found.values())
        # The part's 4 epochs in this epoch of the mixture have substitutes of their own.
        assert {len(each) for each in found.values()} == {4}
        assert any(len({*each}) > 1 for each in found.values())
        for each in pixels.values():
            assert len({image.numpy().tobytes() for image in each}) == 4

    @pytest.mark.parametrize("world", [2, 3])
    def test_they_are_the_same_at_any_world(self, source, world):
        for wanted, found in zip(
            global_batches(source, 1), global_batches(source, world), strict=True
        ):
            assert all(torch.equal(wanted[name], found[name]) for name in wanted)

    def test_they_are_the_same_after_a_restart(self, source):
        with job(source) as loader:
            batches, states = [], []
            for batch in loader:
                batches.append(batch)
                states.append(loader.state_dict())
        with job(source) as again:
            again.load_state_dict(states[11])
            assert torch.equal(next(iter(again))["image"], batches[12]["image"])


def _is_flawed(source: Any, sample: int) -> bool:
    (name,) = source.names([sample])
    return int(name.split("/")[-1].split(".")[0]) % 3 == 0


class TestOneDatasetTwice:
    def check(self, source: Any) -> None:
        """Each part has all samples, with ids and pixels of its own."""
        seen: dict[int, list[bytes]] = defaultdict(list)
        for batch in global_batches(source, 1):
            for sample, part, image in zip(
                batch["id"].tolist(), batch["part"].tolist(), batch["image"], strict=True
            ):
                assert part == sample // SAMPLES
                seen[sample].append(image.numpy().tobytes())
        assert sorted(seen) == [*range(2 * SAMPLES)]
        for sample in range(SAMPLES):
            assert len({*seen[sample], *seen[sample + SAMPLES]}) == 4

    def mixed(self, first: Any, second: Any) -> Any:
        # Two epochs of each part.
        return mix({"a": first, "b": second}, epoch=4 * SAMPLES, fields=FIELDS)

    def test_the_same_object(self, folders):
        with Dataset(str(folders["good"])) as dataset:
            self.check(self.mixed(dataset, dataset))

    def test_opened_twice(self, folders):
        with Dataset(str(folders["good"])) as one, Dataset(str(folders["good"])) as other:
            self.check(self.mixed(one, other))

    @pytest.mark.parametrize("is_kept", [False, True])
    def test_remote(self, folders, tmp_path, is_kept):
        with uploaded(folders["good"]) as url:
            cache = DiskCache(tmp_path / "cache", max_bytes="64MiB") if is_kept else None
            with Dataset(url, cache=cache) as one, Dataset(url, cache=cache) as other:
                self.check(self.mixed(one, other))
                self.check(self.mixed(one, one))

    def test_their_batches_are_those_of_any_world(self, folders):
        with Dataset(str(folders["good"])) as dataset:
            source = self.mixed(dataset, dataset)
            for wanted, found in zip(
                global_batches(source, 1), global_batches(source, 4), strict=True
            ):
                assert all(torch.equal(wanted[name], found[name]) for name in wanted)
