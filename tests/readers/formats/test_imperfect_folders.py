"""Test folders and tar files with small faults: a warning or an error names each of them."""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import (
    ClosedError,
    ConfigError,
    DatasetError,
    DatasetNotFoundError,
    PenstockWarning,
)
from penstock.pipeline.cli import main
from penstock.readers import Dataset, build_index, open_index, pack
from penstock.readers.fieldtypes import Bytes, ClassLabel, Image, Mask, check_images
from tests import images, tars
from tests.conftest import write_photographs
from tests.files import quarantine
from tests.tars import tar_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.readers import Encoded, ImageFacts, Rejection


JPEG = images.jpeg(1, 16, 20)


MASK = images.encoded(images.picture(2, 16, 20, "L"), "PNG")


def test_rows_with_invalid_values_are_warned_about(tmp_path: Path) -> None:
    table = b"path,label\n1.jpg,cat\n2.jpg,cow\n"
    root = images.write_folder(tmp_path / "set", {"1.jpg": JPEG, "2.jpg": JPEG, "list.csv": table})
    schema = {"label": ClassLabel(("dog", "cat"))}
    dataset = Dataset(root, manifest="list.csv", schema=schema, allow_left_out=1)
    with pytest.warns(PenstockWarning, match=r"1 of 2 .*:\n  1 x .*cow.*such as 2\.jpg"):
        assert dataset.open(verify=images.verify).samples == 1


def test_samples_that_fail_the_check_are_warned_about(tmp_path: Path) -> None:
    files = {"1.jpg": JPEG, "1.txt": b"caf\xe9", "2.jpg": JPEG, "2.txt": b"tea"}
    root = images.write_folder(tmp_path / "set", files)
    with pytest.warns(PenstockWarning, match=r"1 of 2 .*:\n  1 x .*caption: .*such as 1\.jpg"):
        assert Dataset(root, allow_left_out=1).open(verify=images.verify).samples == 1


def test_a_missing_label_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = b"path,label\n1.jpg,cat\n2.jpg,\n"
    root = images.write_folder(tmp_path / "set", {"1.jpg": JPEG, "2.jpg": JPEG, "list.csv": table})
    with caplog.at_level(logging.WARNING, "penstock"):
        dataset = Dataset(root, manifest="list.csv")
        dataset.open(verify=images.verify)
        assert dataset.fields == ("image",)
    assert 'some samples lack "label" (1)' in caplog.text
    caplog.clear()
    quarantine = Dataset(root, manifest="list.csv", fields=("image", "label", "label.present"))
    quarantine.open(verify=images.verify)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", ["cat", "caf\u00e9 au lait", "a" * 60])
def test_classes_of_tar_members_by_name(tmp_path: Path, name: str) -> None:
    members = {"1.jpg": JPEG, "1.cls": f"{name}\n".encode(), "2.jpg": JPEG, "2.cls": b"0"}
    root = images.write_folder(tmp_path / "set", {"0.tar": tars.archive(members)})
    dataset = Dataset(root, fields=("label",), schema={"label": ClassLabel(("dog", name))})
    dataset.open(verify=images.verify)
    assert np.asarray(dataset.column("label")).tolist() == [1, 0]


def test_names_of_classes_in_tar_members_need_a_schema(tmp_path: Path) -> None:
    members = {"1.jpg": JPEG, "1.cls": b"cat"}
    root = images.write_folder(tmp_path / "set", {"0.tar": tars.archive(members)})
    with pytest.raises(DatasetNotFoundError, match=r'schema=\{"label": ClassLabel'):
        Dataset(root).open(verify=images.verify)
    other = Dataset(root, schema={"label": ClassLabel(("dog", "cow"))})
    with pytest.raises(DatasetNotFoundError, match=r"'cat', which isn't one of the classes"):
        other.open(verify=images.verify)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"f.0001.jpg": JPEG, "f.0002.jpg": JPEG}, "a key ends at the first dot of a name"),
        (
            {"1.jpg": JPEG, "2.jpg": JPEG, "2.png": MASK},
            "1 samples or members are left out, such as 0.tar/2.jpg: two members",
        ),
    ],
)
def test_samples_that_tar_files_lose_are_warned_about(
    tmp_path: Path, members: dict[str, bytes], words: str
) -> None:
    root = images.write_folder(tmp_path / "set", {"0.tar": tars.archive(members)})
    with pytest.warns(PenstockWarning, match=words):
        assert Dataset(root, allow_left_out=1).open(verify=images.verify).samples == 1


def test_keys_without_a_label_are_warned_about(tmp_path: Path) -> None:
    members = {"1.jpg": JPEG, "1.cls": b"1", "2.jpg": JPEG}
    root = images.write_folder(tmp_path / "set", {"0.tar": tars.archive(members)})
    with pytest.warns(PenstockWarning, match=r"1 of 2 .*:\n  1 x .*no label.*such as 0\.tar/2"):
        assert Dataset(root, allow_left_out=1).open(verify=images.verify).samples == 1


def test_images_next_to_class_folders_are_warned_about(tmp_path: Path) -> None:
    files = {"a/1.jpg": JPEG, "b/2.jpg": JPEG, "3.jpg": JPEG, "README.txt": b"x"}
    root = images.write_folder(tmp_path / "set", files)
    with pytest.warns(PenstockWarning, match=r"1 images are left out, such as 3\.jpg: not in a"):
        assert Dataset(root, allow_left_out=1).open(verify=images.verify).samples == 2


def test_full_paths_below_the_root(tmp_path: Path) -> None:
    root = tmp_path / "set"
    table = f"path,score\n{root}/a/1.jpg,0.5\n./a//2.jpg,1\n".encode()
    images.write_folder(root, {"a/1.jpg": JPEG, "a/2.jpg": JPEG, "list.csv": table})
    dataset = Dataset(root, manifest="list.csv")
    dataset.open(verify=images.verify)
    assert dataset.names([0, 1]) == ["a/1.jpg", "a/2.jpg"]
    images.write_folder(root, {"list.csv": f"path\n{root}/../x.jpg\n".encode()})
    with pytest.raises(DatasetError, match=r"x\.jpg', wanted a path relative"):
        Dataset(root, manifest="list.csv").open(verify=images.verify)


@pytest.mark.parametrize("name", ["a/1", "1.jpg", r"a\1.jpg", "b/2.jpg"])
def test_names_of_files_that_dont_exist(tmp_path: Path, name: str) -> None:
    table = f"path,label\n{name},cat\n".encode()
    root = images.write_folder(tmp_path / "set", {"a/1.jpg": JPEG, "list.csv": table})
    with pytest.raises(DatasetError, match=r"line 2\)\).* have / and an ext.*to its folder\.$"):
        Dataset(root, manifest="list.csv").open(verify=images.verify)


def test_masks_and_images_in_one_folder(tmp_path: Path) -> None:
    files = {"1.jpg": JPEG, "1_mask.png": MASK, "2.jpg": JPEG, "2_mask.png": MASK}
    root = images.write_folder(tmp_path / "set", files)
    places = {"image": "*.jpg", "mask": "*_mask.png"}
    message = r'1_mask.png to 1.jpg, but each is.*fields={"image": "\*.jpg", "mask": "\*_mask.png"}'
    with pytest.warns(PenstockWarning, match=message):
        assert Dataset(root).open(verify=images.verify).samples == 4
    assert Dataset(root, fields=places).open(verify=images.verify).samples == 2


@pytest.mark.parametrize("folder", ["images", "train"])
def test_one_folder_that_may_be_no_class(tmp_path: Path, folder: str) -> None:
    files = {f"{folder}/a/1.jpg": JPEG, f"{folder}/b/2.jpg": JPEG}
    root = images.write_folder(tmp_path / "set", files)
    with pytest.warns(PenstockWarning, match=rf"every label is 0.*give .*/set/{folder} as"):
        Dataset(root).open(verify=images.verify)
    asked = Dataset(root, schema={"label": ClassLabel()}).open(verify=images.verify)
    assert asked.schema["label"] == ClassLabel((folder,))


def test_audio_that_cant_be_decoded_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members = {"1.wav": b"RIFF\x24\0\0\0WAVEfmt ", "1.txt": b"yes"}
    root = images.write_folder(tmp_path / "set", {"0.tar": tars.archive(members)})
    with caplog.at_level(logging.WARNING, "penstock"):
        assert Dataset(root).fields == ("caption",)
    assert 'nothing decodes "audio"' in caplog.text
    assert Dataset(root, schema={"audio": Bytes()}).fields == ("audio", "caption")


def test_masks_in_a_format_that_loses_numbers(tmp_path: Path) -> None:
    files = {f"images/{i}.jpg": JPEG for i in range(20)} | {"masks/0.jpg": JPEG}
    few = {"images/0.jpg": JPEG, "masks/0.jpg": JPEG}
    blurred = images.write_folder(tmp_path / "blurred", few)
    dataset = Dataset(blurred, fields={"image": "images", "mask": "masks"})
    with pytest.warns(PenstockWarning, match='"mask" is read as pictures.*lossless'):
        assert dataset.open(verify=images.verify).schema["mask"] == Image()
    # One JPEG among the masks is rejected, and doesn't turn the others into pictures.
    mixed = images.write_folder(
        tmp_path / "mixed", files | {f"masks/{i}.png": MASK for i in range(1, 20)}
    )
    with pytest.warns(PenstockWarning, match=r"mask: no mask \(its first bytes.*images/0\.jpg"):
        opened = Dataset(mixed, fields={"image": "images", "mask": "masks"}).open(
            verify=images.verify
        )
    assert opened.schema["mask"] == Mask(of="image", dtype="uint8")
    assert opened.samples == 19


@pytest.mark.parametrize("cells", [("0.0", "10.0"), ("0.5", "1")])
def test_classes_that_are_no_integers(tmp_path: Path, cells: tuple[str, str]) -> None:
    table = f"path,label\n1.jpg,{cells[0]}\n2.jpg,{cells[1]}\n".encode()
    files = {"1.jpg": JPEG, "2.jpg": JPEG, "list.csv": table}
    root = images.write_folder(tmp_path / "set", files)
    with pytest.raises(DatasetError, match=rf"{cells[0]}' \(line 2\) isn't an integer"):
        Dataset(root, manifest="list.csv", schema={"label": ClassLabel()}).open()
    quarantine = Dataset(root, manifest="list.csv", schema={"label": ClassLabel(cells)})
    quarantine.open(verify=images.verify)
    assert np.asarray(quarantine.column("label")).tolist() == [0, 1]


IN_TARS, IN_FOLDERS = 6, 8


@pytest.fixture
def both(tmp_path: Path) -> Path:
    root = tar_folder(tmp_path / "both", samples=IN_TARS, archives=2)
    return write_photographs(root, samples=IN_FOLDERS, classes=2)


def json_of(
    capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0
) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
def test_every_command_accepts_the_option_that_the_error_names(
    both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nvidia.dali")
    for command in (["index", both], ["pack", both, tmp_path / "p"], ["inspect", both]):
        assert main(list(map(str, command))) == 2
        assert "--format" in capsys.readouterr().err
    # One after the other in the same place: an index of the other kind must not be used.
    for kind, samples in (("tar", IN_TARS), ("folder", IN_FOLDERS), ("tar", IN_TARS)):
        option = ("--format", kind)
        assert json_of(capsys, "inspect", both, *option)["samples"] == samples
        assert json_of(capsys, "index", both, *option)["samples"] == samples
        found = json_of(capsys, "inspect", both, *option)
        assert (found["kind"], found["samples"]) == (kind, samples)
        assert json_of(capsys, "inspect", both, *option, "--batch", 3)["samples"]
    for kind, samples in (("tar", IN_TARS), ("folder", IN_FOLDERS)):
        packed = json_of(capsys, "pack", both, tmp_path / kind, "--format", kind)
        assert packed["samples"] == samples
        assert json_of(capsys, "inspect", tmp_path / kind)["samples"] == samples


def test_a_format_that_is_none_is_refused(both: Path, tmp_path: Path) -> None:
    wrong: Any = "zip"
    for call in (
        lambda: build_index(both, format=wrong, verify=images.verify),
        lambda: pack(both, tmp_path / "p", format=wrong, verify=images.verify),
        lambda: open_index(both, format=wrong, verify=images.verify),
    ):
        with pytest.raises(ConfigError, match=r"'zip'.*'folder'"):
            call()
    assert main(["index", str(both), "--format", "zip"]) == 2


def test_a_pack_is_no_format_of_an_index(both: Path) -> None:
    with pytest.raises(ConfigError, match="has its own index"):
        build_index(both, format="pack", verify=images.verify)


def test_a_pattern_of_tar_files_is_no_folder(both: Path, tmp_path: Path) -> None:
    some = f"{both}/train-{{000000..000001}}.tar"
    with pytest.raises(ConfigError, match="names tar files"):
        build_index(some, format="folder", verify=images.verify)
    with pytest.raises(ConfigError, match="names tar files"):
        pack(some, tmp_path / "p", format="folder", verify=images.verify)
    assert build_index(some, format="tar", verify=images.verify).samples == IN_TARS


GREYS = b"".join(bytes((i, i, i, 0)) for i in range(256))


def bmp(
    bits: int, compression: int, body: bytes, *, side: tuple[int, int] = (8, 8), colours: int = 0
) -> bytes:
    """Return a Windows bitmap with any header."""
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


def test_odd_files_are_quarantined_by_index_and_pack(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali")
    summary = build_index(folder)
    reasons = quarantine(tmp_path / "set.penstock")
    assert set(reasons) == set(ODD)
    assert all(reasons.values())
    assert summary.samples == len(PLAIN)
    assert pack(folder, tmp_path / "pack").samples == len(PLAIN)
    assert quarantine(tmp_path / "pack" / "_penstock") == reasons


def test_the_command_line_shows_no_traceback(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nvidia.dali")
    assert main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quarantined"] == len(ODD)


@pytest.mark.parametrize(
    "kind", [TypeError, ValueError, SystemError, RuntimeError, KeyError, ZeroDivisionError]
)
def test_any_error_of_a_decoder_is_a_reason(tmp_path: Path, kind: type[Exception]) -> None:
    """Of the file that it raises for, however many come with it."""
    folder = images.write_folder(tmp_path / "set", PLAIN)

    def verify(samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
        if any(bytes(sample) == PLAIN["b.png"] for sample in samples):
            raise kind("no\nway")
        return images.verify(samples)

    assert build_index(folder, verify=verify).samples == 1
    assert kind.__name__ in quarantine(folder.with_name("set.penstock"))["b.png"]


@pytest.mark.parametrize("kind", [ClosedError, MemoryError, OSError, KeyboardInterrupt])
def test_what_no_sample_is_to_blame_for_is_raised(kind: type[BaseException]) -> None:
    def verify(samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
        del samples
        raise kind("the machine")

    with pytest.raises(kind, match="the machine"):
        check_images([np.frombuffer(images.jpeg(1), np.uint8)], verify, max_pixels=10**6)


def test_a_link_that_loops_is_quarantined(tmp_path: Path) -> None:
    root = images.class_folder(tmp_path / "set", samples=4)
    os.symlink("loop.jpg", root / "class-0" / "loop.jpg")
    os.symlink("b", root / "class-1" / "a")
    os.symlink("a", root / "class-1" / "b")
    os.symlink("nowhere", root / "class-1" / "c.jpg")
    for name in (tokens := ("x.bin", "x.idx")):  # a format of tokens looks for these names
        os.symlink("nowhere", root / name)
    assert build_index(root, verify=images.verify).samples == 4
    reasons = quarantine(tmp_path / "set.penstock")
    links = {"class-0/loop.jpg", "class-1/a", "class-1/b", "class-1/c.jpg", *tokens}
    assert set(reasons) == links
    assert all("link" in reason for reason in reasons.values())
    os.symlink("self", tmp_path / "self")
    with pytest.raises(FileNotFoundError, match="there is no such file or folder"):
        build_index(tmp_path / "self", verify=images.verify)
