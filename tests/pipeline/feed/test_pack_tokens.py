"""PackTokens joins the samples of a batch to sequences of one length, several fields alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import Array, DataLoader, Dataset, Map, PackTokens, Pad, Tokens, World, mix, pack
from penstock.errors import ConfigError, RecipeError
from penstock.readers.fieldtypes import RaggedColumn, SampleBatch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LENGTHS = [3, 9, 1, 16, 5, 5, 2, 8, 11, 4, 7, 7, 1, 12, 6, 3, 10, 2, 15, 13]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """One text file for each length, whose letters name the file."""
    folder: Path = tmp_path_factory.mktemp("texts")
    for number, length in enumerate(LENGTHS):
        (folder / f"{number:02}.txt").write_text(chr(ord("a") + number) * length)
    with Dataset(folder) as dataset:
        yield dataset


def with_loss(name: str, *, to: int = 16) -> list[Any]:
    """Return a recipe that turns a text into its bytes, of which every second one has a loss."""

    def tokens(text: str) -> dict[str, Any]:
        found = list(text.encode())
        return {name: found, "loss": np.arange(len(found)) % 2 == 1}

    returns = {name: Tokens("int64"), "loss": Array("bool", (None,))}
    return [Map(tokens, name, returns=returns), PackTokens((name, "loss"), to=to)]


def field_of(texts: Dataset) -> str:
    (name,) = texts.fields
    return name


@given(st.lists(st.integers(0, 8), max_size=30))
def test_each_token_is_packed_once_and_alike_in_all_fields(lengths: list[int]) -> None:
    offsets = np.cumsum([0, *lengths])
    values = np.arange(1, offsets[-1] + 1)
    columns = {name: RaggedColumn(values * sign, offsets) for name, sign in (("x", 1), ("y", -1))}
    content = SampleBatch(ids=np.arange(len(lengths)), columns=columns)
    packed = PackTokens(("x", "y"), to=8).columns(content, lambda _: [])
    x, y, document, position = (packed[name].values for name in ("x", "y", "document", "position"))
    assert x.shape == y.shape == document.shape == position.shape
    assert x.shape[1] == 8
    np.testing.assert_array_equal(x, -y)
    np.testing.assert_array_equal(x == 0, document < 0)
    is_token = document >= 0
    np.testing.assert_array_equal(np.sort(x[is_token]), values)
    np.testing.assert_array_equal(offsets[document[is_token]] + position[is_token] + 1, x[is_token])
    # No two sequences could be one.
    fill = is_token.sum(axis=1)
    assert not len(fill) or (fill > 0).all()
    assert sum(sorted(fill)[:2]) > 8 or len(fill) < 2


def test_a_map_s_tokens_and_their_loss_mask_are_packed(texts: Dataset) -> None:
    name = field_of(texts)
    with DataLoader(texts, 20, augment=with_loss(name)) as loader:
        assert len(loader) == 1
        ((tokens, loss, document, position),) = loader
    assert tokens.shape == loss.shape == document.shape == position.shape
    assert tokens.shape[1] == 16
    assert len(tokens) == -(-sum(LENGTHS) // 16)
    assert (tokens.dtype, loss.dtype) == (torch.int64, torch.bool)
    for number, length in enumerate(LENGTHS):
        own = document == number
        assert tokens[own].tolist() == [ord("a") + number] * length
        assert position[own].tolist() == list(range(length))
        assert loss[own].tolist() == [place % 2 == 1 for place in range(length)]
    assert not tokens[document < 0].any()
    assert not loss[document < 0].any()


def test_a_value_a_sample_becomes_one_a_token(texts: Dataset) -> None:
    """In a mixture: the part of each token; and whether its sample is valid."""
    name = field_of(texts)
    both = mix({"a": texts, "b": texts}, weights={"a": 3, "b": 1}, epoch=40, fields=(name, "part"))
    tokens = 0
    for rank in range(3):
        with DataLoader(
            both,
            global_batch_size=16,
            shuffle=True,
            seed=1,
            pad="mask",
            augment=with_loss(name),
            as_dict=True,
            world=World(rank, 3),
        ) as loader:
            for batch in loader:
                document = batch["document"]
                of_tokens = batch["part"][document]
                assert of_tokens.shape == batch[name].shape
                tokens += int((batch["valid"][document] & (document >= 0)).sum())
    with DataLoader(both, 40, shuffle=True, seed=1, augment=with_loss(name)) as alone:
        assert tokens == sum(int((document >= 0).sum()) for *_, document, _ in alone)


def test_a_batch_of_at_most_so_many_tokens_is_one_sequence(tmp_path: Path) -> None:
    rows = [list(range(length)) for length in LENGTHS]
    pq.write_table(pa.table({"tokens": rows}), tmp_path / "a.parquet")
    pack(str(tmp_path / "a.parquet"), str(tmp_path / "packed"))
    with (
        Dataset(tmp_path / "packed") as packed,
        DataLoader(
            packed, batch_tokens=32, shuffle=True, seed=3, augment=[PackTokens("tokens", to=32)]
        ) as loader,
    ):
        shapes = [tuple(tokens.shape) for tokens, *_ in loader]
    assert {*shapes} == {(1, 32)}


class TestBadInput:
    def test_a_longer_sample(self, texts):
        recipe = with_loss(field_of(texts), to=12)
        with (
            DataLoader(texts, 20, augment=recipe) as loader,
            pytest.raises(ConfigError, match=r"sample 3 \(03.txt\) is longer: it has 16 tokens"),
        ):
            next(iter(loader))

    def test_fields_of_other_lengths(self, texts):
        name = field_of(texts)
        returns = {name: Tokens("int64"), "loss": Array("uint8", (None,))}
        cut = Map(
            lambda text: {name: list(text.encode()), "loss": np.ones(3, np.uint8)},
            name,
            returns=returns,
        )
        with (
            DataLoader(texts, 20, augment=[cut, PackTokens((name, "loss"), to=16)]) as loader,
            pytest.raises(ConfigError, match=r"sample 1 .* has 9 values .* and 3 of \"loss\""),
        ):
            next(iter(loader))

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            ([], "wanted lists of numbers"),
            ([Pad("loss", to=3)], 'Two Pad for "loss"'),
            ([PackTokens("loss", to=3)], 'Two PackTokens for "loss"'),
        ],
    )
    def test_fields_that_do_not_fit(self, texts, extra, message):
        name = field_of(texts)
        recipe = [PackTokens(name, to=16)] if not extra else [*with_loss(name), *extra]
        with pytest.raises(RecipeError, match=message):
            iter(DataLoader(texts, 4, augment=recipe))

    def test_arguments(self):
        for wrong in ({"to": 0}, {"to": 2.5}, {"to": 4, "value": "x"}):
            with pytest.raises(RecipeError, match="PackTokens"):
                PackTokens("x", **wrong)
