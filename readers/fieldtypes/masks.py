"""Masks: decode and check them. They hold a class number for each pixel, in image files and
arrays.

Pillow decodes them because it keeps palettes and 16 bits. DALI would turn a palette to luma and 16
bits to 8, which changes the classes. Values that Pillow itself scales (grey PNG and TIFF of 2 and 4
bits) are scaled back. Files that Pillow would invert or guess at are rejected.
"""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes.array_forms import (
    AUTO_DTYPE,
    MAGIC,
    ArrayForm,
    decode_array,
    fits,
    read_npy_header,
)
from penstock.readers.fieldtypes.columns import ArrayColumn, Column, DenseColumn, ListColumn
from penstock.readers.fieldtypes.field_type import FieldType, check_reference, frozen_type
from penstock.readers.fieldtypes.verification import (
    IMAGE_HEAD_BYTES,
    open_with_plugin,
    sniff,
    strict_pillow,
)
from penstock.readers.types import MAX_PIXELS, Facts, Rejection, accepted, failure, pixel_refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from penstock.readers.fieldtypes.field_type import FieldTypes, Moves, Size
    from penstock.readers.types import Encoded, Ints, Numbers

_TO_PNG = "write class numbers as a grey or palette PNG, or as integers in an .npy file"
_CODECS = ("png", "tiff", "bmp", "pnm")
_BITS_PER_SAMPLE, _COMPRESSION, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 259, 262, 0
_TIFF_JPEG = (6, 7, 34892)
_PNG_BIT_DEPTH = 24  # its position, in IHDR
_WIDE = ":i4"
_INT32 = np.dtype(np.int32)


@frozen_type
class Mask(FieldType):
    """A class number for each pixel of an image, in a lossless image file or an .npy file.

    of: the image's field. The mask follows the image through a recipe, by nearest neighbours.
    dtype: of the delivered mask, "uint8" or "int32"; "auto" is uint8 if all files fit it.
    """

    of: str
    dtype: str = AUTO_DTYPE

    kind: ClassVar[str] = "mask"
    refers_to: ClassVar[str | None] = "image"
    is_encoded: ClassVar[bool] = True
    has_sides: ClassVar[bool] = True
    is_slow: ClassVar[bool] = True
    missing: ClassVar[Any] = np.zeros((0, 0), np.uint8)
    needs_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_reference("Mask", self.of)
        if self.dtype not in (AUTO_DTYPE, "uint8", "int32"):
            raise ConfigError(f'Mask: got dtype={self.dtype!r}, wanted "uint8" or "int32".')

    @property
    def is_settled(self) -> bool:
        return self.dtype != AUTO_DTYPE

    def settled(self, so_far: FieldType | None, facts: Facts, *, field: str) -> Mask:
        """Return the mask of the smallest dtype that holds one more sample, too."""
        is_wide = facts.codec.endswith(_WIDE) or getattr(so_far, "dtype", "") == "int32"
        return replace(self, dtype="int32" if is_wide else "uint8")

    def check(self, data: Encoded, *, field: str = "", max_pixels: int = MAX_PIXELS) -> Facts:
        """Decode a mask completely, and return its facts."""
        narrowest = self if self.dtype == "uint8" else replace(self, dtype=AUTO_DTYPE)
        with strict_pillow():
            classes = narrowest.decode(data, max_pixels=max_pixels)
        # The payload includes the header of an .npy file: masks are decoded from their bytes alone.
        # Its dtype is known without decoding it if the codec ends in ":i4".
        codec = _codec_of(data) + (_WIDE if classes.dtype != np.uint8 else "")
        return Facts.of(data, shape=(*classes.shape, 1), codec=codec)

    def decode(self, payload: Encoded, *, max_pixels: int = MAX_PIXELS) -> Numbers:
        """Decode the class numbers of a mask from an image file or an .npy file: uint8 or int32,
        shape (height, width)."""
        classes = _classes(payload, _codec_of(payload), max_pixels=max_pixels)
        if self.dtype == "uint8" and classes.dtype != np.uint8:
            raise ValueError(
                "a mask of more than 8 bits, but the schema wants uint8: give its field the type "
                'Mask(of=…, dtype="int32")'
            )
        return classes.astype(_INT32, copy=False) if self.dtype == "int32" else classes

    def decoder(self, *, max_pixels: int = MAX_PIXELS) -> Callable[[Encoded], Any]:
        return partial(self.decode, max_pixels=max_pixels)

    def follow(self, column: Column, moves: Moves | None, *, size: Size | None) -> ArrayColumn:
        """Return the masks as (n, height, width), of the widest dtype of the batch if it isn't
        settled."""
        masks: Sequence[Any] = [column.sample(row) for row in range(len(column))]
        dtype = np.dtype(self.dtype) if self.is_settled else common_dtype(masks)
        if moves is not None:
            moved = moves.move_masks(masks, dtype=dtype)
            if isinstance(moved, list):  # images of different sizes
                return ArrayForm(dtype, (None, None)).column(moved)
            return DenseColumn(moved)
        assert size is not None, self
        out = np.zeros((len(masks), *size), dtype)
        for place, mask in enumerate(masks):
            if mask.size and mask.shape != size:
                raise DatasetError(
                    f"A mask of shape {mask.shape} in a dataset of {size} (height, width). Index "
                    "the dataset again."
                )
            out[place] = mask if mask.size else 0
        return DenseColumn(out)

    def resized(self, value: Encoded, before: Size, after: Size) -> Encoded:
        """Return a mask as PNG: each pixel gets the class at its centre."""
        from PIL import Image

        classes = self.decode(value)
        rows, columns = (nearest(*sides) for sides in zip(classes.shape, after, strict=True))
        classes = classes[rows[:, None], columns]
        if classes.size and not 0 <= classes.min() <= classes.max() < 2**16:
            raise ValueError(
                f"class numbers {classes.min()} to {classes.max()}: a resized mask is a PNG, which "
                "stores 0 to 65,535"
            )
        is_small = classes.dtype == np.uint8
        buffer = io.BytesIO()
        Image.fromarray(classes if is_small else classes.astype(np.uint16)).save(buffer, "PNG")
        return np.frombuffer(buffer.getvalue(), np.uint8)

    def returned(self, value: Any) -> Numbers:
        """Convert class numbers of any integer dtype."""
        kinds = "uint8" if self.dtype == "uint8" else "uint8 or int32"
        wanted = f"class numbers, {kinds}, of shape (height, width)"
        try:
            array = np.asarray(value)
            classes = narrow(array) if array.dtype.kind in "bui" and array.ndim == 2 else None
        except Exception as error:  # an array-like object may raise anything
            raise ValueError(f"no array of class numbers ({error})", wanted) from None
        if classes is None or (self.dtype == "uint8" and classes.dtype != np.uint8):
            raise ValueError(f"{array.dtype} of shape {array.shape}", wanted)
        return np.array(classes, np.int32 if self.dtype == "int32" else classes.dtype)

    def column(self, samples: list[Any]) -> ListColumn:
        """Keep each mask as it is: they have one shape only after they followed their images."""
        return ListColumn(samples)


def nearest(before: int, after: int) -> Ints:
    """Return the source pixel of each pixel of a resized side, int64, shape (after,)."""
    return (2 * np.arange(after, dtype=np.int64) + 1) * before // (2 * after)


def common_dtype(masks: Sequence[Numbers]) -> np.dtype[Any]:
    """Return the dtype that holds the values of all masks of a batch; uint8 without any mask."""
    kinds = {mask.dtype for mask in masks if mask.size}
    return np.result_type(*kinds) if kinds else np.dtype(np.uint8)


def narrow(classes: Numbers) -> Numbers:
    """Convert class numbers to the dtype of masks: uint8 if they are stored in 8 bits, else int32.
    Raises ValueError if they need more than 32 bits."""
    if classes.dtype in (np.uint8, np.bool_):
        return np.ascontiguousarray(classes, np.uint8)
    if not (np.can_cast(classes.dtype, _INT32) or fits(_INT32, classes)):
        raise ValueError(
            f"class numbers {classes.min()} to {classes.max()}: wanted at most 32 bits"
        )
    return np.ascontiguousarray(classes, np.int32)


def _codec_of(data: Encoded) -> str:
    """Return the codec of a mask ("npy" for an array). Raises ValueError for other bytes."""
    head = data[:IMAGE_HEAD_BYTES].tobytes()
    codec = "npy" if head.startswith(MAGIC) else sniff(head)
    if codec == "npy" or (codec in _CODECS and (codec != "pnm" or head.startswith(b"P5"))):
        return str(codec)
    raise ValueError(
        f"no mask (its first bytes match no lossless format; JPEG, WebP and GIF change class "
        f"numbers): {_TO_PNG}"
        if head
        else "empty file"
    )


def _classes(data: Encoded, codec: str, *, max_pixels: int) -> Numbers:
    """Decode a mask upright: uint8 if 8 bits hold it, else int32. Raises ValueError."""
    if codec == "npy":
        header = accepted(read_npy_header(data))
        if header.codec.dtype.kind not in "biu" or len(header.shape) != 2:
            raise ValueError(
                f"a mask of {header.codec.name} of shape {header.shape}: wanted integers, (height, "
                "width) of the image, one class a pixel"
            )
        accepted(pixel_refusal(*header.shape[::-1], max_pixels=max_pixels))
        return narrow(decode_array(data[header.start :], str(header.codec), header.shape))
    try:
        with open_with_plugin(data, codec) as image:
            too_large = pixel_refusal(*image.size, max_pixels=max_pixels)
            found = too_large or _image_classes(image, data, codec)
    except Exception as error:  # each layer of Pillow raises its own kinds
        raise ValueError(f"truncated or damaged: it doesn't decode ({failure(error)})") from error
    return narrow(accepted(found))


def _image_classes(image: Any, data: Encoded, codec: str) -> Numbers | Rejection:
    """Decode the class numbers of an open image, or return why an intact file isn't a mask."""
    from PIL import ImageOps

    mode, tags, reason = image.mode, image.tag_v2 if codec == "tiff" else {}, ""
    if mode not in ("1", "L", "P", "I") and not mode.startswith("I;16"):
        kind = "floats" if mode == "F" else f"several channels ({mode})"
        reason = f"a mask of {kind}, not of class numbers"
    elif codec == "pnm" and image.tile[0][0] != "raw":  # Pillow scales the numbers
        reason = "a PGM whose maximum is neither 255 nor 65535"
    elif tags.get(_COMPRESSION) in _TIFF_JPEG:
        reason = "a mask in JPEG, which blurs class numbers"
    elif tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        reason = "a TIFF in which 0 is white, which decoders invert"
    elif codec == "tiff" and image.is_animated:
        reason = "several pictures in one file"
    if reason:
        return Rejection(f"{reason}: {_TO_PNG}")
    classes = np.array(ImageOps.exif_transpose(image))
    bits = data[_PNG_BIT_DEPTH] if codec == "png" else tags.get(_BITS_PER_SAMPLE, (8,))[0]
    if mode == "L" and bits in (2, 4):  # Pillow scales them to 0 to 255
        classes = classes // (255 // (2 ** int(bits) - 1))
    return classes


_LOSSLESS = frozenset(("png", "bmp", "tif", "tiff", "pgm"))
_MASK_NAMES = ("mask", "seg")


def masks_by_name(
    types: FieldTypes, extensions: Mapping[str, Iterable[str]], *, given: Collection[str] = ()
) -> tuple[dict[str, Mask], list[str], list[str]]:
    """Choose the fields that are masks by their names. Return them, a sentence for each decision,
    and one for each other field whose name is that of masks.

    A mask's name is or ends in "mask" or "seg", it has lossless files, and it belongs to the only
    other image. With several other images no mask is chosen. One lossless file suffices: lossy
    files can't hold class numbers, so checking leaves them out, whereas all of them would pass as
    pictures.

    extensions: of each field's files, in lower case. given: fields whose types the user passed.
    """
    images = [name for name, type in types.items() if type.is_image]
    likely = [name for name in images if name not in given and is_mask_name(name, extensions[name])]
    pictures = [name for name in images if name not in likely]
    if len(pictures) != 1:
        likely, pictures = [], images
    notes = []
    for name in likely:
        lossy = [f".{each}" for each in sorted({*extensions[name]} - _LOSSLESS)]
        doubt = f", which {', '.join(lossy)} files can't hold" if lossy else ""
        notes.append(
            f'"{name}" is read as masks of "{pictures[0]}", by its name: a class number for each '
            f'pixel{doubt}. For pictures pass schema={{"{name}": Image()}}.'
        )
    doubts = [
        f'"{name}" is read as pictures. If they are masks, their files must be lossless, and pass '
        f'schema={{"{name}": Mask(of="{pictures[0]}")}}.'
        for name in pictures[1:]
        if name not in given and is_mask_name(name, ())
    ]
    return dict.fromkeys(likely, Mask(of=pictures[0])) if likely else {}, notes, doubts


def is_mask_name(name: str, extensions: Iterable[str]) -> bool:
    """Return True if a field's name and its files' extensions allow masks. extensions: none to
    judge by the name alone."""
    found = {*extensions}
    return name.rpartition("_")[2] in _MASK_NAMES and (not found or not found.isdisjoint(_LOSSLESS))
