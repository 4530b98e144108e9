"""Read from the source what imports what: the layers, packages and modules of this repository."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "penstock"
LAYERS = ("pipeline", "augment", "readers", "cache")
"""From the top down."""

# Packages, and modules that lie directly in a layer, from the top down. One imports those of lower
# lines alone; two on the same line don't import each other. augment is one package.
ORDER = """
pipeline.cli
pipeline.bench pipeline.showing
pipeline.loader
pipeline.torch_data
pipeline.feed
pipeline.members
pipeline.options
pipeline.report
pipeline.plan
pipeline.torch_private
augment
readers.packing
readers.serialized_source
readers.mixture_file
readers.dataset
readers.mixture
readers.mixture_summary
readers.concatenation readers.map_mixture
readers.sources
readers.splits readers.remote_shards readers.mixtures readers.sample_weights readers.pictures
readers.epoch_lists
readers.reading
readers.index
readers.local_place readers.blob_source
readers.formats
readers.loose_files
readers.byte_source
readers.origin readers.fieldtypes
readers.files
readers.blocks
readers.types
cache.peers
cache.blobs
cache.disk
cache.fetch
cache.stores
cache.base
cache.processes
cache.threads cache.executors cache.channel
cache.forks
cache.errors
cache.secrets
"""
_LINE = {entry: line for line, text in enumerate(ORDER.split("\n")) for entry in text.split()}


@functools.cache  # several tests ask for each file
def modules() -> dict[str, Path]:
    """Return every module of the library by its dotted name without `penstock.`.

    The root package itself is `__init__`.
    """
    found = {path.stem: path for path in sorted((ROOT / PACKAGE).glob("*.py"))}
    for layer in LAYERS:
        # By the package: an unpacked sdist has its layers there alone.
        for path in sorted((ROOT / PACKAGE / layer).rglob("*.py")):
            parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    # A repository whose folders moved would otherwise pass every test here.
    assert all(sum(name.startswith(f"{layer}.") for name in found) > 10 for layer in LAYERS)
    return found


def all_sources() -> list[Path]:
    """Return every Python file of the repository."""
    others = (path for top in ("tests", "benchmarks") for path in ROOT.glob(f"{top}/**/*.py"))
    return [*modules().values(), *sorted(others)]


@functools.cache  # parsing takes seconds
def imported_names(path: Path) -> tuple[tuple[str, int], ...]:
    """Return the full dotted names that a file imports, wherever in it, each with its line.

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


@functools.cache
def exports(package: str) -> dict[str, str]:
    """Return what a package's `__init__.pyi` exports: each name with the module that has it.

    package: dotted, without `penstock.`; `""` is the root package.
    """
    stub = ROOT.joinpath(PACKAGE, *filter(None, package.split(".")), "__init__.pyi")
    found = {}
    for node in ast.parse(stub.read_text()).body if stub.exists() else ():
        if not isinstance(node, ast.ImportFrom):
            continue  # __version__
        for alias in node.names:
            assert node.level == 1, f"{stub}: {alias.name}"
            assert alias.asname == alias.name, f"{stub}: {alias.name}"
            found[alias.name] = ".".join(filter(None, [package, node.module or alias.name]))
    return found


@functools.cache
def names_of(module: str) -> frozenset[str]:
    """Return the names that a module defines at its top level, those for type checking included."""
    found = set()
    for node in ast.parse(modules()[module].read_text()).body:
        for statement in node.body if isinstance(node, ast.If) else [node]:
            match statement:
                case ast.ClassDef() | ast.FunctionDef():
                    found.add(statement.name)
                case ast.Assign() | ast.AnnAssign():
                    names = (n for n in ast.walk(statement) if isinstance(n, ast.Name))
                    found |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return frozenset(found)


def resolve(name: str) -> str:
    """Return the module that a dotted name (without `penstock.`) comes from, by way of stubs."""
    package, _, last = name.rpartition(".")
    if last in (exported := exports(package)):
        return exported[last]
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or "__init__"


@functools.cache
def imports() -> dict[str, dict[str, int]]:
    """Return for each module the modules of ours that it imports, each with the line.

    Names are followed to the module that has them: an import through a package is one of that
    module. A package's own `__init__` imports nothing but what it needs itself.
    """
    graph: dict[str, dict[str, int]] = {}
    for module, path in modules().items():
        graph[module] = {}
        for name, line in imported_names(path):
            first, _, rest = name.partition(".")
            if first == PACKAGE and (found := resolve(rest)) != module:
                graph[module].setdefault(found, line)
    return graph


def line_of(module: str) -> tuple[int, str] | None:
    """Return the line of ORDER that a module stands in, and its entry; None for a layer's own
    `__init__`.

    Raises LookupError for a module that has no line.
    """
    parts = module.split(".")
    for entry in (".".join(parts[:2]), parts[0]):
        if entry in _LINE:
            return _LINE[entry], entry
    if module in LAYERS:
        return None
    raise LookupError(f"{module} has no line in tests/layers.py: give it one in ORDER.")


def circles(graph: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Return the sets of modules that import one another in a circle.

    Source: Tarjan, "Depth-first search and linear graph algorithms" (1972).
    """
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
