"""Test wheels: they install `penstock` alone, and work next to modules of other projects."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.layers import LAYERS, ROOT, modules
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

BUILD = [sys.executable, "-m", "hatchling", "build"]

JOB = """
import sys

import augment
import cache.utils
import pipeline
import readers

from penstock import DataLoader, Dataset, imagenet_train, pack


class Squares:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index * index


if __name__ == "__main__":
    photographs, packed = sys.argv[1:]
    pack(photographs, packed, seed=3)
    with DataLoader(Dataset(packed), batch_size=16, augment=imagenet_train(32)) as loader:
        samples = sum(len(labels) for _, labels in loader)
    batches = DataLoader(Squares(), batch_size=4, num_workers=1)
    squares = [int(square) for batch in batches for square in batch]
    print(samples, squares == [index * index for index in range(12)])
    print(augment.NAME, cache.utils.NAME, pipeline.NAME, readers.NAME, sep=", ")
    bare = {"augment", "cache", "pipeline", "readers"}
    print(*sorted(module for module in sys.modules if module.split(".")[0] in bare))
"""


def run(*command: str | Path, cwd: Path) -> str:
    # Without PYTHONPATH, by which a checkout would stand before what is installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(*BUILD, "-t", "sdist", "-d", folder, cwd=ROOT)
    (found,) = folder.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel that is built from the sdist, as package managers build it."""
    folder = tmp_path_factory.mktemp("wheel")
    run(*BUILD, "-t", "wheel", "-d", folder, cwd=unpacked)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a new environment with the wheel. Dependencies come from this
    environment by a path, which adds no editable packages."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    found = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", found, "install", "--no-deps", "--no-index"]
    run(*pip, wheel, cwd=folder)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return found


@pytest.fixture
def their_folder(tmp_path: Path) -> Path:
    """Return a project whose modules have the names of our layers."""
    for name in ("cache/utils.py", "pipeline.py", "augment.py", "readers/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'NAME = "their {name}"\n')
    # Of numba's absence nothing depends here, and it would compile for seconds in the new folder.
    (tmp_path / "numba.py").write_text("raise ImportError('not for this project')\n")
    (tmp_path / "train.py").write_text(JOB)
    return tmp_path


def held(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_the_wheel_brings_one_package_and_all_of_it(wheel: Path) -> None:
    there = held(wheel)
    assert {name.split("/")[0] for name in there} == {"penstock", "penstock-0.1.0.dist-info"}
    ours = {"penstock/py.typed"} | {
        str(path.relative_to(ROOT))
        for module in modules().values()
        for path in (module, module.with_suffix(".pyi"))
        if path.exists()
    }
    assert {name for name in there if name.startswith("penstock/")} == ours


def test_a_wheel_of_the_checkout_is_the_same(wheel: Path, tmp_path: Path) -> None:
    run(*BUILD, "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    (other,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(other) as two:
        assert sorted(one.namelist()) == sorted(two.namelist())
        for name in one.namelist():
            assert one.read(name) == two.read(name), name


def test_the_sdist_holds_what_its_readme_names(unpacked: Path) -> None:
    """The sdist has real folders instead of links, which archive tools may drop, and each layer
    once."""
    assert not [path for path in unpacked.rglob("*") if path.is_symlink()]
    assert not [layer for layer in LAYERS if (unpacked / layer).exists()]
    for name in ("Makefile", "constraints.txt", "CONTRIBUTING.md", "LICENSE", "docs", "tests"):
        assert (unpacked / name).exists(), name


def test_a_job_with_modules_that_have_the_names_of_our_layers(
    python: Path, their_folder: Path, folder: Path
) -> None:
    printed = run(python, "train.py", folder, their_folder / "packed", cwd=their_folder)
    assert printed.splitlines() == [
        "203 True",
        "their augment.py, their cache/utils.py, their pipeline.py, their readers/__init__.py",
        "augment cache cache.utils pipeline readers",
    ]


@pytest.mark.parametrize("command", [["-m", "penstock.pipeline.cli"], ["{bin}/penstock"]])
def test_the_command_there(
    python: Path, their_folder: Path, pack: Path, command: list[str]
) -> None:
    report = [part.format(bin=python.parent) for part in command]
    assert run(python, *report, "--version", cwd=their_folder) == "penstock 0.1.0\n"
    assert '"samples": 203' in run(python, *report, "inspect", pack, "--json", cwd=their_folder)


def test_a_checkout_shows_no_layer_by_its_bare_name() -> None:
    """An editable install must not make the layers importable by their bare names: that would
    create two trees of errors."""
    code = (
        "import sys, penstock\n"
        "assert all(getattr(penstock, name) is not None for name in penstock.__all__)\n"
        f"print(sorted({set(LAYERS)} & set(sys.modules)))"
    )
    assert run(sys.executable, "-c", code, cwd=ROOT) == "[]\n"


NO_FCNTL = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "fcntl":
            raise ModuleNotFoundError("No module named 'fcntl'", name="fcntl")
sys.modules.pop("fcntl", None)
sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.parametrize("before", ['sys.platform = "win32"', 'sys.platform = "darwin"', NO_FCNTL])
@pytest.mark.parametrize("module", ["penstock", "penstock.cache.base.locks", "penstock.pipeline"])
def test_another_platform_is_one_sentence(before: str, module: str) -> None:
    script = f"import sys\n{before}\nimport {module}\n"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: Penstock runs on Linux alone, and this ")
    assert "WSL2" in last
