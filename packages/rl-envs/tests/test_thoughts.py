"""What follows the last thoughts is graded, in every environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rl_core.rollouts.environment import Conversation, Environment
from rl_envs.code.environment import CodeEnvironment
from rl_envs.code.plugin import CodeConfig
from rl_envs.games.number_games import GuessNumber, Nim, ProposedSums
from rl_envs.games.plugin import GuessNumberConfig, NimConfig, ProposedSumsConfig, SlidingPuzzleConfig
from rl_envs.games.sliding_puzzle import SlidingPuzzle
from rl_envs.gymnasium.environment import GymnasiumEnvironment
from rl_envs.gymnasium.plugin import GymnasiumConfig
from rl_envs.instructions.environment import InstructionsEnvironment
from rl_envs.instructions.plugin import InstructionsConfig
from rl_envs.match.environment import MatchEnvironment
from rl_envs.match.plugin import MatchConfig
from rl_envs.math.environment import MathEnvironment
from rl_envs.math.plugin import MathConfig
from rl_envs.multiple_choice.environment import MultipleChoiceEnvironment
from rl_envs.multiple_choice.plugin import MultipleChoiceConfig
from rl_envs.reasoning_gym.environment import ReasoningGymEnvironment
from rl_envs.reasoning_gym.plugin import ReasoningGymConfig
from rl_envs.text_tools.environment import TextToolsEnvironment
from rl_envs.text_tools.plugin import TextToolsConfig

LEG = {"task": "leg_counting", "task_config": "{}", "entry": "{'question': '?', 'answer': '4', 'metadata': {}}"}
LAKE = {"id": "FrozenLake-v1", "config": {"desc": ["SG", "HH"], "is_slippery": False}, "seed": 0}
RIGHT, WRONG = "```python\nprint(42)\n```", "```python\nprint(41)\n```"
CASES: dict[str, tuple[Environment, Mapping[str, Any], str, str]] = {
    "math": (MathEnvironment(MathConfig()), {"answer": "42"}, r"\boxed{42}", r"\boxed{41}"),
    "math plain": (MathEnvironment(MathConfig()), {"answer": "42"}, "42", r"\boxed{41}"),
    "math numeric": (MathEnvironment(MathConfig(answer_format="numeric")), {"answer": "42"}, "42", "The answer is 41"),
    "math dapo": (MathEnvironment(MathConfig(answer_format="dapo")), {"answer": "42"}, "Answer: 42", "Answer: 41"),
    "math choice": (MathEnvironment(MathConfig(answer_format="choice")), {"answer": "B"}, "B", r"\boxed{A}"),
    "match exact": (MatchEnvironment(MatchConfig()), {"answer": "yes"}, "yes", "no"),
    "match tag": (
        MatchEnvironment(MatchConfig(answer_tag="answer")),
        {"answer": "yes"},
        "<answer>yes</answer>",
        "<answer>no</answer>",
    ),
    "match contains": (MatchEnvironment(MatchConfig(mode="contains")), {"answer": "yes"}, "So yes.", "So no."),
    "match regex": (MatchEnvironment(MatchConfig(mode="regex")), {"pattern": "[a-z]*"}, "yes", "NO"),
    "match json": (MatchEnvironment(MatchConfig(mode="json")), {"answer": {"a": 1}}, '{"a": 1}', '{"a": 2}'),
    "match json_schema": (
        MatchEnvironment(MatchConfig(mode="json_schema")),
        {"schema": {"type": "integer"}},
        "```\n1\n```",
        "```\nnull\n```",
    ),
    "multiple_choice": (MultipleChoiceEnvironment(MultipleChoiceConfig()), {"answer": "B"}, "B", "The answer is A"),
    "code": (
        CodeEnvironment(CodeConfig.model_validate({"sandbox": {"isolation": "limits"}})),
        {"tests": [{"input": "", "output": "42"}]},
        RIGHT,
        WRONG,
    ),
    "instructions": (
        InstructionsEnvironment(InstructionsConfig()),
        {"instruction_id_list": ["punctuation:no_comma"]},
        "No.",
        "Well, no.",
    ),
    "text_tools": (TextToolsEnvironment(TextToolsConfig(tools=["calculator"])), {"answer": "42"}, "42", r"\boxed{41}"),
    "reasoning_gym": (
        ReasoningGymEnvironment(ReasoningGymConfig()),
        {**LEG, "answer_format": "tag"},
        "<answer>4</answer>",
        "<answer>5</answer>",
    ),
    "gymnasium": (
        GymnasiumEnvironment(GymnasiumConfig()),
        {**LAKE, "actions": ["left", "down", "right", "up"], "show": None},
        "right",
        "down",
    ),
    "sliding_puzzle": (SlidingPuzzle(SlidingPuzzleConfig()), {"board": [[1, 2], [0, 3]]}, "left", "down"),
    "guess_number": (GuessNumber(GuessNumberConfig()), {"answer": 42}, "42", "41"),
    "nim": (Nim(NimConfig()), {"pile": 2, "max_take": 3}, "2", "3"),
    "proposed_sums": (ProposedSums(ProposedSumsConfig()), {"problem": "40+2"}, "42", "41"),
}
"""Environment, row, a right response and a wrong one."""


def _reward(case: str, completion: str, opened: str = "") -> float:
    environment, info, _, _ = CASES[case]
    turn = Conversation("0", (), info, completion, opened_thoughts=opened)
    [result] = environment.step([turn], [None])
    if result.state is not None:
        environment.close([result.state])
    return result.rewards()["reward"]


@pytest.mark.parametrize("case", CASES)
def test_only_what_follows_the_thoughts_is_graded(case):
    _, _, right, wrong = CASES[case]
    assert _reward(case, right) == 1.0
    assert _reward(case, f"<think>\n{wrong}\n</think>\n\n{right}") == 1.0
    assert _reward(case, f"<think>\n{right}\n</think>\n\n{wrong}") < 1.0
    assert _reward(case, f"{wrong}</think>{right}", "<think>") == 1.0
    assert _reward(case, f"{right}</think>{wrong}") < 1.0


@pytest.mark.parametrize("case", CASES)
def test_thoughts_that_do_not_end_are_not_an_answer(case):
    _, _, right, _ = CASES[case]
    assert _reward(case, f"<think>{right}") < 1.0
    assert _reward(case, f"[THINK]{right}") < 1.0
    assert _reward(case, right, "<think>") < 1.0
    assert _reward(case, f"<think>{right}</think>") < 1.0
