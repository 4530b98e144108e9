"""Unpack splits packed sequences into documents for variable-length attention."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock import DataLoader, Dataset, Unpack
from penstock.cache import RecipeError
from penstock.pipeline.feed import Ragged
from penstock.readers.fieldtypes import DenseColumn, SampleBatch
from tests.layers import ROOT
from tests.token_files import draw_documents, write_megatron

if TYPE_CHECKING:
    from pathlib import Path

FIELDS = ("tokens", "document", "position")


def test_documents_of_a_batch_are_cut_at_borders_and_ends_of_sequences() -> None:
    numbers = np.array([[0, 0, 1, 1], [0, 1, -1, -1], [0, 0, 0, 0]])
    columns = {"x": DenseColumn(np.arange(12).reshape(3, 4)), "document": DenseColumn(numbers)}
    found = Unpack("x").column(SampleBatch(ids=np.arange(3), columns=columns), lambda _: [])
    parts = [found.sample(row).tolist() for row in range(len(found))]
    assert parts == [[0, 1], [2, 3], [4], [5], [8, 9, 10, 11]]


@pytest.mark.parametrize("recipe", [list, dict])
def test_packed_sequences_are_handed_out_as_their_documents(tmp_path: Path, recipe: Any) -> None:
    corpus = draw_documents(40)
    write_megatron(tmp_path / "a", corpus)
    ops = [Unpack("tokens"), Unpack("position")]
    augment: Any = ops if recipe is list else {op.field: [op] for op in ops}
    with (
        Dataset(tmp_path, documents="pack", sample=(64,), fields=FIELDS) as dataset,
        DataLoader(dataset, 4, shuffle=True, seed=1, augment=augment) as loader,
    ):
        pieces = []
        for tokens, document, position in loader:
            assert isinstance(tokens, Ragged)
            assert tokens.cu_seqlens.dtype == torch.int32
            assert tokens.cu_seqlens.tolist() == position.offsets.tolist()
            assert len(tokens.values) == int((document >= 0).sum())
            assert tokens.longest == tokens.max_length == int(tokens.lengths.max())
            assert all(each.tolist() == list(range(len(each))) for each in position)
            pieces += [each.tolist() for each in tokens]
    wanted = [each[i : i + 64].tolist() for each in corpus for i in range(0, len(each), 64)]
    assert sorted(pieces) == sorted(wanted)


def test_the_longest_goes_along_and_is_found_where_nobody_told_it() -> None:
    told = Ragged(torch.arange(5), torch.tensor([0, 2, 5]), longest=3)
    assert told.to("cpu").longest == 3
    assert told[1:].longest is None
    assert told[:1].max_length == 2
    assert Ragged(torch.arange(0), torch.tensor([0])).max_length == 0


@pytest.mark.parametrize("fields", [("tokens",), ("tokens", "document")])
def test_fields_that_do_not_fit_are_refused(tmp_path: Path, fields: tuple[str, ...]) -> None:
    write_megatron(tmp_path / "a", draw_documents(20))
    mode: Any = "within" if len(fields) == 2 else "pack"
    with (
        Dataset(tmp_path, documents=mode, sample=(64,), fields=fields) as dataset,
        pytest.raises(RecipeError, match="wanted two selected fields"),
    ):
        iter(DataLoader(dataset, 4, augment=[Unpack("tokens")]))


def test_the_example_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "megatron").mkdir()
    write_megatron(tmp_path / "megatron" / "a", draw_documents(30))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "howto" / "tokens.md").read_text(), re.S
    )
    (example,) = [block for block in blocks if "scaled_dot_product_attention" in block]
    exec(compile(example, "docs/howto/tokens.md", "exec"), {})
