"""What is learned of a conversation, by every family of chat templates and every algorithm."""

import random
import re
import sys
from itertools import groupby

import pytest
from chat_tokenizers import FAMILIES, tokenizer_of
from jinja2 import TemplateError
from learned_spans import CONVERSATIONS, TOOLS, learned_by_sft, learned_of_response, matches, says, table, user

from rl_algos.sft.conversation import encode_conversation
from rl_algos.tokenizer import encode_prompt
from rl_algos.tool_calls.formats import format_of
from rl_algos.turn_ends import find_turn_ends
from rl_core.errors import DataError

REFUSALS = (DataError, TemplateError)
OPENS_THOUGHTS = {"deepseek_v3"}
"""Families whose prompt opens a thought that a rendered turn leaves out."""


@pytest.mark.parametrize(
    ("family", "name", "learn", "expected"), [pytest.param(*row, id=case) for case, *row in table()]
)
def test_what_is_learned_is_what_the_table_shows(family, name, learn, expected):
    if expected.startswith("!"):
        with pytest.raises(REFUSALS, match=re.escape(expected[1:])):
            learned_by_sft(family, name, learn)
        return
    text = learned_by_sft(family, name, learn)
    sys.stdout.write(f"{family} / {name} / {learn}: {text!r}\n")
    assert matches(text, expected), text


def outcome(learned, *arguments):
    """The text with what is learned, or the refusal."""
    try:
        return learned(*arguments)
    except REFUSALS as error:
        return str(error)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_preferences_learn_what_supervised_data_learns_of_the_last_turn(family, name):
    assert outcome(learned_of_response, family, name) == outcome(learned_by_sft, family, name, "last")


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_is_prompted_up_to_what_is_learned_and_stops_where_that_ends(family, name):
    tokenizer, messages = tokenizer_of(family), CONVERSATIONS[name]
    tools = TOOLS if name == "tool call" else ()
    try:
        tokens, mask = encode_conversation(tokenizer, messages, learn="last", tools=tools)
    except REFUSALS:
        return  # refused, as the table shows
    prompt = encode_prompt(tokenizer, messages[:-1], tools).tolist()
    before = tokens[: int(mask.argmax())].tolist()
    rest = tokenizer.decode(prompt[len(before) :])
    assert (prompt[: len(before)], rest) == (before, "<think>\n" if family in OPENS_THOUGHTS else "")
    ends = find_turn_ends(tokenizer, format_of(tokenizer.chat_template).ends)
    assert int(tokens[mask == 1][-1]) in ends.sampled


WRITTEN = {
    "qwen3": "<think>\n\n</think>\n\n",
    "qwen3_6": "\n</think>\n\n",
    "glm4_moe": "\n<think></think>\n",
    "gpt_oss": "<|channel|>final<|message|>",
}
"""What a template writes before the content of a turn, behind the prompt."""


def runs(tokenizer, tokens, mask):
    """What lies under the loss, one list of tokens for each run."""
    pairs = groupby(zip(tokens.tolist(), mask.tolist(), strict=True), key=lambda pair: pair[1])
    return [tokenizer.convert_ids_to_tokens([token for token, _ in run]) for under, run in pairs if under]


def random_text(rng):
    return rng.choice("aé<[") + "".join(rng.choice("ab \n<>[]|/éß世") for _ in range(rng.randrange(12))) + "b"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mask_decodes_to_the_turns_of_random_conversations(family):
    rng, tokenizer = random.Random(family), tokenizer_of(family)
    stops = tokenizer.convert_ids_to_tokens(list(find_turn_ends(tokenizer).sampled))
    for _ in range(15):
        said = [random_text(rng) for _ in range(rng.randint(1, 4))]
        messages = [message for text in said for message in (user(random_text(rng)), says(text))]
        if rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": random_text(rng)})
        learn = rng.choice(("all", "last"))
        wanted = said if learn == "all" else said[-1:]
        try:
            tokens, mask = encode_conversation(tokenizer, messages, learn=learn)
        except DataError:
            assert (learn, len(said) > 1) == ("all", True)
            continue
        learned = runs(tokenizer, tokens, mask)
        assert ["".join(turn[:-1]).removeprefix(WRITTEN.get(family, "")) for turn in learned] == wanted
        assert all(turn[-1] in stops and not set(turn[:-1]) & set(stops) for turn in learned)
