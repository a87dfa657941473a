"""The verifier of DAPO in the environment `math`."""

from __future__ import annotations

import pytest

from rl_core.rollouts.environment import Conversation
from rl_envs.math.environment import MathEnvironment
from rl_envs.math.extraction import answer_in, normalised
from rl_envs.math.plugin import MathConfig


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("Thus.\nAnswer: 34", "34", 1.0),
        ("answer : $34$.", "34", 1.0),
        ("Answer: $x = 34$", "34", 1.0),
        ("Answer: 1,234 dollars", "1234", 1.0),
        (r"Answer: \frac12", r"\frac{1}{2}", 1.0),
        (r"Answer: $\boxed{34}$", "34", 1.0),
        (r"Answer: 90^\circ", "90", 1.0),
        ("Answer: 35\nAnswer: 34", "34", 1.0),
        ("Answer: 34\nAnswer: 35", "34", -1.0),
        (r"\boxed{34}", "34", -1.0),
        ("The answer is 34", "34", -1.0),
        ("Answer: 34" + " or so" * 60, "34", -1.0),
        ("Answer: 34.0", "34", -1.0),
    ],
)
def test_the_text_behind_the_last_answer_must_be_equal(response: str, answer: str, reward: float) -> None:
    environment = MathEnvironment(MathConfig(answer_format="dapo", wrong_reward=-1.0))
    [result] = environment.step([Conversation("0", (), {"answer": answer}, response)], [None])
    assert result.rewards()["reward"] == reward


def test_an_answer_stands_near_the_end() -> None:
    assert answer_in("Answer: 1\n" + "x" * 400) is None
    assert answer_in("") is None


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        (r"\sqrt2", r"\sqrt{2}"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"12 \text{ and } 13", "1213"),
        ("10 square units", "10"),
        ("1,2", "12"),
        ("(1, 2)", "(1,2)"),
    ],
)
def test_answers_are_normalised(answer: str, normal: str) -> None:
    assert normalised(answer) == normal
