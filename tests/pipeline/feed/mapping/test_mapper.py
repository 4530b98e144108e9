"""Maps on batches: the arguments and results of functions, the same in threads and processes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.augment import Map
from penstock.cache import MapError, ordered
from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    Bytes,
    ClassLabel,
    FieldType,
    Mask,
    MultiLabel,
    Text,
    Tokens,
    Value,
)
from tests.pipeline.feed.mapping import functions
from tests.pipeline.feed.mapping.batches import batch_of, mapped, mapper, values_of
from tests.properties import examples

IDS = st.lists(st.integers(0, 10**9), min_size=0, max_size=12)


class TestArguments:
    def test_each_type_comes_as_python_and_numpy_have_it(self) -> None:
        seen: list[Any] = []
        fields = ("image", "caption", "blob", "number", "label", "vector", "signal", "tokens", "id")

        def look(*values: Any) -> int:
            seen.append(values)
            return 1

        op = Map(look, fields, returns={"x": Value("int8")})
        mapped(batch_of([6]), op)
        ((image, caption, blob, number, label, vector, signal, tokens, sample_id),) = seen
        assert (image, caption, blob) == (b"\x89PNG\x06", "sample 6 é", b"\x06\x06\x06")
        assert (number, label, sample_id) == (6, 0, 6)
        assert isinstance(number, np.int64)
        assert (vector.dtype, vector.shape) == (np.float32, (4,))
        assert (signal.dtype, signal.shape) == (np.float32, (2, 2))
        assert (tokens.dtype, tokens.shape) == (np.int32, (0,))

    def test_a_function_of_batches_gets_lists_and_stacked_arrays(self) -> None:
        seen: list[Any] = []

        def look(*values: Any) -> list[int]:
            seen.append(values)
            return [0, 0]

        fields = ("caption", "vector", "signal", "label")
        mapped(batch_of([1, 2]), Map(look, fields, returns={"x": Value("int8")}, batched=True))
        ((captions, vectors, signals, labels),) = seen
        assert captions == ["sample 1 é", "sample 2 é"]
        assert vectors.shape == (2, 4)
        assert [each.shape for each in signals] == [(1, 2), (2, 2)]
        assert labels.tolist() == [1, 2]

    def test_which_samples_have_a_field_can_be_asked(self) -> None:
        op = Map(
            lambda text, there: text if there else "none",
            ("caption", "caption.present"),
            returns={"caption": Text()},
        )
        batch, _ = mapped(batch_of([5, 6]), op)
        assert values_of(batch, "caption") == ["none", "sample 6 é"]

    @pytest.mark.parametrize("batched", [False, True])
    def test_what_it_gets_cannot_be_written_to(self, batched: bool) -> None:
        batch = batch_of([1, 2])
        op = Map(functions.write_into, "vector", batched=batched)
        with pytest.raises(MapError, match=r"Map\(write_into\) changes its argument in place"):
            mapped(batch, op)
        assert values_of(batch, "vector") == values_of(batch_of([1, 2]), "vector")

    def test_a_tensor_over_what_it_gets_reaches_nobody_else(self) -> None:
        def through_torch(values: Any) -> Any:
            with warnings.catch_warnings():  # torch warns, once a process
                warnings.simplefilter("ignore")
                return torch.from_numpy(values).add_(1)

        batch = batch_of([1, 2])
        mapped(batch, Map(through_torch, "vector", returns={"new": Array("float32", (4,))}))
        assert values_of(batch, "vector") == values_of(batch_of([1, 2]), "vector")


class TestResults:
    def test_types_that_are_declared_become_columns(self) -> None:
        def make(number: Any) -> dict[str, Any]:
            n = int(number)
            return {
                "text": f"{n}",
                "bytes": bytearray([n]),
                "number": n,
                "label": np.uint8(n),
                "many": [1, 0],
                "tokens": range(n),
                "grid": np.full((n, 3, n), n, np.int16),
                "mask": np.full((n, n + 1), n, np.uint8),
                "boxes": [] if n == 1 else [[0, 1, 2, n]],
            }

        returns: dict[str, FieldType] = {
            "text": Text(),
            "bytes": Bytes(),
            "number": Value("float32"),
            "label": ClassLabel(("x", "y", "z")),
            "many": MultiLabel(("x", "y")),
            "tokens": Tokens("uint16"),
            "grid": Array("int16", (None, 3, None)),
            "mask": Mask(of="image"),
            "boxes": Boxes(of="image"),
        }
        batch, _ = mapped(batch_of([1, 2]), Map(make, "number", returns=returns))
        assert values_of(batch, "text") == ["1", "2"]
        assert values_of(batch, "bytes") == [b"\1", b"\2"]
        assert batch.columns["number"].values.dtype == np.float32  # type: ignore[union-attr]
        assert values_of(batch, "label") == [1, 2]
        assert batch.columns["label"].values.dtype == np.int64  # type: ignore[union-attr]
        assert values_of(batch, "many") == [[1, 0], [1, 0]]
        assert values_of(batch, "tokens") == [[0], [0, 1]]
        assert batch.columns["grid"].sample(1).shape == (2, 3, 2)  # type: ignore[union-attr]
        assert [each.shape for each in values_of(batch, "mask")] == [(1, 2), (2, 3)]
        assert values_of(batch, "boxes") == [[], [[0, 1, 2, 2]]]

    @pytest.mark.parametrize(
        ("value", "type", "words"),
        [
            (None, Value("int64"), "returned None for"),
            (1.5, Value("int64"), r"returned 1.5 \(float\) for .* wanted one int64"),
            (np.float64(1), Value("float32"), "returned one float64 .* wanted one float32"),
            (300, Value("uint8"), "returned 300"),
            (-1, Value("uint8"), "returned -1"),
            ("1", Value("int64"), "returned '1'"),
            (True, Value("int64"), "returned True"),
            (3, ClassLabel(("a", "b")), "the class 3 .* wanted one from 0 to 1"),
            (np.zeros(3), Array("float64", (4,)), r"float64 of shape \(3,\)"),
            (np.zeros((2, 2), np.int8), Tokens("int8"), r"int8 of shape \(2, 2\)"),
            ([[1], [1, 2]], Array("int64", (None, None)), "numpy can't convert to an array"),
            (b"x", Text(), "wanted a str"),
            ("\ud800", Text(), "UTF-8 can't hold"),
            ("x", Bytes(), "wanted bytes"),
            (np.zeros((2, 2), np.float32), Mask(of="image"), "class numbers"),
            (np.zeros((2, 2), np.int32), Mask(of="image", dtype="uint8"), "int32 of shape"),
            (np.full((2, 2), 2**40), Mask(of="image"), "at most 32 bits"),
            (np.zeros((2, 2, 1), np.uint8), Mask(of="image"), r"shape \(2, 2, 1\)"),
            (np.zeros((2, 3), np.float32), Boxes(of="image"), r"wanted float32 of shape \(any, 4"),
        ],
    )
    def test_what_does_not_fit_is_one_error_that_names_it(
        self, value: Any, type: Any, words: str
    ) -> None:
        op = Map(lambda _: value, "number", returns={"new": type})
        with pytest.raises(MapError, match=words) as caught:
            mapped(batch_of([4, 5]), op)
        assert caught.value.sample_id == 4
        text = str(caught.value)
        assert "At sample 4 (sample-4.png): Map(" in text
        assert 'for "new"' in text

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ([1], "returned 1 values .* one a sample: 2"),
            (5, "returned int .* wanted a list or array of 2"),
            ("ab", "returned str"),
            (np.float32(3), "returned float32"),
            ([1, None], "returned None"),
            (np.zeros((2, 1), np.int64), r"int64 of shape \(2, 1\)"),
        ],
    )
    def test_batches_come_back_as_long_as_they_were(self, value: Any, words: str) -> None:
        op = Map(lambda _: value, "number", batched=True)
        with pytest.raises(MapError, match=words):
            mapped(batch_of([4, 5]), op)

    def test_several_fields_want_as_many_values(self) -> None:
        with pytest.raises(MapError, match="returned 3 values, wanted a tuple of 2"):
            mapped(batch_of([4]), Map(lambda a, b: (a, b, a), ("number", "label")))
        batch, _ = mapped(batch_of([4]), Map(lambda a, b: (a + 1, b), ("number", "label")))
        assert values_of(batch, "number") == [5]

    def test_what_is_returned_may_be_used_again(self) -> None:
        batch, _ = mapped(batch_of([1, 2]), Map(functions.reuse, "vector"))
        assert values_of(batch, "vector") == values_of(batch_of([1, 2]), "vector")

    def test_one_map_sees_what_the_one_before_it_made(self) -> None:
        first = Map(functions.tokens, "caption", returns={"new": Tokens("int64")})
        batch, _ = mapped(batch_of([1]), first, Map(len, "new", returns={"n": Value("int64")}))
        assert values_of(batch, "n") == [len("sample 1 é".encode())]


class TestBadSamples:
    @pytest.mark.parametrize("batched", [False, True])
    @given(ids=IDS, known=st.sets(st.integers(0, 11)))
    @examples(20)
    def test_the_others_of_a_batch_come(
        self, batched: bool, ids: list[int], known: set[int]
    ) -> None:
        fn = functions.odd_is_bad_of_all if batched else functions.odd_is_bad
        before = {row: "known" for row in known if row < len(ids)}
        bad = dict(before)
        one = mapper(Map(fn, "number", batched=batched))
        batch = one(batch_of(ids), epoch=0, bad=bad)
        odd = {row: f"{i} is odd" for row, i in enumerate(ids) if i % 2}
        assert bad == {**odd, **before}
        for row, value in enumerate(values_of(batch, "number")):
            assert value == (0 if row in bad else ids[row])

    def test_empty_ones_are_never_shown(self) -> None:
        op = Map(functions.tokens, "caption", returns={"text": Text(), "n": Tokens()})
        one = mapper(Map(lambda text: (text, [len(text)]), "caption", returns=op.returns))
        batch = one(batch_of([1, 2]), epoch=0, bad={0: "known", 1: "known"})
        assert values_of(batch, "text") == ["", ""]
        assert values_of(batch, "n") == [[], []]


class TestRandomNumbers:
    @given(ids=IDS, epoch=st.integers(0, 99), seed=st.integers(0, 2**70), data=st.data())
    @examples(25)
    def test_they_are_a_sample_s_own(
        self, ids: list[int], epoch: int, seed: int, data: st.DataObject
    ) -> None:
        """In any company, in any order."""
        ops = (
            Map(functions.jitter, ("vector", "number"), returns={"vector": SIGNAL, "s": Text()}),
            Map(functions.jitter_all, "vector", batched=True),
        )
        whole, _ = mapped(batch_of(ids), *ops, epoch=epoch, seed=seed)
        order = data.draw(st.permutations(range(len(ids))))
        some = order[: len(order) // 2 + 1]
        part, _ = mapped(batch_of([ids[row] for row in some]), *ops, epoch=epoch, seed=seed)
        for field in ("vector", "s"):
            all_values = values_of(whole, field)
            assert values_of(part, field) == [all_values[row] for row in some]

    def test_seed_epoch_sample_and_place_change_them(self) -> None:
        op = Map(functions.jitter, ("vector", "number"), returns={"vector": SIGNAL, "s": Text()})
        again = Map(functions.jitter, ("vector", "number"), returns={"vector": SIGNAL, "t": Text()})

        def draws(field: str = "s", **keys: int) -> Any:
            return values_of(mapped(batch_of([8, 8, 9]), op, again, **keys)[0], field)

        base = draws()
        assert base[0] == base[1]
        assert len({*base, *draws(epoch=1), *draws(seed=4), *draws("t")}) == 8


SIGNAL = Array("float32", (4,))


@pytest.mark.parametrize("threads", [2, 4])
def test_any_number_of_threads_gives_the_same(threads: int) -> None:
    one = mapper(Map(functions.jitter_all, "vector", batched=True))
    batches = [batch_of(range(start, start + 5)) for start in range(0, 60, 5)]
    alone = [values_of(one(batch, epoch=2, bad={}), "vector") for batch in batches]
    together = ordered(
        lambda batch: values_of(one(batch, epoch=2, bad={}), "vector"),
        batches,
        workers=threads,
        ahead=8,
    )
    assert list(together) == alone
    assert one.facts().seconds > 0
    assert one.facts().name == "Map(jitter_all)"


def test_an_error_names_the_sample() -> None:
    with pytest.raises(KeyError, match="seven") as caught:
        mapped(batch_of([6, 7, 8]), Map(functions.fail_at_seven, "number"))
    assert caught.value.__notes__ == [
        "while Map(fail_at_seven) was processing sample 7 (sample-7.png)"
    ]
