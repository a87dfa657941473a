import json
import logging
import re

import numpy as np
import pytest
from chat_tokenizers import tokenizer_of

from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_datasets
from rl_algos.data.prompts import prompt_stream, validation_prompts
from rl_algos.sft.conversation import encode_conversation
from rl_algos.sft.data import EncodeShown
from rl_algos.tokenizer import encode_prompt
from rl_core.errors import ConfigError, DataError

SUMS = {"dataset_name": "arithmetic", "settings": {"max_operand": 9}}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(path, texts):
    return write(path, [{"q": text, "a": index} for index, text in enumerate(texts)])


def stream(data, tokenizer, shown=None, **options):
    config = DataConfig.model_validate(data)
    if shown is not None:
        options["respond"] = EncodeShown(tokenizer, shown)
    return prompt_stream(load_datasets(config, "train"), config, tokenizer, **{"max_tokens": 100, "seed": 0, **options})


def test_generated_sums_become_prompts(tokenizer):
    config = DataConfig.model_validate({"train": SUMS, "validation": SUMS})
    train = prompt_stream(load_datasets(config, "train"), config, tokenizer, max_tokens=100, seed=0, max_num_epochs=1)
    prompts = train.take(train.num_items)
    assert train.take(1) == []
    held_out = validation_prompts(load_datasets(config, "validation"), config, tokenizer, max_tokens=100)
    assert len(prompts) + len(held_out) == 100
    assert len({prompt.id for prompt in (*prompts, *held_out)}) == 100
    for prompt in (*prompts, *held_out):
        a, b = prompt.messages[0]["content"].removesuffix("=").split("+")
        assert prompt.info == {"answer": str(int(a) + int(b))}
        assert (prompt.environment, prompt.dataset) == ("math", "arithmetic")
        assert prompt.token_ids.dtype == np.int32
        assert tokenizer.decode(prompt.token_ids) == f"<|user|>{a}+{b}=<|end|><|assistant|>"


def test_prompts_show_the_tools_of_their_environment(tmp_path):
    tokenizer = tokenizer_of("qwen2_5")
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    rows = [{"messages": "a", "environment": "tools"}, {"messages": "b", "environment": "math"}]
    path = write(tmp_path / "rows.jsonl", rows)
    data = {"train": {"data_path": path}, "shuffle": False}
    with_tools, without = stream(data, tokenizer, max_tokens=10_000, tools={"tools": (tool,)}).take(2)
    assert (with_tools.tools, without.tools) == ((tool,), ())
    assert '"name": "look_up"' in tokenizer.decode(with_tools.token_ids)
    assert "look_up" not in tokenizer.decode(without.token_ids)
    named = {"train": {"data_path": path, "env_name": "tools"}, "shuffle": False}
    assert all(prompt.tools for prompt in stream(named, tokenizer, max_tokens=10_000, tools={"tools": (tool,)}).take(2))


def test_columns_environment_and_texts_come_from_the_settings(tmp_path, tokenizer):
    (tmp_path / "prompt.txt").write_text("Q: {input}")
    data = {
        "data_path": questions(tmp_path / "sums.jsonl", ["x", "y"]),
        "input_key": "q",
        "output_key": "a",
        "env_name": "judge",
        "prompt_file": str(tmp_path / "prompt.txt"),
    }
    first, second = stream({"train": data, "shuffle": False}, tokenizer).take(2)
    assert (first.id, second.id) == ("sums.jsonl:train:0", "sums.jsonl:train:1")
    assert second.messages == ({"role": "user", "content": "Q: y"},)
    assert (second.info, second.environment) == ({"q": "y", "a": 1, "answer": 1}, "judge")
    assert np.array_equal(second.token_ids, encode_prompt(tokenizer, second.messages))


def test_ids_are_unique_across_datasets_and_the_same_whatever_is_left_out(tmp_path, tokenizer):
    path = questions(tmp_path / "q.jsonl", ["short", "much longer than that", "brief"])
    one = {"data_path": path, "input_key": "q", "env_name": "math"}
    both = {"train": [one, one], "shuffle": False}
    assert [prompt.id for prompt in stream(both, tokenizer).take(6)] == [
        f"q.jsonl{number}:train:{row}" for row in range(3) for number in ("", "#2")
    ]
    skipping = {"train": one, "shuffle": False, "overlong": "skip", "max_input_seq_length": 12}
    assert [prompt.id for prompt in stream(skipping, tokenizer).take(2)] == ["q.jsonl:train:0", "q.jsonl:train:2"]


def test_overlong_prompts_are_refused_or_left_out_and_counted(tmp_path, tokenizer, caplog):
    path = questions(tmp_path / "q.jsonl", ["abc", "abcdefghij", "abcde"])
    data = {"train": {"data_path": path, "input_key": "q", "env_name": "math"}, "max_input_seq_length": 6}
    problem = f"2 of 3 rows have more than 6 tokens; the longest ({path}, line 2) has 13"
    says = f"{re.escape(problem)}; .*data.max_input_seq_length.*or set data.overlong: skip"
    with pytest.raises(DataError, match=says):
        stream(data, tokenizer)
    with caplog.at_level(logging.WARNING):
        assert stream({**data, "overlong": "skip"}, tokenizer).num_items == 1
    assert problem in caplog.text
    with pytest.raises(DataError, match="no rows remain"):
        stream({**data, "overlong": "skip", "max_input_seq_length": 5}, tokenizer)
    with pytest.raises(DataError, match="more than 4 tokens"):
        stream({**data, "max_input_seq_length": 50}, tokenizer, max_tokens=4)


def test_datasets_are_mixed_by_weight(tmp_path, tokenizer):
    path = questions(tmp_path / "q.jsonl", ["a", "b", "c"])
    mixed = [{**SUMS, "weight": 3.0}, {"data_path": path, "input_key": "q", "env_name": "math", "weight": 1.0}]
    drawn = [prompt.dataset for prompt in stream({"train": mixed}, tokenizer).take(40)]
    assert (drawn.count("arithmetic"), drawn.count("q.jsonl")) == (30, 10)


def test_worker_processes_give_the_same_prompts(tmp_path, tokenizer):
    path = questions(tmp_path / "q.jsonl", ["a", "bc", "def"])
    data = {"train": {"data_path": path, "input_key": "q", "env_name": "math"}}
    alone, helped = stream(data, tokenizer).take(3), stream({**data, "num_workers": 1}, tokenizer).take(3)
    assert [prompt.id for prompt in alone] == [prompt.id for prompt in helped]
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(alone, helped, strict=True))


def test_a_row_at_fault_is_named(tmp_path, tokenizer):
    def error(rows, **keys):
        data = {"data_path": write(tmp_path / "q.jsonl", rows), "env_name": "math", **keys}
        with pytest.raises(DataError) as caught:
            stream({"train": data}, tokenizer)
        return str(caught.value)

    good = {"messages": [{"role": "user", "content": "a"}]}
    assert "q.jsonl, line 2: no column 'messages'" in error([good, {"message": []}])
    assert "ends with an assistant message" in error(
        [{"messages": [*good["messages"], {"role": "assistant", "content": "b"}]}]
    )
    assert "unknown role judge" in error([{"messages": [{"role": "judge", "content": "a"}]}])
    assert "q.jsonl, line 1: the row names no environment to score it; set `env_name`" in error([good], env_name=None)


def test_prompts_know_the_line_of_their_row(tmp_path, tokenizer):
    path = tmp_path / "q.jsonl"
    path.write_text('\n{"messages": "a"}\n\n{"messages": "b", "topic": "sums"}\n')
    data = {"train": {"data_path": str(path), "env_name": "math"}, "shuffle": False}
    first, second = stream(data, tokenizer).take(2)
    assert (str(first), str(second)) == (f"{path}, line 2", f"{path}, line 4")
    assert (first.info, second.info) == ({}, {"topic": "sums"})


def test_a_tokenizer_without_a_chat_template_is_refused(tokenizer):
    from rl_algos.tiny_model import make_tokenizer

    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.chat_template"):
        stream({"train": SUMS}, bare)


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gemma3", "phi4", "mistral"])
def test_a_prompt_has_the_response_of_its_row_as_a_rollout_would_have_sampled_it(tmp_path, name):
    tokenizer = tokenizer_of(name)
    rows = [{"problem": "1+1?", "answer": "2", "solution": "One and one is 2."}, {"problem": "2+2?", "answer": "4"}]
    data = {"data_path": write(tmp_path / "rows.jsonl", rows), "processor": "math_problem", "env_name": "math"}
    config = {"train": data, "shuffle": False}
    prompts = stream(config, tokenizer, max_tokens=10_000, shown=20).take(2)
    for prompt, row, text in zip(prompts, rows, ("One and one is 2.", "4"), strict=False):
        shown = prompt.demonstration
        assert tokenizer.decode(shown[:-1]) == text
        whole, mask = encode_conversation(
            tokenizer, ({"role": "user", "content": row["problem"]}, {"role": "assistant", "content": text})
        )
        assert np.array_equal(np.concatenate([prompt.token_ids, shown]), whole[: len(prompt.token_ids) + len(shown)])
        assert mask.sum() == len(shown)
    assert all(prompt.demonstration is None for prompt in stream(config, tokenizer, max_tokens=10_000).take(2))
    with pytest.raises(DataError, match=r"line 1: its response has \d+ tokens, more than 3"):
        stream(config, tokenizer, max_tokens=10_000, shown=3)


def test_a_response_that_cannot_be_demonstrated_is_refused_with_its_row(tmp_path, tokenizer):
    turns = [{"role": role, "content": "x"} for role in ("assistant", "user", "assistant")]
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": turns, "answer": "1"}])
    data = {"train": {"data_path": path, "env_name": "math"}}
    with pytest.raises(DataError, match="line 1: its response has several turns"):
        stream(data, tokenizer, shown=20)
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "1"}])
    with pytest.raises(DataError, match=r"after other tokens than those that rollouts begin with; .* mark of thoughts"):
        stream({"train": {"data_path": path, "env_name": "math"}}, tokenizer_of("deepseek_v3"), shown=20)
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    with pytest.raises(DataError, match=r"no row of data\.train has a response"):
        stream({"train": {"data_path": path, "env_name": "math"}}, tokenizer, shown=20)
