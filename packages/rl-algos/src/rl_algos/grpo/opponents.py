"""Opponents: agents whose turns other weights than the policy's take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_algos.grpo.config import GRPOConfig, OpponentConfig, trained_agents
from rl_algos.grpo.estimators import reads
from rl_core.config import Problem, is_changed
from rl_core.errors import ConfigError
from rl_core.plugins import OpponentNeed
from rl_core.tokenizer import Tokenizer

_ALL = 1 + 1e-9
"""Largest sum of shares, which are rounded."""


def opponents_of(config: GRPOConfig) -> tuple[OpponentNeed, ...]:
    """Return the opponents of a run: one engine serves all agents whose settings differ only in their share."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for agent, opponent in _opponents(config).items():
        key = (opponent.update_every, opponent.pool, opponent.model_name)
        found.setdefault(key, {})[agent] = opponent.share
    return tuple(
        OpponentNeed("-".join(shares), shares, update_every, pool, model_name, config.seed)
        for (update_every, pool, model_name), shares in found.items()
    )


def fixed_models(config: GRPOConfig) -> dict[str, str]:
    """Return the models that play as they are during the whole run, by their key."""
    return {
        f"grpo.agents.{agent}.opponent.model_name": opponent.model_name
        for agent, opponent in _opponents(config).items()
        if opponent.model_name is not None
    }


def opponent_problems(config: GRPOConfig) -> Iterator[Problem]:
    """Yield the problems of the opponents in a config."""
    opponents, agents = _opponents(config), trained_agents(config)
    for agent, opponent in opponents.items():
        key = f"grpo.agents.{agent}.opponent"
        if (opponent.update_every is None) == (opponent.model_name is None):
            given = "has neither" if opponent.model_name is None else "has both"
            reason = "update_every and model_name, but an opponent is either an older version of the policy or another"
            remedy = "Set one of the two, such as update_every: 20"
            yield Problem(key, f"{given} {reason} model", remedy=remedy)
        if opponent.update_every is None and is_changed(opponent, "pool"):
            yield Problem.unused(f"{key}.pool", f"without {key}.update_every")
        for name in ("train", "weight", "adv_estimator"):
            # An agent that is an opponent in all plays is never the policy, so nothing is trained on its turns.
            if opponent.share >= 1 and is_changed(agents[agent], name):
                remedy = f"Remove it, or set {key}.share below 1, so that the agent is the policy in other plays"
                because = f"with {key}, whose turns are not trained on"
                yield Problem.unused(f"grpo.agents.{agent}.{name}", because, remedy=remedy)
    if opponents and reads(config, "baselines"):
        reason = "cannot be used with an estimator that compares with a greedy rollout of each prompt, such as remax"
        remedy = "Choose another grpo.adv_estimator, such as grpo"
        yield Problem(f"grpo.agents.{next(iter(opponents))}.opponent", reason, remedy=remedy)
    shares = {agent: opponent.share for agent, opponent in opponents.items() if opponent.share < 1}
    if (total := sum(shares.values())) > _ALL:
        agent = next(iter(shares))
        reason = f"and those of the other agents add up to {total:g}, but they are shares of different plays"
        remedy = "Lower them so that they add up to at most 1"
        yield Problem(f"grpo.agents.{agent}.opponent.share", reason, got=shares[agent], remedy=remedy)


def check_tokens(config: GRPOConfig, tokenizer: Tokenizer) -> None:
    """Refuse a model whose tokens differ from the policy's. A model without tokenizer files is assumed to have the
    same tokens.

    Raises:
        ConfigError: With the first token that differs.
    """
    # This module imports transformers, which takes a second.
    from rl_algos.tokenizer import different_token

    for key, name in fixed_models(config).items():
        if problem := different_token(name, tokenizer, whose="the policy's"):
            raise ConfigError(
                f"{key}: the tokenizer of {name!r} differs from the policy's: {problem}. Choose a model with the same "
                "tokens"
            )


def _opponents(config: GRPOConfig) -> dict[str, OpponentConfig]:
    found = {agent: settings.opponent for agent, settings in trained_agents(config).items()}
    return {agent: opponent for agent, opponent in found.items() if opponent is not None}
