"""`penstock bench`: thin over `pipeline.bench`."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from penstock.cache.errors import ConfigError, PenstockWarning
from penstock.pipeline.cli.datasets import CacheFolder, Json, StoreOptions, parse_options
from penstock.pipeline.cli.progress import MeasuringBar
from penstock.pipeline.cli.warm import IndexFolder  # noqa: TC001  typer reads annotations

if TYPE_CHECKING:
    from penstock.pipeline.bench.bench import BenchResult
    from penstock.pipeline.bench.recipes import NamedRecipe

Picture = Annotated[
    Path | None, typer.Option("--plot", help="Picture to write, as bench.png; needs matplotlib.")
]


def bench(
    url: Annotated[
        str, typer.Argument(help="Image folder, tar files or pack: a path or an fsspec URL.")
    ],
    augment: Annotated[
        str,
        typer.Option(
            help="What is done to images: imagenet, imagenet-eval, none (encoded bytes only: what "
            "reading alone can do), or module:name of your own recipe."
        ),
    ] = "imagenet",
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Samples of a batch; by default the accelerator's, else 256 or all there is.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where images are decoded: cpu, cuda, cuda:1.")] = (
        "cpu"
    ),
    seconds: Annotated[float, typer.Option(help="Length of each measured run.")] = 10.0,
    against: Annotated[
        str | None,
        typer.Option(
            help="Loaders to measure beside, in turns, on the same files: torch,dali,… or all."
        ),
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(help="Emulate a training step of that many milliseconds over a batch."),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(help="Emulate a known accelerator's step, such as h100-resnet50."),
    ] = None,
    num_workers: Annotated[
        int | None,
        typer.Option(min=0, help="Decode threads; 0, as by default, is all usable cores."),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Search for faster settings by short runs, and show what was tried. Takes about "
            "four times as long.",
        ),
    ] = False,
    plot: Picture = None,
    cache: CacheFolder = None,
    index_folder: IndexFolder = None,
    storage_option: StoreOptions = None,
    as_json: Json = False,
) -> None:
    """Measure what the input side can do, and tell what holds it back.

    Samples/s, CPU time, the wait for a batch and, with a training step, how much of the accelerator
    is used; each stage's own ceiling; the one change that would help most. docs/bench.md explains
    every figure.
    """
    from penstock.pipeline.bench.bench import bench as measure
    from penstock.pipeline.bench.plot import check_plot
    from penstock.pipeline.bench.plot import plot as draw
    from penstock.pipeline.bench.recipes import recipe_named
    from penstock.pipeline.bench.workload import Workload, step_of
    from penstock.pipeline.options.device import parse_device

    # All that can be told to be wrong is told before anything is measured.
    _check_positive(seconds, "--seconds", example="10")
    if step_ms is not None:
        _check_positive(step_ms, "--step-ms", example="125")
    step_s, size = step_of(step_ms=step_ms, accelerator=accelerator, batch_size=batch_size)
    if plot is not None:
        check_plot(plot)
    recipe = recipe_named(augment)
    peers = _peers(against, recipe=recipe, device=device)
    workload = Workload(
        url=url,
        recipe=recipe,
        device=str(parse_device(device)),
        seconds=seconds,
        batch_size=size,
        num_workers=num_workers,
        step_s=step_s,
        accelerator=accelerator or "",
        cache=cache,
        index=index_folder,
        storage_options=parse_options(storage_option),
    )
    with warnings.catch_warnings(), MeasuringBar("bench") as bar:
        warnings.simplefilter("once", PenstockWarning)  # each run would repeat them
        result = measure(workload, progress=bar, search=tune, peers=peers)
    _report(result, as_json=as_json, plot=plot)
    if plot is not None:  # last: a disk that is full must not cost the figures
        draw(result, plot)
    if result.peers_error is not None:
        raise result.peers_error


def _report(result: BenchResult, *, as_json: bool, plot: Path | None) -> None:
    from penstock.pipeline.bench.report import as_json as values
    from penstock.pipeline.bench.report import show

    if as_json:
        typer.echo(json.dumps({**values(result), "plot": None if plot is None else str(plot)}))
        return
    console = Console()
    show(result, console)
    if plot is not None:
        console.print("\nPicture:", str(plot), markup=False, soft_wrap=True)


def _peers(against: str | None, *, recipe: NamedRecipe, device: str) -> list[str]:
    """Raises ConfigError for unknown names, and for work that the others can't do."""
    from penstock.pipeline.bench.compare import crop_of
    from penstock.pipeline.bench.peers.registry import PEERS, adapter

    if against is None:
        return []
    names = [name for name in map(str.strip, against.split(",")) if name]
    if not names:
        raise ConfigError(f"--against: got nothing, wanted some of {', '.join(PEERS)}, or all.")
    if device != "cpu":
        raise ConfigError(
            f"--against: others are played on the CPU, and got --device {device}. Leave out one "
            "of them."
        )
    crop_of(recipe.operations or ())
    if names == ["all"]:
        return list(PEERS)
    return [adapter(name).name for name in names]


def _check_positive(value: float, name: str, *, example: str) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name}: got {value:g}, wanted a number above 0, such as {example}.")
