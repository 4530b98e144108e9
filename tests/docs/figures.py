"""The measured figures of the pages: which sentence has them, and which kept result gives them.

docs/benchmarks.md isn't in the table: `python -m benchmarks.page` makes it from the same files.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from benchmarks.order import RANKS, SHARDS
from tests.layers import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Numbers = Callable[[Any], Iterable[Any]]

README = "../README.md"
GIB = 2**30
TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, slots=True)
class Figure:
    """A sentence of a page, with places for its numbers, and how a result gives them.

    page: below docs/. sentence: or a row of a table; line breaks don't matter. result: the stem of
    a file in benchmarks/results.
    """

    page: str
    sentence: str
    result: str
    numbers: Numbers

    @property
    def text(self) -> str:
        """The sentence with the numbers of the kept result."""
        return self.sentence.format(*self.numbers(kept(self.result)))


def kept(name: str) -> Any:
    """Return a kept result."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


# -- images per second


def over(loader: str) -> Numbers:
    """Return Penstock's rate over another loader's, and that loader's CPU time over Penstock's."""

    def numbers(result: Any) -> tuple[float, ...]:
        of = result["summary"][loader]
        return of["speed_ratio"]["median"], of["cpu_ratio"]["median"]

    return numbers


def beside(loader: str) -> Numbers:
    """Return Penstock's rate over another loader's, and Penstock's share of its CPU time, in
    hundredths."""

    def numbers(result: Any) -> tuple[float, ...]:
        speed, cpu = over(loader)(result)
        return speed, 100 / cpu

    return numbers


def first_batches(result: Any) -> tuple[float, ...]:
    return tuple(
        result["summary"][each]["first_batch_s"]["median"] for each in ("ffcv", "penstock")
    )


def cpu_of_hugging_face(result: Any) -> tuple[float, ...]:
    sides = result["works"]["decoded"]
    ratios = [sides[f"CPU of datasets {kind} over ours"] for kind in ("map", "streaming")]
    return (
        *(each["median"] for each in ratios),
        *(each[end] for each in ratios for end in ("low", "high")),
    )


def photographs(result: Any) -> tuple[float, ...]:
    return result["dataset"]["images"], result["dataset"]["mean_bytes"] / 1000


NAMES = {2: "half", 7: "a seventh of"}


def share_of_the_cpu(loader: str) -> Numbers:
    """Return Penstock's share of another loader's CPU time in words."""
    return lambda result: (NAMES[round(result["summary"][loader]["cpu_ratio"]["median"])],)


def share_of_the_cpu_for_views(result: Any) -> tuple[str]:
    return (NAMES[round(result["ratios"]["torch and Pillow"]["median"])],)


def cpu_of_views(result: Any) -> tuple[float, ...]:
    return tuple(result["ratios"][s]["median"] for s in ("torch and Pillow", "DALI by hand"))


def utilisation(result: Any) -> tuple[float, ...]:
    job = result["workloads"]["resnet50-decode"]
    return job["k"], *(job["summary"][each]["au"]["median"] for each in ("penstock", "torch"))


def cpu_of_resident_images(result: Any) -> tuple[str]:
    times = result["medians"]["photographs"]["cpu_s_per_1000_first"]
    return ({2: "twice"}[round(times["resident"] / times["plain"])],)


IMAGES = (
    Figure(
        "migrate/pytorch.md",
        "{:.1f} times as many images a second as torch's DataLoader with Pillow on the same 2 "
        "cores; torch takes {:.1f} times the CPU time",
        "throughput",
        over("torch"),
    ),
    Figure(
        "migrate/torchdata.md",
        "{:.1f} times as many images a second as torch's own loader",
        "throughput",
        over("torch"),
    ),
    Figure(
        "migrate/webdataset.md",
        "{:.1f} times as many images a second from a pack as WebDataset from tar files of the same "
        "bytes, with the fastest decoder that pip installs, on the same 2 cores; WebDataset takes "
        "{:.1f} times the CPU time",
        "throughput",
        over("webdataset"),
    ),
    Figure(
        "migrate/dali.md",
        "{:.2f} times as many images a second as DALI's own file reader",
        "throughput",
        over("dali"),
    ),
    Figure(
        "migrate/huggingface.md",
        "a map-style `datasets` object takes {:.2f} times the CPU time of Penstock, and its stream "
        "{:.2f} times (medians of 5 rounds, {:.2f} to {:.2f} and {:.2f} to {:.2f}",
        "parquet",
        cpu_of_hugging_face,
    ),
    Figure(
        "migrate/litdata.md",
        "{:.1f} times as many images a second as LitData from chunks of the same bytes, with the "
        "fastest decoder that pip installs, on the same 2 cores and for {:.0f} % of the CPU time",
        "throughput",
        beside("litdata"),
    ),
    Figure(
        "migrate/grain.md",
        "{:.1f} times as many images a second as Grain over files of the same bytes, with the "
        "fastest decoder that pip installs, on the same 2 cores and for {:.0f} % of the CPU time",
        "throughput",
        beside("grain"),
    ),
    Figure(
        "migrate/tfdata.md",
        "{:.1f} times as many images a second as tf.data over files of the same bytes, on the "
        "same 2 cores and for {:.0f} % of the CPU time",
        "throughput",
        beside("tfdata"),
    ),
    Figure(
        "migrate/ffcv.md",
        "{:.1f} times as many images a second as FFCV from a beton of the same JPEG bytes, on the "
        "same 2 cores, for {:.0f} % of the CPU time",
        "throughput",
        beside("ffcv"),
    ),
    Figure(
        "migrate/ffcv.md",
        "{:.1f} s until the first batch in the measurement below, against {:.1f} s",
        "throughput",
        first_batches,
    ),
    *(
        Figure(page, "{:,} JPEGs of {:.0f} kB", "throughput", photographs)
        for page in (README, "index.md")
    ),
    Figure(README, "It needs {} the CPU.", "throughput", share_of_the_cpu("simplejpeg")),
    Figure(
        README,
        "{:.2f} times as many images per second as DALI's own pipeline",
        "throughput",
        over("dali"),
    ),
    Figure(README, "{:.2f} times as many as torch's", "throughput", over("simplejpeg")),
    Figure(
        README,
        "{:.2f} times the images per second of albumentations",
        "detection",
        lambda result: (result["cases"]["boxes"]["speed_ratio"],),
    ),
    Figure(README, "take {} the CPU time of torch and Pillow", "views", share_of_the_cpu_for_views),
    Figure(
        README,
        "at {} times its published step time was busy for {:.1f} % of the time with Penstock, and "
        "for {:.1f} %",
        "dlio",
        utilisation,
    ),
    Figure(
        "howto/views.md",
        "takes {:.1f} times as much CPU time with torch and Pillow as with Penstock, and {:.1f} "
        "times as much with a DALI graph",
        "views",
        cpu_of_views,
    ),
    Figure(
        "reference/datasets.md",
        "The first epoch costs up to {} the CPU time",
        "resident",
        cpu_of_resident_images,
    ),
)


# -- reading and starting


def copies(result: Any) -> tuple[float, ...]:
    """Return microseconds of a copy out of the mapped file, kB, and the largest share of the CPU
    time."""
    modes = result["modes"].values()
    costs = [each["copy"]["reading_us"] - each["mmap"]["reading_us"] for each in modes]
    share = max(costs) / 1000 / min(each["copy"]["cpu_ms_per_image"] for each in modes)
    return min(costs), max(costs), round(result["dataset"]["mean_bytes"] / 1000, -1), 100 * share


def system_calls(result: Any) -> tuple[float, ...]:
    ratios = [each["pread"]["cpu_ratio_to_mmap"]["median"] for each in result["modes"].values()]
    return 100 * (min(ratios) - 1), 100 * (max(ratios) - 1)


def slower_than_numpy(result: Any) -> tuple[float]:
    """Return the largest samples, in kB, that one index expression reads faster."""
    sizes = [
        prod(int(side) for side in shape.split(" x ")) * 4
        for shape, found in result["shapes"].items()
        if found["over by batch"]["median"] < 0.9
    ]
    return (max(sizes) / 1000,)


READING = (
    Figure(
        "howto/slow.md",
        "may be faster for samples of {:.0f} kB and less",
        "arrays",
        slower_than_numpy,
    ),
    Figure(
        "reference/stores.md",
        "{:.1f} to {:.0f} µs for an image of {:.0f} KB, {:.1f} % of its decoding",
        "reading",
        copies,
    ),
    Figure("reference/stores.md", "{:.0f} to {:.0f} % of the CPU time", "reading", system_calls),
    Figure(
        "howto/tokens.md",
        "planning their order takes {:.2f} s at a job's start",
        "tokens",
        lambda result: (result["plan"]["plan_s"],),
    ),
    Figure(
        README,
        "a job on a billion samples resumes at any position in {:.2f} seconds",
        "resume",
        lambda result: (max(start["total_s"] for start in result["starts"]) + 0.005,),  # up
    ),
)


# -- the order


def of_ranks(ranks: int) -> Numbers:
    """Return the row of a number of ranks: what a rank sees by default, by the number of shards."""

    def numbers(result: Any) -> tuple[str]:
        found = [
            next(
                row
                for row in result["rows"]
                if row["default"] and (row["shards"], row["ranks"]) == (shards, ranks)
            )
            for shards in SHARDS
        ]
        cells = (
            [f"{row['shards_of_a_batch']:.0f}" for row in found],
            [
                f"{row['meets_again'] / ranks:.1f}" if ranks <= row["lanes"] else "-"
                for row in found
            ],
            [f"{100 * row['single_share']:.0f} %" for row in found],
            [f"{row['open_bytes'] / GIB:.0f}" for row in found],
            [f"{row['readers']:.2f}" for row in found],
        )
        shards, again, single, opened, readers = map(" / ".join, cells)
        return (f"{ranks:,} | {shards} | {again} | {single} | {opened} GiB | {readers}",)

    return numbers


def window_row(window: int) -> Numbers:
    """Return what a window does with 10,000 shards and 64 ranks."""

    def numbers(result: Any) -> tuple[float, ...]:
        job = (10_000, 64, window)
        row = next(r for r in result["rows"] if (r["shards"], r["ranks"], r["window"]) == job)
        return row["shards_of_a_batch"], 100 * row["single_share"], row["open_bytes"] / GIB

    return numbers


def few_shards(result: Any) -> Iterable[float]:
    """Return from how many shards a batch comes with windows of 2 and 4."""
    for window in (2, 4):
        yield next(
            row["shards_of_a_batch"]
            for row in result["rows"]
            if (row["shards"], row["ranks"], row["window"]) == (1_000, 256, window)
        )


def sorted_row(shards: int, classes: int) -> Numbers:
    def numbers(result: Any) -> tuple[str]:
        row = next(r for r in result["sorted"] if (r["shards"], r["classes"]) == (shards, classes))
        variance = " / ".join(f"{each:.2f}" for each in row["variance"])
        alike = [f"{each:.2f}" for each in row["partners"]]
        partners = alike[0] if len({*alike}) == 1 else " / ".join(alike)
        return (f"{shards:,} | {classes:,} | {variance} | {partners}",)

    return numbers


def units_row(name: str, ranks: int) -> Numbers:
    """Return the row of a kind of units; the figures of wider windows stand in brackets, if they
    differ."""

    def numbers(result: Any) -> tuple[str]:
        row = next(r for r in result["units"] if (r["name"], r["ranks"]) == (name, ranks))
        own = row["default"]
        wide = row.get("wide", own)
        has_wide: bool = wide["open"] > own["open"]
        batch, digits = row["batch"], 1 if row["batch"] < 10 else 0

        def both(number: Callable[[Any], str]) -> str:
            return f"{number(own)} ({number(wide)})" if has_wide else number(own)

        def percent(one: Any) -> str:
            share = 100 * one["pairs_of_one_unit"]
            return f"{share:.1f}" if share >= 1 else f"{share:.2f}" if share >= 0.01 else "-"

        def kept_gib(one: Any) -> str:
            gib = one["kept_bytes"] / GIB
            return f"{gib:.0f}" if gib >= 10 else f"{gib:.1f}"

        cells = [
            name if "wide" in row else f"({name})",
            f"{ranks} {TIMES} {batch}",
            both(lambda one: f"{one['open']:,}") + f" of {row['all']:,}",
            both(lambda one: f"{one['units_of_a_batch']:.{digits}f}") + f" of {batch}",
            both(percent),
        ]
        if "kept_bytes" not in own:
            cells.append("")
        elif own["kept_bytes"]:
            cells.append(f"{both(kept_gib)} GiB")
        else:
            cells.append("none")
        return (" | ".join(cells),)

    return numbers


def lane_order(change: str) -> Numbers:
    def numbers(result: Any) -> tuple[float, float]:
        row = next(r for r in result["lane_order"] if r["change"] == change)
        return row["chosen"], row["lane_0_first"]

    return numbers


def readers_row(shards: int) -> Numbers:
    return lambda result: (
        f"{shards:,} | "
        + " | ".join(
            three_digits(row["readers"]) for row in result["readers"] if row["shards"] == shards
        ),
    )


def three_digits(number: float) -> str:
    """Return a number of readers as the table has it."""
    return f"{number:.2f}" if number < 2 else f"{number:.1f}" if number < 10 else f"{number:.0f}"


def large_plans(result: Any) -> Iterable[float]:
    """Return seconds and MiB of the plans with 10^6 and 2·10^5 shards, and MiB with all options."""
    plans = [plan for plan in result["plan"] if plan.get("shuffled", True)]
    million = next(plan for plan in plans if plan["shards"] == 10**6)
    plain, extras = (plan for plan in plans if plan["shards"] == 200_000)
    yield from (million["first_s"], million["plan_mib"], plain["first_s"], plain["plan_mib"])
    yield extras["plan_mib"]


def choices(result: Any) -> Iterable[float]:
    few, *many = result["choice_cpu_s"].values()
    yield from (few, min(many), max(many))


def padding(result: Any) -> Iterable[float]:
    sides = [result["padding"][each] for each in ("shorter=800, max_size=1333", "LongestSide(640)")]
    yield from sorted(100 * each["similar"] for each in sides)
    yield from (100 * each["shuffled"] for each in sides)


def bins(result: Any) -> tuple[float, ...]:
    filled = result["fill"]["bins"]
    return tuple(100 * filled[samples] for samples in ("60", "160", "10", "20"))


MIXING = "explanation/mixing.md"
ORDER = "explanation/order.md"
SORTED = ((100, 10), (1000, 10), (1000, 1000), (4000, 10), (4000, 1000))
UNITS = (
    *(
        (name, ranks)
        for name in ("row groups of 100, 11 MB", "chunks of 8 samples of 49 kB")
        for ranks in (1, 8)
    ),
    ("chunks of 1 sample of 49 kB", 8),
    *(
        (name, ranks)
        for name in ("chunks of 8 samples, 180 MB", "a pack of 600 samples a shard")
        for ranks in (1, 8)
    ),
)
CHANGES = (
    "ranks reassigned on 8 nodes, 256 lanes",
    "ranks reassigned on 32 nodes, 1,024 lanes",
    "8 to 7 nodes (any is lost, the others keep their order), 256 lanes",
    "32 to 31 nodes, 1,024 lanes",
    "32 to 31 nodes, 256 lanes",
    "8 nodes reassigned, an empty one among them, 256 lanes",
    "8 to 4 nodes, reassigned, 256 lanes",
    "4 to 8 nodes, reassigned, 256 lanes",
    "16 to 32 nodes and 32 to 16, reassigned, 1,024 lanes",
)
ORDERS = (
    *(Figure(MIXING, "| {} |", "order", of_ranks(ranks)) for ranks in RANKS),
    *(Figure(MIXING, "| {} |", "mixing", sorted_row(*row)) for row in SORTED),
    *(Figure(MIXING, "| {} |", "mixing", units_row(*row)) for row in UNITS),
    Figure(
        MIXING,
        "With 1,000 shards and 256 ranks, a rank has one lane: with 2 it mixes {:.0f} shards, with "
        "4 it mixes {:.0f}",
        "order",
        few_shards,
    ),
    *(
        Figure(
            MIXING, f"| {each} | {{:.0f}} | {{:.0f}} % | {{:.0f}} GiB |", "order", window_row(each)
        )
        for each in (2, 4, 8, 16)
    ),
    *(
        Figure(ORDER, "| {} |", "order_large", readers_row(shards))
        for shards in (2_000, 10_000, 50_000, 100_000)
    ),
    *(
        Figure(ORDER, "| " + change + " | {:.2f} | {:.2f} |", "mixing", lane_order(change))
        for change in CHANGES
    ),
    Figure(
        ORDER,
        "With 10,000 shards, 660 nodes get {:,} lanes and {:.2f} readers",
        "order_large",
        lambda result: next(
            (row["lanes"], row["readers"])
            for row in result["readers"]
            if (row["shards"], row["nodes"]) == (10_000, 660)
        ),
    ),
    Figure(
        ORDER,
        "in {:.1f} s; its plan takes {:.0f} MiB. With 200,000 shards it is {:.2f} s and {:.0f} "
        "MiB, and {:.0f} MiB with another lane order",
        "order_large",
        large_plans,
    ),
    Figure(
        ORDER,
        "takes {:.3f} CPU-seconds for 8 nodes and {:.1f} to {:.1f} for 4,096",
        "order_large",
        choices,
    ),
    Figure(
        "howto/detection.md",
        "{:.1f} to {:.1f} % of the pixels are padding. Without it, {:.0f} % are padding with "
        "`shorter=800, max_size=1333`, and {:.0f} % with `LongestSide(640)`",
        "mixing",
        padding,
    ),
    Figure(
        "reference/batches.md",
        "padded batches are filled to {:.0f} %; with a plain shuffle to {:.0f} %",
        "mixing",
        lambda result: (100 * result["fill"][kind] for kind in ("padded", "shuffled")),
    ),
    Figure(
        "reference/batches.md",
        "filled to {:.0f} to {:.0f} % with 60 to 160 samples, and to {:.0f} to {:.0f} % with 10 "
        "to 20",
        "mixing",
        bins,
    ),
)


# -- caches and nodes


def remote_shares(result: Any) -> dict[str, float]:
    return {run["name"]: run["remote_share"] for run in result["runs"]}


def remote_of(run: str) -> Numbers:
    """Return the share of the dataset that came from the remote."""
    return lambda result: (remote_shares(result)[run],)


def after(*changes: str, lanes: int = 128, shards: int = 1001, peers: bool) -> Numbers:
    """Return what came from the remote in the epoch after a change of the world."""
    return lambda result: (
        row["remote_share"]
        for change in changes
        for row in result["rows"]
        if (row["lanes"], row["shards"], row["change"]) == (lanes, shards, change)
        and row.get("peers") is peers
    )


def both(*changes: str, lanes: int = 128, shards: int = 1001) -> Numbers:
    """Return the figures without peers, then with peers."""
    ways = [after(*changes, lanes=lanes, shards=shards, peers=peers) for peers in (False, True)]
    return lambda result: (number for way in ways for number in way(result))


def on_31_nodes_without_a_limit(result: Any) -> tuple[str]:
    """The note of the result has the figure of the other run."""
    (found,) = re.findall(r"32 to 31 with peers gave ([\d.]+) in another", result["kept"])
    return (found,)


def cpu_of_large_ranges(result: Any) -> tuple[float, ...]:
    sides = (result["cpu_s_per_gb"][f"penstock, {kind}"]["8 MiB"] for kind in ("TLS", "plain"))
    return tuple(each["both"]["median"] for each in sides)


def cpu_saved_without_tls(result: Any) -> tuple[float, ...]:
    plain, tls = (result["cpu_s_per_gb"][f"penstock, {kind}"] for kind in ("plain", "TLS"))
    saved = [1 - plain[kind]["both"]["median"] / one["both"]["median"] for kind, one in tls.items()]
    return tuple(round(100 * share, -1) for share in (min(saved), max(saved)))


CLUSTER, SHARING = "howto/cluster.md", "howto/sharing.md"
WORLDS: dict[str, tuple[str, Numbers]] = {
    "128 lanes, 1,001 shards | 4 to 8 | 0.5": ("cluster-worlds", both("4 to 8")),
    "| 8 to 4 (the caches of the four are lost, too) | 0.5": ("cluster-worlds", both("8 to 4")),
    "| 4 to 3 | 0.25": ("cluster-worlds", both("4 to 3")),
    "| 8 to 7 | 0.125": ("cluster-worlds", both("8 to 7")),
    "| 16 to 15 | 0.063": ("cluster-worlds-32", both("16 to 15")),
    "| 32 to 31 | 0.031": ("cluster-worlds-32", both("32 to 31")),
    "112 lanes, 876 shards | 8 to 7 | 0.125": (
        "cluster-worlds",
        both("8 to 7", lanes=112, shards=876),
    ),
    "112 lanes, 2,626 shards | 8 to 7 | 0.125": (
        "cluster-worlds",
        both("8 to 7", lanes=112, shards=2626),
    ),
}
NODES = (
    Figure(
        README,
        "warm cache runs at {:.2f} of the rate",
        "cache",
        lambda result: (result["epochs"]["summary"]["warm by local, images/s"]["median"],),
    ),
    Figure(
        README,
        "fetched it {:.3f} times in three epochs",
        "cluster-change",
        remote_of("three epochs, cold"),
    ),
    *(
        Figure(CLUSTER, f"| {row} | {{:.3f}} | {{:.3f}} |", result, numbers)
        for row, (result, numbers) in WORLDS.items()
    ),
    Figure(
        CLUSTER,
        "| any of them | ranks reassigned (4, 8, 16, 32 nodes) | 0 | {:.3f} | {:.3f} |",
        "cluster-worlds-32",
        both("32 dealt anew"),
    ),
    Figure(
        CLUSTER,
        "| | 16 to 32, 32 to 16 | 0.5 | {:.3f}, {:.3f} | {:.3f}, {:.3f} |",
        "cluster-worlds-32",
        both("16 to 32", "32 to 16"),
    ),
    Figure(
        CLUSTER,
        "another run without that limit gave {}",
        "cluster-worlds-32",
        on_31_nodes_without_a_limit,
    ),
    Figure(
        SHARING,
        "[4 nodes](../benchmarks.md#nodes-that-come-and-go) fetched it {:.2f} times",
        "cluster-change",
        remote_of("three epochs, cold"),
    ),
    Figure(
        SHARING,
        "saves {:.0f} to {:.0f} % of the CPU time of sharing",
        "peers",
        cpu_saved_without_tls,
    ),
    Figure(
        SHARING,
        "together take {:.2f} CPU-seconds with encryption, and {:.2f} without",
        "peers",
        cpu_of_large_ranges,
    ),
)

FIGURES = (*IMAGES, *READING, *ORDERS, *NODES)
