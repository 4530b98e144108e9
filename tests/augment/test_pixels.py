"""Test how close pixels are to Pillow's, which torchvision users train and evaluate on."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from skimage import data

from penstock.augment import (
    Cast,
    CenterCrop,
    Decode,
    Graph,
    GraphPlan,
    Normalize,
    RandomResizedCrop,
    Resize,
    check_recipe,
    draw,
    imagenet_eval,
)
from penstock.readers import EncodedBatch, ImageRange

CROP = (96, 120)
QUALITIES = (60, 75, 85, 90, 95)


def photographs(count, *, seed):
    """Crops of scikit-image's photographs as JPEGs: several qualities, subsamplings and kinds."""
    rng = np.random.default_rng(seed)
    whole = [data.astronaut(), data.coffee(), data.chelsea(), data.rocket()]
    files = []
    for number in range(count):
        picture = whole[number % len(whole)]
        top = rng.integers(picture.shape[0] - CROP[0] + 1)
        left = rng.integers(picture.shape[1] - CROP[1] + 1)
        crop = Image.fromarray(picture[top : top + CROP[0], left : left + CROP[1]])
        options: dict[str, object] = {"quality": QUALITIES[number % 5], "subsampling": number % 3}
        buffer = io.BytesIO()
        if number % 10 == 9:
            exif = Image.Exif()
            exif[0x0112] = 1 + number // 10 % 8
            options["exif"] = exif
        (crop.convert("L") if number % 25 == 0 else crop).save(
            buffer, "JPEG", progressive=number % 7 == 0, **options
        )
        files.append(buffer.getvalue())
    return files


def noise(number, *, height, width):
    """A PNG of noise, which shows a wrong weight anywhere."""
    rng, buffer = np.random.default_rng(number), io.BytesIO()
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def short_side(size, height, width):
    """Return height and width after Resize(size)."""
    image = ImageRange(min_height=height, max_height=height, min_width=width, max_width=width)
    return Resize(size).sizes(image).fixed


def pillow(file, mode="RGB"):
    return ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert(mode)


def run(recipe, files, *, batch_size=64):
    """Pixels of the recipe, float32, in batches; and the draws."""
    dims = np.array([pillow(file).size[::-1] for file in files], np.int32)
    low, high = dims.min(axis=0).tolist(), dims.max(axis=0).tolist()
    images = ImageRange(min_height=low[0], max_height=high[0], min_width=low[1], max_width=high[1])
    checked = check_recipe(recipe, images=images)
    graph = Graph(GraphPlan(checked, batch_size=batch_size, threads=2))
    ids = np.arange(len(files))
    draws = draw(checked, ids=ids, dims=dims, seed=0, epoch=0)
    pixels = []
    for begin in range(0, len(files), batch_size):
        part = slice(begin, begin + batch_size)
        encoded = [np.frombuffer(file, np.uint8) for file in files[part]]
        batch = EncodedBatch(ids=ids[part], encoded=encoded, dims=dims[part])
        graph.feed(batch, {name: values[part] for name, values in draws.items()})
        pixels.append(graph.outputs().float().numpy())
    graph.close()
    return np.concatenate(pixels), draws


def gap(ours, theirs):
    """Differences to Pillow's pictures (h, w, c), in units of 1/255."""
    theirs = np.stack([np.atleast_3d(np.asarray(picture)) for picture in theirs])
    return np.abs(ours - theirs.transpose(0, 3, 1, 2))


def test_a_thousand_decoded_jpegs_agree_with_pillow():
    files = photographs(1000, seed=0)
    upright = [file for file in files if pillow(file).size == (CROP[1], CROP[0])]
    turned = [file for file in files if pillow(file).size != (CROP[1], CROP[0])]
    assert len(upright) > 900
    assert len(turned) > 20
    for same_size in (upright, turned):
        difference = gap(run(None, same_size)[0], [pillow(file) for file in same_size])
        assert difference.mean(axis=(1, 2, 3)).max() <= 0.05  # asked for: 1.5


def test_gray_agrees_with_pillow():
    files = photographs(40, seed=1)
    ours, _ = run((Decode("gray"), CenterCrop(64)), files)
    theirs = [pillow(file, "L") for file in files]
    boxes = [((p.width - 64) // 2, (p.height - 64) // 2) for p in theirs]
    theirs = [p.crop((x, y, x + 64, y + 64)) for p, (x, y) in zip(theirs, boxes, strict=True)]
    assert gap(ours, theirs).mean() < 1.5


@pytest.mark.parametrize(("resize", "size"), [(64, 56), (200, 180)])
def test_evaluation_agrees_with_pillow_and_torchvisions_resize(resize, size):
    files = photographs(120, seed=2)
    ours, _ = run((Resize(resize), CenterCrop(size)), files)
    theirs = []
    for file in files:
        picture = pillow(file)
        height, width = short_side(resize, picture.height, picture.width)
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        x, y = round((width - size) / 2), round((height - size) / 2)
        theirs.append(picture.crop((x, y, x + size, y + size)))
    difference = gap(ours, theirs)
    assert difference.max() <= 2
    assert difference.mean() < 0.3


def test_a_training_window_agrees_with_pillows_crop_and_resize():
    files = photographs(120, seed=3)
    ours, draws = run((RandomResizedCrop((40, 50), antialias=True),), files)
    theirs = []
    for file, (y, x), (h, w) in zip(files, draws["start"], draws["shape"], strict=True):
        window = pillow(file).crop((x, y, x + w, y + h))
        theirs.append(window.resize((50, 40), Image.Resampling.BILINEAR))
    difference = gap(ours, theirs)
    assert difference.mean() < 0.3
    assert difference.max() <= 2  # Pillow's own decoder differs by 1 from DALI's


def _interpolated(pixels: np.ndarray, size: tuple[int, int], *, antialias: bool) -> np.ndarray:
    """torchvision's Resize of a float image: (h, w, c) to (c, *size)."""
    image = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None]
    options = {"size": size, "mode": "bilinear", "align_corners": False, "antialias": antialias}
    return torch.nn.functional.interpolate(image, **options)[0].numpy()


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(40, 50), (7, 9), (3, 200), (64, 64), (150, 170), (1, 1)])
def test_a_resize_is_torchvisions_within_1_to_the_outermost_pixel(size, antialias):
    files = [noise(k, height=5 + 9 * k, width=90 - 8 * k) for k in range(10)]
    ours, _ = run((Resize(size, antialias=antialias),), files)
    for file, got in zip(files, ours, strict=True):
        wanted = _interpolated(np.asarray(pillow(file)), size, antialias=antialias)
        assert np.abs(got - wanted).max() <= 1


def test_a_window_is_cropped_before_it_is_resized_as_in_torchvision():
    files = [noise(k, height=60 + k, width=90 - k) for k in range(30)]
    ours, draws = run((RandomResizedCrop((20, 30), antialias=True),), files)
    for file, got, (y, x), (h, w) in zip(files, ours, draws["start"], draws["shape"], strict=True):
        window = np.asarray(pillow(file))[y : y + h, x : x + w]
        assert np.abs(got - _interpolated(window, (20, 30), antialias=True)).max() <= 1


def test_a_crop_behind_a_resize_shows_the_resized_image_within_1():
    files = [noise(k, height=60 + k, width=90 - k) for k in range(10)]
    ours, _ = run((Resize(50), CenterCrop((50, 48))), files)
    for file, got in zip(files, ours, strict=True):
        pixels = np.asarray(pillow(file))
        size = short_side(50, pixels.shape[0], pixels.shape[1])
        whole = _interpolated(pixels, size, antialias=True)
        top, left = round((size[0] - 50) / 2), round((size[1] - 48) / 2)
        assert np.abs(got - whole[:, top : top + 50, left : left + 48]).max() <= 1


def test_auto_filters_the_windows_that_shrink_by_more_than_2():
    files = photographs(60, seed=3)
    auto, draws = run((RandomResizedCrop((40, 50)),), files)
    filtered, _ = run((RandomResizedCrop((40, 50), antialias=True),), files)
    plain, _ = run((RandomResizedCrop((40, 50), antialias=False),), files)
    shrinks = (draws["shape"] > np.array([80, 100])).any(axis=1)
    assert 0 < shrinks.sum() < len(files)
    np.testing.assert_array_equal(auto[shrinks], filtered[shrinks])
    np.testing.assert_array_equal(auto[~shrinks], plain[~shrinks])
    assert np.abs(auto - filtered).mean() < 1.0


@pytest.mark.parametrize("antialias", [True, False])
def test_a_region_resized_is_the_whole_resized_and_cropped(antialias):
    files = photographs(60, seed=4)
    shape = (CROP[0] * 2 // 3, CROP[1] * 2 // 3)
    files = [file for file in files if pillow(file).size == (CROP[1], CROP[0])]
    whole, _ = run((Resize(shape, antialias=antialias),), files)
    top, left = round((shape[0] - 50) / 2), round((shape[1] - 48) / 2)
    region, _ = run((Resize(shape, antialias=antialias), CenterCrop((50, 48))), files)
    difference = np.abs(whole[:, :, top : top + 50, left : left + 48] - region)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3


def test_normalize_is_torchvisions():
    files = photographs(8, seed=5)
    plain, _ = run((Resize(64), CenterCrop(56)), files)
    ours, _ = run(imagenet_eval(56, resize=64), files)
    norm = Normalize()
    mean, std = (np.array(x, np.float32).reshape(3, 1, 1) for x in (norm.mean, norm.std))
    np.testing.assert_allclose(ours, (plain / 255 - mean) / std, atol=2e-6)


def test_half_precision_is_the_float_rounded():
    files = photographs(8, seed=6)
    full, _ = run(imagenet_eval(56, resize=64), files)
    half, _ = run((*imagenet_eval(56, resize=64), Cast("float16")), files)
    np.testing.assert_allclose(half, full, rtol=1e-3, atol=1e-3)
