"""The rollouts that are asked for: those of a validation, those that conditions hold for, in an order."""

import json

import pytest
from shown_rollouts import agent_rollout, rollout
from test_report import printed, rows
from typer.testing import CliRunner

from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.cli import app
from rl_launch.show import report_of
from rl_launch.show.selection import Condition, RecordValues, Selection

RECORDS = [
    rollout("go", "go left", 0.0, prompt_id="a") | {"row": {"answer": "left"}, "num_sampled": 3},
    rollout("go", "1", 0.2, prompt_id="b") | {"row": {"answer": "right"}, "num_sampled": 9},
    rollout("go", "2", 1.0, prompt_id="c") | {"row": {"answer": "left"}, "num_sampled": 1},
    rollout("go", "3", 0.0, prompt_id="d", failure="it hung") | {"row": {"answer": "up"}},
]
RECORDS[1]["rewards"] = {"reward": 0.2, "format": 0.2}
RECORDS[1]["prompt"] = [{"role": "system", "content": "Be brief."}, *RECORDS[1]["prompt"]]


def where(*texts, **settings):
    conditions = [Condition.parse(text, "--where", "reward=0") for text in texts]
    return [record["prompt_id"] for record in Selection(conditions=conditions, **settings).of(RECORDS)]


def test_conditions_are_on_rewards_rows_texts_and_entries():
    assert where("reward=0") == ["a"]
    assert where("reward>0") == ["b", "c"]
    assert where("status=failed") == ["d"]
    assert where("row.answer=left", "reward<1") == ["a"]
    assert where("response=*left*") == ["a"]
    assert where("rewards.format>0") == ["b"]
    assert where("num_sampled>=3", "reward!=0") == ["b"]
    # the last name of a path suffices
    assert where("format>0") == where("rewards.format>0")


@pytest.mark.parametrize(
    ("asked", "near"), [({"conditions": "rewards.formt>0"}, "rewards.format"), ({"sort": "-num_sample"}, "num_sampled")]
)
def test_a_key_that_no_rollout_has_is_refused(asked, near):
    with pytest.raises(ConfigError, match=f"did you mean {near}"):
        where(*filter(None, [asked.get("conditions")]), sort=asked.get("sort", ""))


def test_an_order_is_ascending_or_descending_and_what_has_no_value_comes_last():
    assert where("status=ok", sort="num_sampled") == ["c", "a", "b"]
    assert where(sort="-reward") == ["c", "b", "a", "d"]
    assert where(sort="reward") == ["a", "b", "c", "d"]


def test_a_condition_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"--where: got 'reward'; write KEY=VALUE, such as reward=0"):
        where("reward")


def test_a_failed_rollout_has_no_reward():
    assert RecordValues(RECORDS[3])["reward"] is None


def test_chosen_rollouts_are_shown_with_parts_system_prompt_and_row(record):
    run = record(rows(), {12: RECORDS})
    condition = Condition.parse("reward<1", "--where", "")
    text = printed(report_of(run, selection=Selection(conditions=[condition], sort="reward", limit=1)))
    assert "2 selected, 1 shown" in text
    assert "go left" in text
    text = printed(report_of(run, selection=Selection(conditions=[Condition.parse("row.answer=right", "", "")])))
    assert "reward 0.2 (format 0.2), 9 tokens" in text
    assert "system   Be brief." in text
    assert "row      answer: right" in text


def test_rollouts_of_the_validation_are_shown(record):
    run = record(rows(), {12: RECORDS[:1]})
    with pytest.raises(RunDirectoryError, match="no validation rollouts"):
        report_of(run, selection=Selection("val"))
    (run.path / "rollouts" / "val_10.jsonl").write_text("".join(json.dumps(each) + "\n" for each in RECORDS))
    answer = CliRunner().invoke(app, ["show", str(run.path), "--val", "--where", "status=failed"])
    assert answer.exit_code == 0, answer.output
    assert "Validation rollouts after step 10: 4" in answer.output
    assert "failed, 1 tokens, it hung" in answer.output
    found = json.loads(CliRunner().invoke(app, ["show", str(run.path), "--val", "--sort", "-reward", "--json"]).output)
    assert [each["response"] for each in found["rollouts"]["chosen"]] == ["2", "1", "go left", "3"]


def test_the_segments_of_an_agent_are_shown_one_after_the_other(record):
    run = record(rows(), {12: [agent_rollout("Repair it.", 1.0)]})
    text = printed(report_of(run, selection=Selection(sort="reward")), width=200)
    assert [line.split() for line in text[text.index("prompt") :].splitlines()] == [
        ["prompt", "Repair", "it."],
        ["segment", "1,", "tools:", "look"],
        ["system", "You", "repair", "code."],
        ["user", "Repair", "it."],
        ["policy", "I", "look."],
        ["tool", "42", "files"],
        ["policy", "Many."],
        ["segment", "2,", "begins", "with", "1", "of", "the", "messages", "of", "segment", "1"],
        ["user", "In", "short:", "42", "files."],
        ["assistant", "look({})"],
        ["policy", "It", "is", "repaired."],
    ]
    found = json.loads(CliRunner().invoke(app, ["show", str(run.path), "--where", "response=*Many*", "--json"]).output)
    (segment, _) = found["rollouts"]["chosen"][0]["segments"]
    assert segment["messages"][-1] == ["policy", "Many."]


def test_long_conversations_of_an_agent_are_shortened_on_a_terminal(record):
    long = agent_rollout("Repair it.", 1.0)
    long["segments"] = long["segments"][1:] * 10
    long["segments"][0] = {**long["segments"][0], "turns": [{"text": f"turn {number}"} for number in range(50)]}
    text = printed(report_of(record(rows(), {12: [long]}), selection=Selection(sort="reward")), width=200)
    assert "... 40 more messages ..." in text
    shown = [line.split()[-1] for line in text.splitlines() if " turn " in line]
    assert shown == ["0", "1", "2", "3", "44", "45", "46", "47", "48", "49"]
    assert "2 more segments: see rl view" in text
