"""Every structure of templates learns a conversation right, or refuses it with a true reason."""

import re
from collections import Counter

import pytest
from jinja2 import TemplateError
from learned_spans import shown
from structures import CONVERSATIONS, STRUCTURES, conversation, structure, tools_of

from rl_algos.data.rows.learned_flags import flag_of, without_flags
from rl_algos.sft.conversation import encode_conversation
from rl_algos.tokenizer import encode_prompt
from rl_core.errors import DataError

ALTERNATE = {"Roles must alternate": ("gemma_2",)}
NO_CALLS = {**ALTERNATE, "leaves out the call of message 1": ("phi4", "kimi_k2")}
NO_TEXT_BESIDE = ("llama3_1", "mistral")
REWRITES = {"rewrites earlier turns": ("qwen3",), "does not end message 1": ("gpt_oss",)}
REFUSED = {
    "system": {"System role not supported": ("gemma_2",)},
    "developer": {
        **ALTERNATE,
        "does not show message 0": (
            *("qwen2_5", "qwen3", "deepseek_v3", "mistral", "glm4_moe", "phi4"),
            "nemotron_hybrid",
        ),
    },
    "several turns": REWRITES,
    "an empty turn": REWRITES,
    "thoughts": {"leaves out the thoughts": ("deepseek_v3",)},
    "thoughts without a line break": {"leaves out the thoughts": ("deepseek_v3",)},
    "thoughts apart": {
        "leaves out the thoughts": (
            *("qwen2_5", "llama3_1", "gemma_2", "deepseek_v3", "mistral", "phi4", "kimi_k2", "nemotron_hybrid"),
            *("merging", "marked_parts"),
        )
    },
    "text before thoughts": {
        "does not show a part of the text": ("qwen3", "glm4_moe"),
        "leaves out the thoughts": ("deepseek_v3",),
    },
    "a call": {"leaves out the call of message 1": ("gemma_2", "phi4", "kimi_k2")},
    "a call and its result": NO_CALLS,
    "text beside a call": {
        **NO_CALLS,
        "leaves out the text of message 1": NO_TEXT_BESIDE,
        "rewrites earlier turns": ("gpt_oss",),
    },
    "parallel calls": {
        **NO_CALLS,
        "only supports single tool-calls": ("llama3_1",),
        "leaves out the call of message 1 .*'beta'": ("gpt_oss",),
    },
    "ids of Kimi": {**ALTERNATE, "leaves out the call of message 1": ("phi4",)},
    "results in another order": {
        **ALTERNATE,
        "sort the results in the order of their calls": (
            *("qwen2_5", "qwen3", "deepseek_v3", "glm4_moe", "phi4", "gpt_oss", "nemotron_hybrid", "merging"),
            "marked_parts",
        ),
        "only supports single tool-calls": ("llama3_1",),
        "leaves out the call of message 1": ("kimi_k2",),
    },
    "an older call": {
        **ALTERNATE,
        "tool call ids have 9 characters": ("mistral",),
        "leaves out the call of message 1": ("phi4",),
        "a tool call of message 1 .* has none": ("kimi_k2",),
    },
    "two users": ALTERNATE,
    "two answers": {
        **ALTERNATE,
        "does not end message 1": ("glm4_moe", "gpt_oss"),
        "renders the messages before message 2 differently": ("merging",),
    },
    "a user at the end": REWRITES,
    "the same text twice": REWRITES,
    "a name": {"does not show the `name` of message 0": tuple(name for name in STRUCTURES if name != "kimi_k2")},
    "a result nobody reads": {
        **ALTERNATE,
        "does not show the text of message 2": ("phi4",),
        "no attribute 'tool_call_id'": ("mistral",),
        "`tool_call_id` of tool results, but message 2": ("kimi_k2",),
        "no previous assistant message with a tool call": ("gpt_oss",),
    },
}
"""Reasons by conversation, each with the structures that refuse it."""

OPENED = ("", "<think>\n", "\n")
"""Text of a prompt that a turn may write itself: a thought that the template leaves out of the turn."""


def words_of(message, *, is_learned):
    """The words of every piece of a message."""
    found = [message["content"]]
    if is_learned:
        found.append(message.get("reasoning_content", ""))
    found += [str(call["function"]) for call in message.get("tool_calls", ())]
    text = re.sub(r"</?think>|'name'|'arguments'", " ", " ".join(found))
    return re.findall("[a-z]+", text)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_conversation_is_learned_or_refused_with_a_true_reason(name):
    tokenizer = structure(name)
    for title in CONVERSATIONS:
        messages = conversation(title)
        reason = next((reason for reason, names in REFUSED.get(title, {}).items() if name in names), None)
        tools = tools_of(name, messages)
        if reason is not None:
            with pytest.raises((DataError, TemplateError), match=reason):
                encode_conversation(tokenizer, messages, tools=tools)
            continue
        tokens, mask = encode_conversation(tokenizer, messages, tools=tools)
        check_learned(title, messages, shown(tokenizer, tokens, mask))
        if messages[-1]["role"] == "assistant" != messages[-2]["role"]:
            check_prompt(title, tokenizer, messages, tools)


def check_learned(title, messages, text):
    """The learned parts hold the words of the learned messages and no other, and the text holds those of all."""
    flags = [flag_of(index, message) is not False for index, message in enumerate(messages)]
    learned = [flag and message["role"] == "assistant" for flag, message in zip(flags, messages, strict=True)]
    said = [words_of(message, is_learned=flag) for message, flag in zip(messages, learned, strict=True)]
    wanted = Counter(word for words, flag in zip(said, learned, strict=True) for word in words if flag)
    every = {word for words in said for word in words}
    under = Counter(re.findall("[a-z]+", " ".join(re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL))))
    ids = str([call["id"] for message in messages for call in message.get("tool_calls", ()) if "id" in call])
    found = {word: count for word, count in under.items() if word in every}
    # a template may write a name of a call in its id, or twice
    assert found.keys() == wanted.keys(), (title, text)
    assert all(found[word] == count or word in ids for word, count in wanted.items()), (title, text)
    assert every <= set(re.findall("[a-z]+", text)), (title, text)


def check_prompt(title, tokenizer, messages, tools):
    """What is learned of the last turn begins where the policy is prompted."""
    tokens, mask = encode_conversation(tokenizer, messages, learn="last", tools=tools)
    start = max(index for index in range(1, len(mask)) if mask[index] and not mask[index - 1])
    prompt = encode_prompt(tokenizer, [without_flags(message) for message in messages[:-1]], tools).tolist()
    before = tokens[:start].tolist()
    written = tokenizer.decode(prompt[len(before) :])
    assert prompt[: len(before)] == before, title
    assert written in OPENED, (title, written)
