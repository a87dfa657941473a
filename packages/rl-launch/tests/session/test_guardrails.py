import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import counting_run as counting
import pytest

from rl_core.errors import ConfigError, RLError
from rl_launch.commands.train import findings, guarded, limited
from rl_launch.run_config.reading import changed_plan, read_plan
from rl_launch.run_session import RunSession
from rl_launch.run_session.config import GuardrailConfig
from rl_launch.run_session.guardrails import (
    FILE,
    FOUND_METRICS,
    GuardrailEvent,
    GuardrailRestart,
    Guardrails,
    GuardrailStop,
    changed_value,
    changes_of,
    read_events,
)
from rl_launch.show.advice import acted


def watched(tmp_path, rule, values, *, findings=lambda rows: []):
    """Return the step and the onset of the first action, if there is one."""
    guardrails = Guardrails({"rule": GuardrailConfig.model_validate({"metric": "m", **rule})}, tmp_path, findings)
    guardrails.start([])
    for step, value in enumerate(values, start=1):
        event = guardrails.after_step(step, {} if value is None else {"m": value})
        if event is not None:
            return event.step, event.onset
    return None


STOP = {"action": "stop"}


@pytest.mark.parametrize(
    ("rule", "values", "found"),
    [
        ({"above": 1.0, "patience": 1}, [0, 1, 1.5], (3, 3)),
        ({"above": 1.0, "patience": 2}, [2, 0, 2, 0, 2, 3], (6, 5)),
        ({"below": 0.0}, [-1, -1, 0, -1, -1, -1], (6, 4)),
        # Steps without the metric neither break a rule nor keep it.
        ({"above": 1.0, "patience": 2}, [2, None, None, 2], (4, 1)),
        ({"above": 1.0, "patience": 1}, [0, math.nan], (2, 2)),
        ({"below": 1.0, "patience": 1}, [2, math.inf, -math.inf], (3, 3)),
        # The best mean of two steps is 0.85, so the bound is 0.35.
        ({"falls_by": 0.5, "patience": 2}, [0.8, 0.9, 0.4, 0.3, 0.4, 0.3, 0.2], (7, 6)),
        ({"falls_by": 0.5, "patience": 2}, [0.1, 0.1], None),
        ({"rises_by": 1.0, "patience": 1}, [3, 2, 2.9, 3.1], (4, 4)),
    ],
)
def test_a_rule_is_broken_by_steps_in_a_row(tmp_path, rule, values, found):
    assert watched(tmp_path, {**STOP, **rule}, values) == found


def test_a_rule_without_a_bound_is_broken_by_a_finding_of_rl_show(tmp_path):
    def findings(rows):
        return [("m", "it collapsed")] if rows[-1]["m"] == 0 else [("other", "no")]

    rule = {**STOP, "patience": 2}
    assert watched(tmp_path, rule, [1, 0, 1, 0, 0], findings=findings) == (5, 4)
    assert watched(tmp_path, {"action": "warn", "patience": 1}, [0, 0, 0], findings=findings) is None


def test_a_warning_comes_once_until_the_metric_recovers(tmp_path, caplog):
    watched(tmp_path, {"above": 1, "patience": 1}, [2, 2, 2, 0, 2])
    said = [record.message for record in caplog.records]
    assert said == ["guardrail rule: m was above 1, the last time 2"] * 2


def test_a_rule_that_has_acted_often_enough_only_warns(tmp_path, caplog):
    rule = GuardrailConfig(metric="m", above=1, patience=1, action="rollback", max_actions=2)
    for _ in range(2):
        guardrails = Guardrails({"rule": rule}, tmp_path, lambda rows: [])
        guardrails.start([])
        event = guardrails.after_step(1, {"m": 2})
        guardrails.note(replace(event, change={"a.b": 1}))
    assert Guardrails({"rule": rule}, tmp_path, lambda rows: []).after_step(1, {"m": 2}) is None
    assert "it only warns now, because it has acted 2 times" in caplog.text
    assert [event.change for event in read_events(tmp_path)] == [{"a.b": 1}] * 2


def test_a_rule_that_stops_a_run_does_so_however_often_it_is_resumed(tmp_path):
    rule = {"rule": GuardrailConfig(metric="m", above=1, patience=1, action="stop")}
    for _ in range(5):
        guardrails = Guardrails(rule, tmp_path, lambda rows: [])
        event = guardrails.after_step(1, {"m": 2})
        assert event is not None
        guardrails.note(event)


def test_a_record_of_completions_is_refused_where_nothing_is_sampled():
    with pytest.raises(ConfigError, match=r"logger\.replay_enabled.*samples nothing"):
        read_plan({"defaults": "sft-arithmetic", "logger": {"replay_enabled": True}})


def test_a_record_that_cannot_be_read_is_one_message_with_the_remedy(tmp_path):
    (tmp_path / FILE).write_text('[{"rule": 1}]')
    with pytest.raises(RLError, match="restore it, or remove it to resume the run without them"):
        read_events(tmp_path)


def test_a_change_is_a_value_or_a_factor():
    assert changed_value("x0.5", 3e-4, "lr") == 1.5e-4
    assert changed_value("x0.5", 7, "n") == 4
    assert changed_value("x-large", "small", "size") == "x-large"
    assert changed_value(2, 7, "n") == 2
    with pytest.raises(RLError, match="multiplies size by 2, but its value is 'small'"):
        changed_value("x2", "small", "size")
    event = GuardrailEvent("a", "m", "rollback", 3, 2, "", 1, {"x": 1, "y": 1})
    assert changes_of([event, replace(event, change={"y": 2})]) == {"x": 1, "y": 2}


def run(run_dir, rule, settings=None, **loop):
    settings = settings or counting.config()
    rules = {"rule": GuardrailConfig.model_validate({"metric": "watched", "above": 0, "patience": 2, **rule})}
    guardrails = Guardrails(rules, run_dir, lambda rows: [])
    original = counting.RunSession
    try:
        counting.RunSession = partial(RunSession, guardrails=guardrails)
        return counting.run(run_dir, settings, **loop)
    finally:
        counting.RunSession = original


def bad_from(first, metric="watched"):
    return lambda session, step: session.record(step, {metric: float(step >= first)})


def test_a_stopped_run_is_saved_and_resumes_without_the_rule(tmp_path):
    with pytest.raises(GuardrailStop, match=r"ends after step 5.*guardrails\.rule"):
        run(tmp_path / "run", {"action": "stop"}, at_step=bad_from(4))
    assert json.loads((tmp_path / "run/state.json").read_text())["saved"] == 5
    counting.run(tmp_path / "run", counting.config())
    counting.run(tmp_path / "whole", counting.config())
    found, whole = counting.metrics(tmp_path / "run"), counting.metrics(tmp_path / "whole")
    assert [row["train/loss"] for row in found] == [row["train/loss"] for row in whole]


def test_a_rollback_goes_to_the_newest_checkpoint_before_the_onset(tmp_path):
    with pytest.raises(GuardrailRestart) as restart:
        run(tmp_path / "run", {"action": "rollback", "patience": 3}, at_step=bad_from(4))
    event = restart.value.event
    assert (event.step, event.onset, event.resumes_after) == (6, 4, 2)
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["rolled_back_step_4", "step_2"]
    # The steps are made again from there, as they were.
    counting.run(tmp_path / "run", counting.config())
    counting.run(tmp_path / "whole", counting.config())
    found, whole = counting.metrics(tmp_path / "run"), counting.metrics(tmp_path / "whole")
    assert [row["train/loss"] for row in found] == [row["train/loss"] for row in whole]


def test_a_rule_that_breaks_again_in_the_same_steps_goes_back_behind_its_checkpoint(tmp_path):
    rule, folder, went_back_to = {"action": "rollback", "max_actions": 9}, tmp_path / "run", []
    for first in (7, 7, 7, 10):
        with pytest.raises(GuardrailRestart) as restart:
            run(folder, rule, counting.config(12, keep_top_k=None), at_step=bad_from(first))
        Guardrails({"rule": GuardrailConfig(metric="watched")}, folder, lambda rows: []).note(restart.value.event)
        went_back_to.append(restart.value.event.resumes_after)
    # There is nothing before step 2, and a fault of later steps is another one.
    assert went_back_to == [4, 2, 2, 8]


@pytest.mark.parametrize(("metric", "checkpoint"), [("watched", 2), ("val/watched", 4), ("eval/watched", 4)])
def test_a_rollback_leaves_out_the_checkpoint_whose_weights_broke_the_rule(tmp_path, metric, checkpoint):
    with pytest.raises(GuardrailRestart) as restart:
        run(tmp_path / "run", {"action": "rollback", "metric": metric}, at_step=bad_from(5, metric))
    assert (restart.value.event.onset, restart.value.event.resumes_after) == (5, checkpoint)


def test_a_rollback_without_a_checkpoint_before_the_onset_ends_the_run(tmp_path):
    with pytest.raises(GuardrailStop, match=r"no checkpoint before step 0 .*checkpointing.keep_top_k"):
        run(tmp_path / "run", {"action": "rollback"}, at_step=bad_from(1))


def test_the_age_of_rollouts_is_lowered_as_long_as_there_is_one(tmp_path):
    rule = {"metric": "mismatch/kl", "above": 1, "action": "lower_staleness", "max_actions": 5}
    age = {"enabled": True, "max_trajectory_age_steps": 1}
    apart = {"colocated": {"enabled": False, "resources": {"gpus_per_node": 1}}}
    plan = read_plan(
        {
            "defaults": "grpo-arithmetic",
            "guardrails": {"old": rule},
            "grpo": {"async_grpo": age},
            "policy": {"generation": apart},
            "loss_fn": {"importance": {"high": 2}},
        }
    )
    assert limited(plan.config, tmp_path)["old"].max_actions == 1
    event = GuardrailEvent("old", "mismatch/kl", "lower_staleness", 3, 2, "", 3, {"a": 0})
    (tmp_path / FILE).write_text(json.dumps([vars(event)]))
    changed = changed_plan(plan, {"grpo.async_grpo.max_trajectory_age_steps": 0}, "old")
    assert limited(changed.config, tmp_path)["old"].max_actions == 1


def test_actions_are_shown_first(tmp_path):
    event = GuardrailEvent("spike", "train/loss", "rollback", 7, 5, "train/loss was above 3", 4, {"policy.lr": 1})
    Guardrails({"spike": GuardrailConfig(metric="train/loss")}, tmp_path, lambda rows: []).note(event)
    (found,) = acted(tmp_path)
    assert found.found == "guardrail spike: train/loss was above 3; the run went back to step_4 after step 7"
    assert found.remedy == "its config has since policy.lr=1"
    assert acted(tmp_path / "other") == []


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"metric": "a", "above": 1, "action": "stop", "change": {"grpo.seed": 1}}, "has no effect with action stop"),
        ({"metric": "a", "above": 1, "below": 2}, "is broken by every value: above is 1 and below is 2"),
        ({"metric": "a", "above": float("nan")}, "has a bound that is not a number"),
        ({"metric": "train/loss"}, "no finding of rl show is about its metric"),
        ({"metric": "a", "above": 1, "action": "skip_step"}, "only train/grad_norm is known"),
        ({"metric": "a", "above": 1, "action": "lower_staleness"}, "needs rollouts that are older"),
        ({"metric": "a", "action": "rollback", "change": {"policy.lr": 1}}, "'policy.lr', which is not a key"),
        ({"metric": "a", "action": "rollback", "change": {"cluster.num_nodes": 2}}, "cannot change cluster.num_nodes"),
        ({"metric": "a", "action": "rollback", "change": {"policy.lora_cfg": {"dim": 2}}}, "which needs a new run"),
        ({"metric": "a", "action": "rollback", "change": {"policy.precision": "x2"}}, "whose value is 'float32'"),
    ],
)
def test_a_rule_that_cannot_act_is_refused(written, message):
    with pytest.raises(ConfigError, match=message):
        read_plan({"defaults": "grpo-arithmetic", "guardrails": {"rule": written}})


def test_a_change_that_the_config_refuses_is_found_before_the_run_begins(tmp_path):
    rule = {"metric": "a", "above": 1, "action": "rollback", "change": {"policy.max_grad_norm": -1}}
    plan = read_plan({"defaults": "sft-arithmetic", "guardrails": {"rule": rule}})
    with pytest.raises(ConfigError, match=r"policy\.max_grad_norm"):
        guarded(plan, tmp_path)


def test_a_metric_that_no_step_has_is_named_once_with_similar_ones(tmp_path, caplog):
    metrics = ("reward/maen", "reward/mean", "val/accuracy", "eval/accuracy")
    rules = {metric: GuardrailConfig(metric=metric, below=-1) for metric in metrics}
    guardrails = Guardrails(rules, tmp_path, lambda rows: [])
    guardrails.start([{"step": 1, "reward/mean": 0.0}])
    for step in range(2, 40):
        guardrails.after_step(step, {"reward/mean": 0.0, **({"val/loss": 1.0} if step == 30 else {})})
    assert [record.message for record in caplog.records] == [
        "guardrail reward/maen does nothing: none of 10 steps has the metric reward/maen (similar ones: reward/mean)",
        "guardrail val/accuracy does nothing: none of 30 steps has the metric val/accuracy (similar ones: none)",
    ]


def test_a_bound_of_skipped_steps_reaches_the_trainer(tmp_path):
    rule = {"metric": "train/grad_norm", "above": 8, "action": "skip_step"}
    plan = read_plan({"defaults": "sft-arithmetic", "guardrails": {"spike": rule}})
    assert guarded(plan, tmp_path).config.policy.skipped_grad_norm == 8


def test_changes_of_a_run_hold_when_it_is_resumed(tmp_path):
    plan = read_plan({"defaults": "sft-arithmetic"})
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("policy:\n  optimizer:\n    kwargs: {lr: 0.1}\n")
    events = [GuardrailEvent("a", "m", "rollback", 3, 2, "", 1, {"policy.optimizer.kwargs.lr": 0.05})]
    (tmp_path / FILE).write_text(json.dumps([vars(event) for event in events]))
    assert guarded(plan, tmp_path).config.policy.optimizer.kwargs["lr"] == 0.05
    assert "lr: 0.05" in (tmp_path / "config.yaml").read_text()


RECORDED = json.loads((Path(__file__).parent / "recorded_metrics.json").read_text())
"""Metrics of the first 50 steps of tiny recipes that learn, and of a run with a learning rate that destroyed it."""


@pytest.mark.parametrize("name", RECORDED)
def test_rules_without_a_bound_act_on_a_run_that_collapsed_and_on_none_that_learned(tmp_path, name):
    recorded = RECORDED[name]
    config = {recorded["section"]: {"num_prompts_per_step": recorded["num_prompts_per_step"]}}
    rows = []
    for values in zip(*recorded["metrics"].values(), strict=True):
        rows.append({key: value for key, value in zip(recorded["metrics"], values, strict=True) if value is not None})
    event = first_event(tmp_path, rows, config)
    assert (None if event is None else event.rule) == ("reward/mean" if name == "collapsed" else None)
    if event is not None:
        assert "the run collapsed: reward/mean was 0.688 at step 7" in event.reason


def first_event(tmp_path, rows, config):
    """Return the first action of rules on all metrics that need no bound; None if they are kept."""
    rules = {metric: GuardrailConfig(metric=metric, action="stop") for metric in FOUND_METRICS}
    guardrails = Guardrails(rules, tmp_path, lambda rows: findings(rows, config, of_changes=True))
    guardrails.start([])
    events = (guardrails.after_step(step, row) for step, row in enumerate(rows, start=1))
    return next(filter(None, events), None)


FAULTS = {
    "reward/mean": {"reward/mean": (0.5, 0.0), "reward/std": (0.5, 0.0), "rollout/groups_without_signal": (8, 64)},
    "policy/nll": {"policy/nll": (0.8, 0.02)},
    "policy/kl": {"policy/kl": (0.01, 0.6)},
    "policy/clipped": {"policy/clipped": (0.02, 0.7)},
    "val/loss": {"val/loss": (1.0, 1.5)},
    "mismatch/kl": {"mismatch/kl": (0.0002, 0.1)},
    "mismatch/effective_sample_size": {"mismatch/effective_sample_size": (0.97, 0.1)},
    "train/skipped_steps": {"train/skipped_steps": (0, 1)},
    "rollout/failed": {"rollout/failed": (0, 200)},
    "rollout/truncated": {"rollout/truncated": (0.01, 0.5)},
    "idle/trainer": {"idle/trainer": (0.02, 0.8)},
    "speculation/tokens_per_step": {"speculation/tokens_per_step": (2.5, 1.1)},
    "speculation/acceptance_rate": {"speculation/acceptance_rate": (0.8, 0.1)},
}
"""For each rule, its metrics in steps without the fault and with it."""


@pytest.mark.parametrize("metric", FOUND_METRICS)
def test_each_rule_without_a_bound_acts_first_on_a_run_with_its_own_fault(tmp_path, metric):
    speculation = {"model": "drafter", "min_tokens_per_step": 1.5}
    config = {
        "grpo": {"num_prompts_per_step": 64, "num_generations_per_prompt": 8},
        "policy": {"generation": {"vllm_cfg": {"speculation": speculation}}},
    }
    healthy = {name: good for fault in FAULTS.values() for name, (good, _) in fault.items()}
    rows = [{"step": step, **healthy} for step in range(1, 61)]
    assert first_event(tmp_path, rows, config) is None
    for row in rows[29:]:
        row.update({name: bad for name, (_, bad) in FAULTS[metric].items()})
    event = first_event(tmp_path, rows, config)
    assert event.rule == metric
    assert event.onset >= 30


def test_single_rollouts_that_fail_break_no_rule(tmp_path):
    config = {"grpo": {"num_prompts_per_step": 64, "num_generations_per_prompt": 8}}
    rows = [{"step": step, "rollout/failed": float(step % 3)} for step in range(1, 40)]
    assert first_event(tmp_path, rows, config) is None
