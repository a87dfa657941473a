from types import SimpleNamespace

import pytest

from rl_algos.data.config import DataConfig
from rl_algos.losses.preference import BradleyTerryLoss, ProcessLoss, RegressionLoss
from rl_algos.preference.comparison import WeighedScores
from rl_algos.reward_model.algorithm import RewardModel, objective_of
from rl_algos.reward_model.config import RewardModelConfig
from rl_algos.reward_model.plugin import PLUGIN
from rl_core.algorithm import implementation_of
from rl_core.model_config import ModelConfig
from rl_core.plugins import ALGORITHMS, plugin


def config(**rm):
    data = {"train": {"data_path": "a.jsonl"}, "validation": {"data_path": "b.jsonl"}}
    return SimpleNamespace(
        rm=RewardModelConfig(**rm), data=DataConfig.model_validate(data), policy=ModelConfig(model_name="tiny")
    )


def problems(config):
    return {problem.key: problem for check in PLUGIN.checks for problem in check(config)}


def test_the_entry_point_leads_to_the_loop():
    assert plugin(ALGORITHMS, "rm") is PLUGIN
    assert isinstance(implementation_of(PLUGIN), RewardModel)


def test_the_model_that_trains_has_a_score_head():
    spec = PLUGIN.models(config())["policy"].spec
    assert (spec.role, spec.trains, spec.keeps_reference) == ("reward_model", True, False)


def test_the_loss_is_as_configured():
    chosen = config(margin="scale", center_rewards_coefficient=0.01)
    assert objective_of(chosen.rm).loss == BradleyTerryLoss("scale", 0.01)
    assert objective_of(config(loss="regression").rm).loss == RegressionLoss()
    assert objective_of(config(loss="process").rm).loss == ProcessLoss()
    assert problems(chosen) == problems(config(loss="regression")) == problems(config(loss="process")) == {}


@pytest.mark.parametrize(
    "unused", [{"margin": "scale"}, {"center_rewards_coefficient": 0.1}, {"pairing": "all"}], ids=str
)
@pytest.mark.parametrize("loss", ["regression", "process"])
def test_losses_of_single_responses_refuse_settings_of_pairs(loss, unused):
    ((key, problem),) = problems(config(loss=loss, **unused)).items()
    assert (key, problem.is_unused) == (f"rm.{next(iter(unused))}", True)


def test_only_regression_reads_weights_of_scores():
    weighed = config(loss="regression", score_weights={"a": 1.0})
    assert problems(weighed) == {}
    assert RewardModel().reads(weighed)[1] == WeighedScores({"a": 1.0})
    for loss in ("bradley-terry", "process"):
        ((key, problem),) = problems(config(loss=loss, score_weights={"a": 1.0})).items()
        assert (key, problem.is_unused) == ("rm.score_weights", True)


def test_only_the_loss_of_steps_reads_their_end():
    ((key, problem),) = problems(config(step_end=".")).items()
    assert (key, problem.is_unused) == ("rm.step_end", True)
    assert problems(config(loss="process", step_end=".")) == {}


@pytest.mark.parametrize(
    ("loss", "unit"), [("bradley-terry", "num_pairs"), ("regression", "num_responses"), ("process", "num_steps")]
)
def test_what_a_validation_records_is_known_beforehand(loss, unit):
    assert {"val/loss", f"val/{unit}"} <= set(PLUGIN.validation_metrics(config(loss=loss)))
