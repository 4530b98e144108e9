"""Check the direction of imports, the interfaces of packages, and what an import loads."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
import penstock.errors
from penstock.cache import errors as tree
from tests.layers import (
    LAYERS,
    PACKAGE,
    ROOT,
    all_sources,
    circles,
    exports,
    imported_names,
    imports,
    line_of,
    modules,
    names_of,
    resolve,
)
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

MODULES = modules()
ROOT_MODULES = ("__init__", "errors", "testing", "version")
# What augment, which knows columns and tensors, may know of the cache: neither stores nor disks.
AUGMENT_MAY_IMPORT = (
    "cache.errors",
    "cache.forks",
    "cache.processes",
    "cache.threads",
    "cache.base",
)
# Engines know sources alone. These take URLs and paths, as the command line does.
TAKE_URLS = ("pipeline.cli", "pipeline.bench", "pipeline.feed.warm_up")
DATASETS = ("readers.dataset", "readers.index", "readers.reading", "readers.concatenation")
HEAVY = {"torch", "nvidia.dali", "zarr", "s3fs", "obstore", "PIL", "numba"}
CHECKED_RECIPES = "augment.checked_recipes"
# What a job on a local pack of arrays has no use for: heavy packages, and our modules for images,
# other processes, remotes, building indexes, torch datasets, reports and states.
NOT_FOR_ARRAYS = (
    *HEAVY - {"torch"},
    *(f"penstock.{m}" for m in MODULES if m.startswith("augment.") and m != CHECKED_RECIPES),
    "penstock.cache.base.sizes",
    "penstock.cache.channel",
    "penstock.cache.disk",
    "penstock.cache.executors",
    "penstock.cache.fetch",
    "penstock.cache.peers",
    "penstock.cache.stores",
    "penstock.pipeline.cli",
    "penstock.pipeline.feed.image_decoding",
    "penstock.pipeline.feed.prefetch",
    "penstock.pipeline.members.comparison",
    "penstock.pipeline.members.first_process",
    "penstock.pipeline.members.job_membership",
    "penstock.pipeline.members.lane_agreement",
    "penstock.pipeline.plan.order_costs",
    "penstock.pipeline.plan.state",
    "penstock.pipeline.report.diagnosis",
    "penstock.pipeline.report.run_facts",
    "penstock.pipeline.report.statistics",
    "penstock.pipeline.torch_data",
    "penstock.readers.fieldtypes.boxes",
    "penstock.readers.fieldtypes.cells",
    "penstock.readers.fieldtypes.masks",
    "penstock.readers.fieldtypes.verification",
    "penstock.readers.fieldtypes.text_tables",
    "penstock.readers.files.atomic",
    "penstock.readers.blob_source",
    "penstock.readers.formats.dataset_arguments",
    "penstock.readers.index.building",
    "penstock.readers.index.candidate_checks",
    "penstock.readers.index.index_folders",
    "penstock.readers.loose_files",
    "penstock.readers.origin.dataset_place",
    "penstock.readers.origin.file_selection",
    "penstock.readers.origin.left_out",
    "penstock.readers.origin.remote_folder",
    "penstock.readers.origin.unreadable",
    "penstock.readers.packing",
    "penstock.readers.reading.span_reading",
)
MAY_IMPORT_DALI = ("augment", "pipeline.bench.adapters")


FIRST_BATCH = """
import sys
from penstock import DataLoader, Dataset
with Dataset(sys.argv[1], **eval(sys.argv[2])) as data, DataLoader(data, 4, shuffle=True) as loader:
    next(iter(loader))
    print(*sorted(sys.modules))
"""


def inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def why_not(module: str, other: str) -> str:
    """Return why one module of a layer may not import another, "" if it may."""
    if other in ROOT_MODULES:
        allowed = other == "version" or inside(module, ("pipeline.cli", "pipeline.bench"))
        return "" if allowed else "that is the root package"
    here, there = line_of(module), line_of(other)
    if there is None:
        return "that is a whole layer: import a name of it"
    if here is None or here[1] == there[1]:
        return ""
    if there[0] <= here[0]:
        return "that is not below it in ORDER"
    if (
        inside(module, ("augment",))
        and other.startswith("cache.")
        and not inside(other, AUGMENT_MAY_IMPORT)
    ):
        return "augment knows neither stores nor disks"
    if inside(module, ("pipeline",)) and not inside(module, TAKE_URLS) and inside(other, DATASETS):
        return "engines know sources alone"
    return ""


def test_imports_go_down() -> None:
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {other}: {reason}"
        for module, found in imports().items()
        if module not in ROOT_MODULES
        for other, line in found.items()
        if (reason := why_not(module, other))
    ]
    assert wrong == []


def test_other_packages_are_imported_by_their_interface() -> None:
    """A file outside of a package's folder names what the package exports, nothing deeper."""
    wrong = []
    for path in all_sources():
        parts = path.relative_to(ROOT / PACKAGE if path.is_relative_to(ROOT / PACKAGE) else ROOT)
        for name, line in imported_names(path):
            first, _, rest = name.partition(".")
            package = rest
            while package and not (package in MODULES and MODULES[package].name == "__init__.py"):
                package = package.rpartition(".")[0]
            if first != PACKAGE or not package or parts.is_relative_to(package.replace(".", "/")):
                continue
            if rest in MODULES and parts.parts[0] == "tests":
                continue  # a test patches this module
            deeper = rest.removeprefix(package).strip(".").split(".")
            if deeper != [""] and (len(deeper) > 1 or deeper[0] not in exports(package)):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("package", ["", *(p for p in MODULES if exports(p))])
def test_an_interface_names_what_exists(package: str) -> None:
    for name, module in exports(package).items():
        if module != f"{package}.{name}".strip("."):
            assert name in names_of(module), f"{module} has no {name}"
    assert not any(name.startswith("_") and name != "__version__" for name in exports(package))


def test_nothing_imports_in_a_circle() -> None:
    assert circles(imports()) == []


def test_a_circle_is_found() -> None:
    graph = {"a": {"b": 1}, "b": {"c": 1}, "c": {"b": 2}, "d": {"a": 1}}
    assert circles(graph) == [["b", "c"]]


def test_an_import_through_a_package_is_one_of_the_module() -> None:
    assert resolve("cache.disk.DiskCache") == exports("cache.disk")["DiskCache"]
    assert resolve("cache.errors.PenstockError") == "cache.errors"
    assert resolve("DataLoader") == "pipeline.loader"


def test_dali_is_imported_in_augment_alone() -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for module, path in MODULES.items()
        if not inside(module, MAY_IMPORT_DALI)
        for name, line in imported_names(path)
        if name.startswith("nvidia")
    ]
    assert wrong == []


def test_all_imports_say_penstock() -> None:
    """A bare `cache` or `pipeline` may belong to another project."""
    for path in all_sources():
        for name, line in imported_names(path):
            assert name.split(".")[0] not in LAYERS, f"{path}:{line} imports {name}"


def test_threads_start_in_one_module() -> None:
    for module, path in MODULES.items():
        if module != "cache.threads":
            assert "ThreadPoolExecutor" not in path.read_text(), path
            assert "Thread(" not in path.read_text(), path


def test_the_environment_is_read_in_world_and_the_command_line_only() -> None:
    for module, path in MODULES.items():
        text = path.read_text()
        if module == "cache.base.folders":
            # Where the user's cache directory lies; a Dataset needs it without a command line.
            assert re.findall(r"os\.environ\b.*", text) == ['os.environ.get("XDG_CACHE_HOME", "")']
        elif module != "pipeline.plan.world" and not module.startswith("pipeline.cli."):
            assert not re.search(r"os\.environ|getenv|import environ", text), path


@pytest.mark.parametrize("package", ["penstock", *(f"penstock.{layer}" for layer in LAYERS)])
def test_import_is_light(package: str) -> None:
    code = (
        f"import {package}, sys\n"
        f"heavy = {HEAVY}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        f"bare = {set(LAYERS)} & {{module.split('.')[0] for module in sys.modules}}\n"
        "assert not bare, bare"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_the_first_batch_imports_what_it_needs(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((32, 8), np.float32))
    penstock.pack(tmp_path / "rows.npy", tmp_path / "arrays")
    np.arange(2**10, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    tokens = {"format": "tokens", "dtype": "uint16", "sample": (8,)}
    for name, options, without in (
        ("arrays", {}, NOT_FOR_ARRAYS),
        ("tokens.bin", tokens, ("nvidia", "zarr", "penstock.augment.graph")),
    ):
        command = [sys.executable, "-c", FIRST_BATCH, str(tmp_path / name), repr(options)]
        done = subprocess.run(
            command, check=True, timeout=PATIENCE_S, stdout=subprocess.PIPE, text=True
        )
        loaded = done.stdout.split()
        assert [module for module in loaded if inside(module, without)] == [], name


@pytest.mark.parametrize("package", ["penstock", *(f"penstock.{layer}" for layer in LAYERS)])
def test_all_is_sorted_and_resolves(package: str) -> None:
    module = importlib.import_module(package)
    if names := getattr(module, "__all__", None):
        assert names == sorted(names)
        assert all(getattr(module, name) is not None for name in names)
        assert set(names) <= set(dir(module))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def test_the_public_errors_are_the_tree() -> None:
    kinds = (penstock.errors.PenstockError, penstock.errors.PenstockWarning)
    defined = {n for n, v in vars(tree).items() if isinstance(v, type) and issubclass(v, kinds)}
    assert set(penstock.errors.__all__) == defined
    for name in defined:
        assert name in (tree.__doc__ or "") or name == "PenstockWarning", f"{name} isn't drawn"
