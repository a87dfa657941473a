"""The environment `gymnasium` and its dataset: games by name, and one that is played in sentences."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest

from rl_core.errors import ConfigError, DataError
from rl_core.plugins import DATASETS, ENVIRONMENTS, plugin
from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_core.testing.environment import EnvironmentSuite
from rl_envs.gymnasium import dataset
from rl_envs.gymnasium.dataset import load
from rl_envs.gymnasium.environment import GymnasiumEnvironment
from rl_envs.gymnasium.plugin import GymnasiumConfig

LAKE: dict[str, Any] = {
    "id": "FrozenLake-v1",
    "config": {"is_slippery": False, "desc": ["SF", "HG"]},
    "actions": ["left", "down", "right", "up"],
    "instructions": "Walk from S to G, and into no hole H.",
    "size": 2,
}


class Greeting(gymnasium.Env[str, str]):
    """Wants to hear the word that it says."""

    action_space = gymnasium.spaces.Text(max_length=8)
    observation_space = gymnasium.spaces.Text(max_length=20)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = str(self.np_random.choice(["hello", "servus", "ahoj"]))
        return f"Say {self.word}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "No.", float(action == self.word), action == self.word, False, {}


gymnasium.register("Greeting-v0", entry_point=Greeting, max_episode_steps=2)


def play(row: dict[str, Any], *completions: str, **config: Any) -> list[StepResult]:
    game = GymnasiumEnvironment(GymnasiumConfig(**config))
    results: list[StepResult] = []
    for completion in completions:
        state = results[-1].state if results else None
        results += game.step([Conversation("0", (), row["info"], completion)], [state])
    return results


class TestGymnasiumConformance(EnvironmentSuite):
    def environment(self) -> GymnasiumEnvironment:
        return GymnasiumEnvironment(GymnasiumConfig(invalid_reward=-0.5))

    def conversations(self) -> list[Conversation]:
        row = load(LAKE, "train")[0]
        return [Conversation(text, (), row["info"], text) for text in ("right", "down", "swim")]


def test_a_prompt_has_the_rules_and_the_start_with_the_highlighted_place_in_brackets() -> None:
    [content] = {row["messages"][0]["content"] for row in load(LAKE, "train")}
    assert content == (
        "Walk from S to G, and into no hole H.\n\n"
        "Each turn, write one of these actions: left, down, right, up.\n\n"
        "[S]F\nHG"
    )


def test_a_game_that_is_solved_is_rewarded_at_its_last_action() -> None:
    first, last = play(load(LAKE, "train")[0], "To the left or RIGHT", "down")
    assert (first.reward, first.done, first.info) == (0.0, False, {"accuracy": 0.0})
    assert "S[F]\nHG" in first.observation[0]["content"]
    assert (last.reward, last.done, last.info) == (1.0, True, {"accuracy": 1.0})


def test_a_lost_game_ends_unsolved() -> None:
    [result] = play(load(LAKE, "train")[0], "down")
    assert (result.reward, result.done, result.info) == (0.0, True, {"accuracy": 0.0})


def test_a_turn_without_an_action_leaves_the_game_as_it_is() -> None:
    first, *_, last = play(load(LAKE, "train")[0], "upright", "right", "down", invalid_reward=-0.1)
    assert first.reward == -0.1
    assert not first.done
    assert "left, down, right, up" in first.observation[0]["content"]
    assert "[S]F" in first.observation[0]["content"]
    assert last.reward == 1.0


def test_a_game_is_over_at_its_limit_of_actions() -> None:
    row = load({**LAKE, "config": {**LAKE["config"], "max_episode_steps": 2}}, "train")[0]
    assert [result.done for result in play(row, "up", "up")] == [False, True]


def test_without_words_actions_are_numbers() -> None:
    settings = {key: value for key, value in LAKE.items() if key != "actions"}
    row = load(settings, "train")[0]
    assert "0, 1, 2, 3" in row["messages"][0]["content"]
    assert play(row, "2", "1")[-1].reward == 1.0


def test_a_game_of_texts_is_given_the_turn_and_starts_by_its_seed() -> None:
    rows = load({"id": "Greeting-v0", "size": 20}, "train")
    said = [row["messages"][0]["content"].rpartition("Say ")[2] for row in rows]
    assert len(set(said)) == 3
    for row, word in zip(rows, said, strict=True):
        [result] = play(row, f" {word}\n")
        assert (result.reward, result.done) == (1.0, True)
    assert not play(rows[0], "this is too long")[0].done


def test_the_splits_start_apart_and_a_seed_repeats() -> None:
    def seeds(split: str, seed: int = 0) -> list[int]:
        return [row["info"]["seed"] for row in load({**LAKE, "seed": seed}, split)]

    assert seeds("train") == seeds("train")
    assert len({*seeds("train"), *seeds("validation"), *seeds("train", 1)}) == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "FrozenLak-v1"}, "FrozenLake"),
        ({"id": "Pendulum-v1"}, "only Discrete and Text"),
        ({"id": "FrozenLake-v1", "actions": ["left"]}, "1 words"),
        ({"id": "FrozenLake-v1", "config": {"slippery": True}}, "slippery"),
        ({"id": "no_such_package:Game-v0"}, "no_such_package"),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(settings, "train")


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"gymnasium is not installed: .*rl-envs\[gymnasium\]"):
        load(LAKE, "train")


def test_an_unknown_split_and_rows_of_another_dataset_are_refused() -> None:
    with pytest.raises(DataError, match="train and validation"):
        load(LAKE, "test")
    with pytest.raises(UnusableAnswer, match="must come from the dataset gymnasium"):
        play({"info": {"id": "FrozenLake-v1"}}, "left")


def test_both_are_found_by_name() -> None:
    assert plugin(ENVIRONMENTS, "gymnasium").config is GymnasiumConfig
    assert plugin(DATASETS, "gymnasium").load == "rl_envs.gymnasium.dataset:load"


def test_a_stochastic_game_resumes_where_it_was() -> None:
    settings = {"id": "FrozenLake-v1", "config": {"is_slippery": True, "desc": ["SFFF"] * 4}, "size": 1}
    [row] = load(settings, "train")

    def play(environment: GymnasiumEnvironment, state: Any, actions: str) -> tuple[list[str], Any]:
        seen = []
        for action in actions:
            [result] = environment.step([Conversation("a", (), row["info"], action)], [state])
            seen.append(result.observation[0]["content"])
            state = result.state
        return seen, state

    environment = GymnasiumEnvironment(GymnasiumConfig())
    whole, _ = play(environment, None, "123123123123")
    assert len(set(whole)) > 4
    begun, state = play(environment, None, "123123")
    [restored] = environment.restore([data for data in environment.save([state]) if data])
    assert begun + play(environment, restored, "123123")[0] == whole
