"""The figures of a library of eight files, where each is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figures import figures, library, text

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    "__init__.py": '"""The root."""\n\nVERSION = 1  # not a docstring\n',
    "cache/__init__.py": "",
    "cache/kinds.py": '"""Kinds."""\n\n\nclass Image:\n    """A picture."""\n\n    size = 1\n\n\n'
    "class Sound:\n    size = (\n        2\n    )\n\n\nFieldType = Image | Sound\n",
    "cache/user.py": "from penstock.cache.kinds import FieldType, Image\n\n\n"
    "def kind(one: FieldType) -> bool:\n    return isinstance(one, (Image, dict))\n",
    "augment/__init__.py": "",
    "augment/__init__.pyi": "from .ops import Flip as Flip\n",
    "augment/ops.py": "class Flip:\n    pass\n",
    "pipeline/flips.py": "from penstock.augment import Flip\n",
    "readers/user.py": "import penstock.cache.user\n\n\nclass Sound:\n    pass\n",
}


def test_the_figures_of_a_small_library(tmp_path: Path) -> None:
    for name, content in FILES.items():
        path = tmp_path / "penstock" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    found = figures(library(tmp_path))
    assert found == {
        "code_lines": 1 + 7 + 3 + 3 + 4,
        "code_lines_by_layer": {"pipeline": 1, "augment": 3, "readers": 3, "cache": 10},
        "files": 8,
        "import_share": 4 / 18,
        "single_user": {
            "penstock.augment.ops": "penstock.pipeline.flips",
            "penstock.cache.kinds": "penstock.cache.user",
            "penstock.cache.user": "penstock.readers.user",
        },
        "duplicate_classes": {"Sound": ["penstock.cache.kinds", "penstock.readers.user"]},
        "duplicate_files": {"user": ["penstock.cache.user", "penstock.readers.user"]},
        "type_tests": {"penstock.cache.user": 1},
    }
    lines = list(text(found, lists=True, root=tmp_path))
    assert "18 code lines in 8 files of the library" in lines
    assert "    penstock.cache.kinds: penstock.cache.user" in lines
