"""Train an image and a text encoder on pairs from two datasets, as CLIP does.

    python examples/contrastive/contrastive.py
    python examples/contrastive/contrastive.py --steps 200 --folder pairs    # keeps the pictures

It draws two small datasets of pictures with captions: "shapes" (coloured discs and squares) and
"stripes". Each picture has several captions, one a line of its text file. One of them is drawn at
each delivery, with the sample's own random numbers, so a restart draws the same. A mixture takes
two thirds of the samples from shapes. The table shows the loss and, for each part, its share of the
samples and how often a picture's right caption is the nearest of all captions in the batch.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from penstock import DataLoader, Dataset, Map, Normalize, Pad, Resize, Tokens, mix

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220), "grey": (128,) * 3}
PLACES = {"left": 0, "middle": 16, "right": 32}
WORDS = ("", "a", "in", "the", "on", "picture", "of", "disc", "square", "lines", "thin", "wide")
NUMBERS = {word: number for number, word in enumerate((*WORDS, *COLOURS, *PLACES))}
LONGEST = 8


def draw_shapes(number: int) -> tuple[Image.Image, list[str]]:
    """Return a picture of a disc or a square, and its captions."""
    colour, place = (list(each)[number // n % len(each)] for each, n in ((COLOURS, 1), (PLACES, 4)))
    shape = ("disc", "square")[number // 12 % 2]
    image = Image.new("RGB", (48, 48), (250, 250, 240))
    draw, x, y = ImageDraw.Draw(image), PLACES[place], 4 + number % 28
    (draw.ellipse if shape == "disc" else draw.rectangle)((x, y, x + 14, y + 14), COLOURS[colour])
    return image, [f"a {colour} {shape} on the {place}", f"{place} the {colour} {shape}"]


def draw_stripes(number: int) -> tuple[Image.Image, list[str]]:
    """Return a picture of stripes, and its captions."""
    colour, width = list(COLOURS)[number % 4], ("thin", "wide")[number // 4 % 2]
    image = Image.new("RGB", (48, 48), (250, 250, 240))
    step = 6 if width == "thin" else 16
    for x in range(number % step - step, 48, step):
        ImageDraw.Draw(image).rectangle((x, 0, x + step // 2, 48), COLOURS[colour])
    return image, [f"{width} {colour} lines", f"a picture of {width} lines in {colour}"]


def write_pairs(folder: Path) -> None:
    """Write the two datasets: 240 and 80 pictures, each with a text file of one caption a line."""
    for name, draw, count in (("shapes", draw_shapes, 240), ("stripes", draw_stripes, 80)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            image, captions = draw(number)
            image.save(folder / name / f"{number:03}.png")
            (folder / name / f"{number:03}.txt").write_text("\n".join(captions))


def one_caption(captions: str, *, rng: np.random.Generator) -> list[int]:
    """Return the tokens of one of a picture's captions, drawn by the sample's own numbers."""
    lines = captions.splitlines()
    return [NUMBERS[word] for word in lines[rng.integers(len(lines))].split()]


class TwoEncoders(nn.Module):
    """Encoders of images (n, 3, 32, 32) and of tokens (n, words), to vectors of length 1."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.image = nn.Sequential(
            *(nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * 5 * 5, width)),
        )
        self.words = nn.EmbeddingBag(len(NUMBERS), width, padding_idx=0)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the similarity of each image and each caption of the batch."""
        image, text = normalize(self.image(images), dim=1), normalize(self.words(tokens), dim=1)
        return self.scale.exp() * image @ text.T


def main() -> None:
    parser = argparse.ArgumentParser(description="Train two encoders on pairs of two datasets.")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--folder", type=Path, help="for the pictures; by default a new one")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        write_pairs(folder)
        train(folder, steps=options.steps, batch_size=options.batch_size, seed=options.seed)


def train(folder: Path, *, steps: int, batch_size: int, seed: int) -> None:
    """Train for a number of steps, and print losses and hits of both parts."""
    parts = {
        name: Dataset(str(folder / name), fields=("image", "caption"))
        for name in ("shapes", "stripes")
    }
    mixture = mix(
        parts,
        weights={"shapes": 2, "stripes": 1},
        epoch=steps * batch_size,
        fields=("image", "caption", "part"),
    )
    recipe = [
        Map(one_caption, fields="caption", returns={"caption": Tokens("int64")}),
        Pad("caption", to=LONGEST, value=0),
        Resize((32, 32)),
        Normalize(),
    ]
    model = TwoEncoders()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    print("    step   loss   " + "   ".join(f"{name:>7}: share, right" for name in parts))
    counts, right = np.zeros(2), np.zeros(2)
    loader: Any = DataLoader(
        mixture, batch_size=batch_size, shuffle=True, drop_last=True, seed=seed, augment=recipe
    )
    with loader:
        for images, tokens, part in loader:
            similarity = model(images, tokens)
            # Captions that are equal to the right one are right, too.
            same = (tokens[:, None] == tokens[None]).all(dim=2).float()
            wanted = same / same.sum(dim=1, keepdim=True)
            loss = (cross_entropy(similarity, wanted) + cross_entropy(similarity.T, wanted)) / 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            hits = same[torch.arange(len(part)), similarity.argmax(dim=1)]
            counts += np.bincount(part, minlength=2)
            right += np.bincount(part, hits, minlength=2)
            if loader.step % (steps // 8) == 0:
                cells = zip(counts / counts.sum(), right / np.maximum(counts, 1), strict=True)
                shown = "   ".join(f"{share:>14.0%}, {hit:>5.0%}" for share, hit in cells)
                print(f"{loader.step:>8}   {loss.item():>4.2f}   {shown}")
                counts[:], right[:] = 0, 0
    for each in parts.values():
        each.close()


if __name__ == "__main__":
    main()
