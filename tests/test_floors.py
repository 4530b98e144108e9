"""Floors and rooms: imports go down, never up or round; `import penstock` is light."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

import penstock
import penstock.errors
from penstock.cache import errors as tree
from tests.house import FLOORS, ROOT, all_sources, circles, imported_names, imports, modules, room
from tests.watchdog import PATIENCE_S

# What augment, which knows columns and tensors, may know of the cache.
AUGMENT_MAY_IMPORT = (
    "cache.errors",
    "cache.forks",
    "cache.base.hashing",
    "cache.base.limits",
    "cache.threads",
    "cache.base.machine",
)
MAY_IMPORT_DALI = {
    "augment.dali",
    "augment.headers",
    "augment.nodes",
    "augment.pixel_nodes",
    "augment.policy_nodes",
    "augment.region_child",
    "augment.resample_node",
    "augment.value_ranges",
    "augment.verify",
    "pipeline.bench.adapters.dali",
}
USES_PUBLIC_NAMES = ("pipeline.cli", "pipeline.bench")
MODULES = modules()
IMPORTS = imports()


@pytest.mark.parametrize("floor", FLOORS)
def test_there_is_something_to_look_at(floor: str) -> None:
    """Else a house that has moved would pass all of these."""
    assert len([module for module in MODULES if module.startswith(f"{floor}.")]) > 10
    assert len([module for module in IMPORTS if IMPORTS[module]]) > 100


def test_imports_go_down() -> None:
    wrong = []
    for module, found in IMPORTS.items():
        floor = module.split(".")[0]
        if floor not in FLOORS:
            continue  # the root package has all names
        place = room(module)
        for other, line in found.items():
            other_floor = other.split(".")[0]
            if other_floor not in FLOORS:
                if other != "version" and not module.startswith(USES_PUBLIC_NAMES):
                    where = MODULES[module].relative_to(ROOT)
                    wrong.append(f"{where}:{line} imports the root package")
                continue
            other_place = room(other)
            reason = ""
            if other_floor != floor:
                if FLOORS.index(other_floor) <= FLOORS.index(floor):
                    reason = "that is a floor up"
                elif (floor, other_floor) == ("augment", "cache"):
                    reason = "" if other in AUGMENT_MAY_IMPORT else "augment may not import it"
            elif place is not None:
                if other_place is None:
                    reason = "name the module, not its floor"
                elif other_place[0] > place[0]:
                    reason = "that is a room up"
                elif other_place[0] == place[0] and other_place[1] != place[1]:
                    reason = "that is a room beside it"
            if reason:
                wrong.append(
                    f"{MODULES[module].relative_to(ROOT)}:{line} imports {other}: {reason}"
                )
    assert wrong == []


def test_loaders_read_sources_and_ask_for_no_dataset() -> None:
    """The plan and the engines know only sources: neither datasets nor selections of them."""
    takes_urls = ("pipeline.feed.warm", "pipeline.feed.warm_crew")  # as the command line does
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {other}"
        for module, found in IMPORTS.items()
        if module.startswith("pipeline.")
        and module.split(".")[1] not in ("cli", "bench")
        and module not in takes_urls
        for other, line in found.items()
        if re.match(r"readers(\.(dataset|index|reading|concatenation)\b|$)", other)
    ]
    assert wrong == []


def test_nothing_imports_in_a_circle() -> None:
    assert circles(IMPORTS) == []


def test_a_circle_is_found() -> None:
    graph = {"a": {"b": 1}, "b": {"c": 1}, "c": {"b": 2}, "d": {"a": 1}}
    assert circles(graph) == [["b", "c"]]


def test_dali_is_imported_where_graphs_are_made() -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for module, path in MODULES.items()
        if module not in MAY_IMPORT_DALI
        for name, line in imported_names(path)
        if name.startswith("nvidia")
    ]
    assert wrong == []


def test_all_imports_say_penstock() -> None:
    """A bare `cache` or `pipeline` may be anybody's."""
    for path in all_sources():
        for name, line in imported_names(path):
            assert name.split(".")[0] not in FLOORS, f"{path}:{line} imports {name}"


def test_threads_start_in_one_module() -> None:
    for module, path in MODULES.items():
        if module != "cache.threads":
            assert "ThreadPoolExecutor" not in path.read_text(), path
            assert "Thread(" not in path.read_text(), path


def test_the_environment_is_read_in_world_and_the_command_line_only() -> None:
    for module, path in MODULES.items():
        text = path.read_text()
        if module == "cache.base.home":
            # Where the user's cache directory lies; a Dataset needs it without a command line.
            assert re.findall(r"os\.environ\b.*", text) == ['os.environ.get("XDG_CACHE_HOME", "")']
        elif module == "augment.quiet":
            # The levels that libraries read while they are loaded stand there for that moment.
            assert "os.environ" not in text
        elif module != "pipeline.plan.world" and not module.startswith("pipeline.cli."):
            assert not re.search(r"os\.environ|getenv|import environ", text), path


@pytest.mark.parametrize("package", ["penstock", *(f"penstock.{floor}" for floor in FLOORS)])
def test_import_is_light(package: str) -> None:
    code = (
        f"import {package}, sys\n"
        "heavy = {'torch', 'nvidia.dali', 'zarr', 's3fs', 'obstore', 'PIL', 'numba'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        f"bare = {set(FLOORS)} & {{module.split('.')[0] for module in sys.modules}}\n"
        "assert not bare, bare"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("package", ["penstock", *(f"penstock.{floor}" for floor in FLOORS)])
def test_all_is_sorted_and_resolves(package: str) -> None:
    module = importlib.import_module(package)
    if names := getattr(module, "__all__", None):
        assert names == sorted(names, key=lambda name: (not name.isupper(), name))
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
