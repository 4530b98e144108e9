"""What each stage can do alone, measured beside a run so that shares are comparable."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from augment.recipe import CheckedRecipe
    from pipeline.bench.facts import Ceilings
    from readers import Dataset


def measure_ceilings(
    dataset: Dataset,
    recipe: CheckedRecipe | None,
    *,
    batch_size: int,
    device: str = "cpu",
    threads: int,
    seconds: float = 0.5,
    seed: int = 0,
) -> Ceilings:
    """Measure reading, decoding, augmenting, the copy and Python's part, each for about `seconds`.

    recipe: of `check_recipe`; None: a dataset without images. threads: that decode. The dataset
    stays open. Run it when nothing else of this process runs. Raises what reading and decoding
    raise.
    """
    raise NotImplementedError
