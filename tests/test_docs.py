"""Test that the files, folders and classes that the documents name exist."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from tests.layers import ROOT, all_sources

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
SOURCES: dict[str, list[Path]] = {}
for _path in all_sources():
    SOURCES.setdefault(_path.name, []).append(_path)
TOPS = (
    *("augment", "benchmarks", "cache", "docs", "examples"),
    *("penstock", "pipeline", "readers", "tests"),
)


def shown(document: Path) -> str:
    return str(document.relative_to(ROOT))


def named(document: Path) -> list[str]:
    """Return the names in backticks outside of code blocks."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    return re.findall(r"`([^`\n]+)`", text)


def is_there(name: str) -> bool:
    """Return True if the repository has a file, folder or class of this name, or if it is none of
    them."""
    if re.fullmatch(r"[a-z_][\w/]*\.py", name):
        return (ROOT / name).exists() or ("/" not in name and name in SOURCES) or _ends_a_path(name)
    if re.fullmatch(r"(benchmarks|docs|examples)/[\w/.-]+", name):
        return (ROOT / name).exists()
    if re.fullmatch(r"[a-z_][\w/]*/", name) and name.split("/")[0] in TOPS:
        return (ROOT / name).is_dir()
    if found := re.fullmatch(r"penstock\.([A-Z]\w+)", name):
        return found[1] in dir(penstock)
    if found := re.fullmatch(r"(?!torch\.)(?:[a-z_]+\.)*([a-z_]+)\.([A-Z]\w+)", name):
        module, attribute = found.groups()
        defined = re.compile(rf"^(class {attribute}\b|{attribute}\b.*=)", re.M)
        places = SOURCES.get(f"{module}.py")
        return places is None or any(defined.search(path.read_text()) for path in places)
    return True


def _ends_a_path(name: str) -> bool:
    places = SOURCES.get(name.rpartition("/")[2], [])
    return any(str(path).endswith(f"/{name}") for path in places)


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_what_a_document_names_is_there(document: Path) -> None:
    assert [name for name in named(document) if not is_there(name)] == []


@pytest.mark.parametrize(
    "name",
    ["cache/gone.py", "gone.py", "pipeline/gone/", "walk.Gone", "plan.walk.Gone", "penstock.Gone"],
)
def test_what_is_gone_is_found(name: str) -> None:
    assert not is_there(name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_links_lead_somewhere(document: Path) -> None:
    """Check links within the repository; a page of the site links to nothing outside of docs/."""
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, place = target.partition("#")
        found = (document.parent / file).resolve() if file else document
        assert found.exists(), target
        assert document not in PAGES or found.is_relative_to(ROOT / "docs"), target
        assert not place or found.suffix != ".md" or place in anchors(found), target


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as code hosts and the site generate them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


def test_the_site_lists_every_page_once() -> None:
    def paths(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for inner in (
            entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else ()
        ):
            yield from paths(inner)

    listed = list(paths(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    assert sorted(listed) == [str(page.relative_to(ROOT / "docs")) for page in PAGES]


def test_the_pages_that_messages_and_docstrings_name_are_there() -> None:
    """Check the pages, and their sections, that code, examples and the changelog name."""
    named_page = r"\b(docs/[\w/-]+\.md)(?:#([\w-]+))?"
    places = [*all_sources(), ROOT / "CHANGELOG.md"]
    examples = (path for path in (ROOT / "examples").rglob("*") if path.is_file())
    places += [path for path in examples if path.suffix != ".pyc"]
    for path in places:
        for page, section in re.findall(named_page, path.read_text()):
            assert (ROOT / page).exists(), f"{path}: {page}"
            assert not section or section in anchors(ROOT / page), f"{path}: {page}#{section}"
