"""The options of `penstock plan`, as types; typer reads them at run time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

DATA, JOB, NODE, STORE, OUT = "The data", "The job", "A node", "The store", "What comes out"

_PLAIN = re.compile(r"[0-9]+([,_]?[0-9]{3})*")
_POWER = re.compile(r"[0-9]+(\.[0-9]+)?[eE]\+?[0-9]{1,2}")


def parse_count(told: str | int) -> int:
    """A whole number as people write it: 1281167, 1,281,167, 1_281_167 or 1e9."""
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
    str,
    typer.Option(help="Of one connection, as object stores give it.", rich_help_panel=STORE),
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
