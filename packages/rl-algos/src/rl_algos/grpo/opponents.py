"""Opponents: agents whose turns other weights than the policy's take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_algos.grpo.config import GRPOConfig, GRPORoot, OpponentConfig, TrainedAgentConfig, trained_agents
from rl_algos.grpo.estimators import reads
from rl_core.config import Problem, is_changed
from rl_core.errors import ConfigError
from rl_core.plugins import OpponentNeed

_ALL = 1 + 1e-9
"""Largest sum of shares, which are rounded."""


def opponents_of(config: GRPOConfig) -> tuple[OpponentNeed, ...]:
    """The opponents of a run: one engine serves all agents whose settings differ only in their share."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for agent, opponent in _opponents(config).items():
        key = (opponent.update_every, opponent.pool, opponent.model_name)
        found.setdefault(key, {})[agent] = opponent.share
    return tuple(
        OpponentNeed("-".join(shares), shares, update_every, pool, model_name, config.seed)
        for (update_every, pool, model_name), shares in found.items()
    )


def fixed_models(config: GRPORoot) -> dict[str, str]:
    """Models that play as they are, by the key that names each."""
    return {
        f"{_key(agent)}.model_name": opponent.model_name
        for agent, opponent in _opponents(config.grpo).items()
        if opponent.model_name is not None
    }


def opponent_problems(config: GRPORoot) -> Iterator[Problem]:
    """Yield the problems of the opponents in a config."""
    opponents = _opponents(config.grpo)
    for agent, opponent in opponents.items():
        key = _key(agent)
        if (opponent.update_every is None) == (opponent.model_name is None):
            given = "has neither" if opponent.model_name is None else "has both"
            yield Problem(
                key,
                f"{given} update_every and model_name, but an opponent is either an older version of the policy or "
                "another model",
                remedy="Set one of the two, such as update_every: 20",
            )
        if opponent.update_every is None and is_changed(opponent, "pool"):
            yield Problem.unused(f"{key}.pool", f"without {key}.update_every")
        yield from _untrained(agent, trained_agents(config.grpo)[agent], opponent)
    if opponents and reads(config.grpo, "baselines"):
        yield Problem(
            _key(next(iter(opponents))),
            "cannot be used with an estimator that compares with a greedy rollout of each prompt, such as remax",
            remedy="Choose another grpo.adv_estimator, such as grpo",
        )
    shares = {agent: opponent.share for agent, opponent in opponents.items() if opponent.share < 1}
    if sum(shares.values()) > _ALL:
        agent = next(iter(shares))
        yield Problem(
            f"{_key(agent)}.share",
            f"and those of the other agents add up to {sum(shares.values()):g}, but they are shares of different plays",
            got=shares[agent],
            remedy="Lower them so that they add up to at most 1",
        )


def check_tokens(config: GRPORoot, tokenizer: Any) -> None:
    """Refuse a model to which the policy's tokens mean something else; one without tokenizer files is taken to have
    the policy's.

    Raises:
        ConfigError: Naming the first token that differs.
    """
    # imports transformers, which takes a second
    from rl_algos.tokenizer import different_token

    for key, name in fixed_models(config).items():
        if problem := different_token(name, tokenizer, whose="the policy's"):
            raise ConfigError(
                f"{key}: the tokenizer of {name!r} differs from the policy's: {problem}. Choose a model with the same "
                "tokens"
            )


def _untrained(agent: str, settings: TrainedAgentConfig, opponent: OpponentConfig) -> Iterator[Problem]:
    """Yield settings of training for an agent that never is the policy."""
    if opponent.share < 1:
        return
    for name in ("train", "weight", "adv_estimator"):
        if is_changed(settings, name):
            yield Problem.unused(
                f"grpo.agents.{agent}.{name}",
                f"with {_key(agent)}, whose turns are not trained on",
                remedy=f"Remove it, or set {_key(agent)}.share below 1, so that the agent is the policy in other plays",
            )


def _opponents(config: GRPOConfig) -> dict[str, OpponentConfig]:
    found = {agent: settings.opponent for agent, settings in trained_agents(config).items()}
    return {agent: opponent for agent, opponent in found.items() if opponent is not None}


def _key(agent: str) -> str:
    return f"grpo.agents.{agent}.opponent"
