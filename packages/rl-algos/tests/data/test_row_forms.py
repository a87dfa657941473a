"""Rows in the forms of other tools. A case is a line: the row, and the conversation that is learned of it."""

import json
from dataclasses import replace

import pytest

from rl_algos.data.config import DatasetConfig
from rl_algos.data.processors import PROCESSORS
from rl_algos.data.rows.example import by_keys
from rl_algos.data.rows.preference import preference
from rl_algos.data.sources.load import load_rows
from rl_algos.sft.data import EncodeExample
from rl_core.errors import DataError


def settings(**keys):
    return DatasetConfig(data_path="a.jsonl", **keys)


def turns(example):
    """The conversation that supervised fine-tuning reads, as pairs of role and text, with the names of calls."""
    said = example.answer if example.solution is None else example.solution
    messages = [*example.messages, *([] if example.has_response else [{"role": "assistant", "content": said}])]
    return [
        (message["role"], message["content"] or [call["function"]["name"] for call in message.get("tool_calls", ())])
        for message in messages
    ]


HI = [("user", "hi"), ("assistant", "yo")]
BRIEF = [("system", "Be brief."), *HI]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
CALL = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}

FORMS = {
    "messages": ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}, HI),
    "Alpaca": ({"instruction": "hi", "input": "", "output": "yo"}, HI),
    "Alpaca with an input": (
        {"instruction": "Add.", "input": "1+1", "output": "2"},
        [("user", "Add.\n1+1"), ("assistant", "2")],
    ),
    "Alpaca with a system message and turns before": (
        {"instruction": "so", "output": "ok", "system": "Be brief.", "history": [["hi", "yo"]]},
        [*BRIEF, ("user", "so"), ("assistant", "ok")],
    ),
    "ShareGPT": ({"conversations": SHAREGPT}, HI),
    "ShareGPT with a system message": ({"system": "Be brief.", "conversations": SHAREGPT}, BRIEF),
    "ShareGPT with a call": (
        {"conversations": [SHAREGPT[0], CALL, {"from": "observation", "value": "1"}, SHAREGPT[1]]},
        [("user", "hi"), ("assistant", ["add"]), ("tool", "1"), ("assistant", "yo")],
    ),
    "query and response": ({"query": "hi", "response": "yo"}, HI),
    "query and response with turns before": (
        {"query": "so", "response": "ok", "history": [["hi", "yo"]]},
        [*HI, ("user", "so"), ("assistant", "ok")],
    ),
    "question and answer": ({"question": "hi", "answer": "yo"}, HI),
    "question and response": ({"system_prompt": "Be brief.", "question": "hi", "response": "yo", "id": 3}, BRIEF),
    "prompt and completion": ({"prompt": "hi", "completion": "yo"}, HI),
    "input and output": ({"input": "hi", "output": "yo"}, HI),
    "Gemini": (
        {"contents": [{"role": "user", "parts": [{"text": "hi"}]}, {"role": "model", "parts": [{"text": "yo"}]}]},
        HI,
    ),
    "Gemini with a system instruction": (
        {
            "systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
            "contents": [{"role": "user", "parts": [{"text": "hi"}]}, {"role": "model", "parts": [{"text": "yo"}]}],
        },
        BRIEF,
    ),
    "messages as JSON text": ({"messages": json.dumps([{"role": "human", "content": "hi"}]), "answer": "yo"}, HI),
    "a system message that is there already": (
        {"system": "Be brief.", "messages": [{"role": role, "content": text} for role, text in BRIEF]},
        BRIEF,
    ),
    "an empty system message": ({"system": "", "prompt": "hi", "completion": "yo"}, HI),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_row_of_another_tool_is_read_by_its_columns(name):
    row, expected = FORMS[name]
    example = by_keys(row, settings())
    assert turns(example) == expected
    assert set(example.columns) == {column for column in row if column != "id" and row[column]}


CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
REFUSED = {
    "text": ({"text": "Once upon a time"}, "`processor: text`"),
    "problem": ({"problem": "1+1?", "answer": "2"}, "`processor: math_problem`"),
    "tokens": ({"input_ids": [1, 2], "labels": [-100, 2]}, "rows are tokenised here"),
    "a pair": ({"chosen": "a", "rejected": "b"}, "are for preferences"),
    "options": ({"question": "Which?", "choices": ["a", "b"], "answer": 0}, "`processor: multiple_choice`"),
    "a passage": ({"question": "Who?", "context": "Ada.", "answer": "Ada"}, "`input_key: question`.*`prompt_file`"),
    "two inputs": ({"question": "Who?", "instruction": "Answer.", "output": "Ada"}, "may both be a part of the input"),
    "two system messages": (
        {"system": "Be long.", "messages": [{"role": "system", "content": "Be brief."}, *CHAT["messages"]]},
        "another one in the column `system`",
    ),
    "a system message that is a number": ({"system": 3, **CHAT}, "`system` .* must be a string"),
    "turns before that are no pairs": ({"query": "a", "response": "b", "history": ["a"]}, "list of pairs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_would_lose_a_column_is_refused_with_the_remedy(name):
    row, says = REFUSED[name]
    with pytest.raises(DataError, match=says):
        by_keys(row, settings())


def test_an_input_that_is_named_is_read_alone():
    row = {"question": "Who?", "context": "Ada.", "answer": "Ada"}
    assert by_keys(row, settings(input_key="question")).messages[0]["content"] == "Who?"


def test_text_is_learned_as_a_whole():
    assert turns(PROCESSORS["text"]({"text": "Once."}, settings(processor="text"))) == [("assistant", "Once.")]


@pytest.mark.parametrize("keys", [{}, {"output_key": "reward_model.ground_truth"}])
def test_the_answer_of_verls_rows_is_read(keys):
    row = {"prompt": [{"role": "user", "content": "1+1"}], "reward_model": {"style": "rule", "ground_truth": "2"}}
    assert by_keys(row, settings(**keys)).answer == "2"
    with pytest.raises(DataError, match="no column 'truth'"):
        by_keys(row, settings(output_key="reward_model.truth"))


def test_values_between_tabs_are_read(tmp_path):
    (tmp_path / "a.tsv").write_text('query\tresponse\nhi, you\t"yo\tyo"\n')
    rows = load_rows(DatasetConfig(data_path=str(tmp_path / "a.tsv")), "train")
    assert list(rows) == [{"query": "hi, you", "response": "yo\tyo"}]


PAIR = {"chosen": "yo", "rejected": "no"}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        pytest.param({"system": "Be brief.", "prompt": "hi", **PAIR}, BRIEF[:2], id="a system message"),
        pytest.param({"instruction": "Add.", "input": "1+1", **PAIR}, [("user", "Add.\n1+1")], id="Alpaca"),
        pytest.param({"question": "hi", "system": "Be brief.", **PAIR}, BRIEF[:2], id="a question"),
        pytest.param(
            {
                "conversations": SHAREGPT[:1],
                "chosen": {"from": "gpt", "value": "yo"},
                "rejected": {"from": "gpt", "value": "no"},
            },
            HI[:1],
            id="ShareGPT",
        ),
        pytest.param(
            {
                "system": "Be brief.",
                "chosen": CHAT["messages"],
                "rejected": [*CHAT["messages"][:1], {"role": "assistant", "content": "no"}],
            },
            BRIEF[:2],
            id="whole conversations",
        ),
    ],
)
def test_prompts_of_pairs_are_read_in_the_same_forms(row, prompt):
    example = preference(row, settings())
    assert [(message["role"], message["content"]) for message in example.messages] == prompt
    assert [response.messages[0]["content"] for response in example.responses] == ["yo", "no"]


def test_turns_that_both_responses_begin_with_belong_to_the_prompt():
    first = [{"role": "assistant", "content": "Which?"}, {"role": "user", "content": "This."}]
    said = [[*first, {"role": "assistant", "content": text}] for text in ("yo", "no")]
    example = preference({"prompt": "hi", "chosen": said[0], "rejected": said[1]}, settings())
    assert [message["content"] for message in example.messages] == ["hi", "Which?", "This."]
    assert [response.messages for response in example.responses] == [tuple(each[2:]) for each in said]
    same = preference({"prompt": "hi", "chosen": said[0], "rejected": said[0]}, settings())
    assert [response.messages for response in same.responses] == [tuple(said[0][2:])] * 2


COLUMNS = {
    "axolotl": ({"train": False}, "`train` selects what is learned"),
    "LLaMA-Factory": ({"mask_history": True}, "set sft.learn: last"),
    "TRL's completions": ({"completion_mask": [0, 1]}, "masks of tokens are not read"),
    "TRL's assistant": ({"assistant_masks": [0, 1]}, "masks of tokens are not read"),
    "slime": ({"loss_mask": [0, 1]}, "masks of tokens are not read"),
    "labels of tokens": ({"labels": [-100, 5]}, "masks of tokens are not read"),
    "a scale": ({"loss_scale": 0.5}, "`loss_scale` selects what is learned"),
    "inputs": ({"train_on_inputs": True}, "only the assistant's text is learned"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_that_selects_what_is_learned_is_refused(name, tokenizer):
    more, says = COLUMNS[name]
    example = by_keys({**CHAT, **more}, settings())
    with pytest.raises(DataError, match=says):
        EncodeExample(tokenizer, "all")(replace(example, info=more))


@pytest.mark.parametrize(
    "more", [{"train": True}, {"mask_history": False}, {"labels": ["safe"]}, {"loss_scale": 1.0}, {"score": 0.5}]
)
def test_a_column_that_selects_nothing_is_accepted(more, tokenizer):
    example = by_keys({**CHAT, **more}, settings())
    EncodeExample(tokenizer, "all")(replace(example, info=more))
