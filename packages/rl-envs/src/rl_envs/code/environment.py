"""The `code` environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult
from rl_envs.code.cases import read_tests
from rl_envs.code.config import CodeConfig
from rl_envs.code.extraction import program_in
from rl_envs.code.grading import grade
from rl_envs.sandbox.sandbox import open_sandbox

SHOWN = 300
"""Maximum number of characters of a problem that are reported."""


class CodeEnvironment:
    """Scores a single turn by the tests of its row; `read_tests` describes their forms.

    Raises:
        SandboxUnavailable: If the machine does not offer the sandbox that the settings ask for.
    """

    def __init__(self, config: CodeConfig) -> None:
        self._config = config
        self._runner = open_sandbox(config.sandbox)

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._score(conversation) for conversation in conversations]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _score(self, conversation: Conversation) -> StepResult:
        config = self._config
        tests = read_tests(conversation.info, config.max_tests)
        solution = program_in(conversation.final_text)
        if solution is None:
            return StepResult(reward=0.0, info={"accuracy": 0.0, "has_code": 0.0, "problem": "no block of Python"})
        verdict = grade(
            solution,
            tests,
            self._runner,
            config.sandbox.limits,
            tolerance=config.tolerance,
            stop_early=config.reward == "all",
        )
        share = verdict.num_passed / verdict.num_tests
        return StepResult(
            reward=(share if self._config.reward == "share" else float(share == 1.0)),
            info={
                "accuracy": float(verdict.num_passed == verdict.num_tests),
                "has_code": 1.0,
                "tests_passed": verdict.num_passed,
                "problem": verdict.problem[:SHOWN],
            },
        )
