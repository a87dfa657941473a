"""Recipes of games, and of several environments in one run."""

import pytest

from rl_algos.rollouts.config import rollout_config
from rl_core.environments.instance import instance_of
from rl_launch.run_config.reading import read_plan

RECIPES = {
    # recipe: environments of its training data; None for rows that name theirs
    "grpo-sliding-puzzle": [None],
    "grpo-multi-env": ["math", None, None],
    "grpo-multi-env-tiny": ["small", "large"],
}


def resolved(recipe):
    return read_plan(recipe, ["cluster.device=cpu"] if recipe.endswith("tiny") else []).config


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_dataset_has_its_environment(recipe):
    config = resolved(recipe)
    assert [dataset.env_name for dataset in config.data.train_datasets] == RECIPES[recipe]
    for dataset in (*config.data.train_datasets, *config.data.validation_datasets):
        # a game's rows name the environment that has the dataset's name
        name = dataset.env_name or dataset.dataset_name
        assert instance_of(config.env, name).name == name


@pytest.mark.parametrize("recipe", ["grpo-sliding-puzzle", "grpo-multi-env"])
def test_a_rollout_has_as_many_turns_as_a_game(recipe):
    config = resolved(recipe)
    turns = rollout_config(config).max_rollout_turns
    assert config.env.sliding_puzzle.max_moves <= turns
    longest = {dataset.dataset_name: dataset.settings for dataset in config.data.train_datasets}
    assert longest["sliding_puzzle"]["max_moves"] <= config.env.sliding_puzzle.max_moves
    if "guess_number" in longest:
        assert config.env.guess_number.max_guesses <= turns


def test_one_type_has_two_environments_with_settings_of_their_own():
    config = resolved("grpo-multi-env-tiny")
    small, large = (instance_of(config.env, name) for name in ("small", "large"))
    assert small.environment == large.environment
    assert (small.config.num_workers, large.config.num_workers) == (1, None)
