"""Test mixtures whose parts have recipes of their own: each gives what it gives to all parts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from penstock import (
    CenterCrop,
    DataLoader,
    Dataset,
    Map,
    MixUp,
    Normalize,
    Pad,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    Tokens,
    World,
    imagenet_train,
    mix,
)
from penstock.errors import ConfigError, RecipeError
from penstock.readers import ImageFacts
from tests.field_sets import write_folder
from tests.images import class_folder, encoded, picture, truncated

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers import Encoded, Rejection

SAMPLES, BATCH = 36, 12
TRAIN = imagenet_train(16)
EVAL = (Resize((20, 20)), CenterCrop(16), Normalize())

pytestmark = pytest.mark.filterwarnings("ignore:Sample .* is bad")


def credulous(samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
    """Accept anything as an image of one size."""
    return [ImageFacts(height=24, width=32, channels=3, codec="png") for _ in samples]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Dataset]]:
    root = tmp_path_factory.mktemp("recipes")
    for number in range(SAMPLES):
        path = root / "flawed" / f"class-{number % 2}" / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = encoded(picture(number), "PNG")
        path.write_bytes(truncated(image) if number % 5 == 0 else image)
    Dataset(str(root / "flawed")).open(verify=credulous)
    texts = [f"web {'x' * (number % 7)}" for number in range(SAMPLES)]
    pq.write_table(pa.table({"text": texts}), root / "web.parquet")
    lines = [json.dumps({"chat": f"chat {'y' * (number % 5)}"}) for number in range(SAMPLES)]
    (root / "chat.jsonl").write_text("\n".join(lines))
    np.savez(root / "arrays.npz", grid=np.arange(SAMPLES * 64, dtype=np.int32).reshape(-1, 8, 8))
    found = {
        "good": Dataset(str(class_folder(root / "good", samples=SAMPLES, classes=2))),
        "flawed": Dataset(str(root / "flawed")),
        "street": Dataset(str(write_folder(root / "street", 20))).select("image", "mask", "boxes"),
        "chat": Dataset(str(root / "chat.jsonl")),
        "web": Dataset(str(root / "web.parquet")),
        "arrays": Dataset(str(root / "arrays.npz")),
    }
    yield found
    for each in found.values():
        each.close()


def batches(source: Any, **arguments: Any) -> list[dict[str, Any]]:
    given = {"shuffle": True, "seed": 4, "batch_size": BATCH, "as_dict": True, "max_bad": 1.0}
    with DataLoader(source, **{**given, **arguments}) as loader:
        return list(loader)


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def check(parts: dict[str, Dataset], recipes: dict[str, Any], **arguments: Any) -> set[int]:
    """Each part's samples are those of a loader that gives its recipe to all parts. Returns the
    parts that this rank saw."""
    fields = (*next(iter(parts.values())).fields, "part", "id")
    others = {name: recipe for name, recipe in recipes.items() if name != "a"}
    plain = mix(parts, weights=dict.fromkeys(parts, 1), epoch=96, fields=fields)
    mixed = mix(
        parts, weights=dict.fromkeys(parts, 1), epoch=96, fields=fields, part_augment=others
    )
    wanted = [batches(plain, augment=recipe, **arguments) for recipe in recipes.values()]
    found = batches(mixed, augment=recipes["a"], **arguments)
    assert len(found) == len(wanted[0])
    seen = set()
    for step, batch in enumerate(found):
        for row, part in enumerate(batch["part"].tolist()):
            alone = wanted[[*recipes].index(mixed.parts[part])][step]
            seen.add(part)
            assert all(same(batch[name][row], alone[name][row]) for name in batch)
    return seen


class TestImages:
    @pytest.mark.parametrize("world", [1, 2, 3])
    def test_each_part_has_its_recipe(self, data, world):
        """Also where a bad sample is replaced."""
        parts = {"a": data["good"], "b": data["flawed"], "c": data["good"]}
        recipes = {"a": TRAIN, "b": EVAL, "c": (RandomResizedCrop(16), Normalize())}
        seen = set[int]()
        for rank in range(world):
            at = World(rank, world)
            seen |= check(parts, recipes, world=at, batch_size=BATCH // world, drop_last=True)
        assert len(seen) == 3

    def test_padded_batches(self, data):
        recipes = {"a": TRAIN, "b": EVAL}
        assert check(
            {"a": data["good"], "b": data["flawed"]}, recipes, pad="mask", batch_size=10
        ) == {0, 1}

    def test_mixed_images(self, data):
        recipes = {"a": (*TRAIN, MixUp(0.4)), "b": (*EVAL, MixUp(0.4))}
        assert check({"a": data["good"], "b": data["flawed"]}, recipes, drop_last=True) == {0, 1}

    def test_masks_and_boxes_follow(self, data):
        recipes = {"a": TRAIN, "b": EVAL}
        assert check({"a": data["street"], "b": data["street"]}, recipes) == {0, 1}

    def test_boxes_without_images(self, data):
        """What follows images may be read without them."""
        street = data["street"].select("boxes", "id")
        crowd = Map(_as_they_are, fields="boxes", returns={"boxes": street.schema["boxes"]})
        source = mix({"a": street, "b": street}, epoch="once", part_augment={"b": [crowd]})
        found = dict[int, torch.Tensor]()
        for batch in batches(source):
            found |= dict(zip(batch["id"].tolist(), batch["boxes"], strict=True))
        assert all(torch.equal(found[number], found[number + 20]) for number in range(20))

    def test_a_part_of_one_size_needs_no_resize(self, data, tmp_path):
        for number in range(8):
            path = tmp_path / "small" / f"class-{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(picture(number, 16, 16), "PNG"))
        parts = {"small": Dataset(str(tmp_path / "small")), "good": data["good"]}
        source = mix(parts, epoch=48, part_augment={"good": [RandomResizedCrop(16)]})
        for batch in batches(source):
            assert batch["image"].shape[1:] == (3, 16, 16)
            assert batch["image"].dtype == torch.uint8

    def test_missing_images(self, data):
        fields = ("image", "image.present", "part")
        parts = {"good": data["good"], "web": data["web"], "flawed": data["flawed"]}
        recipes = {"good": EVAL, "web": TRAIN}
        source = mix(parts, fields=fields, missing="mask", epoch=96, part_augment=recipes)
        for batch in batches(source, augment=TRAIN):
            has = batch["image"].flatten(1).any(dim=1)
            assert torch.equal(has, batch["image.present"])
            assert torch.equal(has, batch["part"] != 1)


def _as_they_are(boxes: Any) -> Any:
    return boxes


def chat_tokens(line: str) -> list[int]:
    return [1, *map(ord, json.loads(line)["chat"])]


def web_tokens(text: str) -> list[int]:
    return [2, *map(ord, text)]


class TestOtherFields:
    def test_each_part_has_its_maps(self, data):
        """JSON lines and a Parquet column become tokens, each by a function of its own."""
        returns = {"tokens": Tokens("int32")}
        recipes = {
            name: [Map(make, fields=field, returns=returns)]
            for name, field, make in (("chat", "json", chat_tokens), ("web", "text", web_tokens))
        }
        source = mix(
            {"chat": data["chat"], "web": data["web"]},
            fields=("part",),
            missing="mask",
            part_augment=recipes,
            epoch="once",
        )
        count = 0
        for batch in batches(source):
            for part, tokens in zip(batch["part"].tolist(), batch["tokens"], strict=True):
                first, *text = tokens.tolist()
                assert first == part + 1
                assert bytes(text).decode().split()[0] == source.parts[part]
                count += 1
        assert count == 2 * SAMPLES

    def test_each_part_has_its_crops(self, data):
        recipes = {"a": [RandomCrop((4, 4))], "b": [CenterCrop((4, 4))]}
        assert check({"a": data["arrays"], "b": data["arrays"]}, recipes) == {0, 1}

    def test_a_mixture_among_the_parts_keeps_its_recipes(self, data):
        inner = mix(
            {"x": data["good"], "y": data["good"]}, part_augment={"x": EVAL}, epoch=4 * SAMPLES
        )
        own = mix({"a": data["good"], "in": inner}, epoch=96)
        given = mix({"a": data["good"], "in": inner}, epoch=96, part_augment={"in": TRAIN})
        assert own.contents.mixture.augments == {"in/x": EVAL}
        assert given.contents.mixture.augments == {"in/x": TRAIN, "in/y": TRAIN}
        alike = [batch["image"] for batch in batches(given, augment=TRAIN)]
        plain = [batch["image"] for batch in batches(own, augment=TRAIN)]
        assert len(alike) == len(plain)
        assert not all(map(torch.equal, alike, plain))


class TestErrors:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"c": []}, r"part_augment: got \['c'\], and the parts are \['a', 'b'\]"),
            ({"a": 3}, "part_augment: got 3 for 'a', wanted a list of operations"),
            ([EVAL], "part_augment: got .*, wanted recipes by the names of parts"),
        ],
    )
    def test_when_it_is_mixed(self, data, given, message):
        with pytest.raises(ConfigError, match=message):
            mix({"a": data["good"], "b": data["good"]}, part_augment=given)

    @pytest.mark.parametrize(
        ("recipe", "message"),
        [
            ([3], r'part_augment, of "b": augment'),
            (
                imagenet_train(20),
                r'the parts "a" and "b" deliver different batches. "image": float32 images, '
                "16 high, 16 wide, 3 channels, and float32 images, 20 high, 20 wide",
            ),
            ([RandomResizedCrop(16)], r"float32 images, .* and uint8 images"),
            ((*TRAIN, MixUp(0.2)), "and float32 images, .*, mixed by MixUp"),
            (
                [Map(chat_tokens, fields="id", returns={"more": Tokens("int32")}), *TRAIN],
                '"more": no such field, and',
            ),
            ([*TRAIN, Pad("label")], 'The recipe of the part "b": '),
            ({"label": TRAIN}, 'The recipe of the part "b": '),
        ],
    )
    def test_before_the_job_starts(self, data, recipe, message):
        source = mix({"a": data["good"], "b": data["good"]}, part_augment={"b": recipe})
        with pytest.raises(RecipeError, match=message):
            DataLoader(source, seed=1, batch_size=4, augment=TRAIN)

    def test_resident(self, data):
        source = mix({"a": data["good"], "b": data["good"]}, part_augment={"b": EVAL})
        with pytest.raises(ConfigError, match=r"resident=True keeps .* of one recipe"):
            DataLoader(source, seed=1, batch_size=4, augment=TRAIN, resident=True)
