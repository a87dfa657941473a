import pytest

from rl_algos.data.config import DatasetConfig
from rl_algos.data.processors import processor
from rl_algos.data.rows.example import Example, by_keys
from rl_algos.data.rows.messages import as_messages
from rl_core.errors import ConfigError, DataError

USER = {"role": "user", "content": "1+1="}


def settings(**keys):
    return DatasetConfig(data_path="a.jsonl", **keys)


def test_columns_are_found_by_their_keys():
    row = {"question": "1+1=", "solution": 2, "answer": "no"}
    example = by_keys(row, settings(input_key="question", output_key="solution"))
    assert example == Example((USER,), 2, is_text=True)


def test_messages_and_answer_are_the_columns_where_no_key_is_set():
    row = {"messages": [USER], "answer": "2", "environment": "math", "info": {"seed": 3}}
    assert by_keys(row, settings()) == Example((USER,), "2", "math", {"seed": 3})
    assert by_keys({"messages": [USER]}, settings()).answer is None


@pytest.mark.parametrize("name", ["answer", "completion", "response"])
def test_a_prompt_and_its_response_need_no_keys(name):
    assert by_keys({"prompt": "1+1=", name: "2", "other": 3}, settings()) == Example((USER,), "2", is_text=True)
    assert by_keys({"prompt": [USER], name: "2"}, settings()) == Example((USER,), "2")
    assert by_keys({"messages": [USER], "prompt": "no", name: "2"}, settings()).messages == (USER,)


@pytest.mark.parametrize("keys", [{"input_key": "qestion"}, {"input_key": "question", "output_key": "qestion"}])
def test_a_missing_column_names_those_there_are_and_the_nearest(keys):
    with pytest.raises(
        DataError, match=r"no column 'qestion'; did you mean question\?; the columns are other, question"
    ):
        by_keys({"question": "a", "other": 1}, settings(**keys))


def test_squad_asks_about_the_passage_and_takes_the_first_answer():
    row = {"question": "Who?", "context": "Ada wrote it.", "answers": {"text": ["Ada", "ada"], "answer_start": [0, 0]}}
    example = processor(settings(processor="squad"))(row, settings())
    assert example.answer == "Ada"
    assert example.messages == ({"role": "user", "content": "Context: Ada wrote it.\n\nQuestion: Who?"},)
    with pytest.raises(DataError, match="no answer"):
        processor(settings(processor="squad"))({**row, "answers": {"text": []}}, settings())


def test_gsm8k_takes_the_number_behind_the_marker():
    convert = processor(settings(processor="gsm8k"))
    assert convert({"question": "?", "answer": "1000+1\n#### 1,001"}, settings()).answer == "1001"
    with pytest.raises(DataError, match="expected `####`"):
        convert({"question": "?", "answer": "1001"}, settings())


def shouting(row, settings):
    return Example(({"role": "user", "content": row["text"].upper()},))


def test_a_processor_of_ones_own_is_named_by_its_path():
    convert = processor(settings(processor=f"{__name__}:shouting"))
    assert convert({"text": "hi"}, settings()).messages[0]["content"] == "HI"


def hasty(row):
    return Example(())


def careless(row, settings):
    return row["text"]


def test_a_processor_that_takes_something_else_is_refused_before_a_row_is_read():
    says = r"hasty \(test_example\.py:\d+\) cannot be called with .* def hasty\(row, settings\) -> Exa"
    with pytest.raises(ConfigError, match=says):
        processor(settings(processor=f"{__name__}:hasty"))


def test_a_processor_that_fails_is_named_with_its_line():
    convert = processor(settings(processor=f"{__name__}:careless"))
    with pytest.raises(DataError, match=r"raised KeyError: 'text' \(at test_example\.py:\d+\); the columns are txt"):
        convert({"txt": "hi"}, settings())
    with pytest.raises(DataError, match=r"careless \(test_example\.py:\d+\) returned str; return an .*Example"):
        convert({"text": "hi"}, settings())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sqad", r"did you mean squad\?"),
        ("rl_algos.data:nothing", "has no 'nothing'"),
        ("no_such_module:f", "cannot be imported"),
    ],
)
def test_an_unknown_processor_is_refused(name, problem):
    with pytest.raises(ConfigError, match=problem):
        processor(settings(processor=name))


def test_messages_lose_the_nulls_of_columnar_files():
    assert as_messages([{**USER, "tool_calls": None}]) == (USER,)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3, "a list of messages"),
        ([], "a list of messages"),
        (["text"], "a message needs a `role`"),
        ([{"content": "no role"}], "a message needs a `role`"),
        ([{"human": "a", "assistant": "b"}], "a message needs a `role`"),
        ([{"role": "user", "content": None}], "the user message has no `content`"),
        ([{"role": "assistant", "content": 5}], "the assistant message's `content` must be a string, got 5"),
    ],
)
def test_what_is_no_conversation_is_refused(value, says):
    with pytest.raises(DataError, match=says):
        as_messages(value)
