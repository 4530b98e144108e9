"""`make figures`: the size and the shape of the code, so that a trend is visible.

Nothing fails by these figures. They show where to look, never what to do: a module with a single
user may be pure and long enough to stand alone, and a duplicate name may belong to two languages.

Code lines are lines that hold a token other than a comment or a docstring. Imports are the lines of
import statements, those for type checking and those of a package's `__init__.pyi` included. A
module's users are the modules of the library that import it, also by way of its package. A type
test is an `isinstance` that asks for a class of field or of operation in another module than the
one that defines the class.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "penstock"
LAYERS = ("pipeline", "augment", "readers", "cache")
KINDS = ("FieldType", "Operation")
"""Unions, or base classes, whose members nobody but their own module should ask for."""
_SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One file: its dotted name, its code lines, and what it defines, imports and asks for.

    users: filled for the library's modules alone.
    """

    name: str
    code_lines: int
    import_lines: int
    classes: Mapping[str, tuple[str, ...]]
    unions: Mapping[str, tuple[str, ...]]
    imported: frozenset[str]
    type_tests: tuple[str, ...]
    users: set[str] = field(default_factory=set)


def module(path: Path, name: str) -> Module:
    """Read one file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    docstrings = [n for n in nodes if isinstance(n, ast.Expr) and _is_text(n.value)]
    statements = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    code = _code_lines(text) - _lines(docstrings)
    return Module(
        name=name,
        code_lines=len(code),
        import_lines=len(code & _lines(statements)),
        classes={
            node.name: tuple(map(_last_name, node.bases))
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        },
        unions={
            _last_name(node.targets[0]): tuple(_names(node.value))
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp | ast.Tuple)
        },
        imported=frozenset(_imported(statements)),
        type_tests=tuple(_type_tests(nodes)),
    )


def library(root: Path = ROOT) -> dict[str, Module]:
    """Read the modules that an installation holds: by dotted name, each with its users."""
    folder = root / PACKAGE
    # A layer is a link in the package, which rglob doesn't follow.
    paths = [*folder.glob("*.py"), *(p for name in LAYERS for p in (folder / name).rglob("*.py"))]
    found = {name: module(path, name) for path in sorted(paths) for name in [_name(path, root)]}
    exported: dict[str, str] = {}
    for path in paths:
        stub = path.with_suffix(".pyi")
        if path.name == "__init__.py" and stub.exists():
            package = _name(path, root)
            exported |= exports(stub, package)
            lines = len(_code_lines(stub.read_text(encoding="utf-8")))
            one = found[package]
            found[package] = replace(
                one, code_lines=one.code_lines + lines, import_lines=one.import_lines + lines
            )
    for user in found.values():
        for name in user.imported:
            parts = exported.get(name, name).split(".")
            while parts and ".".join(parts) not in found:
                parts.pop()
            if parts and ".".join(parts) != user.name:
                found[".".join(parts)].users.add(user.name)
    return found


def exports(stub: Path, package: str) -> dict[str, str]:
    """Return the module of each name that a package's `__init__.pyi` exports, both dotted."""
    return {
        f"{package}.{alias.name}": f"{package}.{node.module or alias.name}"
        for node in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def figures(found: Mapping[str, Module]) -> dict[str, object]:
    """Compute the figures of a library, as `--json` prints them."""
    modules = {name: one for name, one in found.items() if not _is_package(name, found)}
    lines = sum(one.code_lines for one in found.values())
    return {
        "code_lines": lines,
        "code_lines_by_layer": {
            layer: sum(
                one.code_lines
                for name, one in found.items()
                if name.startswith(f"{PACKAGE}.{layer}.") or name == f"{PACKAGE}.{layer}"
            )
            for layer in LAYERS
        },
        "files": len(found),
        "import_share": sum(one.import_lines for one in found.values()) / lines,
        "single_user": {
            name: next(iter(one.users)) for name, one in modules.items() if len(one.users) == 1
        },
        "duplicate_classes": _duplicates(
            (cls, name) for name, one in found.items() for cls in one.classes
        ),
        "duplicate_files": _duplicates((name.rsplit(".", 1)[-1], name) for name in modules),
        "type_tests": type_tests(found),
    }


def type_tests(found: Mapping[str, Module]) -> dict[str, int]:
    """Count the type tests by the module that makes them."""
    homes: dict[str, set[str]] = defaultdict(set)
    members: dict[str, set[str]] = defaultdict(set)
    for name, one in found.items():
        for cls, parents in one.classes.items():
            homes[cls].add(name)
            for parent in parents:
                members[parent].add(cls)
        for union, names in one.unions.items():
            members[union].update(names)
    kinds: set[str] = set()
    left = list(KINDS)
    while left:
        if (kind := left.pop()) not in kinds:
            kinds.add(kind)
            left += members[kind]
    counts = {
        name: sum(cls in kinds and name not in homes[cls] for cls in one.type_tests)
        for name, one in found.items()
    }
    return dict(sorted(((n, c) for n, c in counts.items() if c), key=lambda item: -item[1]))


def code_lines(folder: Path) -> tuple[int, int]:
    """Count the files and the code lines of a folder outside the library, such as "tests"."""
    found = [module(path, path.stem) for path in sorted(folder.rglob("*.py"))]
    return len(found), sum(one.code_lines for one in found)


def text(
    measured: Mapping[str, object], *, lists: bool = False, root: Path = ROOT
) -> Iterator[str]:
    """Format the figures as lines. lists: name each module and class, too."""
    yield f"{measured['code_lines']:,} code lines in {measured['files']:,} files of the library"
    by_layer = measured["code_lines_by_layer"]
    assert isinstance(by_layer, dict)
    yield "  " + ", ".join(f"{layer} {lines:,}" for layer, lines in by_layer.items())
    yield f"{measured['import_share']:.1%} of them are imports"
    for folder in ("tests", "benchmarks"):
        files, lines = code_lines(root / folder)
        yield f"{lines:,} code lines in {files:,} files of {folder}/"
    titles = {
        "single_user": "modules have a single user",
        "duplicate_classes": "class names stand in several modules",
        "duplicate_files": "file names stand in several folders",
    }
    for key, title in titles.items():
        items = measured[key]
        assert isinstance(items, dict)
        yield f"{len(items):,} {title}"
        if lists:
            yield from (f"    {name}: {_list(where)}" for name, where in items.items())
    tests = measured["type_tests"]
    assert isinstance(tests, dict)
    yield f"{sum(tests.values()):,} type tests for a field or an operation outside its module"
    if lists:
        yield from (f"    {name}: {count}" for name, count in tests.items())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make figures", description=__doc__)
    parser.add_argument("--lists", action="store_true", help="name each module and class")
    parser.add_argument("--json", action="store_true", help="print one object with all of it")
    options = parser.parse_args(arguments)
    measured = figures(library())
    out = (
        json.dumps(measured, indent=1)
        if options.json
        else "\n".join(text(measured, lists=options.lists))
    )
    sys.stdout.write(out + "\n")


def _code_lines(text: str) -> set[int]:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def _lines(nodes: Iterable[ast.stmt]) -> set[int]:
    return {line for n in nodes for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)}


def _imported(statements: Iterable[ast.stmt]) -> Iterator[str]:
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _type_tests(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if not (isinstance(node, ast.Call) and _last_name(node.func) == "isinstance"):
            continue
        for kind in node.args[1:]:
            yield from _names(kind)


def _names(node: ast.expr) -> Iterator[str]:
    """Return the names in a union, a tuple or a single class."""
    yield from filter(None, map(_last_name, ast.walk(node)))


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_package(name: str, found: Mapping[str, Module]) -> bool:
    return any(other.startswith(f"{name}.") for other in found)


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _duplicates(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    where: dict[str, list[str]] = defaultdict(list)
    for name, module_name in pairs:
        where[name].append(module_name)
    counts = Counter({name: len(all_) for name, all_ in where.items() if len(all_) > 1})
    return {name: where[name] for name, _ in counts.most_common()}


def _list(where: object) -> str:
    return ", ".join(where) if isinstance(where, list) else str(where)


if __name__ == "__main__":
    main()
