"""Whether the folder of our package holds what we put there, and nobody else's files.

Another distribution, or a hand, may write into it; installers merge folders without a word.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
from dataclasses import dataclass
from importlib import machinery, metadata
from pathlib import Path
from typing import TYPE_CHECKING

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PACKAGE = "penstock"
HOME = Path(str(penstock.__file__)).resolve().parents[1]
"""The folder that holds our package: site-packages, or a checkout."""

_GIT_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Namesake:
    """Another distribution that brings a `penstock` too. is_here: its files lie in our folder."""

    distribution: str
    is_here: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFacts:
    """What is known of our package as it is installed.

    source: what tells which files are ours, "wheel" or "checkout"; None if nothing does.
    foreign: files in our folders that aren't ours; altered: ours that hold something else than was
    installed (of a checkout nobody asks). All relative to the folder of the package. hiding: files
    that Python would find instead of ours, if started in the current folder.
    """

    source: str | None = None
    foreign: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()
    namesakes: tuple[Namesake, ...] = ()
    hiding: tuple[str, ...] = ()


def package_facts(folder: Path, *, home: Path = HOME) -> PackageFacts:
    """The facts of the package in `home`, for a script that is started in `folder`."""
    hidden, namesakes = hiding(folder, home=home), _namesakes(home)
    recorded = _recorded(home)
    owned = _tracked(home) if recorded is None else frozenset(recorded)
    if owned is None:
        return PackageFacts(namesakes=namesakes, hiding=hidden)
    there = sorted(_files(home))
    return PackageFacts(
        source="checkout" if recorded is None else "wheel",
        foreign=tuple(name for name in there if name not in owned),
        altered=tuple(name for name in there if _is_altered(home / name, recorded, name)),
        namesakes=namesakes,
        hiding=hidden,
    )


def hiding(folder: Path, *, home: Path = HOME) -> tuple[str, ...]:
    """What in a folder hides our package from a script that is started there."""
    if folder.resolve() == home:
        return ()
    suffixes = machinery.all_suffixes()
    candidates = [folder / f"{PACKAGE}{suffix}" for suffix in suffixes]
    candidates += [folder / PACKAGE / f"__init__{suffix}" for suffix in suffixes]
    return tuple(str(path) for path in candidates if path.is_file())


def _folders(home: Path) -> tuple[str, ...]:
    """Our folders: the package, and in a checkout the floors that it links to."""
    links = sorted(path for path in (home / PACKAGE).glob("*") if path.is_symlink())
    targets = (path.resolve() for path in links)
    return (PACKAGE, *(path.name for path in targets if path.parent == home and path.is_dir()))


def _files(home: Path) -> Iterator[str]:
    """What lies in our folders, but for compiled files and what is hidden; folders behind links as
    one entry each."""
    for top in _folders(home):
        for folder, names, files in os.walk(home / top):
            names[:] = [n for n in names if n != "__pycache__" and not n.startswith(".")]
            links = [name for name in names if os.path.islink(os.path.join(folder, name))]
            for name in (*files, *links):
                if not name.startswith("."):
                    yield (Path(folder) / name).relative_to(home).as_posix()


def _recorded(home: Path) -> Mapping[str, metadata.FileHash | None] | None:
    """Files of the installed distribution with their checksums; None if `home` isn't one's."""
    marker = f"{PACKAGE}/__init__.py"
    for found in metadata.distributions(name=PACKAGE):
        files = {file.as_posix(): file.hash for file in found.files or ()}
        if marker in files and Path(str(found.locate_file(marker))).resolve() == home / marker:
            return files
    return None


def _tracked(home: Path) -> frozenset[str] | None:
    """What git keeps of our folders; None where that can't be told."""
    if not (home / ".git").exists():
        return None
    command = ["git", "-C", str(home), "ls-files", "-z", "--", *_folders(home)]
    try:
        run = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if run.returncode != 0:
        return None
    return frozenset(os.fsdecode(name) for name in run.stdout.split(b"\0") if name)


def _is_altered(
    path: Path, recorded: Mapping[str, metadata.FileHash | None] | None, name: str
) -> bool:
    wanted = None if recorded is None else recorded.get(name)
    if wanted is None or wanted.mode not in hashlib.algorithms_available:
        return False
    try:
        digest = hashlib.new(wanted.mode, path.read_bytes()).digest()
    except OSError:
        return True
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != wanted.value


def _namesakes(home: Path) -> tuple[Namesake, ...]:
    owners = metadata.packages_distributions().get(PACKAGE, ())
    return tuple(
        Namesake(distribution=owner, is_here=_is_here(owner, home))
        for owner in sorted(set(owners))
        if re.sub(r"[-_.]+", "-", owner).lower() != PACKAGE
    )


def _is_here(owner: str, home: Path) -> bool:
    found = metadata.distribution(owner)
    ours = home / PACKAGE
    return any(
        ours in Path(str(found.locate_file(file))).resolve().parents
        for file in found.files or ()
        if file.parts[0] == PACKAGE
    )
