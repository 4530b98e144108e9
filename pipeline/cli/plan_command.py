"""Run `penstock plan`: thin over `pipeline.plan.sizing`.

Its options stand here, as types that typer reads at run time.
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

DATA, JOB, NODE, STORE, OUT = "The data", "The job", "A node", "The store", "What comes out"

_PLAIN = re.compile(r"[0-9]+([,_]?[0-9]{3})*")
_POWER = re.compile(r"[0-9]+(\.[0-9]+)?[eE]\+?[0-9]{1,2}")


def parse_count(told: str | int) -> int:
    """Return an integer as people write it: 1281167, 1,281,167, 1_281_167 or 1e9."""
    text = str(told).strip()
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
    typer.Argument(help="The data, if they are there: a path or an fsspec URL. Else --samples."),
]
Samples = Annotated[
    int | None, _count("How many; by default the URL's or the model's published dataset's.", DATA)
]
SampleBytes = Annotated[
    str | None,
    typer.Option(
        help="Mean stored size of a sample, as \"115KB\"; by default the URL's or the model's.",
        rich_help_panel=DATA,
    ),
]
Spread = Annotated[
    float,
    typer.Option(help="Standard deviation of these sizes over their mean.", rich_help_panel=DATA),
]
ShardSize = Annotated[
    str | None,
    typer.Option(
        "--shard-bytes",
        help="Of a shard; by default the URL's, else what the job wants: 64MiB or less.",
        rich_help_panel=DATA,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        help="A model, or one on an accelerator: unet3d, retinanet, resnet50, cosmoflow, flux, "
        "dgx-pod, b200-unet3d, h100-resnet50, …: its samples/s, batch and sample size.",
        rich_help_panel=JOB,
    ),
]
SamplesPerS = Annotated[
    float | None,
    typer.Option(
        help="Instead of --model: samples a second that one GPU takes when it never waits.",
        rich_help_panel=JOB,
    ),
]
Nodes = Annotated[int, _count("Nodes of the job.", JOB)]
Gpus = Annotated[int, _count("GPUs of a node, a rank each.", JOB)]
Batch = Annotated[
    int | None, _count("Samples of a GPU's batch; by default the model's, else 256.", JOB)
]
GlobalBatch = Annotated[
    int | None, _count("Of all GPUs, instead of --batch.", JOB, "--global-batch-size")
]
Epochs = Annotated[int, _count("Epochs of the job.", JOB)]
CpuPer1000 = Annotated[
    float | None,
    typer.Option(
        "--cpu-s-per-1000",
        help="CPU seconds to decode and augment 1,000 samples, as `penstock bench` measures; 0, "
        "as by default, where the GPU decodes.",
        rich_help_panel=JOB,
    ),
]
WithPeers = Annotated[
    bool,
    typer.Option(
        "--peers/--no-peers",
        help="Nodes ask one another's caches before the store.",
        rich_help_panel=JOB,
    ),
]
EncryptedPeers = Annotated[
    bool,
    typer.Option(
        "--tls/--no-tls",
        help="With --peers: --no-tls where the network is declared private, so that nothing is "
        "encrypted.",
        rich_help_panel=JOB,
    ),
]
Moved = Annotated[
    float | None,
    typer.Option(
        help="The caches are filled, and this share of what a node reads lies on other nodes: 1/N "
        "after one of N was added, 0.5 after halving, 1 - 1/N for nodes dealt anew; 0 after "
        "`penstock warm`. Without: they are empty.",
        rich_help_panel=JOB,
    ),
]
Reshuffle = Annotated[
    float,
    typer.Option(
        help="The loader's reshuffle=: share of the shards that take another place in each epoch.",
        rich_help_panel=JOB,
    ),
]
Cores = Annotated[
    float, typer.Option(help="CPU cores; 128 as nodes of 8 GPUs have.", rich_help_panel=NODE)
]
Ram = Annotated[
    str,
    typer.Option(
        help="Memory, half of which the kernel may keep cached files in.", rich_help_panel=NODE
    ),
]
Nvme = Annotated[
    str,
    typer.Option(
        help="Room of the cache (DiskCache's max_bytes), 0 without one.", rich_help_panel=NODE
    ),
]
NvmeBandwidth = Annotated[
    str, typer.Option(help="Of its disk, read or written.", rich_help_panel=NODE)
]
Nic = Annotated[
    str,
    typer.Option(
        help='Network, each way: bits as "100Gb/s", or bytes as "12.5GB/s".', rich_help_panel=NODE
    ),
]
StoreBandwidth = Annotated[
    str | None,
    typer.Option(
        help="For all nodes together; by default 10GB/s, as a small shared file system gives.",
        rich_help_panel=STORE,
    ),
]
StoreLatency = Annotated[
    float,
    typer.Option(
        help="Milliseconds to a request's first byte; object stores take 10 to 100.",
        rich_help_panel=STORE,
    ),
]
StreamBandwidth = Annotated[
    str, typer.Option(help="Of one connection, as object stores give it.", rich_help_panel=STORE)
]
StoreRequests = Annotated[
    float,
    typer.Option(
        "--store-requests-per-s",
        help="Requests a second that it answers, all nodes: S3 names 5,500 a prefix.",
        rich_help_panel=STORE,
    ),
]
Price = Annotated[
    float | None,
    typer.Option("--price-per-1000-requests", help="In any currency.", rich_help_panel=STORE),
]
Local = Annotated[
    bool | None,
    typer.Option(
        "--local/--remote",
        help="Each node has the data on its own disk; by default so for a local URL without "
        "options of a store.",
        rich_help_panel=STORE,
    ),
]
WantedAu = Annotated[
    float | None,
    typer.Option(
        "--au",
        help="Accelerator utilisation to reach in per cent, in epochs after the first: exit code "
        "2 and the constraint where the plan can't.",
        rich_help_panel=OUT,
    ),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Probe this machine's disk (--cache, else the temporary folder), decoding on the CPU "
        "and the URL's store, for what isn't given; some seconds.",
        rich_help_panel=OUT,
    ),
]
Simulate = Annotated[
    bool,
    typer.Option(
        "--simulate",
        help="Walk two epochs of the real order beside the formulas; some seconds.",
        rich_help_panel=OUT,
    ),
]
PlanPlot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        help="Picture of AU against 1 to 1,024 nodes, as plan.png; needs matplotlib.",
        rich_help_panel=OUT,
    ),
]


def given_options(context: typer.Context) -> frozenset[str]:
    """Names of the options that were passed, defaults left out."""
    return frozenset(
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"
    )


# Of a walk: about 0.2 ms a step and node, and 4 bytes a sample and node.
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
    """Tell what a job's input side will do on given hardware, and what to buy or change first.

    It tells shard size, lanes, look-ahead, connections, what the cache keeps, epoch times and
    accelerator utilisation (AU: the share of the time in which GPUs compute), and what limits them.
    docs/sizing.md has the formulas and the units.
    """
    _plan(locals() | {"given": given_options(context)})


def _plan(told: dict[str, Any]) -> None:
    """told: the command's options, by the names of its parameters."""
    from penstock.pipeline.cli.plan_inputs import SizingOptions

    options = SizingOptions(**{each.name: told[each.name] for each in fields(SizingOptions)})
    if told["plot"] is not None:
        from penstock.pipeline.bench import check_plot

        check_plot(told["plot"])
    if told["url"] is None:
        _check_without_url(told)
    known = None
    if told["url"] is not None:
        place: dict[str, Any] = {
            "format": told["format"],
            "index": told["index_folder"],
            "cache": told["cache"],
            "storage_options": parse_storage_options(told["storage_option"]),
        }
        known = _known(told["url"], place)
        known = _measured(told["url"], place, known) if told["measure"] else known
    _report(
        options,
        known,
        au=told["au"],
        simulated=told["simulate"],
        plot=told["plot"],
        as_json=told["as_json"],
    )


_OF_A_URL = {
    "measure": "--measure",
    "format": "--format",
    "index_folder": "--index",
    "cache": "--cache",
    "storage_option": "-o",
}


def _check_without_url(told: dict[str, Any]) -> None:
    wrong = [option for name, option in _OF_A_URL.items() if name in told["given"]]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: got no URL, and "
            f"{'these say' if len(wrong) > 1 else 'this says'} how one is read or probed. Pass the "
            "URL of the data too, or leave out what is of a URL."
        )


def _measured(url: str, place: dict[str, Any], known: KnownData) -> KnownData:
    """Add the measured rates of this machine's disk, of decoding and of the URL's store."""
    from penstock.pipeline.bench import Workload, probe, recipe_named

    workload = Workload(url=url, recipe=recipe_named("auto"), device="cpu", seconds=10.0, **place)
    with MeasuringBar("plan") as bar:
        bar("this machine's disk, decoding and store")
        found = probe(workload)
    return replace(
        known,
        cpu_s_per_1000=found.cpu_s_per_1000,
        nvme_bytes_per_s=found.disk_bytes_per_s,
        store_bytes_per_s=found.store_bytes_per_s,
        store_latency_s=found.store_latency_s,
    )


def _known(url: str, place: dict[str, Any]) -> KnownData:
    """Return the facts that the index of a URL holds."""
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
    from penstock.pipeline.plan.sizing import forecast, unmet_words

    if au is not None and not 0 < au <= 100:
        raise ConfigError(f"--au: got {au:g}, wanted per cent: more than 0, at most 100.")
    setup, notes = setup_of(options, known)
    found = forecast(setup)
    walked = _walked(setup) if simulated else ()
    if as_json:
        typer.echo(json.dumps(plan_values(found, notes.found, walked)))
    else:
        show_plan(found, notes.found, Console(), walked)
    if plot is not None:
        from penstock.pipeline.cli.plan_chart import plot_plan

        plot_plan(setup, plot, title=_title(options, found))
        Console(stderr=as_json).print("Picture:", str(plot), markup=False, soft_wrap=True)
    if au is not None and (words := unmet_words(found, au=au)):
        raise ConfigError(words)


def _walked(setup: ClusterSetup) -> list[SimulatedEpoch]:
    """Simulate two epochs of the real order. Raises ConfigError if that would take minutes."""
    from penstock.pipeline.plan.sizing import simulate

    if setup.job.reshuffle:
        raise ConfigError(
            f"--simulate: got --reshuffle {setup.job.reshuffle:g}, and it walks orders that stay. "
            "Leave one of them out; the formulas have both."
        )
    pairs = setup.steps * setup.job.nodes
    if pairs > _MOST_PAIRS or setup.data.samples > _MOST_SAMPLES:
        raise ConfigError(
            f"--simulate: got {pairs:,} steps times nodes and {setup.data.samples:,} samples, "
            f"wanted {_MOST_PAIRS:,} and {_MOST_SAMPLES:,} at most: a walk of these takes minutes "
            "or memory. Fewer --samples with as much less --nvme show the same."
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
