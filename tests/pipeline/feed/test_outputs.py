"""Delivered tensors are on the device, page-locked, or in the memory of the batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock import Ragged
from penstock.pipeline.feed import Finisher, PageLocked, tensor_of
from penstock.readers.fieldtypes import DTYPES, DenseColumn, ListColumn, RaggedColumn, SampleBatch

if TYPE_CHECKING:
    import pytest

FIELDS = ("dense", "ragged", "text", "several", "id", "text.present")
KINDS = {"dense": torch.Tensor, "ragged": Ragged, "text": list, "several": Ragged}


def batch(valid: Any = None) -> Any:
    ragged = RaggedColumn(np.arange(10.0).reshape(5, 2), np.array([0, 1, 3, 5]))
    shapes = np.array([[1, 2], [2, 1], [1, 1]])
    several = RaggedColumn(np.arange(5), np.array([0, 2, 4, 5]), shapes)
    content = SampleBatch(
        ids=np.arange(3),
        columns={
            "dense": DenseColumn(np.ones((3, 2), np.float32)),
            "ragged": ragged,
            "text": ListColumn(["a", "", "c"]),
            "several": several,
        },
        present={"text": np.array([True, False, True])},
    )
    return SimpleNamespace(content=content, images={}, mix=None, valid=valid, filled={}, samples=3)


def parts(value: Any) -> list[torch.Tensor]:
    """The tensors that a value consists of."""
    if isinstance(value, Ragged):
        return [each for each in (value.values, value.offsets, value.shapes) if each is not None]
    return [value] if isinstance(value, torch.Tensor) else []


def finish(device: str = "cpu", *, as_dict: bool = False, pins: bool = False, **more: Any) -> Any:
    place = torch.device(device)
    memory = PageLocked.of(place, pins=pins)
    finisher = Finisher(FIELDS, mixed=None, device=place, memory=memory, as_dict=as_dict)
    finisher.begin()
    return finisher(batch(**more))


def test_on_a_device_all_that_is_a_tensor_lies_there() -> None:
    found = finish("meta", as_dict=True, valid=np.array([True, True, False]))
    assert list(found) == [*FIELDS, "valid"]
    for name, value in found.items():
        assert type(value) is KINDS.get(name, torch.Tensor)
        assert all(each.device.type == "meta" for each in parts(value))
    assert found["text"] == ["a", "", "c"]


def test_all_that_is_a_tensor_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        told.append(tensor)
        return tensor

    class OnGpu:
        def __init__(self, number: int) -> None:
            assert number == 1

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", OnGpu)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    found = finish(pins=True)
    assert {id(each) for value in found for each in parts(value)} <= {id(each) for each in told}
    assert len(told) == 1 + 2 + 3 + 2


def test_without_padding_there_is_no_mask() -> None:
    assert len(finish()) == len(FIELDS)
    assert torch.equal(finish()[-1], torch.tensor([True, False, True]))


@settings(deadline=None)
@given(
    values=hnp.arrays(st.sampled_from(sorted(DTYPES)), hnp.array_shapes(max_dims=3, min_side=0)),
    writeable=st.booleans(),
)
def test_every_dtype_of_the_schema_has_a_tensor(values: np.ndarray, writeable: bool) -> None:
    values.flags.writeable = writeable
    tensor = tensor_of(values)
    assert tensor.numpy().dtype == values.dtype
    assert np.array_equal(tensor.numpy(), values, equal_nan=values.dtype.kind in "fc")
    shares = values.size > 0 and np.shares_memory(tensor.numpy(), values)
    assert shares == (writeable and values.size > 0)
