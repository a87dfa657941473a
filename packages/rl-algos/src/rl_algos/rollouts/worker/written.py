"""A generator whose completions a person or a file writes, and a tokenizer that encodes every string."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_core.errors import RequestRefused
from rl_core.rollouts.generation import GenerationRequest
from rl_core.rollouts.rollout import Completion, WeightSpan

END = "<|end|>"
ROLES = ("system", "user", "assistant", "tool")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' ~ message.role ~ '|>' ~ (message.content or '') -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '<tool_call>' ~ (call.function | tojson) ~ '</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '" + END + "' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""Writes tool calls as Hermes does, so that a person writes them so as well: `<tool_call>{"name": "search",
"arguments": {"query": "tea"}}</tool_call>`."""


class WrittenGenerator:
    """The part of `rl_core.rollouts.generation.Generator` that a rollout calls, without an engine.

    Completions end and are cut as an engine's are: at their token limit (a token is a byte of UTF-8), and after the
    first of the stop strings. Their logprobs are 0.

    Args:
        write: Gives the next completion; None if there are no more.
        tokenizer: Tokenizer of the rollout, with `CHAT_TEMPLATE` or another.
    """

    def __init__(self, write: Callable[[], Awaitable[str | None]], tokenizer: Any) -> None:
        self._write = write
        self._tokenizer = tokenizer
        self._num_sampled = 0

    @property
    def num_ranks(self) -> int:
        """1, the writer."""
        return 1

    async def start(self) -> None:
        """Do nothing, because nothing is loaded."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return the next completion that is written; raise `RequestRefused` if there are no more."""
        text = await self._write()
        if text is None:
            raise RequestRefused("no completion is left: the input ended before the conversation did")
        sampling = request.sampling
        ends = [text.index(stop) + len(stop) for stop in sampling.stop_strings if stop in text]
        written = self._tokenizer.encode(text[: min(ends)] if ends else text, add_special_tokens=False)
        ids = written if ends else [*written, self._tokenizer.eos_token_id]
        kept = np.asarray(ids[: sampling.max_new_tokens], dtype=np.int32)
        self._num_sampled += len(kept)
        return Completion(
            kept,
            np.zeros(len(kept), dtype=np.float32),
            "stop" if len(kept) == len(ids) else "length",
            (WeightSpan(0, len(kept)),),
        )

    async def health(self) -> Mapping[str, Any]:
        """Return the number of tokens so far."""
        return {"num_requests": 0, "num_sampled": self._num_sampled}

    async def close(self) -> None:
        """Do nothing, because nothing is held."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of bytes with `CHAT_TEMPLATE`, which decodes every string to itself."""
    special = [END, *(f"<|{role}|>" for role in ROLES)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        additional_special_tokens=special[1:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
