"""Files and names of data that cannot be read are found together, without reading rows."""

from types import SimpleNamespace

import pytest

from rl_algos.data.config import DataConfig
from rl_algos.data.inputs import input_problems
from rl_algos.evaluation.config import EvaluationConfig
from rl_algos.grpo.config import GRPOConfig
from rl_algos.rollouts.algorithm import EvaluationOnly, RolloutAlgorithm


def problems(data, **more):
    config = SimpleNamespace(data=DataConfig.model_validate(data), grpo=GRPOConfig(), **more)
    find = RolloutAlgorithm().input_problems if more else input_problems
    return {problem.key: problem.message for problem in find(config)}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "prompt.txt").write_text("Solve: {input}")


def test_everything_that_cannot_be_read_is_named_by_its_key():
    found = problems(
        {
            "train": [
                {"data_path": "nowhere.jsonl", "prompt_file": "no.txt", "system_prompt_file": "none.txt"},
                {"dataset_name": "nobody/nothing", "processor": "gsm9k"},
                {"data_path": "rows.jsonl", "pass_rate": {"results": "evaluated"}},
            ],
            "validation": {"data_path": "nothing*.jsonl"},
            "default": {"processor": "mine.py:rows"},
        }
    )
    assert list(found) == [
        "data.train[0].data_path",
        "data.train[0].prompt_file",
        "data.train[0].system_prompt_file",
        "data.train[1].dataset_name",
        "data.train[1].processor",
        "data.train[2].pass_rate.results",
        "data.validation.data_path",
        "data.default.processor",
    ]
    assert all(word in found["data.train[0].prompt_file"] for word in ("'no.txt'", "No such file", "UTF-8"))
    assert "gsm8k?" in found["data.train[1].processor"]
    assert all(word in found["data.train[2].pass_rate.results"] for word in ("evaluated", "rollouts.jsonl"))


@pytest.mark.parametrize(
    "dataset",
    [
        {"data_path": "rows.jsonl", "prompt_file": "prompt.txt", "processor": "gsm8k"},
        {"data_path": "*.jsonl"},
        {"data_path": "."},
        {"data_path": "s3://bucket/rows.jsonl"},
        {"dataset_name": "arithmetic"},
    ],
)
def test_what_can_be_read_is_no_problem(dataset):
    assert problems({"train": dataset}) == {}


def test_a_prompt_file_without_a_placeholder_is_a_problem(tmp_path):
    (tmp_path / "prompt.txt").write_text("Solve it.")
    found = problems({"train": {"data_path": "rows.jsonl", "prompt_file": "prompt.txt"}})
    assert "{input}" in found["data.train.prompt_file"]


def test_rows_are_not_read(tmp_path):
    (tmp_path / "rows.jsonl").write_text("not JSON\n")
    assert problems({"train": {"data_path": "rows.jsonl"}}) == {}


def test_tasks_are_checked_if_the_run_scores_them():
    tasks = ["gsm9k", {"name": "mine", "dataset": {"data_path": "nowhere.jsonl"}}]
    data = {"train": {"dataset_name": "arithmetic"}}
    assert problems(data, eval=EvaluationConfig(tasks=["gsm9k"])) == {}
    found = problems(data, eval=EvaluationConfig.model_validate({"tasks": tasks, "period": 5}))
    assert "gsm8k?" in found["eval.tasks[0]"]
    assert "'nowhere.jsonl'" in found["eval.tasks[1].dataset.data_path"]


def test_an_evaluation_reads_its_tasks_or_the_validation_data_of_its_run():
    data = DataConfig.model_validate({"train": {"data_path": "no.jsonl"}, "validation": {"data_path": "none.jsonl"}})

    def found(**root):
        return [problem.key for problem in EvaluationOnly().evaluation_problems(SimpleNamespace(**root))]

    assert found(data=data, eval=EvaluationConfig()) == ["data.validation.data_path"]
    assert found(data=data, eval=EvaluationConfig(tasks=["arithmetic", "gsm9k"])) == ["eval.tasks[1]"]
    assert found(eval=EvaluationConfig()) == []
