"""Pack with Ray and with MPI's pool, if these are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cache import ConfigError, RayExecutor
from penstock.readers import pack
from tests import crews, images
from tests.watchdog import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
SMALL = 4000  # bytes a shard: a handful of test images


def everything(root: Path) -> dict[str, bytes]:
    """Return all files below a root by name."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "samples", [100, pytest.param(2000, marks=pytest.mark.grid, id="2000 images")]
)
def test_ray_with_a_worker_that_is_killed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    ray = pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"ray\.init"):
        RayExecutor()
    folder = images.class_folder(tmp_path / "set", samples=samples)
    pack(folder, tmp_path / "alone", shard_bytes=SMALL, verify=images.verify)
    crews.plan_kills(tmp_path / "kills", 2, monkeypatch.setenv)
    environment = {"env_vars": {crews.KILLS: os.environ[crews.KILLS], "PYTHONPATH": str(ROOT)}}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    try:
        with RayExecutor() as executor:
            assert executor.num_workers == 3
            pack(
                folder, tmp_path / "pack", shard_bytes=SMALL, verify=crews.verify, executor=executor
            )
    finally:
        ray.shutdown()
    assert not list((tmp_path / "kills").iterdir())
    assert everything(tmp_path / "pack") == everything(tmp_path / "alone")


DRIVER = """
import sys
from mpi4py.futures import MPIPoolExecutor
from penstock.readers import pack

if __name__ == "__main__":
    with MPIPoolExecutor() as executor:
        assert executor.num_workers == 2
        pack(sys.argv[1], sys.argv[2], shard_bytes=4000, verify="tests.images:verify",
             executor=executor)
"""


def test_a_pool_of_mpi(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py.futures")
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip("no mpiexec")
    folder = images.class_folder(tmp_path / "set", samples=60)
    pack(folder, tmp_path / "alone", shard_bytes=SMALL, verify=images.verify)
    (tmp_path / "drive.py").write_text(DRIVER)
    command = [mpiexec, "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable]
    command += ["-m", "mpi4py.futures", str(tmp_path / "drive.py"), str(folder)]
    subprocess.run(
        [*command, str(tmp_path / "pack")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=PATIENCE_S,
        check=True,
    )
    assert everything(tmp_path / "pack") == everything(tmp_path / "alone")
