"""Changes between two configs."""

from collections.abc import Callable
from typing import Any

from rl_core.config import ABSENT, Change, Resolved, diff

Run = Callable[..., Resolved[Any]]


def test_equal_configs_have_no_changes(run: Run) -> None:
    assert diff(run().config, run(overrides=["grpo.seed=42"]).config) == []


def test_each_changed_key_is_listed_with_both_values(run: Run) -> None:
    changes = diff(
        run().config, run(overrides=["grpo.seed=7", "env.math.num_workers=2", "policy.overrides.a=1"]).config
    )
    assert changes == [
        Change("grpo.seed", 42, 7),
        Change("policy.overrides.a", ABSENT, 1),
        Change("env.math", ABSENT, {"num_workers": 2, "timeout": 10.0}),
    ]
    assert [str(change) for change in changes[:2]] == ["grpo.seed: 42 -> 7", "policy.overrides.a: (not there) -> 1"]


def test_lists_of_sections_differ_by_key_and_other_lists_as_a_whole(run: Run) -> None:
    old = run(overrides=["data.train=[{dataset_name: a}]", "policy.generation.stop_strings=[x]"]).config
    new = run(overrides=["data.train=[{dataset_name: b}]", "policy.generation.stop_strings=[y]"]).config
    assert diff(old, new) == [
        Change("policy.generation.stop_strings", ["x"], ["y"]),
        Change("data.train[0].dataset_name", "a", "b"),
    ]


def test_a_change_of_type_alone_is_a_change(run: Run) -> None:
    old, new = (run(overrides=[f"policy.overrides.a={value}"]).config for value in ("1", "true"))
    assert diff(old, new) == [Change("policy.overrides.a", 1, True)]
