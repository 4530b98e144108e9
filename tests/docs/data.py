"""Small made data under the names that the pages use, each built once and copied into the folder of
a page that names it."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tarfile
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from tests.annotated_sets import instances, pictures, voc_set, yolo_set
from tests.images import write_folder
from tests.servers.moto import moto
from tests.token_files import draw_documents, write_megatron

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

CLASSES = ("beach", "forest", "street", "harbour")
TRAIN, VAL = 96, 24
BUCKET = "bucket"


class Made(NamedTuple):
    """Data under one name. build: writes it below a folder, at `path` there."""

    name: str
    """What a page's code must hold so that it gets the data; a prefix is enough."""
    path: str
    """The file or folder to copy, or a pattern of several."""
    build: Callable[[Path], None]


MADE: dict[str, Made] = {}


def made(
    name: str, path: str | None = None
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register a function that writes data below a folder, under a name that pages use.

    path: what is copied for the page, if it isn't the name itself, such as several files.
    """

    def register(build: Callable[[Path], None]) -> Callable[[Path], None]:
        MADE[name] = Made(name, path or name, build)
        return build

    return register


class Data:
    """The made data of a session. root: a folder for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stack = ExitStack()
        self.endpoint: str | None = None
        self._uploaded: set[str] = set()
        self._store: Any = None

    def close(self) -> None:
        """Stop the store."""
        self.stack.close()

    def provide(self, code: str, place: Path) -> None:
        """Copy what a page's code names into a folder, and put what it names in s3://bucket there.

        Data that a command of the page writes (`penstock pack FOLDER NAME`) isn't made.
        """
        written = set(re.findall(r"\bpenstock pack [^\n]*?\s(\S+)\s*(?:$|#|--)", code, re.M))
        written |= set(re.findall(r"""\bpack\([^\n]*,\s*["']([^"']+)["']""", code))
        remote = set(re.findall(rf"s3://{BUCKET}/([^\s\"'`]*)", code))
        local = re.sub(r"\w+://\S+", "", code)
        for entry in MADE.values():
            if entry.name in local and entry.name not in written:
                for source in self.build(entry):
                    _copy(source, place / source.relative_to(self.root))
            if any(key.startswith(entry.name) for key in remote):
                self._upload(entry)

    def build(self, entry: Made) -> list[Path]:
        """Return the files and folders of an entry, built at the first call."""
        found = sorted(self.root.glob(entry.path))
        if not found:
            entry.build(self.root)
            found = sorted(self.root.glob(entry.path))
        return found

    def _upload(self, entry: Made) -> None:
        if self._store is None:
            self._store = self.stack.enter_context(moto())
            self._store.bucket(BUCKET)
            self.endpoint = self._store.url
        if entry.name in self._uploaded:
            return
        self._uploaded.add(entry.name)
        for source in self.build(entry):
            files = [p for p in source.rglob("*") if p.is_file()] if source.is_dir() else [source]
            for file in files:
                self._store.put(BUCKET, str(file.relative_to(self.root)), file.read_bytes())

    def environment(self) -> Mapping[str, str]:
        """Return the variables with which s3:// leads to the store, once it runs."""
        if self.endpoint is None:
            return {}
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "k" * 20,
            "AWS_SECRET_ACCESS_KEY": "s" * 40,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
        }


def _copy(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, destination, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, destination)


# -- images


def picture(number: int, height: int | None = None, width: int | None = None) -> Image.Image:
    """Return a smooth picture with a shape, of its own size."""
    rng = np.random.default_rng(number)
    height, width = height or int(rng.integers(60, 100)), width or int(rng.integers(60, 120))
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 255 / width, y * 255 / height, (x + y) % 256], axis=-1)
    pixels[(x - width / 2) ** 2 + (y - height / 2) ** 2 < 400] = rng.integers(0, 255, 3)
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, codec: str = "JPEG") -> bytes:
    """Return an image as the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, codec)
    return buffer.getvalue()


def _class_folder(root: Path, samples: int, first: int = 0) -> None:
    for number in range(first, first + samples):
        folder = root / CLASSES[number % len(CLASSES)]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:04d}.jpg").write_bytes(encoded(picture(number)))


@made("photos/train")
def _photos_train(root: Path) -> None:
    _class_folder(root / "photos/train", TRAIN)


@made("photos/val")
def _photos_val(root: Path) -> None:
    _class_folder(root / "photos/val", VAL, first=TRAIN)


@made("demo/photographs")
def _photographs(root: Path) -> None:
    _class_folder(root / "demo/photographs/train", TRAIN)
    _class_folder(root / "demo/photographs/eval", VAL, first=TRAIN)


@made("packs/train")
def _packs_train(root: Path) -> None:
    _pack(root, "train", TRAIN, 0)


@made("packs/val")
def _packs_val(root: Path) -> None:
    _pack(root, "val", VAL, TRAIN)


def _pack(root: Path, name: str, samples: int, first: int) -> None:
    from penstock.readers import pack

    _class_folder(root / "unpacked" / name, samples, first)
    pack(str(root / "unpacked" / name), str(root / "packs" / name), seed=3, shard_bytes="64KiB")


# -- annotations


@made("coco")
def _coco(root: Path) -> None:
    for part, samples in (("train2017", 32), ("val2017", 12)):
        name = f"coco/annotations/instances_{part}.json"
        files = pictures(samples, folder=f"coco/{part}/")
        write_folder(root, files | {name: json.dumps(instances(samples)).encode()})


@made("VOCdevkit/VOC2012", "VOCdevkit")
def _voc(root: Path) -> None:
    names = [f"2012_{number:06d}" for number in range(12)]
    things = {name: [{"name": "dog", "box": (3, 2, 20, 15), "difficult": 0}] for name in names}
    voc_set(root / "VOCdevkit/VOC2012", things, train=names[:8], val=names[8:])


@made("coco8/", "coco8")
def _yolo(root: Path) -> None:
    text = "train: images/train\nval: images/val\nnames: [cat, dog]\n"
    for part in ("train", "val"):
        labels = {f"{part}{number}": "1 0.5 0.5 0.4 0.4\n" for number in range(4)}
        yolo_set(root / "coco8", dict(labels), text, images=f"images/{part}")


@made('"pairs"', "pairs")
def _pairs(root: Path) -> None:
    """Write pictures with captions, several lines each."""
    files: dict[str, bytes] = {}
    for number in range(12):
        files[f"pairs/{number:04d}.jpg"] = encoded(picture(number))
        files[f"pairs/{number:04d}.txt"] = f"Picture {number}.\nA picture.".encode()
    write_folder(root, files)


# -- tar files


def _tar(path: Path, files: Mapping[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


@made("street.tar")
def _street(root: Path) -> None:
    """Write pictures with a mask, boxes, a caption and the city."""
    files: dict[str, bytes] = {}
    for number in range(TRAIN):
        mask = np.zeros((80, 100), np.uint8)
        mask[20:60, 30:70] = 1 + number % 3
        key = f"{number:06d}"
        files[f"{key}.jpg"] = encoded(picture(number, 80, 100))
        files[f"{key}.mask.png"] = encoded(Image.fromarray(mask), "PNG")
        boxes = [[30, 20, 40, 40], [5, 5, 20, 10]][: 1 + number % 2]
        facts = {"boxes": boxes, "city": ("Bern", "Porto", "Turku", "Lille")[number // 8 % 4]}
        files[f"{key}.json"] = json.dumps(facts).encode()
        files[f"{key}.txt"] = f"A street with {number % 5} cars.".encode()
    _tar(root / "street.tar", files)


@made("scans.tar")
def _scan_files(root: Path) -> None:
    """Write numbers in a format of its own."""
    files: dict[str, bytes] = {}
    for number in range(12):
        values = np.full((4, 8), number, np.int16)
        files[f"{number:04d}.scan"] = b"SCAN" + values.tobytes()
        files[f"{number:04d}.cls"] = str(number % 2).encode()
    _tar(root / "scans.tar", files)


@made("shards-", "shards-000?.tar")
def _shards(root: Path) -> None:
    """Write four tar files as WebDataset reads them: pictures, classes, captions."""
    for shard in range(4):
        files: dict[str, bytes] = {}
        for number in range(shard * 24, shard * 24 + 24):
            key = f"{number:06d}"
            files[f"{key}.jpg"] = encoded(picture(number))
            files[f"{key}.cls"] = str(number % len(CLASSES)).encode()
            files[f"{key}.txt"] = f"Picture {number} of a {CLASSES[number % 4]}.".encode()
        _tar(root / f"shards-{shard:04d}.tar", files)


# -- tables and tokens


@made("data/", "data")
def _hub(root: Path) -> None:
    """Write pictures and labels in Parquet, as the hub has them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (root / "data").mkdir(exist_ok=True)
    for part in range(2):
        numbers = range(part * 48, part * 48 + 48)
        images = [{"bytes": encoded(picture(n)), "path": f"{n}.jpg"} for n in numbers]
        table = pa.table({"image": images, "label": [n % len(CLASSES) for n in numbers]})
        features = {
            "image": {"_type": "Image"},
            "label": {"names": list(CLASSES), "_type": "ClassLabel"},
        }
        hub = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": hub})
        pq.write_table(table, root / "data" / f"train-{part:05d}-of-00002.parquet")


@made("tokenised", "tokenised*")
def _tokenised(root: Path) -> None:
    """Write lists of token ids of various lengths in Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(1)
    (root / "tokenised").mkdir(exist_ok=True)
    for part in range(2):
        lists = [rng.integers(0, 1000, size).tolist() for size in rng.integers(8, 200, 100)]
        table = pa.table({"tokens": pa.array(lists, pa.list_(pa.int32()))})
        for place in (f"tokenised-{part}.parquet", f"tokenised/part-{part}.parquet"):
            pq.write_table(table, root / place, row_group_size=25)


@made("corpus/", "corpus")
def _corpus(root: Path) -> None:
    """Write two flat files of uint16 tokens."""
    rng = np.random.default_rng(2)
    (root / "corpus").mkdir(exist_ok=True)
    for name in ("a.bin", "b.bin"):
        rng.integers(0, 50_000, 2048 * 80, dtype=np.uint16).tofile(root / "corpus" / name)


@made("megatron/", "megatron")
def _megatron(root: Path) -> None:
    (root / "megatron").mkdir(exist_ok=True)
    write_megatron(root / "megatron" / "corpus", draw_documents(60))


# -- arrays


@made("scans.zarr")
def _scans(root: Path) -> None:
    """Write a group with scans and their masks."""
    import zarr

    group = zarr.open_group(root / "scans.zarr", mode="w")
    shape, chunks = (8, 104, 104, 104), (1, 52, 52, 52)
    ramp = np.arange(104, dtype=np.int16)
    for name, dtype in (("ct", "int16"), ("mask", "uint8")):
        array = group.create_array(name, shape=shape, chunks=chunks, dtype=dtype)
        array[:] = np.broadcast_to(ramp if name == "ct" else ramp > 50, shape).astype(dtype)


@made("era5.zarr")
def _era5(root: Path) -> None:
    """Write one array: time, level, latitude, longitude."""
    import zarr

    shape, chunks = (24, 2, 256, 256), (4, 2, 128, 128)
    array = zarr.create_array(root / "era5.zarr", shape=shape, chunks=chunks, dtype="float32")
    array[:] = np.broadcast_to(np.arange(24, dtype="float32").reshape(-1, 1, 1, 1), shape)


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def on_this_machine(code: str, place: Path) -> str:
    """Return a page's code with the folders and addresses of a cluster replaced by local ones."""
    code = re.sub(
        r"(?<![\w.:/-])/(nvme|mnt|data|scratch)(?=[/\"'\s])", f"{os.fspath(place)}/\\1", code
    )
    return re.sub(r"\b10\.0\.0\.\d+:7077\b", lambda _: f"127.0.0.1:{free_port()}", code)
