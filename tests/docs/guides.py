"""Run the two columns of a page in docs/migrate/, and compare the samples that each delivers.

The blocks of a page have titles. Those that begin with "Before" are a program with another loader,
those that begin with "After" the same program with Penstock; a title such as `photos.py` is a
file that both import. All blocks of one side run in order, in one namespace. They call functions
of the reader's, `train_step` for example, which here record what they get.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.docs.data import on_this_machine

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r'^```python title="(?P<title>[^"]+)"\n(?P<code>.*?)^```$', re.M | re.S)
Calls = dict[str, list[tuple[Any, ...]]]


@dataclass(frozen=True)
class Guide:
    """A page of docs/migrate/, whose blocks run in the current folder.

    steps: names of the functions that the page expects its reader to have.
    """

    name: str
    steps: tuple[str, ...] = ("train_step", "eval_step")
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return ROOT / "docs" / "migrate" / f"{self.name}.md"

    def blocks(self, side: str) -> list[str]:
        """Return the code of the blocks of one side, each behind as many empty lines as stand
        before it in the page, so that an error names the page's line."""
        text = self.path.read_text()
        return [
            "\n" * (text[: found.start()].count("\n") + 1)
            + on_this_machine(found["code"], Path.cwd())
            for found in BLOCK.finditer(text)
            if found["title"].startswith(side)
        ]

    def files(self) -> dict[str, str]:
        """Return the modules of the page, by name of the file."""
        found = BLOCK.finditer(self.path.read_text())
        return {each["title"]: each["code"] for each in found if each["title"].endswith(".py")}

    def write_files(self) -> None:
        """Write the modules of the page into the current folder."""
        for name, code in self.files().items():
            Path(name).write_text(code)

    def run(self, side: str) -> Calls:
        """Run one side in this process; return the arguments of each step's calls, as arrays."""
        self.write_files()
        calls: Calls = {name: [] for name in self.steps}

        def recorder(name: str) -> Any:
            return lambda *values: calls[name].append(tuple(plain(each) for each in values))

        names = {name: recorder(name) for name in self.steps}
        names |= self.given | {"__name__": f"guide_{self.name}"}
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(Path.cwd()))
            blocks = self.blocks(side)
            assert blocks, f"{self.path} has no block {side}"
            for code in blocks:
                exec(compile(code, str(self.path), "exec"), names)
            for name in self.files():
                sys.modules.pop(Path(name).stem, None)
        return calls

    def before(
        self, *libraries: str, side: str = "Before", set_up: Callable[[], None] | None = None
    ) -> Calls:
        """Run a side that needs other libraries, in a process of its own, because most start
        threads or fork; skip the test if one of them isn't installed. set_up runs first, there."""
        if not installed(*libraries):
            pytest.skip(f"{', '.join(libraries)}: not installed, `make guides` installs them")
        calls: Calls = apart(_run, self, side, set_up)
        return calls


def _run(guide: Guide, side: str, set_up: Callable[[], None] | None) -> Calls:
    if set_up is not None:
        set_up()
    return guide.run(side)


def installed(*libraries: str) -> bool:
    return all(importlib.util.find_spec(each) is not None for each in libraries)


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process in this folder, as torchrun would start it."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(_call, os.getcwd(), function, *arguments).result()


def _call(folder: str, function: Callable[..., Any], *arguments: Any) -> Any:
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # a script's default
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    library = torch.library.Library("torchvision", "FRAGMENT")
    if importlib.util.find_spec("torchvision") is not None and not torch.cuda.is_available():
        # The usual torchvision is built for torch's CUDA build. Beside a CPU build, its compiled
        # operators don't load, and its other modules, which the pages use, need these declared.
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return function(*arguments)


def plain(value: Any) -> Any:
    """Return a copy of what a step got, without tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy().copy()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return np.array(value) if hasattr(value, "__array__") else value


def rows(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the samples of all calls of a step, whose arguments are columns of one length."""
    return [row for columns in calls for row in zip(*columns, strict=True)]


def column(calls: list[tuple[Any, ...]], place: int) -> list[Any]:
    """Return one argument of a step for each sample, as Python's own values."""
    return [each.item() if hasattr(each, "item") else each for each in _values(calls, place)]


def _values(calls: list[tuple[Any, ...]], place: int) -> list[Any]:
    return [row[place] for row in rows(calls)]


def assert_same(
    before: list[tuple[Any, ...]], after: list[tuple[Any, ...]], *, tolerance: float = 0.0
) -> None:
    """Raise unless both sides got the same samples, in the same order. Pixels of one sample may
    differ by `tolerance` on average."""
    assert len(rows(before)) == len(rows(after))
    for left, right in zip(rows(before), rows(after), strict=True):
        for one, other in zip(left, right, strict=True):
            assert np.shape(one) == np.shape(other)
            if np.ndim(one) > 1:
                assert np.abs(np.subtract(one, other, dtype=float)).mean() <= tolerance
            else:
                assert np.array_equal(one, other)


def assert_same_set(
    before: list[tuple[Any, ...]], after: list[tuple[Any, ...]], *, places: tuple[int, ...]
) -> None:
    """Raise unless both sides got the same samples in any order, told apart by some arguments, and
    arrays of the same shape and type."""
    for place in places:
        assert sorted(column(before, place)) == sorted(column(after, place))
    assert forms(before) == forms(after)


def forms(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the shape of a sample and the type of each argument of a step."""
    first = rows(calls)[0]
    return [(np.shape(each), np.asarray(each).dtype.kind) for each in first]
