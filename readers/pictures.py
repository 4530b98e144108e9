"""Draw samples as pictures: images with their boxes, class names, masks and points, with Pillow.

`pictures_of` finds out what each value of a sample is, by the type of its field if it is known,
else by its name and shape. `contact_sheet` draws the pictures of several samples on one sheet.
"""

from __future__ import annotations

import base64
import colorsys
import contextlib
import html
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fieldtypes import FieldTypes, Schema, image_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image, ImageDraw

    from penstock.readers.types import Numbers

    Size = tuple[int, int]
    Color = tuple[int, int, int]

Scaling = tuple[Sequence[float], Sequence[float]]
"""The mean and the std of a `Normalize`."""

_GAP = 6
_SMALLEST_CELL, _LARGEST_CELL = 112, 640
_MASK_SHARE = 0.5  # weight of a mask's colour
_HUE_STEP = 0.618034  # the golden ratio: consecutive numbers get distant hues
_CAPTION_CHARACTERS = 80

_BOXES = ("box", "xyxy")
_POINTS = ("point", "kpt", "landmark")
_LABELS = ("label", "class", "categor", "target")
_NO_IMAGES = ("mask", *_BOXES, *_POINTS, *_LABELS)
_SMALLEST_SIDE = 8  # of what may be an image, by its shape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """One image of one sample, ready to be drawn.

    pixels: uint8, shape (height, width, 3 or 1). masks: class numbers of the pixels, shape (height,
    width) each; 0 is transparent. instances: masks of single objects, nonzero inside, shape (k,
    height, width); the k-th has the colour of the k-th box. boxes: x1, y1, x2, y2 in pixels, shape
    (k, 4). classes: the class of each box, for its colour. names: the text of each box. points: x,
    y in pixels, shape (k, 2), or (k, points, 2) of the k-th box; hidden ones aren't finite.
    """

    pixels: NDArray[np.uint8]
    caption: str = ""
    masks: Sequence[Numbers] = ()
    instances: Numbers | None = None
    boxes: Numbers | None = None
    classes: Sequence[int] = ()
    names: Sequence[str] = ()
    points: Sequence[Numbers] = ()

    def color_of(self, number: int) -> tuple[int, int, int]:
        """Return the colour of the n-th box, its mask and its points: the colour of its class."""
        return class_color(1 + (self.classes[number] if number < len(self.classes) else number))


def class_color(number: int) -> tuple[int, int, int]:
    """Return the colour of a class, or of the n-th object: black for 0, else a bright colour.
    Neighbouring numbers get distant colours."""
    if number <= 0:
        return 0, 0, 0
    level = 1.0 - 0.14 * ((number - 1) // 8 % 3)
    red, green, blue = colorsys.hsv_to_rgb((number - 1) * _HUE_STEP % 1.0, 0.82, level)
    return round(255 * red), round(255 * green), round(255 * blue)


def contact_sheet(
    pictures: Sequence[Picture], *, width: int = 1200, columns: int | None = None
) -> Image.Image:
    """Draw pictures in rows on a white sheet: the more pictures, the smaller each is. width: of
    the sheet in pixels, roughly; few pictures may need less. columns: pictures in a row; None:
    about as many as there are rows."""
    from PIL import Image, ImageDraw

    columns = columns or max(1, min(len(pictures), math.ceil(math.sqrt(1.4 * len(pictures)))))
    cell = max(_SMALLEST_CELL, min(_LARGEST_CELL, width // columns - _GAP))
    drawn = [_drawn(each, cell) for each in pictures]
    captions = [each.caption for each in pictures]
    font = _font(max(11, min(16, cell // 18)), "".join(captions))
    line = sum(font.getmetrics()) + 4
    rows = [drawn[at : at + columns] for at in range(0, len(drawn), columns)]
    heights = [
        max(each.height for each in row)
        + (line if any(captions[number * columns : (number + 1) * columns]) else 0)
        for number, row in enumerate(rows)
    ]
    used = max((each.width for each in drawn), default=cell)
    step = used + _GAP
    size = columns * step + _GAP, sum(heights) + _GAP * (len(rows) + 1)
    sheet = Image.new("RGB", size, "white")
    pen, top = ImageDraw.Draw(sheet), _GAP
    for number, (row, height) in enumerate(zip(rows, heights, strict=True)):
        for place, image in enumerate(row):
            left = _GAP + place * step
            sheet.paste(image, (left, top))
            caption = captions[number * columns + place]
            text = _fitting(caption, used, lambda some: pen.textlength(some, font=font))
            pen.text((left, top + image.height + 2), text, fill=(40, 40, 40), font=font)
        top += height + _GAP
    return sheet


def _font(size: int, text: str) -> Any:
    """Return Pillow's own font, which has only ASCII; for other texts DejaVu, if installed."""
    from PIL import ImageFont

    if not text.isascii():
        with contextlib.suppress(OSError):
            return ImageFont.truetype("DejaVuSans.ttf", size)
    return ImageFont.load_default(size)


def _fitting(text: str, room: float, length: Callable[[str], float]) -> str:
    """Return the longest beginning of a text that fits, with an ellipsis if it isn't whole."""
    if length(text) <= room:
        return text
    while text and length(text + "…") > room:
        text = text[:-1]
    return text + "…"


def _drawn(picture: Picture, cell: int) -> Image.Image:
    """Draw one picture, as large as fits into a square cell."""
    from PIL import Image, ImageDraw

    pixels = picture.pixels
    if pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, 3, axis=-1)
    height, width = pixels.shape[:2]
    scale = cell / max(height, width, 1)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    how = Image.Resampling.NEAREST if scale >= 3 else Image.Resampling.BICUBIC
    drawn = Image.fromarray(np.ascontiguousarray(pixels)).resize(size, how, reducing_gap=3.0)
    if picture.masks or picture.instances is not None:
        drawn = Image.fromarray(_with_masks(np.asarray(drawn), picture))
    pen = ImageDraw.Draw(drawn)
    stroke = max(2, round(cell / 160))
    given = () if picture.boxes is None else np.asarray(picture.boxes, np.float64)
    boxes = [(box * scale).tolist() for box in given]
    shown = [number for number, box in enumerate(boxes) if _is_drawn(box)]
    area = [(x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in boxes]
    for number in sorted(shown, key=lambda number: -area[number]):  # small ones on top
        x1, y1, x2, y2 = boxes[number]
        # A thin dark line around a box shows it on a picture of its colour.
        pen.rectangle((x1 - 1, y1 - 1, x2 + 1, y2 + 1), outline=(0, 0, 0), width=1)
        pen.rectangle((x1, y1, x2, y2), outline=picture.color_of(number), width=stroke)
    for group in picture.points:
        _draw_points(pen, group * scale, picture, radius=stroke + 1)
    font = _font(max(10, min(14, cell // 20)), "".join(picture.names))
    for number in shown if picture.names else ():
        _draw_name(pen, picture.names[number], boxes[number], picture.color_of(number), font, size)
    return drawn


def _with_masks(pixels: NDArray[np.uint8], picture: Picture) -> NDArray[np.uint8]:
    """Blend masks of the image's size into it, with an outline of each instance. pixels: of the
    resized image."""
    blended, size = pixels.astype(np.float32), picture.pixels.shape[:2]
    sides = zip(pixels.shape, size, strict=False)
    rows, columns = (np.arange(new) * old // new for new, old in sides)
    for mask in picture.masks:
        if mask.shape != size:
            continue
        mask = mask[rows][:, columns]
        numbers = np.unique(mask)
        # Negative numbers, such as those of "ignore", have the colours of other ones.
        shown = [value if value >= 0 else 1 - value for value in numbers.tolist()]
        colors = np.array([class_color(value) for value in shown], np.float32)
        painted = colors[np.searchsorted(numbers, mask)]
        inside = (mask != 0)[..., None]
        blended = np.where(inside, (1 - _MASK_SHARE) * blended + _MASK_SHARE * painted, blended)
    for number, mask in enumerate(() if picture.instances is None else picture.instances):
        if mask.shape != size:
            continue
        inside = mask[rows][:, columns] != 0
        color = np.array(picture.color_of(number), np.float32)
        blended[inside] = (1 - _MASK_SHARE) * blended[inside] + _MASK_SHARE * color
        padded = np.pad(inside, 1)
        core = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
        blended[inside & ~core] = color  # pixels that have a neighbour outside
    return np.rint(blended).astype(np.uint8)


def _is_drawn(box: Sequence[float]) -> bool:
    x1, y1, x2, y2 = box
    return all(map(math.isfinite, box)) and x2 > x1 and y2 > y1


def _draw_name(
    pen: ImageDraw.ImageDraw, name: str, box: Sequence[float], color: Color, font: Any, size: Size
) -> None:
    """Write the name of a box above it, or inside if there is no room, on its colour."""
    x1, y1 = box[:2]
    text = _fitting(name, size[0] - 4, lambda some: pen.textlength(some, font=font))
    width, height = pen.textlength(text, font=font) + 4, sum(font.getmetrics()) + 1
    left = max(0.0, min(x1, size[0] - width))
    top = y1 - height if y1 >= height else max(0.0, min(y1, size[1] - height))
    pen.rectangle((left, top, left + width, top + height), fill=color)
    red, green, blue = color
    is_bright = 0.299 * red + 0.587 * green + 0.114 * blue > 140
    pen.text((left + 2, top), text, fill="black" if is_bright else "white", font=font)


def _draw_points(
    pen: ImageDraw.ImageDraw, points: Numbers, picture: Picture, *, radius: int
) -> None:
    """Draw points with a dark edge: those of a box in its colour, others in their own colours."""
    for number, own in enumerate(points):
        for x, y in own.reshape(-1, 2).tolist():
            if math.isfinite(x) and math.isfinite(y):
                color = picture.color_of(number) if own.ndim > 1 else class_color(number + 1)
                place = (x - radius, y - radius, x + radius, y + radius)
                pen.ellipse(place, fill=color, outline=(0, 0, 0))


def displayed_pixels(pixels: Numbers, *, scaling: Scaling) -> NDArray[np.uint8]:
    """Convert pixels, (channels, height, width), to uint8: values times std plus mean are 0 to 1.
    uint8 stays as it is. scaling: mean and std, of each channel or of all."""
    if pixels.dtype == np.uint8:
        return pixels
    mean, std = (np.asarray(each, np.float32).reshape(-1, 1, 1) for each in scaling)
    values = np.nan_to_num(pixels.astype(np.float32)) * std + mean
    shown: NDArray[np.uint8] = np.clip(np.rint(values * 255), 0, 255).astype(np.uint8)
    return shown


# -- from samples to pictures


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """How the values of samples are read.

    schema: types of fields, as far as they are known. classes: names of classes by number, if no
    field's type has some. displayed: converts the pixels of an image, (channels, height, width), to
    uint8. by_shape: ignore the names of fields, and decide by shapes alone.
    """

    schema: Schema | FieldTypes = field(default_factory=dict)
    classes: Sequence[str] = ()
    displayed: Callable[[Numbers], NDArray[np.uint8]] | None = None
    by_shape: bool = False


def pictures_of(sample: Mapping[str, Any], how: Reading) -> list[Picture]:
    """Return a sample's images with what belongs to each; none for a sample without images.

    sample: values by field: arrays, numbers and texts; None for what it lacks.
    """
    values = {name: _array(value) for name, value in sample.items() if value is not None}
    images = {
        name: value
        for name, value in values.items()
        if _is_image(name, value, how) and not _is_companion(name, values)
    }
    if how.by_shape:  # what comes after the first image may be masks of as many things
        first = next(iter(images), None)
        images = {n: v for n, v in images.items() if n == first or v.max() > 1 or v.min() < 0}
    found = []
    caption = _caption(values, how)
    for name, image in images.items():
        for number, view in enumerate(image if image.ndim == 4 else [image]):
            words = [caption]
            if len(images) > 1 or image.ndim == 4:
                words.append(f"{name} {number}" if image.ndim == 4 else name)
            own = {
                other: value
                for other, value in values.items()
                if other not in images
                and not _is_companion(other, values)
                and image_of(other, how.schema) in (None, name)  # type: ignore[arg-type]
            }
            found.append(_picture(view, own, " · ".join(filter(None, words)), how))
    return found


def _picture(image: Numbers, others: Mapping[str, Any], caption: str, how: Reading) -> Picture:
    height, width = image.shape[1:]
    arrays = {name: value for name, value in others.items() if isinstance(value, np.ndarray)}
    boxes = next((v for n, v in arrays.items() if _is_boxes(n, v, how)), None)
    count = None if boxes is None else len(boxes)
    masks, instances, points = [], None, []
    classes: tuple[str, Numbers] | None = None
    for name, value in arrays.items():
        whole = value.dtype.kind in "bui"
        if whole and value.shape == (height, width):
            masks.append(value)
        elif whole and value.ndim == 3 and value.shape[1:] == (height, width):
            instances = value
        elif _is_points(name, value, how) and value is not boxes:
            points.append(_visible(value))
        elif count and whole and value.shape == (count,) and _is_labels(name, how):
            classes = name, value
    pixels = image if how.displayed is None else how.displayed(image)
    numbers: list[int] = [] if classes is None else classes[1].tolist()
    words = [] if classes is None else [_class_name(classes[0], each, how) for each in numbers]
    return Picture(
        pixels=np.ascontiguousarray(pixels.transpose(1, 2, 0)).astype(np.uint8, copy=False),
        caption=caption,
        masks=masks,
        instances=instances,
        boxes=boxes,
        classes=numbers,
        names=words,
        points=points,
    )


def _array(value: Any) -> Any:
    """Return a tensor on any device as an array; other values as they are."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    return np.asarray(value) if isinstance(value, np.generic) else value


def _is_companion(name: str, values: Mapping[str, Any]) -> bool:
    """Return True for a field that describes another one, such as "image.size"."""
    return name.rpartition(".")[0] in values


def _is_image(name: str, value: Any, how: Reading) -> bool:
    if not isinstance(value, np.ndarray) or value.ndim not in (3, 4) or 0 in value.shape:
        return False
    type = how.schema.get(name)
    if type is not None and not type.is_image:
        return False
    if type is None and (min(value.shape[-2:]) < _SMALLEST_SIDE or _has(name, _NO_IMAGES)):
        return False
    return value.shape[-3] in (1, 3) and value.dtype.kind in "uif"


def _is_boxes(name: str, value: Numbers, how: Reading) -> bool:
    if value.ndim != 2 or value.shape[1] != 4 or value.dtype.kind not in "fiu":
        return False
    type = how.schema.get(name)
    return type.is_boxes if type is not None else how.by_shape or _has(name, _BOXES)


def _is_points(name: str, value: Numbers, how: Reading) -> bool:
    if value.ndim not in (2, 3) or value.shape[-1] not in (2, 3) or value.dtype.kind != "f":
        return False
    if value.ndim == 2 and value.shape[1] == 3:
        return False
    type = how.schema.get(name)
    return _has(type.kind if type is not None else name, _POINTS) or (type is None and how.by_shape)


def _is_labels(name: str, how: Reading) -> bool:
    type = how.schema.get(name)
    if type is not None and (type.is_class or type.class_names):
        return True
    return how.by_shape or _has(name, _LABELS)


def _has(name: str, words: Sequence[str]) -> bool:
    return any(word in name.lower() for word in words)


def _visible(points: Numbers) -> Numbers:
    """Return points as x, y; points that aren't labelled (visibility 0) become NaN."""
    if points.shape[-1] == 2:
        return points
    return np.where(points[..., 2:] > 0, points[..., :2], np.nan)


def _class_name(name: str, number: int, how: Reading) -> str:
    type = how.schema.get(name)
    names = (type.class_names if type is not None else ()) or how.classes
    return names[number] if 0 <= number < len(names) else str(number)


def _caption(values: Mapping[str, Any], how: Reading) -> str:
    """Return the sample's id, its class and the beginning of its first text."""
    words = [f"#{int(values[name])}" for name in ("id", "sample_id") if _is_number(values, name)]
    for name, value in values.items():
        if _is_number(values, name) and not name.endswith("id") and _is_labels(name, how):
            words.append(_class_name(name, int(value), how))
    if "valid" in values and not np.all(values["valid"]):
        words.append("not valid")
    lists = [value[0] for value in values.values() if isinstance(value, list) and value]
    texts = [value for value in (*values.values(), *lists) if isinstance(value, str)]
    words += [" ".join(text.split())[:_CAPTION_CHARACTERS] for text in texts[:1]]
    return " · ".join(words)


def _is_number(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    return isinstance(value, int) or (
        isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu"
    )


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` indices in [0, count), evenly spread from the first to the last."""
    return list(map(int, np.unique(np.linspace(0, count - 1, min(count, most)).round())))


# -- in notebooks


def sheet_html(sheet: Image.Image, *, alt: str) -> str:
    """Return an HTML image element with the sheet embedded as a JPEG."""
    buffer = io.BytesIO()
    sheet.save(buffer, "JPEG", quality=88)
    source = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return f'<img alt="{html.escape(alt)}" style="max-width:100%" src="{source}">'


def table_html(rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table without a header. rows: texts of the cells."""
    cell = '<td style="text-align:left;padding:1px 10px 1px 0">{}</td>'
    lines = ("".join(cell.format(html.escape(text)) for text in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
