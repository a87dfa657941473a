"""Between the tokens of a policy and the messages of a conversation."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateError

from rl_algos.images.image_tokens import check_images, image_tokens, with_images
from rl_algos.rollouts.worker.continuation import Continuation
from rl_algos.special_tokens import special_tokens, splits_observations, splits_prompts
from rl_algos.token_bytes import characters_per_token
from rl_algos.tokenizer import render
from rl_algos.tool_calls.formats import ToolFormat, format_of, json_format
from rl_algos.tool_calls.parsed import schemas_of
from rl_algos.turn_ends import TurnEnds, find_turn_ends
from rl_core.errors import ConfigError
from rl_core.rollouts.environment import ToolCall
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.grammar import TokenGrammars
from rl_core.rollouts.program import AnswerForm, Reply
from rl_core.rollouts.rollout import Message
from rl_core.rollouts.thoughts import MARKS, PROMPT_END, THOUGHTS, last_thoughts, opened_by
from rl_core.tokenizer import Tokenizer


class Chat:
    """Reads the turns of a policy, and renders the answers to them.

    Args:
        tokenizer: Tokenizer with a chat template.
        tool_format: Name of the format of tool calls; None to read it from the template.
    """

    def __init__(self, tokenizer: Tokenizer, tool_format: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._format_name = tool_format

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format of tool calls."""
        return format_of(self._tokenizer.chat_template, self._format_name)

    @cached_property
    def ends(self) -> TurnEnds:
        """Tokens that end a turn."""
        return find_turn_ends(self._tokenizer, self.tool_format.ends)

    @cached_property
    def characters_per_token(self) -> float:
        """See `rl_algos.token_bytes.characters_per_token`."""
        return characters_per_token(self._tokenizer)

    def prepare(self) -> None:
        """Compute the values that depend only on the tokenizer: their first use would halt other rollouts."""
        _ = self.characters_per_token, special_tokens(self._tokenizer).renamed

    def read(self, token_ids: np.ndarray, tools: Sequence[Mapping[str, Any]] = ()) -> Reply:
        """Return the turn of these tokens.

        Args:
            token_ids: int32 `[tokens]`, sampled.
            tools: Tools that the policy may call.
        """
        ids: list[int] = token_ids.tolist()
        if ids and ids[-1] in self.ends.sampled:
            ids = ids[:-1]  # the token that ended the turn, which need not be a special one
        text = self._without_special_tokens(ids)
        if not tools and not self.tool_format.reads_all:
            return Reply(text, {"role": "assistant", "content": text})
        marked = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        parsed = self.tool_format.parse(marked, schemas_of(tools), self._opened)
        if self.tool_format.reads_all:
            text = parsed.content
        if not tools or not parsed.calls:
            return Reply(text, {"role": "assistant", "content": text})
        # Templates of Mistral require ids of nine letters and digits.
        calls = tuple(replace(call, id=f"call{index:05d}") for index, call in enumerate(parsed.calls))
        written = [self._as_written(call) for call in calls]
        return Reply(text, {"role": "assistant", "content": parsed.content, "tool_calls": written}, calls)

    def require_no_image(self, sampled: np.ndarray) -> None:
        """Raise a `ValueError` if the policy sampled an image token.

        Args:
            sampled: int32 `[tokens]`.
        """
        if self._image_token is not None and (sampled == self._image_token).any():
            shown = self.shown(np.array([self._image_token]))
            raise ValueError(
                f"the policy sampled the token {shown!r} (id {self._image_token}), which stands for an image that "
                "nobody has shown"
            )

    def encoded(self, text: str) -> np.ndarray:
        """Return int32 `[tokens]` of a string; the strings of special tokens become these tokens."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def shown(self, token_ids: np.ndarray) -> str:
        """Return the text of tokens, with special tokens."""
        ids = token_ids.tolist()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def pieces(self, token_ids: np.ndarray) -> list[str]:
        """Return the text of each token."""
        return [self.shown(token_ids[place : place + 1]) for place in range(len(token_ids))]

    def thoughts(self, prompt: np.ndarray, completion: np.ndarray) -> tuple[int, str]:
        """See `rl_core.rollouts.thinking.ThoughtReader.thoughts`."""
        text = self.shown(completion)
        end, mark = last_thoughts(text, opened_by(self.shown(prompt[-PROMPT_END:])))
        if mark:
            return len(completion), mark
        if not end:
            return 0, ""
        # Texts of single tokens do not add up to the text, as a character may be several tokens, so beginnings are
        # decoded. Most models have a token for the mark, and then there is one to try.
        ends = np.flatnonzero(np.isin(completion, self._thought_ends)) + 1
        lengths: Sequence[int] = [*ends.tolist(), len(completion)] if len(ends) else range(len(completion) + 1)
        found = bisect_left(lengths, 1, key=lambda length: self.shown(completion[:length]).startswith(text[:end]))
        return lengths[found], ""

    def grammar(self, form: AnswerForm, prompt: np.ndarray) -> str:
        """See `rl_core.rollouts.program.GenerationClient.grammar`."""
        is_free = not form.schema and not form.must_call
        if is_free and (self.tool_format.written is None or not self.tool_format.written.trigger):
            return ""
        if self.tool_format.reads_all:
            raise ValueError("turns in the format of this policy have several parts, for which no grammar is offered")
        tools = json.loads(form.tools)
        if form.must_call and not tools:
            raise ValueError("the turn must be a call, but the request has no such tool")
        written = self.tool_format.written
        if tools and written is None:
            raise ValueError("no grammar is offered for calls in the tool format of this policy; pass no tools")
        answers: list[Any] = [json_format(json.loads(form.schema))] if form.schema else []
        if written is not None and tools:
            calls = [written.tag(tool["function"]) for tool in tools]
            free = {"type": "triggered_tags", "triggers": [written.trigger], "tags": calls}
            answers += [free] if is_free else calls
        answer = answers[0] if len(answers) == 1 else {"type": "or", "elements": answers}
        whole = {"type": "sequence", "elements": [*self._thoughts_before(prompt), answer]}
        grammar = json.dumps({"type": "structural_tag", "format": whole})
        self._grammars.begin(grammar, ())
        return grammar

    def allowed(self, sampling: SamplingParams, sampled: np.ndarray) -> tuple[bytes, ...]:
        """Return `Completion.allowed` of a completion with a grammar.

        Args:
            sampling: How it was drawn.
            sampled: int32 `[tokens]`.
        """
        return self._grammars.sets(sampling.grammar, sampling.stop_token_ids, sampled)

    @cached_property
    def _grammars(self) -> TokenGrammars:
        return TokenGrammars(self._tokenizer)

    def _thoughts_before(self, prompt: np.ndarray) -> list[Any]:
        """Return the formats of the thoughts of a turn: required if the prompt has opened them, optional if the chat
        template knows them and the prompt has not closed them."""
        end = self.shown(prompt[-PROMPT_END:])
        opened = opened_by(end)
        template = str(self._tokenizer.chat_template)
        known = [
            mark for mark, close in THOUGHTS.items() if mark in template and close in template and close not in end
        ]
        mark = opened or next(iter(known), "")
        if not mark:
            return []
        close = THOUGHTS[mark]
        text = {"type": "any_text", "excludes": [mark, close]}
        thoughts = {"type": "tag", "begin": "" if opened else mark, "content": text, "end": close}
        parts = [thoughts, {"type": "regex", "pattern": "\\n{0,2}"}]
        return parts if opened else [{"type": "optional", "content": {"type": "sequence", "elements": parts}}]

    @cached_property
    def continuation(self) -> Callable[[Message, Sequence[Message], np.ndarray], np.ndarray]:
        """`Continuation.tokens`: the tokens to append after a sampled turn."""
        return Continuation(self._tokenizer, self.ends, arguments_as_text=self.tool_format.arguments_as_text).tokens

    def rendered(
        self, messages: Sequence[Message], so_far: np.ndarray, tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray:
        """See `rl_core.rollouts.program.GenerationClient.rendered`; includes the tools that the policy may call."""
        special = special_tokens(self._tokenizer)
        told = self._with_plain_content([self._with_arguments(message) for message in messages])
        check_images(self._tokenizer, told)
        text = render(self._tokenizer, told, add_generation_prompt=True, tools=tools)
        text, _ = with_images(self._tokenizer, told, text)
        before = self.shown(so_far)
        keeps = special.shown(text).startswith(before)
        kept, rest = (so_far, special.after(text, len(before))) if keeps else (so_far[:0], text)
        return np.concatenate([kept, np.asarray(special.encode(rest), dtype=np.int32)]).astype(np.int32)

    def _with_arguments(self, message: Message) -> Message:
        """Return a message whose tool calls have their arguments in the form that the template takes."""
        if not message.get("tool_calls"):
            return message
        calls = []
        for call in message["tool_calls"]:
            function = call["function"]
            arguments = function["arguments"]
            if self.tool_format.arguments_as_text and not isinstance(arguments, str):
                arguments = json.dumps(arguments)
            calls.append({**call, "function": {**function, "arguments": arguments}})
        return {**message, "tool_calls": calls}

    def _with_plain_content(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with special tokens hidden in answers to the policy, or in the prompt as well."""
        answered = next((place for place, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
        first = 0 if splits_prompts(self._tokenizer) else answered
        if not splits_observations(self._tokenizer):
            return list(messages)
        return [*messages[:first], *special_tokens(self._tokenizer).hidden(messages[first:])]

    @cached_property
    def _opened(self) -> str:
        """Mark of thoughts at the end of the prompt, as DeepSeek-R1 has one; empty without one."""
        try:
            prompt = render(self._tokenizer, [{"role": "user", "content": "x"}], add_generation_prompt=True)
        except (ConfigError, TemplateError):
            return ""
        return opened_by(prompt)

    @cached_property
    def _image_token(self) -> int | None:
        """Id of image tokens; None for a model that takes none."""
        images = image_tokens(self._tokenizer)
        return None if images is None else int(self._tokenizer.convert_tokens_to_ids(images.marks.token))

    def _without_special_tokens(self, ids: list[int]) -> str:
        """Return the text of tokens; the marks of thoughts stay if they are special tokens, as in Magistral."""
        if self._hidden is None:
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))
        return str(self._tokenizer.decode([id for id in ids if id not in self._hidden], skip_special_tokens=False))

    @cached_property
    def _thought_ends(self) -> list[int]:
        """Ids of the tokens that are marks which end thoughts."""
        return [id for id, token in self._tokenizer.added_tokens_decoder.items() if str(token) in THOUGHTS.values()]

    @cached_property
    def _hidden(self) -> frozenset[int] | None:
        """Ids of the special tokens that are not marks of thoughts; None if no mark of thoughts is a special token."""
        special = {id: str(token) for id, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        hidden = frozenset(id for id, text in special.items() if text not in MARKS)
        return hidden if len(hidden) < len(special) else None

    def _as_written(self, call: ToolCall) -> dict[str, Any]:
        arguments: Any = json.dumps(call.arguments) if self.tool_format.arguments_as_text else dict(call.arguments)
        function = {"name": call.name or "unknown", "arguments": arguments}
        return {"type": "function", "id": call.id, "function": function}
