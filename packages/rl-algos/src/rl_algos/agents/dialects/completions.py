"""OpenAI's text completions: `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from rl_algos.agents.calls import COMMENT, Answer, Call, CallRefused, Choice, Event
from rl_algos.agents.dialects.chat_completions import usage
from rl_algos.agents.dialects.openai_errors import openai_error
from rl_algos.agents.fields import MAX_CHOICES, Fields


class Completions:
    """The dialect of `client.completions.create`: a string that is continued as it is."""

    heartbeat = COMMENT

    def read(self, body: Mapping[str, Any]) -> Call:
        """Return the call that a request asks for."""
        fields = Fields(body)
        prompts = fields.strings("prompt")
        if len(prompts) != 1:
            raise fields.refused("prompt", f"must be one string, got {len(prompts)}")
        fields.refuse_others_than("echo", [False], "the answer has what was sampled only")
        fields.refuse_others_than("suffix", [""], "the text is continued at its end")
        fields.refuse_others_than("best_of", [1], "use n")
        fields.refuse_others_than("logit_bias", [{}], "it would change what is sampled; remove it")
        fields.refuse_others_than("logprobs", [0, 1], "the logprobs of the sampled tokens are: logprobs=1")
        stream = Fields(fields.get("stream_options", dict, {}), "stream_options")
        return Call(
            text=prompts[0],
            max_new_tokens=fields.number("max_tokens", 1),
            stop_strings=fields.stop_strings("stop"),
            num_choices=fields.number("n", 1, MAX_CHOICES) or 1,
            wants_logprobs="logprobs" in fields,
            is_streamed=fields.get("stream", bool, False),
            wants_usage=stream.get("include_usage", bool, False),
            model=fields.get("model", str, ""),
            ignored=fields.sampling_set_by_client(),
        )

    def answer(self, call: Call, answer: Answer) -> Mapping[str, Any]:
        """Return the body of an answer."""
        choices = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": _logprobs(call, choice),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(answer.choices)
        ]
        return {**_head(call, answer), "choices": choices, "usage": usage(answer)}

    def events(self, call: Call, answer: Answer) -> Iterator[Event]:
        """Yield the chunks of a streamed answer, one for each choice."""
        whole = self.answer(call, answer)
        for choice in whole["choices"]:
            yield Event({**_head(call, answer), "choices": [choice]})
        if call.wants_usage:
            yield Event({**_head(call, answer), "choices": [], "usage": whole["usage"]})
        yield Event(None)

    def error(self, refused: CallRefused) -> Mapping[str, Any]:
        """Return the body of an error."""
        return openai_error(refused)


def _head(call: Call, answer: Answer) -> dict[str, Any]:
    return {"id": answer.id, "object": "text_completion", "created": answer.created, "model": call.model}


def _logprobs(call: Call, choice: Choice) -> Mapping[str, Any] | None:
    if not call.wants_logprobs:
        return None
    return {
        "tokens": list(choice.pieces),
        "token_logprobs": choice.completion.logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": list(accumulate(map(len, choice.pieces[:-1]), initial=0)) if choice.pieces else [],
    }
