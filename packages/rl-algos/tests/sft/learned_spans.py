"""Conversations of every shape, and what is learned of them as text with `[[` and `]]` around it."""

import re
from pathlib import Path

from chat_tokenizers import tokenizer_of

from rl_algos.preference.data import encode_response
from rl_algos.sft.conversation import encode_conversation

TOOLS = ({"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}},)


def user(text):
    return {"role": "user", "content": text}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


def calls(name, **arguments):
    function = {"name": name, "arguments": arguments}
    return says("", tool_calls=[{"type": "function", "id": "call00000", "function": function}])


SYSTEM = {"role": "system", "content": "Be kind."}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "3"}

CONVERSATIONS = {
    "one turn": [user("hi"), says("yo")],
    "system": [SYSTEM, user("hi"), says("yo")],
    "two turns": [user("hi"), says("yo"), user("so"), says("ok")],
    "spaces": [user("hi"), says(" yo \n")],
    "thoughts": [user("hi"), says("<think>\nhm\n</think>\n\nyo")],
    "thoughts apart": [user("hi"), says("yo", reasoning_content="hm", thinking="hm")],
    "thought only closed": [user("hi"), says("hm\n</think>\n\nyo")],
    "assistant first": [says("Hello!"), user("hi"), says("yo")],
    "tool call": [user("hi"), calls("add", a=1), RESULT, says("3.")],
    "four turns": [SYSTEM, user("a"), says("b"), user("c"), says("d"), user("e"), says("f"), user("g"), says("h")],
}


def table():
    """The lines of `learned_spans.txt`: case, family, conversation, turns to learn, expected text."""
    lines = (Path(__file__).parent / "learned_spans.txt").read_text(encoding="utf-8").splitlines()
    for case, expected in (line.split(": ", 1) for line in lines if line and not line.startswith("#")):
        family, name, learn = case.split(" / ")
        yield case, family, name.partition(" [")[0], learn, expected.replace("\\n", "\n")


def matches(text, expected):
    """Whether a text is the expected one, in which `…` stands for any text that is not learned."""
    pattern = r"(?:(?!\[\[|\]\]).)*".join(map(re.escape, expected.split("…")))
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def shown(tokenizer, tokens, mask):
    """The text of tokens, what is learned in double brackets."""
    text, under = [], False
    for token, learned in zip(tokens.tolist(), mask.tolist(), strict=True):
        if learned != under:
            text.append("[[" if learned else "]]")
            under = bool(learned)
        text.append(tokenizer.convert_ids_to_tokens(token))
    return "".join([*text, "]]" if under else ""])


def learned_by_sft(family, name, learn="all"):
    tokenizer, messages = tokenizer_of(family), CONVERSATIONS[name]
    tools = TOOLS if name == "tool call" else ()
    return shown(tokenizer, *encode_conversation(tokenizer, messages, learn=learn, tools=tools))


def learned_of_response(family, name):
    """As DPO and reward models read the last message as a response to the messages before it."""
    tokenizer, messages = tokenizer_of(family), CONVERSATIONS[name]
    tools = TOOLS if name == "tool call" else ()
    encoded = encode_response(tokenizer, messages[:-1], messages[-1:], tools)
    return shown(tokenizer, encoded.tokens, encoded.loss_mask)
