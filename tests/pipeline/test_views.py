"""Test whole jobs with several views of each image: the same in any batch, world and restart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock import (
    ColorJitter,
    DataLoader,
    Dataset,
    GaussianBlur,
    Map,
    MixUp,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    Resize,
    Views,
    World,
    mix,
)
from penstock.errors import ConfigError, PenstockWarning, RecipeError
from penstock.readers import ImageFacts
from tests import images, tars
from tests.field_sets import write_folder
from tests.images import class_folder, encoded, picture, truncated

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from penstock.readers import Encoded, Rejection

SAMPLES = 24
COLOURS = [RandomHorizontalFlip(), ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.8), GaussianBlur(5, p=0.5)]
GLOBAL = [RandomResizedCrop(20, scale=(0.4, 1.0)), *COLOURS, Normalize()]
LOCAL = [RandomResizedCrop(12, scale=(0.05, 0.4)), *COLOURS]
TURNED = [RandomResizedCrop(12), RandomRotation(30)]  # by DALI's operators
VIEWS = [Views({"global": (2, GLOBAL), "local": [(2, LOCAL), (1, TURNED)]})]
FIELDS = ("global", "local")

pytestmark = pytest.mark.filterwarnings("ignore:Sample .* is bad")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    root = tmp_path_factory.mktemp("views")
    with Dataset(str(class_folder(root / "good", samples=SAMPLES, classes=2))) as found:
        yield found.select("image", "label", "id")


def by_sample(dataset: Any, *, epochs: int = 2, **arguments: Any) -> dict[tuple[int, int], Any]:
    """The views of each sample in each epoch."""
    given = {"shuffle": True, "seed": 4, "batch_size": 8, "as_dict": True, "augment": VIEWS}
    found = dict[tuple[int, int], Any]()
    with DataLoader(dataset, **{**given, **arguments}) as loader:
        for epoch in range(epochs):
            for batch in loader:
                found |= views_of(batch, epoch)
    return found


def views_of(batch: dict[str, Any], epoch: int) -> dict[tuple[int, int], Any]:
    views = zip(*(batch[name] for name in FIELDS), strict=True)
    return {
        (epoch, number): tuple(each.clone() for each in some)
        for number, some in zip(batch["id"].tolist(), views, strict=True)
    }


def same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(
        all(a.equal(b) for a, b in zip(views, other[key], strict=True))
        for key, views in one.items()
    )


@pytest.fixture(scope="module")
def wanted(data: Dataset) -> dict[tuple[int, int], Any]:
    return by_sample(data)


def test_a_batch_has_the_views_in_place_of_the_image(data):
    with DataLoader(data, batch_size=8, augment=VIEWS, shuffle=False, seed=1) as loader:
        global_views, local_views, labels, ids = next(iter(loader))
    assert global_views.shape == (8, 2, 3, 20, 20)
    assert global_views.dtype == torch.float32
    assert local_views.shape == (8, 3, 3, 12, 12)
    assert local_views.dtype == torch.uint8
    assert global_views.is_contiguous()
    assert labels.shape == ids.shape == (8,)


def test_views_and_epochs_differ(wanted):
    first, second = wanted[0, 3], wanted[1, 3]
    for some, others in zip(first, second, strict=True):
        every = [*some, *others]
        for place, view in enumerate(every):
            assert not any(view.equal(other) for other in every[:place])


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 5},
        {"batch_size": 24, "num_workers": 1},
        {"batch_size": 1, "num_workers": 3},
        {"resident": True},
        {"prefetch_factor": 4},
    ],
    ids=str,
)
def test_the_same_bits_in_any_batch(data, wanted, arguments):
    assert same(by_sample(data, **arguments), wanted)


@pytest.mark.parametrize("world", [2, 3])
def test_the_same_bits_at_any_world(data, wanted, world):
    found = dict[Any, Any]()
    for rank in range(world):
        given = {"world": World(rank, world), "batch_size": 12 // world, "drop_last": True}
        found |= by_sample(data, **given)
    assert same(found, wanted)


def test_a_job_resumes_with_the_same_bits(data, wanted):
    given: dict[str, Any] = {"shuffle": True, "seed": 4, "as_dict": True, "augment": VIEWS}
    with DataLoader(data, batch_size=8, **given) as loader:
        batches = iter(loader)
        found = views_of(next(batches), 0)
        state = loader.state_dict()
    with DataLoader(data, batch_size=4, num_workers=1, **given) as loader:
        with pytest.warns(PenstockWarning, match="The global batch goes from 8 to 4"):
            loader.load_state_dict(state)
        for epoch in (0, 1):
            for batch in loader:
                found |= views_of(batch, epoch)
    assert same(found, wanted)


def test_a_repeated_sample_has_other_views(data):
    weights = np.full(SAMPLES, 0.01)
    weights[5] = 8.0
    with DataLoader(
        data, 24, shuffle=True, seed=4, as_dict=True, augment=VIEWS, weights=weights
    ) as loader:
        batch = next(iter(loader))
    rows = (batch["id"] == 5).nonzero().flatten().tolist()
    assert len(rows) > 4
    for name in FIELDS:
        views = [view for row in rows for view in batch[name][row]]
        assert len({view.numpy().tobytes() for view in views}) == len(views)


def test_a_fixed_view_is_the_plain_image(data):
    recipe = [Resize((20, 24)), Normalize()]
    given: dict[str, Any] = {"batch_size": 24, "shuffle": False, "seed": 1, "as_dict": True}
    with DataLoader(data, augment=recipe, **given) as loader:
        plain = next(iter(loader))["image"]
    with DataLoader(data, augment=[Views({"view": (2, recipe)})], **given) as loader:
        views = next(iter(loader))["view"]
    assert views.equal(plain[:, None].expand_as(views))


def credulous(samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
    """Accept anything as an image of one size."""
    return [ImageFacts(height=24, width=32, channels=3, codec="png") for _ in samples]


@pytest.fixture(scope="module")
def flawed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """A folder of which every sixth image doesn't decode."""
    root = tmp_path_factory.mktemp("flawed")
    for number in range(SAMPLES):
        path = root / "flawed" / f"class-{number % 2}" / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = encoded(picture(number), "PNG")
        path.write_bytes(truncated(image) if number % 6 == 0 else image)
    Dataset(str(root / "flawed")).open(verify=credulous)
    with Dataset(str(root / "flawed")) as found:
        yield found.select("image", "label", "id")


class TestBadSamples:
    def test_substitutes_have_views_of_their_own(self, flawed):
        found = by_sample(flawed, max_bad=1.0)
        for views in found.values():
            assert all(view.any() for field in views for view in field)
        again = by_sample(flawed, max_bad=1.0, batch_size=6)
        for key in found.keys() & again.keys():
            assert all(a.equal(b) for a, b in zip(found[key], again[key], strict=True))

    def test_not_valid_in_padded_batches(self, flawed):
        with DataLoader(
            flawed, 10, seed=1, pad="mask", augment=VIEWS, as_dict=True, max_bad=1.0, shuffle=False
        ) as loader:
            batches = list(loader)
        assert [len(batch["global"]) for batch in batches] == [10, 10, 10]
        valid = torch.cat([batch["valid"] for batch in batches])
        assert int(valid.sum()) == SAMPLES - 4
        for batch in batches:
            real = torch.stack([batch[name].flatten(1).any(dim=1) for name in FIELDS])
            assert torch.equal(real[0], real[1])
            assert not real[0][~batch["valid"] & (batch["id"] % 6 == 0)].any()


def test_missing_images_have_views_of_zeros(tmp_path: Path):
    files = dict[str, bytes]()
    for number in range(12):
        files[f"{number:02d}.left.jpg"] = images.jpeg(number, 24, 32)
        if number % 3:
            files[f"{number:02d}.right.jpg"] = images.jpeg(number + 12, 20, 30)
    (tmp_path / "pairs.tar").write_bytes(tars.archive(files))
    augment: dict[str, Any] = {"left": [Resize((8, 8))], "right": VIEWS}
    fields = ("left", "right", "right.present", "id")
    with (
        Dataset(tmp_path, fields=fields) as dataset,
        DataLoader(dataset, 5, seed=1, shuffle=True, augment=augment) as loader,
    ):
        for left, some, others, present, _ in loader:
            assert left.flatten(1).any(dim=1).all()
            assert torch.equal(some.flatten(1).any(dim=1), present)
            assert torch.equal(others.flatten(1).any(dim=1), present)


class TestMixtures:
    def test_all_parts_have_views(self, data):
        source = mix({"a": data, "b": data}, epoch="once", fields=("image", "part", "id"))
        numbers = list[int]()
        with DataLoader(source, 12, seed=1, shuffle=True, augment=VIEWS) as loader:
            for some, others, _, ids in loader:
                assert some.shape[1:] == (2, 3, 20, 20)
                assert others.shape[1:] == (3, 3, 12, 12)
                numbers += ids.tolist()
        assert sorted(numbers) == list(range(2 * SAMPLES))

    def test_each_part_has_its_views(self, data):
        """A sample of one part has the bits that it has if all parts have its recipe."""
        other = [Views({"global": (2, [*GLOBAL[:1], Normalize()]), "local": (3, TURNED)})]
        given: dict[str, Any] = {"epoch": "once", "fields": ("image", "part", "id")}
        parts = {"a": data, "b": data}
        mixed = by_sample(mix(parts, part_augment={"b": other}, **given))
        first, second = (by_sample(mix(parts, **given), augment=each) for each in (VIEWS, other))
        for key, views in mixed.items():
            wanted = (first if key[1] < SAMPLES else second)[key]
            assert all(a.equal(b) for a, b in zip(views, wanted, strict=True))

    def test_views_that_differ(self, data):
        other = [Views({"global": (3, GLOBAL), "local": (3, LOCAL)})]
        source = mix({"a": data, "b": data}, epoch="once", part_augment={"b": other})
        with pytest.raises(
            RecipeError, match=r'"global": 2 views, float32 images, 20 high.*3 views'
        ):
            DataLoader(source, 12, seed=1, augment=VIEWS)


class TestRefusals:
    def test_masks(self, tmp_path):
        with (
            Dataset(str(write_folder(tmp_path / "street", 4)), fields=("image", "mask")) as dataset,
            pytest.raises(RecipeError, match="can't follow it"),
        ):
            DataLoader(dataset, 2, augment=VIEWS)

    def test_mixed_views(self):
        with pytest.raises(RecipeError, match="Mix them in your training step"):
            Views({"global": (2, [*GLOBAL, MixUp(0.2)])})

    def test_torch_datasets(self):
        numbers = torch.utils.data.TensorDataset(torch.zeros(4))
        with pytest.raises(ConfigError, match="Let __getitem__ return the views"):
            DataLoader(numbers, 2, seed=1, augment=VIEWS)

    def test_maps_stay_in_front(self, data):
        same = Map(lambda label: label, fields="label")
        with DataLoader(data, 8, seed=1, augment=[same, *VIEWS]) as loader:
            assert next(iter(loader))[0].shape == (8, 2, 3, 20, 20)
        with pytest.raises(RecipeError, match="in front of all other operations"):
            DataLoader(data, 8, seed=1, augment=[*VIEWS, same])
