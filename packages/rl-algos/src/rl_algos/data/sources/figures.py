"""Generated pictures of coloured squares, with questions that a tiny vision-language model learns in minutes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import combinations, permutations
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rl_algos.data.rows.example import PLACE
from rl_algos.data.rows.lazily import Lazily
from rl_algos.data.stream import permutation
from rl_core.config import Config
from rl_core.errors import ConfigError, DataError
from rl_core.install_command import install_command
from rl_core.plugins import DatasetPlugin, Requirement

SQUARE = 28
"""Pixels of a side of a square, which is a token of the tiny model."""

COLOURS: Mapping[str, tuple[int, int, int]] = {"red": (230, 30, 30), "green": (30, 200, 60), "blue": (40, 60, 230)}


class FiguresSettings(Config):
    """Generated pictures of coloured squares, and questions about them."""

    task: Literal["count", "area"] = "count"
    """`count`: how many of the squares have a colour. `area`: the number of squares of a rectangle in one colour."""
    grid: int = Field(default=2, ge=2, le=3)
    """Squares on each side of a picture; the pictures of `area` have one more."""
    num_colours: int = Field(default=3, ge=2, le=3)
    """Number of colours of the squares; fewer make the questions easier."""
    num_rows: int | None = Field(default=None, gt=0)
    """Rows of the split; all its questions if unset."""
    validation_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of all questions that are reserved for validation."""
    seed: int = Field(default=0, ge=0)
    """Seed of the choice of questions for validation, and of the order of rows."""


def load(settings: Mapping[str, Any], split: str) -> Sequence[dict[str, Any]]:
    """Load rows with a picture; `train` and `validation` share no question about a picture.

    A row has `messages`, `images`, `answer` and `environment`, so that it serves reinforcement learning and supervised
    fine-tuning alike. Pictures are drawn when a row is read.

    Raises:
        DataError: If the split is unknown, or has fewer questions than the requested rows.
        ConfigError: If pillow is not installed.
    """
    config = FiguresSettings.model_validate(dict(settings))
    if split not in ("train", "validation"):
        raise DataError(f"figures has the splits train and validation, got {split!r}")
    grid, colours = config.grid, list(COLOURS)[: config.num_colours]
    # A picture of `count` has squares of any colours, and a question for each colour. A picture of `area` has a
    # rectangle, given as top, bottom, left and right, in one colour on another.
    sides = list(combinations(range(grid + 2), 2))
    pairs = list(permutations(range(len(colours)), 2))
    rectangles = [(*rows, *columns, *pair) for rows in sides for columns in sides for pair in pairs]

    def row(number: int) -> dict[str, Any]:
        if config.task == "count":
            number, asked = divmod(number, len(colours))
            numbers = []
            for _ in range(grid * grid):
                number, colour = divmod(number, len(colours))
                numbers.append(colour)
            squares = np.array(numbers).reshape(grid, grid)
            question, answer = f"How many {colours[asked]}?", numbers.count(asked)
        else:
            top, bottom, left, right, ink, paper = rectangles[number]
            squares = np.full((grid + 1, grid + 1), paper)
            squares[top:bottom, left:right] = ink
            question, answer = f"Area of {colours[ink]}?", (bottom - top) * (right - left)
        messages = [{"role": "user", "content": f"{PLACE}{question}"}]
        return {"messages": messages, "images": [_picture(squares)], "answer": str(answer), "environment": "math"}

    total = len(colours) ** (grid * grid) * len(colours) if config.task == "count" else len(rectangles)
    order = permutation(total, config.seed)
    num_held_out = max(1, round(config.validation_fraction * total))
    chosen = order[:num_held_out] if split == "validation" else order[num_held_out:]
    count = len(chosen) if config.num_rows is None else config.num_rows
    if count > len(chosen):
        problem = f"figures: {split} has {len(chosen)} different questions, got num_rows: {count}"
        raise DataError(f"{problem}. Lower num_rows, or increase grid or num_colours")
    return Lazily(count, lambda index: row(int(chosen[index])))


DATASET = DatasetPlugin(
    name="figures",
    load="rl_algos.data.sources.figures:load",
    requirement=Requirement("rl-algos"),
    settings=FiguresSettings,
)


def _picture(squares: np.ndarray) -> bytes:
    """Return a PNG file.

    Args:
        squares: Numbers of colours, `[rows, columns]`.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(f"data: the dataset figures needs pillow: {install_command('rl-core[vision]')}") from error
    colours = np.array(list(COLOURS.values()), dtype=np.uint8)
    pixels = colours[squares].repeat(SQUARE, axis=0).repeat(SQUARE, axis=1)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
