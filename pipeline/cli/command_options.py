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

Source = Annotated[str, typer.Argument(help="What holds the data: a path or an fsspec URL.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
CacheFolder = Annotated[
    Path | None,
    typer.Option("--cache", help="Folder that keeps what is downloaded from a remote URL."),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        help="Whose workers do it, a shard a task: dask://HOST:PORT, dask-scheduler-file:FILE, "
        "ray://HOST:PORT, ray (the one that runs here) or mpi (docs/packs.md). Source and "
        "destination have to lie where all of them reach them.",
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
        help="What the data are where their names don't tell: folder, tar, pack, zarr, npy (.npz "
        "too), parquet, arrow (Feather too), tokens.",
    ),
]
ManifestFile = Annotated[
    str | None,
    typer.Option(
        "--manifest",
        help="Table of a folder's samples, as list.csv or list.jsonl with a column path: below the "
        "folder or on this machine.",
    ),
]
FieldPlaces = Annotated[
    str | None,
    typer.Option(
        "--fields",
        help="Where each field lies: a sub-folder, pattern, column, member, or an array's path: "
        "image=images,mask=masks.",
    ),
]
SampleWindow = Annotated[
    list[str] | None,
    typer.Option(
        "--sample",
        help="What of arrays or tokens is one sample, lengths by axis, - is all of it: 2048, "
        "8,-,256,256, or image=8,-,256,256 for one array (repeatable); file: each file of arrays; "
        "row: a step along the first axis.",
    ),
]
SampleStride = Annotated[
    list[str] | None,
    typer.Option("--stride", help="From one sample to the next, as --sample; by default as long."),
]
NumberType = Annotated[
    str | None, typer.Option("--dtype", help="Of files that don't tell: uint16 for tokens.")
]
DocumentMode = Annotated[
    str | None,
    typer.Option(
        "--documents", help="How sequences of tokens go with documents: across, within or pack."
    ),
]
Vocabulary = Annotated[
    int | None, typer.Option("--vocabulary", help="Token ids that there are: others are bad.")
]
AllowEmpty = Annotated[
    bool,
    typer.Option(
        "--allow-empty",
        help="A class folder without samples keeps its class number; otherwise it is refused.",
    ),
]
MaxPixels = Annotated[
    int | None,
    typer.Option(
        min=1, help="Pixels of the largest image or mask that is accepted; by default 134,217,728."
    ),
]
Workers = Annotated[
    int, typer.Option(min=0, help="Decode threads; 0 is all usable cores.", show_default=True)
]

# --- pack ----------------------------------------------------------------------------------------

PackFolder = Annotated[
    str, typer.Argument(help="Folder to write the pack to: new, or begun before.")
]
Shuffle = Annotated[
    bool,
    typer.Option(
        "--shuffle/--no-shuffle",
        help="Shuffle samples across shards, for good; --no-shuffle keeps the source's ids.",
    ),
]
ShuffleSeed = Annotated[int, typer.Option(help="Seed of that shuffle.")]
ShardBytes = Annotated[
    str, typer.Option(help="Size of a shard: what is fetched and cached as one.")
]
ForNodes = Annotated[
    int | None,
    typer.Option(
        "--for-nodes",
        help="Instead of --shard-bytes: as large as a job on so many nodes wants its shards, 64MiB "
        "at most (docs/sizing.md).",
    ),
]
ForBatch = Annotated[
    int | None,
    typer.Option(
        "--for-batch", help="With --for-nodes: its global batch; by default 2,048 a node."
    ),
]
PackFields = Annotated[
    str | None,
    typer.Option(
        "--fields",
        help="Fields to pack, such as image,label; all unless told. Or where each lies in a "
        "folder: image=images,mask=masks.",
    ),
]
ImageFields = Annotated[
    str | None,
    typer.Option(
        "--image",
        help="Image fields that --short-side, --quality and --baseline act on, such as left,right; "
        "all unless told.",
    ),
]
ShortSide = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Rewrite images whose short side is longer: upright, so many pixels, as baseline "
        "JPEGs, and their masks, boxes and keypoints with them. Others stay as they are.",
    ),
]
Quality = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=100,
        help="JPEG quality of what is rewritten (92 by default); without --short-side every "
        "image is rewritten at its size.",
    ),
]
Baseline = Annotated[
    bool,
    typer.Option(
        "--baseline",
        help="Rewrite progressive JPEGs as baseline ones without loss; they decode about 3 "
        "times as fast. Needs the extra 'transcode'.",
    ),
]

# --- index ---------------------------------------------------------------------------------------

IndexedSource = Annotated[str, typer.Argument(help="What holds the data: a path or an fsspec URL.")]
IndexOut = Annotated[
    str | None,
    typer.Option(
        help="Folder for the index, of remote data also a URL of the same store; else it lies "
        "beside local data (photos.penstock), or in --cache, or in the user's cache directory."
    ),
]

# --- inspect -------------------------------------------------------------------------------------

WalkBatchSize = Annotated[
    int, typer.Option(min=1, help="Global batch to tell lanes and window for.")
]
ShownSamples = Annotated[
    int | None, typer.Option(min=1, help="Show so many samples as a model gets them, instead.")
]
ShownRecipe = Annotated[Recipe, typer.Option(help="With --batch: what is done to images.")]
ShownSeed = Annotated[int, typer.Option(help="With --batch: of order and augmentation.")]
ShownEpoch = Annotated[int, typer.Option(min=0, help="With --batch: whose first batch.")]
ContactSheet = Annotated[
    Path | None, typer.Option(help="With --batch: contact sheet to write, as contact.png.")
]

# --- warm: of the job that will read -------------------------------------------------------------

WarmSource = Annotated[
    str, typer.Argument(help="What holds the data: any URL that a Dataset takes.")
]
MaxBytes = Annotated[
    str | None,
    typer.Option(
        help="The cache's limit, as \"1.5TB\": the job's. Without: what the folder has, else "
        "90 % of the free space."
    ),
]
FetchedShards = Annotated[int, typer.Option(min=1, help="Shards that are fetched at a time.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only tell what would be fetched, and if it fits.")
]

# --- bench ---------------------------------------------------------------------------------------

BenchRecipe = Annotated[
    str,
    typer.Option(
        help="What is done to samples: auto (imagenet where there are images), imagenet, "
        "imagenet-eval, none (they are read only), or module:name of your own recipe."
    ),
]
BenchFields = Annotated[
    str | None,
    typer.Option(
        "--fields",
        help="Fields of a batch, such as image,label; or where each lies in a folder: "
        "image=images,mask=masks.",
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1, help="Samples of a batch; by default the accelerator's, else 256 or all there is."
    ),
]
Device = Annotated[str, typer.Option(help="Where images are decoded: cpu, cuda, cuda:1.")]
Seconds = Annotated[float, typer.Option(help="Length of each measured run.")]
Against = Annotated[
    str | None,
    typer.Option(
        help="Loaders to measure beside, in turns, on the same files: torch,dali,… or all."
    ),
]
StepMs = Annotated[
    float | None,
    typer.Option(help="Emulate a training step of that many milliseconds over a batch."),
]
AcceleratorName = Annotated[
    str | None, typer.Option(help="Emulate a known accelerator's step, such as h100-resnet50.")
]
DecodeThreads = Annotated[
    int | None, typer.Option(min=0, help="Decode threads; 0, as by default, is all usable cores.")
]
Tune = Annotated[
    bool,
    typer.Option(
        "--tune",
        help="Search for faster settings by short runs, and show what was tried. Takes about "
        "four times as long.",
    ),
]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Picture to write, as bench.png; needs matplotlib.")
]


def parse_names(text: str | None) -> tuple[str, ...] | None:
    """Names of fields that a comma parts; None where none is given."""
    return None if text is None else tuple(name.strip() for name in text.split(","))


def parse_fields(text: str | None) -> tuple[str, ...] | dict[str, str] | None:
    """Return the names of fields, or the place of each."""
    return parse_places(text) if text is not None and "=" in text else parse_names(text)


def parse_places(told: str | None) -> dict[str, str] | None:
    """`image=images,mask=masks` as a dict."""
    if told is None:
        return None
    if "=" not in told:
        raise ConfigError(
            f"--fields got {told!r}, wanted where each field lies, such as "
            "image=images,mask=masks. Leave it out for the fields that are found without it."
        )
    places: dict[str, str] = {}
    for pair in told.split(","):
        field, equals, place = pair.partition("=")
        if not (field and equals and place) or field in places:
            raise ConfigError(
                f"--fields got {told!r}, wanted each field once with its place, such as "
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
    """Return how arrays and tokens are cut into samples. Raises ConfigError."""
    from penstock.readers.formats import check_sampling

    return check_sampling(
        sample=_windows("--sample", sample),
        stride=_windows("--stride", stride),
        dtype=dtype,
        documents=documents,
        vocabulary=vocabulary,
    )


def _windows(option: str, told: list[str] | None) -> WindowArgument | None:
    """`8,-,256` for all arrays, or `image=8,-,256` for each that is named; `file` or `row`."""
    if option == "--sample" and told in (["file"], ["row"]):
        return cast("Unit", told[0])
    named: dict[str, tuple[int | None, ...]] = {}
    for text in told or ():
        name, equals, lengths = text.rpartition("=")
        if (not equals and len(told or ()) > 1) or name in named or (equals and not name):
            raise ConfigError(
                f"{option} got {told!r}, wanted lengths once, such as 8,-,256,256, or once for "
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
            f"{option} got {text!r}, wanted a whole number, or - for all of an axis"
            f"{'; or file, or row' if option == '--sample' else ''}."
        ) from None


def parse_storage_options(pairs: list[str] | None) -> dict[str, Any] | None:
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
