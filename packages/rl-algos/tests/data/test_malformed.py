"""Malformed files and records: one message with file and line, or left out and counted."""

import bz2
import gzip
import json
import logging

import pyarrow
import pyarrow.parquet
import pytest

from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_datasets
from rl_algos.data.rows.example import by_keys
from rl_algos.data.rows.preference import preference
from rl_core.errors import DataError

CHAT = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
GSM = {"question": "1+1=", "answer": "#### 2"}

LINES = {
    "cut off": ('{"messages": [{"role": "us', "not a JSON object: Unterminated string"),
    "single quotes": ("{'messages': 1}", "JSON has double quotes"),
    "a tab in a text": ('{"messages": "a\tb"}', "Invalid control character"),
    "a comma at the end": ('{"messages": "a",}', "not a JSON object"),
    "two objects": ('{"messages": "a"} {"messages": "b"}', "not a JSON object: Extra data"),
    "no JSON": ("hello", "not a JSON object"),
    "a list": ("[1, 2]", "a row must be a JSON object, got list"),
    "a number": ("3", "a row must be a JSON object, got int"),
    "null": ("null", "a row must be a JSON object, got NoneType"),
    "Latin-1": (b'{"messages": "\xe9"}', "not text in UTF-8"),
    "a zero byte": (b'{"messages": "a"}\x00', "not a JSON object"),
    "nested too deep": ("[" * 200_000, "not a JSON object"),
}

CHATS = {
    "no messages": ({"answer": "2"}, "no column 'messages'"),
    "a mistyped column": ({"mesages": "a"}, "did you mean mesages"),
    "messages are a number": ({"messages": 5}, "a list of messages"),
    "no message": ({"messages": []}, "a list of messages"),
    "messages are null": ({"messages": None}, "a list of messages"),
    "a message is a text": ({"messages": ["a"]}, "a message needs a `role`"),
    "a role is missing": ({"messages": [{"content": "a"}]}, "a message needs a `role`"),
    "a role is a number": ({"messages": [{"role": 1, "content": "a"}]}, "a message needs a `role`"),
    "no content": ({"messages": [{"role": "user"}]}, "the user message has no `content`"),
    "content is a number": ({"messages": [{"role": "user", "content": 3}]}, "`content` must be a string"),
    "ShareGPT without a text": ({"messages": [{"from": "human", "value": None}]}, "the user message has no `content`"),
    "info is a text": ({**CHAT, "info": "a"}, "the column 'info' must hold an object"),
}

PAIRS = {
    "no rejected": ({"prompt": "a", "chosen": "b"}, "no column 'rejected'"),
    "no prompt": ({"chosen": "b", "rejected": "c"}, "no prompt"),
    "nothing to compare": ({"prompt": "a", "completion": "b"}, "expected the columns `chosen` and `rejected`"),
    "a label in words": ({"prompt": "a", "completion": "b", "label": "good"}, "`label` must be true"),
    "a margin in words": ({**PAIR, "margin": "much"}, "`margin` must be a number"),
    "no completions": ({"prompt": "a", "completions": []}, "`completions` must be a list of objects"),
    "a completion without verdict": ({"prompt": "a", "completions": [{"completion": "b"}]}, "has neither a `rank`"),
    "the prompt ends with the assistant": (
        {**PAIR, "prompt": [{"role": "assistant", "content": "a"}]},
        "ends with an assistant message",
    ),
}

PROBLEMS = {
    "no marker": ({"question": "a", "answer": "2"}, "expected `####`"),
    "no question": ({"answer": "#### 2"}, "no column 'question'"),
    "no question and no marker": ({}, "no column 'answer'"),
    "an answer that is a number": ({"question": "a", "answer": 2}, "'answer' must be a string, got 2"),
}


def kinds():
    for good, cases, default, processor in (
        (CHAT, LINES, by_keys, None),
        (CHAT, CHATS, by_keys, None),
        (PAIR, PAIRS, preference, None),
        (GSM, PROBLEMS, by_keys, "gsm8k"),
    ):
        for name, (bad, says) in cases.items():
            line = bad if isinstance(bad, str | bytes) else json.dumps(bad)
            yield pytest.param(good, line, says, default, processor, id=name)


def load(path, default=by_keys, **data):
    keys = {"train": {"data_path": str(path), "processor": data.pop("processor", None)}, **data}
    [dataset] = load_datasets(DataConfig.model_validate(keys), "train", default)
    return dataset


@pytest.mark.parametrize(("good", "line", "says", "default", "processor"), list(kinds()))
def test_a_malformed_record_is_named_or_left_out_and_counted(tmp_path, caplog, good, line, says, default, processor):
    path = tmp_path / "a.jsonl"
    first = json.dumps(good).encode()
    path.write_bytes(b"\n".join([first, b"", line.encode() if isinstance(line, str) else line, first]) + b"\n")
    with pytest.raises(DataError) as error:
        load(path, default, processor=processor)
    assert str(error.value).startswith(f"{path}, line 3: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    with caplog.at_level(logging.WARNING):
        dataset = load(path, default, processor=processor, malformed="skip")
    assert list(dataset.examples) == ["a.jsonl:train:0", "a.jsonl:train:2"]
    assert dataset.place("a.jsonl:train:2") == f"{path}, line 4"
    [said] = caplog.messages
    assert said.startswith("a.jsonl: 1 of 3 rows are malformed")
    assert f"{path}, line 3: " in said


def damaged(data):
    return data[: len(data) // 2]


def parquet(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([CHAT] * 100), tmp_path / "whole")
    return (tmp_path / "whole").read_bytes()


FILES = {
    "a.parquet": (lambda tmp_path: b"PAR1 and no more", "not a Parquet file"),
    "b.parquet": (lambda tmp_path: damaged(parquet(tmp_path)), "not a Parquet file, or damaged"),
    "c.parquet": (lambda tmp_path: b"", "not a Parquet file"),
    "d.arrow": (lambda tmp_path: b"no arrow at all", "not an Arrow file"),
    "e.jsonl.gz": (lambda tmp_path: b"no gzip", r"not a .gz file"),
    "f.jsonl.gz": (
        lambda tmp_path: damaged(gzip.compress(json.dumps(CHAT).encode() * 999)),
        "not a .gz file, or damaged",
    ),
    "g.jsonl.bz2": (lambda tmp_path: bz2.compress(b"a" * 999)[:20], "not a .bz2 file, or damaged"),
    "h.json": (lambda tmp_path: b'[{"a": 1},\n{"a": 2', "h.json, line 2: not a JSON array"),
    "i.jsonl": (lambda tmp_path: b"\n \n", "has no rows"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("malformed", ["error", "skip"])
def test_a_file_that_cannot_be_read_at_all_ends_the_run(tmp_path, name, malformed):
    content, says = FILES[name]
    (tmp_path / name).write_bytes(content(tmp_path))
    with pytest.raises(DataError, match=says) as error:
        load(tmp_path / name, malformed=malformed)
    assert str(tmp_path / name) in str(error.value)


CSV = {
    "too many fields": (b"a,b,c", "more fields than the 2 columns"),
    "too few fields": (b"a", "ends before the column 'answer'"),
    "Latin-1": (b"\xe9,2", "not text in UTF-8"),
}


@pytest.mark.parametrize("name", CSV)
def test_a_malformed_row_of_a_table_is_named_or_left_out(tmp_path, name):
    bad, says = CSV[name]
    path = tmp_path / "a.csv"
    path.write_bytes(b'messages,answer\n"1+1=",2\n' + bad + b"\n1+2=,3\n")
    with pytest.raises(DataError, match=says) as error:
        load(path)
    assert str(error.value).startswith(f"{path}, line 3: ")
    assert [example.answer for example in load(path, malformed="skip").examples.values()] == ["2", "3"]


def test_a_dataset_of_which_nothing_is_left_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("[]\n[]\n")
    with pytest.raises(DataError, match=r"all 2 rows of the dataset 'a\.jsonl' are malformed, the first .*line 1: "):
        load(tmp_path / "a.jsonl", malformed="skip")


def test_the_first_of_many_malformed_rows_are_named(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text("x\n" * 50 + json.dumps(CHAT))
    load(tmp_path / "a.jsonl", malformed="skip")
    [said] = caplog.messages
    assert [f"line {number}:" in said for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert said.endswith("... and 47 more")
