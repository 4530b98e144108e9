"""Write docs/benchmarks.md and its charts from the kept results: `python -m benchmarks.page`.

Every figure of the page comes from a file in benchmarks/results, together with its date, machine
and versions. `benchmarks.compare` writes the page after a new comparison; a test fails if the page
and the results differ.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.pipeline.bench.adapters import ADAPTERS, TITLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Values = Mapping[str, Any]
    Rows = Iterable[tuple[str, ...]]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
CHARTS = ROOT / "docs" / "images"
OURS = "**Penstock**"
_OWN_VERSIONS = ("python", "penstock", "torch", "dali", "pillow", "numpy")

INTRODUCTION = """\
# Benchmarks

*For someone who decides whether Penstock is fast enough. You will see how it compares with other
loaders on each kind of data, how each figure was measured, and what nobody has measured yet.*

All figures come from machines with two CPU cores and no GPU. Ratios are more reliable than rates:
the loaders of a table took turns in one run on one machine, and a ratio is the median over the
rounds. In the columns “Penstock ÷ …”, a ratio above 1 means that Penstock is better. CPU-seconds
count all processes of a loader.
[Comparisons](explanation/comparisons.md) describes the method and how to run it on your own data.
"""

NOT_MEASURED = """\
## What was not measured

- **GPUs.** The GPU path has never run. No table says anything about decoding on a GPU, about copies
  to a GPU, or about training on one. An emulated training step sleeps; it uses no cores, as a GPU's
  step does.
- **Real clusters and real object stores.** Nodes are network namespaces on one machine. Stores are
  local servers, some of them with added latency and a limited rate.
- **Full-size datasets.** Images are crops of 16 photographs. No public dataset was downloaded.
- **Video and audio.** Penstock doesn't decode them yet.
- **MosaicML Streaming.** It pins older versions of numpy and transformers, so it isn't part of the
  tables. Its adapter works in an environment of its own.
- **Processors other than x86-64**, and machines with more than two cores.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table of the page.

    title: the heading. result: the stem of a file in benchmarks/results. command: what measures it
    again. text: a description of the data and the work; a function of the values if it quotes them.
    head: the columns. rows: returns the cells of the table. notes: returns lines below the table.
    chart: whether a chart of the same stem lies beside the page.
    """

    title: str
    result: str
    command: str
    text: str | Callable[[Values], str]
    head: tuple[str, ...]
    rows: Callable[[Values], Rows]
    notes: Callable[[Values], str] | None = None
    chart: bool = False

    def render(self, values: Values) -> str:
        """Return the section as Markdown."""
        aligned = "|---" + "|---:" * (len(self.head) - 1) + "|"
        lines = [f"| {' | '.join(cells)} |" for cells in (self.head, *self.rows(values))]
        text = self.text if isinstance(self.text, str) else self.text(values)
        parts = [f"## {self.title}", text, "\n".join([lines[0], aligned, *lines[1:]])]
        if self.notes is not None:
            parts.append(self.notes(values))
        if self.chart:
            parts.append(f"![Images per second and CPU-seconds]({CHARTS.name}/{self.result}.svg)")
        parts.append(self._origin(values))
        return "\n\n".join(parts) + "\n"

    def _origin(self, values: Values) -> str:
        """Return the date, the machine, the versions, the command and the result's file."""
        here = values["machine"]
        others = [f"{k} {v}" for k, v in values["versions"].items() if k not in _OWN_VERSIONS]
        own = [f"{k} {values['versions'][k]}" for k in _OWN_VERSIONS if k in values["versions"]]
        return (
            f"<small>{values['date'][:10]}, {here['cores']} cores of {here['processor']}. "
            f"{', '.join(own + others)}. Measured by `{self.command}`; all figures are in "
            f"`benchmarks/results/{self.result}.json`.</small>"
        )


def page(results: Path = RESULTS) -> str:
    """Return the whole page. Raises FileNotFoundError if a result is missing."""
    parts = [INTRODUCTION]
    for section in SECTIONS:
        values = json.loads((results / f"{section.result}.json").read_text())
        parts.append(section.render(values))
    return "\n".join([*parts, NOT_MEASURED])


def publish() -> None:
    """Write the page and its charts to docs/."""
    from benchmarks.chart import draw, draw_summary

    PAGE.write_text(page())
    draw(RESULTS / "throughput.json", CHARTS / "throughput.svg")
    draw_summary(RESULTS / "throughput.json", CHARTS / "images-per-second.svg")


# Images


def ordered(summary: Values) -> list[str]:
    """Return the names: the first one, then the others, the fastest first."""
    first, *others = summary
    return [first, *sorted(others, key=lambda name: -summary[name]["images_per_s"]["median"])]


def _images_text(values: Values) -> str:
    data, work = values["dataset"], values["work"]
    images = f"{data['images']:,} JPEGs of {data['mean_bytes'] / 1000:.0f} kB"
    if data.get("short_side"):
        images += f" with a short side of {data['short_side']} pixels"
    if data.get("origin"):
        images += f" ({data['origin']})"
    return (
        f"{images}. Each loader decodes them, takes a random resized crop of "
        f"{work['size']} × {work['size']} pixels, flips, normalises and makes batches of "
        f"{work['batch_size']} with {work['workers']} workers. Cells show the median of "
        f"{values['rounds_played']} rounds, with the lowest and the highest in brackets."
    )


def _images_rows(values: Values) -> Rows:
    for name in ordered(values["summary"]):
        summary = values["summary"][name]
        ours = name == next(iter(values["summary"]))
        waits = (
            f"{summary['wait_share']['median'] * 100:.1f} %" if values["round"]["stepped"] else ""
        )
        yield (
            f"**{TITLES[name]}**" if ours else TITLES[name],
            _spread(summary["images_per_s"], "{:,.0f}"),
            _spread(summary["cpu_s_per_1000"], "{:.2f}"),
            f"{summary['first_batch_s']['median']:.2f} s",
            waits,
            "" if ours else f"{summary['speed_ratio']['median']:.2f}",
            "" if ours else f"{summary['cpu_ratio']['median']:.2f}",
        )


def _images_notes(values: Values) -> str:
    names = list(values["summary"])
    own = [f"{TITLES[n]} ({ADAPTERS[n].reads})" for n in names if ADAPTERS[n].converts]
    lent = [TITLES[n] for n in names if ADAPTERS[n].decodes == "ours"]
    lines = []
    if values["round"]["stepped"]:
        lines.append(
            "“Waiting” is the share of the time that an emulated training step of "
            f"{values['round']['step_ms']:.0f} ms a batch waits for data."
        )
    if own:
        lines.append(
            f"These loaders read files that were converted beforehand, which isn't timed: "
            f"{', '.join(own)}. The others read the images themselves."
        )
    if lent:
        lines.append(f"{', '.join(lent)} decode with {values['decoder_of_the_rest']}.")
    if missing := values["not_installed"]:
        lines.append(f"Not installed, so not measured: {', '.join(TITLES[n] for n in missing)}.")
    return " ".join(lines)


_IMAGES_HEAD = (
    "loader",
    "images/s",
    "CPU-s per 1,000 images",
    "first batch",
    "waiting",
    "Penstock ÷ loader: images/s",
    "CPU",
)


# Detection and views


def _detection_rows(values: Values) -> Rows:
    names = {
        "penstock": OURS,
        "albumentations": "albumentations in torch's workers",
        "without workers": "albumentations without workers",
    }
    for case, title in (("boxes", "boxes"), ("masks", "boxes and instance masks")):
        found = values["cases"][case]
        ours = _medians(found["epochs"]["penstock"])
        for name, shown in names.items():
            one = _medians(found["epochs"][name])
            cells = (f"{one['images_per_s']:,.0f}", f"{one['cpu_s_per_1000']:.2f}")
            if name == "penstock":
                yield (title, shown, *cells, "", "")
                continue
            by_rate = found["speed_ratio"] if name == "albumentations" else None
            rate = by_rate or ours["images_per_s"] / one["images_per_s"]
            key = "cpu_ratio" if name == "albumentations" else "cpu_ratio_without_workers"
            yield (title, shown, *cells, f"{rate:.2f}", f"{found[key]:.2f}")


def _views_rows(values: Values) -> Rows:
    for name in sorted(values["rounds"], key=lambda one: values["ratios"][one]["median"]):
        cpu = statistics.median(one["cpu_s_per_1000"] for one in values["rounds"][name])
        ours = name == "penstock"
        ratio = "" if ours else _spread(values["ratios"][name], "{:.1f}")
        yield (OURS if ours else name, f"{cpu:.2f}", ratio)


# Arrays


def _small_arrays_rows(values: Values) -> Rows:
    for shape, found in values["shapes"].items():
        yield (
            f"({shape.replace(' x ', ', ')}{',' if 'x' not in shape else ''})",
            f"{found['penstock']['samples_per_s']:,}",
            *(_ratio(found[f"over {other}"]) for other in ("torch", "by sample", "by batch")),
        )


def _large_arrays_rows(values: Values) -> Rows:
    for name, found in values["cases"].items():
        yield (
            name,
            f"{found['penstock files']['gb_per_s']:.1f}",
            *(
                _ratio(found[f"penstock files over {other}"])
                for other in ("torch 2", "torch 0", "readinto")
            ),
        )


def _zarr_rows(values: Values) -> Rows:
    for name, found in values["arrays"].items():
        yield (
            name,
            f"{found['penstock']['samples_per_s']:,}",
            *(
                _ratio(found[f"over {other}"])
                for other in ("tensorstore", "zarr", "zarr by sample")
            ),
            f"{found['cpu over bare']['median']:.2f}",
        )


# Parquet and tokens


def _parquet_rows(values: Values) -> Rows:
    for work, title in (("decoded", "decoded and cropped"), ("bytes", "bytes only")):
        found = values["works"][work]
        for name in (key for key in found if isinstance(found[key].get("samples_per_s"), int)):
            ours = name == "penstock"
            cells = (f"{found[name]['samples_per_s']:,}", f"{found[name]['cpu_s_per_1000']:.3f}")
            ratios = ("", "")
            if not ours:
                ratios = (
                    f"{found[f'rate over {name}']['median']:.2f}",
                    f"{found[f'CPU of {name} over ours']['median']:.2f}",
                )
            shown = OURS if ours else "Penstock from a pack" if name == "pack" else name
            yield (title, shown, *cells, *ratios)


def _tokens_rows(values: Values) -> Rows:
    rates = values["rates"]
    for name, shown in (
        ("penstock", OURS),
        ("slices", "a loop over slices of a memory map"),
        ("torch", "torch DataLoader without workers"),
    ):
        ratios = ("", "")
        if name != "penstock":
            ratios = (
                f"{rates[f'over {name}']['median']:.2f}",
                f"{rates[f'over {name} by CPU']['median']:.2f}",
            )
        yield (shown, f"{rates[name]['tokens_per_s'] / 1e6:,.0f} million", *ratios)


# Emulated accelerators

_JOBS = {
    "resnet50": "ResNet-50, bytes only",
    "resnet50-decode": "ResNet-50, decoded and augmented on 2 cores",
    "dgx-pod": "DGX POD, bytes only",
    "flux": "Flux, Parquet",
    "cosmoflow": "CosmoFlow, `.npy` files",
}


def _job_rows(values: Values) -> Rows:
    for name, title in _JOBS.items():
        if (job := values["workloads"].get(name)) is None:
            continue
        shares = [
            f"{job['summary'][one]['au']['median']:.1f} %" for one in ("penstock", "torch", "floor")
        ]
        size = f"{job['accelerator']['sample_bytes'] / 1000:,.0f} kB"
        yield (
            title,
            size,
            str(job["batch_size"]),
            f"{job['step_s'] * 1000:,.1f} ms",
            f"{job['k']:g}",
            *shares,
        )


def _image_jobs_rows(values: Values) -> Rows:
    # This file's arrays were read before Penstock read arrays itself; later results replace them.
    kept = ("resnet50", "resnet50-decode", "dgx-pod")
    return _job_rows({"workloads": {name: values["workloads"][name] for name in kept}})


_JOB_HEAD = (
    "job",
    "sample",
    "batch",
    "step",
    "k",
    "utilisation with Penstock",
    "with torch's DataLoader",
    "with a loader that costs nothing",
)
_JOB_TEXT = (
    "An emulated accelerator waits for a batch, then sleeps for the step time that was published for "
    "the job. Utilisation is the share of the time that isn't spent waiting. Steps are longer than "
    "published by the factor k if this disk or these cores can't reach the rate. "
)


# Remote data, caches and nodes

_CACHE_ROWS = (
    ("epochs", "warm by local, images/s", "rate of a warm epoch ÷ rate of a local pack", "{:.2f}"),
    (
        "epochs",
        "cold by first local epoch, images/s",
        "rate of a cold epoch ÷ rate of a local pack's first epoch",
        "{:.2f}",
    ),
    ("epochs", "cold, first batch, s", "first batch from a cold store, seconds", "{:.2f}"),
    (
        "epochs",
        "cold, bytes by the first batch's",
        "bytes fetched for the first batch ÷ its own bytes",
        "{:.1f}",
    ),
    (
        "bytes",
        "cache of 150 %, 3 epochs",
        "datasets fetched in 3 epochs, if the cache holds everything",
        "{:.3f}",
    ),
    (
        "bytes",
        "cache of 50 %, 3 epochs (bound 2.00)",
        "datasets fetched in 3 epochs, if the cache holds half (2 is the least possible)",
        "{:.2f}",
    ),
    ("bytes", "a second job on it", "datasets fetched by a second job on the full cache", "{:.0f}"),
    (
        "slow",
        "beside a step: cold by warm epoch, images/s",
        "rate of a cold epoch ÷ rate of a warm one, with a training step, from a store with 50 ms a "
        "request and twice the required rate",
        "{:.2f}",
    ),
    (
        "fill",
        "fill by read",
        "rate of filling the cache ÷ rate of reading without keeping",
        "{:.2f}",
    ),
)


def _cache_rows(values: Values) -> Rows:
    for part, key, title, form in _CACHE_ROWS:
        yield (title, _spread(values[part]["summary"][key], form))


def _peers_rows(values: Values) -> Rows:
    costs = values["cpu_s_per_gb"]
    for size in ("8 MiB", "1 MiB", "100 KB", "16 x 100 KB", "filling"):
        cells = []
        for kind in ("penstock, plain", "nginx, plain", "penstock, TLS", "nginx, TLS"):
            one = costs[kind].get(size)
            cells.append(f"{one['both']['median']:.2f}" if one else "")
        title = "filling a cache" if size == "filling" else size.replace("x", "×")
        yield (title, *cells)


_CHANGES = {
    "three epochs, cold": "three epochs with cold caches",
    "restarted": "the same nodes, restarted",
    "ranks dealt anew": "ranks assigned to other nodes",
    "4 to 3": "one node lost, with the 0.26 of the dataset that it held",
    "3 to 4, one cold": "a node with an empty cache joins",
    "one killed in mid-epoch": "one node killed during an epoch",
    "replaced, cold, from the state": "a node replaced by an empty one, resumed from the state",
}


def _change_rows(values: Values) -> Rows:
    for run in values["runs"]:
        yield (_CHANGES[run["name"]], f"{run['remote_share']:.3f}")


# What Penstock itself costs


def _overhead_rows(values: Values) -> Rows:
    cost = values["cpu_us_per_sample"]
    yield ("in the training thread", f"{cost['consumer']:.1f}")
    yield (
        "in Penstock's threads, with the checksum and their calls of DALI",
        f"{cost['python'] + cost['checksum']:.1f}",
    )
    yield ("the whole process, with DALI's threads", f"{cost['process']:.1f}")


def _resume_rows(values: Values) -> Rows:
    for start in values["starts"]:
        yield (
            f"epoch {start['epoch']:,}, sample {start['position']:,}",
            f"{start['plan_s']:.2f} s",
            f"{start['first_batch_s']:.2f} s",
            f"{start['rose_mb']:.0f} MB",
        )


def _sizing_rows(values: Values) -> Rows:
    for name, found in values["set_ups"].items():
        yield (
            name,
            found["limit"],
            f"{found['planned_s']:.1f} s",
            f"{found['measured_s']:.1f} s",
            f"{found['ratio']:.2f}",
        )


def _resident_rows(values: Values) -> Rows:
    for name, title in (("photographs", "photographs"), ("small", "10,000 images of 32 × 32")):
        found = values["medians"][name]
        yield (
            title,
            *(
                f"{found[what]['resident'] / found[what]['plain']:.2f}"
                for what in ("images_per_s_later", "cpu_s_per_1000_later", "cpu_s_per_1000_first")
            ),
        )


def _memory_rows(values: Values) -> Rows:
    yield (
        "growth of memory per epoch, least squares",
        f"{values['mib_per_epoch']['least_squares']:+.1f} MiB",
    )
    for what in ("threads", "descriptors", "shared_files"):
        shown = {"descriptors": "open files", "shared_files": "shared files"}.get(what, what)
        yield (f"{shown} before and after", f"{values['before'][what]}, {values['after'][what]}")


def _gil_rows(values: Values) -> Rows:
    share = values["gil_shares"]
    yield (
        "share of a step that waits for the GIL because of the loader's threads",
        f"{values['gil_share'] * 100:.1f} % ({min(share) * 100:.1f} to {max(share) * 100:.1f})",
    )


def _spread(figure: Mapping[str, float], form: str) -> str:
    """Return the median, and the lowest and highest value if they look different."""
    median, low, high = (form.format(figure[one]) for one in ("median", "low", "high"))
    return median if low == high else f"{median} ({low} to {high})"


def _ratio(figure: Mapping[str, float]) -> str:
    """Return the median with two decimals below 10, and without decimals above."""
    return f"{figure['median']:.2f}" if figure["median"] < 10 else f"{figure['median']:.0f}"


def _medians(rounds: list[Values]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


SECTIONS = (
    Section(
        title="Images",
        result="throughput",
        command="python -m benchmarks.compare",
        text=_images_text,
        head=_IMAGES_HEAD,
        rows=_images_rows,
        notes=_images_notes,
        chart=True,
    ),
    Section(
        title="Images that were resized beforehand",
        result="throughput-256",
        command="python -m benchmarks.compare --short-side-256",
        text=_images_text,
        head=_IMAGES_HEAD,
        rows=_images_rows,
        notes=_images_notes,
    ),
    Section(
        title="Detection",
        result="detection",
        command="python -m benchmarks.detection",
        text=lambda values: (
            f"{values['images']} photographs of 480 to 1,023 pixels with boxes, delivered as uint8. Each "
            f"loader resizes the longest side to {values['side']}, flips, pads to a square and moves the "
            f"boxes (and instance masks), in batches of {values['batch']} with {values['workers']} "
            "workers. albumentations decodes with OpenCV; masks are decoded by pycocotools."
        ),
        head=(
            "fields",
            "loader",
            "images/s",
            "CPU-s per 1,000 images",
            "Penstock ÷ loader: images/s",
            "CPU",
        ),
        rows=_detection_rows,
    ),
    Section(
        title="Several views of an image",
        result="views",
        command="python -m benchmarks.views",
        text=lambda values: (
            "DINO's recipe: two global and eight local crops with colour jitter, blur and solarization, from "
            f"{values['dataset']['images']:,} JPEGs of {values['dataset']['mean_bytes'] / 1000:.0f} kB, on "
            f"{values['threads']} threads."
        ),
        head=("side", "CPU-s per 1,000 images", "CPU ÷ Penstock's"),
        rows=_views_rows,
    ),
    Section(
        title="Small arrays",
        result="arrays",
        command="python -m benchmarks.arrays",
        text=lambda values: (
            f"float32 arrays with labels in a pack, shuffled, in batches of {values['batch']}. The others "
            f"read one memory-mapped `.npy` file: torch's DataLoader with {values['workers']} workers, a bare "
            "loop that copies sample by sample, and one index expression for each batch, which is the least "
            "that a program in Python can do. The last is faster than Penstock for samples below 1 kB."
        ),
        head=(
            "shape of a sample",
            "Penstock, samples/s",
            "÷ torch DataLoader",
            "÷ loop by sample",
            "÷ one index expression",
        ),
        rows=_small_arrays_rows,
    ),
    Section(
        title="Large arrays",
        result="native_arrays",
        command="python -m benchmarks.native_arrays",
        text=(
            "One `.npy` file for each sample, float32, in the page cache. Torch's DataLoader loads the same files "
            "with 2 workers and without workers, which means in the training loop; the last column is a loop that "
            "reads each file into memory allocated for it. The training loop looks at none of the bytes."
        ),
        head=(
            "data",
            "Penstock, GB/s",
            "÷ torch, 2 workers",
            "÷ torch without workers",
            "÷ bare reads",
        ),
        rows=_large_arrays_rows,
    ),
    Section(
        title="Zarr",
        result="zarr_chunks",
        command="python -m benchmarks.zarr_chunks",
        text=lambda values: (
            f"{values['samples']:,} samples of 49 kB, compressed with zstd, shuffled, in batches of "
            f"{values['batch']}. tensorstore and zarr-python read in the order of the chunks and don't shuffle; "
            "“by sample” reads each sample through zarr-python in torch's workers. The last column compares "
            "Penstock's CPU time with bare decompression of each chunk."
        ),
        head=(
            "samples in a chunk",
            "Penstock, samples/s",
            "÷ tensorstore",
            "÷ zarr-python by chunk",
            "÷ by sample",
            "CPU ÷ bare decompression",
        ),
        rows=_zarr_rows,
    ),
    Section(
        title="Parquet with images",
        result="parquet",
        command="python -m benchmarks.parquet",
        text=lambda values: (
            f"{values['samples']:,} photographs of {values['bytes'] / values['samples'] / 1000:.0f} kB, row "
            f"groups of {values['row_group']}, batches of {values['batch']}. Other work ran on the machine at "
            "the same time, so only the ratios mean something."
        ),
        head=(
            "work",
            "loader",
            "samples/s",
            "CPU-s per 1,000 samples",
            "Penstock ÷ loader: samples/s",
            "CPU",
        ),
        rows=_parquet_rows,
    ),
    Section(
        title="Tokens",
        result="tokens",
        command="python -m benchmarks.tokens",
        text=lambda values: (
            f"{values['sequences']:,} sequences of 2,048 tokens in each of {values['files']} files, shuffled, in "
            f"batches of {values['batch']}, delivered as int64. The plan of "
            f"{values['plan']['tokens'] / 1e12:.0f}·10¹² tokens in {values['plan']['files']:,} files takes "
            f"{values['plan']['plan_s']:.2f} s and {values['plan']['mb']:.0f} MB."
        ),
        head=("loader", "tokens/s", "Penstock ÷ loader: tokens/s", "CPU"),
        rows=_tokens_rows,
    ),
    Section(
        title="Utilisation of an emulated accelerator: images",
        result="dlio",
        command="python -m benchmarks.dlio",
        text=_JOB_TEXT + "The data isn't in the page cache.",
        head=_JOB_HEAD,
        rows=_image_jobs_rows,
    ),
    Section(
        title="Utilisation of an emulated accelerator: Parquet",
        result="dlio-arrays",
        command="python -m benchmarks.dlio",
        text=_JOB_TEXT + "The accelerator is a B200.",
        head=_JOB_HEAD,
        rows=lambda values: _job_rows({"workloads": {"flux": values["workloads"]["flux"]}}),
    ),
    Section(
        title="Utilisation of an emulated accelerator: large arrays",
        result="dlio-cosmoflow",
        command="python -m benchmarks.dlio",
        text=_JOB_TEXT
        + "A step takes 3.5 ms, so the loader must deliver 0.8 GB/s one sample at a time.",
        head=_JOB_HEAD,
        rows=_job_rows,
    ),
    Section(
        title="Remote data through the cache",
        result="cache",
        command="python -m benchmarks.cache",
        text=(
            "A pack in a store that runs on the same two cores (nginx), read through the cache on a local disk. "
            "Cells show the median of the rounds, with the lowest and the highest in brackets."
        ),
        head=("what", "measured"),
        rows=_cache_rows,
    ),
    Section(
        title="Nodes that come and go",
        result="cluster-change",
        command="python -m benchmarks.cluster change",
        text=lambda values: (
            f"Four nodes (network namespaces on one machine) whose caches each hold {values['cache_share']:.2f} of "
            "the dataset and which fetch from one another. The column counts how many times the dataset was fetched "
            "from the remote store. Each epoch delivered every sample once."
        ),
        head=("what happens", "datasets fetched from the remote"),
        rows=_change_rows,
    ),
    Section(
        title="Transfer between nodes",
        result="peers",
        command="python -m benchmarks.peers",
        text=(
            "CPU-seconds a GB for a transfer between two nodes' caches, client and server together, and the same "
            "client with nginx as the server. “Filling a cache” includes its writes and its catalogue. Other work "
            "ran on the machine at the same time."
        ),
        head=("range", "Penstock, plain", "nginx, plain", "Penstock, TLS", "nginx, TLS"),
        rows=_peers_rows,
    ),
    Section(
        title="Resuming in a large dataset",
        result="resume",
        command="python -m benchmarks.resume",
        text=lambda values: (
            "10⁹ samples in 10⁶ shards, global batches of "
            f"{values['global_batch']:,}: time and memory from an empty process to the first batch's ids."
        ),
        head=("resumed at", "plan", "first batch's ids", "memory"),
        rows=_resume_rows,
    ),
    Section(
        title="CPU time outside of decoding",
        result="overhead",
        command="python -m benchmarks.overhead",
        text=lambda values: (
            f"Microseconds for each sample at a batch of {values['batch_size']}, with decoding and augmenting "
            "replaced by a constant."
        ),
        head=("where", "µs a sample"),
        rows=_overhead_rows,
    ),
    Section(
        title="Keeping decoded images in memory",
        result="resident",
        command="python -m benchmarks.resident",
        text="`resident=True` keeps decoded images in memory. Ratios compare it with the same loader without it.",
        head=("data", "images/s, later epochs", "CPU time, later epochs", "CPU time, first epoch"),
        rows=_resident_rows,
    ),
    Section(
        title="Memory over many epochs",
        result="memory",
        command="python -m benchmarks.memory",
        text=lambda values: (
            f"{values['epochs']} epochs of {values['images']:,} images in one process."
        ),
        head=("what", "measured"),
        rows=_memory_rows,
    ),
    Section(
        title="A training step that holds the GIL",
        result="gil",
        command="python -m benchmarks.gil",
        text="A training step in pure Python, in the same process as the loader.",
        head=("what", "measured"),
        rows=_gil_rows,
    ),
    Section(
        title="Predictions of `penstock plan`",
        result="sizing",
        command="python -m benchmarks.sizing",
        text=(
            "`penstock plan` predicted the time of an epoch from the store's, the disk's and the network's figures; "
            "then a loader ran it."
        ),
        head=("set-up", "limit", "predicted", "measured", "measured ÷ predicted"),
        rows=_sizing_rows,
    ),
)


if __name__ == "__main__":
    publish()
