"""The games and their datasets."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from rl_core.errors import ConfigError, DataError
from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_core.testing.environment import EnvironmentSuite
from rl_envs.games.dataset import numbers, piles, proposed_sums, sliding_puzzles
from rl_envs.games.number_games import GuessNumber, Nim, ProposedSums
from rl_envs.games.plugin import GuessNumberConfig, NimConfig, ProposedSumsConfig, SlidingPuzzleConfig
from rl_envs.games.sliding_puzzle import MOVES, Board, SlidingPuzzle


def _turn(completion: str, info: dict[str, Any], id: str = "0") -> Conversation:
    return Conversation(id=id, messages=(), info=info, completion=completion)


def _play(game: Any, info: dict[str, Any], completions: list[str]) -> list[StepResult]:
    results: list[StepResult] = []
    for completion in completions:
        state = results[-1].state if results else None
        results += game.step([_turn(completion, info)], [state])
    return results


def _shortest(start: Board) -> list[str]:
    """Moves to the solved board, by breadth-first search."""
    seen, waiting = {start}, deque([(start, list[str]())])
    while waiting:
        board, moves = waiting.popleft()
        if board.is_solved:
            return moves
        for name in MOVES:
            after = board.moved(name)
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append((after, [*moves, name]))
    raise AssertionError("the board cannot be solved")


class TestSlidingPuzzleConformance(EnvironmentSuite):
    def environment(self) -> SlidingPuzzle:
        return SlidingPuzzle(SlidingPuzzleConfig())

    def conversations(self) -> list[Conversation]:
        info = {"board": [[1, 2], [0, 3]]}
        return [_turn(text, info, text) for text in ("left", "down", "nothing")]


class TestGuessNumberConformance(EnvironmentSuite):
    def environment(self) -> GuessNumber:
        return GuessNumber(GuessNumberConfig())

    def conversations(self) -> list[Conversation]:
        return [_turn(text, {"answer": 7}, text) for text in ("7", "5", "I say 9")]


def test_every_generated_puzzle_is_solved_by_its_shortest_moves() -> None:
    settings = {"size": 30, "rows": 2, "columns": 3, "min_moves": 2, "max_moves": 6}
    for row in sliding_puzzles(settings, "train"):
        moves = _shortest(Board.read(row["info"]["board"]))
        assert 1 <= len(moves) <= 7
        results = _play(SlidingPuzzle(SlidingPuzzleConfig()), row["info"], [f"I move {move}." for move in moves])
        assert [result.done for result in results] == [False] * (len(moves) - 1) + [True]
        assert results[-1].rewards()["reward"] == 1.0
        assert sum(result.rewards()["reward"] for result in results) == 1.0


def test_the_policy_sees_the_board_after_its_move() -> None:
    [result] = _play(SlidingPuzzle(SlidingPuzzleConfig()), {"board": [[1, 2], [0, 3]]}, ["down"])
    assert result.observation == ({"role": "user", "content": "_ 2\n1 3"},)


def test_an_impossible_move_leaves_the_board_and_costs() -> None:
    config = SlidingPuzzleConfig(invalid_reward=-0.1, max_moves=2)
    first, second = _play(SlidingPuzzle(config), {"board": [[1, 2], [0, 3]]}, ["up", "hm"])
    assert (first.rewards()["reward"], first.done) == (-0.1, False)
    assert first.observation[0]["content"].endswith("1 2\n_ 3")
    assert (second.rewards()["reward"], second.done, second.state) == (-0.1, True, None)


def test_moves_undo_one_another() -> None:
    board = Board.read([[1, 2, 3], [4, 0, 5], [6, 7, 8]])
    for name, opposite in (("up", "down"), ("left", "right")):
        for first, second in ((name, opposite), (opposite, name)):
            after = board.moved(first)
            assert after is not None
            assert after.moved(second) == board


@pytest.mark.parametrize("board", [[[1, 2], [3]], [[1, 1], [0, 2]], [[0, 1]], "12", [[1, 2], [3, 4]]])
def test_what_is_not_a_board_is_refused(board: Any) -> None:
    with pytest.raises(UnusableAnswer):
        _play(SlidingPuzzle(SlidingPuzzleConfig()), {"board": board}, ["up"])


def test_a_number_is_found_by_halving() -> None:
    for number in range(1, 101):
        low, high, state, done = 1, 100, None, False
        game, num_guesses = GuessNumber(GuessNumberConfig(discount=0.5)), 0
        while not done:
            guess = (low + high) // 2
            [result] = game.step([_turn(f"my guess: {guess}", {"answer": number})], [state])
            state, done, num_guesses = result.state, result.done, num_guesses + 1
            if not done:
                low, high = (guess + 1, high) if result.observation[0]["content"] == "higher" else (low, guess - 1)
        assert num_guesses <= 7
        assert result.rewards()["reward"] == 0.5 ** (num_guesses - 1)


def test_guesses_come_to_an_end() -> None:
    results = _play(GuessNumber(GuessNumberConfig(max_guesses=2)), {"answer": "7"}, ["no number", "3.5 or 6"])
    assert [result.done for result in results] == [False, True]
    assert results[0].observation[0]["content"] == "Write a whole number."
    assert results[1].rewards()["reward"] == 0.0
    with pytest.raises(UnusableAnswer, match="whole number"):
        _play(GuessNumber(GuessNumberConfig()), {}, ["3"])


@pytest.mark.parametrize("load", [sliding_puzzles, numbers])
def test_rows_follow_from_the_seed_and_the_split(load: Any) -> None:
    rows = load({"size": 20}, "train")
    assert rows == load({"size": 20}, "train")
    assert rows[:5] == load({"size": 5}, "train")
    assert rows != load({"size": 20, "seed": 1}, "train")
    assert rows != load({"size": 20}, "validation")
    assert {row["environment"] for row in rows} == {"sliding_puzzle" if load is sliding_puzzles else "guess_number"}
    with pytest.raises(DataError, match="train and validation"):
        load({"size": 1}, "test")


def test_settings_that_contradict_one_another_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_moves"):
        sliding_puzzles({"min_moves": 5, "max_moves": 4}, "train")
    with pytest.raises(ConfigError, match="low"):
        numbers({"low": 5, "high": 5}, "train")


def test_numbers_lie_between_their_bounds() -> None:
    assert {row["answer"] for row in numbers({"low": -1, "high": 1, "size": 100}, "train")} == {-1, 0, 1}


def test_demonstrations_play_possible_moves_of_the_same_puzzles() -> None:
    plain, shown = (sliding_puzzles({"size": 40, "demonstrations": each}, "train") for each in (False, True))
    assert [{**row, "messages": row["messages"][:1]} for row in shown] == plain
    made = set()
    for row in shown:
        board = Board.read(row["info"]["board"])
        moves, answers = row["messages"][1::2], row["messages"][2::2]
        assert {message["role"] for message in moves} == {"assistant"}
        for number, move in enumerate(moves):
            assert not board.is_solved
            after = board.moved(move["content"])
            assert after is not None
            board = after
            assert [message["content"] for message in answers[number : number + 1]] in ([str(board)], [])
        assert len(moves) == len(answers) + 1
        assert board.is_solved or len(moves) == 4
        made |= {move["content"] for move in moves}
    assert made == set(MOVES)


def test_prompts_without_instructions_are_the_boards_alone() -> None:
    explained, bare = (sliding_puzzles({"size": 20, "instructions": each}, "train") for each in (True, False))
    assert [row["messages"][0]["content"] for row in bare] == [str(Board.read(row["info"]["board"])) for row in bare]
    for long, short in zip(explained, bare, strict=True):
        assert long["messages"][0]["content"].endswith("\n" + short["messages"][0]["content"])


class TestNimConformance(EnvironmentSuite):
    def environment(self) -> Nim:
        return Nim(NimConfig())

    def conversations(self) -> list[Conversation]:
        info = {"pile": 2, "max_take": 3}
        return [_turn(text, info, text) for text in ("1", "2", "nothing")]


class TestProposedSumsConformance(EnvironmentSuite):
    def environment(self) -> ProposedSums:
        return ProposedSums(ProposedSumsConfig())

    def conversations(self) -> list[Conversation]:
        return [_turn(text, {"max_operand": 9}, text) for text in ("1+2", "10+2", "nothing")]


def test_players_of_nim_take_turns_until_the_last_stone() -> None:
    results = _play(Nim(NimConfig()), {"pile": 7, "max_take": 3}, ["I take 3", "2", "2"])
    assert [(each.agent, each.next_agent, each.done) for each in results] == [
        ("first", "second", False),
        ("second", "first", False),
        ("first", "", True),
    ]
    assert [each.observation[0]["content"] for each in results[:2]] == ["4", "2"]
    assert results[-1].reward == 1.0
    assert results[-1].agent_rewards == {"second": -1.0}


def test_both_players_of_nim_are_told_the_rules_once() -> None:
    (row,) = piles({"min_pile": 7, "max_pile": 7, "size": 1}, "train")
    rules = row["messages"][0]["content"].removesuffix("7")
    assert "who takes the last one wins" in rules
    results = _play(Nim(NimConfig()), row["info"], ["1", "1", "1"])
    assert [each.observation[0]["content"] for each in results] == [f"{rules}6", "5", "4"]


@pytest.mark.parametrize("move", ["0", "4", "9", "all"])
def test_an_impossible_move_ends_nim_and_costs_its_player_only(move: str) -> None:
    (result,) = Nim(NimConfig()).step([_turn(move, {"pile": 3, "max_take": 3})], [None])
    assert (result.done, result.reward, result.agent_rewards) == (True, -2.0, {})


def test_the_best_moves_of_nim_are_those_of_a_search() -> None:
    def wins(stones: int) -> bool:
        return any(not wins(stones - move) for move in range(1, min(3, stones) + 1))

    for stones in range(1, 13):
        moves = range(1, min(3, stones) + 1)
        results = [Nim(NimConfig()).step([_turn(str(m), {"pile": stones, "max_take": 3})], [None])[0] for m in moves]
        if wins(stones):
            assert [each.info["accuracy"] for each in results] == [float(not wins(stones - move)) for move in moves]
        else:
            assert all("accuracy" not in each.info for each in results)


def test_accuracy_of_nim_is_over_the_moves_of_one_player() -> None:
    results = _play(Nim(NimConfig()), {"pile": 7, "max_take": 3}, ["2", "1", "3", "1"])
    assert [each.info.get("accuracy") for each in results] == [0.0, 1.0, 0.0, 1.0]


def test_piles_are_within_bounds_and_demonstrations_are_possible() -> None:
    rows = piles({"min_pile": 3, "max_pile": 9, "size": 200, "instructions": False, "demonstrations": True}, "train")
    assert {row["info"]["pile"] for row in rows} == set(range(3, 10))
    for row in rows:
        said = [message["content"] for message in row["messages"]]
        shown, moves = list(map(int, said[::2])), list(map(int, said[1::2]))
        assert all(1 <= move <= min(3, stones) for stones, move in zip(shown, moves, strict=True))
        assert all(
            1 <= before - move - after <= 3 for before, move, after in zip(shown, moves, shown[1:], strict=False)
        )
    with pytest.raises(ConfigError, match="min_pile 5 is larger than max_pile 4"):
        piles({"min_pile": 5, "max_pile": 4}, "train")


def test_a_proposal_is_posed_to_a_solver() -> None:
    (result,) = ProposedSums(ProposedSumsConfig()).step([_turn(" 12 + 7", {"max_operand": 49})], [None])
    assert (result.agent, result.next_agent, result.done) == ("proposer", "solver", False)
    assert result.observation == ({"role": "user", "content": "12+7="},)


@pytest.mark.parametrize("said", ["50+1", "1+2+3", "1-2", "", "1+2 "[:2]])
def test_what_is_not_a_sum_of_allowed_operands_ends_the_play(said: str) -> None:
    (result,) = ProposedSums(ProposedSumsConfig()).step([_turn(said, {"max_operand": 49})], [None])
    assert (result.done, result.reward, result.agent) == (True, -1.0, "proposer")


def test_a_solver_is_right_by_the_sum() -> None:
    results = ProposedSums(ProposedSumsConfig()).step(
        [_turn(said, {"problem": "12+7", "max_operand": 49}) for said in ("19", "it is 19", "18", "")], [None] * 4
    )
    assert [each.reward for each in results] == [1.0, 1.0, 0.0, 0.0]
    assert {each.agent for each in results} == {"solver"}


def test_rows_of_sums_ask_in_training_and_are_given_in_validation() -> None:
    assert {row["messages"][0]["content"] for row in proposed_sums({"size": 20}, "train")} == {"?"}
    for row in proposed_sums({"size": 20}, "validation"):
        assert row["messages"][0]["content"] == f"{row['info']['problem']}="
    both = proposed_sums({"size": 4, "demonstrations": True}, "train")
    assert [row["messages"][0]["content"] == "?" for row in both] == [True, False, True, False]
