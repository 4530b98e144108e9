"""Build a sizing's setup from the options of `penstock plan`, and record each figure's origin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from penstock.cache import ConfigError
from penstock.cache.base import format_size, parse_rate, parse_size
from penstock.pipeline.bench import ACCELERATORS, MachineProbe, accelerator
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
    from penstock.pipeline.cli.plan_options import SizingOptions

T = TypeVar("T")

Assumptions = dict[str, dict[str, str]]
"""The figures that a plan assumes, by name: the "value" for people, and "from" where it is."""

DEFAULT_BATCH = 256
DEFAULT_STORE_BANDWIDTH = "10GB/s"
DECODING, DECODED_ELSEWHERE = "CPU-s to decode 1,000", "default: decoded on the GPU, if at all"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownData:
    """The facts of a URL's index, and what `--measure` measured; None for what is unknown."""

    samples: int | None = None
    sample_bytes: float | None = None
    shards: int | None = None
    shuffled: bool = True
    icc: float | None = None
    is_local: bool = False
    machine: MachineProbe = field(default_factory=MachineProbe)


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


def setup_of(
    options: SizingOptions, known: KnownData, given: frozenset[str]
) -> tuple[ClusterSetup, Assumptions]:
    """Build the setup from the options. given: the names of those that were passed. Raises
    ConfigError."""
    figures = _Figures(options, known, given)
    return figures.setup(), figures.notes


class _Figures:
    """Choose each figure of a setup (the given one, else the known, else the default), and note
    it."""

    def __init__(self, options: SizingOptions, known: KnownData, given: frozenset[str]) -> None:
        self._options, self._known, self._given = options, known, given
        self._model = _model(options)
        self.notes: Assumptions = {}

    def setup(self) -> ClusterSetup:
        """Return the setup. Raises ConfigError."""
        data = self._data()
        job = self._job(data.samples)
        of_a_store = any(name.startswith("store_") for name in self._given)
        is_local = self._options.local
        if is_local is None:
            is_local = self._known.is_local and not of_a_store
        store = None if is_local else self._store()
        if is_local:
            origin = self._origin("local", "local URL")
            self._note("store", "none: each node has the data", origin)
        left_out = "label correlation, decoded chunks, other jobs on the cache, indexes, start-up "
        self._note("not counted", f"{left_out}of processes", "docs/sizing.md")
        return ClusterSetup(data=data, node=self._node(), store=store, job=job)

    def _note(self, name: str, value: str, origin: str) -> None:
        self.notes[name] = {"value": value, "from": origin}

    def _origin(self, option: str, otherwise: str = "default") -> str:
        return "given" if option in self._given else otherwise

    def _note_option(self, name: str, value: str, option: str) -> None:
        self._note(name, value, self._origin(option))

    def _data(self) -> DataFigures:
        options, known, model = self._options, self._known, self._model
        samples, origin = _first(
            (options.samples, "given"),
            (known.samples, "index"),
            ((model.samples or None) if model else None, "published dataset"),
        )
        if samples is None:
            raise ConfigError(
                "The number of samples is unknown: pass a URL or --samples"
                + (f" ({model.name} has no published size)." if model else ".")
            )
        check_count("--samples", samples)
        self._note("samples", f"{samples:,}", origin)
        size = None
        if options.sample_bytes is not None:
            size = float(parse_size(options.sample_bytes, what="--sample-bytes"))
        size, origin = _first(
            (size, "given"),
            (known.sample_bytes, "index"),
            (float(model.sample_bytes), f"mean of {model.name}") if model else (None, ""),
        )
        if size is None:
            raise ConfigError(
                "The size of a sample is unknown: pass a URL, --sample-bytes or --model."
            )
        self._note("sample bytes", format_size(size), origin)
        self._note_option("spread of sample sizes", f"{options.spread:g}", "spread")
        shards, origin = known.shards, "index"
        if options.shard_bytes is not None:
            shard_bytes = parse_size(options.shard_bytes, what="--shard-bytes")
            shards, origin = -(-samples // max(1, int(shard_bytes // size))), "given"
        if shards is None:
            self._note("shards", "sized for the job", "chosen")
        else:
            self._note("shards", f"{shards:,}", origin)
        return DataFigures(
            samples=samples,
            sample_bytes=size,
            spread=options.spread,
            shards=shards,
            shuffled=known.shuffled,
            icc=known.icc,
        )

    def _job(self, samples: int) -> JobFigures:
        options, model = self._options, self._model
        check_count("--nodes", options.nodes)
        check_count("--gpus", options.gpus)
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
        self._note("nodes", f"{options.nodes:,} of {options.gpus} GPUs", "given")
        self._note("global batch", f"{size:,}", self._origin("global_batch", origin))
        rate, origin = _first(
            (model.samples_per_s, f"published, {model.name}") if model else (None, ""),
            (options.samples_per_s, "given"),
        )
        assert rate is not None
        check_figure("--samples-per-s", rate)
        self._note("samples/s of a GPU", f"{rate:,.4g}", origin)
        cpu, origin = _first(
            (options.cpu_s_per_1000, "given"),
            (self._known.machine.cpu_s_per_1000, "measured here, on the CPU"),
            (0.0, "published: arrays" if model and not model.has_images else DECODED_ELSEWHERE),
        )
        assert cpu is not None
        self._note(DECODING, f"{cpu:g}", origin)
        self._note_option("epochs", str(options.epochs), "epochs")
        self._note_option("peers", "yes" if options.peers else "no", "peers")
        if options.peers:
            protocol = "TLS, except on loopback" if options.tls else "plain HTTP"
            self._note_option("between peers", protocol, "tls")
        elif "tls" in self._given:
            wrong = "--tls" if options.tls else "--no-tls"
            raise ConfigError(
                f"{wrong}: got no --peers, whose encryption it sets. Pass --peers, too, or leave "
                f"out {wrong}."
            )
        caches = "empty" if options.moved is None else f"filled, {options.moved:.0%} on other nodes"
        self._note_option("caches at the start", caches, "moved")
        self._note_option("reshuffle", f"{options.reshuffle:g}", "reshuffle")
        return JobFigures(
            nodes=options.nodes,
            gpus=options.gpus,
            global_batch=size,
            samples_per_s=rate,
            epochs=options.epochs,
            cpu_s_per_1000=cpu,
            peers=options.peers,
            tls=options.peers and options.tls,
            moved=options.moved,
            reshuffle=options.reshuffle,
        )

    def _node(self) -> NodeFigures:
        options = self._options
        disk, origin = self._rate("nvme_bandwidth", self._known.machine.disk_bytes_per_s)
        room = 0 if options.nvme.strip() == "0" else parse_size(options.nvme, what="--nvme")
        ram = parse_size(options.ram, what="--ram")
        nic = parse_rate(options.nic, what="--nic")
        check_figure("--cores", options.cores)
        self._note_option("cores of a node", f"{options.cores:g}", "cores")
        self._note_option("RAM of a node", format_size(ram), "ram")
        self._note_option("NVMe of a node", format_size(room), "nvme")
        self._note("NVMe bandwidth", f"{format_size(disk)}/s", origin)
        self._note_option("NIC of a node", f"{nic * 8 / 1e9:g} Gb/s each way", "nic")
        return NodeFigures(
            cores=options.cores,
            ram_bytes=ram,
            nvme_bytes=room,
            nvme_bytes_per_s=disk,
            nic_bytes_per_s=nic,
        )

    def _store(self) -> StoreFigures:
        options, measured_s = self._options, self._known.machine.store_latency_s
        bandwidth, origin = self._rate("store_bandwidth", self._known.machine.store_bytes_per_s)
        stream, stream_origin = self._rate("stream_bandwidth", None)
        check_figure("--store-latency", options.store_latency, may_be_zero=True, unit=" ms")
        latency_s, latency_origin = options.store_latency / 1000, self._origin("store_latency")
        if measured_s is not None and latency_origin == "default":
            latency_s, latency_origin = measured_s, "measured here"
        requests, price = options.store_requests_per_s, options.price
        self._note("store bandwidth, all nodes", f"{format_size(bandwidth)}/s", origin)
        self._note("store latency", f"{1000 * latency_s:.3g} ms", latency_origin)
        self._note("one connection", f"{format_size(stream)}/s", stream_origin)
        self._note_option("store requests/s", f"{requests:,.0f}", "store_requests_per_s")
        if price is not None:
            self._note("price of 1,000 requests", f"{price:g}", "given")
        hedged = "default: hedged past the 97th percentile"
        self._note("slowest request over mean", "4", hedged)
        return StoreFigures(
            bytes_per_s=bandwidth,
            latency_s=latency_s,
            stream_bytes_per_s=stream,
            requests_per_s=requests,
            price_per_1000=price,
        )

    def _rate(self, name: str, measured: float | None) -> tuple[float, str]:
        """Return bytes a second, and their origin: the given rate, else the measured, else the
        default."""
        given: str | None = getattr(self._options, name)
        if measured is not None and name not in self._given:
            return measured, "measured here, by one process"
        option = f"--{name.replace('_', '-')}"
        return parse_rate(given or DEFAULT_STORE_BANDWIDTH, what=option), self._origin(name)


def _model(options: SizingOptions) -> Accelerator | None:
    if (options.model is None) == (options.samples_per_s is None):
        both = options.model is not None
        raise ConfigError(
            f"Got {'both of' if both else 'neither of'} --model and --samples-per-s, wanted one of "
            "them: the rate of a GPU that never waits, such as --model h100-resnet50 or "
            "--samples-per-s 1800."
        )
    return None if options.model is None else model_named(options.model)


def _first(*found: tuple[T | None, str]) -> tuple[T | None, str]:
    """Return the first known value and its origin."""
    return next(((value, origin) for value, origin in found if value is not None), (None, ""))
