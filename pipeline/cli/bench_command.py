"""Run `penstock bench` by `pipeline.bench`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Option

from penstock.cache import ConfigError, PenstockWarning
from penstock.pipeline.cli.command_options import IndexedOptions, Json, Source
from penstock.pipeline.cli.commands import command
from penstock.pipeline.cli.output import MeasuringBar

if TYPE_CHECKING:
    from penstock.pipeline.bench import NamedRecipe


@command(
    "bench",
    "penstock bench photos-pack",
    "penstock bench s3://bucket/scan.zarr --sample 8,-,256,256 --cache cached",
    "penstock bench photos --against torch,dali --plot bench.png",
)
def bench(
    url: Source,
    *,
    augment: str = "auto",
    batch_size: Annotated[int | None, Option(min=1)] = None,
    device: str = "cpu",
    seconds: float = 10.0,
    against: str | None = None,
    step_ms: float | None = None,
    accelerator: str | None = None,
    num_workers: Annotated[int | None, Option(min=0)] = None,
    tune: Annotated[bool, Option("--tune")] = False,
    plot: Path | None = None,
    data: IndexedOptions,
    as_json: Json = False,
) -> None:
    """Measure the throughput of the input side, and name its bottleneck.

    It reports samples/s, CPU time, the wait for a batch, the utilisation of an accelerator if there
    is a training step, each stage's own ceiling, and the change that would help most.
    docs/reference/bench.md explains every figure.

    augment: Recipe: auto (imagenet if there are images), imagenet, imagenet-eval, none (read
        without decoding), or module:name of your own recipe.
    batch_size: Samples per batch; by default the accelerator's, else 256, or all samples if there
        are fewer.
    device: Device that decodes images: cpu, cuda, cuda:1.
    seconds: Length of each measured run.
    against: Other loaders to measure on the same files, in turn: torch,dali,… or all.
    step_ms: Emulate a training step of this many milliseconds per batch.
    accelerator: Emulate the step of a known accelerator: h100-resnet50.
    num_workers: Decode threads; 0 (the default): one per usable core.
    tune: Search for faster settings with short runs, and list them. Takes about four times as long.
    plot: Write a picture, such as bench.png; needs matplotlib.
    """
    from penstock.pipeline import bench as library
    from penstock.pipeline.options import parse_device
    from penstock.pipeline.plan.sizing import check_figure

    check_figure("--seconds", seconds)
    if step_ms is not None:
        check_figure("--step-ms", step_ms)
    if plot is not None:
        library.check_plot(plot)
    step_s, size = library.step_of(step_ms=step_ms, accelerator=accelerator, batch_size=batch_size)
    recipe = library.recipe_named(augment)
    workload = library.Workload(
        url=url,
        recipe=recipe,
        device=str(parse_device(device)),
        seconds=seconds,
        batch_size=size,
        num_workers=num_workers,
        step_s=step_s,
        accelerator=accelerator or "",
        data=data.arguments_for(url),
    )
    loaders = _loaders(against, recipe=recipe, device=device)
    with warnings.catch_warnings(), MeasuringBar("bench") as bar:
        warnings.simplefilter("once", PenstockWarning)  # each run repeats its warnings
        result = library.bench(workload, progress=bar, search=tune, loaders=loaders)
    if as_json:
        picture = None if plot is None else str(plot)
        typer.echo(json.dumps({**library.as_json(result), "plot": picture}))
    else:
        library.show_result(result, Console())
    if plot is not None:  # last, so that a full disk doesn't lose the figures
        library.plot(result, plot)
        if not as_json:
            Console().print("\nPicture:", str(plot), markup=False, soft_wrap=True)
    if result.loaders_error is not None:
        raise result.loaders_error


def _loaders(against: str | None, *, recipe: NamedRecipe, device: str) -> list[str]:
    """Parse --against. Raises ConfigError for unknown names and for unsupported work."""
    from penstock.pipeline.bench import AUTO, crop_of
    from penstock.pipeline.bench.adapters import LOADERS, find_adapter

    if against is None:
        return []
    names = [name for name in map(str.strip, against.split(",")) if name]
    if not names:
        raise ConfigError(f"--against: got nothing, wanted some of {', '.join(LOADERS)}, or all.")
    if device != "cpu":
        raise ConfigError(
            f"--against: got --device {device}, but other loaders run on the CPU. Leave out one of "
            "the two."
        )
    if recipe.name != AUTO:
        crop_of(recipe.operations)
    return list(LOADERS) if names == ["all"] else [find_adapter(name).name for name in names]
