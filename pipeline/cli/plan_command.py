"""Run `penstock plan` by `pipeline.plan.sizing`, and declare its options.

typer reads the options at run time.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from penstock.cache import ConfigError, DatasetNotFoundError
from penstock.cache.base import format_size
from penstock.pipeline.cli.command_options import (
    CacheFolder,
    Format,
    IndexFolder,
    Json,
    StorageOption,
    parse_storage_options,
)
from penstock.pipeline.cli.progress_bars import MeasuringBar

if TYPE_CHECKING:
    from penstock.pipeline.cli.plan_inputs import KnownData, SizingOptions
    from penstock.pipeline.plan.sizing import ClusterSetup, Forecast, SimulatedEpoch

DATA, JOB, NODE, STORE, OUT = "The data", "The job", "A node", "The store", "The output"

_PLAIN = re.compile(r"[0-9]+([,_]?[0-9]{3})*")
_POWER = re.compile(r"[0-9]+(\.[0-9]+)?[eE]\+?[0-9]{1,2}")


def parse_count(value: str | int) -> int:
    """Parse an integer as people write it: 1281167, 1,281,167, 1_281_167 or 1e9."""
    text = str(value).strip()
    if _PLAIN.fullmatch(text):
        return int(text.replace(",", "").replace("_", ""))
    if _POWER.fullmatch(text) and (number := float(text)).is_integer():
        return int(number)
    raise typer.BadParameter(
        f"got {text!r}, wanted a whole number such as 1281167, 1,281,167 or 1e9."
    )


def _count(help: str, panel: str, *names: str) -> Any:
    return typer.Option(
        *names, help=help, rich_help_panel=panel, parser=parse_count, metavar="<int>"
    )


PlannedUrl = Annotated[
    str | None,
    typer.Argument(help="The dataset, if it exists: a path or an fsspec URL; else --samples."),
]
Samples = Annotated[
    int | None,
    _count("Number of samples; by default the URL's, or the model's published dataset's.", DATA),
]
SampleBytes = Annotated[
    str | None,
    typer.Option(
        help='Mean stored size of a sample, such as "115KB"; by default of the URL or the model.',
        rich_help_panel=DATA,
    ),
]
Spread = Annotated[
    float,
    typer.Option(
        help="Standard deviation of the samples' sizes over their mean.", rich_help_panel=DATA
    ),
]
ShardSize = Annotated[
    str | None,
    typer.Option(
        "--shard-bytes",
        help="Size of a shard; by default the URL's, else chosen for the job: 64MiB or less.",
        rich_help_panel=DATA,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        help="A published model, alone or on an accelerator, which sets samples/s, batch and "
        "sample size: unet3d, retinanet, resnet50, cosmoflow, flux, dgx-pod, b200-unet3d, "
        "h100-resnet50, ….",
        rich_help_panel=JOB,
    ),
]
SamplesPerS = Annotated[
    float | None,
    typer.Option(
        help="Instead of --model: samples a second of one GPU that never waits.",
        rich_help_panel=JOB,
    ),
]
Nodes = Annotated[int, _count("Nodes of the job.", JOB)]
Gpus = Annotated[int, _count("GPUs per node, with one rank each.", JOB)]
Batch = Annotated[int | None, _count("Batch size of a GPU; by default the model's, else 256.", JOB)]
GlobalBatch = Annotated[
    int | None, _count("Batch size of all GPUs, instead of --batch.", JOB, "--global-batch-size")
]
Epochs = Annotated[int, _count("Epochs of the job.", JOB)]
CpuPer1000 = Annotated[
    float | None,
    typer.Option(
        "--cpu-s-per-1000",
        help="CPU-seconds to decode and augment 1,000 samples, as `penstock bench` measures; 0, "
        "the default, if the GPU decodes.",
        rich_help_panel=JOB,
    ),
]
WithPeers = Annotated[
    bool,
    typer.Option(
        "--peers/--no-peers",
        help="Nodes request from each other's caches before the store.",
        rich_help_panel=JOB,
    ),
]
EncryptedPeers = Annotated[
    bool,
    typer.Option(
        "--tls/--no-tls",
        help="With --peers: --no-tls turns encryption off on a private network.",
        rich_help_panel=JOB,
    ),
]
Moved = Annotated[
    float | None,
    typer.Option(
        help="The caches are filled, and other nodes hold this share of what a node reads: 0 after "
        "`penstock warm`, 1/N after adding one of N nodes, 0.5 after halving their number, 1 - 1/N "
        "for nodes in a new order. By default the caches are empty.",
        rich_help_panel=JOB,
    ),
]
Reshuffle = Annotated[
    float,
    typer.Option(
        help="The loader's reshuffle: share of the shards that change lanes in each epoch.",
        rich_help_panel=JOB,
    ),
]
Cores = Annotated[
    float, typer.Option(help="CPU cores; 128 is usual for nodes with 8 GPUs.", rich_help_panel=NODE)
]
Ram = Annotated[
    str, typer.Option(help="Memory; half of it is available as page cache.", rich_help_panel=NODE)
]
Nvme = Annotated[
    str,
    typer.Option(
        help="Size of the cache (DiskCache's max_bytes); 0 without one.", rich_help_panel=NODE
    ),
]
NvmeBandwidth = Annotated[
    str, typer.Option(help="Bandwidth of the cache's disk.", rich_help_panel=NODE)
]
Nic = Annotated[
    str,
    typer.Option(
        help='Network bandwidth in each direction: bits ("100Gb/s") or bytes ("12.5GB/s").',
        rich_help_panel=NODE,
    ),
]
StoreBandwidth = Annotated[
    str | None,
    typer.Option(
        help="Bandwidth for all nodes together; by default 10GB/s, as of a small shared file "
        "system.",
        rich_help_panel=STORE,
    ),
]
StoreLatency = Annotated[
    float,
    typer.Option(
        help="Milliseconds to a request's first byte; 10 to 100 for object stores.",
        rich_help_panel=STORE,
    ),
]
StreamBandwidth = Annotated[
    str,
    typer.Option(
        help="Bandwidth of one connection, as usual for object stores.", rich_help_panel=STORE
    ),
]
StoreRequests = Annotated[
    float,
    typer.Option(
        "--store-requests-per-s",
        help="Requests a second for all nodes; S3 allows 5,500 per prefix.",
        rich_help_panel=STORE,
    ),
]
Price = Annotated[
    float | None,
    typer.Option(
        "--price-per-1000-requests",
        help="Price of 1,000 requests, in any currency.",
        rich_help_panel=STORE,
    ),
]
Local = Annotated[
    bool | None,
    typer.Option(
        "--local/--remote",
        help="Each node has the data on its own disk; the default for a local URL without options "
        "of a store.",
        rich_help_panel=STORE,
    ),
]
WantedAu = Annotated[
    float | None,
    typer.Option(
        "--au",
        help="Accelerator utilisation that later epochs must reach, in per cent; if they don't, "
        "print the limit and exit with 2.",
        rich_help_panel=OUT,
    ),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Measure what isn't given, in some seconds: this machine's disk (--cache, else the "
        "temporary folder), decoding on the CPU and the URL's store.",
        rich_help_panel=OUT,
    ),
]
Simulate = Annotated[
    bool,
    typer.Option(
        "--simulate",
        help="Also simulate two epochs of the real order, in some seconds.",
        rich_help_panel=OUT,
    ),
]
PlanPlot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        help="Draw AU against 1 to 1,024 nodes, as plan.png; needs matplotlib.",
        rich_help_panel=OUT,
    ),
]


def given_options(context: typer.Context) -> frozenset[str]:
    """Return the names of the options that were passed."""
    return frozenset(
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"
    )


# A simulation takes about 0.2 ms per step and node, and 4 bytes per sample and node.
_MOST_PAIRS, _MOST_SAMPLES = 200_000, 50_000_000


def plan(
    context: typer.Context,
    url: PlannedUrl = None,
    samples: Samples = None,
    sample_bytes: SampleBytes = None,
    spread: Spread = 0.0,
    shard_bytes: ShardSize = None,
    model: ModelName = None,
    samples_per_s: SamplesPerS = None,
    nodes: Nodes = 1,
    gpus: Gpus = 8,
    batch: Batch = None,
    global_batch: GlobalBatch = None,
    epochs: Epochs = 90,
    cpu_s_per_1000: CpuPer1000 = None,
    peers: WithPeers = False,
    tls: EncryptedPeers = True,
    moved: Moved = None,
    reshuffle: Reshuffle = 0.0,
    cores: Cores = 128,
    ram: Ram = "1TB",
    nvme: Nvme = "1.5TB",
    nvme_bandwidth: NvmeBandwidth = "5GB/s",
    nic: Nic = "100Gb/s",
    store_bandwidth: StoreBandwidth = None,
    store_latency: StoreLatency = 30.0,
    stream_bandwidth: StreamBandwidth = "100MB/s",
    store_requests_per_s: StoreRequests = 5500.0,
    price: Price = None,
    local: Local = None,
    au: WantedAu = None,
    measure: Measure = False,
    simulate: Simulate = False,
    plot: PlanPlot = None,
    format: Format = "auto",
    index_folder: IndexFolder = None,
    cache: CacheFolder = None,
    storage_option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Predict the input side of a job on given hardware, and what to buy or change first.

    The plan has the shard size, lanes, prefetch, connections, the cached share, epoch times and the
    accelerator utilisation (AU: the share of the time in which GPUs compute), and names what limits
    them. docs/sizing.md has the formulas and the units.
    """
    _plan(locals() | {"given": given_options(context)})


def _plan(passed: dict[str, Any]) -> None:
    """Make the plan. passed: the command's options, by the names of its parameters."""
    from penstock.pipeline.cli.plan_inputs import SizingOptions

    options = SizingOptions(**{each.name: passed[each.name] for each in fields(SizingOptions)})
    if passed["plot"] is not None:
        from penstock.pipeline.bench import check_plot

        check_plot(passed["plot"])
    if passed["url"] is None:
        _check_without_url(passed)
    known = None
    if passed["url"] is not None:
        place: dict[str, Any] = {
            "format": passed["format"],
            "index": passed["index_folder"],
            "cache": passed["cache"],
            "storage_options": parse_storage_options(passed["storage_option"]),
        }
        known = _known(passed["url"], place)
        known = _measured(passed["url"], place, known) if passed["measure"] else known
    _report(
        options,
        known,
        au=passed["au"],
        simulated=passed["simulate"],
        plot=passed["plot"],
        as_json=passed["as_json"],
    )


_URL_OPTIONS = {
    "measure": "--measure",
    "format": "--format",
    "index_folder": "--index",
    "cache": "--cache",
    "storage_option": "-o",
}


def _check_without_url(passed: dict[str, Any]) -> None:
    wrong = [option for name, option in _URL_OPTIONS.items() if name in passed["given"]]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: got no URL to read or measure. Pass the URL of the data, or "
            "leave out these options."
        )


def _measured(url: str, place: dict[str, Any], known: KnownData) -> KnownData:
    """Add the measured rates of this machine's disk, of decoding and of the URL's store."""
    from penstock.pipeline.bench import Workload, probe, recipe_named

    workload = Workload(url=url, recipe=recipe_named("auto"), device="cpu", seconds=10.0, **place)
    with MeasuringBar("plan") as bar:
        bar("measuring this machine's disk, decoding and the store")
        found = probe(workload)
    return replace(
        known,
        cpu_s_per_1000=found.cpu_s_per_1000,
        nvme_bytes_per_s=found.disk_bytes_per_s,
        store_bytes_per_s=found.store_bytes_per_s,
        store_latency_s=found.store_latency_s,
    )


def _known(url: str, place: dict[str, Any]) -> KnownData:
    """Return the facts of the index of a URL."""
    from penstock.pipeline.cli.plan_inputs import KnownData
    from penstock.readers import Dataset
    from penstock.readers.origin import local_path

    try:
        with Dataset(url, allow_left_out=1, **place) as dataset:
            dataset.open()
            contents = dataset.contents
    except (DatasetNotFoundError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from error
    return KnownData(
        samples=contents.samples,
        total_bytes=int(contents.shard_bytes.sum()),
        shards=len(contents.sizes),
        shuffled=contents.shuffled,
        icc=contents.icc,
        is_local=local_path(url) is not None,
    )


def _report(
    options: SizingOptions,
    known: KnownData | None,
    *,
    au: float | None,
    simulated: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    from penstock.pipeline.cli.plan_inputs import setup_of
    from penstock.pipeline.cli.plan_report import plan_values, show_plan
    from penstock.pipeline.plan.sizing import forecast, unmet_utilisation

    if au is not None and not 0 < au <= 100:
        raise ConfigError(f"--au: got {au:g}, wanted a percentage above 0 and up to 100.")
    setup, notes = setup_of(options, known)
    found = forecast(setup)
    walked = _walked(setup) if simulated else ()
    if as_json:
        typer.echo(json.dumps(plan_values(found, notes.found, walked)))
    else:
        show_plan(found, notes.found, Console(), walked)
    if plot is not None:
        from penstock.pipeline.cli.plan_report import plot_plan

        plot_plan(setup, plot, title=_title(options, found))
        Console(stderr=as_json).print("Picture:", str(plot), markup=False, soft_wrap=True)
    if au is not None and (words := unmet_utilisation(found, au=au)):
        raise ConfigError(words)


def _walked(setup: ClusterSetup) -> list[SimulatedEpoch]:
    """Simulate two epochs of the real order. Raises ConfigError if that would take minutes."""
    from penstock.pipeline.plan.sizing import simulate

    if setup.job.reshuffle:
        raise ConfigError(
            f"--simulate: got --reshuffle {setup.job.reshuffle:g}, but the simulation has no "
            "reshuffling. Leave out one of them; the formulas include it."
        )
    pairs = setup.steps * setup.job.nodes
    if pairs > _MOST_PAIRS or setup.data.samples > _MOST_SAMPLES:
        raise ConfigError(
            f"--simulate: got {pairs:,} steps times nodes and {setup.data.samples:,} samples, "
            f"wanted at most {_MOST_PAIRS:,} and {_MOST_SAMPLES:,}, because a simulation takes "
            "minutes or too much memory beyond. Reduce --samples and --nvme in proportion."
        )
    return simulate(setup)


def _title(options: SizingOptions, found: Forecast) -> str:
    data, job, node = found.setup.data, found.setup.job, found.setup.node
    store = found.setup.store
    behind = f", store {format_size(store.bytes_per_s)}/s" if store is not None else ""
    return (
        f"{options.model or f'{job.samples_per_s:g} samples/s a GPU'}: {data.samples:,} samples of "
        f"{format_size(data.sample_bytes)}, {job.global_batch // job.ranks} a GPU\n"
        f"a node: {job.gpus} GPUs, {format_size(node.nvme_bytes)} of NVMe at "
        f"{format_size(node.nvme_bytes_per_s)}/s, {node.nic_bytes_per_s * 8 / 1e9:g} Gb/s, "
        f"{node.cores:g} cores{behind}"
    )
