"""The output of a loader for each type of field: values, types, order and missing values."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from penstock import DataLoader, Pad, Ragged, World
from penstock.augment import (
    CenterCrop,
    CutMix,
    MixUp,
    Normalize,
    RandAugment,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from penstock.cache import ConfigError, RecipeError
from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    Bytes,
    ClassLabel,
    Image,
    Keypoints,
    Mask,
    MultiLabel,
    Text,
    Tokens,
    Value,
)
from tests.pipeline.feed.memory import Memory

N = 22
SIDE, SMALL = 24, 8
TYPES: dict[str, Any] = {
    "image": Image(),
    "mask": Mask(of="image", dtype="uint8"),
    "boxes": Boxes(of="image", format="xywh"),
    "points": Keypoints(of="image"),
    "thumbnail": Image(),
    "caption": Text(),
    "raw": Bytes(),
    "vector": Array("float32", (3,)),
    "scores": Array("float32", (None,), of="boxes"),
    "volume": Array("int16", (None, None)),
    "deep": Array("uint16", (2, 2)),
    "tokens": Tokens("int64"),
    "label": ClassLabel(tuple("abcdefghij")),
    "tags": MultiLabel(("x", "y")),
    "weight": Value("float64"),
    "there": Value("bool"),
}
rng = np.random.default_rng(0)


def classes_of(i: int) -> Any:
    """A mask whose pixels say where they are, and whose sample it is."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    return ((rows // 4 + columns // 6 * 8 + i) % 200).astype(np.uint8)


COLUMNS: dict[str, list[Any]] = {
    "image": [np.stack([classes_of(i)] * 3, axis=2) for i in range(N)],
    "mask": [classes_of(i) for i in range(N)],
    "boxes": [np.array([[1, 2, 3, 4]] * (i % 4), np.float32).reshape(-1, 4) for i in range(N)],
    "points": [np.array([[i, 1.5]] * (i % 3), np.float32).reshape(-1, 2) for i in range(N)],
    "thumbnail": [np.full((SMALL, SMALL, 3), i, np.uint8) for i in range(N)],
    "caption": [f"sample {i} é" for i in range(N)],
    "raw": [bytes([i] * (i % 5)) for i in range(N)],
    "vector": [np.array([i, i + 0.5, -i], np.float32) for i in range(N)],
    "scores": [np.full(i % 4, i, np.float32) for i in range(N)],
    "volume": [np.full((i % 3, 1 + i % 2), i, np.int16) for i in range(N)],
    "deep": [np.full((2, 2), 60_000 + i, np.uint16) for i in range(N)],
    "tokens": [np.arange(i % 6, dtype=np.int64) for i in range(N)],
    "label": [np.int64(i % 10) for i in range(N)],
    "tags": [np.array([i % 2, 1], np.float32) for i in range(N)],
    "weight": [np.float64(i / 7) for i in range(N)],
    "there": [np.bool_(i % 2) for i in range(N)],
}
ALL = (*reversed(TYPES), "id")


def memory(*fields: str, **more: Any) -> Memory:
    return Memory(TYPES, COLUMNS, fields=fields or ALL, **more)


def loaded(source: Memory, **options: Any) -> list[Any]:
    with DataLoader(source, **{"batch_size": 5, **options}) as loader:
        return list(loader)


def as_list(value: Any) -> list[Any]:
    return list(value)


def wanted(name: str, i: int) -> Any:
    """Return the output of a sample, in torch's layout."""
    value = COLUMNS[name][i]
    if name in ("image", "thumbnail"):
        return value.transpose(2, 0, 1)
    if name == "boxes":
        return np.array([[1, 2, 4, 6]] * (i % 4), np.float32).reshape(-1, 4)
    return value


DTYPES = {
    "image": torch.uint8,
    "mask": torch.uint8,
    "boxes": torch.float32,
    "points": torch.float32,
    "thumbnail": torch.uint8,
    "vector": torch.float32,
    "scores": torch.float32,
    "volume": torch.int16,
    "deep": torch.uint16,
    "tokens": torch.int64,
    "label": torch.int64,
    "tags": torch.float32,
    "weight": torch.float64,
    "there": torch.bool,
    "id": torch.int64,
}
RAGGED = {"boxes", "points", "scores", "volume", "tokens"}


@pytest.mark.parametrize("as_dict", [False, True])
def test_every_type_comes_out_as_documented(as_dict: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = loaded(memory(), as_dict=as_dict)
    seen = 0
    for batch in batches:
        assert type(batch) is (dict if as_dict else tuple)
        values: Any = batch if as_dict else dict(zip(ALL, batch, strict=True))
        assert tuple(values) == ALL
        ids = values["id"].tolist()
        seen += len(ids)
        for name, value in values.items():
            assert type(value) is (
                list if name in ("caption", "raw") else Ragged if name in RAGGED else torch.Tensor
            )
            assert len(value) == len(ids)
            if name in DTYPES:
                assert value.dtype == DTYPES[name]
            if name == "id":
                continue
            for place, i in enumerate(ids):
                found = as_list(value)[place]
                if isinstance(found, torch.Tensor):
                    assert np.array_equal(found.numpy(), wanted(name, i)), (name, i)
                else:
                    assert found == wanted(name, i)
    assert seen == N


def test_what_is_handed_out_is_the_users() -> None:
    source = memory("vector", "scores", "there", "id")
    first = loaded(source)
    for vector, scores, there, ids in first:
        vector.fill_(-1)
        scores.values.fill_(-1)
        there.fill_(True)
        ids.fill_(0)
    again = loaded(source)
    assert torch.equal(again[0][0][3], torch.tensor([3, 3.5, -3]))
    assert again[1][3].tolist() == [5, 6, 7, 8, 9]


TRAIN = [RandomResizedCrop(16), RandomHorizontalFlip(), Normalize()]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_shuffled_epoch_is_the_same_however_it_is_read(threads: int) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "augment": {"image": TRAIN}}
    one = loaded(memory(), **options)
    other = loaded(memory(), num_workers=threads, prefetch_factor=1, **options)
    assert sorted(int(i) for batch in one for i in batch[-1]) == list(range(N))
    for ours, theirs in zip(one, other, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            if isinstance(a, list):
                assert a == b
            else:
                assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_masks_stay_with_their_pixels() -> None:
    augment = [CenterCrop(17), RandomHorizontalFlip()]
    for image, mask in loaded(memory("image", "mask"), augment=augment, shuffle=True, seed=1):
        assert mask.shape == (len(image), 17, 17)
        assert torch.equal(image[:, 0], mask)


def test_the_masks_alone_need_no_image() -> None:
    (batch, *_) = loaded(memory("mask"))
    assert torch.equal(batch[0][4], torch.from_numpy(classes_of(4)))


def test_images_have_recipes_of_their_own() -> None:
    augment = {"image": [Resize((5, 7))], "thumbnail": [CenterCrop(4), Normalize()]}
    for image, thumbnail in loaded(memory("image", "thumbnail"), augment=augment):
        assert (image.dtype, image.shape[1:]) == (torch.uint8, (3, 5, 7))
        assert (thumbnail.dtype, thumbnail.shape[1:]) == (torch.float32, (3, 4, 4))


def test_a_padded_batch_marks_what_stands_in() -> None:
    (*_, last) = loaded(memory("caption", "scores", "id"), pad="mask", as_dict=True)
    assert last["valid"].tolist() == [True, True, False, False, False]
    assert [len(last[name]) for name in ("caption", "scores", "id")] == [5, 5, 5]


def test_pads_make_ragged_fields_dense() -> None:
    augment = [Pad("tokens", to=6, value=-1), Pad("volume")]
    for tokens, volume, boxes in loaded(memory("tokens", "volume", "boxes"), augment=augment):
        assert tokens.shape[1:] == (6,)
        assert volume.shape[1:] == (2, 2)
        assert isinstance(boxes, Ragged)
        for row in tokens.tolist():
            known = [x for x in row if x >= 0]
            assert known == list(range(len(known)))
            assert row == known + [-1] * (6 - len(known))


def test_a_sample_that_is_longer_than_its_pad_is_named() -> None:
    with pytest.raises(ConfigError, match=r"sample 3 \(sample-3\) is longer.* \(3, 4\)"):
        loaded(memory("boxes"), augment=[Pad("boxes", to=2)])


MIXED = [Resize((16, 16)), Normalize(), MixUp(0.4), CutMix()]


def test_mixing_leaves_other_fields_alone() -> None:
    source = memory("image", "caption", "label", "scores", "vector", "id")
    options: dict[str, Any] = {"augment": MIXED, "shuffle": True, "seed": 5, "drop_last": True}
    for image, caption, label, scores, vector, ids in loaded(source, **options):
        assert (label.shape, image.shape) == ((5, 10), (5, 3, 16, 16))
        assert label.sum(dim=1).tolist() == pytest.approx([1] * 5)
        assert caption == [COLUMNS["caption"][i] for i in ids.tolist()]
        assert [len(each) for each in scores] == [i % 4 for i in ids.tolist()]
        assert vector[:, 0].tolist() == ids.tolist()


def test_ranks_together_hand_out_what_one_does() -> None:
    """Of a mixed batch too, whose partners another rank may have: they stay out of all fields."""
    fields = ("image", "caption", "label", "scores", "tokens", "id")
    augment = [*MIXED, Pad("tokens", to=5)]
    options: dict[str, Any] = {"augment": augment, "shuffle": True, "seed": 5, "drop_last": True}

    def epoch(rank: int, size: int) -> list[Any]:
        world = World(rank, size)
        source = memory(*fields)
        with DataLoader(source, global_batch_size=10, world=world, **options) as loader:
            return list(loader)

    whole, *ranks = epoch(0, 1), *(epoch(rank, 3) for rank in range(3))
    for batch, *parts in zip(whole, *ranks, strict=True):
        for place, name in enumerate(fields):
            ours = as_list(batch[place])
            theirs = [each for part in parts for each in as_list(part[place])]
            assert len(ours) == len(theirs) == 10
            for a, b in zip(ours, theirs, strict=True):
                assert a == b if isinstance(a, str) else torch.equal(a, b), name


@pytest.mark.parametrize(
    ("fields", "options", "words"),
    [
        (("image", "mask"), {"augment": [RandAugment()]}, "follow"),
        (("image", "mask", "label"), {"augment": MIXED}, "mask"),
        (("image",), {"augment": MIXED}, 'add "label"'),
        (("caption",), {"augment": [Resize(8)]}, "needs images"),
        (("caption",), {"resident": True}, "one image field"),
        (("image", "thumbnail"), {"resident": True}, "has 2"),
        (("vector",), {"augment": [Pad("vector")]}, "don't differ"),
        (("vector",), {"as_dict": 3}, "as_dict"),
    ],
)
def test_what_cannot_be_is_said_when_the_loader_is_made(
    fields: tuple[str, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises((ConfigError, RecipeError), match=words):
        DataLoader(memory(*fields), 4, **options)


def test_images_of_several_sizes_need_a_recipe_and_are_named() -> None:
    columns = {**COLUMNS, "thumbnail": [np.zeros((4 + i, 8, 3), np.uint8) for i in range(N)]}
    source = Memory(TYPES, columns, fields=("image", "thumbnail"))
    with pytest.raises(RecipeError, match="thumbnail"):
        DataLoader(source, 4)
    (batch, *_) = loaded(source, augment={"thumbnail": [Resize((6, 6))]})
    assert batch[1].shape == (5, 3, 6, 6)


def test_one_image_field_of_several_sizes_is_named_too() -> None:
    columns = {"photo": [np.zeros((4 + i, 8, 3), np.uint8) for i in range(N)]}
    with pytest.raises(RecipeError, match='of "photo": The images are of different sizes'):
        DataLoader(Memory({"photo": Image()}, columns), 4)


def test_a_field_named_valid_cannot_be_beside_the_mask_in_a_dict() -> None:
    source = Memory({"valid": Value("int64")}, {"valid": [np.int64(1)] * 9})
    with pytest.raises(ConfigError, match='"valid"'):
        DataLoader(source, 4, pad="mask", as_dict=True)
    assert len(loaded(source, batch_size=4, pad="mask")[0]) == 2
    assert list(loaded(source, as_dict=True)[0]) == ["valid"]


LACKING = {
    name: [None if i % 3 == 0 else value for i, value in enumerate(values)]
    for name, values in COLUMNS.items()
}


def test_what_is_missing_is_empty_and_not_bad() -> None:
    names = [name for name in TYPES if name not in ("boxes", "points", "tokens", "volume")]
    names = [name for name in names if name != "scores"]
    fields = [part for name in names for part in (name, f"{name}.present")]
    source = Memory(TYPES, LACKING, fields=(*fields, "id"))
    recipes: Any = {"image": TRAIN}
    with DataLoader(source, 5, augment=recipes, as_dict=True) as loader:
        batches = list(loader)
        assert loader.statistics().bad == 0
    for batch in batches:
        for place, i in enumerate(batch["id"].tolist()):
            for name in names:
                present = bool(batch[f"{name}.present"][place])
                assert present == (i % 3 != 0)
                value = batch[name][place]
                if present and name == "caption":
                    assert value == wanted(name, i)
                if not present:
                    assert not len(value) if isinstance(value, str | bytes) else not value.any()
