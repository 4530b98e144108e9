"""Draw the images of a batch in rows, with captions, masks, boxes and points.

It needs Pillow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_SHEET_PIXELS = 1800  # about the width of a screen
_LARGEST_CELL = 256
_SMALL_SIDE = 64
_CAPTION_PIXELS = 16
_GAP = 4
_MASK_SHARE = 0.5  # weight of a class's colour
_POINT_PIXELS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """One sample of one image field, ready to be drawn.

    pixels: uint8, shape (height, width, 3 or 1). masks: class numbers, shape (height, width) each;
    0 is transparent. boxes: x1, y1, x2, y2 in pixels, shape (k, 4). points: x, y in pixels, shape
    (k, 2).
    """

    pixels: NDArray[np.uint8]
    caption: str
    masks: Sequence[NDArray[Any]] = ()
    boxes: NDArray[Any] | None = None
    points: NDArray[Any] | None = None


def contact_sheet(pictures: Sequence[Picture]) -> Any:
    """Draw all pictures in rows, the smaller the more there are, and return a Pillow image.

    Raises MissingDependencyError without Pillow.
    """
    image, draw, font = _pillow()
    height = max(picture.pixels.shape[0] for picture in pictures)
    width = max(picture.pixels.shape[1] for picture in pictures)
    columns = math.ceil(math.sqrt(len(pictures) * height / width))
    room = max(48, _SHEET_PIXELS // columns - _GAP)
    scale = min(1.0, room / width, _LARGEST_CELL / max(height, width))
    if max(height, width) < _SMALL_SIDE:
        scale = _SMALL_SIDE / max(height, width)
    cell = max(1, round(width * scale)), max(1, round(height * scale))
    step_x, step_y = cell[0] + _GAP, cell[1] + _CAPTION_PIXELS + _GAP
    rows = math.ceil(len(pictures) / columns)
    sheet = image.new("RGB", (columns * step_x + _GAP, rows * step_y + _GAP), "white")
    pen = draw.Draw(sheet)
    letters = font.load_default(11)
    for number, picture in enumerate(pictures):
        x = _GAP + number % columns * step_x
        y = _GAP + number // columns * step_y
        sheet.paste(_drawn(picture, scale, image, draw), (x, y))
        caption = picture.caption
        while caption and pen.textlength(caption, font=letters) > cell[0]:
            caption = caption[:-1]
        pen.text((x, y + cell[1] + 1), caption, fill="black", font=letters)
    return sheet


def class_color(number: int) -> tuple[int, int, int]:
    """Return the colour of a mask's class or of the n-th box; neighbours get distant colours.

    The bits of the number are distributed over the three channels from the highest bit down, as in
    the colour map of the PASCAL VOC development kit.
    """
    channels = [0, 0, 0]
    for shift in range(7, -1, -1):
        for channel in range(3):
            channels[channel] |= (number >> channel & 1) << shift
        number >>= 3
    return channels[0], channels[1], channels[2]


def _drawn(picture: Picture, scale: float, image: Any, draw: Any) -> Any:
    """Draw one picture at its size on the sheet."""
    pixels = picture.pixels
    if pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, 3, axis=-1)
    for mask in picture.masks:
        pixels = _overlaid(pixels, mask)
    height, width = pixels.shape[:2]
    size = max(1, round(width * scale)), max(1, round(height * scale))
    drawn = image.fromarray(np.ascontiguousarray(pixels)).resize(size)
    pen = draw.Draw(drawn)
    for number, box in enumerate(_rows(picture.boxes, 4)):
        corners = [value * scale for value in box]
        if corners[2] > corners[0] and corners[3] > corners[1]:
            pen.rectangle(corners, outline=class_color(number + 1), width=2)
    for number, (x, y) in enumerate(_rows(picture.points, 2)):
        at = x * scale, y * scale
        around = (*(each - _POINT_PIXELS for each in at), *(each + _POINT_PIXELS for each in at))
        pen.ellipse(around, fill=class_color(number + 1))
    return drawn


def _overlaid(pixels: NDArray[np.uint8], mask: NDArray[Any]) -> NDArray[np.uint8]:
    """Blend the classes of a mask into an image."""
    if mask.shape != pixels.shape[:2]:
        return pixels
    blended = pixels.astype(np.float32)
    for number in np.unique(mask).tolist():
        if number:
            where = mask == number
            color = np.array(class_color(int(number) & 255), np.float32)
            blended[where] = (1 - _MASK_SHARE) * blended[where] + _MASK_SHARE * color
    return np.rint(blended).astype(np.uint8)


def _rows(values: NDArray[Any] | None, length: int) -> list[list[float]]:
    if values is None or not len(values):
        return []
    finite = values[np.isfinite(values).all(axis=-1)]
    rows: list[list[float]] = finite[:, :length].tolist()
    return rows


def _pillow() -> tuple[Any, Any, Any]:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise MissingDependencyError(
            "The contact sheet needs Pillow: run pip install pillow, or leave out --out."
        ) from None
    return Image, ImageDraw, ImageFont
