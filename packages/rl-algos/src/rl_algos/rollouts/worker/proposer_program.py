"""A rollout program in which the policy poses problems and solves them."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rl_algos.rollouts.worker.seat import Seat, SeatLimits
from rl_core.rollouts.program import GenerationClient
from rl_core.rollouts.rollout import Message, Prompt, Rollout

PROBLEM = "problem"
"""Field of the info of solvers' conversations: the text of the proposer's turn after its thoughts."""


class ProposerSolverProgram:
    """The proposer writes a problem, and several solvers solve it at once; all are the policy.

    The environment answers the proposer's turn with what solvers see, and names both agents (`StepResult.agent`,
    `next_agent`); or it ends the play, if that is not a problem. It scores each solver by itself, in a conversation
    whose info has the problem. The reward of the proposer is that of its turn, and `4 s (1 - s)`, s the mean reward of
    the solvers within 0 and 1: the variance of their success, 1 for a problem that half of them solve and 0 for one
    that teaches nothing, as all of them or none solve it.

    The rollouts of solvers are compared with others that saw the same problem, the proposer's with those of the same
    prompt.

    Args:
        max_turns: Maximum number of completions of a solver.
        max_tokens: Maximum number of tokens of each rollout, or of each segment of one that is split.
        num_solvers: Number of solvers of a problem.
        split: Render the whole conversation for every turn.
        first_agent: Name of the proposer, if it is an opponent: the environment names it only in its answer.

    Raises:
        ValueError: If there are fewer than two solvers, whose rewards then have no mean to be compared with.
    """

    def __init__(
        self, *, max_turns: int, max_tokens: int, num_solvers: int = 4, split: bool = False, first_agent: str = ""
    ) -> None:
        if num_solvers < 2:
            raise ValueError(f"num_solvers must be at least 2, got {num_solvers}")
        self._limits = SeatLimits(max_turns, max_tokens, split)
        self._num_solvers = num_solvers
        self._first_agent = first_agent

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout | Sequence[Rollout]:
        """Play once; returns the proposer's rollout and those of the solvers."""
        identity = f"{prompt.id}/{uuid.uuid4().hex}"
        proposer = Seat.first(prompt, client, self._limits, agent=self._first_agent)
        await proposer.take_turn()
        proposal = proposer.conversation(identity, prompt.info, turn=0)
        result = await client.step(proposal)
        proposer.agent = result.agent
        proposer.earn(result)
        if result.done or proposer.is_cut:
            return proposer.rollout()
        if result.next_agent in ("", result.agent):
            raise ValueError("the environment named no solver: `next_agent` must be another agent than `agent`")
        info = {**prompt.info, PROBLEM: proposal.final_text}
        solving = [
            asyncio.create_task(
                self._solved(
                    Seat.joining(prompt, client, self._limits, result.observation, agent=result.next_agent),
                    client,
                    f"{identity}/{number}",
                    info,
                    draw=number,
                )
            )
            for number in range(self._num_solvers)
        ]
        try:
            solved = await asyncio.gather(*solving)
        finally:
            for task in solving:
                task.cancel()
        share = float(np.mean([min(max(rollout.reward, 0.0), 1.0) for rollout in solved]))
        proposer.add_rewards({"reward": 4 * share * (1 - share), "solved": share})
        peers = _digest(result.observation)
        return [proposer.rollout(), *(replace(rollout, peers=peers) for rollout in solved)]

    async def _solved(
        self, solver: Seat, client: GenerationClient, identity: str, info: Mapping[str, Any], *, draw: int
    ) -> Rollout:
        """The rollout of one solver; `draw` tells its requests from equal ones of other solvers."""
        for turn in range(self._limits.max_turns):
            await solver.take_turn(draw=draw)
            result = await client.step(solver.conversation(identity, info, turn=turn))
            solver.earn(result)
            if result.done or solver.is_cut or not solver.hear(result.observation):
                break
        return solver.rollout()


def _digest(observation: Sequence[Message]) -> str:
    """The same for equal problems."""
    return hashlib.blake2b(
        repr([sorted(message.items()) for message in observation]).encode(), digest_size=8
    ).hexdigest()
