"""Test that the files, folders and classes that the documents name exist."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from tests.layers import ROOT, all_sources

if TYPE_CHECKING:
    from pathlib import Path

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES: dict[str, list[Path]] = {}
for _path in all_sources():
    SOURCES.setdefault(_path.name, []).append(_path)
TOPS = (
    *("augment", "benchmarks", "cache", "docs", "examples"),
    *("penstock", "pipeline", "readers", "tests"),
)


def named(document: Path) -> list[str]:
    """Return the names in backticks outside of code blocks."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    return re.findall(r"`([^`\n]+)`", text)


def is_there(name: str) -> bool:
    """Return True if the repository has a file, folder or class of this name, or if it is none of
    them."""
    if re.fullmatch(r"[a-z_][\w/]*\.py", name):
        return (ROOT / name).exists() or ("/" not in name and name in SOURCES) or _ends_a_path(name)
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_is_there(document: Path) -> None:
    assert [name for name in named(document) if not is_there(name)] == []


@pytest.mark.parametrize(
    "name",
    ["cache/gone.py", "gone.py", "pipeline/gone/", "walk.Gone", "plan.walk.Gone", "penstock.Gone"],
)
def test_what_is_gone_is_found(name: str) -> None:
    assert not is_there(name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """Check links within the repository only."""
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, place = target.partition("#")
        found = (document.parent / file).resolve() if file else document
        assert found.exists(), target
        if place and found.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", found.read_text(), re.M)
            anchors = {
                re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings
            }
            assert place in anchors, target


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as code hosts generate it."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


def test_the_page_on_mixtures_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run its snippets in order, and compare what they print with the comments behind `print`."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "mixtures.md").read_text(), re.M | re.S
    ):
        exec(compile(code, "docs/mixtures.md", "exec"), names)
        printed = " ".join(capsys.readouterr().out.split())
        for shown in re.findall(r"^\s*print\(.*\) +# (.*)", code, re.M):
            assert shown in printed
        for shown in re.findall(r"^# (.*)", code, re.M):
            assert shown.replace(",", "") == printed


def test_the_conversations_of_the_page_on_tokens_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "tokens.md").read_text()
    code = re.search(
        r"^```python\n(.*?)^```", text[text.index("\n## Conversations") :], re.M | re.S
    )
    assert code is not None
    names: dict[str, Any] = {}
    exec(compile(code[1], "docs/tokens.md", "exec"), names)
    assert names["packed"].shape[1] == 128
    assert names["packed"].shape == names["loss"].shape == names["position"].shape
    answers = [chr(token - 4) for token in names["packed"][names["loss"]].tolist() if token > 3]
    assert {*answers} <= {*"0123456789."}


def test_parts_of_a_dataset_are_taken_as_the_document_states(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "photos").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "datasets.md").read_text()
    section = text[text.index("\n## Parts of a dataset") :]
    code = re.search(r"^```python\n(.*?)^```", section, re.M | re.S)
    assert code is not None
    names: dict[str, object] = {}
    exec(code[1], names)
    assert "class-" in capsys.readouterr().out
    for said in re.findall(r"`(photos\.split\([^`]*\))`", section):
        parts = eval(said, names)
        assert len(parts) == 2
