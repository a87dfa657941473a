"""Turns and tool calls in OpenAI's harmony format, which gpt-oss writes."""

from __future__ import annotations

import re

from rl_algos.rollouts.tool_calls.parsed import Parsed, Schemas, malformed, named_call

_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_END = re.compile(r"<\|(end|return|call)\|>")


def harmony(text: str, _schemas: Schemas) -> Parsed:
    """Messages of a header, `<|message|>` and a body; the final channel is the text, one to `functions.NAME` a call."""
    content, calls = "", []
    for message in text.split("<|start|>"):
        header, has_body, rest = message.partition("<|message|>")
        ended = _END.search(rest)
        body = rest[: ended.start()] if ended else rest
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient and not has_body:
            calls.append(malformed("it has no <|message|>", recipient[1]))
        elif recipient:
            calls.append(named_call(recipient[1], body.strip()))
        elif has_body and (channel is None or channel[1] == "final"):
            content += body
    return Parsed(content, tuple(calls))
