"""Files of pictures of coloured squares: captions in LLaVA's JSON, and preferences between answers about them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

COLOURS: Mapping[str, tuple[int, int, int]] = {"red": (230, 30, 30), "green": (30, 200, 60), "blue": (40, 60, 230)}
SQUARE = 28
"""Pixels of a side of a square, which is a token of the tiny model."""
HELD_OUT = 10
"""Every so manyth row validates."""
COUNTS = "01234"
"""Answers to how many of four squares have a colour."""

Squares = tuple[str, str, str, str]
"""Colours of a picture of two rows of two squares."""


def write_captions(folder: Path) -> list[str]:
    """Write captions of all pictures in three colours, which list the squares row by row; return the keys of the
    data."""
    return _write(folder, list(_captions(folder)), ", processor: llava")


def write_preferences(folder: Path) -> list[str]:
    """Write the right count of red or green squares before each wrong one; return the keys of the data."""
    return _write(folder, list(_preferences(folder)), "")


def _captions(folder: Path) -> Iterator[dict[str, Any]]:
    for squares in product(COLOURS, repeat=4):
        text = f"{squares[0]} {squares[1]}, {squares[2]} {squares[3]}"
        turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": text}]
        yield {"image": _draw(folder, squares), "conversations": turns}


def _preferences(folder: Path) -> Iterator[dict[str, Any]]:
    for squares in product(("red", "green"), repeat=4):
        for asked in ("red", "green"):
            right = str(squares.count(asked))
            prompt = {"prompt": f"<image>How many {asked}?", "images": [_draw(folder, squares)], "chosen": right}
            yield from ({**prompt, "rejected": wrong} for wrong in COUNTS if wrong != right)


def _draw(folder: Path, squares: Squares) -> str:
    from PIL import Image

    name = "-".join(squares) + ".png"
    if not (folder / name).exists():
        small = Image.new("RGB", (2, 2))
        small.putdata([COLOURS[colour] for colour in squares])
        small.resize((2 * SQUARE, 2 * SQUARE), Image.Resampling.NEAREST).save(folder / name)
    return name


def _write(folder: Path, rows: list[dict[str, Any]], further: str) -> list[str]:
    parts = {"validation": rows[::HELD_OUT], "train": [row for place, row in enumerate(rows) if place % HELD_OUT]}
    for part, chosen in parts.items():
        (folder / f"{part}.json").write_text(json.dumps(chosen))
    return [f"data.{part}={{data_path: {folder / part}.json, image_folder: {folder}{further}}}" for part in parts]
