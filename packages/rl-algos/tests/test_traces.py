"""Traces of real instrumentation packages, and chat logs, become rows whose tokens are those that were served."""

import json
from pathlib import Path

import pytest
from chat_tokenizers import tokenizer_of

from rl_algos import tokenizer as tokenizer_module
from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_datasets
from rl_algos.data.rows.preference import preference
from rl_algos.traces import calls
from rl_algos.traces.calls import read_traces
from rl_algos.traces.dataset import EXACT, UNKNOWN, compared, load
from rl_core.errors import DataError

# Calls of an endpoint of agents by the `openai` and `anthropic` clients, as the packages wrote them, and the tokens
# that the endpoint counted.
RECORDED = json.loads(Path(__file__).with_name("recorded_traces.json").read_text())
OLDER = "opentelemetry-instrumentation-openai-v2 2.1b0"
NEWEST = "opentelemetry-instrumentation-openai 0.62.4"
ANTHROPIC = "opentelemetry-instrumentation-anthropic 0.62.4"
QWEN = tokenizer_of(RECORDED["template"])


def records(package):
    return [each["record"] for each in RECORDED["records"] if each["package"] == package]


def written(folder, values, name="traces.jsonl"):
    path = folder / name
    path.write_text("".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values))
    return str(path)


def otlp(record):
    """A record of an SDK as a line of OTLP's JSON."""

    def value(given):
        match given:
            case bool():
                return {"boolValue": given}
            case int():
                return {"intValue": str(given)}
            case float():
                return {"doubleValue": given}
            case list():
                return {"arrayValue": {"values": [value(each) for each in given]}}
            case dict():
                return {"kvlistValue": {"values": pairs(given)}}
            case _:
                return {"stringValue": str(given)}

    def pairs(given):
        return [{"key": key, "value": value(each)} for key, each in given.items() if each is not None]

    attributes = pairs(record["attributes"])
    if "body" in record:
        log = {"traceId": record["trace_id"], "spanId": record["span_id"], "attributes": attributes}
        log |= {"body": value(record["body"])}
        return {"resourceLogs": [{"scopeLogs": [{"logRecords": [log]}]}]}
    context = record["context"]
    span = {"traceId": context["trace_id"], "spanId": context["span_id"], "attributes": attributes, "events": []}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


@pytest.mark.parametrize("package", [OLDER, NEWEST, ANTHROPIC])
@pytest.mark.parametrize("form", [lambda record: record, otlp], ids=["SDK", "OTLP"])
def test_calls_of_instrumented_clients_are_read_with_their_tokens(tmp_path, package, form):
    read = read_traces(written(tmp_path, map(form, records(package))))
    assert read.faults == []
    results = [compared(QWEN, call) for call in read.calls]
    if package == OLDER:
        # This convention has no definitions of tools, which the prompt showed: the two calls with a tool differ.
        assert results == [EXACT, EXACT, results[2], results[3], EXACT]
        assert results[2].startswith("the prompt has 45 tokens, and 551 were served")
        assert read.calls[2].reply["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    else:
        assert results == [EXACT] * len(read.calls)


def test_each_conversation_is_one_row_with_its_tools(tmp_path):
    path = written(tmp_path, [*records(NEWEST), *records(NEWEST)])
    rows = load({"path": path}, "train")
    assert [[message["role"] for message in row["messages"]] for row in rows] == [
        ["user", "assistant", "user", "assistant"],
        ["system", "user", "assistant"],
        ["system", "user", "assistant", "tool", "assistant"],
        ["user", "assistant"],
    ]
    assert rows[2]["tools"][0]["function"]["name"] == "add"
    assert rows[2]["messages"][3] == {"role": "tool", "tool_call_id": "c1", "content": "5"}
    assert {row["token_check"] for row in rows} == {UNKNOWN}
    settings = {"dataset_name": "traces", "settings": {"path": path}}
    (dataset,) = load_datasets(DataConfig.model_validate({"train": settings}), "train")
    assert [example.messages[-1]["content"] for example in dataset.examples.values_in_order] == [
        "it is 5",
        "",
        "it is 5",
        "it is 5",
    ]


def logged(reply="4", *, score=None, prompt="2+2", **more):
    request = {"model": "m", "messages": [{"role": "user", "content": prompt}], "api_key": "sk-secret"}
    response = {"id": "r1", "choices": [{"message": {"role": "assistant", "content": reply}}], **more}
    line = {"headers": {"Authorization": "Bearer sk-secret"}, "request": request, "response": response}
    return line if score is None else {**line, "feedback": {"score": score}}


def test_scores_make_pairs_and_select_what_is_learned(tmp_path):
    lines = [logged("4", score=1), logged("5", score=0), logged("four", score=0.5), logged("9", prompt="4+4", score=0)]
    path = written(tmp_path, lines)
    (pair,) = load({"path": path, "form": "preference"}, "train")
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"], pair["margin"]) == ("4", "5", 1.0)
    settings = {"dataset_name": "traces", "settings": {"path": path, "form": "preference"}}
    (dataset,) = load_datasets(DataConfig.model_validate({"train": settings}), "train", preference)
    assert dataset.examples[next(iter(dataset.examples))].margin == 1.0
    good = load({"path": path, "min_score": 0.5}, "train")
    assert [row["messages"][-1]["content"] for row in good] == ["4", "four"]
    prompts = load({"path": path, "form": "grpo"}, "train")
    assert [(row["messages"][0]["content"], row["logged_reply"]) for row in prompts] == [("2+2", "4"), ("4+4", "9")]
    assert "sk-secret" not in json.dumps([pair, good, prompts])


def test_a_score_of_an_evaluation_event_belongs_to_its_answer(tmp_path):
    event = {"attributes": {"gen_ai.response.id": records(NEWEST)[0]["attributes"]["gen_ai.response.id"]}}
    event["attributes"] |= {"event.name": "gen_ai.evaluation.result", "gen_ai.evaluation.score.value": 0.75}
    read = read_traces(written(tmp_path, [event, *records(NEWEST)[:2]]))
    assert [call.score for call in read.calls] == [0.75, None]


def test_ids_of_tokens_are_compared_one_by_one(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tokenizer_module, "load_tokenizer", lambda *_: QWEN)
    served = RECORDED["served"][0]
    own = {"prompt": "2+3=", "prompt_token_ids": served["prompt"]}
    answer = [{"message": {"content": "it is 5"}, "token_ids": served["answer"]}]
    changed = [{"message": {"content": "it is 5"}, "token_ids": [*served["answer"][:3], 7]}]
    lines = [logged(**own, choices=answer), logged(**own, choices=changed)]
    path = written(tmp_path, lines)
    keys = {"path": path, "model": "policy", "form": "sft"}
    (row,) = load(keys, "train")
    assert row["token_check"] == EXACT
    assert "traces.jsonl, line 2: the answer differs from token 4 on" in caplog.text
    assert len(load({**keys, "differing": "skip"}, "train")) == 1
    with pytest.raises(DataError, match="1 of 2 calls have other tokens than were served"):
        load({**keys, "differing": "error"}, "train")


HOSTILE = [
    "{",
    "[" * 100_000,
    '{"a": "\\ud800"}',
    '"text"',
    "null",
    '{"attributes": {"gen_ai.input.messages": "[{}]", "gen_ai.output.messages": "[1]"}}',
    '{"attributes": {"gen_ai.input.messages": "[{\\"role\\": \\"user\\", \\"parts\\": [{\\"type\\": \\"blob\\"}]}]"}}',
    '{"request": {"messages": [{"role": "user", "tool_calls": [{"function": 5}]}]}, "response": {}}',
    '{"request": 5}',
    '{"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [{"key": "a", "value": {"intValue": "x"}}]}]}]}]}',
    '{"resourceSpans": [5]}',
    '{"messages": [{"role": {}, "content": {"a": 1}}], "score": 1e999}',
]


def test_hostile_lines_cost_only_themselves(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(calls, "MAX_LINE", 200_000)
    lines = [logged("4"), *HOSTILE, json.dumps({"request": "x" * 300_000}), logged("8", prompt="4+4")]
    path = written(tmp_path, lines)
    rows = load({"path": path}, "train")
    assert [row["messages"][-1]["content"] for row in rows] == ["4", "8"]
    assert "more than 200000 bytes" in caplog.text
    with pytest.raises(DataError, match="no call with messages and an answer"):
        load({"path": written(tmp_path, HOSTILE, "bad.jsonl")}, "train")
    with pytest.raises(DataError, match="is not a file"):
        load({"path": str(tmp_path / "none.jsonl")}, "train")


def test_a_call_whose_tools_cannot_be_read_and_a_large_value_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "MAX_LINE", 2000)
    span = {
        "gen_ai.input.messages": [{"role": "user", "parts": [{"type": "text", "content": "Hi"}]}],
        "gen_ai.output.messages": [{"role": "assistant", "parts": [{"type": "text", "content": "Hello"}]}],
    }
    written(tmp_path, [{"attributes": span}, {"attributes": {**span, "gen_ai.tool.definitions": [3]}}])
    (tmp_path / "large.json").write_text("[\n" + "1,\n" * 5000 + "1]")
    found = read_traces(str(tmp_path))
    assert [call.reply["content"] for call in found.calls] == ["Hello"]
    assert len(found.faults) == 2
    assert "write JSON lines" in found.faults[0]
