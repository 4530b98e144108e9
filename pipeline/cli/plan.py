"""`penstock plan`: thin over `pipeline.plan.sizing`."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from penstock.cache.base.sizes import format_size
from penstock.cache.errors import ConfigError, DatasetNotFoundError
from penstock.pipeline.cli.options import (
    CacheFolder,
    Format,
    IndexFolder,
    Json,
    StorageOption,
    parse_storage_options,
)
from penstock.pipeline.cli.plan_options import (
    Batch,
    Cores,
    CpuPer1000,
    EncryptedPeers,
    Epochs,
    GlobalBatch,
    Gpus,
    Local,
    Measure,
    ModelName,
    Moved,
    Nic,
    Nodes,
    Nvme,
    NvmeBandwidth,
    PlannedUrl,
    PlanPlot,
    Price,
    Ram,
    Reshuffle,
    SampleBytes,
    Samples,
    SamplesPerS,
    ShardSize,
    Simulate,
    Spread,
    StoreBandwidth,
    StoreLatency,
    StoreRequests,
    StreamBandwidth,
    WantedAu,
    WithPeers,
    given_options,
)
from penstock.pipeline.cli.progress import MeasuringBar

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.pipeline.cli.plan_inputs import KnownData, PlanOptions
    from penstock.pipeline.plan.sizing.forecast import Forecast
    from penstock.pipeline.plan.sizing.simulation import SimulatedEpoch
    from penstock.pipeline.plan.sizing.values import Setup

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
    from penstock.pipeline.cli.plan_inputs import PlanOptions

    options = PlanOptions(**{each.name: told[each.name] for each in fields(PlanOptions)})
    if told["plot"] is not None:
        from penstock.pipeline.bench.plot import check_plot

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
    """With what this machine's disk, decoding and the URL's store do."""
    from penstock.pipeline.bench.recipes import recipe_named
    from penstock.pipeline.bench.sizing_probe import probe
    from penstock.pipeline.bench.workload import Workload

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
    """What the index of a URL tells."""
    from penstock.pipeline.cli.plan_inputs import KnownData
    from penstock.readers import Dataset
    from penstock.readers.origin.urls import local_path

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
    options: PlanOptions,
    known: KnownData | None,
    *,
    au: float | None,
    simulated: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    from penstock.pipeline.cli.plan_inputs import setup_of
    from penstock.pipeline.cli.plan_report import plan_values, show_plan
    from penstock.pipeline.plan.sizing.changes import unmet_words
    from penstock.pipeline.plan.sizing.forecast import forecast

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


def _walked(setup: Setup) -> list[SimulatedEpoch]:
    """Two epochs of the real order. Raises ConfigError for one that would take minutes."""
    from penstock.pipeline.plan.sizing.simulation import simulate

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


def _title(options: PlanOptions, found: Forecast) -> str:
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
