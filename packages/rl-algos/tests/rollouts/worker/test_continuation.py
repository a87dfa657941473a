import numpy as np
import pytest
from chat_tokenizers import FAMILIES, tokenizer_of

from rl_algos.rollouts.worker.continuation import Continuation, rewrites_history
from rl_algos.tiny_model import make_tokenizer
from rl_algos.turn_ends import find_turn_ends

ASKED = {"role": "user", "content": "What is the sum?"}
SAID = {"role": "assistant", "content": "It is 3."}
TOLD = {"role": "user", "content": " Really? <b>\n"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "call00000"}]}
RESULT = {"role": "tool", "content": '{"sum": 3}', "name": "add", "tool_call_id": "call00000"}
AS_TEXT = {"deepseek_v3"}
APPENDS = ("qwen2_5", "llama3_1", "gemma3", "deepseek_v3", "mistral")
WITH_TOOLS = sorted(FAMILIES.keys() - {"gemma3", "phi3", "phi4"})


def continuation(family, further=()):
    tokenizer = tokenizer_of(family)
    return Continuation(tokenizer, find_turn_ends(tokenizer, further), arguments_as_text=family in AS_TEXT)


def text_behind(family, turn, observation, ended_with, further=()):
    tokenizer = tokenizer_of(family)
    sampled = np.array([tokenizer.convert_tokens_to_ids(token) for token in ("a", *ended_with)], np.int32)
    ids = continuation(family, further).tokens(turn, observation, sampled)
    return tokenizer.decode(ids, skip_special_tokens=False)


def rendered(family, *messages, begins=True):
    return tokenizer_of(family).apply_chat_template(list(messages), tokenize=False, add_generation_prompt=begins)


def called(family):
    arguments = '{"a": 1}' if family in AS_TEXT else {"a": 1}
    call = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


ENDS = {
    "qwen2_5": ["<|im_end|>"],
    "qwen3": ["<|im_end|>"],
    "qwen3_6": ["<|im_end|>"],
    "llama3_1": ["<|eot_id|>"],
    "gemma3": ["<eos>", "<end_of_turn>"],
    "deepseek_v3": ["<｜end▁of▁sentence｜>"],
    "gpt_oss": ["<|return|>"],
    "glm4_moe": ["<|endoftext|>", "<|user|>"],
    "phi3": ["<|endoftext|>", "<|end|>"],
    "phi4": ["<|im_end|>"],
    "granite": ["<|end_of_text|>"],
    "mistral": ["</s>"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_ends_with_the_token_that_the_template_writes_behind_a_turn(family):
    tokenizer = tokenizer_of(family)
    assert tokenizer.convert_ids_to_tokens(list(find_turn_ends(tokenizer).sampled)) == ENDS[family]


def test_a_tokenizer_without_a_template_has_its_end_of_sequence_alone():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    assert find_turn_ends(tokenizer).sampled == (tokenizer.eos_token_id,)


def test_further_ends_are_those_that_the_tokenizer_has():
    tokenizer = tokenizer_of("gpt_oss")
    ends = find_turn_ends(tokenizer, ("<|call|>", "<|unheard of|>"))
    assert tokenizer.convert_ids_to_tokens(list(ends.sampled)) == ["<|return|>", "<|call|>"]
    assert set(ends.marks) == {"<|return|>", "<|call|>", "<|end|>"}


@pytest.mark.parametrize("family", APPENDS)
def test_where_a_template_only_appends_the_continuation_is_what_it_appends(family):
    before = rendered(family, ASKED, SAID, begins=False)
    after = rendered(family, ASKED, SAID, TOLD)
    end = ENDS[family][-1]
    kept = before[: before.rindex(end) + len(end)]
    assert after.startswith(kept)
    assert text_behind(family, SAID, [TOLD], [end]) == after[len(kept) :]


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3_6", "llama3_1", "deepseek_v3", "mistral"])
def test_a_tool_s_result_is_what_a_template_appends_behind_the_call(family):
    turn, end = called(family), ENDS[family][-1]
    before, after = rendered(family, ASKED, turn, begins=False), rendered(family, ASKED, turn, RESULT)
    kept = before[: before.rindex(end) + len(end)]
    assert after.startswith(kept)
    assert text_behind(family, turn, [RESULT], [end]) == after[len(kept) :]


@pytest.mark.parametrize(
    ("family", "turn", "told", "ended", "expected"),
    [
        ("qwen3", SAID, TOLD, ["<|im_end|>"], "\n<|im_start|>user\n Really? <b>\n<|im_end|>\n<|im_start|>assistant\n"),
        (
            "qwen3",
            CALL,
            RESULT,
            ["<|im_end|>"],
            '\n<|im_start|>user\n<tool_response>\n{"sum": 3}\n</tool_response><|im_end|>\n<|im_start|>assistant\n',
        ),
        ("gpt_oss", SAID, TOLD, ["<|return|>"], "<|start|>user<|message|> Really? <b>\n<|end|><|start|>assistant"),
        ("glm4_moe", SAID, TOLD, ["<|user|>"], "\n Really? <b>\n<|assistant|>"),
        ("glm4_moe", SAID, TOLD, ["<|endoftext|>"], "<|user|>\n Really? <b>\n<|assistant|>"),
        ("phi3", SAID, TOLD, ["<|end|>"], "\n<|user|>\n Really? <b>\n<|end|>\n<|assistant|>\n"),
    ],
)
def test_a_template_that_rewrites_turns_is_continued_from_the_tokens_as_they_were(family, turn, told, ended, expected):
    assert text_behind(family, turn, [told], ended) == expected


def test_a_call_that_ends_with_its_own_token_is_continued_behind_it():
    found = text_behind("gpt_oss", called("gpt_oss"), [RESULT], ["<|call|>"], ["<|call|>"])
    assert found.startswith("<|start|>functions.")
    assert found.endswith("<|end|><|start|>assistant")


def test_an_end_other_than_the_template_s_is_not_doubled():
    with_eot = text_behind("llama3_1", called("llama3_1"), [RESULT], ["<|eot_id|>"], ["<|eom_id|>"])
    with_eom = text_behind("llama3_1", called("llama3_1"), [RESULT], ["<|eom_id|>"], ["<|eom_id|>"])
    assert with_eot == with_eom
    assert with_eom.startswith("<|start_header_id|>ipython<|end_header_id|>\n\n")


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"glm4_moe"}))
def test_a_turn_that_a_stop_string_ended_gets_the_end_that_the_template_writes(family):
    whole = text_behind(family, SAID, [TOLD], [ENDS[family][-1]])
    marks = find_turn_ends(tokenizer_of(family)).marks
    assert any(text_behind(family, SAID, [TOLD], []) == mark + whole for mark in marks)


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_the_answers_to_several_calls_follow_one_another(family):
    if family == "llama3_1":
        pytest.skip("its template takes one call a turn")
    turn = called(family)
    turn = {**turn, "tool_calls": [{**turn["tool_calls"][0], "id": f"call0000{number}"} for number in range(2)]}
    results = [{**RESULT, "content": f"result {number}", "tool_call_id": f"call0000{number}"} for number in range(2)]
    found = text_behind(family, turn, results, [ENDS[family][-1]], ["<|call|>", "<|observation|>"])
    assert found.index("result 0") < found.index("result 1")


def test_an_observation_that_the_template_leaves_out_is_refused():
    with pytest.raises(ValueError, match=r"does not render an observation \(tool\)"):
        text_behind("phi3", SAID, [RESULT], ["<|end|>"])


def test_a_template_without_special_tokens_is_continued_behind_the_text():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    found = Continuation(tokenizer, find_turn_ends(tokenizer)).tokens(SAID, [TOLD], np.array([9], np.int32))
    assert tokenizer.decode(found) == "\nuser:  Really? <b>\n\nassistant: "


@pytest.mark.parametrize(
    ("family", "rewrites"),
    [
        ("qwen2_5", False),
        ("qwen3", True),
        ("qwen3_6", True),
        ("llama3_1", False),
        ("gemma3", False),
        ("deepseek_v3", True),
        ("glm4_moe", True),
        ("phi3", False),
        ("mistral", False),
    ],
)
def test_templates_that_drop_thoughts_rewrite_history(family, rewrites):
    tokenizer = tokenizer_of(family)
    assert rewrites_history(tokenizer, find_turn_ends(tokenizer)) == rewrites


def test_the_template_of_the_tiny_model_only_appends():
    tokenizer = make_tokenizer()
    assert not rewrites_history(tokenizer, find_turn_ends(tokenizer))
