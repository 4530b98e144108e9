"""Explain why data can't be read as a dataset, and how to fix it.

Either nothing exists at the URL, or the data there is of an unsupported kind. Labels are never
guessed. A layout whose folders can't be classes (a table of labels next to one folder, images next
to their masks, splits) is refused; files that are merely left out cause a warning. The words of a
folder's name tell its role (train2017, train_masks, JPEGImages), and folders are refused as classes
only if all of them have a role.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import TYPE_CHECKING, Literal

from penstock.cache import DatasetError, DatasetNotFoundError
from penstock.readers.files import IMAGES, KINDS, extension, kind_of, printable, stem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Role = Literal["pictures", "companion", "part", "lists"]
"""Images; data that belongs to images; a part of a dataset, such as train; lists of files."""

_NAMES: dict[Role, str] = {
    "lists": "imagesets",
    "companion": "masks mask labels label gt seg trimaps annotations annotation annot groundtruth "
    "segmentation segmentations segmentationclass segmentationobject ground_truth gtfine gtcoarse "
    "depth depths disp disparity disparities targets target outputs",
    "pictures": "images image imgs img jpegimages leftimg8bit rightimg8bit photos pictures rgb "
    "input inputs",
    "part": "train training val valid validation test testing eval",
}
_ROLES: dict[str, Role] = {name: role for role, names in _NAMES.items() for name in names.split()}
_PARTS = frozenset(_NAMES["part"].split())
# The fields of data that belongs to images, by the start of the folder's name; the rest are masks.
_FIELDS = {"depth": "depth", "disp": "disparity", "target": "target"}


def role_of(name: str) -> Role | None:
    """Return the role that a folder's name suggests, or None if the folder may be a class."""
    for words in ([name.lower()], _words(name)):
        roles = {_ROLES.get(word) for word in words}
        if roles and None not in roles:
            return next(role for role in _NAMES if role in roles)
    return None


def field_of(name: str) -> str:
    """Return the usual field of the images in a folder of data that belongs to other images."""
    words = (word for word in [name.lower(), *_words(name)] if _ROLES.get(word) == "companion")
    first = next(words, "")
    return next((field for start, field in _FIELDS.items() if first.startswith(start)), "mask")


def _words(name: str) -> list[str]:
    """Split a name into words: train_masks, train2017 and trainannot into train and the rest."""
    found: list[str] = []
    for word in re.findall("[a-z]+", name.lower()):
        starts = (part for part in _PARTS if word.startswith(part))
        part = next((p for p in starts if _ROLES.get(word[len(p) :]) == "companion"), None)
        found += [part, word[len(part) :]] if part else [word]
    return found


REMEDY = (
    "To train on it, convert it to Parquet, Zarr or files, or read it in a torch dataset of your "
    "own and pass that to Penstock's DataLoader (docs/howto/torch-datasets.md)."
)

# Other formats by the extensions of their files, and by the folders and names that show them.
_STORES = {
    "TFRecords": "tfrec tfrecord tfrecords",
    "RecordIO": "rec",
    "ArrayRecord": "arrayrecord array_record",
    "MDS shards of MosaicML Streaming": "mds",
    "an FFCV file": "beton",
    "HDF5": "h5 hdf5 he5",
    "scientific data": "nc nc4 mat nii dcm fits",
    "LMDB": "lmdb mdb",
    "a database or a spreadsheet": "db sqlite sqlite3 xls xlsx",
    "ORC": "orc",
    "Avro": "avro",
    "SafeTensors": "safetensors",
    "pickled tensors, which can run any code and are never opened": "pt pth pkl pickle",
    "a Zarr store in one zip file, which must be unpacked": "zarr",
    "an archive, which must be unpacked": "zip 7z rar",
    "a TileDB array": "tdb",
    "a Lance dataset": "lance",
}
_STORE_OF = {each: store for store, listed in _STORES.items() for each in listed.split()}
_MARKS = (
    (re.compile(rb"(^|/)_delta_log/"), "a Delta table"),
    (re.compile(rb"(^|/)metadata/[^/]*\.metadata\.json$"), "an Iceberg table"),
    (re.compile(rb"(^|/)chunk-\d+-\d+[^/]*\.bin$"), "chunks of LitData"),
)
_OF_FILES = ("a Delta table", "an Iceberg table")
# The pages with a script that converts the data.
_GUIDES = {
    "TFRecords": "tfdata",
    "ArrayRecord": "grain",
    "MDS shards of MosaicML Streaming": "mosaicml-streaming",
    "an FFCV file": "ffcv",
    "chunks of LitData": "litdata",
}

_LIST_TABLES = frozenset(("csv", "tsv", "jsonl", "ndjson"))
_TABLE_FORMATS = {"parquet": "parquet", "arrow": "arrow", "feather": "arrow"}
_TABLES = _LIST_TABLES | {"json", "parquet", "xlsx", "xml"}
# Data of other kinds than images, and files that lie in any folder and are no data.
_DATA = (KINDS.keys() - IMAGES) | _TABLES.union(
    _TABLE_FORMATS, _STORE_OF.keys() - {"zip", "db"}, ("npz", "zarray", "zgroup", "idx", "bin")
)
_NO_DATA = "md rst html pdf log yaml yml toml ini cfg py sh zip db bak tmp lnk url orig xmp"
_OTHER_FILES = frozenset(_NO_DATA.split())
# Names of texts about a dataset: alone they don't make a dataset of texts.
_PROSE = ("readme", "license", "licence", "changelog", "notice", "copying")
_SIDES = frozenset(("left", "right"))
_ANYWAY = ' If they are classes nevertheless, pass schema={"label": ClassLabel()}.'
_MOST_KINDS = 5


def check_store(url: str, names: Sequence[bytes]) -> None:
    """Raise DatasetNotFoundError for a store of another format, which is no folder of samples."""
    found = (name for name in names if not is_prose(name))
    if any(kind_of(name) not in (None, "json") or extension(name) == "npz" for name in found):
        return
    if advice := next(filter(None, map(_store_advice, names)), ""):
        raise DatasetNotFoundError(f"{url}: {advice}")


def _store_advice(name: bytes) -> str:
    """Return the advice for a file that shows another format, "" for any other."""
    ending = name.rpartition(b"/")[2].lower().partition(b".")[2].decode("utf-8", "replace")
    stores = [_STORE_OF[part] for part in re.split(r"[.\-]", ending) if part in _STORE_OF]
    stores += [store for mark, store in _MARKS if mark.search(name)]
    if not stores:
        return ""
    remedy = REMEDY
    if guide := _GUIDES.get(stores[0]):
        remedy = f"docs/migrate/{guide}.md has a script that packs it. {REMEDY}"
    if stores[0] in _OF_FILES:
        how = "as a list (docs/reference/datasets.md)"
        remedy = f"Give the Parquet files of its current version {how}."
    return f"{printable(name)} shows {stores[0]}. Penstock doesn't read it. {remedy}"


def may_be_image(name: bytes) -> bool:
    """Return True unless a file's name is of another kind, or that of a text about the dataset."""
    found = extension(name)
    return found not in _DATA and found not in _OTHER_FILES and not is_prose(name)


def is_prose(name: bytes) -> bool:
    """Return True for the name of a text about the dataset, such as README."""
    return name.rpartition(b"/")[2].decode("utf-8", "replace").lower().startswith(_PROSE)


def remedy_for(name: bytes) -> str:
    """Return the advice for a file or folder of an unsupported kind; "" for any other."""
    found, kind = extension(name.rstrip(b"/")), kind_of(name)
    if kind in ("audio", "video"):
        return (
            f"Give its folder: {kind} is read as bytes, which a Map decodes "
            "(docs/reference/fields.md)."
        )
    if found in _LIST_TABLES:
        return (
            "Pass a table of files as manifest=, and the folder of its files as the URL. Write a "
            "table of values or texts as Parquet, which is read."
        )
    if found == "bin":
        return (
            "To read token ids (nanoGPT's train.bin), describe them: "
            'format="tokens", dtype="uint16", sample=(2048,) (docs/howto/tokens.md).'
        )
    if found == "json":
        return (
            "To read annotations as in COCO, give the folder of their images as the URL, and this "
            f"file as manifest=. {REMEDY}"
        )
    return _store_advice(name) or (REMEDY if found == "xml" else "")


def check_layout(url: str, names: Sequence[bytes]) -> None:
    """Raise DatasetError for folders that can't be classes. names: of all files."""
    folders, root = _folders(names), url.rstrip("/")
    if len(folders) == 1 and (table := _table(names)) is not None:
        kind, inside = extension(table), f"{root}/{folders[0]}"
        how = f'For the table, pass manifest="{printable(table)}", with paths relative to the URL.'
        if kind in _TABLE_FORMATS:
            how = f'For the table, pass format="{_TABLE_FORMATS[kind]}".'
        elif kind not in _LIST_TABLES:
            how = REMEDY
        raise DatasetError(
            f"{url}: {printable(table)} shows that the only folder, {folders[0]!r}, isn't a class, "
            f"which would make every label 0. For the files in it give {inside}. {how}"
        )
    roles = {folder: role_of(folder) for folder in folders}
    companions = [folder for folder, role in roles.items() if role == "companion"]
    if companions:
        roles |= {folder: "pictures" for folder in folders if folder.lower() in _SIDES}
    by_role = {role: [f for f in folders if roles[f] == role] for role in _NAMES}
    pictures = by_role["pictures"] or (by_role["part"] if len(by_role["part"]) == 1 else [])
    if None not in roles.values() and pictures and companions:
        coco = _of_coco(names, pictures[0])
        together = "" if coco else _places(names, pictures, companions)
        raise DatasetError(
            f"{url}: the folders {', '.join(folders)} hold images and the data that belongs to "
            f"them; they aren't classes. {together}For the images alone give {root}/{pictures[0]}."
            f"{coco}{_ANYWAY}"
        )
    check_splits(url, names, anyway=_ANYWAY)


def check_splits(url: str, names: Sequence[bytes], *, anyway: str = "") -> None:
    """Raise DatasetError for folders that are the parts of a dataset. anyway: advice on how to read
    them nevertheless."""
    folders = _folders(names)
    parts = [folder for folder in folders if not _PARTS.isdisjoint(_words(folder))]
    if len(folders) > 1 and parts and all(map(role_of, folders)):
        first = next((folder for folder in parts if role_of(folder) != "companion"), parts[0])
        raise DatasetError(
            f"{url}: the folders {', '.join(folders)} are parts of a dataset, not "
            f"classes. Give one of them: {url.rstrip('/')}/{first}.{_of_coco(names, first)}{anyway}"
        )


def _of_coco(names: Sequence[bytes], folder: str) -> str:
    """Return the advice on how to read COCO's annotations of the images in a folder; empty if there
    are none."""
    lists = [name for name in names if extension(name) == "json" and name.count(b"/") == 1]
    own = [name for name in lists if folder.encode() in name.rpartition(b"/")[2]] or lists
    return f' For annotations as in COCO add manifest="{printable(min(own))}".' if own else ""


def _folders(names: Sequence[bytes]) -> list[str]:
    tops = {printable(name.partition(b"/")[0]) for name in names if b"/" in name}
    return sorted(tops, key=lambda top: (top.lower(), top))


def _table(names: Sequence[bytes]) -> bytes | None:
    """Return a table of the whole dataset, not one that lies next to an image of its name."""
    tables = [name for name in names if extension(name) in _TABLES and name.count(b"/") <= 1]
    images = {stem(name) for name in names if kind_of(name) == "image"} if tables else ()
    return next((name for name in tables if stem(name) not in images), None)


def _places(names: Sequence[bytes], pictures: Sequence[str], others: Sequence[str]) -> str:
    """Return the advice on `fields=` that reads images together with the data that belongs to them;
    empty if it would read nothing."""
    only = len(pictures) == 1
    places = {"image" if only else folder.lower(): folder for folder in pictures}
    for each in others:
        kinds = {extension(n) for n in names if printable(n.partition(b"/")[0]) == each}
        field = field_of(each) if kinds & IMAGES else "array" if kinds <= {"npy"} else ""
        if kinds <= {"txt", "caption"}:
            field = "text"
        if field:
            places[field if field not in places else each] = each
    if len(places) == 1:
        return f"These annotations aren't read. {REMEDY} "
    shown = ", ".join(f'"{field}": "{folder}"' for field, folder in places.items())
    return f"To read them together, paired by name, pass fields={{{shown}}}. "


def unread_files(names: Iterable[bytes], *, labelled: bool) -> tuple[Counter[str], list[str]]:
    """Count files of known kinds that belong to no sample by extension. Return a sentence about
    them, too, if there are any.

    names: of files that are no sample and have no sample's name.
    """
    strange = [name for name in names if extension(name) in _DATA and kind_of(name) != "text"]
    kinds = Counter(map(extension, strange))
    listed = ", ".join(f"{count:,} .{e}" for e, count in kinds.most_common(_MOST_KINDS))
    labels = "labels come from the folders alone" if labelled else "no labels are read"
    return kinds, [
        f"{listed}{' and others' if len(kinds) > _MOST_KINDS else ''} are left out (such as "
        f"{printable(first)}): images are read, and the files next to them with the same name "
        f"(.txt, .json, .npy); {labels}. Pass a table of samples as manifest=, and folders that "
        "belong together as fields= (docs/howto/class-folders.md). To read other data, write a "
        "torch dataset and pass it to Penstock's DataLoader."
        for first in strange[:1]
    ]


def not_found_message(url: str) -> str:
    """Return the message for a dataset that doesn't exist, or whose name is of an unsupported kind.
    A store that only lists folders doesn't show whether a file exists."""
    return (
        f"{url}: there is no such file or folder. Wanted a folder, a file, or a pattern such as "
        "data/*.parquet. Check the path for a typing error or a missing mount; a URL needs two "
        "slashes (s3://bucket/folder), and a Windows path its place in WSL (/mnt/c/…)."
        + _advice(url)
    )


def not_a_folder_message(url: str) -> str:
    """Return the message for a file in place of a folder."""
    return (
        f"{url}: this is a file, and its name isn't of a format that is read as a single file "
        "(.npy, .parquet, .tar, …). Give the folder that holds the dataset, or pass format=."
        + _advice(url)
    )


def _advice(url: str) -> str:
    advice = remedy_for(os.fsencode(url.partition("?")[0]))
    return f" {advice}" if advice else ""
