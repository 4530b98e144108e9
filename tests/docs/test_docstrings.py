"""The examples in the docstrings of public functions and classes run."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest

import penstock
import penstock.testing
from tests.docs.snippets import code_of, parsed, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.docs.data import Data


def documented() -> Iterator[tuple[str, str]]:
    """Yield the name and docstring of each public object, and of its public methods."""
    for module in (penstock, penstock.testing):
        for name in module.__all__:
            thing = getattr(module, name)
            if not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            yield f"{module.__name__}.{name}", inspect.getdoc(thing) or ""
            for inner, member in vars(thing).items() if inspect.isclass(thing) else ():
                if not inner.startswith("_") and getattr(member, "__doc__", None):
                    yield f"{module.__name__}.{name}.{inner}", inspect.getdoc(member) or ""


EXAMPLES = {name: text for name, text in documented() if "```python" in text}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, tmp_path: Path, data: Data) -> None:
    document = parsed(EXAMPLES[name], name)
    assert code_of(document)
    run(document, tmp_path, data)
