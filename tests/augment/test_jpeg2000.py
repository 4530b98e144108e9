"""Test that JPEG 2000 reaches DALI only if Pillow has decoded it: damaged files ended
the process."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image, ImageFile, features

from penstock.augment import (
    EncodedPipeline,
    bad_headers,
    is_jpeg2000,
    pillow_refusal,
    read_header,
    verify,
    verify_images,
)
from penstock.cache import MissingDependencyError
from penstock.readers import EncodedBatch, ImageFacts, Rejection, build_index
from tests import images

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.readers import Encoded

pytest.importorskip("nvidia.dali")
pytestmark = pytest.mark.skipif(
    not features.check_codec("jpg_2000"), reason="this Pillow has no OpenJPEG"
)

KINDS = {
    "jp2": images.encoded(images.picture(3), "JPEG2000"),
    "code stream": images.encoded(images.picture(4), "JPEG2000", no_jp2=True),
    "tiled": images.encoded(images.picture(5, 64, 96), "JPEG2000", tile_size=(32, 32)),
    "lossy grey": images.encoded(
        images.picture(6, 48, 48, "L"), "JPEG2000", irreversible=True, quality_layers=[20]
    ),
}


def array(data: bytes) -> Encoded:
    return np.frombuffer(data, np.uint8)


def cuts(data: bytes) -> list[bytes]:
    """Each of the first lengths, where the boxes and the main header lie, then every 37th."""
    lengths = sorted({*range(16, min(220, len(data))), *range(220, len(data), 37)})
    return [data[:length] for length in lengths]


def flips(data: bytes) -> list[bytes]:
    """One byte of the boxes and headers turned over each."""
    return [
        data[:at] + bytes((data[at] ^ 0xFF,)) + data[at + 1 :]
        for at in range(8, min(200, len(data)), 3)
    ]


def pillow_decodes(sample: Encoded) -> bool:
    """Asked of Pillow's front door, not of the code under test."""
    try:
        with Image.open(io.BytesIO(sample.tobytes()), formats=["JPEG2000"]) as image:
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return False
    return True


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the inputs of nvImageCodec and of the DALI decoder."""
    seen: list[bytes] = []
    run = EncodedPipeline.run

    def read(sample: Encoded) -> Any:
        seen.append(sample.tobytes())
        return read_header(sample)

    def decode(pipe: EncodedPipeline, encoded: list[Encoded], *arguments: Any) -> Any:
        seen.extend(sample.tobytes() for sample in encoded)
        return run(pipe, encoded, *arguments)

    monkeypatch.setattr(verify, "read_header", read)
    monkeypatch.setattr(EncodedPipeline, "run", decode)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_whole_ones_are_taken(kind: str) -> None:
    data = KINDS[kind]
    with Image.open(io.BytesIO(data)) as image:
        (facts,) = verify_images([array(data)], threads=1)
        assert isinstance(facts, ImageFacts)
        assert (facts.width, facts.height, facts.codec) == (*image.size, "jpeg2k")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_what_pillow_cannot_decode_is_rejected_and_never_given_to_dali(
    kind: str, seen: list[bytes]
) -> None:
    whole = array(KINDS[kind])
    broken = [array(data) for data in (*cuts(KINDS[kind]), *flips(KINDS[kind]))]
    bad = {sample.tobytes() for sample in broken if not pillow_decodes(sample)}
    assert len(bad) > 150
    verdicts = verify_images([*broken, whole], threads=1)
    assert isinstance(verdicts[-1], ImageFacts)
    for sample, verdict in zip(broken, verdicts, strict=False):
        assert isinstance(verdict, ImageFacts | Rejection)
        if sample.tobytes() in bad:
            assert isinstance(verdict, Rejection)
            assert verdict.reason
    assert whole.tobytes() in seen
    assert not bad.intersection(seen)


def test_unverified_bytes_of_a_batch_are_held_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a torch dataset, which no verifier has seen."""
    samples = [array(KINDS["jp2"]), array(KINDS["jp2"][:400])]

    def read(sample: Encoded) -> Any:
        assert sample is samples[0]
        return read_header(sample)

    monkeypatch.setattr(verify, "read_header", read)
    batch = EncodedBatch(
        ids=np.arange(2), encoded=samples, dims=np.full((2, 2), (24, 32), np.int32)
    )
    assert list(bad_headers(batch)) == [1]
    assert "Pillow" in bad_headers(batch)[1]


def test_an_index_has_a_line_for_each(tmp_path: Path) -> None:
    files = {f"{at:03}.jp2": data for at, data in enumerate(cuts(KINDS["jp2"])[::20])}
    images.write_folder(tmp_path / "set", {"good.jp2": KINDS["jp2"], **files})
    summary = build_index(tmp_path / "set")
    assert summary.samples + summary.quarantined == 1 + len(files)
    assert summary.samples >= 1
    assert summary.quarantined > len(files) // 2


def test_a_script_that_lets_pillow_load_truncated_files_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for data in (KINDS["jp2"][:300], KINDS["jp2"][:400], KINDS["code stream"][:300]):
        assert pillow_refusal(array(data), max_pixels=10_000) is not None
        assert ImageFile.LOAD_TRUNCATED_IMAGES is True
    assert pillow_refusal(array(KINDS["jp2"]), max_pixels=10_000) is None


def test_the_size_is_held_against_the_limit_before_a_pixel_is_decoded() -> None:
    refusal = pillow_refusal(array(KINDS["jp2"]), max_pixels=100)
    assert refusal is not None
    assert "32 x 24" in refusal.reason


def test_a_pillow_without_openjpeg_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "check_codec", lambda _: False)
    with pytest.raises(MissingDependencyError, match="OpenJPEG"):
        verify_images([array(KINDS["jp2"])], threads=1)


@pytest.mark.parametrize(
    ("data", "is_one"),
    [
        *((data, True) for data in KINDS.values()),
        (b"\xff\x4f\xff\x52" + bytes(20), True),  # roughly: what a laxer decoder may take for one
        (images.jpeg(1), False),
        (images.encoded(images.picture(2), "PNG"), False),
        (b"", False),
    ],
)
def test_signatures(data: bytes, is_one: bool) -> None:
    assert is_jpeg2000(array(data)) is is_one
