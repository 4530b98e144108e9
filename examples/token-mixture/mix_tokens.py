"""Train a small language model on three token sets, whose weights follow a schedule.

    python examples/token-mixture/mix_tokens.py
    python examples/token-mixture/mix_tokens.py --steps 600 --folder tokens  # keeps the files

It writes three small token sets with patterns of their own: in "web" each token is followed by one
of a few others, "code" repeats short phrases, and "math" counts. Training begins almost entirely on
web and ends with equal shares. The table shows each part's share of the samples and its loss, for
each interval of steps. Half-way the job stops and continues from its state, with the next batches.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from penstock import DataLoader, Dataset, mix

VOCABULARY, LENGTH = 64, 32
NAMES = ("web", "code", "math")


def write_tokens(folder: Path, *, seed: int) -> None:
    """Write a flat file of uint16 tokens for each part: 4,000, 1,000 and 500 sequences."""
    rng = np.random.default_rng(seed)
    followers = rng.integers(0, VOCABULARY, (VOCABULARY, 4))
    web = [0]
    for choice in rng.integers(0, 4, 4_000 * LENGTH - 1).tolist():
        web.append(int(followers[web[-1], choice]))
    phrases = rng.integers(0, VOCABULARY, (16, 8))
    code = phrases[rng.integers(0, 16, 1_000 * LENGTH // 8)].reshape(-1)
    starts, steps = rng.integers(0, VOCABULARY, (500, 1)), rng.integers(1, 4, (500, 1))
    math = (starts + steps * np.arange(LENGTH)) % VOCABULARY
    for name, tokens in zip(NAMES, (np.array(web), code, math.reshape(-1)), strict=True):
        tokens.astype("uint16").tofile(folder / f"{name}.bin")


class SmallModel(nn.Module):
    """A causal transformer of one block. It takes tokens, (n, length), and returns logits."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(LENGTH, width)
        self.block = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(tokens) + self.places(torch.arange(length))
        logits: torch.Tensor = self.head(self.block(hidden, src_mask=mask, is_causal=True))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on three token sets with a schedule.")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="for the token sets; by default a new one")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_tokens(folder, seed=options.seed)
        train(folder, steps=options.steps, batch_size=options.batch_size, seed=options.seed)


def train(folder: Path, *, steps: int, batch_size: int, seed: int) -> None:
    """Train for a number of steps, in two halves: the second one resumes from the state."""
    parts = {
        name: Dataset(str(folder / f"{name}.bin"), dtype="uint16", sample=(LENGTH,))
        for name in NAMES
    }
    samples = steps * batch_size
    schedule = {  # by samples of the job, over all ranks
        0: {"web": 0.9, "code": 0.08, "math": 0.02},
        samples // 4: {"web": 0.6, "code": 0.3, "math": 0.1},
        3 * samples // 4: {"web": 1, "code": 1, "math": 1},
    }
    mixture = mix(
        parts, weights=schedule, transition="linear", epoch=samples, fields=("tokens", "part")
    )
    model = SmallModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state: dict[str, Any] | None = None
    print(f"{'steps':>9}   " + "   ".join(f"{name:>5} share  loss" for name in NAMES))
    for half in range(2):
        with DataLoader(mixture, batch_size=batch_size, shuffle=True, seed=seed) as loader:
            if state is not None:
                loader.load_state_dict(state)
                print(f"          (a new loader continues at step {loader.step})")
            run(
                loader, model, optimizer, until=steps // 2 if half == 0 else steps, every=steps // 8
            )
            state = loader.state_dict()
    for part in parts.values():
        part.close()


def run(loader: DataLoader, model: nn.Module, optimizer: Any, *, until: int, every: int) -> None:
    """Train until a step, and print what each interval delivered: shares and losses of parts."""
    counts, losses = np.zeros(len(NAMES)), np.zeros(len(NAMES))
    for tokens, part in loader:
        logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        by_sample = loss.view(len(tokens), -1).mean(dim=1)
        by_sample.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts += np.bincount(part, minlength=len(NAMES))
        losses += np.bincount(part, by_sample.detach(), minlength=len(NAMES))
        if loader.step % every == 0:
            cells = zip(counts / counts.sum(), losses / np.maximum(counts, 1), strict=True)
            shown = "   ".join(f"{share:>11.1%}  {mean:>4.2f}" for share, mean in cells)
            print(f"{loader.step - every:>4}-{loader.step:<4}   {shown}")
            counts[:], losses[:] = 0, 0
        if loader.step == until:
            return


if __name__ == "__main__":
    main()
