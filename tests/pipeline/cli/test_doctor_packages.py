"""Test `penstock doctor` on installations that other packages have written into."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.pipeline.cli import MACHINE, DoctorFacts, Finding, package_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def install(home: Path, name: str, files: Mapping[str, str]) -> None:
    """Install files like an installer, with their record."""
    record = [f"{name}-1.0.dist-info/METADATA,,", f"{name}-1.0.dist-info/RECORD,,"]
    for file, text in files.items():
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record.append(f"{file},sha256={digest.decode()},{len(text)}")
    folder = home / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / "RECORD").write_text("\n".join(record) + "\n")


LAYERS = ("augment", "cache", "pipeline", "readers")
OUR_FILES = {"penstock/__init__.py": "# penstock\n"} | {
    f"penstock/{name}/{file}": f"# {name}\n" for name in LAYERS for file in ("__init__.py", "a.py")
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, ours among them."""
    home = (tmp_path / "site").resolve()
    install(home, "penstock", OUR_FILES)
    monkeypatch.syspath_prepend(str(home))
    return home


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


CLEAN: dict[str, Any] = dict(altered=[], hiding=[])


def findings(facts: dict[str, Any]) -> list[Finding]:
    """Return what the check of packages finds."""
    return list(MACHINE.only("package").findings(DoctorFacts(**facts)))


def statuses(facts: dict[str, Any]) -> list[str]:
    found = findings(facts)
    assert all(bool(check.remedy) == (check.status != "ok") for check in found)
    return [check.status for check in found]


def test_a_clean_wheel_has_nothing_to_say(site: Path, empty: Path) -> None:
    compiled = site / "penstock" / "cache" / "__pycache__" / "a.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.touch()
    install(site, "someone", {"theirs/__init__.py": ""})
    facts = package_facts(empty, home=site)
    assert facts == CLEAN
    assert statuses(facts) == ["ok"]


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("# mine")])
def test_a_changed_or_missing_file_is_named(
    site: Path, empty: Path, change: Callable[[Path], object]
) -> None:
    change(site / "penstock" / "cache" / "a.py")
    facts = package_facts(empty, home=site)
    assert facts["altered"] == ["penstock/cache/a.py"]
    assert statuses(facts) == ["fail"]


def test_a_checkout_has_no_record(empty: Path) -> None:
    facts = package_facts(empty, home=empty)
    assert facts == CLEAN | {"altered": None}
    assert statuses(facts) == ["ok"]


def test_another_distribution_in_our_folders_is_a_failure(site: Path, empty: Path) -> None:
    install(site, "Web.Pen", {"penstock/__init__.py": "# theirs\n", "penstock/web.py": ""})
    facts = package_facts(empty, home=site)
    assert facts["altered"] == ["penstock/__init__.py"]
    assert statuses(facts) == ["fail"]


@pytest.mark.parametrize("name", ["penstock.py", "penstock/__init__.py", "penstock.abi3.so"])
def test_a_module_in_the_current_folder_hides_ours(site: Path, empty: Path, name: str) -> None:
    (empty / name).parent.mkdir(exist_ok=True)
    (empty / name).touch()
    (empty / "penstock").mkdir(exist_ok=True)  # without an __init__ it hides nothing
    (empty / "cache.py").touch()  # the user's own
    facts = package_facts(empty, home=site)
    assert facts["hiding"] == [str(empty / name)]
    assert statuses(facts) == ["warn"]


def test_many_files_are_counted(site: Path, empty: Path) -> None:
    for name in LAYERS:
        (site / "penstock" / name / "a.py").unlink()
    (check,) = findings(package_facts(empty, home=site))
    assert "4 files" in check.found
    assert "and 1 more" in check.found
