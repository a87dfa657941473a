"""`rl data show`: rows as they are read, without torch and Ray."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rl_algos.tiny_model import CHAT_TEMPLATE, make_tokenizer
from rl_core.testing.isolation import loaded_by_command
from rl_launch.cli import app
from rl_launch.model_files.local_models import tiny_model

CHATS = [
    {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]},
    {"messages": [{"role": "user", "content": "1+1?" * 9}, {"role": "assistant", "content": "2"}]},
    {"messages": [{"role": "user", "content": "1+1?"}]},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SHOWING_TOOLS = (
    "{% if tools %}{{ tools[0].function.name }};{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_model()
    return tmp_path


def written(name, rows):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return name


def rl(*arguments, code=0):
    answer = CliRunner().invoke(app, ["data", "show", *arguments])
    assert answer.exit_code == code, answer.output
    return answer.stdout


def shown(*arguments):
    return json.loads(rl(*arguments, "--json"))


def refusal(*arguments):
    answer = CliRunner().invoke(app, ["data", "show", *arguments])
    assert answer.exit_code == 2
    return answer.stderr


def test_a_recipe_shows_what_is_learned_between_marks():
    answer = rl("sft-arithmetic", "--row", "2", "--over", "5")
    assert "<|user|>18+21=<|end|><|assistant|>«39<|end|>»" in answer
    assert "text (12 tokens, 3 learned)" in answer
    assert "arithmetic, the first 5 rows: 11 to 12 tokens, median 12, 26% of them learned, 0 too long" in answer


def tokenizer_with(characters, template):
    tokenizer = make_tokenizer(characters)
    tokenizer.chat_template = template
    tokenizer.save_pretrained("tokenizer")
    return "tokenizer"


def test_other_marks_are_used_in_text_that_has_these():
    rows = [{"messages": [{"role": "user", "content": "«a»"}, {"role": "assistant", "content": "b"}]}]
    assert "⟦b<|end|>⟧" in rl(written("marks.jsonl", rows), "--model", tokenizer_with("«»ab", CHAT_TEMPLATE))


def test_control_characters_do_not_reach_the_terminal():
    rows = [{"messages": [{"role": "user", "content": "a\x1b[2Jb"}, {"role": "assistant", "content": "c"}]}]
    answer = rl(written("control.jsonl", rows))
    assert "\x1b" not in answer
    assert "user: a\\x1b[2Jb" in answer


def test_a_file_is_read_by_its_columns():
    chats, prompts = written("chats.jsonl", CHATS), written("prompts.jsonl", [{"prompt": "1+1?", "answer": "2"}])
    pairs = written("pairs.jsonl", [{"prompt": "1+1?", "chosen": "2", "rejected": "3"}])
    pair = written("pair.jsonl", [{"prompt": "1+1?", "completion": "2"}])
    judged = written("judged.jsonl", [{"prompt": "1+1?", "completion": "2", "label": True}])
    found = [shown(name)["algorithm"] for name in (chats, prompts, pairs, pair, judged)]
    assert found == ["sft", "grpo", "dpo", "sft", "dpo"]
    assert shown(pair, "--algorithm", "grpo")["datasets"][0]["rows"][0]["fields"]["answer"] == "2"
    assert "prompts.jsonl: training data, read as grpo does\n" in rl(prompts)
    assert "--model MODEL shows the text" in rl(prompts)


def test_rows_that_a_run_would_refuse_are_shown_with_the_reason():
    [dataset] = shown(
        written("chats.jsonl", CHATS), "--model", "tiny-arithmetic", "policy.max_total_sequence_length=24"
    )["datasets"]
    [right], [long] = (row["texts"] for row in dataset["rows"][:2])
    assert (right["num_tokens"], right["num_learned"], right["too_long"]) == (9, 2, False)
    assert [each["text"] for each in right["spans"] if each["learned"]] == ["2<|end|>"]
    assert long["too_long"]
    assert "no assistant message" in dataset["rows"][2]["not_used"]
    assert dataset["counts"]["num_too_long"] == 1
    assert dataset["counts"]["tokens"] == {"min": 9, "median": 25, "max": 41}
    assert list(dataset["counts"]["not_used"].values()) == [1]


def test_a_refused_row_of_a_config_says_what_becomes_of_the_run():
    written("chats.jsonl", CHATS)
    keys = ["data.train.data_path=chats.jsonl", "data.validation=null", "sft.stop_at_validation_loss=null"]
    answer = rl("sft-arithmetic", *keys, code=1)
    assert "too long: 41 tokens, more than the 32 of policy.max_total_sequence_length; it ends the run" in answer
    assert "(data.overlong=skip leaves such rows out)" in answer
    assert "refused; it ends the run (data.malformed=skip leaves such rows out): the conversation has no" in answer
    assert "2 end the run" in answer
    one = rl("sft-arithmetic", *keys, "data.overlong=skip", "--rows", "0", code=1)
    assert "1 ends the run" in one
    left_out = rl("sft-arithmetic", *keys, "data.overlong=skip", "data.malformed=skip")
    assert "left out (data.overlong: skip)" in left_out
    assert "left out (data.malformed: skip): the conversation has no" in left_out


def test_tools_that_the_template_shows_are_in_the_text():
    row = {
        "messages": [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "2"},
        ],
        "tools": [TOOL],
    }
    file = written("tools.jsonl", [row])
    Path("tools.jinja").write_text(SHOWING_TOOLS)
    answer = rl(file, "--model", "tiny-arithmetic", "policy.tokenizer.chat_template=tools.jinja")
    assert "add;<|user|>1<|end|><|assistant|>«add1<|end|>»<|tool|>2<|end|><|assistant|>«2<|end|>»" in answer
    assert "refused: the row has `tools`, but the chat template does not show them" in rl(
        file, "--model", "tiny-arithmetic"
    )


def test_the_columns_that_a_row_was_read_from_are_shown():
    file = written("alpaca.jsonl", [{"instruction": "1+1", "output": "2", "system": "0", "id": 7}])
    answer = rl(file, "--model", "tiny-arithmetic")
    assert "read as sft does" in answer
    assert "  read from instruction, system, output" in answer


def test_preferences_show_both_responses_and_ties_are_left_out():
    rows = [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3", "margin": 2},
        {"prompt": "?", "chosen": "2", "rejected": "2"},
    ]
    [dataset] = shown(written("pairs.jsonl", rows), "--model", "tiny-arithmetic")["datasets"]
    assert [text["title"] for text in dataset["rows"][0]["texts"]] == ["chosen, margin 2", "rejected"]
    assert dataset["rows"][1]["not_used"] == "no response is better than another"
    assert "  left out: no response is better than another" in rl("pairs.jsonl", "--model", "tiny-arithmetic")


def test_a_prompt_is_shown_with_the_fields_that_its_reward_is_given():
    file = written("own.jsonl", [{"q": "1+1?", "gold": "2", "level": 3}])
    keys = ["data.train.input_key=q", "data.train.output_key=gold", "data.train.env_name=math"]
    answer = rl(file, *keys, "--model", "tiny-arithmetic")
    assert "prompt (7 tokens)\n    <|user|>1+1?<|end|><|assistant|>\n" in answer
    assert "scored by math, which is given\n" in answer
    assert '    level: 3\n    answer: "2"\n' in answer
    assert "(as data.train.KEY=VALUE)" in rl(file)


def test_a_row_that_names_a_file_as_its_environment_runs_no_code(folder):
    (folder / "evil.py").write_text("open('ran', 'w').close()\nclass Evil:\n    tools = []\n")
    row = {"prompt": "1+1?", "answer": "2", "environment": f"{folder}/evil.py:Evil"}
    answer = rl(written("rows.jsonl", [row]), "--model", "tiny-arithmetic", "--algorithm", "grpo")
    assert "refused: no environment" in answer
    assert not (folder / "ran").exists()
    assert "scored by" in rl("rows.jsonl", "--model", "tiny-arithmetic", f"data.train.env_name={folder}/evil.py:Evil")
    assert (folder / "ran").exists()


def test_the_validation_data_of_a_config():
    assert "arithmetic (validation), row 0" in rl("sft-arithmetic", "--validation", "--rows", "1")
    assert "--validation: the config has no validation data" in refusal(
        "sft-arithmetic", "data.validation=null", "sft.stop_at_validation_loss=null", "--validation"
    )


def test_what_does_not_exist_is_named():
    written("chats.jsonl", CHATS)
    assert "'sft-arithmetik' is not a file, a recipe or a dataset; did you mean sft-arithmetic" in refusal(
        "sft-arithmetik"
    )
    assert "--row: got 4; chats.jsonl has 3 rows" in refusal("chats.jsonl", "--row", "4")
    assert "--algorithm: got 'grop'; did you mean grpo" in refusal("chats.jsonl", "--algorithm", "grop")
    assert "evaluation has no training rows to show. Name the recipe or run" in refusal(
        "chats.jsonl", "--algorithm", "evaluation"
    )
    assert "--algorithm" in refusal("sft-arithmetic", "--algorithm", "grpo")


def test_no_engine_is_loaded():
    loaded = loaded_by_command("rl_launch.cli:main", "data", "show", "sft-arithmetic")
    assert "tokenizers" in loaded
    assert not loaded & {"ray", "torch", "vllm"}


def test_validation_prompts_and_tasks_that_the_training_rows_contain_are_listed():
    sums = written("sums.jsonl", [{"messages": f"{each}+{each}=", "answer": str(2 * each)} for each in range(5)])
    data = [f"data.train={{data_path: {sums}, env_name: math, where: {{answer: ['0', '4', '8']}}}}"]
    task = f"eval.tasks=[{{name: sums, dataset: {{data_path: {sums}, env_name: math}}}}]"
    found = shown("grpo-arithmetic", *data, task, "--rows", "0", "--contamination")["contamination"]
    leaks = [f"sums.jsonl, line {line}" for line in (1, 3, 5)]
    assert found["validation"]["prompts"] == {}
    assert found["sums"]["num_prompts"] == 5
    assert found["sums"]["prompts"] == {place: {"kind": "copied", "place": place, "share": 1.0} for place in leaks}
    text = rl("grpo-arithmetic", *data, task, "--rows", "0", "--contamination")
    assert "sums: of 5 prompts, the training rows contain 3 and have 0 similar ones" in text
    assert f"{leaks[1]}: copied (100%) in {leaks[1]}" in text
    rows = written("chats.jsonl", CHATS)
    assert "neither validation data nor tasks" in refusal(rows, "--contamination", "--rows", "0")


def test_leaks_into_preferences_are_found():
    pairs = written("pairs.jsonl", [{"prompt": "1+1?", "chosen": "2", "rejected": "3"}])
    data = [f"data.train={{data_path: {pairs}}}", f"data.validation={{data_path: {pairs}}}"]
    sums = written("sums.jsonl", [{"messages": "1+1?", "answer": "2"}])
    task = f"eval.tasks=[{{name: sums, dataset: {{data_path: {sums}, env_name: math}}}}]"
    found = shown("dpo-tiny", *data, task, "eval.period=1", "--rows", "0", "--contamination")["contamination"]
    assert list(found["validation"]["prompts"]) == ["pairs.jsonl, line 1"]
    assert list(found["sums"]["prompts"]) == ["sums.jsonl, line 1"]
