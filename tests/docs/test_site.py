"""The site builds without a warning, has no dead link, and loads nothing from other hosts."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest

from tests.layers import ROOT

if TYPE_CHECKING:
    from pathlib import Path

LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("link", "href")}
DESCRIBES = {"canonical", "prev", "next", "alternate"}
"""Kinds of <link> that a browser doesn't load."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site from a copy of the pages, so that nothing is written to the repository."""
    place = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", place / "docs")
    text = (ROOT / "zensical.toml").read_text()
    for old, new in (
        ('paths = ["."]', f'paths = ["{ROOT}"]'),
        ('"benchmarks/site_docstrings.py"', f'"{ROOT / "benchmarks/site_docstrings.py"}"'),
    ):
        assert old in text
        text = text.replace(old, new)
    (place / "zensical.toml").write_text(text)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return place / "site"


class Page(HTMLParser):
    """The anchors of a page, its links, and what a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = set[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values.get("id", ""), values.get("name", "")}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if values.get("rel", "") not in DESCRIBES:
            self.loaded += [value for name, value in values.items() if (tag, name) in LOADS]


@functools.cache
def read(path: Path) -> Page:
    return Page(path.read_text())


def is_elsewhere(url: str) -> bool:
    return url.startswith(("http:", "https:", "//", "mailto:"))


def test_no_page_loads_from_other_hosts(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert [url for url in read(path).loaded if is_elsewhere(url)] == [], path


def test_no_link_is_dead(site: Path) -> None:
    dead = list[str]()
    for path in site.rglob("*.html"):
        if path.name == "404.html":
            continue  # its links begin at the address of the site
        for link in read(path).links:
            file, _, place = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            if target.is_dir():
                target /= "index.html"
            if is_elsewhere(link) or link.startswith("javascript:"):
                continue
            if not target.exists() or (
                place and target.suffix == ".html" and place not in read(target).anchors
            ):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


def test_pages_are_found_by_search(site: Path) -> None:
    index = (site / "search.js").read_text()
    for path in (ROOT / "docs").rglob("*.md"):
        assert f'"{path.relative_to(ROOT / "docs").with_suffix(".html")}' in index
