"""Build a sizing's setup from the options of `penstock plan`, and record each figure's origin."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cache import ConfigError
from penstock.cache.base import format_size, parse_rate, parse_size
from penstock.pipeline.bench import ACCELERATORS, Accelerator, accelerator
from penstock.pipeline.plan.sizing import TAIL, ClusterSetup, check_count, check_figure

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.pipeline.cli.plan_options import SizingOptions

Assumptions = dict[str, dict[str, str]]
"""The figures that a plan assumes, by name: the "value" for people, and "from" where it is."""

KnownFigures = dict[str, tuple[Any, str]]
"""Figures that are known without an option, by their field of `ClusterSetup`, each with where it is
from: the index of a URL, a measurement or a published model."""

DEFAULT_BATCH = 256
DECODING, DECODED_ELSEWHERE = "CPU-s to decode 1,000", "default: decoded on the GPU, if at all"


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


class _Figure(NamedTuple):
    """How a figure of a setup is given and shown.

    name: among the assumptions. text: returns its text there. parse: returns the figure from the
    value of the option, whose name is `what`. option: by default as the field of the setup.
    """

    name: str
    text: Callable[[Any], str]
    parse: Callable[..., float] | None = None
    option: str | None = None


def _rate_text(bytes_per_s: float) -> str:
    return f"{format_size(bytes_per_s)}/s"


def _filled_text(share: float | None) -> str:
    return "empty" if share is None else f"filled, {share:.0%} on other nodes"


_FIGURES = {
    "samples": _Figure("samples", "{:,}".format),
    "sample_bytes": _Figure("sample bytes", format_size, parse_size),
    "spread": _Figure("spread of sample sizes", "{:g}".format),
    "samples_per_s": _Figure("samples/s of a GPU", "{:,.4g}".format),
    "cpu_s_per_1000": _Figure(DECODING, "{:g}".format),
    "epochs": _Figure("epochs", str),
    "peers": _Figure("peers", lambda asked: "yes" if asked else "no"),
    "tls": _Figure("between peers", lambda tls: "TLS, except on loopback" if tls else "plain HTTP"),
    "moved": _Figure("caches at the start", _filled_text),
    "reshuffle": _Figure("reshuffle", "{:g}".format),
    "cores": _Figure("cores of a node", "{:g}".format),
    "ram_bytes": _Figure("RAM of a node", format_size, parse_size, "ram"),
    "nvme_bytes": _Figure("NVMe of a node", format_size, partial(parse_size, least=0), "nvme"),
    "nvme_bytes_per_s": _Figure("NVMe bandwidth", _rate_text, parse_rate, "nvme_bandwidth"),
    "nic_bytes_per_s": _Figure(
        "NIC of a node", lambda rate: f"{rate * 8 / 1e9:g} Gb/s each way", parse_rate, "nic"
    ),
}
_STORE = {
    "store_bytes_per_s": _Figure(
        "store bandwidth, all nodes", _rate_text, parse_rate, "store_bandwidth"
    ),
    "store_latency_s": _Figure(
        "store latency", lambda s: f"{1e3 * s:.3g} ms", lambda ms, **_: ms / 1e3, "store_latency"
    ),
    "stream_bytes_per_s": _Figure("one connection", _rate_text, parse_rate, "stream_bandwidth"),
    "store_requests_per_s": _Figure("store requests/s", "{:,.0f}".format),
    "price_per_1000": _Figure("price of 1,000 requests", "{:g}".format, option="price"),
}


class SetupChoice:
    """Chooses each figure of a setup (the given one, else the known, else the default), and notes
    it. given: the names of the options that were passed. Raises ConfigError."""

    def __init__(self, options: SizingOptions, known: KnownFigures, given: frozenset[str]) -> None:
        self._options, self._given, self._model = options, given, _model(options)
        self._known = _published(self._model) | known
        self.notes: Assumptions = {}

    def setup(self) -> ClusterSetup:
        """Return the setup. Raises ConfigError."""
        options, known = self._options, self._known
        if "tls" in self._given and not options.peers:
            wrong = "--tls" if options.tls else "--no-tls"
            raise ConfigError(
                f"{wrong}: got no --peers, whose encryption it sets. Pass --peers, too, or leave "
                f"out {wrong}."
            )
        values = {
            name: self._take(name, it, notes=name != "tls" or options.peers)
            for name, it in _FIGURES.items()
        }
        values["tls"] &= options.peers
        samples, size = values["samples"], values["sample_bytes"]
        if samples is None:
            published = f" ({self._model.name} has no published size)" if self._model else ""
            raise ConfigError(
                f"The number of samples is unknown: pass a URL or --samples{published}."
            )
        if size is None:
            raise ConfigError(
                "The size of a sample is unknown: pass a URL, --sample-bytes or --model."
            )
        shards, origin = known.get("shards", (None, "chosen"))
        if options.shard_bytes is not None:
            shard_bytes = parse_size(options.shard_bytes, what="--shard-bytes")
            shards, origin = -(-samples // max(1, int(shard_bytes // size))), "given"
        self._note("shards", "sized for the job" if shards is None else f"{shards:,}", origin)
        global_batch = self._global_batch(samples)
        is_local, origin = options.local, "given"
        if is_local is None:
            of_a_store = any(name.startswith("store_") for name in self._given)
            is_local, origin = known.get("is_local", (False, ""))
            is_local = is_local and not of_a_store
        values |= {
            name: self._take(name, each, notes=not is_local) for name, each in _STORE.items()
        }
        if is_local:
            self._note("store", "none: each node has the data", origin)
        else:
            hedged = "default: hedged past the 97th percentile"
            self._note("slowest request over mean", f"{TAIL:g}", hedged)
        left_out = "label correlation, decoded chunks, other jobs on the cache, indexes, start-up "
        self._note("not counted", f"{left_out}of processes", "docs/howto/sizes.md")
        return ClusterSetup(
            **values,
            shards=shards,
            shuffled=known.get("shuffled", (True, ""))[0],
            icc=known.get("icc", (None, ""))[0],
            nodes=options.nodes,
            gpus=options.gpus,
            global_batch=global_batch,
            is_local=is_local,
        )

    def _global_batch(self, samples: int) -> int:
        options = self._options
        check_count("--nodes", options.nodes)
        check_count("--gpus", options.gpus)
        ranks = options.nodes * options.gpus
        if options.batch is not None and options.global_batch is not None:
            raise ConfigError("Got --batch and --global-batch-size, wanted one of them.")
        each = max(1, min(DEFAULT_BATCH, samples // ranks))
        batch, origin = self._known.get("batch", (each, "default: 256 per GPU, or all samples"))
        if options.batch is not None:
            batch, origin = options.batch, "given"
        check_count("--batch", batch)
        size: int = batch * ranks
        if options.global_batch is not None:
            size, origin = options.global_batch, "given"
        self._note("nodes", f"{options.nodes:,} of {options.gpus} GPUs", "given")
        self._note("global batch", f"{size:,}", origin)
        return size

    def _take(self, field: str, figure: _Figure, *, notes: bool = True) -> Any:
        """Return a figure of the setup; None if it isn't known."""
        option = figure.option or field
        value, origin = self._known.get(field, (None, "default"))
        if option in self._given or field not in self._known:
            what = f"--{option.replace('_', '-')}"
            value = getattr(self._options, option)
            if isinstance(value, float):
                check_figure(what, value, may_be_zero=True)
            if figure.parse is not None and value is not None:
                value = figure.parse(value, what=what)
            origin = "given" if option in self._given else "default"
        if notes and (value is not None or field == "moved"):
            self._note(figure.name, figure.text(value), origin)
        return value

    def _note(self, name: str, value: str, origin: str) -> None:
        self.notes[name] = {"value": value, "from": origin}


def _published(model: Accelerator | None) -> KnownFigures:
    """Return the figures that were published of a model, and that nothing is decoded by default."""
    known: KnownFigures = {"cpu_s_per_1000": (0.0, DECODED_ELSEWHERE)}
    if model is not None:
        known["sample_bytes"] = float(model.sample_bytes), f"mean of {model.name}"
        known["batch"] = model.batch_size, "published"
        known["samples_per_s"] = model.samples_per_s, f"published, {model.name}"
        if model.samples:
            known["samples"] = model.samples, "published dataset"
        if not model.has_images:
            known["cpu_s_per_1000"] = 0.0, "published: arrays"
    return known


def _model(options: SizingOptions) -> Accelerator | None:
    if (options.model is None) == (options.samples_per_s is None):
        both = options.model is not None
        raise ConfigError(
            f"Got {'both of' if both else 'neither of'} --model and --samples-per-s, wanted one of "
            "them: the rate of a GPU that never waits, such as --model h100-resnet50 or "
            "--samples-per-s 1800."
        )
    return None if options.model is None else model_named(options.model)
