"""`python -m benchmarks.zarr_chunks`: samples of a Zarr array, compared with other readers of Zarr.

Arrays of (N, 3, 128, 128) uint8, 49 kB per sample, zstd, in chunks of 1, 8 and 32 samples, each a
file or in shards of 256 samples. All sides take turns within one run, in rotating order, with a
warm page cache and batches of 64:

- penstock: the loader, shuffled, default settings;
- bare: every chunk read from its file and decompressed, on one thread per core, each into the same
  memory: the least that any reader needs; the places of chunks in shards are known before;
- tensorstore: chunks in random order, those of a batch read at once and joined: samples of a chunk
  stay together, as shuffling them would need additional memory. Excluded if it isn't installed;
- zarr: zarr-python, chunk by chunk in random order, joined to batches;
- zarr by sample: zarr-python behind torch's DataLoader with 2 workers, shuffled.

Ratios are computed within a round. For an array that a window covers, chunks of the epoch before
are still decoded: "cpu over bare" charges them at bare's price, and "decoded" is the share of
samples that the loader decoded itself; rates are not corrected. CPU-seconds are of this process
only, so those of torch's workers are not reported. Writes benchmarks/results/zarr_chunks.json.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from benchmarks.record import RESULTS, write_result
from penstock.pipeline.bench import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

SHAPE = (3, 128, 128)
CHUNKS = (1, 8, 32)
SHARD = 256
BATCH = 64
WORKERS = 2
SIDES = ("penstock", "bare", "tensorstore", "zarr", "zarr by sample")

_IDLE_S = 0.01
_SLOW_SHARE = 4  # what is slow plays a part of the samples


def pictures(samples: int) -> NDArray[np.uint8]:
    """Return random walks, which zstd compresses to about half at the speed of photographs with
    noise."""
    steps = np.random.default_rng(7).integers(-2, 3, (samples, *SHAPE), np.int8)
    return np.cumsum(steps, axis=3, dtype=np.int8).view(np.uint8)


def write_array(path: Path, values: NDArray[np.uint8], *, chunk: int, is_sharded: bool) -> None:
    """Write an array of version 3 with the codec zstd."""
    import zarr

    array = zarr.create_array(
        path,
        shape=values.shape,
        chunks=(chunk, *values.shape[1:]),
        shards=(SHARD, *values.shape[1:]) if is_sharded else None,
        dtype="uint8",
        compressors=[zarr.codecs.ZstdCodec(level=3)],
    )
    array[:] = values


@dataclass(frozen=True, slots=True)
class Span:
    """The place of a chunk."""

    path: Path
    start: int
    size_bytes: int


def spans(path: Path, *, samples: int, chunk: int, is_sharded: bool) -> list[Span]:
    """Return the places of an array's chunks, in order."""
    if not is_sharded:
        files = [path / "c" / str(number) / "0/0/0" for number in range(-(-samples // chunk))]
        return [Span(file, 0, file.stat().st_size) for file in files]
    found = []
    for number in range(-(-samples // SHARD)):
        file = path / "c" / str(number) / "0/0/0"
        index = np.frombuffer(file.read_bytes()[-16 * (SHARD // chunk) - 4 : -4], "<u8")
        pairs = index.reshape(-1, 2)
        found += [Span(file, int(start), int(size)) for start, size in pairs if size != 2**64 - 1]
    return found


def bare(wanted: list[Span], chunk: int) -> Iterator[int]:
    """Read and decompress every chunk, on one thread per core, each into its own memory."""
    from concurrent.futures import ThreadPoolExecutor

    from penstock.cache.base import usable_cores

    order = np.random.default_rng().permutation(len(wanted)).tolist()
    threads = usable_cores()
    with ThreadPoolExecutor(threads) as pool:
        parts = [[wanted[number] for number in order[place::threads]] for place in range(threads)]
        yield from pool.map(lambda part: _decompress_all(part, chunk), parts)


def _decompress_all(wanted: list[Span], chunk: int) -> int:
    from numcodecs.zstd import decompress

    memory = np.empty((chunk, *SHAPE), np.uint8)
    for span in wanted:
        fd = os.open(span.path, os.O_RDONLY)
        data = os.pread(fd, span.size_bytes, span.start)
        os.close(fd)
        decompress(data, memory)
    return chunk * len(wanted)


def by_tensorstore(path: Path, samples: int, chunk: int) -> Iterator[int]:
    """Yield batches of chunks in random order, those of one read at once."""
    import torch

    ts: Any = import_module("tensorstore")
    store = ts.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}, open=True
    ).result()
    for chosen in _batches(samples, chunk):
        reads = [store[first : first + chunk].read() for first in chosen]
        batch = torch.from_numpy(np.concatenate([read.result() for read in reads]))
        yield len(batch)


def by_zarr(path: Path, samples: int, chunk: int) -> Iterator[int]:
    """Yield batches of chunks in random order, one after the other."""
    import torch
    import zarr

    array: Any = zarr.open_array(path, mode="r")
    for chosen in _batches(samples, chunk):
        parts = [array[first : first + chunk] for first in chosen]
        batch = torch.from_numpy(np.concatenate(parts))
        yield len(batch)


def _batches(samples: int, chunk: int) -> Iterator[list[int]]:
    """Return the first samples of the chunks of each batch."""
    firsts = np.random.default_rng().permutation(samples // chunk) * chunk
    step = max(1, BATCH // chunk)
    for place in range(0, len(firsts), step):
        yield firsts[place : place + step].tolist()


class BySample:
    """A map-style dataset over an array, as users write it."""

    def __init__(self, path: Path, samples: int) -> None:
        self._path, self._samples = path, samples
        self._open: Any = None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, i: int) -> Any:
        import torch
        import zarr

        if self._open is None:  # in the worker
            self._open = zarr.open_array(self._path, mode="r")
        return torch.from_numpy(self._open[i])


def installed() -> tuple[str, ...]:
    """Return the installed sides."""
    from importlib.util import find_spec

    return tuple(side for side in SIDES if side != "tensorstore" or find_spec(side))


def measure(*, samples: int, rounds: int, chunks: tuple[int, ...], results: Path) -> Path:
    """Play the rounds, print the figures and write the result. Returns its path."""
    console, found, values = Console(), {}, pictures(samples)
    with tempfile.TemporaryDirectory() as folder:
        for is_sharded in (False, True):
            for chunk in chunks:
                name = f"{chunk} a chunk{', in shards' if is_sharded else ''}"
                path = Path(folder) / f"{chunk}-{is_sharded}.zarr"
                write_array(path, values, chunk=chunk, is_sharded=is_sharded)
                found[name] = _rounds(path, samples, chunk, is_sharded=is_sharded, rounds=rounds)
                console.print(name, found[name], highlight=False)
    settings = {"samples": samples, "batch": BATCH, "rounds": rounds, "workers": WORKERS}
    report = settings | {"left_out": sorted(set(SIDES) - set(installed())), "arrays": found}
    others = ("zarr", "numcodecs", "tensorstore")
    return write_result("zarr_chunks", report, folder=results, distributions=others)


def _rounds(path: Path, samples: int, chunk: int, *, is_sharded: bool, rounds: int) -> Any:
    import torch.utils.data

    from penstock import DataLoader, Dataset

    sides = installed()
    report = spans(path, samples=samples, chunk=chunk, is_sharded=is_sharded)
    few = max(BATCH, samples // _SLOW_SHARE)
    by_sample: Any = BySample(path, few)
    with (
        Dataset(path) as dataset,
        DataLoader(dataset, BATCH, shuffle=True, drop_last=True, seed=7) as loader,
    ):
        theirs = torch.utils.data.DataLoader(
            by_sample,
            BATCH,
            shuffle=True,
            num_workers=WORKERS,
            persistent_workers=True,
            multiprocessing_context="forkserver",
        )
        plays: dict[str, Callable[[], Iterator[int]]] = {
            "penstock": lambda: (len(batch) for (batch,) in loader),
            "bare": lambda: bare(report, chunk),
            "tensorstore": lambda: by_tensorstore(path, samples, chunk),
            "zarr": lambda: by_zarr(path, few, chunk),
            "zarr by sample": lambda: (len(batch) for batch in theirs),
        }
        played: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for side in sides:
            _play(plays[side])
        decoded: list[float] = []
        for number in range(rounds):
            for side in sides if number % 2 == 0 else sides[::-1]:
                before = loader.statistics().chunks_decoded
                played[side].append(_play(plays[side]))
                if side == "penstock":
                    chunks = loader.statistics().chunks_decoded - before
                    decoded.append(chunks * chunk / samples)
        # Chunks of one sample are decoded into the batch, and aren't counted.
        if not loader.statistics().chunks_decoded:
            decoded = [1.0] * rounds
    return _figures(played, decoded)


def _figures(played: dict[str, list[tuple[float, float]]], decoded: list[float]) -> dict[str, Any]:
    """Summarise the rounds. decoded: share of the samples that the loader decoded, by round."""
    report: dict[str, Any] = {
        side: {
            "samples_per_s": round(statistics.median(rate for rate, _ in runs)),
            "cpu_s_per_1000": round(statistics.median(cpu for _, cpu in runs), 4),
        }
        for side, runs in played.items()
    }
    report["decoded"] = round(statistics.median(decoded), 3)
    mine = played["penstock"]
    for side, runs in played.items():
        if side == "penstock":
            continue
        pairs = list(zip(mine, runs, strict=True))
        if side == "bare":
            ratios = [
                ours[1] / other[1] + 1 - share
                for (ours, other), share in zip(pairs, decoded, strict=True)
            ]
            report["cpu over bare"] = asdict(Figure.of(ratios))
        else:
            report[f"over {side}"] = asdict(
                Figure.of([ours[0] / other[0] for ours, other in pairs])
            )
    return report


def _play(make: Callable[[], Iterator[int]]) -> tuple[float, float]:
    """Return samples per second, and CPU-seconds of this process per 1,000.

    Prefetching for the next epoch is waited for, and counts: that for this epoch was done in the
    play before.
    """
    began, used = time.perf_counter(), _cpu_s()
    count = sum(make())
    rate = count / (time.perf_counter() - began)
    _settle()
    return rate, 1000 * (_cpu_s() - used) / count


def _settle() -> None:
    """Wait until this process is idle."""
    before = -1.0
    while _cpu_s() - before > _IDLE_S:
        before = _cpu_s()
        time.sleep(0.1)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run the measurement."""
    parser = argparse.ArgumentParser(prog="benchmarks.zarr_chunks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1 short round, for a quick check")
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, nargs="*", default=list(CHUNKS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    measure(
        samples=SHARD if options.quick else options.samples,
        rounds=1 if options.quick else options.rounds,
        chunks=tuple(options.chunks),
        results=options.results,
    )


if __name__ == "__main__":
    main()
