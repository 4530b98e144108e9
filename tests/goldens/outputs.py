"""Record what is written and printed: bytes of files, keys of figures and of `--json`, public
names.

One thing is excluded: manifests of local datasets contain their full path, which differs between
runs. Such a manifest is compared without the dataset's folder and without its checksum. Manifests
of relative paths and of a store in memory are compared completely.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

import penstock
from penstock.augment import Operation
from penstock.readers.fieldtypes import FieldType
from tests.goldens.material import (
    PACKS,
    SOURCES,
    TOKENS,
    Case,
    Material,
    digest,
    loader,
    quiet,
    run,
    shape_of,
)

CACHE, WARM = (
    "cache-of-keys",
    "warm memory://golden/wide-pack --max-bytes=64MiB --cache=cache-of-keys",
)
COMMANDS = (
    "pack in/photos pack-of-keys",
    "index in/tars",
    "inspect in/street",
    "inspect photos-pack",
    f"inspect in/tokens {TOKENS}",
    "inspect in/pair --fields=a=left,b=right --batch=2 --out=sheet.png",
    "plan --samples=100000 --sample-bytes=100KB --model=resnet50 --nodes=4",
    "plan photos-pack --samples-per-s=1000 --local",
    f"{WARM} --dry-run",
    WARM,
    "bench in/npz --seconds=0.1 --augment=none --batch-size=8",
    f"doctor {CACHE}",
    f"cache ls {CACHE}",
    f"cache stat {CACHE}",
    f"cache verify {CACHE}",
    f"cache gc {CACHE}",
    f"cache evict {CACHE} --to=10KB",
    f"cache clear {CACHE} --yes",
)
VALUES = {"sample_id": 3, "sample_ids": (3,), "uri": "b", "missing": True, "errno": 5, "rank": 2}


def files(folder: Path) -> dict[str, Any]:
    """Return size and hash of each file below a folder, or the entries of a manifest."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): described(path) for path in found}


def described(path: Path) -> Any:
    data = path.read_bytes()
    if path.name != "manifest.arrow" or os.fsencode(Path.cwd()) not in data:
        return f"{len(data)} {hashlib.sha256(data).hexdigest()}"
    table = pa.ipc.open_file(data).read_all()
    facts = {key.decode(): value for key, value in table.schema.metadata.items()}
    report = json.loads(facts.pop("penstock"))
    report["source"] = str(Path(report["source"]).relative_to(Path.cwd()))
    rows = [list(map(str, row.values())) for row in table.to_pylist()]
    return {"keys": sorted(facts), **report, "columns": table.column_names, "rows": digest(rows)}


def packed(name: str, material: Material) -> dict[str, Any]:
    return files(Path(material.path(name)))


def packed_otherwise(material: Material) -> dict[str, Any]:
    """Record packs of parts, of a store, and in shares of two ranks."""
    table = material.open("table", "image", "points").rename({"points": "ragged"})
    penstock.pack(material.open("folder").subset(range(5, 25)), "made-part", seed=1)
    penstock.pack(table, "made-renamed", shuffle=False)
    penstock.pack(f"{material.remote}/in/tars", "made-store", seed=6, shard_bytes=5000)
    penstock.pack(material.open("zarr-windows"), "made-windows", shuffle=False)
    for rank in (0, 1):
        penstock.pack("in/wide.npy", "made-by-ranks", shard_bytes=400, rank=rank, size=2)
    return {path.name: files(path) for path in Path().glob("made-*")}


def indexed(name: str, material: Material) -> dict[str, Any]:
    """Record the index of a copy that lies alone, and that of the store in memory."""
    place, settings, flags = SOURCES[name]
    alone, out = Path(f"alone-{name}", Path(place).name), Path(f"index-{name}")
    shutil.copytree(place, alone)
    with quiet(), penstock.Dataset(str(alone), **settings) as dataset:
        assert len(dataset) > 0
    (made,) = alone.parent.glob("*.penstock")
    code, _ = run("index", f"{material.remote}/{place}", "--out", out, "--json", *flags.split())
    assert code == 0, "no index of the store"
    return {"folder": made.name, "local": files(made), "store": files(out)}


def cached(material: Material) -> dict[str, Any]:
    """Record names and bytes of blobs that a warm-up leaves in a cache folder."""
    folder = Path("cache-of-files")
    for name, *fields in (("wide-pack",), ("tar",), ("parquet", "vector", "id"), ("npz", "y")):
        with material.open(name, *fields, cache=folder) as dataset:
            penstock.warm(dataset)
    found = {"format": described(folder / "format.json"), "folder": sorted(os.listdir(folder))}
    return found | files(folder / "blobs")


FILES: dict[str, Case] = {"other packs": packed_otherwise, "cache": cached}
FILES |= {f"pack: {name}": partial(packed, name) for name in PACKS}
FILES |= {f"index: {name}": partial(indexed, name) for name in SOURCES if "pack" not in name[-4:]}


def printed(words: str, material: Material) -> Any:
    """Record the shape of what a command prints with `--json`; a live job uses the cache."""
    assert material.remote, "no store"
    with loader(material.open("wide-pack", "id", cache=Path(CACHE))) as job:
        assert len(next(iter(job))) == 1
        code, text = run(*words.split(), "--json")
    assert code in (0, words.startswith("doctor")), f"exit code {code}"
    return shape_of(json.loads(text))


def statistics(name: str, material: Material, **settings: Any) -> Any:
    """Record the figures of images, local or behind a cache."""
    dataset = material.open(name, "image", **settings)
    with loader(dataset, batch_size=6, augment=[penstock.Resize((8, 8))]) as each:
        assert len(list(each)) > 3
        return shape_of(each.statistics())


KEYS: dict[str, Case] = {words: partial(printed, words) for words in COMMANDS}
KEYS["statistics"] = partial(statistics, "folder")
KEYS["statistics of a store"] = partial(statistics, "tar", cache=Path("cache-of-statistics"))


def arguments(kind: Any) -> str:
    """Return a callable's parameters with their kinds and defaults, without their types."""
    signature = inspect.signature(kind)
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(inspect.Signature(bare))


OF_OPERATIONS: set[str] = {"channels", "height_width", "keeps", "lengths", "name", "padding_px"}
OF_OPERATIONS |= {"shape", "takes_rng"}


def exported(value: Any, _: Material) -> Any:
    """Describe a class with its public attributes, a function or a value."""
    if not inspect.isclass(value):
        parts = sorted(each.__name__ for each in getattr(value, "__args__", ()))
        return (
            arguments(value)
            if inspect.isfunction(value)
            else parts or getattr(value, "__name__", repr(value))
        )
    ours = [each for each in value.__mro__ if each.__module__.startswith("penstock.")]
    found: dict[str, Any] = {"arguments": arguments(value)}
    found["bases"] = [each.__name__ for each in value.__mro__ if each not in ours]
    # The interface of types of fields is for their authors, not for users of a type.
    inner = vars(FieldType).keys() - {"kind"} if issubclass(value, FieldType) else frozenset()
    inner -= vars(value).keys() & {"is_ragged", "is_settled"}
    held_by_all = {k: v for each in ours[::-1] for k, v in vars(each).items()}
    if issubclass(value, Operation):  # likewise: of these, users have arguments and a few others
        known = {*inspect.signature(value).parameters, *OF_OPERATIONS}
        inner = held_by_all.keys() - known
    for attribute, held in held_by_all.items():
        if not attribute.startswith("_") and attribute not in inner:
            method = getattr(held, "__func__", held)
            found[f".{attribute}"] = arguments(method) if inspect.isroutine(method) else "value"
    if issubclass(value, Exception):
        known = VALUES.keys() & inspect.signature(value).parameters.keys()
        error = value("a message", **{key: VALUES[key] for key in known})
        found |= {"bases": [each.__name__ for each in value.__mro__], "holds": vars(error)}
    return found


NAMES: dict[str, Case] = {n: partial(exported, getattr(penstock, n)) for n in dir(penstock)}
for _name, _kind in vars(importlib.import_module(penstock.PenstockError.__module__)).items():
    if inspect.isclass(_kind) and issubclass(_kind, Exception):
        NAMES[f"error: {_name}"] = partial(exported, _kind)
