from types import SimpleNamespace

import numpy as np
import pytest
from rollouts_builder import make_group, make_plays

from rl_algos.data.config import DataConfig
from rl_algos.dpo.algorithm import preference_objective
from rl_algos.dpo.loss import preference_loss_of
from rl_algos.losses.preference import CPO, DPO, PreferenceLoss
from rl_algos.online_dpo.config import OnlineDPOConfig
from rl_algos.online_dpo.loop import OnlineDPO, paired, parts_of, train
from rl_algos.online_dpo.plugin import PLUGIN, check, online_dpo_section
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.driver.validation import Validation
from rl_algos.rollouts.training.batch import build_batch
from rl_core.algorithm import implementation_of
from rl_core.plugins import ALGORITHMS, plugin
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Prompt
from rl_core.testing.fakes import FakeModel, FakeRolloutSource, FakeRun, FakeWeights

PROMPTS = [Prompt(f"p{i}", (), np.arange(2, dtype=np.int32), "math", {"answer": i}, "sums") for i in range(200)]
CONFIG = OnlineDPOConfig()


def even_share(prompt, tokens):
    return float(np.mean(tokens % 2 == 0))


def pairs_of(groups, pairing="best-worst"):
    """Rows of the better and the worse response of each pair, with the margin."""
    batch = build_batch(groups, CONFIG).with_columns({"row": np.arange(sum(len(group.rollouts) for group in groups))})
    found = paired(batch, groups, pairing)
    assert found.array("is_chosen").tolist() == [1, 0] * (len(found) // 2)
    assert found.array("pair").tolist() == [number // 2 for number in range(len(found))]
    rows, margins = found.array("row").tolist(), found.array("margin").tolist()
    assert margins[::2] == margins[1::2]
    return list(zip(rows[::2], rows[1::2], margins[::2], strict=True))


def test_the_best_rollout_of_each_prompt_is_paired_with_its_worst():
    groups = [make_group("a", [0.0, 2.0, 1.0, 2.0]), make_group("b", [1.0, 1.0]), make_group("c", [0.5, 0.0])]
    assert pairs_of(groups) == [(1, 0, 2.0), (6, 7, 0.5)]
    assert sorted(pairs_of(groups, "all")) == [
        (1, 0, 2.0),
        (1, 2, 1.0),
        (2, 0, 1.0),
        (3, 0, 2.0),
        (3, 2, 1.0),
        (6, 7, 0.5),
    ]


def test_rollouts_that_failed_or_sampled_nothing_to_learn_are_in_no_pair():
    group = make_group("a", [0.0, float("nan"), 1.0, 2.0])
    assert pairs_of([group]) == [(3, 0, 2.0)]
    batch = build_batch([group], CONFIG)
    cut = batch.with_zeros("loss_mask", np.array([True, False, False, True]))
    assert paired(cut, [group], "all").array("margin").tolist() == []


def test_rollouts_are_compared_with_those_of_their_agent_only():
    plays = make_plays("a", [("x", "", 1.0), ("y", "", 0.0)], [("x", "", 0.0), ("y", "", 3.0)])
    assert sorted(pairs_of([plays])) == [(0, 2, 1.0), (3, 1, 3.0)]


def run_loop(run, *, reward=even_share, pairs=4, **settings):
    written = {"num_prompts_per_step": 6, "num_generations_per_prompt": 4, "max_num_steps": 3} | settings
    config = online_dpo_section(written).model_validate(written)
    policy = FakeModel()
    source = FakeRolloutSource(PROMPTS, reward, num_generations=4)
    validation = Validation(PROMPTS[-7:], SamplingParams(max_new_tokens=3, temperature=0), config)
    steps = RolloutSteps(config, source, FakeWeights(policy), validation, run)
    objective = preference_objective(config, max_tokens=16)
    train(config, objective, policy=policy, steps=steps, pairs_per_minibatch=pairs)
    return policy


def test_each_step_trains_on_whole_pairs_and_syncs():
    run = FakeRun()
    policy = run_loop(run, max_num_steps=2)
    trained = [batch for name, batch in policy.calls if name == "train_step"]
    assert all(len(batch) <= 8 and len(batch) % 2 == 0 and "ref_logprobs" in batch for batch in trained)
    for batch in trained:
        assert PreferenceLoss(DPO()).totals(batch) == {"pairs": len(batch) / 2}
    assert [len([p for p in run.phases if p == name]) for name in ("generation", "weight_sync")] == [2, 3]
    assert run.metrics[1]["rollout/pairs"] == sum(len(batch) for batch in trained[: len(trained) // 2]) / 2
    assert {"train/loss", "reward/mean", "rollout/groups_without_signal"} <= set(run.metrics[1])


def test_a_step_without_pairs_makes_no_update():
    run = FakeRun()
    policy = run_loop(run, max_num_steps=1, reward=lambda prompt, tokens: 1.0)
    assert [name for name, _ in policy.calls if name == "train_step"] == []
    assert run.metrics[1]["rollout/pairs"] == 0


def test_parts_have_whole_pairs():
    batch = paired(
        build_batch([make_group(str(n), [0.0, 1.0]) for n in range(5)], CONFIG),
        [make_group(str(n), [0.0, 1.0]) for n in range(5)],
        "all",
    )
    assert [len(part) for part in parts_of(batch, 2)] == [4, 4, 2]


def config(**written):
    return SimpleNamespace(
        online_dpo=online_dpo_section(written).model_validate(written),
        data=DataConfig.model_validate({"train": {"data_path": "a.jsonl"}}),
    )


def test_the_entry_point_leads_to_the_loop():
    assert plugin(ALGORITHMS, "online_dpo") is PLUGIN
    assert isinstance(implementation_of(PLUGIN), OnlineDPO)


def test_best_of_n_is_the_likelihood_of_the_best_rollout_without_a_reference():
    settings = config(loss="cpo", preference_loss_weight=0.0)
    assert preference_loss_of(settings.online_dpo) == PreferenceLoss(CPO(), weight=0.0, sft_weight=1.0)
    assert not PLUGIN.models(settings)["policy"].spec.keeps_reference
    assert PLUGIN.models(config())["policy"].spec.keeps_reference
    assert list(check(settings)) == []


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"loss": "kto"}, "online_dpo.loss.name"),
        ({"loss": "simpo", "reference_sync_period": 2}, "online_dpo.reference_sync_period"),
        ({"loss": "nca", "f_divergence": "forward_kl"}, "online_dpo.f_divergence"),
        ({"rewritten_history": "split"}, "online_dpo.rewritten_history"),
    ],
)
def test_settings_that_pairs_of_rollouts_do_not_take_are_refused(written, key):
    assert [problem.key for problem in check(config(**written))] == [key]
