"""Declare the options of commands as types; those that several commands share are written once.

typer reads them at run time from the annotations of a command's parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from penstock.cache import ConfigError

if TYPE_CHECKING:
    from penstock.readers.formats import Sampling, Unit, WindowArgument

Recipe = Literal["imagenet", "imagenet-eval", "none"]
"""A recipe that has a name."""

# --- of several commands -------------------------------------------------------------------------

Source = Annotated[str, typer.Argument(help="The dataset: a path or an fsspec URL.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
CacheFolder = Annotated[
    Path | None, typer.Option("--cache", help="Cache folder for the data of a remote URL.")
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        help="Run one task per shard on other workers: dask://HOST:PORT, "
        "dask-scheduler-file:FILE, ray://HOST:PORT, ray (the local one) or mpi (docs/packs.md). "
        "All workers must reach the source and the destination.",
    ),
]
JobCacheFolder = Annotated[
    Path, typer.Option("--cache", help="The cache folder that the job will use.")
]
IndexFolder = Annotated[
    str | None, typer.Option("--index", help="Folder that `penstock index --out` wrote.")
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option", "-o", help="KEY=VALUE for the file system (fsspec), repeatable."
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="Format of the data, if their names don't show it: folder, tar, pack, zarr, npy (and "
        ".npz), parquet, arrow (and Feather), tokens.",
    ),
]
ManifestFile = Annotated[
    str | None,
    typer.Option(
        "--manifest",
        help="Table of a folder's samples, such as list.csv or list.jsonl with a column path; in "
        "the folder or elsewhere on this machine.",
    ),
]
FieldPlaces = Annotated[
    str | None,
    typer.Option(
        "--fields",
        help="Source of each field, as a sub-folder, pattern, column, member or path of an array: "
        "image=images,mask=masks.",
    ),
]
SampleWindow = Annotated[
    list[str] | None,
    typer.Option(
        "--sample",
        help="Size of a sample of arrays or tokens, by axis; - is a whole axis: 2048, "
        "8,-,256,256, or image=8,-,256,256 for one array (repeatable); file: one file is a sample; "
        "row: one step of the first axis is a sample.",
    ),
]
SampleStride = Annotated[
    list[str] | None,
    typer.Option(
        "--stride", help="Distance between samples, written as --sample; by default their size."
    ),
]
NumberType = Annotated[
    str | None, typer.Option("--dtype", help="Number type of raw files, such as uint16 for tokens.")
]
DocumentMode = Annotated[
    str | None,
    typer.Option(
        "--documents", help="How sequences of tokens treat documents: across, within or pack."
    ),
]
Vocabulary = Annotated[
    int | None,
    typer.Option("--vocabulary", help="Number of token ids; a sample with others is bad."),
]
AllowEmpty = Annotated[
    bool,
    typer.Option(
        "--allow-empty",
        help="Keep the class number of a class folder without samples, which is otherwise an "
        "error.",
    ),
]
MaxPixels = Annotated[
    int | None,
    typer.Option(min=1, help="Largest accepted image or mask, in pixels; by default 134,217,728."),
]
Workers = Annotated[
    int, typer.Option(min=0, help="Decode threads; 0: all usable cores.", show_default=True)
]

# --- pack ----------------------------------------------------------------------------------------

PackFolder = Annotated[str, typer.Argument(help="Folder of the pack: a new one, or one to resume.")]
Shuffle = Annotated[
    bool,
    typer.Option(
        "--shuffle/--no-shuffle",
        help="Shuffle samples across shards once, on disk; --no-shuffle keeps the source's order "
        "and ids.",
    ),
]
ShuffleSeed = Annotated[int, typer.Option(help="Seed of that shuffle.")]
ShardBytes = Annotated[
    str, typer.Option(help="Size of a shard, the unit that is fetched and cached.")
]
ForNodes = Annotated[
    int | None,
    typer.Option(
        "--for-nodes",
        help="Choose the shard size for a job on this many nodes, at most 64MiB, instead of "
        "--shard-bytes (docs/sizing.md).",
    ),
]
ForBatch = Annotated[
    int | None,
    typer.Option(
        "--for-batch", help="With --for-nodes: the job's global batch; by default 2,048 per node."
    ),
]
PackFields = Annotated[
    str | None,
    typer.Option(
        "--fields",
        help="Fields to pack, such as image,label (default: all), or the source of each in a "
        "folder: image=images,mask=masks.",
    ),
]
ImageFields = Annotated[
    str | None,
    typer.Option(
        "--image",
        help="Image fields that --short-side, --quality and --baseline change, such as left,right "
        "(default: all).",
    ),
]
ShortSide = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Shrink larger images to this short side, in pixels, and write them as upright "
        "baseline JPEGs, with their masks, boxes and keypoints. Other images stay unchanged.",
    ),
]
Quality = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=100,
        help="JPEG quality of rewritten images (default: 92); without --short-side all images are "
        "rewritten at their size.",
    ),
]
Baseline = Annotated[
    bool,
    typer.Option(
        "--baseline",
        help="Rewrite progressive JPEGs as baseline JPEGs without loss; these decode about 3 "
        "times as fast. Needs the extra 'transcode'.",
    ),
]

# --- index ---------------------------------------------------------------------------------------

IndexOut = Annotated[
    str | None,
    typer.Option(
        help="Folder for the index; for remote data also a URL of the same store. By default it "
        "is next to local data (photos.penstock), else in --cache, else in the user's cache "
        "directory."
    ),
]

# --- inspect -------------------------------------------------------------------------------------

WalkBatchSize = Annotated[
    int, typer.Option(min=1, help="Global batch for which lanes and window are shown.")
]
ShownSamples = Annotated[
    int | None,
    typer.Option(min=1, help="Show a batch of this many samples as the model will receive it."),
]
ShownRecipe = Annotated[Recipe, typer.Option(help="With --batch: the recipe for images.")]
ShownSeed = Annotated[int, typer.Option(help="With --batch: seed of order and augmentation.")]
ShownEpoch = Annotated[int, typer.Option(min=0, help="With --batch: epoch of the batch.")]
ContactSheet = Annotated[
    Path | None,
    typer.Option(help="With --batch: write the batch as a picture, such as contact.png."),
]

# --- warm ----------------------------------------------------------------------------------------

WarmSource = Annotated[str, typer.Argument(help="The dataset: a URL, as for Dataset.")]
MaxBytes = Annotated[
    str | None,
    typer.Option(
        help='The cache\'s limit, such as "1.5TB", as the job will set it. By default the '
        "folder's present limit, else 90 % of the free space."
    ),
]
FetchedShards = Annotated[int, typer.Option(min=1, help="Shards that are fetched in parallel.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only show what would be fetched and whether it fits.")
]

# --- bench ---------------------------------------------------------------------------------------

BenchRecipe = Annotated[
    str,
    typer.Option(
        help="Recipe: auto (imagenet if there are images), imagenet, imagenet-eval, none (read "
        "without decoding), or module:name of your own recipe."
    ),
]
BenchFields = Annotated[
    str | None,
    typer.Option(
        "--fields",
        help="Fields of a batch, such as image,label, or the source of each in a folder: "
        "image=images,mask=masks.",
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Samples per batch; by default the accelerator's, else 256 or the whole dataset.",
    ),
]
Device = Annotated[str, typer.Option(help="Device that decodes images: cpu, cuda, cuda:1.")]
Seconds = Annotated[float, typer.Option(help="Length of each measured run.")]
Against = Annotated[
    str | None,
    typer.Option(help="Other loaders to measure in turns on the same files: torch,dali,… or all."),
]
StepMs = Annotated[
    float | None, typer.Option(help="Emulate a training step of this many milliseconds per batch.")
]
AcceleratorName = Annotated[
    str | None, typer.Option(help="Emulate the step of a known accelerator: h100-resnet50.")
]
DecodeThreads = Annotated[
    int | None, typer.Option(min=0, help="Decode threads; 0, the default: all usable cores.")
]
Tune = Annotated[
    bool,
    typer.Option(
        "--tune",
        help="Search for faster settings by short runs, and list them. Takes about four times as "
        "long.",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Write a picture, such as bench.png; needs matplotlib."),
]


def parse_names(text: str | None) -> tuple[str, ...] | None:
    """Parse comma-separated names of fields; None stays None."""
    return None if text is None else tuple(name.strip() for name in text.split(","))


def parse_fields(text: str | None) -> tuple[str, ...] | dict[str, str] | None:
    """Parse the names of fields, or their sources."""
    return parse_places(text) if text is not None and "=" in text else parse_names(text)


def parse_places(text: str | None) -> dict[str, str] | None:
    """Parse `image=images,mask=masks` into a dict. Raises ConfigError."""
    if text is None:
        return None
    if "=" not in text:
        raise ConfigError(
            f"--fields: got {text!r}, wanted the source of each field, such as "
            "image=images,mask=masks. Leave it out for the fields that are found without it."
        )
    places: dict[str, str] = {}
    for pair in text.split(","):
        field, equals, place = pair.partition("=")
        if not (field and equals and place) or field in places:
            raise ConfigError(
                f"--fields: got {text!r}, wanted each field once with its source, such as "
                "image=images,mask=masks."
            )
        places[field] = place
    return places


def parse_sampling(
    *,
    sample: list[str] | None,
    stride: list[str] | None,
    dtype: str | None,
    documents: str | None,
    vocabulary: int | None,
) -> Sampling:
    """Parse the options that cut arrays and tokens into samples. Raises ConfigError."""
    from penstock.readers.formats import check_sampling

    return check_sampling(
        sample=_windows("--sample", sample),
        stride=_windows("--stride", stride),
        dtype=dtype,
        documents=documents,
        vocabulary=vocabulary,
    )


def _windows(option: str, values: list[str] | None) -> WindowArgument | None:
    """Parse `8,-,256` for all arrays, `image=8,-,256` for one array each, or `file` or `row`."""
    if option == "--sample" and values in (["file"], ["row"]):
        return cast("Unit", values[0])
    named: dict[str, tuple[int | None, ...]] = {}
    for text in values or ():
        name, equals, lengths = text.rpartition("=")
        if (not equals and len(values or ()) > 1) or name in named or (equals and not name):
            raise ConfigError(
                f"{option}: got {values!r}, wanted lengths once, such as 8,-,256,256, or once for "
                "each array: image=8,-,256,256."
            )
        named[name] = tuple(_length(option, each) for each in lengths.split(","))
    return named.get("", named or None)


def _length(option: str, text: str) -> int | None:
    if text.strip() == "-":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{option}: got {text!r}, wanted a whole number, or - for a whole axis"
            f"{'; or file, or row' if option == '--sample' else ''}."
        ) from None


def parse_storage_options(pairs: list[str] | None) -> dict[str, Any] | None:
    """Parse `KEY=VALUE` pairs into a dict; values that are JSON (true, 3, {...}) are decoded."""
    if not pairs:
        return None
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ConfigError(f"--storage-option: got {key!r}, wanted KEY=VALUE such as anon=true.")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options
