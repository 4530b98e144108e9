"""`python -m benchmarks.views`: DINO's two global and eight local views of each photograph.

Three sides take turns in one process, over the same files: Penstock's `Views`; torchvision's
operations on Pillow images, as DINO's own code has them, without worker processes, whose pipes
would cost more; and a DALI graph written by hand, which decodes once, joins the changes of colour
in `color_twist`, and leaves the views in ten outputs. All resize bilinearly, or, with `--bicubic`,
as DINO's own code does, and end with normalised float32 batches. A ratio is that of the CPU-seconds
within a round: other work on the machine adds little to these. Writes
benchmarks/results/views.json.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from rich.console import Console

from benchmarks.data import prepare
from benchmarks.record import RESULTS, write_result
from penstock import IMAGENET_MEAN as MEAN
from penstock import IMAGENET_STD as DEVIATION
from penstock.pipeline.bench import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GLOBAL, LOCAL = 224, 96
GLOBAL_AREA, LOCAL_AREA, LOCALS = (0.4, 1.0), (0.05, 0.4), 8
BLURS = {"first": 1.0, "second": 0.1, "local": 0.5}
SOLARIZED, JITTERED, GREY = 0.2, 0.8, 0.2
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.4, 0.4, 0.2, 0.1
SIGMA = (0.1, 2.0)


def recipe(*, bicubic: bool = False) -> Any:
    """Return DINO's recipe for Penstock. bicubic: resize as Pillow's BICUBIC, always filtered."""
    from penstock import (
        ColorJitter,
        GaussianBlur,
        Normalize,
        RandomGrayscale,
        RandomHorizontalFlip,
        RandomResizedCrop,
        Solarize,
        Views,
    )

    how: Any = {"interpolation": "bicubic", "antialias": True} if bicubic else {}

    def view(size: int, area: tuple[float, float], which: str) -> list[Any]:
        return [
            RandomResizedCrop(size, scale=area, **how),
            RandomHorizontalFlip(),
            ColorJitter(BRIGHTNESS, CONTRAST, SATURATION, HUE, p=JITTERED),
            RandomGrayscale(GREY),
            GaussianBlur(17, SIGMA, p=BLURS[which]),
            *([Solarize(128, p=SOLARIZED)] if which == "second" else []),
            Normalize(MEAN, DEVIATION),
        ]

    first, second = (view(GLOBAL, GLOBAL_AREA, which) for which in ("first", "second"))
    local = view(LOCAL, LOCAL_AREA, "local")
    return [Views({"global": [(1, first), (1, second)], "local": (LOCALS, local)})]


def penstock_batches(
    folder: Path, batch_size: int, threads: int, *, bicubic: bool
) -> Iterator[int]:
    """Yield the sizes of Penstock's batches, without end."""
    from penstock import DataLoader, Dataset

    with (
        Dataset(str(folder), fields=("image",)) as dataset,
        DataLoader(
            dataset,
            batch_size,
            shuffle=True,
            seed=1,
            drop_last=True,
            augment=recipe(bicubic=bicubic),
            num_workers=threads,
            resident=False,
        ) as loader,
    ):
        while True:
            for globals_, locals_ in loader:
                assert globals_.shape[1:] == (2, 3, GLOBAL, GLOBAL)
                assert locals_.shape[1:] == (LOCALS, 3, LOCAL, LOCAL)
                yield len(globals_)


class PillowViews:
    """DINO's views by Pillow and torch, with torchvision's formulas."""

    def __init__(self, *, bicubic: bool = False) -> None:
        self._filter = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
        self._mean, self._deviation = (
            torch.tensor(numbers).view(3, 1, 1) for numbers in (MEAN, DEVIATION)
        )

    def __call__(self, image: Image.Image) -> list[torch.Tensor]:
        """Return the views of one image, global ones first."""
        views = [self._view(image, GLOBAL, GLOBAL_AREA, "first")]
        views.append(self._view(image, GLOBAL, GLOBAL_AREA, "second"))
        return views + [self._view(image, LOCAL, LOCAL_AREA, "local") for _ in range(LOCALS)]

    def _view(
        self, image: Image.Image, size: int, area: tuple[float, float], which: str
    ) -> torch.Tensor:
        left, top, width, height = _window(image, area)
        view = image.crop((left, top, left + width, top + height))
        view = view.resize((size, size), self._filter)
        if random.random() < 0.5:
            view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if random.random() < JITTERED:
            view = _jittered(view)
        if random.random() < GREY:
            view = Image.merge("RGB", [view.convert("L")] * 3)
        if random.random() < BLURS[which]:
            view = view.filter(ImageFilter.GaussianBlur(random.uniform(*SIGMA)))
        if which == "second" and random.random() < SOLARIZED:
            view = ImageOps.solarize(view)
        pixels = torch.from_numpy(np.array(view)).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div(255).sub_(self._mean).div_(self._deviation)


def _window(image: Image.Image, area: tuple[float, float]) -> tuple[int, int, int, int]:
    """Return left, top, width and height of torchvision's RandomResizedCrop."""
    width, height = image.size
    for _ in range(10):
        pixels = width * height * random.uniform(*area)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def _jittered(image: Image.Image) -> Image.Image:
    """Change the colours of an image in a random order, as torchvision's ColorJitter."""
    for change in random.sample(("brightness", "contrast", "saturation", "hue"), 4):
        if change == "hue":
            hue, saturation, value = image.convert("HSV").split()
            shift = np.uint8(round(random.uniform(-HUE, HUE) * 255) % 256)
            with np.errstate(over="ignore"):
                turned = np.array(hue, np.uint8) + shift
            image = Image.merge("HSV", (Image.fromarray(turned, "L"), saturation, value))
            image = image.convert("RGB")
            continue
        enhance: Any = {
            "brightness": (ImageEnhance.Brightness, BRIGHTNESS),
            "contrast": (ImageEnhance.Contrast, CONTRAST),
            "saturation": (ImageEnhance.Color, SATURATION),
        }[change]
        kind, most = enhance
        image = kind(image).enhance(random.uniform(1 - most, 1 + most))
    return image


def pillow_batches(folder: Path, batch_size: int, threads: int, *, bicubic: bool) -> Iterator[int]:
    """Yield the sizes of the batches of Pillow and torch, without end, on one thread."""
    del threads
    views, files = PillowViews(bicubic=bicubic), sorted(folder.glob("*/*"))
    random.seed(1)
    while True:
        random.shuffle(files)
        for start in range(0, len(files) - batch_size + 1, batch_size):
            samples = []
            for path in files[start : start + batch_size]:
                with Image.open(io.BytesIO(path.read_bytes())) as image:
                    samples.append(views(image.convert("RGB")))
            batch = [torch.stack(each) for each in zip(*samples, strict=True)]
            assert len(batch) == 2 + LOCALS
            yield len(batch[0])


def dali_batches(folder: Path, batch_size: int, threads: int, *, bicubic: bool) -> Iterator[int]:
    """Yield the sizes of the batches of the graph written by hand, without end."""
    from nvidia.dali import fn, pipeline_def, types
    from torch.utils.dlpack import from_dlpack

    filter = types.INTERP_CUBIC if bicubic else types.INTERP_LINEAR

    def view(images: Any, size: int, area: tuple[float, float], which: str) -> Any:
        images = fn.random_resized_crop(
            images, size=[size, size], random_area=list(area), interp_type=filter
        )
        # One pass for all colours: factors of 1 leave an image as it is, saturation 0 is grey.
        on = fn.random.coin_flip(probability=JITTERED, dtype=types.INT32)
        colours = fn.random.coin_flip(probability=1 - GREY, dtype=types.INT32)
        images = fn.color_twist(
            images,
            brightness=1 + on * fn.random.uniform(range=(-BRIGHTNESS, BRIGHTNESS)),
            contrast=1 + on * fn.random.uniform(range=(-CONTRAST, CONTRAST)),
            saturation=colours * (1 + on * fn.random.uniform(range=(-SATURATION, SATURATION))),
            hue=on * fn.random.uniform(range=(-360 * HUE, 360 * HUE)),
        )
        blurs = fn.random.coin_flip(probability=BLURS[which], dtype=types.BOOL)
        if blurs:
            images = fn.gaussian_blur(images, sigma=fn.random.uniform(range=SIGMA))
        if which == "second":
            solarizes = fn.random.coin_flip(probability=SOLARIZED, dtype=types.BOOL)
            if solarizes:
                images = images ^ ((images >= 128) * types.Constant(255, dtype=types.UINT8))
        return fn.crop_mirror_normalize(
            images,
            mean=[255 * each for each in MEAN],
            std=[255 * each for each in DEVIATION],
            mirror=fn.random.coin_flip(),
            dtype=types.FLOAT,
            output_layout="CHW",
        )

    @pipeline_def(enable_conditionals=True)  # type: ignore[untyped-decorator]
    def graph() -> Any:
        encoded, _ = fn.readers.file(
            files=[str(path) for path in sorted(folder.glob("*/*"))], random_shuffle=True
        )
        images = fn.decoders.image(encoded, output_type=types.RGB)
        first = view(images, GLOBAL, GLOBAL_AREA, "first")
        second = view(images, GLOBAL, GLOBAL_AREA, "second")
        local = [view(images, LOCAL, LOCAL_AREA, "local") for _ in range(LOCALS)]
        return (first, second, *local)

    pipeline = graph(
        batch_size=batch_size, num_threads=threads, seed=1, prefetch_queue_depth=1, device_id=None
    )
    pipeline.build()
    while True:
        views = [from_dlpack(each.as_tensor()) for each in pipeline.run()]
        assert views[-1].shape[1:] == (3, LOCAL, LOCAL)
        yield len(views[0])


SIDES: dict[str, Callable[..., Iterator[int]]] = {
    "penstock": penstock_batches,
    "torch and Pillow": pillow_batches,
    "DALI by hand": dali_batches,
}


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one side."""

    cpu_s_per_1000: float


def play(batches: Iterator[int], count: int) -> Round:
    """Take some batches. A side is idle before and after, with as many batches made ahead, so the
    CPU time is that of `count` batches."""
    began_s = time.process_time()
    images = sum(next(batches) for _ in range(count))
    _wait_until_idle()
    return Round(1000 * (time.process_time() - began_s) / images)


def _wait_until_idle() -> None:
    """Wait until no thread of this process works."""
    before = -1.0
    while time.process_time() - before > 0.02:
        before = time.process_time()
        time.sleep(0.5)


def measure(
    work: Path,
    *,
    rounds: int = 7,
    batches: int = 6,
    batch_size: int = 64,
    photographs: int = 3072,
    eval_images: int = 480,
    threads: int = 2,
    bicubic: bool = False,
    results: Path = RESULTS,
    console: Console,
) -> Path:
    """Play all sides in turns, print a line each and write the result. Returns its path.

    photographs, eval_images: of `benchmarks.data.prepare`.
    """
    prepared = prepare(work, train_images=photographs, eval_images=eval_images)
    torch.set_num_threads(1)
    playing = {
        name: side(prepared.images.train, batch_size, threads, bicubic=bicubic)
        for name, side in SIDES.items()
    }
    found: dict[str, list[Round]] = {name: [] for name in playing}
    try:
        for side in playing.values():
            for _ in range(3):  # build, compile, fill
                next(side)
        _wait_until_idle()
        for _ in range(rounds):
            for name, side in playing.items():
                found[name].append(play(side, batches))
    finally:
        for side in playing.values():
            side.close()  # type: ignore[attr-defined]  # generators
    ours = [each.cpu_s_per_1000 for each in found["penstock"]]
    ratios = {
        name: Figure.of([other.cpu_s_per_1000 / own for own, other in zip(ours, each, strict=True)])
        for name, each in found.items()
    }
    for name, each in found.items():
        _report(name, each, ratios[name], console)
    measured = {
        "dataset": prepared.record() | {"mean_pixels": _mean_pixels(prepared.images.train)},
        "batch_size": batch_size,
        "threads": threads,
        "ratios": {name: asdict(each) for name, each in ratios.items()},
        "rounds": {name: [asdict(one) for one in each] for name, each in found.items()},
    }
    return write_result(
        "views-bicubic" if bicubic else "views", measured, folder=results, distributions=("pillow",)
    )


def _report(name: str, each: Sequence[Round], ratio: Figure, console: Console) -> None:
    cpu = Figure.of([one.cpu_s_per_1000 for one in each])
    console.print(
        f"{name}: {cpu.median:.2f} CPU-s per 1,000 images, {ratio.median:.2f} "
        f"({ratio.low:.2f} to {ratio.high:.2f}) times Penstock's",
        highlight=False,
    )


def _mean_pixels(folder: Path) -> int:
    pixels = []
    for path in folder.glob("*/*"):
        with Image.open(path) as image:
            pixels.append(image.width * image.height)
    return round(sum(pixels) / len(pixels))


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run the measurement."""
    parser = argparse.ArgumentParser(prog="benchmarks.views", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--bicubic", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("demo"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    measure(
        options.work,
        rounds=3 if options.quick else 7,
        photographs=512 if options.quick else 3072,
        eval_images=64 if options.quick else 480,
        bicubic=options.bicubic,
        results=options.results,
        console=Console(),
    )


if __name__ == "__main__":
    main()
