"""Odd image files: each that can't be read is a line of the quarantine, never a traceback."""

from __future__ import annotations

import json
import os
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.cache import ClosedError
from penstock.pipeline.cli import main
from penstock.readers import build_index, pack
from penstock.readers.fields import image_verdicts
from tests import images

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.readers import Encoded, ImageFacts, Rejection

GREYS = b"".join(bytes((i, i, i, 0)) for i in range(256))


def bmp(
    bits: int, compression: int, body: bytes, *, side: tuple[int, int] = (8, 8), colours: int = 0
) -> bytes:
    """A Windows bitmap, of whatever its header says."""
    palette = GREYS[: 4 * colours]
    start = 54 + len(palette)
    header = struct.pack(
        "<IiiHHIIiiII", 40, *side, 1, bits, compression, len(body), 2835, 2835, colours, 0
    )
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + header + palette + body


def png(width: int, height: int) -> bytes:
    """A PNG whose header promises more than its data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(99))), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


ODD = {
    "sixteen-bits.bmp": bmp(16, 0, bytes(128)),
    "rle4.bmp": bmp(4, 2, b"\x08\x55\0\0" * 8 + b"\0\1", colours=16),
    "huge.bmp": bmp(24, 0, bytes(192), side=(2**31 - 1, 1)),
    "bottom-less.bmp": bmp(24, 0, bytes(192), side=(8, 0)),
    "cut.bmp": bmp(24, 0, b""),
    "bomb.png": png(60_000, 60_000),
    "vast.png": png(2**31 - 1, 2**31 - 1),
    "nothing.png": png(0, 0),
    "empty.tif": b"",
    "stub.tif": b"II*\0\x08\0\0\0" + bytes(20),
    "loop.tif": b"II*\0\x08\0\0\0\0\0\x08\0\0\0" + bytes(20),
    "film.jpg": images.encoded(images.picture(1), "GIF"),
    "half.png": images.truncated(images.encoded(images.picture(2), "PNG")),
    "stub.webp": b"RIFF\x10\0\0\0WEBPVP8 " + bytes(8),
    "stub.jp2": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(30),
    "stub.ppm": b"P6\n8 8\n255\n" + bytes(9),
}
PLAIN = {"a.jpg": images.jpeg(1), "b.png": images.encoded(images.picture(2), "PNG")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return images.write_folder(tmp_path / "set", ODD | PLAIN)


def named(place: Path) -> dict[str, str]:
    lines = (place / "quarantine.jsonl").read_text().splitlines()
    return {entry["name"]: entry["reason"] for entry in map(json.loads, lines)}


def test_odd_files_are_quarantined_by_index_and_pack(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali")
    summary = build_index(folder)
    reasons = named(tmp_path / "set.penstock")
    assert set(reasons) == set(ODD)
    assert all(reasons.values())
    assert summary.samples == len(PLAIN)
    assert pack(folder, tmp_path / "pack").samples == len(PLAIN)
    assert named(tmp_path / "pack" / "_penstock") == reasons


def test_the_command_line_shows_no_traceback(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nvidia.dali")
    assert main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quarantined"] == len(ODD)


@pytest.mark.parametrize(
    "kind", [TypeError, ValueError, SystemError, RuntimeError, KeyError, ZeroDivisionError]
)
def test_whatever_a_decoder_raises_is_a_reason(tmp_path: Path, kind: type[Exception]) -> None:
    """Of the file that it raises for, however many come with it."""
    folder = images.write_folder(tmp_path / "set", PLAIN)

    def verify(samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
        if any(bytes(sample) == PLAIN["b.png"] for sample in samples):
            raise kind("no\nway")
        return images.verify(samples)

    assert build_index(folder, verify=verify).samples == 1
    assert kind.__name__ in named(folder.with_name("set.penstock"))["b.png"]


@pytest.mark.parametrize("kind", [ClosedError, MemoryError, OSError, KeyboardInterrupt])
def test_what_no_sample_is_to_blame_for_is_raised(kind: type[BaseException]) -> None:
    def verify(samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
        del samples
        raise kind("the machine")

    with pytest.raises(kind, match="the machine"):
        image_verdicts([np.frombuffer(images.jpeg(1), np.uint8)], verify)


def test_a_link_that_loops_is_quarantined(tmp_path: Path) -> None:
    root = images.class_folder(tmp_path / "set", samples=4)
    os.symlink("loop.jpg", root / "class-0" / "loop.jpg")
    os.symlink("b", root / "class-1" / "a")
    os.symlink("a", root / "class-1" / "b")
    os.symlink("nowhere", root / "class-1" / "c.jpg")
    assert build_index(root, verify=images.verify).samples == 4
    reasons = named(tmp_path / "set.penstock")
    assert set(reasons) == {"class-0/loop.jpg", "class-1/a", "class-1/b", "class-1/c.jpg"}
    assert all("link" in reason for reason in reasons.values())
    os.symlink("self", tmp_path / "self")
    with pytest.raises(FileNotFoundError, match="nothing"):
        build_index(tmp_path / "self", verify=images.verify)
