"""The section `env` of NeMo RL."""

from __future__ import annotations

from rl_launch.foreign.nemo_rl.loops import ROLLOUTS
from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind

_PUZZLE = "sliding_puzzle_game"


def translate_environments(config: Translation) -> None:
    """Answer the keys of `env`."""
    _sliding_puzzle(config)
    used = config.written("data.default.env_name")
    names = {used} if used else set()
    for purpose in ("train", "validation"):
        datasets = config.written(f"data.{purpose}")
        for each in datasets if isinstance(datasets, list) else [datasets]:
            if isinstance(each, dict) and each.get("env_name"):
                names.add(each["env_name"])
    if "reward_model" in names:
        _reward_model(config)
    for name in config.get("env") or {}:
        section = f"env.{name}"
        if name == "nemo_gym":
            config.refuse(section, "NeMo Gym environments (env.nemo_gym)")
        elif name not in names:
            for key in config.keys(section):
                config.unneeded(key, "no dataset uses this environment")
    if config.algorithm not in ROLLOUTS:
        for key in config.keys("env"):
            config.unneeded(key, f"{config.algorithm} scores nothing")
    verifier = config.get("env.math.math_verify_impl")
    if verifier == "dapo_math_verify":
        config.put("env.math.answer_format", "dapo")
        config.put("env.math.wrong_reward", -1.0)
        config.follows(["env.math.math_verify_impl"], "env.math.answer_format: dapo, env.math.wrong_reward: -1")
    elif verifier in (None, "hf_math_verify"):
        config.unneeded("env.math.math_verify_impl", "answers are compared by math-verify")
    if config.get("env.math.verifier_type") in ("multilingual_multichoice", "english_multichoice"):
        config.put("env.math.answer_format", "choice")
        config.follows(["env.math.verifier_type"], "env.math.answer_format: choice")
    config.unneeded("env.math.verifier_type", "answers are compared by math-verify")


def _sliding_puzzle(config: Translation) -> None:
    """The puzzles of NeMo RL's example, which its script makes without a section of data."""
    section = f"env.{_PUZZLE}"
    if not config.has(section):
        return
    size, moves = (
        config.get(f"{section}.cfg.game_config.size", 3),
        config.get(f"{section}.cfg.game_config.shuffle_moves"),
    )
    if size not in (3, None):
        config.refuse(f"{section}.cfg.game_config.size", f"sliding puzzles of {size} x {size} tiles")
    settings = {"max_moves": moves} if moves else {}
    if not isinstance(config.written("data.train"), dict) or not config.written("data.train"):
        for purpose, number in (("train", 10000), ("validation", 256)):
            config.put(f"data.{purpose}", {"dataset_name": "sliding_puzzle", "settings": {**settings, "size": number}})
    config.put("env.sliding_puzzle.max_moves", config.get(f"{section}.cfg.max_moves", 20))
    for key in config.keys(section):
        config.follows([key], "env.sliding_puzzle, and data.train.dataset_name: sliding_puzzle")
    config.unneeded("data.add_system_prompt", "the dataset creates the prompts")


def _reward_model(config: Translation) -> None:
    section = "env.reward_model"
    if config.get(f"{section}.model_name") is None:
        return
    config.put(f"{section}.model", config.get(f"{section}.model_name"))
    config.answer(f"{section}.model_name", Kind.RENAMED, f"{section}.model")
    for name, here in (("max_model_len", "max_length"), ("precision", "precision")):
        if config.get(f"{section}.{name}") is not None:
            config.rename(f"{section}.{name}", f"{section}.{here}")
    for key in config.keys(section):
        config.unneeded(key, "a reward model runs in the processes of its environment (env.reward_model.device)")
    config.notes.append(f"{section}.device: cpu is the default. Set a separate GPU for a large reward model")
