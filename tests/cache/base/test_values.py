"""Test checksums, sizes as text, and the settings of peers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Peers
from penstock.cache import ConfigError
from penstock.cache.base import format_size, keyed_hash, parse_size, splitmix64, unit
from tests.properties import examples


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 2**26), ("1.5TB", 1_500_000_000_000), ("7", 7), (" 3 kb ", 3000), (12, 12)],
)
def test_sizes_as_people_write_them(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "1.5 parsecs", "-3MB", 0, -1, "0", True, None, 1.5, "MiB"])
def test_nonsense_is_refused_by_name(text: object) -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        parse_size(text, what="max_bytes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1.5 TiBB", "'TiBB' is no unit, wanted B, kB"),
        ("1.5T", "'T' is no unit"),
        ("1.5", "the unit missing"),
        ("9" * 400 + "TB", "wanted a positive number"),
        (2**63, "wanted a positive number"),
    ],
)
def test_a_size_that_is_no_size_states_why(text: int | str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_size(text, what="max_bytes")


@given(st.integers(1, 2**60))
def test_a_formatted_size_names_its_unit(size: int) -> None:
    assert format_size(size).split(" ")[1] in ("B", "KiB", "MiB", "GiB", "TiB")


HERE = "10.0.0.7:7077"


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "0", "000.0.0.0", "0x0", "[::]", "[0::0]", "[::ffff:0.0.0.0]", "*"]
)
def test_no_address_stands_for_every_network(host: str) -> None:
    with pytest.raises(ConfigError, match="all networks"):
        Peers(f"{host}:7077")
    with pytest.raises(ConfigError, match="all networks"):
        Peers(HERE, nodes=[HERE, f"{host}:7077"])


@pytest.mark.parametrize("host", ["10.0.0.7", "node-0", "[fd00::7]", "[::1]", "0x0a.example", "x"])
def test_addresses_of_one_node(host: str) -> None:
    assert Peers(f"{host}:7077").port == 7077


@pytest.mark.parametrize("nodes", [HERE, None, 5, {HERE}, {HERE: 0}, iter([HERE])])
def test_nodes_are_a_list_in_the_order_of_their_ranks(nodes: object) -> None:
    with pytest.raises(ConfigError, match="wanted a list of addresses"):
        Peers(HERE, nodes=nodes)


def test_files_are_paths() -> None:
    with pytest.raises(ConfigError, match="token_file of type int"):
        Peers(HERE, token_file=5)


GAMMA = 0x9E3779B97F4A7C15


uint64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    ("seed", "outputs"),
    [  # the reference generator's first outputs, as published with other implementations of it
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]),
        (
            1234567,
            [
                6457827717110365317,
                3203168211198807973,
                9817491932198370423,
                4593380528125082431,
                16408922859458223821,
            ],
        ),
    ],
)
def test_splitmix64_gives_the_published_vectors(seed, outputs):
    states = [(seed + k * GAMMA) % 2**64 for k in range(len(outputs))]
    assert splitmix64(np.array(states, dtype=np.uint64)).tolist() == outputs
    assert int(keyed_hash(seed)) == outputs[0]


def test_splitmix64_keeps_shape_and_input():
    x = np.arange(6, dtype=np.uint64).reshape(2, 3)
    before = x.copy()
    assert splitmix64(x).shape == (2, 3)
    assert splitmix64(np.uint64(2**64 - 1)).shape == ()
    np.testing.assert_array_equal(x, before)


@examples(100)
@given(keys=st.lists(st.integers(-(2**80), 2**80), min_size=1, max_size=5), last=uint64)
def test_hash_is_a_chain_and_ints_equal_arrays(keys, last):
    prefix = keyed_hash(*keys)
    whole = keyed_hash(*keys, last)
    assert whole == splitmix64(prefix ^ np.uint64(last))
    assert whole == keyed_hash(*keys, np.array([last], dtype=np.uint64))[0]


@examples(50)
@given(a=st.integers(-(2**70), 2**70), b=st.integers(-(2**70), 2**70))
def test_order_and_number_of_keys_matter(a, b):
    if a != b:
        assert keyed_hash(a, b) != keyed_hash(b, a)
        assert keyed_hash(a) != keyed_hash(b) or (a - b) % 2**64 == 0
    assert keyed_hash(a, b) != keyed_hash(a, b, 0)


@given(value=st.integers(-(2**63), -1))
@examples(20)
def test_negative_ints_equal_their_array_form(value):
    assert keyed_hash(value, 3) == keyed_hash(np.int64(value), 3)
    assert keyed_hash(value) == keyed_hash(value % 2**64)


@pytest.mark.parametrize("wide", [2**64, -(2**64), 2**64 + 1, -(2**63) - 1, 2**128, 2**200 + 7])
def test_wide_seeds_are_not_cut(wide):
    low = wide % 2**64
    assert keyed_hash(wide, 0) != keyed_hash(low, 0)
    assert keyed_hash(wide) != keyed_hash(-wide)


def test_keys_broadcast():
    rows, columns = np.arange(4)[:, None], np.arange(5)
    table = keyed_hash(9, rows, columns)
    assert table.shape == (4, 5)
    assert table.dtype == np.uint64
    assert table[2, 3] == keyed_hash(9, 2, 3)
    assert keyed_hash(9, rows, 1).shape == (4, 1)
    assert keyed_hash(np.arange(0)).shape == (0,)
    assert len(np.unique(table)) == 20


def test_unit_covers_zero_to_below_one():
    assert unit(np.array([0, 2**64 - 1], dtype=np.uint64)).tolist() == [0.0, 1 - 2.0**-53]
    draws = unit(keyed_hash(7, np.arange(100_000)))
    assert draws.dtype == np.float64
    assert abs(draws.mean() - 0.5) < 0.005
    assert abs(draws.var() - 1 / 12) < 0.002
    assert unit(keyed_hash(1)).shape == ()


def test_neighbouring_keys_share_no_pattern():
    bits = np.unpackbits(keyed_hash(0, np.arange(4096)).view(np.uint8)).reshape(4096, 64)
    flips = (bits[1:] != bits[:-1]).mean(axis=0)  # each output bit flips for half of the steps
    assert np.all(np.abs(flips - 0.5) < 0.05)


def test_keys_that_are_no_integers_are_refused():
    with pytest.raises(ConfigError, match="wanted integers"):
        keyed_hash(1, np.array([0.5]))
    with pytest.raises(ConfigError, match="at least one"):
        keyed_hash()
