"""Each figure on a page is that of a kept result.

docs/benchmarks.md isn't in the table: `python -m benchmarks.page` makes it from the same files.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.layers import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable


class Figure(NamedTuple):
    """A sentence of a page, with places for its numbers, and how a result gives them."""

    page: str
    sentence: str
    result: str
    numbers: Callable[[Any], tuple[float, ...]]


def over(loader: str) -> Callable[[Any], tuple[float, ...]]:
    """Return Penstock's rate over another loader's, and that loader's CPU time over Penstock's."""

    def numbers(result: Any) -> tuple[float, ...]:
        of = result["summary"][loader]
        return of["speed_ratio"]["median"], of["cpu_ratio"]["median"]

    return numbers


def beside(loader: str) -> Callable[[Any], tuple[float, ...]]:
    """Return Penstock's rate over another loader's, and Penstock's share of its CPU time, in
    hundredths."""

    def numbers(result: Any) -> tuple[float, ...]:
        speed, cpu = over(loader)(result)
        return speed, 100 / cpu

    return numbers


def first_batches(result: Any) -> tuple[float, ...]:
    return tuple(
        result["summary"][each]["first_batch_s"]["median"] for each in ("ffcv", "penstock")
    )


def cpu_of_hugging_face(result: Any) -> tuple[float, ...]:
    sides = result["works"]["decoded"]
    ratios = [sides[f"CPU of datasets {kind} over ours"] for kind in ("map", "streaming")]
    return (
        *(each["median"] for each in ratios),
        *(each[end] for each in ratios for end in ("low", "high")),
    )


FIGURES = (
    Figure(
        "migrate/pytorch.md",
        "{:.1f} times as many images a second as torch's DataLoader with Pillow on the same 2 "
        "cores; torch takes {:.1f} times the CPU time",
        "throughput",
        over("torch"),
    ),
    Figure(
        "migrate/torchdata.md",
        "{:.1f} times as many images a second as torch's own loader",
        "throughput",
        over("torch"),
    ),
    Figure(
        "migrate/webdataset.md",
        "{:.1f} times as many images a second from a pack as WebDataset from tar files of the same "
        "bytes, with the fastest decoder that pip installs, on the same 2 cores; WebDataset takes "
        "{:.1f} times the CPU time",
        "throughput",
        over("webdataset"),
    ),
    Figure(
        "migrate/dali.md",
        "{:.2f} times as many images a second as DALI's own file reader",
        "throughput",
        over("dali"),
    ),
    Figure(
        "migrate/huggingface.md",
        "a map-style `datasets` object takes {:.2f} times the CPU time of Penstock, and its stream "
        "{:.2f} times (medians of 5 rounds, {:.2f} to {:.2f} and {:.2f} to {:.2f}",
        "parquet",
        cpu_of_hugging_face,
    ),
    Figure(
        "migrate/litdata.md",
        "{:.1f} times as many images a second as LitData from chunks of the same bytes, with the "
        "fastest decoder that pip installs, on the same 2 cores and for {:.0f} % of the CPU time",
        "throughput",
        beside("litdata"),
    ),
    Figure(
        "migrate/grain.md",
        "{:.1f} times as many images a second as Grain over files of the same bytes, with the "
        "fastest decoder that pip installs, on the same 2 cores and for {:.0f} % of the CPU time",
        "throughput",
        beside("grain"),
    ),
    Figure(
        "migrate/tfdata.md",
        "{:.1f} times as many images a second as tf.data over files of the same bytes, on the "
        "same 2 cores and for {:.0f} % of the CPU time",
        "throughput",
        beside("tfdata"),
    ),
    Figure(
        "migrate/ffcv.md",
        "{:.1f} times as many images a second as FFCV from a beton of the same JPEG bytes, on the "
        "same 2 cores, for {:.0f} % of the CPU time",
        "throughput",
        beside("ffcv"),
    ),
    Figure(
        "migrate/ffcv.md",
        "{:.1f} s until the first batch in the measurement below, against {:.1f} s",
        "throughput",
        first_batches,
    ),
)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.page)
def test_a_figure_is_that_of_a_kept_result(figure: Figure) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / f"{figure.result}.json").read_text())
    page = " ".join((ROOT / "docs" / figure.page).read_text().split())
    assert figure.sentence.format(*figure.numbers(result)) in page
