"""Run one job three ways: whole; stopped within an epoch; resumed from there by a new trainer.

`python -m tests.trainers.drive JOB KIND FOLDER OUT`, alone or under torchrun. A job is a module of
`tests.trainers.jobs` with train(loader, record, *, stop, resume, folder): train EPOCHS epochs, or
stop after `stop` steps and write a checkpoint to `folder`, or continue from it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.trainers.common import STOP, Record, make_loader


def main(job: str, kind: str, images: str, out: str) -> None:
    module = importlib.import_module(f"tests.trainers.jobs.{job}")
    setup = getattr(module, "setup", None)
    if setup is not None:
        setup()
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(out)
    report: dict[str, Any] = {}
    for way, stop, resume in (
        ("whole", None, False),
        ("stopped", STOP, False),
        ("resumed", None, True),
    ):
        record = Record()
        loader = make_loader(kind, Path(images), **getattr(module, "LOADER", {}))
        module.train(loader, record, stop=stop, resume=resume, folder=folder / "run")
        report[way] = record.batches
        report["steps"] = len(loader)
        loader.close()
    (folder / f"rank-{rank}.json").write_text(json.dumps(report))
    teardown = getattr(module, "teardown", None)
    if teardown is not None:
        teardown()


if __name__ == "__main__":
    main(*sys.argv[1:])
