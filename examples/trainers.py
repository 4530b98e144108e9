"""Train the job of detector.py, segmenter.py or dino.py with Lightning or Transformers.

These examples import it for `--trainer lightning` and `--trainer hugging-face`. A trainer gets the
loader of the job as it is: it neither wraps it nor makes a loader of its own.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

if TYPE_CHECKING:
    from penstock import DataLoader


class Job:
    """A model, the batches that it learns from, and its optimizer, for any trainer."""

    model: nn.Module
    loader: DataLoader
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler | None = None
    steps: int
    """How many batches it is trained on."""

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss of a batch."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Do what follows each step of the optimizer."""


def train_with_lightning(job: Job) -> None:
    """Train the model of a job with Lightning."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
            return job.loss(batch)

        def on_train_batch_end(self, *_: Any) -> None:
            job.after_step()

        def configure_optimizers(self) -> Any:
            steps = {"scheduler": job.schedule, "interval": "step"}
            return [job.optimizer], [steps] if job.schedule is not None else []

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_steps=job.steps,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        enable_checkpointing=False,
        **quiet,
    )
    trainer.fit(Module(), job.loader)


def train_with_hugging_face(job: Job) -> None:
    """Train the model of a job with the Trainer of Transformers."""
    import transformers

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return job.loader

        def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **_: Any) -> torch.Tensor:
            del model  # it is the job's
            return job.loss(inputs)

    class AfterStep(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            job.after_step()

    with tempfile.TemporaryDirectory() as output:
        arguments = transformers.TrainingArguments(
            output_dir=output,
            max_steps=job.steps,
            save_strategy="no",
            report_to=[],
            max_grad_norm=0.0,  # as in the plain loop
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        )
        schedule = job.schedule or LambdaLR(job.optimizer, lambda _: 1.0)
        own = {"train_dataset": job.loader.dataset, "optimizers": (job.optimizer, schedule)}
        Trainer(job.model, arguments, callbacks=[AfterStep()], **own).train()


TRAINERS = {"lightning": train_with_lightning, "hugging-face": train_with_hugging_face}
