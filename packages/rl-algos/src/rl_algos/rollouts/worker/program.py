"""The default rollout: the policy and an environment take turns, the policy as one agent or as several."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence

from rl_algos.rollouts.worker.seat import Seat, SeatLimits
from rl_core.rollouts.program import GenerationClient
from rl_core.rollouts.rollout import Prompt, Rollout


class MultiTurnProgram:
    """Generate, step the environment, append its observation; until it is done or a limit is reached.

    The environment may name agents that take turns, such as the players of a game. Each has its own conversation, in
    which it sees its own turns and what the environment shows to it, and its own rollout.

    Args:
        max_turns: Maximum number of completions of an agent.
        max_tokens: Maximum number of tokens of the whole rollout, or of each segment of one that is split.
        split: Render the whole conversation for every turn, and begin a segment where the chat template rewrites
            earlier turns; otherwise go on from the tokens as they are.
        first_agent: Name of the agent that takes the first turn, if that agent is an opponent: the environment names it
            only in its answer.
    """

    def __init__(self, *, max_turns: int, max_tokens: int, split: bool = False, first_agent: str = "") -> None:
        self._limits = SeatLimits(max_turns, max_tokens, split)
        self._first_agent = first_agent

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout | Sequence[Rollout]:
        """Play once; returns a rollout for each agent, in the order of their first turns.

        Raises:
            ValueError: If the environment names agents in a way that contradicts who took a turn.
        """
        # unlike any before it, for an environment may still know those of a rollout worker that died
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
