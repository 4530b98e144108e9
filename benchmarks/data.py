"""The images of the benchmarks, as a folder and as a pack."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.photographs import ImageSet, borrow_images, make_photographs
from penstock.cache import DestinationError
from penstock.pipeline.bench import machine

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An image set and the pack of its training images. own: True for the user's images."""

    images: ImageSet
    pack: Path
    own: bool

    def record(self) -> dict[str, Any]:
        """Describe the data in results, without the user's paths."""
        return {
            "images": self.images.train_images,
            "classes": len(self.images.classes),
            "mean_bytes": round(
                self.images.image_bytes / (self.images.train_images + self.images.eval_images)
            ),
            "origin": "the user's own folder" if self.own else self.images.origin,
        }


def prepare(
    out: Path, *, data: Path | None = None, train_images: int = 3072, eval_images: int = 480
) -> Prepared:
    """Make or link the images and pack them below `out`; the results of an earlier
    call are reused."""
    from penstock import pack

    workers = int(machine()["cores"])
    if data is None:
        images = make_photographs(
            out / "photographs", train_images=train_images, eval_images=eval_images, workers=workers
        )
    else:
        images = borrow_images(data, out / "yours")
    target = out / "bench-pack"
    try:
        pack(str(images.train), str(target), workers=workers)
    except DestinationError:  # of other images, or by another version; it is ours to replace
        shutil.rmtree(target)
        pack(str(images.train), str(target), workers=workers)
    return Prepared(images=images, pack=target, own=data is not None)
