"""Settings of opponents, and a step whose plays have some."""

import dataclasses

import numpy as np
import pytest
from rollouts_builder import make_prompt, make_rollout

from rl_algos.grpo.config import GRPOConfig, trained_agents
from rl_algos.grpo.estimators import advantages_of
from rl_algos.grpo.opponents import check_tokens, fixed_models, opponent_problems, opponents_of
from rl_algos.grpo.plugin import grpo_section
from rl_algos.rollouts.driver.saved import group_from, group_state
from rl_algos.rollouts.driver.steps import NO_TURN, collect_groups
from rl_algos.rollouts.driver.validation import validation_metrics
from rl_algos.rollouts.training.agents import AgentWatch
from rl_algos.rollouts.training.batch import build_batch
from rl_algos.rollouts.training.metrics import rollout_metrics, signal_metrics
from rl_algos.tiny_model import make_tokenizer
from rl_core.errors import ConfigError, DataError
from rl_core.plugins import OpponentNeed
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import Evaluation
from rl_core.rollouts.rollout import WeightSpan


def settings(**agents) -> GRPOConfig:
    written = {"agents": agents, "seed": 3}
    return grpo_section(written).model_validate(written)


def test_agents_whose_settings_differ_in_their_share_have_one_engine():
    older = {"update_every": 20, "pool": 4}
    config = settings(
        first={"opponent": {**older, "share": 0.5}},
        second={"opponent": {**older, "share": 0.25}},
        third={"opponent": {"model_name": "/models/fixed"}},
        fourth={"weight": 2.0},
    )
    assert opponents_of(config) == (
        OpponentNeed("first-second", {"first": 0.5, "second": 0.25}, update_every=20, pool=4, seed=3),
        OpponentNeed("third", {"third": 1.0}, model_name="/models/fixed", seed=3),
    )
    assert fixed_models(config) == {"grpo.agents.third.opponent.model_name": "/models/fixed"}
    assert list(opponent_problems(config)) == []
    assert config.fixed_agents == {"third"}


@pytest.mark.parametrize(
    ("agents", "key", "says"),
    [
        ({"second": {"opponent": {}}}, "second.opponent", "has neither update_every and model_name"),
        ({"second": {"opponent": {"update_every": 2, "model_name": "m"}}}, "second.opponent", "has both"),
        ({"second": {"opponent": {"model_name": "m", "pool": 2}}}, "second.opponent.pool", "has no effect without"),
        ({"second": {"opponent": {"update_every": 2}, "weight": 0.5}}, "second.weight", "has no effect with"),
        ({"second": {"opponent": {"update_every": 2}, "train": False}}, "second.train", "has no effect with"),
        (
            {"a": {"adv_estimator": {"name": "remax"}}, "b": {"opponent": {"update_every": 2}}},
            "b.opponent",
            "such as remax",
        ),
        (
            {name: {"opponent": {"update_every": 2, "share": 0.7}} for name in ("first", "second")},
            "first.opponent.share",
            "add up to 1.4",
        ),
    ],
)
def test_settings_without_effect_and_contradictions_are_refused(agents, key, says):
    (problem,) = opponent_problems(settings(**agents))
    assert problem.key == f"grpo.agents.{key}"
    assert says in problem.message


def test_an_agent_that_is_the_policy_in_other_plays_may_have_settings_of_training():
    opponent = {"update_every": 2, "share": 0.5}
    assert list(opponent_problems(settings(second={"opponent": opponent, "weight": 0.5}))) == []


def test_a_model_with_other_tokens_is_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    config = settings(second={"opponent": {"model_name": str(tmp_path)}})
    check_tokens(config, tokenizer)
    tokenizer.add_tokens(["another"])
    with pytest.raises(ConfigError, match=r"grpo.agents.second.opponent.model_name: .*'another'"):
        check_tokens(config, tokenizer)


def game() -> RolloutGroup:
    """Three plays; the opponent is the second player, and has sampled more tokens with older weights."""
    prompt = make_prompt()
    rollouts = []
    for play, reward in enumerate([1.0, -1.0, 1.0]):
        own = make_rollout(prompt, reward)
        other = make_rollout(prompt, -reward, sampled=(5, 6, 7, 8))
        other = dataclasses.replace(other, spans=(WeightSpan(21, 3), WeightSpan(41, 1)), is_opponent=True)
        info = {"accuracy": 1.0}
        rollouts.append(dataclasses.replace(own, agent="first", play=play, info={"accuracy": 0.5}))
        rollouts.append(dataclasses.replace(other, agent="second", play=play, info=info))
    return RolloutGroup.of(prompt, rollouts)


def alone() -> RolloutGroup:
    """The rollouts of the first player only."""
    return dataclasses.replace(game(), opponents=None)


def test_nothing_is_trained_on_an_opponent_or_measured_by_it():
    with_opponent, without = game(), alone()
    config = GRPOConfig()
    ours, theirs = build_batch([with_opponent], config), build_batch([without], config)
    assert len(ours) == len(theirs) == 3
    np.testing.assert_array_equal(ours.ragged("tokens").values, theirs.ragged("tokens").values)
    np.testing.assert_array_equal(advantages_of([with_opponent], config), advantages_of([without], config))
    metrics = rollout_metrics([with_opponent])
    of_opponent = {name: value for name, value in metrics.items() if name.startswith("opponent/")}
    assert {name: metrics[name] for name in metrics if name not in of_opponent} == rollout_metrics([without])
    assert of_opponent == {
        "opponent/second/rollouts": 3,
        "opponent/second/reward": pytest.approx(-1 / 3),
        "opponent/second/length": 4,
        "opponent/second/weight_version": pytest.approx((3 * 21 + 41) / 4),
    }
    validated = validation_metrics(Evaluation([with_opponent]))
    assert validated["val/accuracy"] == 0.5
    assert validated["val/reward"] == pytest.approx(1 / 3)
    assert validated["val/opponent/second/reward"] == pytest.approx(-1 / 3)


def unanswered() -> RolloutGroup:
    """A play that the opponent ended with its first turn."""
    group = game()
    rows = group.opponents
    return RolloutGroup(group.prompt, group.rollouts.select([]), group.columns.select([]), rows)


class Source:
    """Prompts whose plays the opponent ends before the policy has a turn, but for every third."""

    def __init__(self, *, every=3):
        self.number, self.every, self.aside = 0, every, []

    def collect(self, num_groups, *, num_later=None):
        groups = []
        for _ in range(num_groups):
            self.number += 1
            has_turn = self.every and self.number % self.every == 0
            groups.append(game() if has_turn else unanswered())
        return groups

    def set_aside(self, groups, reason):
        self.aside += [(len(group.rollouts), reason) for group in groups]


def test_other_prompts_come_in_place_of_those_of_which_the_policy_had_no_turn():
    source = Source()
    groups, aside = collect_groups(source, settings(second={"opponent": {"update_every": 2}}))
    assert len(groups) == GRPOConfig().num_prompts_per_step
    assert all(len(group.rollouts) for group in groups)
    assert source.aside == [(0, NO_TURN)] * len(aside)
    assert len(aside) == source.number - len(groups)
    metrics = rollout_metrics(groups) | signal_metrics(groups, aside)
    assert metrics["rollout/groups_without_signal"] == len(aside)


def test_a_run_whose_opponents_take_every_turn_ends_with_the_reason():
    with pytest.raises(DataError, match=r"before the policy had a turn.* in grpo\.agents"):
        collect_groups(Source(every=0), GRPOConfig(num_prompts_per_step=2))


def test_a_validation_counts_the_prompts_of_which_the_policy_had_a_turn():
    metrics = validation_metrics(Evaluation([game(), unanswered()]))
    assert metrics["val/reward"] == pytest.approx(1 / 3)
    assert metrics["val/opponent/second/rollouts"] == 6
    assert set(validation_metrics(Evaluation([unanswered()]))) == {name for name in metrics if "opponent" in name}


def test_a_group_of_a_checkpoint_has_its_opponents():
    group = game()
    found = group_from(group_state(group), group.prompt)
    assert found.rollouts == group.rollouts
    assert found.opponents.rollouts == group.opponents.rollouts
    tokens = [each.columns.ragged("tokens").values for each in (found.opponents, group.opponents)]
    np.testing.assert_array_equal(*tokens)


def test_an_agent_that_is_an_opponent_is_not_missing(caplog):
    AgentWatch("grpo", trained_agents(settings(second={"opponent": {"update_every": 2}}))).observe([game()])
    assert not caplog.records
