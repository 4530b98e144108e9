"""Each example of docs/howto/datasets.md on folders works on the files that it shows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from penstock.readers import Dataset, fieldtypes
from tests import images
from tests.layers import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SECTION = "## Folders: how files make up samples"
EXAMPLE = re.compile(r"^### (.+?)$\s+```text\n(.*?)```\s+```python\n(.*?)```", re.M | re.S)


def examples() -> list[tuple[str, str, str]]:
    """Return the heading, files and code of each example."""
    text = (ROOT / "docs" / "howto" / "datasets.md").read_text()
    section = text[text.index(SECTION) :].split("\n## ")[0]
    return [(found[1], found[2], found[3]) for found in EXAMPLE.finditer(section)]


def write(root: Path, shown: str) -> None:
    """Return the files of a listing; indented lines are the content of the file above."""
    files: dict[str, bytes] = {}
    name = ""
    for line in shown.splitlines():
        if line.startswith("    "):
            files[name] += line[4:].encode() + b"\n"
        else:
            name, content = line, b""
            if line.endswith(".jpg"):
                content = images.jpeg(len(files) % 2, 16, 20)
            elif line.endswith(".png"):
                content = images.encoded(images.picture(3, 16, 20, "L"), "PNG")
            files[name] = content
    images.write_folder(root, files)


def test_there_are_examples_of_each_layout() -> None:
    assert len(examples()) >= 5


@pytest.mark.parametrize(("heading", "files", "code"), examples(), ids=[e[0] for e in examples()])
def test_an_example_works_as_documented(
    heading: str, files: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, files)
    monkeypatch.chdir(tmp_path)

    def opened(url: str, **arguments: object) -> Dataset:
        dataset = Dataset(url, **arguments)  # type: ignore[arg-type]
        dataset.open(verify=images.verify)
        return dataset

    names = {name: getattr(fieldtypes, name) for name in dir(fieldtypes)}
    names["Dataset"] = opened
    exec(compile(code, heading, "exec"), names)
    names["train"].close()
