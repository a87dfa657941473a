"""The environment `math`, and its check of rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult
from rl_envs.grader import Grader
from rl_envs.math.extraction import extract, known_answers
from rl_envs.math.form import Collection, Equation, Expression, read
from rl_envs.math.number import read_number
from rl_envs.math.plugin import MathConfig
from rl_envs.math.verdict import judge_in_time

SHOWN = 200
"""Maximum number of characters of an extracted answer that are reported."""


class MathEnvironment(Grader[MathConfig]):
    """Scores a single turn by its final answer; the known one is `info["answer"]`, or any of several in a list.

    An undecided answer counts as wrong and as `unparsed`; so does one that takes too much processor time.
    """

    def score(self, conversation: Conversation) -> StepResult:
        config = self._config
        known, kind = known_answers(conversation.info, config.answer_format)
        found = extract(conversation.final_text, kind)
        verdicts = [] if found is None else [judge_in_time(found.text, each, kind) for each in known]
        correct = True in verdicts
        well_formed = found is not None and (found.in_box or config.answer_format != "auto")
        reward = config.correct_reward if correct else config.wrong_reward
        undecided = not correct and None in verdicts
        answer = "" if found is None else found.text[:SHOWN]
        info = {"accuracy": float(correct), "answer": answer, "unparsed": float(undecided)}
        if not config.format_reward:
            return StepResult(reward=reward, info=info)
        formed = config.format_reward if well_formed else 0.0
        return StepResult(reward={"reward": reward + formed, "correct": reward, "format": formed}, info=info)


_COMMAND = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+")
_SENTENCE = re.compile(r"(?:\b[^\W\d_]{2,}\b[ ,]+){3,}")


def check_row(info: Mapping[str, Any], config: MathConfig) -> None:
    """Raise a `ValueError` if the row has no answer that a completion can give."""
    known, kind = known_answers(info, config.answer_format)
    for answer in known if kind == "numeric" else ():
        if read_number(answer) is None:
            raise ValueError(f"answer_format numeric needs a number as answer, got {answer!r}")
    for answer in known if kind != "choice" else ():
        # A solution is a sentence with a number in it rather than a number or an expression.
        plain = _COMMAND.sub(" ", answer)
        is_sentence = any(map(str.isdigit, plain)) and _SENTENCE.search(plain) is not None
        if is_sentence and isinstance(read(answer), Expression | Collection | Equation):
            raise ValueError(
                f"the answer {answer[:80]!r} is a solution in words, which no completion repeats. Put the final answer "
                r"after ####, in \boxed{}, or by itself"
            )
