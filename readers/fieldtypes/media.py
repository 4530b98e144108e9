"""Data that are stored encoded: images, sound, video, texts, and bytes that are delivered
unchanged. A recipe decodes images with DALI."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.readers.fieldtypes.field_type import FieldType, frozen_type
from penstock.readers.types import MAX_PIXELS, Facts, Rejection, accepted, failure, pixel_refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

_BOM = b"\xef\xbb\xbf"


@frozen_type
class Text(FieldType):
    """UTF-8 text, delivered as str."""

    kind: ClassVar[str] = "text"
    is_encoded: ClassVar[bool] = True
    missing: ClassVar[Any] = ""
    codec: ClassVar[str] = "utf-8"
    column_kinds: ClassVar[Set[str]] = frozenset({"text", "binary", "nested"})

    def check(self, data: Encoded, *, field: str = "", max_pixels: int = MAX_PIXELS) -> Facts:
        """Check that a text is UTF-8; a byte order mark at its start isn't part of it."""
        start = len(_BOM) if data[: len(_BOM)].tobytes() == _BOM else 0
        self.decode(data[start:])
        return Facts.of(data, start=start, codec=self.codec)

    def decode(self, payload: Encoded) -> str:
        """Decode a text, with its line ends as stored."""
        try:
            return str(payload.data, "utf-8")
        except UnicodeDecodeError as error:
            wrong = f"0x{payload[error.start]:02X} at byte {error.start}"
            raise ValueError(f"not UTF-8 text ({wrong}): convert it") from None

    def returned(self, value: Any) -> str:
        text = str(FieldType.returned(self, value))
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a str that UTF-8 can't hold ({error.reason})", "text") from None
        return text


@frozen_type
class Texts(FieldType):
    """Several texts per sample, such as the captions of an image, delivered as a list of str. They
    are stored as a JSON list."""

    kind: ClassVar[str] = "texts"
    is_target: ClassVar[bool] = True
    is_encoded: ClassVar[bool] = True
    codec: ClassVar[str] = "json"
    in_files: ClassVar[bool] = False

    @property
    def empty(self) -> list[str]:
        return []

    @staticmethod
    def encode(texts: Sequence[str]) -> bytes:
        """Return the stored form of texts. Raises UnicodeEncodeError for text that UTF-8 can't
        hold."""
        return json.dumps(list(texts), ensure_ascii=False, separators=(",", ":")).encode()

    def decode(self, payload: Encoded) -> list[str]:
        """Decode a list of texts."""
        try:
            texts = json.loads(payload.tobytes() or b"[]")
        except (ValueError, RecursionError):
            texts = None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("not a JSON list of texts")
        return texts

    def returned(self, value: Any) -> list[str]:
        """Convert a list or a tuple of texts."""
        texts = list(value) if isinstance(value, list | tuple) else None
        if texts is None or not all(isinstance(text, str) for text in texts):
            raise ValueError("", "a list of str")
        return texts


@frozen_type
class Bytes(FieldType):
    """Bytes that are delivered unchanged."""

    kind: ClassVar[str] = "bytes"
    is_encoded: ClassVar[bool] = True

    def decode(self, payload: Encoded) -> bytes:
        return payload.tobytes()

    def returned(self, value: Any) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise ValueError("", "bytes")
        return bytes(value)


@frozen_type
class Image(FieldType):
    """An encoded image (JPEG, PNG, …), which is decoded to upright pixels. `examine` checks all
    images of a batch at once."""

    kind: ClassVar[str] = "image"
    is_encoded: ClassVar[bool] = True
    has_sides: ClassVar[bool] = True
    is_image: ClassVar[bool] = True
    can_return: ClassVar[bool] = False
    head_bytes: ClassVar[int] = 64

    def check_head(self, head: bytes) -> Rejection | None:
        from penstock.readers.fieldtypes.verification import sniff

        found = sniff(head)
        return found if isinstance(found, Rejection) else None

    def decode(self, payload: Encoded, *, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
        """Decode one image with Pillow: upright, in RGB, uint8, shape (height, width, 3).

        It is for a person who looks at a sample; loaders decode with DALI, whose values of a JPEG
        may differ a little. Raises ValueError for an image that doesn't decode.
        """
        from penstock.readers.fieldtypes.verification import (
            IMAGE_HEAD_BYTES,
            open_with_plugin,
            sniff,
            strict_pillow,
        )

        codec = accepted(sniff(payload[:IMAGE_HEAD_BYTES].tobytes()))
        from PIL import ImageOps

        try:
            with strict_pillow(), open_with_plugin(payload, codec) as image:
                too_large = pixel_refusal(*image.size, max_pixels=max_pixels)
                found = None if too_large else eight_bits(ImageOps.exif_transpose(image))
        except Exception as error:  # each layer of Pillow raises its own kinds
            raise ValueError(f"it doesn't decode ({failure(error)})") from error
        accepted(too_large)
        assert found is not None
        return found if found.ndim == 3 else np.repeat(found[..., None], 3, axis=2)

    def decoder(self, *, max_pixels: int = MAX_PIXELS) -> Callable[[Encoded], Any]:
        return partial(self.decode, max_pixels=max_pixels)


def eight_bits(image: Any) -> NDArray[np.uint8]:
    """Return an image of Pillow's as RGB, uint8, shape (height, width, 3), or (height, width) if it
    has 16 bits, which are scaled as DALI scales them; Pillow would make all values above 255
    white."""
    if not image.mode.startswith("I;16"):
        return np.asarray(image.convert("RGB"))
    wide = np.asarray(image).astype(np.uint32)
    return ((wide * 255 + 65535 // 2) // 65535).astype(np.uint8)


@frozen_type
class Audio(Bytes):
    """An encoded piece of sound, which nothing decodes or checks."""

    kind: ClassVar[str] = "audio"
    is_default: ClassVar[bool] = False


@frozen_type
class Video(Bytes):
    """An encoded video, which nothing decodes or checks."""

    kind: ClassVar[str] = "video"
    is_default: ClassVar[bool] = False
