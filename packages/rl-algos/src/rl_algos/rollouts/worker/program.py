"""Rollout programs: turns with an environment, problems that the policy poses and solves, and single replies."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rl_algos.rollouts.worker.seat import Seat, SeatLimits
from rl_algos.rollouts.worker.transcript import Transcript
from rl_core.images import image_digests
from rl_core.rollouts.environment import StepResult
from rl_core.rollouts.program import GenerationClient
from rl_core.rollouts.rollout import Prompt, Rollout


class MultiTurnProgram:
    """Generate, step the environment, append its observation; until it is done or a limit is reached.

    The environment may name agents that take turns, such as the players of a game. Each has its own conversation, in
    which it sees its own turns and the observations for it, and its own rollout.

    Args:
        max_turns: Maximum number of completions of an agent.
        max_tokens: Maximum number of tokens of the whole rollout, or of each segment of one that is split.
        split: Render the whole conversation for every turn, and begin a segment where the chat template rewrites
            earlier turns; otherwise go on from the tokens as they are.
        first_agent: Name of the agent that takes the first turn, if that agent is an opponent: the environment gives
            it only in its answer.
    """

    def __init__(self, *, max_turns: int, max_tokens: int, split: bool = False, first_agent: str = "") -> None:
        self._limits = SeatLimits(max_turns, max_tokens, split)
        self._first_agent = first_agent

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout | Sequence[Rollout]:
        """Play once, and return a rollout for each agent, in the order of their first turns.

        Raises:
            ValueError: If the agents of the environment contradict who took a turn.
        """
        # Each play has a new id, because an environment may still know plays of a rollout worker that died.
        identity = f"{prompt.id}/{uuid.uuid4().hex}"
        seat = Seat.first(prompt, client, self._limits, agent=self._first_agent)
        seats: dict[str, Seat] = {}
        for turn in itertools.count():
            await seat.take_turn()
            result = await client.step(seat.conversation(identity, prompt.info, turn=turn))
            if result.agent not in ("", seat.agent) and (turn or seat.agent):
                raise ValueError(
                    f"the environment answered a turn of the agent {result.agent!r}, but {seat.agent!r} took it"
                )
            if turn == 0:
                seat.agent = result.agent or seat.agent
                seats[seat.agent] = seat
            seat.earn(result)
            for agent, rewards in result.agent_rewards.items():
                if agent in seats:
                    seats[agent].add_rewards(rewards)
            if result.done or seat.is_cut:
                break
            agent = result.next_agent or seat.agent
            if agent not in seats:
                seats[agent] = Seat.joining(prompt, client, self._limits, result.observation, agent=agent)
            elif not seats[agent].hear(result.observation):
                break
            seat = seats[agent]
        rollouts = [each.rollout() for each in seats.values()]
        return rollouts[0] if len(rollouts) == 1 else rollouts


PROBLEM = "problem"
"""Field of the info of solvers' conversations: the text of the proposer's turn after its thoughts."""


class ProposerSolverProgram:
    """The proposer writes a problem, and several solvers solve it at once; all are the policy.

    The environment answers the proposer's turn with the observation of the solvers, and gives both agents their names
    (`StepResult.agent`, `next_agent`); or it ends the play, if that is not a problem. It scores each solver separately,
    in a conversation whose info has the problem. The proposer gets the reward of its turn and `4 s (1 - s)`, s the mean
    reward of the solvers within 0 and 1: the variance of their success, 1 for a problem that half of them solve and 0
    for one that teaches nothing, because all of them or none solve it.

    The rollouts of solvers are compared with others that saw the same problem, the proposer's with other proposers' of
    the same prompt.

    Args:
        max_turns: Maximum number of completions of a solver.
        max_tokens: Maximum number of tokens of each rollout, or of each segment of one that is split.
        num_solvers: Number of solvers of a problem.
        split: Render the whole conversation for every turn.
        first_agent: Name of the proposer, if it is an opponent: the environment gives it only in its answer.

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
        """Play once, and return the rollouts of the proposer and of the solvers."""
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
        problem = repr([sorted(message.items()) for message in result.observation])
        peers = hashlib.blake2b(problem.encode(), digest_size=8).hexdigest()
        return [proposer.rollout(), *(replace(rollout, peers=peers) for rollout in solved)]

    async def _solved(
        self, solver: Seat, client: GenerationClient, identity: str, info: Mapping[str, Any], *, draw: int
    ) -> Rollout:
        """Return the rollout of one solver; `draw` distinguishes its requests from equal ones of other solvers."""
        for turn in range(self._limits.max_turns):
            await solver.take_turn(draw=draw)
            result = await client.step(solver.conversation(identity, info, turn=turn))
            solver.earn(result)
            if result.done or solver.is_cut or not solver.hear(result.observation):
                break
        return solver.rollout()


REPLY_PROGRAM = f"{__name__}:ReplyProgram"
"""The path of the program for `rl_core.plugins.RolloutNeeds`."""


class ReplyProgram:
    """Generate one completion and end, without an environment.

    Args:
        max_tokens: Maximum number of tokens of prompt and completion.
    """

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout:
        """Generate the completion of a prompt.

        Raises:
            ValueError: If the prompt leaves no room for a completion.
        """
        room = self._max_tokens - len(prompt.token_ids)
        if room < 1:
            raise ValueError(f"the prompt has {len(prompt.token_ids)} tokens; a rollout may have {self._max_tokens}")
        sampling = dataclasses.replace(client.sampling, max_new_tokens=min(room, client.sampling.max_new_tokens))
        images = image_digests(prompt.messages)
        told: dict[str, Any] = {"images": images} if images else {}
        transcript = Transcript(prompt, images=images)
        completion = await client.generate(prompt.token_ids, sampling, **told)
        transcript.add_completion(completion)
        reply = client.read(completion.token_ids)
        transcript.add_result(reply.text, StepResult(done=True), ends=True)
        return transcript.rollout(truncated=completion.stop_reason != "stop")
