"""Build a sizing's setup from the options of `penstock plan`, and record each figure's origin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache import ConfigError
from penstock.cache.base import format_size, parse_rate, parse_size
from penstock.pipeline.bench import ACCELERATORS, accelerator
from penstock.pipeline.plan.sizing import (
    ClusterSetup,
    DataFigures,
    JobFigures,
    NodeFigures,
    StoreFigures,
    check_count,
    check_figure,
)

if TYPE_CHECKING:
    from penstock.pipeline.bench import Accelerator

T = TypeVar("T")

DEFAULT_BATCH = 256
DEFAULT_STORE_BANDWIDTH = "10GB/s"
DECODING, DECODED_ELSEWHERE = "CPU-s to decode 1,000", "default: decoded on the GPU, if at all"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownData:
    """The facts of a URL's index. cpu_s_per_1000 and the rates: None unless they were measured."""

    samples: int
    total_bytes: int
    shards: int
    shuffled: bool
    icc: float | None
    is_local: bool
    cpu_s_per_1000: float | None = None
    nvme_bytes_per_s: float | None = None
    store_bytes_per_s: float | None = None
    store_latency_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingOptions:
    """The options of the command. given: the names of those that were passed."""

    samples: int | None
    sample_bytes: str | None
    spread: float
    shard_bytes: str | None
    model: str | None
    samples_per_s: float | None
    nodes: int
    gpus: int
    batch: int | None
    global_batch: int | None
    epochs: int
    cpu_s_per_1000: float | None
    peers: bool
    tls: bool
    moved: float | None
    reshuffle: float
    cores: float
    ram: str
    nvme: str
    nvme_bandwidth: str
    nic: str
    store_bandwidth: str | None
    store_latency: float
    stream_bandwidth: str
    store_requests_per_s: float
    price: float | None
    local: bool | None
    given: frozenset[str]


@dataclass(slots=True)
class Assumptions:
    """The figures that a plan assumes: for each its value, for people, and its origin."""

    found: dict[str, dict[str, str]] = field(default_factory=dict)

    def note(self, name: str, value: str, origin: str) -> None:
        """Record a figure."""
        self.found[name] = {"value": value, "from": origin}


def model_named(name: str) -> Accelerator:
    """Return the accelerator of that name, or the newest one for which a model was published.
    Raises ConfigError."""
    alone = [one for known, one in ACCELERATORS.items() if known.split("-", 1)[-1] == name]
    newest = {"b200": 2, "h100": 1}
    if name not in ACCELERATORS and alone:
        return max(alone, key=lambda one: newest.get(one.name.split("-")[0], 0))
    try:
        return accelerator(name)
    except ConfigError:
        models = sorted({known.split("-", 1)[-1] for known in ACCELERATORS if known != "dgx-pod"})
        raise ConfigError(
            f"--model: got {name!r}, wanted one of {', '.join(ACCELERATORS)}, or a model alone: "
            f"{', '.join(models)}. Or pass --samples-per-s."
        ) from None


def setup_of(options: SizingOptions, known: KnownData | None) -> tuple[ClusterSetup, Assumptions]:
    """Build the setup from the options. known: the URL's facts. Raises ConfigError."""
    notes = Assumptions()
    model = _model(options)
    data = _data(options, known, model, notes)
    job = _job(options, known, model, data.samples, notes)
    is_local = _is_local(options, known)
    store = None if is_local else _store(options, known, notes)
    if is_local:
        notes.note("store", "none: each node has the data", _origin(options, "local", "local URL"))
    left_out = (
        "label correlation, decoded chunks, other jobs on the cache, indexes, start-up of processes"
    )
    notes.note("not counted", left_out, "docs/sizing.md")
    return ClusterSetup(data=data, node=_node(options, known, notes), store=store, job=job), notes


def _model(options: SizingOptions) -> Accelerator | None:
    if (options.model is None) == (options.samples_per_s is None):
        both = options.model is not None
        raise ConfigError(
            f"Got {'both of' if both else 'neither of'} --model and --samples-per-s, wanted one of "
            "them: the rate of a GPU that never waits, such as --model h100-resnet50 or "
            "--samples-per-s 1800."
        )
    return None if options.model is None else model_named(options.model)


def _data(
    options: SizingOptions, known: KnownData | None, model: Accelerator | None, notes: Assumptions
) -> DataFigures:
    samples, origin = _first(
        (options.samples, "given"),
        (known.samples if known else None, "index"),
        ((model.samples or None) if model else None, "published dataset"),
    )
    if samples is None:
        raise ConfigError(
            "The number of samples is unknown: pass a URL or --samples"
            + (f" ({model.name} has no published size)." if model else ".")
        )
    check_count("--samples", samples)
    notes.note("samples", f"{samples:,}", origin)
    size = None
    if options.sample_bytes is not None:
        size = float(parse_size(options.sample_bytes, what="--sample-bytes"))
    size, origin = _first(
        (size, "given"),
        (known.total_bytes / known.samples if known else None, "index"),
        (float(model.sample_bytes) if model else None, f"mean of {model.name}" if model else ""),
    )
    if size is None:
        raise ConfigError("The size of a sample is unknown: pass a URL, --sample-bytes or --model.")
    notes.note("sample bytes", format_size(size), origin)
    notes.note("spread of sample sizes", f"{options.spread:g}", _origin(options, "spread"))
    shards = known.shards if known is not None else None
    if options.shard_bytes is not None:
        shard_bytes = parse_size(options.shard_bytes, what="--shard-bytes")
        shards = -(-samples // max(1, int(shard_bytes // size)))
    notes.note(
        "shards",
        "sized for the job" if shards is None else f"{shards:,}",
        "chosen" if shards is None else "given" if options.shard_bytes else "index",
    )
    return DataFigures(
        samples=samples,
        sample_bytes=size,
        spread=options.spread,
        shards=shards,
        shuffled=known.shuffled if known is not None else True,
        icc=known.icc if known is not None else None,
    )


def _job(
    options: SizingOptions,
    known: KnownData | None,
    model: Accelerator | None,
    samples: int,
    notes: Assumptions,
) -> JobFigures:
    for name, value in (("--nodes", options.nodes), ("--gpus", options.gpus)):
        check_count(name, value)
    ranks = options.nodes * options.gpus
    if options.batch is not None and options.global_batch is not None:
        raise ConfigError("Got --batch and --global-batch-size, wanted one of them.")
    batch, origin = _first(
        (options.batch, "given"),
        (model.batch_size if model else None, "published"),
        (max(1, min(DEFAULT_BATCH, samples // ranks)), "default: 256 per GPU, or all samples"),
    )
    assert batch is not None
    check_count("--batch", batch)
    size = batch * ranks if options.global_batch is None else options.global_batch
    notes.note("nodes", f"{options.nodes:,} of {options.gpus} GPUs", "given")
    notes.note("global batch", f"{size:,}", origin if options.global_batch is None else "given")
    rate = model.samples_per_s if model is not None else options.samples_per_s
    assert rate is not None
    check_figure("--samples-per-s", rate)
    origin = f"published, {model.name}" if model is not None else "given"
    notes.note("samples/s of a GPU", f"{rate:,.4g}", origin)
    cpu, origin = _first(
        (options.cpu_s_per_1000, "given"),
        (known.cpu_s_per_1000 if known else None, "measured here, on the CPU"),
        (0.0, "published: arrays" if model and not model.has_images else DECODED_ELSEWHERE),
    )
    assert cpu is not None
    notes.note(DECODING, f"{cpu:g}", origin)
    notes.note("epochs", str(options.epochs), _origin(options, "epochs"))
    notes.note("peers", "yes" if options.peers else "no", _origin(options, "peers"))
    is_encrypted = _is_encrypted(options)
    if options.peers:
        protocol = "TLS, except on loopback" if is_encrypted else "plain HTTP"
        notes.note("between peers", protocol, _origin(options, "tls"))
    caches = "empty" if options.moved is None else f"filled, {options.moved:.0%} on other nodes"
    notes.note("caches at the start", caches, _origin(options, "moved"))
    notes.note("reshuffle", f"{options.reshuffle:g}", _origin(options, "reshuffle"))
    return JobFigures(
        nodes=options.nodes,
        gpus=options.gpus,
        global_batch=size,
        samples_per_s=rate,
        epochs=options.epochs,
        cpu_s_per_1000=cpu,
        peers=options.peers,
        tls=is_encrypted,
        moved=options.moved,
        reshuffle=options.reshuffle,
    )


def _is_encrypted(options: SizingOptions) -> bool:
    """Return True if peers encrypt. Raises ConfigError for --tls or --no-tls without --peers."""
    if "tls" in options.given and not options.peers:
        wrong = "--tls" if options.tls else "--no-tls"
        raise ConfigError(
            f"{wrong}: got no --peers, whose encryption it sets. Pass --peers, too, or leave out "
            f"{wrong}."
        )
    return options.peers and options.tls


def _node(options: SizingOptions, known: KnownData | None, notes: Assumptions) -> NodeFigures:
    disk, origin = _rate(
        options, "nvme_bandwidth", known.nvme_bytes_per_s if known is not None else None
    )
    room = 0 if options.nvme.strip() == "0" else parse_size(options.nvme, what="--nvme")
    ram = parse_size(options.ram, what="--ram")
    nic = parse_rate(options.nic, what="--nic")
    check_figure("--cores", options.cores)
    notes.note("cores of a node", f"{options.cores:g}", _origin(options, "cores"))
    notes.note("RAM of a node", format_size(ram), _origin(options, "ram"))
    notes.note("NVMe of a node", format_size(room), _origin(options, "nvme"))
    notes.note("NVMe bandwidth", f"{format_size(disk)}/s", origin)
    notes.note("NIC of a node", f"{nic * 8 / 1e9:g} Gb/s each way", _origin(options, "nic"))
    return NodeFigures(
        cores=options.cores,
        ram_bytes=ram,
        nvme_bytes=room,
        nvme_bytes_per_s=disk,
        nic_bytes_per_s=nic,
    )


def _store(options: SizingOptions, known: KnownData | None, notes: Assumptions) -> StoreFigures:
    measured = known.store_bytes_per_s if known is not None else None
    bandwidth, origin = _rate(options, "store_bandwidth", measured)
    stream, stream_origin = _rate(options, "stream_bandwidth", None)
    check_figure("--store-latency", options.store_latency, may_be_zero=True, unit=" ms")
    latency, latency_origin = options.store_latency / 1000, _origin(options, "store_latency")
    if known is not None and known.store_latency_s is not None and latency_origin == "default":
        latency, latency_origin = known.store_latency_s, "measured here"
    requests, price = options.store_requests_per_s, options.price
    notes.note("store bandwidth, all nodes", f"{format_size(bandwidth)}/s", origin)
    notes.note("store latency", f"{1000 * latency:.3g} ms", latency_origin)
    notes.note("one connection", f"{format_size(stream)}/s", stream_origin)
    notes.note("store requests/s", f"{requests:,.0f}", _origin(options, "store_requests_per_s"))
    if price is not None:
        notes.note("price of 1,000 requests", f"{price:g}", "given")
    notes.note("slowest request over mean", "4", "default: hedged past the 97th percentile")
    return StoreFigures(
        bytes_per_s=bandwidth,
        latency_s=latency,
        stream_bytes_per_s=stream,
        requests_per_s=requests,
        price_per_1000=price,
    )


def _is_local(options: SizingOptions, known: KnownData | None) -> bool:
    if options.local is not None:
        return options.local
    of_a_store = any(name.startswith("store_") for name in options.given)
    return known is not None and known.is_local and not of_a_store


def _rate(options: SizingOptions, name: str, measured: float | None) -> tuple[float, str]:
    """Return bytes a second, and their origin: the given rate, else the measured, else the
    default."""
    given: Any = getattr(options, name)
    if measured is not None and name not in options.given:
        return measured, "measured here, by one process"
    option = f"--{name.replace('_', '-')}"
    return parse_rate(given or DEFAULT_STORE_BANDWIDTH, what=option), _origin(options, name)


def _origin(options: SizingOptions, name: str, otherwise: str = "default") -> str:
    return "given" if name in options.given else otherwise


def _first(*found: tuple[T | None, str]) -> tuple[T | None, str]:
    """Return the first known value and its origin."""
    return next(((value, origin) for value, origin in found if value is not None), (None, ""))
