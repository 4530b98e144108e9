"""Lists of texts and of structs in tables are read as JSON, if the schema declares them as text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.cache import ConfigError
from penstock.readers import Dataset
from penstock.readers.fieldtypes import Array, Text
from tests.files import uploaded
from tests.json_lines import conversation
from tests.readers.remote_sets import rows_of

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 60
DEEP = [{"a": [[{"b": n % 2 == 0, "c": [n / 2]}], []], "d": None} for n in range(ROWS)]


def table() -> Any:
    messages = [conversation(number)["messages"] for number in range(ROWS)]
    messages[5], messages[7] = [], None  # type: ignore[call-overload]
    return pa.table(
        {
            "number": list(range(ROWS)),
            "messages": messages,
            "captions": [[f"a picture of {n}", "größer"] for n in range(ROWS)],
            "deep": [[each] * (n % 3) for n, each in enumerate(DEEP)],
        },
        schema=pa.schema(
            [
                ("number", pa.int64()),
                ("messages", pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))),
                ("captions", pa.large_list(pa.string())),
                (
                    "deep",
                    pa.list_(
                        pa.struct(
                            {
                                "a": pa.list_(
                                    pa.list_(
                                        pa.struct({"b": pa.bool_(), "c": pa.list_(pa.float32())})
                                    )
                                ),
                                "d": pa.string(),
                            }
                        )
                    ),
                ),
            ]
        ),
    )


def write_parquet(folder: Path, **options: Any) -> Path:
    pq.write_table(table(), folder / "a.parquet", row_group_size=17, **options)
    return folder


def write_arrow(folder: Path) -> Path:
    with pa.ipc.new_file(folder / "a.arrow", table().schema) as writer:
        writer.write_table(table(), max_chunksize=17)
    return folder


WRITERS = {
    "arrow": write_arrow,
    "parquet": write_parquet,
    "zstd": lambda folder: write_parquet(
        folder, compression="zstd", data_page_version="2.0", use_dictionary=False
    ),
    "checksums": lambda folder: write_parquet(folder, write_page_checksum=True),
}
FIELDS = ("messages", "captions", "deep")


@pytest.mark.parametrize("kind", WRITERS)
def test_lists_are_read_as_json(kind: str, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    root, wanted = WRITERS[kind](tmp_path / "set"), table().to_pydict()
    with uploaded(root) as remote:
        for url in (root, remote):
            with Dataset(
                url, fields=FIELDS, schema=dict.fromkeys(FIELDS, Text()), cache=tmp_path / "cache"
            ) as dataset:
                batch = dataset.read(rows_of(dataset)[::-1])
                for name in FIELDS:
                    samples = batch.columns[name].samples  # type: ignore[union-attr]
                    found = [json.loads(bytes(each)) for each in samples]
                    assert found == [each or [] for each in wanted[name][::-1]]


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_they_are_no_fields_by_themselves_and_the_reason_names_the_type(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = WRITERS[kind](tmp_path)
    with Dataset(root) as dataset:
        assert [*dataset.schema] == ["number"]
    assert 'schema={"messages": Text()}, which a Map parses' in caplog.text
    with pytest.raises(ConfigError, match="can't become Array"):
        Dataset(root, schema={"captions": Array("float32", (None,))}).open()


def test_damage_makes_samples_bad(tmp_path: Path) -> None:
    root = write_parquet(tmp_path, write_page_checksum=True, compression="none")
    path = root / "a.parquet"
    with Dataset(root, fields=("messages",), schema={"messages": Text()}) as dataset:
        dataset.open()
        data = bytearray(path.read_bytes())
        place = data.index("Größer als 3".encode())
        data[place + 1] ^= 1
        path.write_bytes(data)
        bad: dict[int, str] = {}
        dataset.read(np.array(rows_of(dataset)), bad=bad)
    assert {*bad} >= {3}
    assert "damaged" in bad[3]


def test_other_nested_values_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [[b"\xff"]], "y": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="can't become Text"):
        Dataset(tmp_path, schema={"x": Text()}).open()
    with pytest.raises(ConfigError, match="can't become Text"):
        Dataset(tmp_path, schema={"y": Text()}).open()
