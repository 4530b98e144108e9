"""`penstock pack | index | inspect`: thin over readers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from penstock.cache.base.limits import usable_cores
from penstock.cache.base.sizes import format_size
from penstock.cache.errors import ConfigError
from penstock.pipeline.cli.inspect_batch import Recipe, look, open_with_ids, show
from penstock.pipeline.cli.progress import SampleProgress
from penstock.pipeline.plan.advice import usual_spread_words, usual_spreads
from penstock.pipeline.plan.order import default_lanes, default_window, label_spread
from penstock.pipeline.plan.world import World

if TYPE_CHECKING:
    from penstock.readers.index.index import Index

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
CacheFolder = Annotated[
    Path | None,
    typer.Option("--cache", help="Folder that keeps what is downloaded from a remote URL."),
]
StoreOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option", "-o", help="KEY=VALUE for the file system (fsspec), repeatable."
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="What to read where a folder holds more than one kind of data, such as folder or tar.",
    ),
]
Workers = Annotated[
    int, typer.Option(min=0, help="Decode threads; 0 is all usable cores.", show_default=True)
]


def pack(
    src: Annotated[
        str, typer.Argument(help="Image folder, tar files or pack: a path or an fsspec URL.")
    ],
    dst: Annotated[str, typer.Argument(help="Folder to write the pack to: new, or begun before.")],
    shuffle: Annotated[
        bool,
        typer.Option(
            "--shuffle/--no-shuffle",
            help="Shuffle samples across shards, for good; --no-shuffle keeps the source's ids.",
        ),
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of that shuffle.")] = 0,
    shard_bytes: Annotated[
        str, typer.Option(help="Size of a shard: what is fetched and cached as one.")
    ] = "64MiB",
    short_side: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rewrite images whose short side is longer: upright, so many pixels, as baseline "
            "JPEGs. Others stay as they are.",
        ),
    ] = None,
    quality: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100,
            help="JPEG quality of what is rewritten (92 unless told); without --short-side every "
            "image is rewritten at its size.",
        ),
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline",
            help="Rewrite progressive JPEGs as baseline ones without loss; they decode about 3 "
            "times as fast. Needs the extra 'transcode'.",
        ),
    ] = False,
    format: Format = "auto",
    workers: Workers = 0,
    cache: CacheFolder = None,
    storage_option: StoreOptions = None,
    as_json: Json = False,
) -> None:
    """Write a dataset as shards that are read fast: shuffled, every image decoded once to check it.

    What doesn't decode goes by name into DST/_penstock/quarantine.jsonl. Killed at any moment, the
    same command goes on after the last finished shard. Under torchrun or Slurm each rank packs its
    share.
    """
    from penstock.readers import open_index
    from penstock.readers import pack as pack_dataset

    world = World.detect()
    with SampleProgress("pack") as progress:
        summary = pack_dataset(
            src,
            dst,
            format=format,
            shuffle=shuffle,
            seed=seed,
            shard_bytes=shard_bytes,
            short_side=short_side,
            quality=quality,
            baseline=baseline,
            workers=workers or usable_cores(),
            rank=world.rank,
            size=world.size,
            progress=progress,
            storage_options=parse_options(storage_option),
            cache=cache,
        )
    _report(asdict(summary), as_json=as_json, place=f"{dst.rstrip('/')}/_penstock")
    if summary.complete:
        _warn_of_labels(open_index(dst))


def index(
    url: Annotated[str, typer.Argument(help="Image folder or tar files: a path or an fsspec URL.")],
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder for the index, of remote data also a URL of the same store; else it lies "
            "beside local data (photos.penstock), or in --cache, or in the user's cache directory."
        ),
    ] = None,
    format: Format = "auto",
    workers: Workers = 0,
    cache: CacheFolder = None,
    storage_option: StoreOptions = None,
    as_json: Json = False,
) -> None:
    """Index images or tar files where they lie: sizes, checksums, labels; each image decoded once.

    A Dataset does the same on first use; here it can be done before the job, with a progress bar.
    """
    from penstock.readers import build_index

    with SampleProgress("index") as progress:
        summary = build_index(
            url,
            format=format,
            out=out,
            cache=cache,
            workers=workers or usable_cores(),
            progress=progress,
            storage_options=parse_options(storage_option),
        )
    _report(asdict(summary), as_json=as_json, place=summary.place)


def inspect(
    url: Annotated[
        str, typer.Argument(help="Image folder, tar files or pack: a path or an fsspec URL.")
    ],
    batch_size: Annotated[
        int, typer.Option(min=1, help="Global batch to tell lanes and window for.")
    ] = 256,
    index_folder: Annotated[
        str | None, typer.Option("--index", help="Folder that `penstock index --out` wrote.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Show so many samples as a model gets them, instead."),
    ] = None,
    augment: Annotated[Recipe, typer.Option(help="With --batch: what is done to images.")] = "none",
    seed: Annotated[int, typer.Option(help="With --batch: of order and augmentation.")] = 0,
    epoch: Annotated[int, typer.Option(min=0, help="With --batch: whose first batch.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="With --batch: contact sheet to write, as contact.png.")
    ] = None,
    format: Format = "auto",
    cache: CacheFolder = None,
    storage_option: StoreOptions = None,
    as_json: Json = False,
) -> None:
    """Tell what a dataset holds and how a job would walk it; with --batch, show what comes out."""
    if batch is None and out is not None:
        raise ConfigError("--out is the contact sheet of --batch N: pass that too.")
    if batch is not None:
        options = parse_options(storage_option)
        with open_with_ids(
            url, format=format, index=index_folder, cache=cache, options=options
        ) as dataset:
            report, images = look(dataset, size=batch, recipe=augment, seed=seed, epoch=epoch)
        show(url, report, images, out=out, as_json=as_json)
        return
    from penstock.readers import open_index

    found = open_index(
        url,
        format=format,
        index=index_folder,
        cache=cache,
        storage_options=parse_options(storage_option),
    )
    shards = len(found.sizes)
    lanes = default_lanes(batch_size, shards)
    window = default_window(
        shards, lanes, global_batch=batch_size, icc=found.icc, shuffled=found.shuffled
    )
    facts: dict[str, Any] = {
        "kind": found.kind,
        "samples": found.samples,
        "shards": shards,
        "bytes": int(found.shard_bytes.sum()),
        "largest_shard_bytes": int(found.shard_bytes.max()),
        "fields": list(found.fields),
        "classes": len(found.classes),
        "shuffled": found.shuffled,
        "icc": found.icc,
        "images": asdict(found.images) if found.images else None,
        "quarantined": found.quarantined,
        "passed_over": found.about.passed_over,
        "progressive": found.about.progressive,
        "fingerprint": found.fingerprint,
        "batch_size": batch_size,
        "lanes": lanes,
        "window": window,
        "label_spread": None
        if found.icc is None
        else label_spread(batch_size, found.icc, min(lanes * window, shards), shards),
        "rank_label_spread": None
        if found.icc is None
        else usual_spreads(shards, icc=found.icc, shuffled=found.shuffled),
    }
    _warn_of_labels(found)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    table = Table("", url, show_header=True, box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, _readable(name, value))
    Console().print(table)
    if found.about.progressive:
        Console().print(
            "Progressive JPEGs take about 3 times as long to decode: `penstock pack --baseline` "
            "rewrites them without loss.",
            soft_wrap=True,
        )


def _warn_of_labels(index: Index) -> None:
    """Say where labels would make ranks lopsided, beside what a command prints."""
    if index.icc is None:
        return
    spreads = usual_spreads(len(index.sizes), icc=index.icc, shuffled=index.shuffled)
    if words := usual_spread_words(spreads, icc=index.icc):
        Console(stderr=True).print(f"[yellow]{words}[/]", soft_wrap=True)


def parse_options(pairs: list[str] | None) -> dict[str, Any] | None:
    """`KEY=VALUE` pairs as a dict; a value that is JSON (true, 3, {...}) is taken as such."""
    if not pairs:
        return None
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ConfigError(f"--storage-option got {key!r}, wanted KEY=VALUE such as anon=true.")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def _report(summary: dict[str, Any], *, as_json: bool, place: str) -> None:
    if as_json:
        typer.echo(json.dumps(summary))
        return
    console = Console()
    shards = summary["shards"]
    console.print(
        f"[bold green]done[/] {summary['samples']:,} samples in {shards:,} "
        f"shard{'s' * (shards != 1)}, {format_size(summary['bytes'])}, {summary['seconds']:.1f} s"
    )
    if not summary.get("complete", True):
        console.print("This rank's share; the pack is whole when the other ranks are done.")
    if summary.get("progressive"):
        console.print(
            f"[yellow]{summary['progressive']:,} progressive JPEGs[/], which take about 3 times as "
            "long to decode: --baseline rewrites them without loss, --quality with a little.",
            soft_wrap=True,
        )
    if summary["quarantined"]:
        console.print(
            f"[yellow]{summary['quarantined']:,} quarantined[/], each by name with its reason in "
            f"{place}/quarantine.jsonl",
            soft_wrap=True,
        )


def _readable(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("bytes"):
        return format_size(value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {_readable(str(k), v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
