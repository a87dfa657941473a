"""What the plugins of policy-gradient algorithms have in common: the section of their loss, and their policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_algos.policy_gradient.config import ObjectiveRoot
from rl_algos.policy_gradient.loss import columns_of, loss_section, surrogate_section
from rl_algos.policy_gradient.loss_config import LossConfig
from rl_algos.rollouts.config import PolicyGradientConfig
from rl_core.config import Config, Problem, ProblemError, assemble
from rl_core.model import ModelSpec
from rl_core.plugins import ModelNeed


def loss_fn_section(written: Any) -> type[Config]:
    """The type of `loss_fn`, with the settings of the loss, or of its surrogate, that is written there."""
    kind = chosen_type("name", written, loss_section)
    if not issubclass(kind, LossConfig):
        return kind
    surrogate = written.get("surrogate") if isinstance(written, Mapping) else None
    part = chosen_type("surrogate.name", surrogate, surrogate_section)
    # the default is the same whichever surrogate is written, so that a config shows it as changed
    return assemble("PolicyLoss", {"surrogate": (part, LossConfig().surrogate)}, base=LossConfig)


def chosen_type(key: str, written: Any, section: Callable[[str | None], type[Config]]) -> type[Config]:
    """The type of a section whose settings are those of what it names.

    Raises:
        ProblemError: of `key`, if there is no such name.
    """
    name = written.get("name") if isinstance(written, Mapping) else written
    try:
        # what is not text is refused by the type itself
        return section(name if isinstance(name, str) else None)
    except ProblemError as error:
        raise ProblemError(*(problem.at(key) for problem in error.problems)) from None
    except (ValueError, ModuleNotFoundError) as error:
        raise ProblemError(Problem(key, str(error))) from None


def policy_need(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> ModelNeed:
    """The policy of an algorithm whose policy minimises `loss_fn`: it trains, and keeps its reference if the loss
    compares with it.

    Args:
        config: Resolved config of the run.
        algorithm: Config section of the algorithm.
    """
    compares = "ref_logprobs" in columns_of(config, algorithm)
    return ModelNeed("policy", ModelSpec(keeps_reference=compares, seed=algorithm.seed))
