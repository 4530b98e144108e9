"""The made data that pages and docstrings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.docs.data import Data

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Data]:
    made = Data(tmp_path_factory.mktemp("made"))
    yield made
    made.close()
