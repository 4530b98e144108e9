"""Test the compiled resize against its formula in numpy, and against DALI's own operators."""

from __future__ import annotations

import builtins
import ctypes
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.augment import (
    Cast,
    CenterCrop,
    ColorJitter,
    Decode,
    Graph,
    GraphPlan,
    Letterbox,
    LongestSide,
    Normalize,
    Pad,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ScaleJitter,
    check_recipe,
    dali_nodes,
    draw,
    imagenet_eval,
    imagenet_train,
)
from penstock.readers import EncodedBatch, ImageRange
from tests import images
from tests.properties import examples

if TYPE_CHECKING:
    from numpy.typing import NDArray

kernels = pytest.importorskip("penstock.augment.resample_kernels")

# Sums in another order, or float32 instead of float64, may fall on the other side of a half.
TIE = 1e-3


def cubic(x: float) -> float:
    """The weight of Pillow's BICUBIC at a distance."""
    if x < 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


def weights(low: float, high: float, size: int, resized: int, *, kind: int) -> NDArray[Any]:
    """The formula of `resample_kernels` as a matrix, (resized, size), float64."""
    scale, is_cubic = (high - low) / resized, kind >= 2
    stretch = max(1.0, scale) if kind % 2 else 1.0
    radius = 2 * stretch if is_cubic else stretch
    matrix = np.zeros((resized, size))
    for i in range(resized):
        center = low + (i + 0.5) * scale - 0.5
        reach = range(int(np.floor(center - radius)), int(np.ceil(center + radius)) + 1)
        away = {j: abs(j - center) / stretch for j in reach if 0 <= j < size}
        taps = {j: cubic(x) if is_cubic else max(0.0, 1 - x) for j, x in away.items()}
        for j, weight in taps.items():
            matrix[i, j] = weight / sum(taps.values())
    return matrix


def call(
    image: NDArray[Any],
    out: NDArray[Any],
    to: str,
    *,
    place: tuple[int, int, int, int] | None = None,
    window: tuple[int, int] | None = None,
    norm: Any = None,
    **given: Any,
) -> None:
    """Call compiled code like DALI's operator."""
    low, high = (np.array(given[name], np.float32) for name in ("low", "high"))
    size = out.shape[:2] if to == "pixels" else out.shape[1:]
    flips = given.get("upend", 0), given["mirror"]
    kind = dali_nodes.OUTPUTS.index(to)
    numbers = (given["kind"], *flips, *(place or (0, 0, *size)), *(window or size), kind)
    inputs = [
        image,
        low,
        high,
        np.array(numbers, np.int32),
        np.empty((*size, 0), np.uint8),
        np.zeros((image.shape[2] + 1, 2), np.float32) if norm is None else norm,
    ]

    def addresses(arrays: list[NDArray[Any]]) -> NDArray[np.int64]:
        return np.array([array.ctypes.data for array in arrays], np.int64)

    def shapes(arrays: list[NDArray[Any]]) -> list[NDArray[np.int64]]:
        return [np.array(array.shape or (0,), np.int64) for array in arrays]

    out_sizes, in_sizes = shapes([out]), shapes(inputs)
    words: list[NDArray[Any]] = [
        addresses([out]),
        addresses(out_sizes),
        np.array([3], np.int32),
        addresses(inputs),
        addresses(in_sizes),
        np.array([array.ndim for array in inputs], np.int32),
    ]
    at = [ctypes.c_uint64(int(array.ctypes.data)) for array in words]
    kernels.resample.ctypes(*at[:3], 1, *at[3:], len(inputs))


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    height, width = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    whole = draw(st.booleans())

    def span(side: int) -> tuple[float, float]:
        low = np.float32(side * draw(st.floats(0, 0.8)))
        return float(low), float(np.float32(low + (side - low) * draw(st.floats(0.1, 1))))

    (top, bottom), (left, right) = span(height), span(width)
    return {
        "image": (height, width, draw(st.sampled_from([1, 3]))),
        "out": (draw(st.integers(1, 40)), draw(st.integers(1, 40))),
        "low": (0.0, 0.0) if whole else (top, left),
        "high": (0.0, 0.0) if whole else (bottom, right),
        "kind": draw(st.integers(0, 3)),
        "mirror": draw(st.integers(0, 1)),
        "upend": draw(st.integers(0, 1)),
        "around": draw(st.tuples(*[st.integers(0, 5)] * 4)),
        "seed": draw(st.integers(0, 99)),
    }


@examples(200)
@given(job=jobs())
def test_the_kernels_are_their_formula(job: dict[str, Any]) -> None:
    (height, width, channels), (rows, columns) = job["image"], job["out"]
    rng = np.random.default_rng(job["seed"])
    image = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
    options = {name: job[name] for name in ("low", "high", "kind", "mirror", "upend")}
    (y0, x0), (y1, x1) = (
        job["low"],
        [h or s for h, s in zip(job["high"], (height, width), strict=True)],
    )
    down = weights(y0, y1, height, rows, kind=job["kind"])
    across = weights(x0, x1, width, columns, kind=job["kind"])
    if job["mirror"]:
        across = across[::-1]
    if job["upend"]:
        down = down[::-1]
    exact = np.einsum("yh,xw,hwc->yxc", down, across, image.astype(np.float64)).clip(0, 255)

    pixels = np.empty((rows, columns, channels), np.uint8)
    call(image, pixels, "pixels", **options)
    wanted = np.rint(exact)
    is_tie = np.abs(np.abs(exact - np.floor(exact)) - 0.5) < TIE
    assert (np.abs(pixels - wanted) <= is_tie).all()

    top, left, below, right = job["around"]
    window = (top + rows + below, left + columns + right)
    place = {"place": (top, left, rows, columns), "window": window}
    norm = rng.normal(size=(channels + 1, 2)).astype(np.float32)
    norm[channels] = 7, 9
    for to, dtype in (("planes", np.float32), ("octets", np.uint8)):
        found = np.empty((channels, window[0] + 3, window[1] + 2), dtype)
        call(image, found, to, norm=norm, **options, **place)
        expected = np.full((*window, channels), 7.0)
        expected[top : top + rows, left : left + columns] = pixels
        if to == "planes":
            expected = expected * norm[:channels, 0] + norm[:channels, 1]
        inner = found[:, : window[0], : window[1]]
        np.testing.assert_allclose(inner, expected.transpose(2, 0, 1), rtol=1e-5, atol=1e-4)
        assert (found[:, window[0] :] == 9).all()
        assert (found[:, :, window[1] :] == 9).all()


RECIPES: dict[str, tuple[Any, ...]] = {
    "train": imagenet_train(64),
    "small train": imagenet_train(24),
    "always filtered": (
        RandomResizedCrop(40, antialias=True),
        RandomHorizontalFlip(),
        Normalize(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)),
    ),
    "never filtered": (RandomResizedCrop(20, antialias=False),),
    "evaluation": imagenet_eval(56, resize=64),
    "larger": (Resize((250, 240)), RandomHorizontalFlip(p=1.0)),
    "gray": (Decode("gray"), Resize(60), CenterCrop(50), Cast("float32")),
    "two stages": (Resize((90, 80)), RandomResizedCrop((33, 44)), Normalize()),
    "pixel operations": (RandomResizedCrop(48), ColorJitter(brightness=0.3), Normalize()),
    "half": (*imagenet_train(32), Cast("float16")),
    "bytes": (Resize((21, 22)), Cast("uint8")),
    "cubic": (RandomResizedCrop(40, interpolation="bicubic"), RandomHorizontalFlip(), Normalize()),
    "cubic, filtered": (Resize(30, interpolation="bicubic"), CenterCrop(28), Cast("uint8")),
}


@pytest.fixture(scope="module")
def photographs() -> EncodedBatch:
    sizes = np.random.default_rng(5).integers(30, 200, (40, 2)).tolist()
    files = [images.jpeg(seed, *size, quality=90) for seed, size in enumerate(sizes)]
    return EncodedBatch(
        ids=np.arange(len(files)),
        encoded=[np.frombuffer(file, np.uint8) for file in files],
        dims=np.array(sizes, np.int32),
    )


def augmented(recipe: tuple[Any, ...], batch: EncodedBatch) -> NDArray[Any]:
    sides = ImageRange(min_height=30, max_height=200, min_width=30, max_width=200)
    checked = check_recipe(recipe, images=sides)
    graph = Graph(GraphPlan(checked, batch_size=len(batch.ids), threads=2))
    graph.feed(batch, draw(checked, ids=batch.ids, dims=batch.dims, seed=3, epoch=1))
    pixels = graph.outputs().float().numpy().copy()
    graph.close()
    norm = checked.normalize
    scale = 255 * np.array(norm.std).reshape(-1, 1, 1) if norm else 1.0
    return pixels * scale


@pytest.mark.parametrize("name", list(RECIPES))
def test_pixels_are_dalis(
    photographs: EncodedBatch, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1 of 255, and that in few places: sums of another order that fall on a half. DALI's
    own resize repeats the edge, which shows in the outermost pixels of what shrinks."""
    compiled = augmented(RECIPES[name], photographs)
    monkeypatch.setattr(dali_nodes, "is_compiled", lambda: False)
    by_dali = augmented(RECIPES[name], photographs)
    assert np.abs(compiled - by_dali).max() <= 25
    difference = np.abs(compiled - by_dali)[:, :, 3:-3, 3:-3]
    assert difference.max() <= (1.05 if name != "pixel operations" else 2.05)
    assert (difference > 0.01).mean() < (0.01 if name != "half" else 1.0)


FLIPS = (RandomHorizontalFlip(), RandomVerticalFlip())
FRAMED: dict[str, tuple[Any, ...]] = {
    "letterbox": (Letterbox((60, 72), fill=99), *FLIPS, Normalize()),
    "padded": (LongestSide(64), *FLIPS, Pad(to_multiple=24, value=7)),
    "fixed": (Resize(shorter=(30, 40), max_size=70), *FLIPS, Pad(to=80), Cast("float16")),
    "list": (RandomHorizontalFlip(), LongestSide((40, 50))),
    "large jitter": (ScaleJitter(60, (0.5, 2.0)), RandomCrop(60, pad_if_needed=True), *FLIPS),
    "pixel operations": (LongestSide(50), *FLIPS, ColorJitter(0.2), Pad(to_multiple=7)),
    "as they are": (*FLIPS, Pad(to_multiple=8, value=3), Normalize()),
    "gray": (Decode("gray"), Letterbox(50), Cast("float32")),
}


@pytest.mark.parametrize("device", [None, pytest.param(0, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", list(FRAMED))
def test_images_of_different_sizes_are_dalis(
    photographs: EncodedBatch, name: str, device: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def images_of(device: int | None) -> list[NDArray[Any]]:
        sides = ImageRange(min_height=30, max_height=200, min_width=30, max_width=200)
        checked = check_recipe(FRAMED[name], images=sides, lists=True)
        graph = Graph(
            GraphPlan(checked, batch_size=len(photographs.ids), threads=2, device_id=device)
        )
        draws = draw(checked, ids=photographs.ids, dims=photographs.dims, seed=3, epoch=1)
        graph.feed(photographs, draws)
        found = [each.float().cpu().numpy().copy() for each in graph.outputs()]
        graph.close()
        scale = 255 * np.array(checked.normalize.std)[:, None, None] if checked.normalize else 1.0
        return [each * scale for each in found]

    compiled = images_of(None)
    monkeypatch.setattr(dali_nodes, "is_compiled", lambda: False)
    for ours, theirs in zip(compiled, images_of(device), strict=True):
        assert ours.shape == theirs.shape
        difference = np.abs(ours - theirs)
        assert difference.max() <= (25 if device is None else 80)
        # DALI repeats the edge of what it shrinks, so more pixels differ at the border of an image.
        assert (difference > (1.05 if device is None else 9)).mean() < 0.1


def test_without_numba_dali_resizes(
    photographs: EncodedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_numba = augmented(RECIPES["train"], photographs)
    dali_nodes._operator.cache_clear()
    real_import = builtins.__import__

    def no_numba(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == "numba":
            raise ImportError("No module named 'numba'", name="numba")
        return real_import(name, *arguments)

    for name in [n for n in sys.modules if n.startswith("nvidia.dali.plugin.numba")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "penstock.augment.resample_kernels")
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", no_numba)
        assert not dali_nodes.is_compiled()
    without = augmented(RECIPES["train"], photographs)
    dali_nodes._operator.cache_clear()
    assert 0 < np.abs(with_numba - without).max() <= 1.02


def test_where_nothing_can_be_kept_it_is_compiled_in_each_process() -> None:
    asked: list[bool] = []

    def cfunc(signature: Any, *, cache: bool = False) -> Any:
        def compile_it(function: Any) -> Any:
            asked.append(cache)
            if cache:
                raise RuntimeError("cannot cache function: no locator available")
            return function, signature

        return compile_it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "cfunc", cfunc)
        assert kernels._compiled("signature")(len) == (len, "signature")
    assert asked == [True, False]
