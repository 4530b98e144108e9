"""Datasets of the DLIO-style workloads: samples of the published size, few enough for this disk.

Files are JPEGs in class folders, which are also packed; .npy and .npz, one sample each; Parquet.
JPEGs are crops of the shipped photographs with sensor noise. Their pixels and quality are chosen to
approach the wanted bytes from below; comment segments, which every decoder skips, fill the rest
(about a tenth of the bytes). Arrays are incompressible random bytes, as DLIO generates them.
Parquet files contain lists of float32 with the lengths of the flux job of MLPerf Storage
(configs/dlio/workload/flux_b200.yaml), 288 rows per file.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from benchmarks.photographs import PHOTOGRAPHS, add_grain, noise, open_photograph
from penstock.cache import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from PIL import Image

Kind = Literal["jpeg", "npy", "npz", "parquet"]

VERSION = 2  # of the generated data: a change replaces data of older versions
NPY_HEADER = 128  # bytes; np.save fills its header up to a multiple of 64
NPZ_OVERHEAD = 640  # bytes, about: of the zip's two members and their headers
FLUX_COLUMNS = {
    "t5_encodings": 524_328,
    "clip_encodings": 409,
    "mean": 8_232,
    "logvar": 8_232,
    "timestamp": 7,
}
FLUX_ROWS, FLUX_GROUP = 288, 16
"""Rows of a file, as published, and of a row group, of which nothing is: 35 MB each."""
# Different pictures; more samples than that are the same ones again, each under its own number.
PICTURES = 64
# At ImageNet's resolution its mean JPEG has about so many bytes a pixel (116 kB at 480 x 406).
BYTES_A_PIXEL = 0.59
_SEGMENT = 65_533  # bytes of a JPEG comment's text, at most
_QUALITIES = range(1, 97)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSet:
    """A generated dataset. files: the folder. pack: of the JPEGs, otherwise also the folder of
    files."""

    kind: Kind
    files: Path
    pack: Path
    samples: int
    sample_bytes: int

    def record(self) -> dict[str, object]:
        """Describe the data in results, without paths of this machine."""
        return {"kind": self.kind, "samples": self.samples, "sample_bytes": self.sample_bytes}


def make(
    out: Path, *, kind: Kind, samples: int, sample_bytes: int, workers: int = 2
) -> GeneratedSet:
    """Write `samples` samples of sample_bytes below `out`; a complete earlier set is kept.

    Raises ConfigError for JPEGs that are too small for a picture.
    """
    files = out / "files"
    made = GeneratedSet(
        kind=kind,
        files=files,
        pack=out / "pack" if kind == "jpeg" else files,
        samples=samples,
        sample_bytes=sample_bytes,
    )
    record = out / "made.json"
    settings = {"version": VERSION, **made.record()}
    if record.exists() and json.loads(record.read_text()) == settings:
        return made
    shutil.rmtree(out, ignore_errors=True)
    files.mkdir(parents=True)
    if kind == "jpeg":
        _write_jpegs(made, workers=workers)
    elif kind == "parquet":
        _write_parquet(made)
    else:
        _write_arrays(made)
    os.sync()
    record.write_text(json.dumps(settings))
    return made


def files_below(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def forget(folder: Path) -> None:
    """Drop the files below a folder from the page cache (except mapped ones), so that a run reads
    the disk. Dirty pages can't be dropped: `make` writes them back."""
    for path in files_below(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _write_arrays(made: GeneratedSet) -> None:
    rng = np.random.default_rng(7)
    digits = len(str(made.samples - 1))
    for number in range(made.samples):
        name = made.files / f"{number:0{digits}d}.{made.kind}"
        if made.kind == "npy":
            np.save(name, np.frombuffer(rng.bytes(made.sample_bytes - NPY_HEADER), np.uint8))
        else:
            values = np.frombuffer(rng.bytes(made.sample_bytes - NPZ_OVERHEAD), np.uint8)
            np.savez(name, x=values, y=np.uint8(number % 251))


def _write_parquet(made: GeneratedSet) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(7)
    share = made.sample_bytes / (4 * sum(FLUX_COLUMNS.values()))
    lengths = {name: max(1, round(share * length)) for name, length in FLUX_COLUMNS.items()}
    for first in range(0, made.samples, FLUX_ROWS):
        rows = min(FLUX_ROWS, made.samples - first)
        columns = {
            name: pa.FixedSizeListArray.from_arrays(
                pa.array(rng.standard_normal(rows * length, np.float32)), length
            )
            for name, length in lengths.items()
        }
        pq.write_table(
            pa.table(columns),
            made.files / f"{first // FLUX_ROWS:05d}.parquet",
            row_group_size=FLUX_GROUP,
            compression="none",
            use_dictionary=False,
        )


def _write_jpegs(made: GeneratedSet, *, workers: int) -> None:
    from penstock import pack

    pictures = [
        jpeg_of(made.sample_bytes, number=number, seed=7)
        for number in range(min(PICTURES, made.samples))
    ]
    digits = len(str(made.samples - 1))
    names = sorted(PHOTOGRAPHS)
    for number in range(made.samples):
        folder = made.files / names[number % len(names)]
        folder.mkdir(exist_ok=True)
        encoded = filled(pictures[number % len(pictures)], made.sample_bytes, number=number)
        (folder / f"{number:0{digits}d}.jpg").write_bytes(encoded)
    pack(str(made.files), str(made.pack), workers=workers)


def jpeg_of(most_bytes: int, *, number: int, seed: int) -> bytes:
    """Return a JPEG of one of the photographs, as close below most_bytes as its quality permits."""
    names = sorted(PHOTOGRAPHS)
    pixels = (most_bytes / BYTES_A_PIXEL) ** 0.5
    width, height = round(pixels * 1.09), round(pixels / 1.09)
    rng = np.random.default_rng((seed, number))
    photograph = open_photograph(PHOTOGRAPHS[names[number % len(names)]]).convert("RGB")
    picture = _noisy(_cropped(photograph, width, height, rng), rng, seed=seed)
    low, high = _QUALITIES.start, _QUALITIES.stop - 1
    best = _encoded(picture, low)
    if len(best) > most_bytes:
        raise ConfigError(
            f"A JPEG of {most_bytes} bytes doesn't hold {width} x {height} pixels (quality {low} "
            f"makes {len(best)}). Ask for larger samples."
        )
    while low < high:  # bytes grow with quality
        middle = (low + high + 1) // 2
        if len(encoded := _encoded(picture, middle)) <= most_bytes:
            low, best = middle, encoded
        else:
            high = middle - 1
    return best


def filled(encoded: bytes, size_bytes: int, *, number: int) -> bytes:
    """Return the JPEG with comments after its first marker, so that it has exactly size_bytes.
    number: makes files of the same picture differ. The JPEG is unchanged if not even an empty
    comment fits."""
    missing = size_bytes - len(encoded)
    text = str(number).encode()
    comments = bytearray()
    while missing >= 4:
        length = min(_SEGMENT, missing - 4)
        if 0 < missing - 4 - length < 4:  # leave room for one comment more, or for none
            length -= 4
        comments += b"\xff\xfe" + (length + 2).to_bytes(2, "big")
        comments += text[:length].ljust(length, b" ")
        missing -= 4 + length
    return encoded[:2] + bytes(comments) + encoded[2:]


def _cropped(
    photograph: Image.Image, width: int, height: int, rng: np.random.Generator
) -> Image.Image:
    from PIL import Image

    most = min(photograph.width / width, photograph.height / height)
    scale = rng.uniform(0.6 * most, most)
    left = rng.uniform(0, photograph.width - scale * width)
    top = rng.uniform(0, photograph.height - scale * height)
    box = (left, top, left + scale * width, top + scale * height)
    return photograph.resize((width, height), Image.Resampling.BILINEAR, box=box)


def _noisy(picture: Image.Image, rng: np.random.Generator, *, seed: int) -> Image.Image:
    """Add grain, in tiles of the size of the grain."""
    grain = noise(seed)
    tile = grain.height // 2
    for top in range(0, picture.height, tile):
        for left in range(0, picture.width, tile):
            box = (left, top, min(left + tile, picture.width), min(top + tile, picture.height))
            picture.paste(add_grain(picture.crop(box), grain, rng), box)
    return picture


def _encoded(picture: Image.Image, quality: int) -> bytes:
    written = io.BytesIO()
    picture.save(written, "JPEG", quality=quality)
    return written.getvalue()
