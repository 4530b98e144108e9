"""augment= on torch datasets: DALI processes their images as it does those of a native dataset."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data
from PIL import Image

from penstock.augment import CenterCrop, Resize, imagenet_train
from penstock.cache import ConfigError, CorruptSampleError, DatasetError
from penstock.pipeline import DataLoader, World
from penstock.readers import Dataset
from tests.torch_datasets import same

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(3)
    for i in range(SAMPLES):
        pixels = rng.integers(0, 255, (5, 7, 3), np.uint8)
        image = Image.fromarray(pixels).resize((90 + 3 * i, 70 + i), Image.Resampling.BICUBIC)
        exif = image.getexif()
        exif[0x0112] = 6 if i % 3 == 0 else 1
        (root / str(i % 2)).mkdir(exist_ok=True)
        image.save(root / str(i % 2) / f"{i:02d}.jpg", quality=95, exif=exif)
    return root


class Photos(torch.utils.data.Dataset[Any]):
    """The folder's files in the order of Penstock's listing, in a chosen form."""

    def __init__(self, root: Path, form: str) -> None:
        self.paths = sorted(root.glob("[01]/*.jpg"))
        self.form = form

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        data, label = self.paths[index].read_bytes(), int(self.paths[index].parent.name)
        if self.form == "bytes":
            return data, label
        if self.form == "array of bytes":
            return {"id": index, "image": np.frombuffer(data, np.uint8), "label": label}
        from PIL import ImageOps

        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        if self.form == "pil":
            return label, image
        pixels = np.asarray(image).copy()
        return pixels if self.form == "alone" else (torch.from_numpy(pixels).permute(2, 0, 1),)


def images_of(batch: Any, form: str) -> torch.Tensor:
    key = {"bytes": 0, "array of bytes": "image", "pil": 1, "tensor": 0}.get(form)
    images: torch.Tensor = batch if key is None else batch[key]
    return images


@pytest.mark.parametrize(
    ("form", "workers"),
    [
        *((form, 0) for form in ("bytes", "array of bytes", "pil", "tensor", "alone")),
        # Processes are slow; two forms are enough.
        *((form, 2) for form in ("bytes", "pil")),
    ],
)
def test_the_same_pixels_as_a_native_dataset(folder: Path, form: str, workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 5, "seed": 3, "augment": imagenet_train(32)}
    with DataLoader(Dataset(folder, fields=("image", "id")), **options) as native:
        expected = {int(i): image for images, ids in native for i, image in zip(ids, images)}  # noqa: B905
    at = 0
    loader = DataLoader(Photos(folder, form), num_workers=workers, **options)
    for batch in loader:
        for image in images_of(batch, form):
            difference = (image - expected[at]).abs().mean()
            # Decoded whole by Pillow, or in part by DALI: chroma upsampling differs at the edges.
            assert difference < (1e-6 if "bytes" in form else 0.05), (at, difference)
            at += 1
    assert at == SAMPLES
    loader.close()


def test_the_rest_of_a_batch_stays_as_it_was(folder: Path) -> None:
    options: dict[str, Any] = {"batch_size": 5, "augment": (Resize(40), CenterCrop(32))}
    batch = next(iter(DataLoader(Photos(folder, "array of bytes"), **options)))
    assert batch["id"].tolist() == [0, 1, 2, 3, 4]
    assert batch["image"].shape == (5, 3, 32, 32)
    assert batch["image"].dtype == torch.uint8
    labels, images = next(iter(DataLoader(Photos(folder, "pil"), **options)))
    assert labels.tolist() == [0] * 5
    assert images.shape == (5, 3, 32, 32)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 5])
def test_resume_is_exact(folder: Path, workers: int, seed: int | None) -> None:
    def make() -> DataLoader:
        return DataLoader(
            Photos(folder, "bytes"), 2, shuffle=True, num_workers=workers, seed=seed,
            augment=imagenet_train(32),
        )  # fmt: skip

    first = make()
    batches = iter(first)
    next(batches), next(batches)
    state = first.state_dict()
    rest = list(batches)
    second = make()
    second.load_state_dict(state)
    assert same(rest, list(second))
    assert len(rest) == 4
    first.close()
    second.close()


def test_ranks_share_the_samples_and_masks_work(folder: Path) -> None:
    seen = []
    for rank in range(2):
        loader = DataLoader(
            Photos(folder, "bytes"), 4, seed=1, pad="mask", world=World(rank, 2),
            augment=imagenet_train(32),
        )  # fmt: skip
        for images, labels, valid in loader:
            assert len(images) == len(labels) == len(valid) == 4
            seen.append(int(valid.sum()))
        loader.close()
    assert sum(seen) == SAMPLES


def test_an_invalid_image_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="without an image"):
        next(iter(DataLoader([(1, 2), (3, 4)], augment=imagenet_train(32))))
    data = [b"these bytes are no image at all"]
    with pytest.raises((DatasetError, CorruptSampleError), match="not an image"):
        next(iter(DataLoader(data, augment=imagenet_train(32))))
    cut = [next(folder.glob("0/*.jpg")).read_bytes()[:900]]
    with pytest.raises(CorruptSampleError) as caught:
        next(iter(DataLoader(cut, augment=imagenet_train(32))))
    assert caught.value.sample_id == 0


def test_a_batch_sampler_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="sampler= instead of a batch_sampler"):
        DataLoader(Photos(folder, "bytes"), batch_sampler=[[0], [1]], augment=imagenet_train(32))


def test_a_framework_that_rebuilds_the_loader_gets_an_error(folder: Path) -> None:
    loader = DataLoader(Photos(folder, "bytes"), 4, augment=imagenet_train(32))
    rebuilt = torch.utils.data.DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn
    )
    with pytest.raises(ConfigError, match=r"docs/howto/trainers\.md"):
        next(iter(rebuilt))


PAIR_FORMS = ("bytes", "pil", "array")


class Pairs(torch.utils.data.Dataset[Any]):
    """Two images per sample, of different sizes."""

    def __init__(self, root: Path, form: str, *, in_tuple: bool = False) -> None:
        self.paths = sorted(root.glob("[01]/*.jpg"))
        self.form, self.in_tuple = form, in_tuple

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        left, right = (self._image(place) for place in (index, -1 - index))
        if self.in_tuple:
            return left, index, right
        mask = np.zeros((8, 8), np.uint8)
        return {"left": left, "id": index, "right": right, "mask": mask, "note": b"no image"}

    def _image(self, place: int) -> Any:
        data = self.paths[place].read_bytes()
        if self.form == "bytes":
            return data
        image = Image.open(io.BytesIO(data)).convert("RGB")
        return image if self.form == "pil" else np.asarray(image)


@pytest.mark.parametrize("form", PAIR_FORMS)
@pytest.mark.parametrize("in_tuple", [False, True])
def test_all_images_of_a_sample_are_decoded(folder: Path, form: str, in_tuple: bool) -> None:
    options: dict[str, Any] = {"batch_size": 5, "augment": [Resize((16, 24))], "seed": 1}
    with DataLoader(Pairs(folder, form, in_tuple=in_tuple), **options) as loader:
        batches = list(loader)
    left, ids, right = [0, 1, 2] if in_tuple else ["left", "id", "right"]  # type: ignore[misc]
    for batch in batches:
        assert batch[left].shape == batch[right].shape == (len(batch[ids]), 3, 16, 24)
        if not in_tuple:
            assert batch["mask"].shape == (len(batch[ids]), 8, 8)
            assert set(batch["note"]) == {b"no image"}
    lefts, rights = (torch.cat([batch[key] for batch in batches]) for key in (left, right))
    order = torch.cat([batch[ids] for batch in batches])
    back = torch.empty_like(order)
    back[order] = torch.arange(SAMPLES)
    # One sample's left image is another one's right image.
    assert torch.equal(lefts[back], rights[back.flip(0)])


def test_images_of_a_sample_share_its_draws(folder: Path) -> None:
    class Twice(Photos):
        def __getitem__(self, index: int) -> Any:
            data = self.paths[index].read_bytes()
            return {"image": data, "other": data}

    for batch in DataLoader(Twice(folder, ""), 4, augment=imagenet_train(32), seed=2):
        assert torch.equal(batch["image"], batch["other"])


def test_what_may_be_a_mask_is_no_second_image(folder: Path) -> None:
    class Masked(Photos):
        def __getitem__(self, index: int) -> Any:
            return Image.new("RGB", (30, 20)), Image.new("P", (30, 20))

    with pytest.raises(ConfigError, match="a mask or a gray picture"):
        next(iter(DataLoader(Masked(folder, ""), 4, augment=[Resize((8, 8))])))


@pytest.mark.parametrize("form", ["bytes", "array of bytes", "alone"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 3])
def test_single_samples(folder: Path, form: str, workers: int, seed: int | None) -> None:
    def batches(batch_size: int | None) -> list[Any]:
        torch.manual_seed(3)
        with DataLoader(
            Photos(folder, form), batch_size, augment=imagenet_train(32), num_workers=workers,
            seed=seed,
        ) as loader:  # fmt: skip
            return list(loader)

    alone, batched = batches(None), batches(1)
    assert len(alone) == SAMPLES
    for one, many in zip(alone, batched, strict=True):
        image = images_of(one, form)
        assert image.shape == (3, 32, 32)
        assert torch.equal(image, images_of(many, form)[0])
        if form == "bytes":  # torch's default_convert returns them unchanged
            assert type(one[1]) is int


@pytest.mark.parametrize("most", [4095, 65535])
def test_pictures_of_16_bits_are_scaled_as_their_files_are(most: int) -> None:
    """PIL would make all values above 255 white."""
    wide = np.linspace(0, most, 64, dtype=np.uint16).reshape(8, 8)
    picture = Image.fromarray(wide)
    picture.save(buffer := io.BytesIO(), "PNG")
    found = []
    for image in (picture, buffer.getvalue()):
        with DataLoader([image] * 2, batch_size=2, augment=[Resize((8, 8))]) as loader:
            found.append(next(iter(loader)))
    assert torch.equal(*found)
    assert found[0].max() == round(most / 257)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pictures_without_a_white_are_refused(mode: str) -> None:
    picture = Image.new(mode, (8, 8), 300)
    loader = DataLoader([picture], augment=[Resize((8, 8))])
    with pytest.raises(DatasetError, match=f"PIL's mode {mode}"):
        next(iter(loader))
    loader.close()


# Functions by name: a process that has threads starts its workers anew, and pickles what they need.
def _images(samples: list[Any]) -> list[Any]:
    return [sample["image"] for sample in samples]


def _seconds(samples: list[Any]) -> list[Any]:
    return [sample[1] for sample in samples]


def _nothing(samples: list[Any]) -> None:
    samples.clear()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_that_expects_images_gets_a_clear_error(folder: Path, workers: int) -> None:
    def loaded(form: str, collate: Any) -> None:
        photos = Photos(folder, form)
        options: dict[str, Any] = {"collate_fn": collate, "num_workers": workers}
        next(iter(DataLoader(photos, batch_size=2, augment=[Resize((8, 8))], **options)))

    def text_of(error: BaseException) -> str:
        return "".join([str(error), *getattr(error, "__notes__", [])])

    with pytest.raises(KeyError) as missing:
        loaded("array of bytes", _images)
    assert "receives samples without their images" in text_of(missing.value)
    with pytest.raises(IndexError) as short:
        loaded("bytes", _seconds)
    assert "receives samples without their images" in text_of(short.value)
    for form, wanted in (("bytes", "list or tuple"), ("array of bytes", "dict")):
        with pytest.raises(ConfigError, match=f"returned a NoneType, wanted a {wanted}"):
            loaded(form, _nothing)
