"""The environments `guess_number`, `nim` and `proposed_sums`, whose turns are numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.games.plugin import GuessNumberConfig, NimConfig, ProposedSumsConfig
from rl_envs.grader import Grader, TurnEnvironment

PLAYERS = ("first", "second")
"""Names of the agents of `nim`, in the order of their first turns."""
PROPOSER, SOLVER = "proposer", "solver"
"""Names of the agents of `proposed_sums`."""

_GUESS = re.compile(r"(?<![\w.])-?\d{1,12}(?![\w.]*\d)")
_STONES = re.compile(r"\d{1,6}")
_SUM = re.compile(r"\s*(\d{1,4})\s*\+\s*(\d{1,4})\s*")
_RESULT = re.compile(r"\d{1,9}")


class GuessNumber(TurnEnvironment[GuessNumberConfig]):
    """Takes the last whole number in a turn as the guess; the row's `answer` is the number.

    The state is the number of guesses.
    """

    def save(self, states: Sequence[int]) -> list[bytes | None]:
        """Return the numbers of guesses."""
        return [str(num_guesses).encode() for num_guesses in states]

    def restore(self, saved: Sequence[bytes]) -> list[int]:
        """Return the numbers of guesses."""
        return [int(data) for data in saved]

    def turn(self, conversation: Conversation, state: int | None) -> StepResult:
        num_before = state or 0
        try:
            number = int(conversation.info["answer"])
        except (KeyError, TypeError, ValueError):
            got = conversation.info.get("answer")
            raise UnusableAnswer(f"the row's `answer` must be a whole number, got {got!r}") from None
        found = _GUESS.findall(conversation.final_text)
        guess = int(found[-1]) if found else None
        info = {"accuracy": float(guess == number), "guesses": num_before + 1}
        if guess == number:
            return StepResult(reward=self._config.discount**num_before, info=info)
        if num_before + 1 == self._config.max_guesses:
            return StepResult(reward=0.0, info=info)
        hint = "Write a whole number." if guess is None else "higher" if guess < number else "lower"
        return StepResult(done=False, observation=({"role": "user", "content": hint},), state=num_before + 1, info=info)


@dataclass(frozen=True)
class Pile:
    """A game in progress.

    Args:
        stones: Stones that are left.
        max_take: Maximum number of stones of a move.
        mover: Index of the player whose turn it is.
        choices: Number of moves of each player so far from a pile that can be won.
        best: Number of these moves of each player that were the winning move.
    """

    stones: int
    max_take: int
    mover: int = 0
    choices: tuple[int, int] = (0, 0)
    best: tuple[int, int] = (0, 0)


class Nim(TurnEnvironment[NimConfig]):
    """Takes the last number in a turn as the stones that the player removes; who takes the last stone wins.

    The row's `pile` is the number of stones, and `max_take` how many a player may remove. The players are the agents
    `first` and `second`; each sees the stones that are left before its turn. The row's `instructions`, if it has them,
    come before the stones that the second player sees first, as they do in the prompt of the first player.
    """

    def turn(self, conversation: Conversation, state: Pile | None) -> StepResult:
        pile = state or Pile(_positive(conversation, "pile"), _positive(conversation, "max_take"))
        numbers = _STONES.findall(conversation.final_text)
        move = int(numbers[-1]) if numbers else 0
        is_valid = 1 <= move <= min(pile.max_take, pile.stones)
        mover, num_choices, num_best = pile.mover, [*pile.choices], [*pile.best]
        # A pile that is a multiple of `max_take + 1` is lost, so that the player has no winning move to find.
        if winning := pile.stones % (pile.max_take + 1):
            num_choices[mover] += 1
            num_best[mover] += move == winning
        agent, other = PLAYERS[mover], PLAYERS[1 - mover]
        info: dict[str, Any] = {"valid": float(is_valid)}
        if num_choices[mover]:
            info["accuracy"] = num_best[mover] / num_choices[mover]
        if not is_valid:
            return StepResult(reward=self._config.invalid_reward, agent=agent, info=info)
        left = pile.stones - move
        if not left:
            lost = {other: self._config.lost_reward}
            return StepResult(reward=self._config.won_reward, agent=agent, agent_rewards=lost, info=info)
        explained = "" if state is not None else str(conversation.info.get("instructions", ""))
        choices, best = (num_choices[0], num_choices[1]), (num_best[0], num_best[1])
        after = replace(pile, stones=left, mover=1 - mover, choices=choices, best=best)
        shown = ({"role": "user", "content": f"{explained}{left}"},)
        return StepResult(done=False, observation=shown, state=after, info=info, agent=agent, next_agent=other)


def _positive(turn: Conversation, name: str) -> int:
    try:
        number = int(turn.info[name])
    except (KeyError, TypeError, ValueError):
        number = 0
    if number < 1:
        raise UnusableAnswer(f"the row's `{name}` must be a whole number above 0, got {turn.info.get(name)!r}")
    return number


class ProposedSums(Grader[ProposedSumsConfig]):
    """Takes the turn of a proposer as a sum such as `12+7`, which it poses as `12+7=`, and the last number in the turn
    of a solver as its answer.

    A row has `max_operand`, and the first turn is the proposer's; or it has `problem`, a sum that the solver solves.
    The rollout program gives the proposed sum to the conversations of solvers, as the `problem` of their info.
    """

    def score(self, turn: Conversation) -> StepResult:
        if "problem" in turn.info:
            return _solved(turn)
        found = _SUM.fullmatch(turn.final_text)
        operands = [int(number) for number in found.groups()] if found else []
        try:
            is_valid = bool(operands) and max(operands) <= int(turn.info["max_operand"])
        except (KeyError, TypeError, ValueError):
            fields = sorted(map(str, turn.info))
            raise UnusableAnswer(
                f"the row needs `problem`, a sum, or `max_operand`, a whole number; it has {fields}"
            ) from None
        if not is_valid:
            return StepResult(reward=self._config.invalid_reward, agent=PROPOSER, info={"valid": 0.0})
        asked = ({"role": "user", "content": f"{operands[0]}+{operands[1]}="},)
        info = {"valid": 1.0, "sum": sum(operands)}
        return StepResult(done=False, observation=asked, info=info, agent=PROPOSER, next_agent=SOLVER)


def _solved(turn: Conversation) -> StepResult:
    found = _SUM.fullmatch(str(turn.info["problem"]))
    if found is None:
        raise UnusableAnswer(f"the row's `problem` must be a sum such as 12+7, got {turn.info['problem']!r:.80}")
    numbers = _RESULT.findall(turn.final_text)
    is_right = bool(numbers) and int(numbers[-1]) == sum(map(int, found.groups()))
    return StepResult(reward=float(is_right), agent=SOLVER, info={"accuracy": float(is_right)})
