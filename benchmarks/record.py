"""Write results with the date, the machine and the versions."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.pipeline.bench import machine, versions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.pipeline.bench import Comparison
    from penstock.pipeline.bench.adapters import Work

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


def comparison_record(done: Comparison, work: Work, dataset: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Comparison as JSON values, without paths of this machine."""
    plain = {f.name: getattr(work, f.name) for f in fields(work)}
    return {
        "dataset": dict(dataset),
        "work": {k: v for k, v in plain.items() if not isinstance(v, Path)},
        "round": asdict(done.size),
        "summary": {name: asdict(summary) for name, summary in done.summaries.items()},
        "rounds": {name: [asdict(r) for r in rounds] for name, rounds in done.rounds.items()},
    }
