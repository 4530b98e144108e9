"""The operation Map as a value: its arguments, its place in a recipe, the fields that it leaves."""

from __future__ import annotations

import pickle
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.augment import Map, Normalize, Resize, check_maps, split_maps
from penstock.cache import ConfigError, RecipeError
from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    ClassLabel,
    Image,
    Mask,
    Schema,
    Text,
    Tokens,
    Value,
)

SCHEMA = Schema(
    {"image": Image(), "caption": Text(), "mask": Mask(of="image"), "label": ClassLabel(("a",))}
)


def upper(text: str) -> str:
    return text.upper()


def drawn(text: str, *, rng: Any) -> str:
    return f"{text}{rng.random()}"


def drawn_batch(texts: list[str], rngs: Any) -> list[str]:
    return [f"{text}{rng.random()}" for text, rng in zip(texts, rngs, strict=True)]


OPERATIONS = st.sampled_from([Resize(8), Normalize()])


class TestValue:
    def test_it_is_a_frozen_value_that_can_be_sent(self) -> None:
        one = Map(upper, "caption", returns={"caption": Text()}, processes=2)
        assert one == Map(upper, ["caption"], returns={"caption": Text()}, processes=2)
        assert hash(one) == hash(pickle.loads(pickle.dumps(one)))
        assert one.name == "Map(upper)"

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"fn": 3}, r"Map\(fn=...\): got 3"),
            ({"fields": []}, r"Map\(fields=...\): got \[\]"),
            ({"fields": 7}, r"Map\(fields=...\): got 7"),
            ({"fields": ("a", "a")}, "each once"),
            ({"returns": {}}, r"Map\(returns=...\): got {}"),
            ({"returns": Text()}, "the type of each field"),
            ({"batched": 1}, r"Map\(batched=...\): got 1"),
            ({"processes": -1}, r"Map\(processes=...\): got -1"),
            ({"processes": True}, r"Map\(processes=...\): got True"),
        ],
    )
    def test_arguments_that_cannot_be(self, arguments: Any, words: str) -> None:
        with pytest.raises(RecipeError, match=words):
            Map(**{"fn": upper, "fields": "caption", **arguments})

    def test_random_numbers_are_for_who_asks(self) -> None:
        assert Map(drawn).takes_rng
        assert not Map(drawn, batched=True).takes_rng
        assert Map(drawn_batch, batched=True).takes_rng
        assert not Map(upper).takes_rng
        assert not Map(int).takes_rng
        assert not Map(lambda *rng: rng).takes_rng


class TestPlace:
    @given(count=st.integers(0, 3), others=st.lists(OPERATIONS, max_size=3), as_tuple=st.booleans())
    def test_maps_at_the_front_are_split_off(
        self, count: int, others: list[Any], as_tuple: bool
    ) -> None:
        maps = [Map(upper, f"f{number}") for number in range(count)]
        recipe: Any = (*maps, *others) if as_tuple else [*maps, *others]
        found, rest = split_maps(recipe)
        assert list(found) == maps
        assert [*(rest or ())] == [*recipe[count:]]
        assert rest is recipe or count

    @given(others=st.lists(OPERATIONS, min_size=1, max_size=3), in_mapping=st.booleans())
    def test_a_map_behind_another_operation_is_refused(
        self, others: list[Any], in_mapping: bool
    ) -> None:
        recipe = [*others, Map(upper, "caption")]
        with pytest.raises(RecipeError, match=r"Map\(upper\) comes after"):
            split_maps({"caption": recipe} if in_mapping else recipe)

    def test_in_a_mapping_the_list_names_the_field(self) -> None:
        recipe = {"caption": [Map(upper)], "image": [Resize(8)], "label": Map(abs)}
        maps, rest = split_maps(recipe)
        assert [each.fields for each in maps] == [("caption",), ("label",)]
        assert rest == {"image": [Resize(8)]}

    def test_other_checks_judge_invalid_recipes(self) -> None:
        for recipe in (None, 3, "Map", Resize(8)):
            assert split_maps(recipe) == ((), recipe)

    def test_fields_are_required(self) -> None:
        with pytest.raises(RecipeError, match='such as fields="caption"'):
            split_maps([Map(upper)])
        with pytest.raises(RecipeError, match='in the list of "label"'):
            split_maps({"label": [Map(upper, "caption")]})


class TestFields:
    def test_types_stay_or_are_what_returns_states(self) -> None:
        maps, _ = split_maps(
            [
                Map(upper, "caption"),
                Map(len, "caption", returns={"tokens": Tokens("int32"), "n": Value("int64")}),
                Map(abs, ("tokens", "id", "label"), returns={"label": Value("float32")}),
            ]
        )
        placed, schema = check_maps(maps, SCHEMA)
        assert list(schema) == [*SCHEMA, "tokens", "n"]
        assert schema["label"] == Value("float32")
        assert [each.index for each in placed] == [0, 1, 2]
        assert placed[2].takes["tokens"] == Tokens("int32")
        assert placed[0].returns == {"caption": Text()}

    def test_which_samples_have_a_field_can_be_asked(self) -> None:
        maps, _ = split_maps(
            [Map(upper, ("caption", "caption.present"), returns={"caption": Text()})]
        )
        assert check_maps(maps, SCHEMA)[0][0].takes["caption.present"] == Value("bool")

    @pytest.mark.parametrize(
        ("op", "words"),
        [
            (Map(upper, "captoin"), 'unknown field "captoin", wanted one of image, caption'),
            (Map(upper, "image"), 'return "image" as Image.*only stored bytes'),
            (Map(upper, "id"), 'return "id" as .*Penstock sets it'),
            (Map(upper, "caption", returns={"x": Array()}), "dtype or shape isn't known"),
            (Map(upper, "caption", returns={"x": Image()}), '"x" as Image.*only stored bytes'),
            (Map(upper, "caption", returns={"x": Boxes(of="y")}), '"y" is no field of type Image'),
            (Map(upper, "caption", returns={"x": cast("Any", int)}), "wanted a field type"),
            (Map(upper, "image", returns={"image": Array("uint8", (None,))}), "no field of type"),
        ],
    )
    def test_fields_that_cannot_be(self, op: Map, words: str) -> None:
        maps, _ = split_maps([op])
        with pytest.raises(ConfigError, match=words):
            check_maps(maps, SCHEMA)
