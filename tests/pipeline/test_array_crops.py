"""Crops of arrays through the loader: the same part at any batch, world and resume, from any
storage; of chunked arrays only what the parts touch is fetched."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock import CenterCrop, DataLoader, Dataset, Map, Pad, RandomCrop, World, concat, pack
from penstock.augment import ArrayDraws, check_array_crops
from penstock.cache import ConfigError, RecipeError
from penstock.pipeline.feed import wanted_share
from penstock.readers.fieldtypes import Array, Value
from penstock.readers.formats import ArrayReader
from tests import tars
from tests.files import npy
from tests.pipeline.feed.memory import Memory
from tests.readers.formats.zarr.hierarchies import opened, write_group

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import ColumnCrop

N, SEED = 14, 5
X = np.arange(N * 2 * 20 * 24, dtype="i4").reshape(N, 2, 20, 24)
Y = (X[:, 0] % 100).astype("u1")
CROP = RandomCrop((7, 9), fields=("x", "y"))

pytestmark = pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")


def zarr_of(root: Path, **chunks: tuple[int, ...]) -> Path:
    report = {"x": (2, 1, 5, 6), "y": (1, 4, 24), **chunks}
    return write_group(root, {"x": X, "y": Y}, chunks=report, compressors={"x": None, "y": None})


def tar_of(root: Path) -> Path:
    """The same samples as .npy files."""
    root.mkdir()
    files = {f"{i:02}.{n}.npy": npy(v[i]) for i in range(N) for n, v in (("x", X), ("y", Y))}
    (root / "0.tar").write_bytes(tars.archive(files))
    return root


def drawn(ids: NDArray[np.int64], epoch: int = 0) -> dict[str, ColumnCrop]:
    """Return where the parts begin."""
    schema: Any = {"x": Array("int32", X.shape[1:]), "y": Array("uint8", Y.shape[1:])}
    crops = check_array_crops([CROP], schema, ("x", "y"))
    return ArrayDraws(crops=crops, seed=SEED).before(ids, epoch)


def parts(ids: NDArray[np.int64], epoch: int) -> dict[str, NDArray[Any]]:
    """Return the expected parts, cut by numpy."""
    found = {}
    for name, crop in drawn(ids, epoch).items():
        whole = {"x": X, "y": Y}[name][ids]
        windows = np.lib.stride_tricks.sliding_window_view(
            whole, crop.shape, axis=tuple(range(1, whole.ndim))
        )
        found[name] = windows[(np.arange(len(ids)), *crop.corners.T)]
    return found


def check(batches: list[Mapping[str, Any]], epoch: int = 0) -> list[int]:
    """Compare batches with what is wanted; their ids."""
    ids: list[int] = []
    for batch in batches:
        mine = batch["id"].numpy()
        for name, wanted in parts(mine, epoch).items():
            assert batch[name].shape == wanted.shape
            assert (batch[name].numpy() == wanted).all()
        ids += mine.tolist()
    return ids


def loader(dataset: Any, **options: Any) -> DataLoader:
    report: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": SEED, "augment": [CROP]}
    return DataLoader(dataset, **{**report, "as_dict": True, "drop_last": True, **options})


@pytest.fixture(params=["zarr local", "zarr remote", "tar", "pack", "pack remote", "npy", "subset"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    kind, root = request.param, zarr_of(tmp_path / "set.zarr")
    fields = ("x", "y", "id")
    if kind.startswith("zarr"):
        with opened(root, kind.split()[1], tmp_path, fields=fields) as dataset:
            yield dataset
        return
    with Dataset(root, fields=fields) as whole:
        if kind.startswith("pack"):
            pack(tar_of(tmp_path / "tars"), tmp_path / "pack", shuffle=False)
            place = "remote" if kind.endswith("remote") else "local"
            with opened(tmp_path / "pack", place, tmp_path, fields=fields) as packed:
                yield packed
        elif kind == "npy":
            (tmp_path / "npy").mkdir()
            for name, values in (("x", X), ("y", Y)):
                np.save(tmp_path / "npy" / f"{name}.npy", values)
            report: Any = {"x": "x.npy", "y": "y.npy"}
            with Dataset(tmp_path / "npy", format="npy", fields=report) as found:
                yield found.select(*fields)
        elif kind == "tar":
            with Dataset(tar_of(tmp_path / "tars"), fields=fields) as found:
                yield found
        else:
            yield whole.subset(range(0, N))


def test_batches_have_the_parts_that_are_drawn(dataset: Any) -> None:
    with loader(dataset) as loaded:
        for epoch in range(2):
            assert len(check(list(loaded), epoch)) == 12


def test_parts_of_datasets_end_to_end_are_their_own_samples(tmp_path: Path) -> None:
    with Dataset(zarr_of(tmp_path / "set.zarr"), fields=("x", "y", "id")) as whole:
        both = concat([whole, whole])
        with loader(both, batch_size=2 * N) as loaded:
            (batch,) = loaded
        ids = batch["id"].numpy()
        assert sorted(ids.tolist()) == list(range(2 * N))
        corners = drawn(ids)["x"].corners[:, 1:].tolist()
        for i, (top, left), x, y in zip(ids, corners, batch["x"], batch["y"], strict=True):
            assert (x.numpy() == X[i % N, :, top : top + 7, left : left + 9]).all()
            assert (y.numpy() == Y[i % N, top : top + 7, left : left + 9]).all()


def test_a_sample_has_its_part_at_any_batch_world_and_resume(tmp_path: Path) -> None:
    with Dataset(zarr_of(tmp_path / "set.zarr"), fields=("x", "y", "id")) as dataset:
        for size, rank in ((2, 0), (2, 1), (3, 1)):
            with loader(
                dataset, batch_size=2, world=World(rank=rank, size=size), drop_last=True
            ) as loaded:
                assert check(list(loaded))
        with loader(dataset, batch_size=3) as loaded:
            steps = iter(loaded)
            for _ in itertools.repeat(None, 3):
                next(steps)
            state = loaded.state_dict()
            rest = [batch["id"].tolist() for batch in steps]
        with loader(dataset, batch_size=3) as loaded:
            loaded.load_state_dict(state)
            found = list(loaded)
        assert [batch["id"].tolist() for batch in found] == rest
        check(found)


def test_the_middle_is_the_same_in_every_epoch(tmp_path: Path) -> None:
    op = CenterCrop((None, 6, 7), fields="x")
    with (
        Dataset(zarr_of(tmp_path / "set.zarr"), fields=("x", "id")) as dataset,
        loader(dataset, augment=[op], batch_size=7) as loaded,
    ):
        for _ in range(2):
            for batch in loaded:
                assert (batch["x"].numpy() == X[batch["id"].numpy(), :, 7:13, 8:15]).all()


def test_only_the_chunks_that_parts_touch_are_fetched(tmp_path: Path) -> None:
    big = np.random.default_rng(0).integers(0, 256, (5, 1024, 1024), dtype=np.uint8)
    chunks = {"x": (1, 128, 256)}
    root = write_group(tmp_path / "big.zarr", {"x": big}, chunks=chunks, compressors={"x": None})
    op = RandomCrop((300, 200), fields="x")
    with opened(root, "remote", tmp_path, fields=("x", "id")) as dataset:
        dataset.open()
        before = dataset.bytes_fetched
        with loader(dataset, augment=[op], batch_size=1, shuffle=False) as loaded:
            ids = np.concatenate([batch["id"].numpy() for batch in loaded])
        fetched = dataset.bytes_fetched - before
        # What the cache kept of the parts isn't fetched again.
        middle = CenterCrop((300, 200), fields="x")
        with loader(dataset, augment=[middle], batch_size=1, shuffle=False) as loaded:
            list(loaded)
            before = dataset.bytes_fetched
            list(loaded)
        assert dataset.bytes_fetched == before
    schema: Any = {"x": Array("uint8", (1024, 1024))}
    draws = ArrayDraws(crops=check_array_crops([op], schema, ("x",)), seed=SEED)
    wanted = 0
    for top, left in draws.before(ids, 0)["x"].corners.tolist():
        rows, columns = (top + 299) // 128 - top // 128 + 1, (left + 199) // 256 - left // 256 + 1
        wanted += rows * columns * 128 * 256
    assert wanted <= fetched <= 1.05 * wanted
    assert fetched < big.nbytes // 4


def test_shards_are_filled_whole_where_parts_touch_nearly_all_of_them(tmp_path: Path) -> None:
    with opened(zarr_of(tmp_path / "set.zarr"), "remote", tmp_path, fields=("x", "y")) as dataset:
        remote, schema = dataset.remote_shards, dataset.schema
        assert remote is not None

        def share(op: RandomCrop) -> float:
            crops = check_array_crops([op], schema, ("x", "y"))
            return wanted_share(dataset, remote, ArrayDraws(crops=crops, seed=SEED))

        assert share(RandomCrop((19, 23), fields=("x", "y"))) == 1
        # Chunks of two samples: of each either touches some.
        assert 0.1 < share(RandomCrop((2, 2), fields=("x", "y"))) < 0.5
        assert share(RandomCrop((2, 2), fields="y")) > 0.8


def test_parts_alone_are_decoded_into_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    real = ArrayReader.gather

    def gather(self: ArrayReader, field: str, rows: Any, out: Any, *args: Any, **more: Any) -> None:
        seen.append(out.shape[1:])
        real(self, field, rows, out, *args, **more)

    monkeypatch.setattr(ArrayReader, "gather", gather)
    with (
        Dataset(zarr_of(tmp_path / "set.zarr"), fields=("x", "y", "id")) as dataset,
        loader(dataset) as loaded,
    ):
        list(loaded)
    assert set(seen) == {(2, 7, 9), (7, 9)}


RAGGED = [np.arange((4 + i) * 6, dtype="i4").reshape(4 + i, 6) for i in range(8)]


def test_samples_of_several_shapes_are_cropped_and_small_ones_are_bad() -> None:
    types = {"r": Array("int32", (None, 6)), "n": Value("int64")}
    source = Memory(types, {"r": RAGGED, "n": list(range(8))}, fields=("r", "n", "id"))
    op = RandomCrop((5, 3), fields="r")
    with loader(source, augment=[op], batch_size=4, max_bad=0.5) as loaded:
        for batch in loaded:
            assert batch["r"].shape == (4, 5, 3)
            for i, part in zip(batch["id"].tolist(), batch["r"].numpy(), strict=True):
                assert i != 0  # 4 rows: a substitute came in its place, cropped by its own draw
                top, left = divmod(int(part[0, 0]), 6)
                assert (part == RAGGED[i][top : top + 5, left : left + 3]).all()
        assert loaded.statistics().bad == 1
    with pytest.raises(RecipeError, match="smaller shape"):
        loader(source, augment=[RandomCrop((5, 7), fields="r")])
    with pytest.raises(RecipeError, match=r"don't differ in length"):
        loader(source, augment=[op, Pad("r")])


def test_a_map_gets_the_part_and_stands_behind_the_crop(tmp_path: Path) -> None:
    def halve(y: NDArray[Any]) -> NDArray[Any]:
        assert y.shape == (7, 9)
        return y // 2

    with Dataset(zarr_of(tmp_path / "set.zarr"), fields=("x", "y", "id")) as dataset:
        with loader(dataset, augment=[CROP, Map(halve, fields="y")]) as loaded:
            for batch in loaded:
                wanted = parts(batch["id"].numpy(), 0)
                assert (batch["x"].numpy() == wanted["x"]).all()
                assert (batch["y"].numpy() == wanted["y"] // 2).all()
        with pytest.raises(RecipeError, match=r"RandomCrop.* comes after Map\(halve\)"):
            loader(dataset, augment=[Map(halve, fields="y"), CROP])
        with loader(dataset, augment=[Map(halve, fields="y"), RandomCrop(3, fields="x")]) as loaded:
            pass


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ([RandomCrop((30, 3), fields="x")], "smaller shape"),
        ([RandomCrop(3, fields="z")], '"z" is no selected image or array'),
        ({"x": [RandomCrop(3, fields="y")]}, "got RandomCrop"),
    ],
)
def test_invalid_crops_are_reported_at_the_start(recipe: Any, why: str, tmp_path: Path) -> None:
    with (
        Dataset(zarr_of(tmp_path / "set.zarr"), fields=("x", "y")) as dataset,
        pytest.raises(ConfigError, match=why),
    ):
        loader(dataset, augment=recipe)


def test_a_damaged_chunk_is_bad_for_the_parts_that_touch_it(tmp_path: Path) -> None:
    root = write_group(tmp_path / "set.zarr", {"x": X}, chunks={"x": (1, 2, 10, 12)})
    damaged = root / "x" / "c" / "3" / "0" / "1" / "1"
    with Dataset(root, fields=("x", "id")) as dataset:
        dataset.open()
        damaged.write_bytes(bytes(damaged.stat().st_size))
        op, touched = RandomCrop((4, 4), fields="x"), 0
        with loader(dataset, augment=[op], batch_size=7, max_bad=1.0) as loaded:
            for epoch in range(8):
                schema: Any = {"x": Array("int32", X.shape[1:])}
                draws = ArrayDraws(crops=check_array_crops([op], schema, ("x",)), seed=SEED)
                found = {int(i): x for b in loaded for i, x in zip(b["id"], b["x"], strict=True)}
                own = draws.before(np.arange(N), epoch)["x"].corners
                touches = bool((own[3, 1:] + 4 > (10, 12)).all())
                touched += touches
                assert (3 in found) != touches
                for i, part in found.items():
                    at = tuple(slice(a, a + n) for a, n in zip(own[i], (2, 4, 4), strict=True))
                    assert (part.numpy() == X[i][at]).all()
        assert 0 < touched < 8
