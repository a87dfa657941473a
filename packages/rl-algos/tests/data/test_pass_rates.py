"""Training rows that are chosen by the results of an evaluation."""

import json
import logging

import pytest

from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_datasets
from rl_algos.data.pass_rates import ROLLOUTS
from rl_core.config import ProblemError
from rl_core.errors import DataError

SYSTEM = {"role": "system", "content": "Add."}


def record(question, reward, *, status="ok", system=()):
    return {
        "prompt_id": question,
        "prompt": [*system, {"role": "user", "content": question}],
        "rewards": {} if status == "failed" else {"reward": reward},
        "status": status,
        "failure": "",
        "num_sampled": 3,
        "info": {},
    }


@pytest.fixture
def results(tmp_path):
    """Rates of a? to e?: 0, 1/4, 1, 1/2 of the two that did not fail, none; f? was not evaluated."""
    samples = {"a?": [0, 0, 0, 0], "b?": [0, 1, 0, 0.5], "c?": [1, 1, 1, 2], "d?": [None, None, 1, 0], "e?": [None]}
    folder = tmp_path / "results"
    folder.mkdir()
    lines = [
        record(question, reward, status="failed" if reward is None else "ok")
        for question, rewards in samples.items()
        for reward in rewards
    ]
    (folder / ROLLOUTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def kept(tmp_path, results, *, rows="abcdef", **bounds):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": f"{name}?"}) + "\n" for name in rows))
    pass_rate = {"results": str(results), **bounds}
    config = DataConfig.model_validate({"train": {"data_path": str(path), "pass_rate": pass_rate}})
    [dataset] = load_datasets(config, "train")
    return "".join(example.messages[-1]["content"][0] for example in dataset.examples.values())


@pytest.mark.parametrize(
    ("bounds", "rows"),
    [
        ({}, "bd"),
        ({"above": None}, "abd"),
        ({"below": None}, "bcd"),
        ({"above": None, "below": None}, "abcd"),
        ({"above": 0.25}, "d"),
        ({"above": None, "below": 0.5}, "ab"),
        ({"pass_threshold": 0.5, "below": 0.5}, ""),
        ({"pass_threshold": 0.5, "below": 0.51}, "bd"),
    ],
)
def test_rows_are_kept_whose_rate_is_between_the_bounds(tmp_path, results, bounds, rows):
    if rows:
        assert kept(tmp_path, results, **bounds) == rows
    else:
        with pytest.raises(DataError, match=r"change pass_rate\.above or pass_rate\.below"):
            kept(tmp_path, results, **bounds)


def test_the_log_says_how_many_are_left_out_and_why(tmp_path, results, caplog):
    caplog.set_level(logging.INFO, "rl_algos")
    kept(tmp_path, results)
    assert "rows.jsonl: 2 of 6 rows have a pass rate above 0 and below 1" in caplog.text
    assert "2 have another one, and 2 were not evaluated" in caplog.text


def test_a_conversation_with_a_response_is_known_by_its_prompt(tmp_path, results):
    path = tmp_path / "chats.jsonl"
    chats = [[{"role": "user", "content": f"{name}?"}, {"role": "assistant", "content": "yes"}] for name in "abc"]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    settings = {"data_path": str(path), "pass_rate": {"results": str(results)}}
    [dataset] = load_datasets(DataConfig.model_validate({"train": settings}), "train")
    assert [example.messages[0]["content"] for example in dataset.examples.values()] == ["b?"]


def test_results_of_other_prompts_are_refused(tmp_path, results):
    lines = [record("b?", 1, system=[SYSTEM]), record("b?", 0, system=[SYSTEM])]
    (results / ROLLOUTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match=r"Prompts .*evaluate this split, with the same prompt_file"):
        kept(tmp_path, results)


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"nothing \(pass_rate\.results\) .*rollouts\.jsonl.*rl eval"):
        kept(tmp_path, tmp_path / "nothing")


def test_an_evaluation_that_broke_off_within_a_line_is_read_up_to_it(tmp_path, results):
    with (results / ROLLOUTS).open("a") as file:
        file.write('{"prompt_id": "f?", "prom')
    assert kept(tmp_path, results) == "bd"
    with (results / ROLLOUTS).open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match="line 18: not a JSON object"):
        kept(tmp_path, results)


@pytest.mark.parametrize(
    ("train", "validation", "says"),
    [
        ({}, {"pass_rate": {"results": "r"}}, r"validation\.pass_rate: .*training"),
        (
            {"dataset_name": "a/b", "data_path": None, "streaming": True, "pass_rate": {"results": "r"}},
            {},
            r"train\.pass_rate: .*`streaming`",
        ),
    ],
)
def test_a_pass_rate_in_the_wrong_place_is_refused(train, validation, says):
    with pytest.raises((ProblemError, ValueError), match=says):
        DataConfig.model_validate(
            {"train": {"data_path": "a", **train}, "validation": {"data_path": "b", **validation}}
        )
