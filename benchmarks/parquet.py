"""`python -m benchmarks.parquet`: photographs in Parquet, compared with other readers of Parquet.

All sides take turns within one run, in rotating order, with a warm page cache: row groups of 100,
uncompressed (JPEG doesn't shrink), Hugging Face's features, a file of some hundred MB. Two kinds of
work:

- "decoded": shuffled, each photograph decoded, a random resized crop of 224, a flip, normalised, in
  batches of 64;
- "bytes": the encoded bytes of shuffled samples and their labels, in batches of 64.

Sides: penstock on the Parquet files; penstock on a pack of the same photographs; a pyarrow loop
over shuffled row groups with a shuffled pool of 1,000 samples; `datasets` map-style (which first
converts all to Arrow files; that isn't counted) and streaming with a buffer of 1,000; LitData over
the same Parquet files. Sides that leave decoding to the user decode with simplejpeg and OpenCV if
installed, otherwise with Pillow, in this process. Sides that aren't installed are excluded and
listed.

Ratios are computed within a round: the other side's CPU-seconds per 1,000 samples divided by
penstock's; for bytes, samples per second. CPU time is that of this process and its children. Writes
benchmarks/results/parquet.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.console import Console

from benchmarks.record import RESULTS, write_result
from penstock.pipeline.bench import Figure, machine, tree_cpu_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Work = Literal["decoded", "bytes"]
Pair = tuple[bytes, int]

ROWS, BATCH, POOL = 100, 64, 1000
FEATURES = (
    b'{"info": {"features": {"image": {"_type": "Image"}, '
    b'"label": {"_type": "ClassLabel", "names": %s}}}}'
)


def write_files(folder: Path, images: Path, *, files: int = 2) -> int:
    """Write the photographs of a class folder as Parquet files, shuffled; return their number."""
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq

    names = sorted(path.name for path in images.iterdir())
    paths = sorted(images.glob("*/*"))
    order = np.random.default_rng(7).permutation(len(paths)).tolist()
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema(
        [("image", kind), ("label", pa.int64())],
        metadata={b"huggingface": FEATURES % json.dumps(names).encode()},
    )
    for number in range(files):
        rows = [
            {
                "image": {"bytes": paths[i].read_bytes(), "path": paths[i].name},
                "label": names.index(paths[i].parent.name),
            }
            for i in order[number::files]
        ]
        pq.write_table(
            pa.Table.from_pylist(rows, schema),
            folder / f"train-{number:05d}-of-{files:05d}.parquet",
            row_group_size=ROWS,
            compression="none",
        )
    return len(paths)


def arrow_rows(folder: Path) -> Iterator[Pair]:
    """Yield rows as users write it: row groups in random order, through a shuffled pool."""
    import pyarrow.parquet as pq

    rng = np.random.default_rng()
    opened = [pq.ParquetFile(path) for path in sorted(folder.glob("*.parquet"))]
    groups = [(file, n) for file in opened for n in range(file.num_row_groups)]
    pool: list[Pair] = []
    for place in rng.permutation(len(groups)).tolist():
        file, number = groups[place]
        table = file.read_row_group(number, columns=["image.bytes", "label"], use_threads=False)
        images = table.column("image").combine_chunks().field("bytes").to_pylist()
        pool += zip(images, table.column("label").to_pylist(), strict=True)
        while len(pool) >= POOL + ROWS:
            yield _drawn(pool, rng)
    while pool:
        yield _drawn(pool, rng)


def _drawn(pool: list[Pair], rng: np.random.Generator) -> Pair:
    place = int(rng.integers(len(pool)))
    pool[place], pool[-1] = pool[-1], pool[place]
    return pool.pop()


def hugging_face(folder: Path, scratch: Path, *, streaming: bool) -> Callable[[], Iterator[Pair]]:
    """Yield the rows of `datasets` over the files, with undecoded images."""
    import datasets

    datasets.disable_progress_bars()
    files = sorted(map(str, folder.glob("*.parquet")))
    made = datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=streaming, cache_dir=str(scratch)
    ).cast_column("image", datasets.Image(decode=False))

    def rows() -> Iterator[Pair]:
        seed = int(np.random.default_rng().integers(2**31))
        options = {"buffer_size": POOL} if streaming else {}
        for row in made.shuffle(seed=seed, **options):
            yield row["image"]["bytes"], row["label"]

    return rows


def lit_data(folder: Path) -> Callable[[], Iterator[Pair]]:
    """Yield the rows of LitData over the same files, which it indexes."""
    import litdata
    from litdata.streaming.item_loader import ParquetLoader

    litdata.index_parquet_dataset(str(folder))
    dataset = litdata.StreamingDataset(str(folder), item_loader=ParquetLoader(), shuffle=True)

    def rows() -> Iterator[Pair]:
        for row in dataset:
            image, label = (row["image"], row["label"]) if isinstance(row, dict) else row
            yield image["bytes"], int(label)

    return rows


def batched(rows: Iterable[Pair], work: Work) -> Iterator[Any]:
    """Batch rows in this process; decoded ones as tensors."""
    import torch

    from penstock_bench_loaders.simplejpeg import fastest_crop

    crop, rng = fastest_crop(224), np.random.default_rng()
    some: list[Pair] = []
    for row in rows:
        some.append(row)
        if len(some) == BATCH:
            labels = torch.tensor([label for _, label in some])
            if work == "decoded":
                yield (torch.from_numpy(np.stack([crop(image, rng) for image, _ in some])), labels)
            else:
                yield [image for image, _ in some], labels
            some = []


@dataclass(frozen=True, slots=True)
class Side:
    """One side: its batches of one epoch, and how it is closed."""

    play: Callable[[], Iterator[Any]]
    close: Callable[[], object] = lambda: None


def penstock_side(url: Path, work: Work) -> Side:
    """Return our loader with default settings."""
    from penstock import DataLoader, Dataset, imagenet_train
    from penstock.readers.fieldtypes import Bytes

    schema: Any = {"image": Bytes()} if work == "bytes" else None
    dataset = Dataset(url, fields=("image", "label"), schema=schema)
    loader = DataLoader(
        dataset,
        BATCH,
        shuffle=True,
        drop_last=True,
        seed=7,
        augment=imagenet_train(224) if work == "decoded" else None,
    )

    def close() -> None:
        loader.close()
        dataset.close()

    return Side(lambda: iter(loader), close)


def sides(work: Work, files: Path, pack: Path, scratch: Path) -> dict[str, Side]:
    """Return all installed sides."""
    found = {"penstock": penstock_side(files, work)}
    if work == "decoded":
        found["pack"] = penstock_side(pack, work)
    found["pyarrow"] = Side(lambda: batched(arrow_rows(files), work))
    if find_spec("datasets") is not None:
        for name, streaming in (("datasets map", False), ("datasets streaming", True)):
            rows = hugging_face(files, scratch, streaming=streaming)
            found[name] = Side(lambda rows=rows: batched(rows(), work))  # type: ignore[misc]
    if find_spec("litdata") is not None:
        lit = lit_data(files)
        found["litdata"] = Side(lambda: batched(lit(), work))
    return found


def play(side: Side) -> tuple[float, float]:
    """Return the samples per second of an epoch, and CPU-seconds per 1,000."""
    count = 0
    began, used = time.perf_counter(), tree_cpu_s()
    for images, labels in side.play():
        count += len(labels)
        assert len(images) == len(labels)
    return count / (time.perf_counter() - began), 1000 * (tree_cpu_s() - used) / count


def measure(
    *, images: Path, pack: Path, rounds: int, works: Sequence[Work], results: Path, console: Console
) -> Path:
    """Play the rounds, print the ratios and write the result; return its path."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "files"
        files.mkdir()
        samples = write_files(files, images)
        for work in works:
            found[work] = _rounds(sides(work, files, pack, Path(folder)), rounds)
            console.print(work, found[work], highlight=False)
        size = sum(path.stat().st_size for path in files.iterdir())
    settings = {"rounds": rounds, "batch": BATCH, "row_group": ROWS, "pool": POOL}
    report = settings | {
        "samples": samples,
        "bytes": size,
        "cores": machine()["cores"],
        "works": found,
    }
    return write_result(
        "parquet", report, folder=results, distributions=("pyarrow", "datasets", "litdata")
    )


def _rounds(playing: dict[str, Side], rounds: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in playing}
    cpu: dict[str, list[float]] = {name: [] for name in playing}
    try:
        for number in range(rounds + 1):  # the first warms
            names = list(playing)
            for name in names if number % 2 else names[::-1]:
                rate, cpu_s = play(playing[name])
                if number:
                    rates[name].append(rate)
                    cpu[name].append(cpu_s)
    finally:
        for side in playing.values():
            side.close()
    report: dict[str, Any] = {
        name: {
            "samples_per_s": round(statistics.median(rates[name])),
            "cpu_s_per_1000": round(statistics.median(cpu[name]), 4),
        }
        for name in playing
    }
    for name in list(playing)[1:]:
        ours = zip(cpu[name], cpu["penstock"], strict=True)
        report[f"CPU of {name} over ours"] = asdict(
            Figure.of([other / mine for other, mine in ours])
        )
        fast = zip(rates["penstock"], rates[name], strict=True)
        report[f"rate over {name}"] = asdict(Figure.of([mine / other for mine, other in fast]))
    return report


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run the measurement."""
    parser = argparse.ArgumentParser(prog="benchmarks.parquet", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, for a quick check")
    parser.add_argument("--out", type=Path, default=Path("bench-data"))
    parser.add_argument("--images", type=int, default=3072)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", choices=("decoded", "bytes"), action="append")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    from benchmarks.data import prepare

    made = prepare(
        options.out,
        train_images=200 if options.quick else options.images,
        eval_images=16 if options.quick else 64,
    )
    measure(
        images=made.images.train,
        pack=made.pack,
        rounds=1 if options.quick else options.rounds,
        works=options.work or ("decoded", "bytes"),
        results=options.results,
        console=Console(),
    )


if __name__ == "__main__":
    main()
