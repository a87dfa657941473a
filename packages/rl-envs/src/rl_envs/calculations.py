"""The dataset `calculations`: products for a calculator or a program, sums for an agent, facts to look up, and
demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rl_core.config import Config, Problem, ProblemError
from rl_core.errors import DataError
from rl_core.plugins import DatasetPlugin, Requirement
from rl_envs.draws import draws

_HELD_OUT = 10
"""One of this number of pairs of operands is for validation."""
_ENVIRONMENTS = {
    "calculator": "text_tools",
    "program": "code",
    "repository": "repository",
    "search": "text_tools",
    "file": "mcp_tools",
}
_NAMES = tuple("".join(name) for name in product("bdfgklmnprst", "aeiou", "bdfgklmnprst"))
CALL = '<tool_call>\n{"name": "read_text_file", "arguments": {"path": "%s"}}\n</tool_call>'
"""The call of a tool that reads the file of a name, in the format `hermes`."""
_TEST = """import unittest

import answer


class TestAnswer(unittest.TestCase):
    def test_it_is_the_sum(self):
        self.assertEqual(answer.ANSWER, {total})
"""


class CalculationsSettings(Config):
    """Generated products of two numbers, which a tiny model cannot compute without a tool, sums for an agent, or
    numbers of names, which it can only look up."""

    form: Literal["calculator", "program", "repository", "search", "file"] = "calculator"
    """Environment of the rows: `text_tools` for `calculator`, which the policy calls; `code` for `program`, which
    the policy writes; `repository` for a repository whose `answer.py` an agent changes to have the sum of two
    numbers as `ANSWER`; `text_tools` for `search`, which finds the number of a name in the corpus
    `rl_envs.calculations:facts`; or `mcp_tools` for `file`, in which a file by this name has the number
    (`python -m rl_envs.mcp_tools.files`)."""
    max_operand: int = Field(default=99, ge=9, le=9999)
    """Largest operand."""
    size: int = Field(default=1000, gt=0, le=10**6)
    """Number of rows in the split; `train` and `validation` share no pair of operands."""
    seed: int = Field(default=0, ge=0)
    """Seed of the operands."""
    demonstrations: bool = False
    """Rows for supervised fine-tuning: half of them show the right call or program, the others a guessed answer or the
    program of a sum. A model that has learned from them does either, so reinforcement learning can compare both."""

    @model_validator(mode="after")
    def _demonstrates(self) -> Self:
        if self.demonstrations and self.form == "repository":
            reason, remedy = "cannot be combined with form=repository", "Use the dataset arithmetic"
            raise ProblemError(Problem("demonstrations", reason, remedy=remedy))
        return self


def facts() -> list[dict[str, str]]:
    """Return the documents that the form `search` asks for: 720 names of three letters, each with a number."""
    return [{"title": name, "text": str(next(draws(f"number of {name}")) % 100)} for name in _NAMES]


DATASET = DatasetPlugin(
    "calculations", "rl_envs.calculations:load", Requirement("rl-envs"), settings=CalculationsSettings
)


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Return rows with `messages`, `environment` and the fields that it needs: `answer`, or `info` with the tests.
    Demonstrations are conversations that end with the assistant.

    Raises:
        DataError: If the split is unknown.
    """
    config = CalculationsSettings.model_validate(dict(settings))
    if split not in ("train", "validation"):
        raise DataError(f"calculations have the splits train and validation, got {split!r}")
    rows, numbers = [], {each["title"]: each["text"] for each in facts()}
    for index in range(config.size):
        drawn, form = draws(f"{config.seed}/{split}/{index}"), config.form
        looks_up = form in ("search", "file")
        is_held_out = None
        while is_held_out != (split == "validation"):
            a, b = (next(drawn) % (config.max_operand + 1) for _ in range(2))
            name = _NAMES[next(drawn) % len(_NAMES)] if looks_up else f"{min(a, b)}*{max(a, b)}"
            is_held_out = next(draws(name)) % _HELD_OUT == 0
        question = name if looks_up else f"{a}{'+' if form == 'repository' else '*'}{b}"
        answer = numbers[name] if looks_up else str(a * b)
        asked = {"role": "user", "content": f"{question}="}
        row: dict[str, Any] = {"messages": [asked], "environment": _ENVIRONMENTS[form]}
        if config.demonstrations:
            is_right = next(drawn) % 2 == 0
            if form == "program":
                said = [f"```python\nprint({a}{'*' if is_right else '+'}{b})\n```"]
            elif is_right and form == "file":
                said = [CALL % name, answer, answer]
            elif is_right:
                found = f"{name}\n{answer}" if form == "search" else answer
                said = [f"<{form}>{question}</{form}>", f"<result>\n{found}\n</result>", answer]
            else:
                said = [str(next(drawn) % (100 if looks_up else a * b + 100))]
            # The result of the tool is the only message after the question that is not the policy's.
            roles = ("assistant", "tool" if form == "file" else "user", "assistant")
            row["messages"] += [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
        elif form == "calculator" or looks_up:
            row["answer"] = answer
        elif form == "program":
            row["info"] = {"tests": [{"input": "", "output": f"{a * b}\n"}]}
        else:
            readme = "`answer.py` has the answer to a question.\n"
            info = {
                "repository": {"answer.py": "ANSWER = None\n", "README.md": readme},
                "tests": "python -m unittest test_answer",
                "test_files": {"test_answer.py": _TEST.format(total=a + b)},
            }
            row = {"messages": [asked], "info": info, "environment": _ENVIRONMENTS[form]}
        rows.append(row)
    return rows
