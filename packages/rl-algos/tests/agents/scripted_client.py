"""A policy whose completions a test writes, with a real tokenizer and chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from chat_tokenizers import tokenizer_of

from rl_algos.agents.session import AgentSession
from rl_algos.rollouts.config import StructuredOutput
from rl_algos.rollouts.worker.chat import Chat
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Completion, Message, Prompt, Rollout, WeightSpan

END = "<|im_end|>"
PROMPT = Prompt("p0", ({"role": "user", "content": "?"},), np.array([1, 2, 3], np.int32), "agent", {}, "sums")
ADD = {
    "name": "add",
    "description": "Add numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


def calls_of(*arguments: str) -> str:
    """The text of calls of `add`, as Qwen3 writes them."""
    return "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {each}}}\n</tool_call>' for each in arguments)


@dataclass
class ScriptedClient:
    """The `GenerationClient` of one rollout.

    Args:
        write: Gives the text of a completion from the text before it and the number of the draw; a text that does not
            end with a special token is one that ran into its limit.
        tokenizer: Tokenizer with a chat template.
        gate: Completions wait for it.
    """

    write: Callable[[str, int], str]
    tokenizer: Any = field(default_factory=lambda: tokenizer_of("qwen3"))
    tool_format: str | None = None
    max_new_tokens: int = 400
    gate: asyncio.Event | None = None
    requests: list[tuple[np.ndarray, SamplingParams, int | None]] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    images: list[tuple[str, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chat = chat = Chat(self.tokenizer, self.tool_format)
        self.read, self.encoded, self.shown = chat.read, chat.encoded, chat.shown
        self.grammar, self.pieces = chat.grammar, chat.pieces

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.max_new_tokens)

    @property
    def characters_per_token(self) -> float:
        return self._chat.characters_per_token

    async def generate(
        self,
        token_ids: np.ndarray,
        sampling: SamplingParams | None = None,
        *,
        draw: int | None = None,
        agent: str = "",
        images: Sequence[str] = (),
    ) -> Completion:
        sampling = sampling or self.sampling
        self.requests.append((token_ids, sampling, draw))
        self.images.append(tuple(images))
        if self.gate is not None:
            await self.gate.wait()
        text = self.write(self.shown(token_ids), draw or 0)
        ends = [text.index(stop) + len(stop) for stop in sampling.stop_strings if stop in text]
        ids = self.encoded(text[: min(ends)] if ends else text)
        kept = ids[: sampling.max_new_tokens]
        is_ended = len(kept) == len(ids) and (bool(ends) or int(ids[-1]) in self._chat.ends.sampled)
        logprobs = -np.linspace(0.125, 2, len(kept), dtype=np.float32)
        reason = "stop" if is_ended else "length"
        completion = Completion(kept, logprobs, reason, (WeightSpan(1, len(kept)),))
        self.completions.append(completion)
        return completion

    async def step(self, conversation: Any) -> Any:
        raise AssertionError("an agent has no environment")

    def continuation(self, turn: Message, observation: Sequence[Message], sampled: np.ndarray) -> np.ndarray:
        return self._chat.continuation(turn, observation, sampled)

    def rendered(
        self, messages: Sequence[Message], so_far: np.ndarray, tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray:
        return self._chat.rendered(messages, so_far, tools)


def says(*texts: str) -> Callable[[str, int], str]:
    """Completions in the order in which they are asked for."""
    left = iter(texts)
    return lambda before, draw: next(left) + END


def session_of(
    client: ScriptedClient,
    *,
    max_tokens: int = 4000,
    max_calls: int = 256,
    splits: bool = False,
    structured_output: StructuredOutput = "refuse",
) -> AgentSession:
    """The session of a rollout of the client."""
    return AgentSession(PROMPT, client, max_tokens, max_calls, splits=splits, structured_output=structured_output)


def check_recorded(session: AgentSession, client: ScriptedClient, num_segments: int = 1) -> None:
    """Check that a rollout trains on each sampled token once, as it was sampled, behind what the policy saw."""
    asked = [(seen, completion) for (seen, _, _), completion in zip(client.requests, client.completions, strict=True)]
    check_trained(session.rollout(), asked, num_segments)


def check_trained(rollout: Rollout, asked: Sequence[tuple[np.ndarray, Completion]], num_segments: int = 1) -> None:
    """Check that a rollout trains on each sampled token once, as it was sampled, behind what the policy saw.

    Args:
        rollout: The rollout.
        asked: What the policy saw at each call, int32 `[tokens]`, and what it sampled.
        num_segments: Number of rows that the rollout is to have.
    """
    segments = rollout.segments or (len(rollout.tokens),)
    assert len(segments) == num_segments
    ends = np.cumsum(segments)
    found: list[tuple[int, ...]] = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        tokens, mask = rollout.tokens[begin:end], rollout.loss_mask[begin:end]
        for seen, completion in asked:
            till = len(seen) + len(completion.token_ids)
            whole = np.concatenate([seen, completion.token_ids])
            if np.array_equal(tokens[:till], whole) and mask[len(seen) : till].all():
                logprobs = rollout.generation_logprobs[begin + len(seen) : begin + till]
                assert np.array_equal(logprobs, completion.logprobs)
                found.append((len(seen), *whole.tolist()))
    assert set(found) == {(len(seen), *seen.tolist(), *drawn.token_ids.tolist()) for seen, drawn in asked}
    assert int(rollout.loss_mask.sum()) == sum(len(drawn.token_ids) for _, drawn in asked)
