import dataclasses
import logging

import numpy as np
import pytest

from rl_algos.rollouts.driver.watches import REPORT_EVERY, FailureWatch
from rl_core.errors import RolloutsFailed
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt, Rollout

PROMPT = Prompt("p7", (), np.array([1], np.int32), "math", place="prompts.jsonl, line 8")
GOOD = Rollout("p7", *[np.zeros(1)] * 3, (), (), {"reward": 1.0}, "stop")


def groups(*failures):
    """Groups of one rollout each; an empty failure is a good one."""
    return [RolloutGroup.of(PROMPT, (Rollout.failed(PROMPT, failure) if failure else GOOD,)) for failure in failures]


def test_a_share_that_is_allowed_passes_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        FailureWatch(0.5).check(groups("hung", ""))
    assert caplog.messages == ["1 of 2 rollouts failed and do not train: 1 x hung"]
    FailureWatch(0.0).check([])


def test_a_play_of_several_rollouts_counts_once():
    good = [dataclasses.replace(GOOD, agent=agent, play=0) for agent in ("first", "second")]
    failed = dataclasses.replace(Rollout.failed(PROMPT, "hung"), play=1)
    with pytest.raises(RolloutsFailed, match="1 of 2 rollouts failed, more than"):
        FailureWatch(0.4).check([RolloutGroup.of(PROMPT, [*good, failed])])


def test_past_it_the_reasons_are_counted_and_one_row_is_named():
    reasons = ["EnvironmentFailed: the verifier hung"] * 3 + ["RequestRefused: no room"] * 2 + [""]
    with pytest.raises(RolloutsFailed) as caught:
        FailureWatch(0.5, section="grpo").check(groups(*reasons))
    said = str(caught.value)
    assert said.startswith("5 of 6 rollouts failed, more than grpo.max_failed_share=0.5 allows: ")
    assert "3 x EnvironmentFailed: the verifier hung; 2 x RequestRefused: no room." in said
    assert said.endswith("For example, prompts.jsonl, line 8: EnvironmentFailed: the verifier hung")


def test_a_call_whose_rollouts_all_failed_ends_the_run_whatever_is_allowed():
    with pytest.raises(RolloutsFailed, match="2 of 2 rollouts failed, so there is nothing to train on: 2 x hung"):
        FailureWatch(1.0).check(groups("hung", "hung"))


def test_many_reasons_are_cut_short():
    with pytest.raises(RolloutsFailed, match="1 x reason e; and 3 other reasons"):
        FailureWatch(0.0).check(groups(*[f"reason {letter}" for letter in "abcdefgh"]))


def test_failures_that_differ_in_values_alone_are_counted_as_one_cause():
    failures = [f"raised KeyError: '{key}' (at reward.py:4)" for key in "abc"]
    with pytest.raises(
        RolloutsFailed, match=r"nothing to train on: 3 x raised KeyError: 'a' \(at reward\.py:4\)\. For"
    ):
        FailureWatch(0.5).check(groups(*failures))


def test_a_cause_is_told_of_at_once_then_when_its_failures_double_with_all_of_them_counted(caplog):
    watch = FailureWatch(0.9)
    with caplog.at_level(logging.WARNING):
        for step in range(9):
            # a value in the message is not another cause
            watch.check(groups(f"raised ValueError: invalid literal: 'x{step}' (at reward.py:3)", ""))
    reason = "raised ValueError: invalid literal: 'x{}' (at reward.py:3)"
    assert caplog.messages == [
        f"1 of 2 rollouts failed and do not train: 1 x {reason.format(step)}{so_far}"
        for step, so_far in [
            (0, ""),
            *(
                (step, f". Since the start {step + 1} of {2 * step + 2}: {step + 1} x {reason.format(0)}")
                for step in (1, 3, 7)
            ),
        ]
    ]


def test_another_cause_is_told_of_at_once(caplog):
    watch = FailureWatch(0.9)
    for failure in ("raised", "raised", "raised", "hung"):
        watch.check(groups(failure, ""))
    assert caplog.messages[-1] == (
        "1 of 2 rollouts failed and do not train: 1 x hung. Since the start 4 of 8: 3 x raised; 1 x hung"
    )


def test_a_rare_cause_is_told_of_again_after_some_calls(caplog):
    watch = FailureWatch(0.9)
    watch.check(groups("hung", "hung", "hung", ""))
    for _ in range(REPORT_EVERY - 1):
        watch.check(groups("", ""))
    watch.check(groups("hung", ""))
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith("Since the start 4 of 24: 4 x hung")
