"""The same loop under torchrun, with DistributedDataParallel: the loader finds its rank itself."""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from tests.trainers.common import Record, make_model
from tests.trainers.jobs import plain


def setup() -> None:
    torch.distributed.init_process_group("gloo")


def teardown() -> None:
    torch.distributed.destroy_process_group()


def train(loader: Any, record: Record, **how: Any) -> None:
    plain.train(loader, record, model=DistributedDataParallel(make_model()), **how)
