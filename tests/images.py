"""Small good and bad images, and a verifier based on Pillow, so that the readers' tests run without
DALI."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from penstock.readers import ImageFacts, Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.readers import Encoded

MAX_PIXELS = 2**27


def picture(seed: int, height: int = 24, width: int = 32, mode: str = "RGB") -> Image.Image:
    """Return a smooth random picture; it is the same for the same arguments."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def encoded(image: Image.Image, codec: str = "JPEG", **options: Any) -> bytes:
    """Return an image as the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, codec, **options)
    return buffer.getvalue()


def png(pixels: Any) -> bytes:
    """Return an array of pixels, or of class numbers, as the bytes of a PNG."""
    return encoded(Image.fromarray(pixels), "PNG")


def encoded_array(pixels: Any, codec: str = "PNG", **options: Any) -> Encoded:
    """Return an array of pixels as a file's bytes, as readers pass them: uint8, shape (bytes,)."""
    return np.frombuffer(encoded(Image.fromarray(pixels), codec, **options), np.uint8)


def jpeg(seed: int, height: int = 24, width: int = 32, **options: Any) -> bytes:
    """Return a small JPEG."""
    return encoded(picture(seed, height, width), "JPEG", **options)


def rotated_jpeg(seed: int, height: int = 24, width: int = 32) -> bytes:
    """Return a JPEG that is stored height x width and displayed width x height (EXIF orientation
    6)."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return jpeg(seed, height, width, exif=exif)


def sixteen_bit_png(seed: int) -> bytes:
    """Return a grey PNG of 16 bits."""
    rng = np.random.default_rng(seed)
    return encoded(Image.fromarray(rng.integers(0, 65536, (9, 7), dtype=np.uint16)), "PNG")


def truncated(data: bytes, share: float = 0.6) -> bytes:
    """Return the first part of a file."""
    return data[: int(len(data) * share)]


def with_corrupt_scan(data: bytes) -> bytes:
    """Return a JPEG whose scan contains an invalid marker."""
    middle = data.rindex(b"\xff\xda") + 40
    return data[:middle] + b"\xff\x3b" + data[middle + 2 :]


def with_huge_header(data: bytes, side: int = 65535) -> bytes:
    """Return a JPEG whose header declares side x side pixels."""
    sof = data.index(b"\xff\xc0")
    return data[: sof + 5] + struct.pack(">HH", side, side) + data[sof + 9 :]


def rle_bmp(rows: list[bytes], width: int) -> bytes:
    """Return a run-length encoded bitmap of 256 colours. The rows may be shorter or longer than
    `width`."""
    body = b"".join(row + b"\0\0" for row in rows) + b"\0\1"
    palette = b"".join(bytes((i, 255 - i, i // 2, 0)) for i in range(256))
    start = 54 + len(palette)
    header = struct.pack(
        "<IiiHHIIiiII", 40, width, len(rows), 1, 8, 1, len(body), 2835, 2835, 256, 0
    )
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + header + palette + body


GOOD = {
    "baseline.jpg": jpeg(1),
    "progressive.jpg": jpeg(2, progressive=True),
    "grey.jpg": encoded(picture(3, mode="L")),
    "cmyk.jpg": encoded(picture(4, mode="CMYK")),
    "rotated.jpg": rotated_jpeg(5),
    "one.png": encoded(picture(6, 1, 1), "PNG"),
    "palette.png": encoded(picture(7, mode="P"), "PNG"),
    "alpha.png": encoded(picture(8, mode="RGBA"), "PNG"),
    "sixteen.png": sixteen_bit_png(9),
    "lossless.webp": encoded(picture(10), "WEBP", lossless=True),
    "plain.bmp": encoded(picture(11), "BMP"),
    "plain.tif": encoded(picture(12), "TIFF"),
    "trailing.jpg": jpeg(13) + b"a camera's own data",
}

# What of its reason must be in the report.
BAD = {
    "empty.jpg": (b"", "empty"),
    "text.jpg": (b"<html>404 Not Found</html>", "not an image"),
    "film.gif": (encoded(picture(20), "GIF"), "convert"),
    "photo.avif": (b"\x00\x00\x00\x20ftypavif" + b"\x00" * 80, "convert"),
    "phone.heic": (b"\x00\x00\x00\x18ftypheic" + b"\x00" * 80, "convert"),
    "truncated.jpg": (truncated(jpeg(21)), "truncated"),
    "corrupt.jpg": (with_corrupt_scan(jpeg(22, 64, 64, quality=95)), "corrupt"),
    "huge.jpg": (with_huge_header(jpeg(23)), "pixels"),
    "truncated.png": (truncated(encoded(picture(24), "PNG")), "decode"),
    "magic-only.png": (b"\x89PNG\r\n\x1a\n", "decode"),
}


def verify(samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
    """Decode each sample completely with Pillow, and return what the readers expect of
    a verifier."""
    return [_verify_one(bytes(sample)) for sample in samples]


class CountingVerifier:
    """The verifier above, with a count of the samples that it decoded."""

    def __init__(self) -> None:
        self.decoded = 0

    def __call__(self, samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
        self.decoded += len(samples)
        return verify(samples)


def _verify_one(data: bytes) -> ImageFacts | Rejection:
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PIXELS:
                return Rejection(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS}")
            image.load()
            shown = ImageOps.exif_transpose(image)
            codec = str(image.format).lower()
            channels = len(image.getbands())
            return ImageFacts(
                height=shown.height, width=shown.width, channels=channels, codec=codec
            )
    # Pillow raises many kinds for bad data; each is this image's reason.
    except Exception as error:
        return Rejection(f"can't be decoded ({error})")


def write_folder(root: Path, files: dict[str, bytes]) -> Path:
    """Write files by name below a root."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def class_folder(root: Path, samples: int = 30, classes: int = 3) -> Path:
    """Write an image folder of small photographs of varied sizes, class-0/0000.jpg and so on."""
    files = {
        f"class-{i % classes}/{i:04d}.jpg": jpeg(i, 16 + i % 7, 20 + i % 5) for i in range(samples)
    }
    return write_folder(root, files)


def flawed_folder(root: Path, samples: int) -> Path:
    """A class folder of photographs with two bad ones and a file that isn't a photograph."""
    bad = {f"class-1/{name}": BAD[name][0] for name in ("empty.jpg", "truncated.jpg")}
    return write_folder(class_folder(root, samples=samples), bad | {"stray.txt": b"x"})
