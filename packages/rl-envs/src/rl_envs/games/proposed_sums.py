"""The environment `proposed_sums`, for a proposer and solvers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.games.config import ProposedSumsConfig

PROPOSER, SOLVER = "proposer", "solver"
"""Names of the agents."""

_SUM = re.compile(r"\s*(\d{1,4})\s*\+\s*(\d{1,4})\s*")
_NUMBER = re.compile(r"\d{1,9}")


class ProposedSums:
    """Takes the turn of a proposer as a sum such as `12+7`, which it poses as `12+7=`, and the last number in the turn
    of a solver as its answer.

    A row has `max_operand`, and the first turn is the proposer's; or it has `problem`, a sum that the solver solves.
    The rollout program gives what was proposed to the conversations of solvers, as the `problem` of their info.
    """

    def __init__(self, config: ProposedSumsConfig) -> None:
        self._config = config

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [_solved(turn) if "problem" in turn.info else self._proposed(turn) for turn in conversations]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _proposed(self, turn: Conversation) -> StepResult:
        found = _SUM.fullmatch(turn.final_text)
        operands = [int(number) for number in found.groups()] if found else []
        if not operands or max(operands) > _max_operand(turn):
            return StepResult(reward=self._config.invalid_reward, agent=PROPOSER, info={"valid": 0.0})
        return StepResult(
            done=False,
            observation=({"role": "user", "content": f"{operands[0]}+{operands[1]}="},),
            info={"valid": 1.0, "sum": sum(operands)},
            agent=PROPOSER,
            next_agent=SOLVER,
        )


def _solved(turn: Conversation) -> StepResult:
    found = _SUM.fullmatch(str(turn.info["problem"]))
    if found is None:
        raise UnusableAnswer(f"the row's `problem` must be a sum such as 12+7, got {turn.info['problem']!r:.80}")
    numbers = _NUMBER.findall(turn.final_text)
    is_right = bool(numbers) and int(numbers[-1]) == sum(map(int, found.groups()))
    return StepResult(reward=float(is_right), agent=SOLVER, info={"accuracy": float(is_right)})


def _max_operand(turn: Conversation) -> int:
    try:
        return int(turn.info["max_operand"])
    except (KeyError, TypeError, ValueError):
        raise UnusableAnswer(
            f"the row needs `problem`, a sum, or `max_operand`, a whole number; it has {sorted(map(str, turn.info))}"
        ) from None
