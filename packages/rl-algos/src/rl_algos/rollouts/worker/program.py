"""Rollout programs: turns with an environment, also with a history that is summarised, problems that the policy poses
and solves, and single replies."""

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

from rl_algos.rollouts.config import StructuredOutput
from rl_algos.rollouts.worker.compaction import REQUEST, Compaction
from rl_algos.rollouts.worker.programs import POLICY
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
            earlier turns; otherwise continue from the tokens as they are.
        first_agent: Name of the agent that takes the first turn, if that agent is an opponent: the environment gives
            it only in its answer.
        structured_output: Treatment of rows that ask for a form of the turns, by its field `response_format`.
    """

    def __init__(
        self,
        *,
        max_turns: int,
        max_tokens: int,
        split: bool = False,
        first_agent: str = "",
        structured_output: StructuredOutput = "refuse",
    ) -> None:
        self._limits = SeatLimits(max_turns, max_tokens, split, structured_output=structured_output)
        self._first_agent = first_agent

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout | Sequence[Rollout]:
        """Play once, and return a rollout for each agent, in the order of their first turns.

        Raises:
            ValueError: If the agents of the environment contradict who took a turn.
        """
        return await _play(prompt, client, self._limits, self._first_agent)


class CompactionProgram:
    """Play as `MultiTurnProgram` does, with a history that is summarised when it becomes long.

    When the tokens of a conversation reach `compact_at`, the policy is asked for a summary in the place of the
    environment's answer. Then a segment begins with the first request, the summary as the policy's turn, and that
    answer. The tokens of the summary are sampled tokens of the rollout, which share its advantage. The environment sees
    the conversation as if it had not been compacted. `max_tokens` limits each segment.

    The baselines train nothing on summaries, and their requests are in no segment: with `recent` the newest turns of at
    most `summary_tokens` take the place of all turns, and an opponent writes summaries with other weights.

    Args:
        max_turns: Maximum number of completions of an agent, in addition to summaries.
        max_tokens: Maximum number of tokens of each segment.
        compact_at: Number of tokens from which a conversation is compacted before a turn; None for as many as leave
            room for a turn and its summary.
        summary_tokens: Maximum number of tokens of a summary; None for as many as a turn may have.
        summariser: `policy`, `recent`, or the name of an agent that is an opponent (`grpo.agents.NAME.opponent`).
        request: Text that asks for a summary.
        split: Render the whole conversation for every turn.
        first_agent: See `MultiTurnProgram`.
        structured_output: Treatment of rows that ask for a form of the turns; summaries are free.

    Raises:
        ValueError: If a number of tokens is not above 0, or the request is empty.
    """

    def __init__(
        self,
        *,
        max_turns: int,
        max_tokens: int,
        compact_at: int | None = None,
        summary_tokens: int | None = None,
        summariser: str = POLICY,
        request: str = REQUEST,
        split: bool = False,
        first_agent: str = "",
        structured_output: StructuredOutput = "refuse",
    ) -> None:
        # They come from YAML, with any type.
        counts: dict[str, object] = {"compact_at": compact_at, "summary_tokens": summary_tokens}
        for name, value in counts.items():
            if value is not None and not (isinstance(value, int) and value > 0):
                raise ValueError(f"{name} must be an int above 0, got {value!r}")
        texts: dict[str, object] = {"summariser": summariser, "request": request}
        for name, value in texts.items():
            if not (isinstance(value, str) and value.strip()):
                raise ValueError(f"{name} must be a string that is not empty, got {value!r}")
        compaction = Compaction(compact_at, summary_tokens, summariser, request)
        self._limits = SeatLimits(max_turns, max_tokens, split, compaction, structured_output)
        self._first_agent = first_agent

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout | Sequence[Rollout]:
        """Play once; see `MultiTurnProgram.run`."""
        return await _play(prompt, client, self._limits, self._first_agent)


async def _play(
    prompt: Prompt, client: GenerationClient, limits: SeatLimits, first_agent: str
) -> Rollout | Sequence[Rollout]:
    """Play once; see `MultiTurnProgram` for the arguments."""
    # Each play has a new id, because an environment may still know plays of a rollout worker that died.
    identity = f"{prompt.id}/{uuid.uuid4().hex}"
    seat = Seat.first(prompt, client, limits, agent=first_agent)
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
            seats[agent] = Seat.joining(prompt, client, limits, result.observation, agent=agent)
        elif not await seats[agent].hear(result.observation):
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
            if result.done or solver.is_cut or not await solver.hear(result.observation):
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
