"""Datasets of tokens, end to end: every token against what was written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import torch

from penstock import DataLoader, Dataset, World
from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError, PenstockWarning
from penstock.readers.fieldtypes import Array, Tokens
from penstock.readers.formats.tokens import token_format
from tests.token_files import draw_documents, write_megatron

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

LENGTH = 16
SIZES = (1000, 15, 0, 333)


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_format, "PART_BYTES", 600)


def write_flat(root: Path, *, dtype: str = "uint16") -> list[NDArray[Any]]:
    root.mkdir()
    rng = np.random.default_rng(5)
    files = [rng.integers(0, 50_000, size).astype(dtype) for size in SIZES]
    for number, tokens in enumerate(files):
        tokens.tofile(root / f"{number}.bin")
    return files


@pytest.fixture(params=["local", "remote"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the URL of the dataset written to tmp_path / "set": local, or in a store."""
    if request.param == "local":
        yield lambda: tmp_path / "set"
        return
    memory, folder = fsspec.filesystem("memory"), f"/tokens-{tmp_path.name}"

    def copied() -> str:
        for path in (tmp_path / "set").iterdir():
            memory.pipe(f"{folder}/{path.name}", path.read_bytes())
        return f"memory:/{folder}"

    yield copied
    memory.rm(folder, recursive=True)


def rows_of(dataset: Dataset, *fields: str) -> list[NDArray[Any]]:
    """Read the fields of all samples, in order."""
    batch = dataset.read(dataset.rows(np.arange(len(dataset))), fields=fields)
    return [np.asarray(getattr(batch.columns[name], "values", None)) for name in fields]


def windows(tokens: NDArray[Any], length: int, stride: int) -> list[list[int]]:
    count = (len(tokens) - length) // stride + 1 if len(tokens) >= length else 0
    return [tokens[i * stride : i * stride + length].tolist() for i in range(count)]


@pytest.mark.parametrize("stride", [None, 10, 20])
@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint8", ">u4"])
def test_flat_files_are_cut_every_stride(
    tmp_path: Path, place: Any, stride: int | None, dtype: str
) -> None:
    if dtype == ">u4":  # an .npy file records its byte order; a flat file is little-endian
        (tmp_path / "set").mkdir()
        files = [np.arange(500, dtype=dtype)]
        np.save(tmp_path / "set" / "a.npy", files[0])
    else:
        files = write_flat(tmp_path / "set", dtype=dtype)
    more: dict[str, Any] = {} if dtype == ">u4" else {"dtype": dtype}
    more |= {} if stride is None else {"stride": (stride,)}
    where = place()
    with Dataset(where, format="tokens", sample=(LENGTH,), cache=tmp_path / "c", **more) as dataset:
        assert dict(dataset.index.schema) == {"tokens": Array("int64", (LENGTH,))}
        assert dataset.fields == ("tokens",)
        assert dataset.index.units is None
        assert len(dataset.index.sizes) > 2 or dtype == "uint8"
        (found,) = rows_of(dataset, "tokens")
        assert found.dtype == np.int64
        wanted = [row for tokens in files for row in windows(tokens, LENGTH, stride or LENGTH)]
        assert found.tolist() == wanted
        assert dataset.names([1]) == [
            f"{'a.npy' if dtype == '>u4' else '0.bin'}"
            f"[{stride or LENGTH}:{(stride or LENGTH) + LENGTH}]"
        ]


def test_inputs_and_targets_overlap_by_one(tmp_path: Path) -> None:
    files = write_flat(tmp_path / "set")
    with Dataset(
        tmp_path / "set", format="tokens", dtype="uint16", sample=(9,), stride=(8,)
    ) as dataset:
        (found,) = rows_of(dataset, "tokens")
    first = found[: (SIZES[0] - 1) // 8]
    assert first[:, :-1].reshape(-1).tolist() == files[0][: 8 * len(first)].tolist()
    assert first[:, 1:].reshape(-1).tolist() == files[0][1 : 8 * len(first) + 1].tolist()


@pytest.mark.parametrize("documents", ["across", "within", "pack"])
def test_every_epoch_has_every_sample_once_in_every_world(
    tmp_path: Path, place: Any, documents: Any
) -> None:
    corpus = draw_documents(60)
    (tmp_path / "set").mkdir()
    write_megatron(tmp_path / "set" / "a", corpus)
    fields, where = ("tokens", "document", "position", "id"), place()
    seen: dict[int, dict[int, Any]] = {}
    for size in (1, 2, 3):
        seen[size] = {}
        for rank in range(size):
            with (
                Dataset(
                    where,
                    documents=documents,
                    sample=(LENGTH,),
                    fields=fields,
                    cache=tmp_path / "cache",
                ) as dataset,
                DataLoader(
                    dataset,
                    global_batch_size=6,
                    shuffle=True,
                    seed=3,
                    world=World(rank, size),
                    drop_last=size > 1,
                ) as loader,
            ):
                for tokens, document, position, ids in loader:
                    for row, number in enumerate(ids.tolist()):
                        assert number not in seen[size]
                        seen[size][number] = (
                            tokens[row].tolist(),
                            document[row].tolist(),
                            position[row].tolist(),
                        )
                total = len(dataset)
    assert len(seen[1]) == total
    for size in (2, 3):
        assert len(seen[size]) == total // 6 * 6
        assert all(seen[1][number] == each for number, each in seen[size].items())
    check_corpus(documents, [seen[1][number] for number in range(total)], corpus)


def check_corpus(documents: str, samples: list[Any], corpus: list[NDArray[np.int64]]) -> None:
    """Check that every token of a corpus occurs once, in the order of its document."""
    stream = np.concatenate(corpus).tolist()
    if documents == "across":
        count = len(stream) // LENGTH * LENGTH
        assert [token for row, _, _ in samples for token in row] == stream[:count]
        for row, numbers, places in samples:
            where = zip(numbers, places, strict=True)
            assert row == [corpus[number][at] for number, at in where]
    elif documents == "within":
        found = [[] for _ in corpus]  # type: list[list[int]]
        for row, number, at in samples:
            assert at == len(found[number])
            assert len(row) == LENGTH or at + len(row) == len(corpus[number])
            found[number] += row
        assert found == [each.tolist() for each in corpus]
    else:
        parts = []
        for row, numbers, places in samples:
            for number in range(max(numbers) + 1):
                at = [i for i, each in enumerate(numbers) if each == number]
                assert [places[i] for i in at] == list(range(len(at)))
                parts.append([row[i] for i in at])
            ends = [i for i, each in enumerate(numbers) if each == -1]
            assert ends == list(range(LENGTH - len(ends), LENGTH))
            assert all(row[i] == places[i] == 0 or places[i] == 0 for i in ends)
        wanted = [row for each in corpus for row in cut(each.tolist())]
        assert sorted(parts) == sorted(wanted)


def cut(document: list[int]) -> list[list[int]]:
    return [document[i : i + LENGTH] for i in range(0, len(document), LENGTH)]


def test_whole_documents_are_samples_if_no_length_is_given(tmp_path: Path) -> None:
    corpus = draw_documents(30)
    write_megatron(tmp_path / "a", corpus, sentences=3)
    with Dataset(tmp_path) as dataset, DataLoader(dataset, 4) as loader:
        assert dataset.index.schema["tokens"] == Tokens("int64")
        found = [each.tolist() for (tokens,) in loader for each in tokens]
    assert found == [each.tolist() for each in corpus if len(each)]


@pytest.mark.parametrize("documents", ["across", "pack"])
def test_resume_continues_exactly(tmp_path: Path, documents: Any) -> None:
    write_megatron(tmp_path / "a", draw_documents(60))

    def batches(state: dict[str, Any] | None, count: int) -> tuple[list[Any], Any]:
        with (
            Dataset(tmp_path, documents=documents, sample=(LENGTH,), fields="tokens") as dataset,
            DataLoader(dataset, 24, shuffle=True, seed=4, drop_last=True) as loader,
        ):
            if state is not None:
                loader.load_state_dict(state)
            found, states = [], loader.state_dict()
            for (tokens,) in loader:
                found.append(tokens.tolist())
                states = loader.state_dict()
                if len(found) == count:
                    break
            return found, states

    whole, _ = batches(None, -1)
    for stop in range(1, len(whole)):
        first, state = batches(None, stop)
        rest, _ = batches(state, -1)
        assert first + rest == whole


def test_a_sample_with_an_id_outside_of_the_vocabulary_is_bad(tmp_path: Path) -> None:
    tokens = np.zeros(40 * LENGTH, np.uint16)
    tokens[5 * LENGTH + 3] = 700
    tokens.tofile(tmp_path / "a.bin")
    with Dataset(
        tmp_path, format="tokens", dtype="uint16", sample=(LENGTH,), vocabulary=700
    ) as dataset:
        bad: dict[int, str] = {}
        dataset.read(dataset.rows(np.arange(40)), bad=bad)
        assert list(bad) == [5]
        assert "token 3 is 700" in bad[5]
        with DataLoader(dataset, 8, shuffle=True, seed=1, max_bad=0.1) as loader:
            with pytest.warns(PenstockWarning, match="Sample 5 is bad: its token 3 is 700"):
                assert sum(int((batch == 700).sum()) for (batch,) in loader) == 0
            assert len(list(loader)) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "uint16"}, "needs the length of a sequence"),
        ({"sample": (8,)}, "doesn't record its dtype"),
        (
            {"sample": (8,), "dtype": "uint16", "documents": "within"},
            "don't record where documents",
        ),
        ({"sample": (8, 8), "dtype": "uint16"}, "expected one length"),
        ({"sample": {"text": (8,)}, "dtype": "uint16"}, "expected the field"),
        ({"sample": (8,), "dtype": "uint64"}, "int64"),
        (
            {"sample": (8,), "dtype": "uint16", "schema": {"x": Tokens("int32")}},
            "only the type of the tokens",
        ),
        ({"sample": (8,), "dtype": "uint32", "schema": {"tokens": Tokens("int32")}}, "can't hold"),
    ],
)
def test_arguments_that_do_not_fit_are_rejected(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    np.arange(800, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with (
        Dataset(tmp_path, format="tokens", **arguments) as dataset,
        pytest.raises(ConfigError, match=message),
    ):
        dataset.open()


def test_files_that_hold_no_tokens_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0" * 801)
    settings: dict[str, Any] = {"format": "tokens", "sample": (8,)}
    with (
        Dataset(tmp_path, dtype="uint16", **settings) as data,
        pytest.raises(DatasetError) as raised,
    ):
        data.open()
    assert "a.bin" in str(raised.value)
    with (
        Dataset(tmp_path, dtype="uint8", sample=(802,), format="tokens") as data,
        pytest.raises(DatasetNotFoundError, match="801 tokens"),
    ):
        data.open()
    (tmp_path / "a.bin").unlink()
    np.save(tmp_path / "a.npy", np.zeros((4, 4), np.int32))
    with (
        Dataset(tmp_path, **settings) as data,
        pytest.raises(DatasetError, match="in one dimension"),
    ):
        data.open()
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    with Dataset(tmp_path, **settings) as data, pytest.raises(DatasetError, match="pickled"):
        data.open()


def test_tokens_are_delivered_in_the_dtype_of_the_schema(tmp_path: Path) -> None:
    files = write_flat(tmp_path / "set")
    with (
        Dataset(
            tmp_path / "set",
            format="tokens",
            dtype="uint16",
            sample=(LENGTH,),
            schema={"tokens": Tokens("int32")},
        ) as dataset,
        DataLoader(dataset, 5) as loader,
    ):
        (first,) = next(iter(loader))
    assert first.dtype == torch.int32
    assert first.reshape(-1).tolist() == files[0][: 5 * LENGTH].tolist()


def test_a_remote_corpus_is_fetched_exactly_once(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    corpus = draw_documents(150, mean=5.0)
    write_megatron(tmp_path / "set" / "a", corpus)
    memory, folder = fsspec.filesystem("memory"), f"/counted-{tmp_path.name}"
    for path in (tmp_path / "set").iterdir():
        memory.pipe(f"{folder}/{path.name}", path.read_bytes())
    wanted, index_bytes = sum(map(len, corpus)) * 2, len(memory.cat(f"{folder}/a.idx"))
    fetched = []
    for _ in range(2):
        with (
            Dataset(
                f"memory:/{folder}", documents="pack", sample=(64,), cache=tmp_path / "cache"
            ) as dataset,
            DataLoader(dataset, 8, shuffle=True, seed=1) as loader,
        ):
            for epoch in range(2):
                count = sum(int((document >= 0).sum()) for _, document, _ in loader)
                assert count == wanted // 2, epoch
            fetched.append(dataset.bytes_fetched)
    assert wanted <= fetched[0] <= 1.05 * wanted + index_bytes
    assert fetched[1] == 0
    memory.rm(folder, recursive=True)


def test_a_url_names_one_file_several_a_pattern_or_a_folder(tmp_path: Path) -> None:
    files = write_flat(tmp_path / "flat")
    (tmp_path / "set").mkdir()
    write_megatron(tmp_path / "set" / "a", draw_documents(40))
    options: dict[str, Any] = {"dtype": "uint16", "sample": (LENGTH,)}
    each = [len(tokens) // LENGTH for tokens in files]
    flat = tmp_path / "flat"
    for url, wanted in (
        (flat, sum(each)),
        (flat / "3.bin", each[3]),
        (f"{flat}/*.bin", sum(each)),
        ([f"{flat}/0.bin", f"{flat}/3.bin"], each[0] + each[3]),
    ):
        with Dataset(url, **options) as dataset:
            assert len(dataset) == wanted
    for url in (tmp_path / "set" / "a.bin", f"{tmp_path}/set/*.bin", tmp_path / "set"):
        with Dataset(url, documents="pack", sample=(LENGTH,)) as dataset:
            assert dataset.fields == ("tokens", "document", "position")
