"""Write results with the date, the machine and the versions."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.pipeline.bench import machine, versions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RESULTS = Path(__file__).parent / "results"


def write_result(
    what: str,
    measured: Mapping[str, Any],
    *,
    folder: Path = RESULTS,
    distributions: Sequence[str] = (),
) -> Path:
    """Write `<folder>/<what>.json`: the measurement with date, machine and versions, including
    those of `distributions`."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    record = {
        "what": what,
        "date": now.isoformat(),
        "machine": machine(),
        "versions": versions(*distributions),
    }
    path = folder / f"{what}.json"
    path.write_text(json.dumps(record | dict(measured), indent=1, default=str) + "\n")
    return path
