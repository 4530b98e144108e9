"""Test that the parts of the plan for sizing and warming import only numpy and the
cache's values."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.layers import modules
from tests.watchdog import PATIENCE_S

PLAN = [module for module in modules() if module.startswith("pipeline.plan.")]


def test_there_are_modules_to_look_at() -> None:
    assert len(PLAN) >= 9


@pytest.mark.parametrize("module", PLAN)
def test_a_plan_loads_no_tensors_no_graph_and_no_files(module: str) -> None:
    code = (
        f"import penstock.{module}, sys\n"
        "heavy = {'torch', 'nvidia', 'pyarrow', 'fsspec', 'PIL', 'zarr', 'sqlite3'}\n"
        "found = heavy & {name.split('.')[0] for name in sys.modules}\n"
        "found |= {name for name in sys.modules\n"
        "          if name.startswith(('penstock.augment', 'penstock.readers'))}\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
