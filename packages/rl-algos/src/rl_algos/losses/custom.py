"""Custom losses, selected by the path of their class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rl_core import resolve
from rl_core.config import Config, Problem, ProblemError, nearest_as_remedy
from rl_core.plugins import Requirement, requirement_of
from rl_core.user_code import is_in_file

PATH = "your own class as package.module:Class or file.py:Class"
"""How messages describe such a path."""

NOT_OFFERED: Mapping[str, str] = {
    "a2po": "A*-PO compares rewards with values that are estimated before training, from samples of the reference for "
    "every prompt, and runs have no such stage. Use grpo.adv_estimator=rloo, whose baseline is sampled in every step",
    "tpo": "Target policy optimization is the estimator grpo.adv_estimator=tpo. Triple preference optimization learns "
    "from three responses a row, and preferences have two here: use the loss dpo with dpo.sft_loss_weight, which also "
    "learns the chosen response",
    "raft++": "RAFT++ is grpo.adv_estimator=raft with loss_fn.surrogate=clip",
    "chord": "CHORD is loss_fn.demonstrations=nll with grpo.demonstrations.dataset and rows_per_step",
    "luffy": "LUFFY is loss_fn.demonstrations=shaped with grpo.demonstrations.share",
}
"""Methods that do not have these names here, or that are not offered, by name, with what to use and the reason."""

_MEMBERS = ("columns", "reads", "temperature", "implementation", "totals")


def is_path(name: str) -> bool:
    """Return whether the name of a loss is the path of a class."""
    return ":" in name


def unknown_name(name: str, known: Collection[str], *, others: str = "") -> ProblemError:
    """Return the error of a section whose key `name` has a value that is not known.

    Args:
        name: Value that is not known.
        known: Accepted names.
        others: Further accepted values, in words.
    """
    allowed = ", ".join([*known, *([f"or {others}"] if others else [])])
    remedy = NOT_OFFERED.get(name.lower()) or nearest_as_remedy(name, known)
    return ProblemError(Problem("name", got=name, allowed=allowed, remedy=remedy))


def loss_class(path: str) -> Any:
    """Return the class of a loss, a dataclass with the members of `rl_core.Loss`.

    Args:
        path: `package.module:Class` or `file.py:Class`.

    Raises:
        ValueError: If there is no such class, or it is not a loss.
        ModuleNotFoundError: If its package is not installed.
    """
    kind = resolve(path)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"{path} is not a dataclass; a loss must be one (see rl_core.Loss)")
    fields = {field.name for field in dataclasses.fields(kind)}
    missing = [member for member in _MEMBERS if member not in fields and not hasattr(kind, member)]
    if missing:
        raise ValueError(f"{path} does not have {', '.join(missing)}, which every loss needs (see rl_core.Loss)")
    return kind


def loss_requirements(name: str) -> tuple[Requirement, ...]:
    """Return the packages that a loss needs on every machine, from its name in a config; none for a loss of this
    package or of a file, whose source is sent along."""
    return (requirement_of(name),) if is_path(name) and not is_in_file(name) else ()


def chosen_type(key: str, written: Any, section: Callable[[str | None], type[Config]]) -> type[Config]:
    """Return the type of a section whose settings depend on its name.

    Args:
        key: Key of the name, for messages.
        written: Plain value of the section, as the user wrote it.
        section: Function from the name to the type.

    Raises:
        ProblemError: If there is no such name.
    """
    name = written.get("name") if isinstance(written, Mapping) else written
    try:
        # The type itself refuses a name that is not a string.
        return section(name if isinstance(name, str) else None)
    except ProblemError as error:
        raise ProblemError(*(problem.at(key) for problem in error.problems)) from None
    except (ValueError, ModuleNotFoundError) as error:
        raise ProblemError(Problem(key, str(error))) from None
