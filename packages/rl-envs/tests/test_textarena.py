"""Games of textarena: for one player and for two, saved and restored, and games that fail."""

import random

import numpy as np
import pytest

pytest.importorskip("textarena")

import textarena

from rl_core import Conversation, EnvironmentFailure
from rl_core.errors import ConfigError, DataError
from rl_core.testing.environment import EnvironmentSuite
from rl_envs import TextArenaConfig, TextArenaEnvironment
from rl_envs.textarena.dataset import load
from rl_envs.textarena.environment import Match

GUESS = {"id": "GuessTheNumber-v0", "config": {"min_number": 1, "max_number": 9, "max_turns": 20}}


def row(id, split="train", **settings):
    [found] = load({"id": id, "size": 1, **settings}, split)
    return found


def turn(info, text, id="game"):
    return Conversation(id, (), info, text)


def played(info, *moves):
    """Play moves one after the other, and return the last result."""
    environment, state = TextArenaEnvironment(TextArenaConfig()), None
    for move in moves:
        [result] = environment.step([turn(info, move)], [state])
        state = getattr(result, "state", None)
    return result


class TestEnvironment(EnvironmentSuite):
    def environment(self):
        return TextArenaEnvironment(TextArenaConfig())

    def conversations(self):
        info = row(**GUESS)["info"]
        return [turn(info, move, id=move) for move in ("nothing", *(f"[{number}]" for number in range(1, 10)))]


def test_a_game_for_one_player_is_won_by_the_right_move():
    made = row(**GUESS)
    assert made["environment"] == "textarena"
    assert "guess the number between 1 and 9" in made["messages"][0]["content"]
    results = {number: played(made["info"], f"[{number}]") for number in range(1, 10)}
    [number] = [number for number, result in results.items() if result.done]
    assert results[number].rewards() == {"reward": 1.0}
    assert results[number].info == {"moves": 1.0, "accuracy": 1.0}
    hints = {n: results[n].observation[0]["content"] for n in results if n != number}
    assert hints == {n: f"The target number is {'lower' if n > number else 'higher'}." for n in hints}
    assert all(result.agent == "" for result in results.values())


def test_two_players_see_their_own_prompt_and_what_the_other_did():
    made = row("TicTacToe-v0", num_players=2, instructions="Think first.")
    assert made["messages"][0]["content"].startswith("Think first.\n\nYou are Player 0")
    first = played(made["info"], "[4]")
    assert (first.agent, first.next_agent, first.done) == ("player_0", "player_1", False)
    [message] = first.observation
    assert message["content"].startswith("Think first.\n\nYou are Player 1")
    second = played(made["info"], "[4]", "[0]")
    assert (second.agent, second.next_agent) == ("player_1", "player_0")
    assert "Think first" not in second.observation[0]["content"], "what a player has seen is not repeated"
    assert "[4]" not in second.observation[0]["content"].split("\n")[0], "a player's own move is its turn already"
    won = played(made["info"], "[4]", "[0]", "[3]", "[1]", "[5]")
    assert (won.done, won.agent, won.rewards()["reward"]) == (True, "player_0", 1.0)
    assert won.agent_rewards == {"player_1": -1.0}


def test_starts_follow_from_the_seed_and_differ_between_splits():
    settings = {"id": "GuessTheNumber-v0", "size": 20}
    train, again, held_out = (load(settings, split) for split in ("train", "train", "validation"))
    assert train == again
    seeds = {split: {each["info"]["seed"] for each in rows} for split, rows in (("t", train), ("v", held_out))}
    assert len(seeds["t"]) == 20
    assert not seeds["t"] & seeds["v"]


def test_games_draw_from_numbers_of_their_own_and_leave_others_theirs():
    info = row("Bandit-v0")["info"]
    random.seed(1), np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1), np.random.seed(1)
    moves = ["[red]", "[blue]", "[red]"]
    alone, one, other = Match(**info), Match(**info), Match(**{**info, "seed": 5})
    for match in (alone, one, other):
        match.observation()
    heard = []
    for move in moves:
        alone.move(move)
        heard.append(alone.observation())
    for move, said in zip(moves, heard, strict=True):
        other.move(move)
        one.move(move)
        assert one.observation() == said
        other.observation()
    assert (random.random(), np.random.random()) == expected


class Raising(textarena.Env):
    def __init__(self, when):
        self._when = when

    def reset(self, num_players, seed=None):
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed)
        if self._when == "start":
            raise LookupError("no words")
        self.state.reset(game_state={}, player_prompt_function=lambda **_: "Go.")

    def step(self, action):
        if self._when == "end":
            return True, {}
        raise UnboundLocalError("player_guess")

    def close(self):
        return {1: 1.0}, {}


def test_a_game_that_raises_fails_its_own_rollout():
    textarena.envs.registration.register("Raising-v0", Raising)
    infos = [row("Raising-v0", config={"when": when})["info"] for when in ("later", "end")]
    other = row(**GUESS)["info"]
    *failed, unharmed = TextArenaEnvironment(TextArenaConfig()).step(
        [*(turn(info, "go", id=f"a{at}") for at, info in enumerate(infos)), turn(other, "none", id="b")], [None] * 3
    )
    assert failed == [
        EnvironmentFailure("Raising-v0 raised UnboundLocalError: player_guess", "raised"),
        EnvironmentFailure("Raising-v0 gave no reward to player 0, who ended it", "raised"),
    ]
    assert not unharmed.done
    with pytest.raises(ConfigError, match="Raising-v0 raised LookupError: no words"):
        row("Raising-v0", config={"when": "start"})


def test_what_cannot_be_played_is_refused():
    with pytest.raises(ConfigError, match="textarena has no game TicTacTo-v0; did you mean TicTacToe-v0"):
        row("TicTacTo-v0")
    with pytest.raises(ConfigError, match=r"TicTacToe-v0 raised"):
        row("TicTacToe-v0", num_players=1)
    with pytest.raises(DataError, match="the splits train and validation, got 'test'"):
        row("TicTacToe-v0", split="test")
    with pytest.raises(ValueError, match=r"lacks \['config', 'id', .*must come from the dataset textarena"):
        played({"answer": "3"}, "[3]")


def test_demonstrations_are_whole_games_of_random_moves():
    moves = ["[1]", "[2]", "[3]"]
    config = {"min_number": 1, "max_number": 3, "max_turns": 4}
    rows = load({"id": "GuessTheNumber-v0", "config": config, "demonstrations": moves, "size": 20}, "train")
    said = [[each["content"] for each in row["messages"] if each["role"] == "assistant"] for row in rows]
    assert {move for game in said for move in game} == set(moves)
    for row, game in zip(rows, said, strict=True):
        assert row["messages"][-1]["role"] == "assistant"
        match = Match(**row["info"])
        assert match.observation()[1] == row["messages"][0]["content"]
        ends = [match.move(move) for move in game]
        assert [end is not None for end in ends] == [False] * (len(game) - 1) + [True]
    with pytest.raises(ConfigError, match="games of one player"):
        load({"id": "TicTacToe-v0", "num_players": 2, "demonstrations": ["[0]"], "size": 1}, "train")
