"""Run `penstock plan` by `pipeline.plan.sizing`."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from penstock.cache import ConfigError, DatasetNotFoundError
from penstock.cache.base import format_size
from penstock.pipeline.cli.command_options import IndexedOptions, Json, option_of
from penstock.pipeline.cli.commands import command, given_options
from penstock.pipeline.cli.output import MeasuringBar
from penstock.pipeline.cli.plan_options import SizingOptions

if TYPE_CHECKING:
    from penstock.pipeline.cli.dataset_report import MixtureFigures
    from penstock.pipeline.cli.plan_inputs import KnownFigures
    from penstock.pipeline.plan.sizing import Forecast

_out = partial(Option, rich_help_panel="The output")


@command(
    "plan",
    "penstock plan photos-pack --gpus 4 --samples-per-s 1800",
    "penstock plan --model b200-unet3d --nodes 9 --nvme 30TB --json",
    "penstock plan s3://bucket/photos-pack --model resnet50 --plot plan.png",
)
def plan(
    context: typer.Context,
    url: Annotated[str | None, Argument()] = None,
    *,
    options: SizingOptions,
    au: Annotated[float | None, _out()] = None,
    measure: Annotated[bool, _out("--measure")] = False,
    plot: Annotated[Path | None, _out()] = None,
    data: IndexedOptions,
    as_json: Json = False,
) -> None:
    """Predict the input side of a job on given hardware, and what to buy or change first.

    The plan has the shard size, lanes, prefetch, connections, the cached share, epoch times and the
    accelerator utilisation (AU: the share of the time in which GPUs compute), and names what limits
    them. docs/reference/plan.md has the formulas and the units.

    url: The dataset, if it exists: a path, an fsspec URL, or a mixture file, for which the plan
        also shows what each part gives; else pass --samples.
    au: Accelerator utilisation that later epochs must reach, in per cent; if they don't, print the
        limit and exit with 2.
    measure: Measure what isn't given, which takes some seconds: this machine's disk (--cache, else
        the temporary folder), decoding on the CPU and the URL's store.
    plot: Draw AU for 1 to 1,024 nodes into a file such as plan.png; needs matplotlib.
    """
    from penstock.pipeline.bench import check_plot
    from penstock.pipeline.cli.dataset_report import part_table
    from penstock.pipeline.cli.plan_inputs import SetupChoice
    from penstock.pipeline.cli.plan_report import draw_plan, plan_values, show_plan
    from penstock.pipeline.plan.sizing import forecast, unmet_utilisation

    given = given_options(context)
    if plot is not None:
        check_plot(plot)
    if au is not None and not 0 < au <= 100:
        raise ConfigError(f"--au: got {au:g}, wanted a percentage above 0 and up to 100.")
    known: KnownFigures = {}
    mixture: MixtureFigures | None = None
    if url is None:
        _check_without_url(given, measure)
    else:
        known, mixture = _known(url, data.arguments_for(url), measure)
    choice = SetupChoice(options, known, given)
    setup, assumptions = choice.setup(), choice.notes
    if mixture is not None:
        setup = mixture.completed(setup)
    found = forecast(setup)
    if as_json:
        parts = {} if mixture is None else {"mixture": mixture.summary.values()}
        typer.echo(json.dumps(plan_values(found, assumptions) | parts))
    else:
        show_plan(found, assumptions, Console())
        if mixture is not None:
            Console().print("\nThe first epoch:", part_table(mixture.summary))
    if plot is not None:
        draw_plan(setup, title=_title(options, found)).savefig(plot, dpi=150)
        Console(stderr=as_json).print("Picture:", str(plot), markup=False, soft_wrap=True)
    if au is not None and (words := unmet_utilisation(found, au=au)):
        raise ConfigError(words)


def _check_without_url(given: frozenset[str], measure: bool) -> None:
    wrong = ["--measure"] * measure
    wrong += [option_of(each.name) for each in fields(IndexedOptions) if each.name in given]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: got no URL to read or measure. Pass the URL of the data, or "
            "leave out these options."
        )


def _known(
    url: str, arguments: dict[str, Any], measure: bool
) -> tuple[KnownFigures, MixtureFigures | None]:
    """Return the facts of the index of a URL; with `measure` also the rates of this machine's disk,
    of decoding and of the URL's store. Also returns the figures of a mixture file."""
    from penstock.pipeline.bench import Workload, probe, recipe_named
    from penstock.pipeline.cli.dataset_report import MixtureFigures
    from penstock.readers import Mixture, open_source
    from penstock.readers.origin import local_path

    mixture: MixtureFigures | None = None
    try:
        with open_source(url, allow_left_out=1, **arguments) as dataset:
            contents, is_local = dataset.contents, local_path(url) is not None
            samples, sample_bytes = contents.samples, contents.sample_bytes
            if isinstance(dataset, Mixture):
                mixture = MixtureFigures(summary=dataset.summary(), contents=contents)
                samples = mixture.summary.samples
                sample_bytes = mixture.summary.bytes / samples  # of those that an epoch delivers
                is_local = dataset.remote_shards is None
    except (DatasetNotFoundError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from error
    known: KnownFigures = {
        "samples": (samples, "index"),
        "sample_bytes": (sample_bytes, "index"),
        "shards": (len(contents.sizes), "index"),
        "shuffled": (contents.shuffled, "index"),
        "icc": (contents.icc, "index"),
        "is_local": (is_local, "local URL"),
    }
    if not measure:
        return known, mixture
    recipe = recipe_named("auto")
    workload = Workload(url=url, recipe=recipe, device="cpu", seconds=10.0, data=arguments)
    with MeasuringBar("plan") as bar:
        bar("measuring this machine's disk, decoding and the store")
        return known | probe(workload), mixture


def _title(options: SizingOptions, found: Forecast) -> str:
    job = found.setup
    size, nvme, rate, store = map(
        format_size, (job.sample_bytes, job.nvme_bytes, job.nvme_bytes_per_s, job.store_bytes_per_s)
    )
    behind = "" if job.is_local else f", store {store}/s"
    return (
        f"{options.model or f'{job.samples_per_s:g} samples/s a GPU'}: {job.samples:,} samples of "
        f"{size}, {job.global_batch // job.ranks} a GPU\n"
        f"a node: {job.gpus} GPUs, {nvme} of NVMe at {rate}/s, "
        f"{job.nic_bytes_per_s * 8 / 1e9:g} Gb/s, {job.cores:g} cores{behind}"
    )
