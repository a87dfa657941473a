"""The services of a rollout worker for one play."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rl_algos.rollouts.worker.chat import Chat
from rl_algos.rollouts.worker.conversations import Conversations, EnvironmentClient
from rl_core.rollouts.environment import Conversation, StepResult, TrainerState
from rl_core.rollouts.generation import GenerationRequest, Generator, SamplingParams
from rl_core.rollouts.pool import RolloutTurns
from rl_core.rollouts.program import Reply
from rl_core.rollouts.rollout import NOT_SAMPLED, Completion, Message, Prompt, Rollout, WeightSpan
from rl_core.rollouts.thinking import generate_turn
from rl_core.tracing import spans


@dataclasses.dataclass
class PlayServices:
    """The parts of a rollout worker that its plays share.

    Args:
        generator: Engine of the policy.
        chat: Renders messages and reads turns.
        environments: Clients by environment name.
        max_steps: Number of training steps of the run, which rewards may ask for; 1 outside training.
        scored_later: Environments with functions that score a rollout's last conversation after it has ended.
        version: Weight version of the policy's engine.
        generating: Span of the timeline for the sampling of completions.
    """

    generator: Generator
    chat: Chat
    environments: Mapping[str, EnvironmentClient]
    max_steps: int
    scored_later: frozenset[str] = frozenset()
    version: int = 0
    generating: spans.Overlapping = dataclasses.field(
        default_factory=lambda: spans.overlapping("generation", "generation")
    )


@runtime_checkable
class ServingProgram(Protocol):
    """A rollout program that also generates outside of rollouts."""

    def serve_with(self, services: PlayServices) -> None:
        """Take the parts of the rollout worker; called once, before `start`."""


class PlayClient:
    """The `rl_core.rollouts.program.GenerationClient` of one play.

    Args:
        services: Parts of the worker that all plays share.
        prompt: Prompt of the play.
        sampling: How its completions are drawn.
        seed: Seed of the play.
        earlier: Turns of an earlier run of the play.
        opponents: Engines of the agents that are opponents in this play.
        demonstration: int32 `[tokens]`, the completion of the play, which nobody samples; None to sample it.
    """

    def __init__(
        self,
        services: PlayServices,
        prompt: Prompt,
        sampling: SamplingParams,
        seed: int,
        earlier: RolloutTurns,
        opponents: Mapping[str, Generator],
        demonstration: np.ndarray | None = None,
    ) -> None:
        self._services = services
        chat = services.chat
        self.continuation, self.encoded, self.shown = chat.continuation, chat.encoded, chat.shown
        self.grammar, self.pieces = chat.grammar, chat.pieces
        environment = services.environments.get(prompt.environment)
        self._conversations = (
            None
            if environment is None
            else Conversations(
                environment,
                prompt.environment,
                seed,
                earlier.conversations,
                keeps_last=prompt.environment in services.scored_later,
            )
        )
        self._prompt = prompt
        self._tools = prompt.tools
        self._sampling = sampling
        self._seed = seed
        self._later_seeds: np.random.SeedSequence | None = None
        self._completions = dict(earlier.completions)
        self._newest: Completion | None = None
        self._version = 0
        self._opponents = opponents
        self._demonstration = demonstration
        self._num_sampled: Counter[str] = Counter()
        self.played: Callable[[], Sequence[Rollout]] = tuple

    def again(self) -> PlayClient:
        """Return the client of the same play from its beginning: its completions are the same, and the environment
        takes its steps again."""
        turns = RolloutTurns(dict(self._completions))
        return PlayClient(
            self._services, self._prompt, self._sampling, self._seed, turns, self._opponents, self._demonstration
        )

    @property
    def sampling(self) -> SamplingParams:
        return self._sampling

    @property
    def characters_per_token(self) -> float:
        return self._services.chat.characters_per_token

    @property
    def turns(self) -> RolloutTurns:
        """Turns so far."""
        return RolloutTurns(dict(self._completions), self._conversations.turns if self._conversations else ())

    async def generate(
        self,
        token_ids: np.ndarray,
        sampling: SamplingParams | None = None,
        *,
        draw: int | None = None,
        agent: str = "",
        images: Sequence[str] = (),
    ) -> Completion:
        if self._demonstration is not None:
            self._version = self._services.version
            self._newest = Completion(
                self._demonstration,
                np.zeros(len(self._demonstration), dtype=np.float32),
                "stop",
                (WeightSpan(NOT_SAMPLED, len(self._demonstration)),),
            )
            return self._newest
        request = GenerationRequest(token_ids, sampling or self._sampling, self._seed, images=tuple(images))
        request = dataclasses.replace(
            request, seed=self._next_seed() if draw is None else _seed([int(request.digest, 16), draw])
        )
        opponent = self._opponents.get(agent)
        if opponent is not None:
            # Otherwise a request of an opponent could equal one of the policy and get its completion.
            name = int.from_bytes(hashlib.blake2b(agent.encode(), digest_size=8).digest(), "big")
            request = dataclasses.replace(request, seed=_seed([request.seed, name]))
        digest = request.digest
        if digest not in self._completions:
            generator = self._services.generator if opponent is None else opponent
            with self._services.generating:
                self._completions[digest] = await generate_turn(generator.generate, request, self._services.chat)
        completion = self._completions[digest]
        if request.sampling.grammar and opponent is None:
            # The sets follow from the grammar and the tokens, so earlier turns of a play need not keep them.
            sets = await asyncio.to_thread(self._services.chat.allowed, request.sampling, completion.token_ids)
            completion = dataclasses.replace(completion, allowed=sets)
        self._newest = completion
        self._services.chat.require_no_image(completion.token_ids)
        if opponent is None:
            self._version = completion.spans[0].version if completion.spans else 0
        else:
            self._version = self._version or self._services.version
            self._num_sampled[agent] += len(completion.token_ids)
        return completion

    async def step(self, conversation: Conversation) -> StepResult:
        assert self._conversations is not None, "the prompt names no environment of this run"
        sampled = None if self._newest is None else self._newest.token_ids
        return await self._conversations.step(
            dataclasses.replace(
                conversation,
                completion_ids=sampled if conversation.completion_ids is None else conversation.completion_ids,
                num_prompt_messages=(
                    len(self._prompt.messages)
                    if conversation.num_prompt_messages is None
                    else conversation.num_prompt_messages
                ),
                is_text=self._prompt.is_text,
                # Every step publishes the next weight version, and the first is published before the first step.
                trainer_state=TrainerState(max(self._version - 1, 0), self._services.max_steps),
            )
        )

    def read(self, token_ids: np.ndarray, tools: Sequence[Mapping[str, Any]] | None = None) -> Reply:
        return self._services.chat.read(token_ids, self._tools if tools is None else tools)

    def rendered(
        self, messages: Sequence[Message], so_far: np.ndarray, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> np.ndarray:
        return self._services.chat.rendered(messages, so_far, self._tools if tools is None else tools)

    async def release(self) -> None:
        """See `Conversations.release`."""
        if self._conversations is not None:
            await self._conversations.release()

    def on_failure(self, played: Callable[[], Sequence[Rollout]]) -> None:
        self.played = played

    def marked(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """Mark the rollouts that opponents sampled, and the rollout that is a demonstration.

        Raises:
            ValueError: If the policy sampled a part of an opponent's rollout.
        """
        if self._demonstration is not None:
            return [dataclasses.replace(rollout, is_demonstration=True) for rollout in rollouts]
        if not self._opponents:
            return rollouts
        for agent in self._opponents:
            own = sum(rollout.num_sampled for rollout in rollouts if rollout.agent == agent)
            if own > self._num_sampled[agent]:
                raise ValueError(
                    f"the agent {agent!r} is an opponent, but the policy sampled a turn of it. If it takes the first "
                    "turn of a play, set first_agent in rollout_program_args to its name; a rollout program of your "
                    "own passes the agent to client.generate"
                )
        return [
            dataclasses.replace(rollout, is_opponent=True) if rollout.agent in self._opponents else rollout
            for rollout in rollouts
        ]

    def _next_seed(self) -> int:
        """Return the seed of the next turn: the rollout's own seed, then seeds that follow from it."""
        if self._later_seeds is None:
            self._later_seeds = np.random.SeedSequence(self._seed)
            return self._seed
        return int(self._later_seeds.spawn(1)[0].generate_state(1)[0])


def _seed(entropy: Sequence[int]) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
