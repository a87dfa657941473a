"""An agent's side of a play: its conversation as messages and as tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rl_algos.rollouts.config import StructuredOutput
from rl_algos.rollouts.training.metrics import ignored_info
from rl_algos.rollouts.worker.compaction import Compaction, compaction_info, recent_turns
from rl_algos.rollouts.worker.programs import POLICY, RECENT
from rl_algos.rollouts.worker.transcript import Transcript
from rl_core.images import image_digests
from rl_core.rollouts.environment import Conversation, StepResult
from rl_core.rollouts.program import AnswerForm, GenerationClient, Reply, requested_schema
from rl_core.rollouts.rollout import Completion, Message, Prompt, Rollout
from rl_core.rollouts.thoughts import PROMPT_END, final_text, opened_by


class SeatLimits(NamedTuple):
    """Limits of an agent's rollout.

    Args:
        max_turns: Maximum number of completions.
        max_tokens: Maximum number of tokens of the rollout, or of each segment of one that is split.
        split: Render the whole conversation for every turn, and begin a segment where the chat template rewrites
            earlier turns; otherwise continue from the tokens as they are.
        compaction: Summaries in the place of the history; None to keep it. They begin segments, to each of which
            `max_tokens` then applies.
        structured_output: Treatment of a prompt that asks for a form of the turns (`RESPONSE_FORMAT`).
    """

    max_turns: int
    max_tokens: int
    split: bool = False
    compaction: Compaction | None = None
    structured_output: StructuredOutput = "refuse"


class Seat:
    """One agent of a play.

    The usage loop::

        seat = Seat.first(prompt, client, limits)
        await seat.take_turn()
        result = await client.step(seat.conversation(identity, prompt.info, turn=0))
        seat.earn(result)
        if await seat.hear(result.observation):
            await seat.take_turn()

    Args:
        prompt: Prompt of the play.
        client: Client of the play.
        limits: Limits of the rollout.
        messages: Messages that the agent has seen before its first turn.
        tokens: int32 `[tokens]`, these messages as the engine consumes them, with all tokens of their images.
        agent: Name of the agent; empty for the only one.
    """

    def __init__(
        self,
        prompt: Prompt,
        client: GenerationClient,
        limits: SeatLimits,
        messages: Sequence[Message],
        tokens: np.ndarray,
        *,
        agent: str = "",
    ) -> None:
        self.agent = agent
        self._client = client
        self._limits = limits
        self._messages: list[Message] = list(messages)
        self._num_prompt_messages = len(messages)
        self._num_prompt_tokens = len(tokens)
        # After a compaction, the policy sees these messages in the place of as many as `_num_replaced`.
        self._replacing: list[Message] = []
        self._num_replaced = 0
        self._compactions: list[tuple[int, int]] = []
        self._transcript = Transcript(prompt, tokens, images=image_digests(messages))
        self._sampling = client.sampling
        self._form, self._ignores_form = _form_of(prompt, limits.structured_output)
        self._draw: int | None = None
        self._num_turns = 0
        self._completion: Completion | None = None
        self._reply: Reply | None = None
        self._opened_thoughts = ""
        self._earned: StepResult | None = None
        self._is_truncated = False

    @classmethod
    def first(cls, prompt: Prompt, client: GenerationClient, limits: SeatLimits, *, agent: str = "") -> Seat:
        """Return the agent that the prompt of the play addresses."""
        return cls(prompt, client, limits, prompt.messages, prompt.token_ids, agent=agent)

    @classmethod
    def joining(
        cls, prompt: Prompt, client: GenerationClient, limits: SeatLimits, observation: Sequence[Message], *, agent: str
    ) -> Seat:
        """Return an agent that sees only an observation.

        Raises:
            ValueError: If there is no observation.
        """
        _require(observation)
        return cls(prompt, client, limits, observation, client.rendered(observation, _NO_TOKENS), agent=agent)

    @property
    def is_cut(self) -> bool:
        """True if the newest turn ran into a token limit."""
        return self._newest.stop_reason != "stop"

    async def take_turn(self, *, draw: int | None = None) -> None:
        """Sample a turn.

        Args:
            draw: See `rl_core.rollouts.program.GenerationClient.generate`.

        Raises:
            ValueError: If the messages leave no room for a turn.
        """
        self._draw = draw
        asked, sampling = self._transcript.tokens, self._sampling
        room = self._limits.max_tokens - len(asked)
        if room < 1:
            raise ValueError(f"the prompt has {len(asked)} tokens; a rollout may have {self._limits.max_tokens}")
        # A turn leaves room for the summary after it, unless there is none.
        room = room - self._reserved if room > self._reserved else room
        if sampling.max_new_tokens > room:
            sampling = dataclasses.replace(sampling, max_new_tokens=room)
        if self._form is not None:
            sampling = dataclasses.replace(sampling, grammar=self._client.grammar(self._form, asked))
        self._opened_thoughts = opened_by(self._client.shown(asked[-PROMPT_END:]))
        self._completion = await self._client.generate(asked, sampling, **self._told(self.agent))
        self._transcript.add_completion(self._completion)
        self._reply = self._client.read(self._completion.token_ids)
        self._messages.append(self._reply.message)
        self._num_turns += 1

    def conversation(self, identity: str, info: Mapping[str, object], *, turn: int) -> Conversation:
        """Return the newest turn as an environment sees it.

        Args:
            identity: Id of the conversation.
            info: Info of the prompt.
            turn: Number of turns of the play before the newest.
        """
        assert self._reply is not None, "a turn has been taken"
        return Conversation(
            id=identity,
            messages=tuple(self._messages),
            info=info,
            completion=self._reply.text,
            truncated=self.is_cut,
            turn=turn,
            tool_calls=self._reply.tool_calls,
            completion_ids=self._newest.token_ids,
            num_prompt_messages=self._num_prompt_messages,
            opened_thoughts=self._opened_thoughts,
            agent=self.agent,
        )

    def earn(self, result: StepResult) -> None:
        """Take the environment's answer to the newest turn."""
        self._earned = result
        self._is_truncated |= self.is_cut

    def add_rewards(self, rewards: float | Mapping[str, float]) -> None:
        """Add rewards for another agent's turn."""
        self._transcript.add_rewards(StepResult(reward=rewards).rewards())

    async def hear(self, observation: Sequence[Message]) -> bool:
        """Take the messages that the agent sees before its next turn, after a compaction if the conversation is long.

        Returns:
            False if it may not take another turn: it has taken all its turns, or the observation does not fit.

        Raises:
            ValueError: If there is no observation, the chat template cannot render it, or a prompt is too long for
                compactions.
        """
        assert self._earned is not None, "the newest turn has been answered"
        if self._num_turns < self._limits.max_turns:
            following, compaction = self._following(observation), self._limits.compaction
            if compaction is not None and len(following) > self._compact_at(compaction):
                return await self._compact(compaction, observation, len(following))
            if len(following) < self._limits.max_tokens:
                self._end_turn(observation)
                self._messages.extend(observation)
                self._transcript.go_on(following, image_digests(self._context))
                return True
        self._is_truncated = True
        return False

    def rollout(self) -> Rollout:
        """Return the rollout of the agent, after its last turn."""
        if self._earned is not None:
            self._end_turn(None)
        rollout = self._transcript.rollout(truncated=self._is_truncated)
        if self._limits.compaction is not None:
            rollout = dataclasses.replace(rollout, info={**rollout.info, **compaction_info(self._compactions)})
        if self._ignores_form:
            rollout = dataclasses.replace(rollout, info={**rollout.info, **ignored_info([RESPONSE_FORMAT])})
        return dataclasses.replace(rollout, agent=self.agent) if self.agent else rollout

    @property
    def _newest(self) -> Completion:
        assert self._completion is not None, "a turn has been taken"
        return self._completion

    def _end_turn(self, observation: Sequence[Message] | None) -> None:
        """Record the newest turn, with the observation that follows it; None at the end."""
        assert self._earned is not None
        assert self._reply is not None
        result = dataclasses.replace(self._earned, observation=tuple(observation or ()))
        is_invalid = self._reply.has_invalid_call
        self._transcript.add_result(self._reply.text, result, ends=observation is None, has_invalid_call=is_invalid)
        # Stop strings stay until others come, whereas a limit is for one turn.
        most, limit, stops = (
            self._client.sampling.max_new_tokens,
            self._earned.max_new_tokens,
            self._earned.stop_strings,
        )
        self._sampling = dataclasses.replace(
            self._sampling,
            stop_strings=self._sampling.stop_strings if stops is None else stops,
            max_new_tokens=most if limit is None else min(limit, most),
        )
        self._earned = None

    @property
    def _context(self) -> list[Message]:
        """The messages as the policy sees them."""
        return [*self._replacing, *self._messages[self._num_replaced :]]

    def _told(self, agent: str) -> dict[str, Any]:
        """Return the arguments of a request in addition to tokens and sampling."""
        told: dict[str, Any] = {"agent": agent} if agent else {}
        if self._draw is not None:
            told["draw"] = self._draw
        return told | ({"images": self._transcript.images} if self._transcript.images else {})

    def _following(self, observation: Sequence[Message]) -> np.ndarray:
        """Return int32 `[tokens]` that the engine consumes for the next turn.

        Args:
            observation: Messages that follow the newest turn.
        """
        _require(observation)
        so_far = self._transcript.tokens
        if self._limits.split:
            return self._client.rendered([*self._context, *observation], so_far)
        continuation = self._client.continuation(self._messages[-1], observation, self._newest.token_ids)
        return np.concatenate([so_far, continuation])

    async def _compact(self, compaction: Compaction, observation: Sequence[Message], num_tokens: int) -> bool:
        """Begin a segment with a summary in the place of all turns, and the observation after it.

        Returns:
            False if these do not fit.

        Raises:
            ValueError: If the prompt is so long that every turn would be summarised.
        """
        prompt, turn, limit = (
            self._messages[: self._num_prompt_messages],
            self._messages[-1],
            self._compact_at(compaction),
        )
        if self._num_prompt_tokens >= limit:
            raise ValueError(
                f"the prompt has {self._num_prompt_tokens} tokens, but conversations are compacted from {limit} tokens "
                "on. Raise compact_at in rollout_program_args or policy.max_total_sequence_length, or lower "
                "summary_tokens or policy.generation.max_new_tokens"
            )
        if compaction.summariser == RECENT:
            self._end_turn(observation)
            kept = self._recent(compaction, observation)
        else:
            summary = await self._summary(compaction, observation)
            if summary is None:
                self._is_truncated = True
                return False
            # A tool's result needs its call before it, so the calls of the newest turn stay.
            kept = [{**turn, "content": summary}]
        self._messages.extend(observation)
        self._replacing, self._num_replaced = [*prompt, *kept], len(self._messages) - len(observation)
        tokens = self._client.rendered(self._context, _NO_TOKENS)
        if len(tokens) >= self._limits.max_tokens:
            self._is_truncated = True
            return False
        self._compactions.append((num_tokens, len(tokens)))
        self._transcript.begin(tokens, image_digests(self._context))
        return True

    async def _summary(self, compaction: Compaction, observation: Sequence[Message]) -> str | None:
        """Return a summary of the conversation up to the newest turn; None if there is no room for one. The summary of
        the policy becomes a turn of its rollout.
        """
        request = compaction.asked_after(observation)
        asked, is_policy = self._following(request), compaction.summariser == POLICY
        room = self._limits.max_tokens - len(asked)
        if room < 1:
            return None
        sampling = self._client.sampling
        most = min(room, compaction.summary_tokens or sampling.max_new_tokens)
        self._end_turn(request if is_policy else observation)
        if is_policy:
            self._transcript.go_on(asked, self._transcript.images)
        completion = await self._client.generate(
            asked,
            dataclasses.replace(sampling, max_new_tokens=most),
            **self._told(self.agent if is_policy else compaction.summariser),
        )
        reply = self._client.read(completion.token_ids)
        if is_policy:
            self._transcript.add_completion(completion)
            self._transcript.add_result(reply.text, StepResult(observation=tuple(observation)), ends=False)
        return final_text(reply.text, opened_by(self._client.shown(asked[-PROMPT_END:])))

    def _recent(self, compaction: Compaction, observation: Sequence[Message]) -> Sequence[Message]:
        """Return the newest turns, without a summary."""
        context, first = self._context, self._num_prompt_messages

        def num_tokens(turns: Sequence[Message]) -> int:
            return len(self._client.rendered([*context[:first], *turns, *observation], _NO_TOKENS))

        most = compaction.summary_tokens or self._client.sampling.max_new_tokens
        newest = num_tokens(context[-1:])
        return recent_turns(context[first:], most, lambda turns: num_tokens(turns) - newest)

    @cached_property
    def _reserved(self) -> int:
        """Number of tokens of a request for a summary and of the summary, if the chat template wraps the request as it
        wraps a user's message; 0 without summaries."""
        compaction = self._limits.compaction
        if compaction is None or compaction.summariser == RECENT:
            return 0
        answered: Message = {"role": "assistant", "content": ""}
        asked = self._client.continuation(answered, [{"role": "user", "content": compaction.request}], _NO_TOKENS)
        return len(asked) + (compaction.summary_tokens or self._client.sampling.max_new_tokens)

    def _compact_at(self, compaction: Compaction) -> int:
        """Return the number of tokens of a conversation from which it is compacted."""
        return compaction.at or self._limits.max_tokens - self._reserved - self._client.sampling.max_new_tokens


_NO_TOKENS = np.zeros(0, np.int32)

RESPONSE_FORMAT = "response_format"
"""Field of a prompt's info that asks for a form of all turns, as the same field of OpenAI's chat completions."""


def _form_of(prompt: Prompt, structured_output: StructuredOutput) -> tuple[AnswerForm | None, bool]:
    """Return the form that turns must have, and whether a form is ignored.

    Raises:
        ValueError: If the prompt asks for a form that is not offered.
    """
    schema = requested_schema(prompt.info.get(RESPONSE_FORMAT))
    if not schema or structured_output == "ignore":
        return None, bool(schema)
    if structured_output == "refuse":
        remedy = "set structured_output of the algorithm to constrain or ignore, or remove the field"
        raise ValueError(f"the row has the field {RESPONSE_FORMAT}, but turns are sampled freely; {remedy}")
    return AnswerForm(schema, json.dumps(list(prompt.tools))), False


def _require(observation: Sequence[Message]) -> None:
    if not observation:
        raise ValueError("the environment returned no observation, so there is nothing for the policy to answer")
