"""Processors of problems with an answer that can be checked, and often a solution that leads to it.

Columns are those of the datasets' cards on the hub; `rl_algos.data.hub_datasets` says which dataset has which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_algos.data.config import DatasetConfig
from rl_algos.data.example import Example, column, text_column
from rl_algos.data.messages import as_messages
from rl_core.errors import DataError

_UNCHECKED = ("", "proof", "notfound")
"""Answers that NuminaMath gives to problems whose solution has no final answer."""


def math_problem(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """The columns `problem` and `answer`, and `solution` if there is one.

    NuminaMath 1.5 says `proof` or `notfound` if nothing can be checked: such a row has a solution and no answer.
    """
    return _problem(row, column(row, "answer"), row.get("solution"))


def openmathinstruct2(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """`problem`, `generated_solution` and `expected_answer` (OpenMathInstruct-2, arXiv:2410.01560)."""
    return _problem(row, column(row, "expected_answer"), column(row, "generated_solution"))


def numina_cot(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """`problem` and `solution`, in which the answer is boxed; proofs have none (NuminaMath-CoT)."""
    solution = text_column(row, "solution")
    return _problem(row, boxed(solution), solution)


def openr1_math(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """`problem`, `answer`, and `generations` with a verdict on each in `correctness_math_verify`, or in
    `correctness_llama` if the first one checked none (OpenR1-Math-220k).

    The solution is the first generation that is right, or that of the dataset if none is.
    """
    generations = column(row, "generations")
    verdicts = row.get("correctness_llama") or ()
    if any(row.get("correctness_math_verify") or ()):
        verdicts = row["correctness_math_verify"]
    right = (text for text, is_right in zip(generations or (), verdicts, strict=False) if is_right)
    return _problem(row, column(row, "answer"), next(right, None) or row.get("solution"))


def dapo_math(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """`prompt` as messages, whose text asks for a last line of the form `Answer: ...`, and the answer in
    `reward_model.ground_truth` (DAPO-Math-17k, arXiv:2503.14476)."""
    answer = column(_object(row, "reward_model"), "ground_truth")
    return Example(as_messages(column(row, "prompt")), _answer(answer))


def gsm8k(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """A grade-school word problem; the answer is the number after `####` (GSM8K, arXiv:2110.14168)."""
    solution = text_column(row, "answer")
    worked, marker, answer = solution.rpartition("####")
    if not marker:
        raise DataError(f"expected `####` before the final number in `answer`, got {worked or answer!r}")
    messages = ({"role": "user", "content": text_column(row, "question")},)
    return Example(messages, answer.strip().replace(",", ""), solution=solution)


def squad(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """A question about a passage, and its first answer (SQuAD, arXiv:1606.05250)."""
    answers = column(_object(row, "answers"), "text")
    if not answers:
        raise DataError("`answers.text` is empty: the question has no answer")
    content = f"Context: {text_column(row, 'context')}\n\nQuestion: {text_column(row, 'question')}"
    return Example(({"role": "user", "content": content},), answers[0])


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{}`; None if there is none, or its braces are not closed."""
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
    """An answer as text; None if nothing can be compared with it."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise DataError(f"the answer must be a string or a number, got {value!r}")
    text = "" if value is None else str(value).strip()
    return None if text.lower() in _UNCHECKED else text


def _object(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = column(row, name)
    if not isinstance(value, Mapping):
        raise DataError(f"{name!r} must be an object, got {value!r}")
    return value
