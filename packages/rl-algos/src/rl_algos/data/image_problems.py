"""Processors of datasets with images. Columns are those of the datasets' cards on the hub."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl_algos.data.config import DatasetConfig
from rl_algos.data.example import Example, column, text_column
from rl_algos.data.messages import conversation, shown
from rl_algos.data.row_images import PLACE, images_column
from rl_core.errors import DataError
from rl_core.rollouts.rollout import Message

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def geometry3k(row: Mapping[str, Any], settings: DatasetConfig) -> Example:
    """`problem`, `images` and `answer` (Geometry3K, arXiv:2105.04165). Images without a place come before the
    problem."""
    answer = column(row, "answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(f"`answer` must be a string or a number, got {shown(answer)}")
    return Example(_asked(text_column(row, "problem"), row, settings), str(answer).strip())


def clevr_count(row: Mapping[str, Any], settings: DatasetConfig) -> Example:
    """`image`, `problem`, and `solution` with the number in `<answer>` tags (CLEVR, arXiv:1612.06890)."""
    solution = text_column(row, "solution")
    found = _ANSWER.search(solution)
    answer = (found[1] if found else solution).strip()
    if not answer.isdecimal():
        raise DataError(f"`solution` must hold a number, as <answer> 3 </answer>, got {shown(solution)}")
    return Example(_asked(text_column(row, "problem"), row, settings), answer)


def refcoco(row: Mapping[str, Any], settings: DatasetConfig) -> Example:
    """`image`, expressions that refer to an object in `answer`, and its box in `bbox` as left, top, width and height
    (RefCOCO, arXiv:1608.00272).

    The model is asked for the box of the first expression, as `[left, top, right, bottom]` in pixels.
    """
    expressions = column(row, "answer")
    expression = expressions if isinstance(expressions, str) else next(iter(expressions or ()), None)
    if not isinstance(expression, str) or not expression.strip():
        raise DataError(f"`answer` must be an expression, or a list of them, got {shown(expressions)}")
    left, top, width, height = _box(column(row, "bbox"))
    asked = (
        f"Locate the object that this expression refers to: {expression.strip()}\nAnswer with its box as "
        "[left, top, right, bottom] in pixels."
    )
    box = [round(number) for number in (left, top, left + width, top + height)]
    return Example(_asked(asked, row, settings), json.dumps(box))


def llava(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """`conversations` of `{from, value}`, in whose text `<image>` is an image of the column `image` or `images`
    (LLaVA-Instruct-150K, arXiv:2304.08485)."""
    if row.get("video") is not None:
        raise DataError("the row has a `video`, which is not supported; remove the row")
    return Example(conversation(column(row, "conversations")))


def _asked(text: str, row: Mapping[str, Any], settings: DatasetConfig) -> tuple[Message]:
    """A question with places for the images of its row; an image without a place comes before the text."""
    _, images = images_column(row, settings.images_key)
    if not images:
        raise DataError("the row has no image; set `images_key` to the column of the images")
    places = "" if PLACE in text else PLACE * len(images)
    return ({"role": "user", "content": places + text},)


def _box(value: Any) -> Sequence[float]:
    is_box = isinstance(value, list | tuple) and len(value) == 4
    numbers = [each for each in value if isinstance(each, int | float) and math.isfinite(each)] if is_box else []
    if len(numbers) != 4:
        raise DataError(f"`bbox` must be [left, top, width, height], got {shown(value)}")
    return numbers
