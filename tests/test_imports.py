"""Imports go down, never up; `import pipeline` is light; the public surface is what it says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.watchdog import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
OURS = ("pipeline", "augment", "readers", "cache")
# (package, or one module of it) -> what it may import of ours.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "cache": ("cache",),
    "readers": ("readers", "cache"),
    "augment": (
        "augment",
        "readers",
        "penstock.cache.errors",
        "penstock.cache.forks",
        "penstock.cache.base.hashing",
        "penstock.cache.base.limits",
    ),
    "pipeline": ("pipeline", "augment", "readers", "cache"),
}
MAY_IMPORT_DALI = {
    "augment/graph.py",
    "augment/nodes.py",
    "augment/pixel_nodes.py",
    "augment/policy_nodes.py",
    "augment/region_child.py",
    "augment/resample_node.py",
    "augment/verify.py",
    "pipeline/bench/peers/dali.py",
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module))
    return names


def modules() -> list[Path]:
    return sorted(p for package in OURS for p in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    relative = path.relative_to(ROOT)
    allowed = MAY_IMPORT[relative.parts[0]]
    for name in imported(path):
        if name.split(".")[0] in OURS:
            assert any(name == a or name.startswith(a + ".") for a in allowed), (
                f"{relative} imports {name}"
            )
        if name.startswith("nvidia"):
            assert str(relative) in MAY_IMPORT_DALI, f"{relative} imports {name}"


@pytest.mark.parametrize("package", OURS)
def test_there_is_something_to_look_at(package: str) -> None:
    """Else a house that has moved would pass all of these."""
    assert len([path for path in modules() if path.relative_to(ROOT).parts[0] == package]) > 5


def test_threads_start_in_one_module() -> None:
    for path in modules():
        if path.relative_to(ROOT).parts != ("cache", "threads.py"):
            assert "ThreadPoolExecutor" not in path.read_text(), path
            assert "Thread(" not in path.read_text(), path


def test_the_environment_is_read_in_world_and_the_command_line_only() -> None:
    for path in modules():
        relative = path.relative_to(ROOT)
        text = path.read_text()
        if str(relative) == "readers/index/home.py":
            # Where the user's cache directory lies; a Dataset needs it without a command line.
            assert re.findall(r"os\.environ\b.*", text) == ['os.environ.get("XDG_CACHE_HOME", "")']
        elif str(relative) != "pipeline/plan/world.py" and relative.parts[:2] != (
            "pipeline",
            "cli",
        ):
            assert not re.search(r"os\.environ|getenv|import environ", text), relative


@pytest.mark.parametrize("package", OURS)
def test_import_is_light(package: str) -> None:
    code = (
        f"import {package}, sys\n"
        "heavy = {'torch', 'nvidia.dali', 'zarr', 's3fs', 'obstore', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("package", OURS)
def test_all_is_sorted_and_resolves(package: str) -> None:
    module = __import__(package)
    if names := getattr(module, "__all__", None):
        assert names == sorted(names, key=lambda name: (not name.isupper(), name))
        assert all(getattr(module, name) is not None for name in names)


@pytest.mark.parametrize(
    ("first", "hidden"),
    [
        ("pipeline", "cache"),
        ("pipeline", "readers"),
        ("pipeline", "augment"),
        ("augment", "cache"),
        ("augment", "readers"),
        ("readers", "cache"),
    ],
)
def test_a_users_own_module_that_hides_ours_is_named(
    tmp_path: Path, first: str, hidden: str
) -> None:
    (tmp_path / f"{hidden}.py").write_text("x = 1\n")
    (tmp_path / "train.py").write_text(f"import {first}\n")
    run = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError:")
    assert str(tmp_path / f"{hidden}.py") in last
    assert "Rename" in last
