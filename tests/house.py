"""What imports what in this repository, read from the source: modules, rooms, floors."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "penstock"
FLOORS = ("pipeline", "augment", "readers", "cache")
"""From the top down."""

# Each floor's storeys from the top down. On one storey rooms lie side by side and don't import one
# another. A room is a set of names, each a folder or a module of the floor.
STOREYS: Mapping[str, tuple[tuple[frozenset[str], ...], ...]] = {
    "pipeline": (
        (frozenset({"cli"}),),
        (frozenset({"bench"}),),
        (frozenset({"loader"}),),
        # What a loader shows to trainers; beside the engines it would be a room beside them.
        (frozenset({"facade"}),),
        (frozenset({"foreign"}), frozenset({"feed"})),
        (frozenset({"options"}),),
        (frozenset({"report"}),),
        (frozenset({"plan"}),),
        (frozenset({"torch_private"}),),
    ),
    # One package, by stage; what decodes and verifies stands below.
    "augment": (
        (frozenset({"graph", "rescue", "batches", "dali_pipeline", "devices", "whole"}),),
        (
            frozenset(
                {
                    "nodes",
                    "operation_nodes",
                    "pixel_nodes",
                    "policy_nodes",
                    "resample_node",
                    "resample_kernels",
                }
            ),
            frozenset({"region", "region_child"}),
        ),
        (
            frozenset(
                {
                    "draws",
                    "array_draws",
                    "crops",
                    "keyed",
                    "pixel_draws",
                    "policies",
                    "mixing",
                    "moves",
                    "followers",
                }
            ),
        ),
        (
            frozenset(
                {
                    "presets",
                    "array_crop",
                    "field_recipes",
                    "recipe",
                    "geometry",
                    "pixels",
                    "map",
                    "pad",
                    "unpack",
                    "geometric_ops",
                    "sanitize",
                    "ops",
                    "checks",
                }
            ),
        ),
        (
            frozenset(
                {"verify", "headers", "dali", "quiet", "culprits", "second_look", "value_ranges"}
            ),
        ),
    ),
    "readers": (
        (frozenset({"packing"}),),
        (frozenset({"dataset", "luggage"}),),
        # What the loader reads, whatever it is made of.
        (
            frozenset(
                {
                    "concatenation",
                    "contents",
                    "open_source",
                    "remote_shards",
                    "source",
                    "splits",
                    "whole_columns",
                }
            ),
        ),
        (frozenset({"reading"}),),
        (frozenset({"index"}),),
        (frozenset({"formats"}),),
        (frozenset({"origin"}), frozenset({"fields"})),
        (frozenset({"files"}),),
        (frozenset({"blocks"}),),
        (frozenset({"types"}),),
    ),
    "cache": (
        (frozenset({"peers"}),),
        (frozenset({"blobs"}),),
        (frozenset({"disk"}),),
        (frozenset({"fetch"}),),
        (frozenset({"stores"}),),
        (frozenset({"base"}),),
        (
            frozenset(
                {
                    "processes",
                    "threads",
                    "outcomes",
                    "forks",
                    "job_store",
                    "executors",
                    "ray_executor",
                }
            ),
        ),
        (frozenset({"errors", "secrets"}),),
    ),
}


@functools.cache  # a walk of 700 files; some tests ask once a file
def modules() -> dict[str, Path]:
    """Every module of the library by its dotted name without `penstock.`; the root package itself
    is `__init__`."""
    found = {path.stem: path for path in sorted((ROOT / PACKAGE).glob("*.py"))}
    for floor in FLOORS:
        # By the package: an unpacked sdist has its floors there alone.
        for path in sorted((ROOT / PACKAGE / floor).rglob("*.py")):
            parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def all_sources() -> list[Path]:
    """Every Python file of the repository."""
    others = (path for top in ("tests", "benchmarks") for path in ROOT.glob(f"{top}/**/*.py"))
    return [*modules().values(), *sorted(others)]


@functools.cache  # parsing 700 files takes seconds, and four tests ask for all of them
def imported_names(path: Path) -> tuple[tuple[str, int], ...]:
    """Name what a file imports, wherever in it, for types too: full dotted names, and the line.

    `from a import b` gives `a.b`, which may be a module or a name of `a`.
    """
    return tuple(_imported_names(path))


def _imported_names(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def imports() -> dict[str, dict[str, int]]:
    """Module -> the modules of ours that it imports, each with the line."""
    known = modules()
    graph: dict[str, dict[str, int]] = {}
    for module, path in known.items():
        graph[module] = {}
        for name, line in imported_names(path):
            if name.split(".")[0] != PACKAGE:
                continue
            parts = name.split(".")[1:]
            while parts and ".".join(parts) not in known:
                parts.pop()
            found = ".".join(parts) or "__init__"
            if found != module:
                graph[module].setdefault(found, line)
    return graph


def room(module: str) -> tuple[int, frozenset[str]] | None:
    """The storey of a module, 0 the lowest, and its room; None for a floor's own `__init__`."""
    floor, *parts = module.split(".")
    if not parts:
        return None
    for storey, rooms in enumerate(reversed(STOREYS[floor])):
        for names in rooms:
            if parts[0] in names:
                return storey, names
    raise LookupError(f"{module} lies in no room of {floor}: give it one in tests/house.py.")


def circles(graph: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Sets of modules that import one another in a circle, by Tarjan's algorithm (1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in graph[module]:
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            circle = [stack.pop()]
            while circle[-1] != module:
                circle.append(stack.pop())
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in graph:
        if module not in order:
            visit(module)
    return found
