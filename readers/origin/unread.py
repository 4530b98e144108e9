"""What lies beside the images and isn't read: named once, with what to do; labels are never
guessed.

A layout whose folders can't be classes (a table of labels beside one folder, images beside their
masks, splits) is refused; what is merely left out is a warning.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from typing import TYPE_CHECKING

from penstock.cache.errors import DatasetError, PenstockWarning
from penstock.readers.files.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

REMEDY = (
    "To train on it, read it in a torch dataset of your own and pass that to Penstock's DataLoader "
    "(docs/datasets.md)."
)

_TABLES = frozenset(("csv", "tsv", "json", "jsonl", "ndjson", "parquet", "xlsx", "xml"))
_DATA = {
    **dict.fromkeys(("npy", "npz"), "NumPy arrays"),
    **dict.fromkeys(("zarr", "zarray", "zgroup", "zattrs"), "a Zarr store"),
    **dict.fromkeys(("h5", "hdf5", "he5"), "HDF5"),
    **dict.fromkeys(("tfrecord", "tfrecords", "tfrec"), "TFRecords"),
    **dict.fromkeys(("rec", "idx"), "RecordIO"),
    **dict.fromkeys(("mds",), "MDS shards"),
    **dict.fromkeys(("lmdb", "mdb"), "LMDB"),
    **dict.fromkeys(("parquet", "arrow", "feather", "csv", "tsv", "jsonl", "xlsx"), "a table"),
    **dict.fromkeys(("json", "ndjson", "xml"), "annotations"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus", "m4a"), "audio"),
    **dict.fromkeys(("mp4", "mkv", "avi", "mov", "webm"), "video"),
    **dict.fromkeys(("txt", "caption"), "text"),
    **dict.fromkeys(("pt", "pth", "pkl", "pickle", "safetensors"), "tensors"),
    **dict.fromkeys(("mat", "nii", "dcm", "bin"), "arrays"),
}
_IMAGES = frozenset(("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "jp2", "ppm", "pgm"))
_PICTURE_FOLDERS = frozenset(
    ("images", "image", "imgs", "img", "jpegimages", "photos", "pictures", "rgb", "input", "inputs")
)
_MASK_FOLDERS = frozenset(
    (
        *("masks", "mask", "labels", "label", "annotations", "annotation", "segmentation", "gt"),
        *(
            "segmentations",
            "segmentationclass",
            "segmentationobject",
            "groundtruth",
            "ground_truth",
        ),
        *("depth", "depths", "targets", "target", "outputs", "trimaps"),
    )
)
_SPLITS = frozenset(("train", "training", "val", "valid", "validation", "test", "testing", "eval"))
_TEXT = frozenset(("txt", "caption"))
_NAMED = 5


def extension(name: bytes) -> str:
    """The extension of a file, in lower case without its dot; "" without one."""
    base = name.rpartition(b"/")[2]
    return base.rpartition(b".")[2].decode("utf-8", "replace").lower() if b"." in base else ""


def remedy_for(name: bytes) -> str:
    """What to do about a file or folder of a kind that isn't read; "" for any other."""
    kind = _DATA.get(extension(name.rstrip(b"/")))
    return f"This is {kind}, which isn't read yet. {REMEDY}" if kind else ""


def check_layout(url: str, names: Sequence[bytes], classes: Sequence[str]) -> Counter[str]:
    """Refuse folders that can't be classes, and warn of what is left out; returns the files that
    are no images, by extension.

    names: of all files. classes: names of the folders that hold them. Raises DatasetError.
    """
    strange = [name for name in names if extension(name) not in _IMAGES]
    kinds = Counter(e for name in strange if (e := extension(name)) in _DATA and e not in _TEXT)
    kinds.update(extension(name) for name in _captions(strange, names))
    tables = [name for name in strange if extension(name) in _TABLES and name.count(b"/") <= 1]
    folders = {name.lower() for name in classes}
    if len(classes) == 1 and tables:
        raise DatasetError(
            f"{url}: {printable(tables[0])} lies beside the one folder "
            f"{printable(os.fsencode(classes[0]))!r}: read as classes, every label would be 0. For "
            f"the images without labels give {url.rstrip('/')}/{printable(os.fsencode(classes[0]))}"
            f"; the table isn't read yet. {REMEDY}"
        )
    pictures, masks = folders & _PICTURE_FOLDERS, folders & _MASK_FOLDERS
    if pictures and masks and folders <= _PICTURE_FOLDERS | _MASK_FOLDERS:
        raise DatasetError(
            f"{url}: the folders {', '.join(sorted(folders))} hold images and what belongs to "
            f"them; they aren't classes. For the images alone give "
            f"{url.rstrip('/')}/{min(pictures)}; masks and the like aren't read yet. {REMEDY}"
        )
    if len(folders) > 1 and folders <= _SPLITS:
        raise DatasetError(
            f"{url}: the folders {', '.join(sorted(folders))} are parts of a dataset, not classes. "
            f"Give one of them: {url.rstrip('/')}/{min(classes)}."
        )
    if kinds:
        warn(url, kinds, strange, labelled=len(classes) > 0)
    return kinds


def _captions(strange: Sequence[bytes], names: Sequence[bytes]) -> list[bytes]:
    """Texts that stand beside an image of their name; a README is no caption."""
    texts = [name for name in strange if extension(name) in _TEXT]
    if not texts:
        return []
    stems = {name.rpartition(b".")[0] for name in names if extension(name) in _IMAGES}
    return [name for name in texts if name.rpartition(b".")[0] in stems]


def warn(
    url: str, kinds: Mapping[str, int], names: Iterable[bytes] = (), *, labelled: bool
) -> None:
    """Warn of what is left out, by name. kinds: files by extension."""
    by_count = sorted(kinds.items(), key=lambda each: -each[1])
    listed = ", ".join(f"{count:,} .{e}" for e, count in by_count[:_NAMED])
    first = next((printable(name) for name in names if extension(name) in kinds), "")
    labels = "labels come from the folders alone" if labelled else "no labels are read"
    warnings.warn(
        f"{url}: {listed}{' and others' if len(by_count) > _NAMED else ''} are left out"
        f"{f' (such as {first})' if first else ''}: only images are read, {labels}. {REMEDY}",
        PenstockWarning,
        stacklevel=9,
    )
