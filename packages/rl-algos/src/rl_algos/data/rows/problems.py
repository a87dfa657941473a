"""Processors of questions with an answer that can be checked: problems, multiple choice, and questions about images.

Columns follow the datasets' cards on the hub; `rl_algos.data.sources.hub_datasets` lists the processor of each.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from string import ascii_uppercase
from typing import Any

from rl_algos.data.config import DatasetConfig
from rl_algos.data.rows.example import PLACE, Example, column, images_column, text_column
from rl_algos.data.rows.messages import as_messages, conversation, shown
from rl_algos.data.stream import permutation
from rl_core.errors import DataError
from rl_core.rollouts.rollout import Message

TEMPLATE = "{question}\n\n{options}\n\nEnd with the letter of the right option, as in: Answer: A"
"""The text of every multiple-choice question; `prompt_file` puts another one around it."""

_UNCHECKED = ("", "proof", "notfound")
"""Answers that NuminaMath gives to problems whose solution has no final answer."""

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def math_problem(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return the columns `problem` and `answer`, and `solution` if there is one.

    NuminaMath 1.5 has `proof` or `notfound` if nothing can be checked: such a row has a solution and no answer.
    """
    return _problem(row, column(row, "answer"), row.get("solution"))


def openmathinstruct2(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return `problem`, `generated_solution` and `expected_answer` (OpenMathInstruct-2, arXiv:2410.01560)."""
    return _problem(row, column(row, "expected_answer"), column(row, "generated_solution"))


def numina_cot(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return `problem` and `solution`, which contains the answer in a box; proofs have none (NuminaMath-CoT)."""
    solution = text_column(row, "solution")
    return _problem(row, boxed(solution), solution)


def openr1_math(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return `problem`, `answer`, and `generations` with a verdict on each in `correctness_math_verify`, or in
    `correctness_llama` if the first one checked none (OpenR1-Math-220k).

    The solution is the first generation that is right, or the dataset's solution if none is.
    """
    generations = column(row, "generations")
    verdicts = row.get("correctness_llama") or ()
    if any(row.get("correctness_math_verify") or ()):
        verdicts = row["correctness_math_verify"]
    right = (text for text, is_right in zip(generations or (), verdicts, strict=False) if is_right)
    return _problem(row, column(row, "answer"), next(right, None) or row.get("solution"))


def dapo_math(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return `prompt` as messages, whose text asks for a last line of the form `Answer: ...`, and the answer in
    `reward_model.ground_truth` (DAPO-Math-17k, arXiv:2503.14476)."""
    answer = column(_object(row, "reward_model"), "ground_truth")
    return Example(as_messages(column(row, "prompt")), _answer(answer))


def gsm8k(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return a grade-school word problem; the answer is the number after `####` (GSM8K, arXiv:2110.14168)."""
    solution = text_column(row, "answer")
    worked, marker, answer = solution.rpartition("####")
    if not marker:
        raise DataError(f"expected `####` before the final number in `answer`, got {worked or answer!r}")
    messages = ({"role": "user", "content": text_column(row, "question")},)
    return Example(messages, answer.strip().replace(",", ""), solution=solution)


def squad(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return a question about a passage, and its first answer (SQuAD, arXiv:1606.05250)."""
    answers = column(_object(row, "answers"), "text")
    if not answers:
        raise DataError("`answers.text` is empty: the question has no answer")
    content = f"Context: {text_column(row, 'context')}\n\nQuestion: {text_column(row, 'question')}"
    return Example(({"role": "user", "content": content},), answers[0])


def multiple_choice(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return `question`, the options in `choices` (MMLU, arXiv:2009.03300) or `options` (MMLU-Pro, arXiv:2406.01574),
    and the right one in `answer`: its number from 0, or its letter."""
    options = column(row, "choices" if "choices" in row else "options")
    if not isinstance(options, list | tuple) or not 2 <= len(options) <= len(ascii_uppercase):
        raise DataError(f"the options must be a list of 2 to {len(ascii_uppercase)} strings, got {options!r}")
    text, answer, number = text_column(row, "question"), column(row, "answer"), -1
    if isinstance(answer, int) and not isinstance(answer, bool):
        number = answer
    elif isinstance(answer, str) and len(answer.strip()) == 1:
        number = ascii_uppercase.find(answer.strip().upper())
    if not 0 <= number < len(options):
        last = ascii_uppercase[len(options) - 1]
        raise DataError(f"the answer must be a letter from A to {last} or a number from 0, got {answer!r}")
    return question(text, options, number)


def gpqa(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return `Question`, `Correct Answer` and `Incorrect Answer 1` to `3`; the order of the options depends only on
    their strings, so it is the same in every run (GPQA, arXiv:2311.12022)."""
    text = text_column(row, "Question").strip()
    names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    options = [text_column(row, name).strip() for name in names]
    seed = int.from_bytes(blake2b("\n".join([text, *options]).encode(), digest_size=8).digest(), "big")
    order = permutation(len(options), seed).tolist()
    return question(text, [options[place] for place in order], order.index(0))


def question(text: str, options: Sequence[Any], right: int) -> Example:
    """Return a question with its lettered options. The answer is the letter of the option with the number `right`."""
    listed = "\n".join(f"{letter}) {option}" for letter, option in zip(ascii_uppercase, options, strict=False))
    content = TEMPLATE.replace("{options}", listed).replace("{question}", text.strip())
    return Example(({"role": "user", "content": content},), ascii_uppercase[right])


def geometry3k(row: Mapping[str, Any], settings: DatasetConfig) -> Example:
    """Return `problem`, `images` and `answer` (Geometry3K, arXiv:2105.04165). Images without a place come before the
    problem."""
    answer = column(row, "answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(f"`answer` must be a string or a number, got {shown(answer)}")
    return Example(_asked(text_column(row, "problem"), row, settings), str(answer).strip())


def clevr_count(row: Mapping[str, Any], settings: DatasetConfig) -> Example:
    """Return `image`, `problem`, and `solution` with the number in `<answer>` tags (CLEVR, arXiv:1612.06890)."""
    solution = text_column(row, "solution")
    found = _ANSWER.search(solution)
    answer = (found[1] if found else solution).strip()
    if not answer.isdecimal():
        raise DataError(f"`solution` must hold a number, as <answer> 3 </answer>, got {shown(solution)}")
    return Example(_asked(text_column(row, "problem"), row, settings), answer)


def refcoco(row: Mapping[str, Any], settings: DatasetConfig) -> Example:
    """Return `image`, expressions that refer to an object in `answer`, and its box in `bbox` as left, top, width and
    height (RefCOCO, arXiv:1608.00272).

    The model is asked for the box of the first expression, as `[left, top, right, bottom]` in pixels.
    """
    expressions = column(row, "answer")
    expression = expressions if isinstance(expressions, str) else next(iter(expressions or ()), None)
    if not isinstance(expression, str) or not expression.strip():
        raise DataError(f"`answer` must be an expression, or a list of them, got {shown(expressions)}")
    given = column(row, "bbox")
    is_box = isinstance(given, list | tuple) and len(given) == 4
    numbers = [each for each in given if isinstance(each, int | float) and math.isfinite(each)] if is_box else []
    if len(numbers) != 4:
        raise DataError(f"`bbox` must be [left, top, width, height], got {shown(given)}")
    left, top, width, height = numbers
    asked = (
        f"Locate the object that this expression refers to: {expression.strip()}\nAnswer with its box as "
        "[left, top, right, bottom] in pixels."
    )
    box = [round(number) for number in (left, top, left + width, top + height)]
    return Example(_asked(asked, row, settings), json.dumps(box))


def llava(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return `conversations` of `{from, value}`. Each `<image>` in their text is an image of the column `image` or
    `images` (LLaVA-Instruct-150K, arXiv:2304.08485)."""
    if row.get("video") is not None:
        raise DataError("the row has a `video`, which is not supported; remove the row")
    return Example(conversation(column(row, "conversations")))


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}`; None if there is none, or its braces are not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : position].strip()
    return None


def _problem(row: Mapping[str, Any], answer: Any, solution: Any) -> Example:
    if solution is not None and not isinstance(solution, str):
        raise DataError(f"`solution` must be a string, got {solution!r}")
    messages = ({"role": "user", "content": text_column(row, "problem")},)
    known = _answer(answer)
    if known is None and not solution:
        raise DataError("the problem has neither an answer that can be compared nor a solution")
    return Example(messages, known, solution=solution or None)


def _answer(value: Any) -> str | None:
    """Return an answer as text; None if nothing can be compared with it."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise DataError(f"the answer must be a string or a number, got {value!r}")
    text = "" if value is None else str(value).strip()
    return None if text.lower() in _UNCHECKED else text


def _object(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = column(row, name)
    if not isinstance(value, Mapping):
        raise DataError(f"{name!r} must be an object, got {value!r}")
    return value


def _asked(text: str, row: Mapping[str, Any], settings: DatasetConfig) -> tuple[Message]:
    """Return a question with places for the images of its row; an image without a place comes before the text."""
    _, images = images_column(row, settings.images_key)
    if not images:
        raise DataError("the row has no image; set `images_key` to the column of the images")
    places = "" if PLACE in text else PLACE * len(images)
    return ({"role": "user", "content": places + text},)
