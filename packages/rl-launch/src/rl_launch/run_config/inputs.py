"""Check the models, data and other files of a run together, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config import Problem
from rl_core.errors import ConfigProblems
from rl_launch.model_files.local_models import MADE_HERE
from rl_launch.model_files.model_folder import absent_models
from rl_launch.run_config.plan import RunPlan


def input_problems(plan: RunPlan, *, is_evaluation: bool = False) -> Iterator[Problem]:
    """Yield the problems of inputs that a run, or its evaluation, cannot read: models, datasets, files and folders. The
    hub is asked once for each name.

    Args:
        plan: The run.
        is_evaluation: True to check the data of the evaluation instead of the training data.
    """
    yield from absent_models(model_names(plan))
    problems = plan.algorithm.evaluation_problems if is_evaluation else plan.algorithm.input_problems
    yield from problems(plan.config)


def check_inputs(plan: RunPlan, *, is_evaluation: bool = False) -> None:
    """Refuse a run, or its evaluation, that cannot read its models or its data.

    Raises:
        ConfigProblems: If there are problems; lists all of them.
    """
    problems = list(input_problems(plan, is_evaluation=is_evaluation))
    lines = [f"{problem.key}: {problem.message}" for problem in problems]
    if len(lines) > 1:
        lines = [f"{len(lines)} inputs cannot be read:", *(f"  {line}" for line in lines)]
    if lines:
        raise ConfigProblems("\n".join(lines), problems)


def model_names(plan: RunPlan) -> dict[str, str]:
    """Return the folders and hub names of the models and tokenizers of a run, by key, without models that are made
    locally."""
    names = {f"{key}.model_name": plan.section(key).model_name for key in plan.model_sections}
    tokenizer = plan.config.policy.tokenizer.name
    if tokenizer is not None:
        names["policy.tokenizer.name"] = tokenizer
    names |= plan.plugin.further_models(plan.config)
    return {key: name for key, name in names.items() if name not in MADE_HERE}
