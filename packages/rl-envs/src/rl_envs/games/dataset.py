"""Generated starts of the games, equal on every machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_core.errors import ConfigError, DataError
from rl_envs.draws import draws
from rl_envs.games.plugin import GuessNumberSettings, NimSettings, ProposedSumsSettings, SlidingPuzzleSettings
from rl_envs.games.sliding_puzzle import MOVES, Board

_OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


def sliding_puzzles(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Return rows with `messages`, `info` (the `board`) and `environment`; the splits draw with different seeds.
    Demonstrations are conversations that end with the assistant.

    Raises:
        DataError: If the split is unknown.
        ConfigError: If the settings contradict one another.
    """
    config = SlidingPuzzleSettings.model_validate(dict(settings))
    if config.min_moves > config.max_moves:
        raise ConfigError(f"min_moves {config.min_moves} is larger than max_moves {config.max_moves}")
    return [_puzzle(config, f"{config.seed}/{_known(split)}/{index}") for index in range(config.size)]


def numbers(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Return rows with `messages`, `answer` and `environment`; the splits draw with different seeds.

    Raises:
        DataError: If the split is unknown.
        ConfigError: If the settings contradict one another.
    """
    config = GuessNumberSettings.model_validate(dict(settings))
    if config.low >= config.high:
        raise ConfigError(f"low {config.low} must be smaller than high {config.high}")
    asked = f"Guess my number between {config.low} and {config.high}. I say whether it is higher or lower."
    rows = []
    for index in range(config.size):
        draw = next(draws(f"{config.seed}/{_known(split)}/{index}"))
        answer = config.low + draw % (config.high - config.low + 1)
        messages = [{"role": "user", "content": asked}]
        rows.append({"messages": messages, "answer": answer, "environment": "guess_number"})
    return rows


def piles(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Return rows of nim with `messages`, `info` (`pile`, `max_take`, and `instructions` if there are some) and
    `environment`; the splits draw with different seeds. Demonstrations are conversations of one player that end with
    the assistant.

    Raises:
        DataError: If the split is unknown.
        ConfigError: If the settings contradict one another.
    """
    config = NimSettings.model_validate(dict(settings))
    if config.min_pile > config.max_pile:
        raise ConfigError(f"min_pile {config.min_pile} is larger than max_pile {config.max_pile}")
    explained = (
        f"Two players take 1 to {config.max_take} stones in turn; who takes the last one wins. Each turn, write how "
        "many you take. Stones: "
    )
    rows = []
    for index in range(config.size):
        drawn = draws(f"{config.seed}/{_known(split)}/{index}")
        pile = config.min_pile + next(drawn) % (config.max_pile - config.min_pile + 1)
        asked = {"role": "user", "content": f"{explained if config.instructions else ''}{pile}"}
        played = _random_game(pile, config.max_take, drawn) if config.demonstrations else []
        info: dict[str, Any] = {"pile": pile, "max_take": config.max_take}
        if config.instructions:
            info["instructions"] = explained
        rows.append({"messages": [asked, *played], "info": info, "environment": "nim"})
    return rows


def proposed_sums(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Return rows with `messages`, `info` and `environment`: in training requests for a sum (`max_operand`), in
    validation sums to solve (`problem`). Demonstrations are conversations of both kinds that end with the assistant.

    Raises:
        DataError: If the split is unknown.
    """
    config = ProposedSumsSettings.model_validate(dict(settings))
    rows = []
    for index in range(config.size):
        drawn = draws(f"{config.seed}/{_known(split)}/{index}")
        a, b = next(drawn) % (config.max_operand + 1), next(drawn) % (config.max_operand + 1)
        proposes = index % 2 == 0 if config.demonstrations else split == "train"
        asked, said = ("?", f"{a}+{b}") if proposes else (f"{a}+{b}=", f"{a + b}")
        info = {"max_operand": config.max_operand} if proposes else {"problem": f"{a}+{b}"}
        messages = [{"role": "user", "content": asked}]
        if config.demonstrations:
            messages.append({"role": "assistant", "content": said})
        rows.append({"messages": messages, "info": info, "environment": "proposed_sums"})
    return rows


def _random_game(pile: int, max_take: int, drawn: Iterator[int]) -> list[dict[str, str]]:
    """Return the turns of one player, each but the first after the stones that the other has left."""
    said: list[dict[str, str]] = []
    is_mine = True
    while pile:
        if is_mine and said:
            said.append({"role": "user", "content": str(pile)})
        move = 1 + next(drawn) % min(max_take, pile)
        if is_mine:
            said.append({"role": "assistant", "content": str(move)})
        pile, is_mine = pile - move, not is_mine
    return said


def _puzzle(config: SlidingPuzzleSettings, text: str) -> dict[str, Any]:
    drawn = draws(text)
    num_moves = config.min_moves + next(drawn) % (config.max_moves - config.min_moves + 1)
    board, last = Board.solved_of(config.rows, config.columns), ""
    solved = str(board)
    while num_moves > 0 or board.is_solved:  # a cycle of moves may have come back to the start
        directions = [name for name in MOVES if name != _OPPOSITE.get(last) and board.moved(name) is not None]
        last = directions[next(drawn) % len(directions)]
        moved = board.moved(last)
        assert moved is not None
        board, num_moves = moved, num_moves - 1
    explained = (
        f"Slide the tiles until the board is\n{solved}\n"
        "Each turn, write the direction in which a tile moves into the gap: up, down, left or right.\n"
    )
    asked = {"role": "user", "content": f"{explained if config.instructions else ''}{board}"}
    played = _random_moves(board, drawn, config.max_moves) if config.demonstrations else []
    return {"messages": [asked, *played], "info": {"board": board.rows}, "environment": "sliding_puzzle"}


def _random_moves(board: Board, drawn: Iterator[int], most: int) -> list[dict[str, str]]:
    """Possible moves, each but the last answered with the board, until it is solved or there are enough."""
    said: list[dict[str, str]] = []
    for _ in range(most):
        if said:
            said.append({"role": "user", "content": str(board)})
        moves = {name: after for name in MOVES if (after := board.moved(name)) is not None}
        name = list(moves)[next(drawn) % len(moves)]
        said.append({"role": "assistant", "content": name})
        board = moves[name]
        if board.is_solved:
            break
    return said


def _known(split: str) -> str:
    if split not in ("train", "validation"):
        raise DataError(f"the games have the splits train and validation, got {split!r}")
    return split
