"""Config keys that are written as options are answered with the override."""

import pytest
from typer.testing import CliRunner

from rl_core.testing.exhaustive import partly_exhaustive
from rl_launch.cli import app

CASES = {
    "a key": (["train", "sft-arithmetic", "--sft.max_num_steps=3"], "sft.max_num_steps=3"),
    "a key with its value apart": (["train", "sft-arithmetic", "--sft.max_num_steps", "3"], "sft.max_num_steps=3"),
    "the end of a key": (["train", "sft-arithmetic", "--max_num_steps", "3"], "sft.max_num_steps=3"),
    "dashes in a name": (["train", "sft-arithmetic", "--sft.max-num-steps=3"], "sft.max_num_steps=3"),
    "one dash": (["train", "sft-arithmetic", "-sft.seed=3"], "sft.seed=3"),
    "another command": (["config", "show", "grpo-arithmetic", "--lr=1e-4"], "policy.optimizer.kwargs.lr=1e-4"),
    "a group with a default command": (["doctor", "sft-arithmetic", "--sft.seed=3"], "sft.seed=3"),
}


@pytest.mark.parametrize("name", partly_exhaustive(CASES, always=("a key", "the end of a key", "another command")))
def test_a_key_as_an_option_is_answered_with_the_override(name):
    words, override = CASES[name]
    answer = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert answer.exit_code == 2
    assert f"Config keys are written without dashes: {override} " in answer.output


@pytest.mark.parametrize("words", [["--resume"], ["--frsh"], ["--fresh=3"]])
def test_other_unknown_options_are_not_taken_for_keys(words):
    answer = CliRunner().invoke(app, ["train", "sft-arithmetic", *words], env={"COLUMNS": "200"})
    assert answer.exit_code == 2
    assert "without dashes" not in answer.output
