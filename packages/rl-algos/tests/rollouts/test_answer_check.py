import json
from types import SimpleNamespace

import pytest

from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_datasets
from rl_algos.rollouts.data import AnswerCheck
from rl_core.config import Config
from rl_core.environments import instance
from rl_core.environments.config import EnvironmentConfig
from rl_core.errors import DataError
from rl_core.plugins import EnvironmentPlugin, Requirement


class Environments(Config):
    numbers: EnvironmentConfig = EnvironmentConfig()


def check(info, _config):
    if not isinstance(info.get("answer"), int):
        raise ValueError(f"an answer must be a number, got {info.get('answer')!r}")


@pytest.fixture
def answers(monkeypatch):
    """The check of an environment that takes whole numbers."""
    found = EnvironmentPlugin("numbers", EnvironmentConfig, "a:B", Requirement("a"), row_check=f"{__name__}:check")
    monkeypatch.setattr(instance, "plugin", lambda _group, _name: found)
    monkeypatch.setattr(instance, "resolve", lambda _path: check)
    return AnswerCheck(Environments())


def data(tmp_path, given, **options):
    rows = [{"prompt": "?", "answer": answer} for answer in given]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(train={"data_path": str(tmp_path / "a.jsonl"), "env_name": "numbers"}, **options)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(None, id="null [gensyn-ai/rl-swarm#163]"),
        pytest.param("", id="empty [huggingface/open-r1#503]"),
        pytest.param("x", id="a word [huggingface/open-r1#86]"),
        float("nan"),
    ],
)
def test_an_answer_that_nobody_can_give_is_found_anywhere_in_the_data(tmp_path, answers, wrong):
    config = data(tmp_path, [1, 2, 3, wrong])
    with pytest.raises(DataError, match=r"a.jsonl, line 4: the environment numbers cannot score it: an answer must be"):
        load_datasets(config, "train", check=answers)


def test_such_rows_are_left_out_if_malformed_ones_are(tmp_path, answers, caplog):
    [dataset] = load_datasets(data(tmp_path, [1, "x", 3], malformed="skip"), "train", check=answers)
    assert [example.answer for example in dataset.examples.values()] == [1, 3]
    assert "line 2: the environment numbers cannot score it" in caplog.text


def test_an_environment_without_a_check_takes_every_row(tmp_path, monkeypatch):
    plugin = SimpleNamespace(
        environment="a:B", requirement=Requirement("a"), row_check="", runs_agents=False, brings_agent=False
    )
    monkeypatch.setattr(instance, "plugin", lambda _group, _name: plugin)
    [dataset] = load_datasets(data(tmp_path, [1, "x"]), "train", check=AnswerCheck(Environments()))
    assert len(dataset.examples) == 2
