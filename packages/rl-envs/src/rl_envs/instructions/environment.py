"""The environment `instructions`, the instructions of a row, and their check."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from string import whitespace
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.grader import Grader, fields_of
from rl_envs.instructions.checks import CHECKS, RELATIONS, WORD_ENDS
from rl_envs.instructions.plugin import InstructionsConfig
from rl_envs.time_limit import CPU_S, within


class InstructionsEnvironment(Grader[InstructionsConfig]):
    """Scores a single turn by the instructions of its row."""

    def score(self, conversation: Conversation) -> StepResult:
        try:
            asked = instructions_of(conversation.info)
            followed = [is_followed(name, conversation.final_text, arguments) for name, arguments in asked]
        except ValueError as error:
            raise UnusableAnswer(str(error)) from None
        share = sum(followed) / len(followed)
        strict = float(all(followed))
        missed = [name for (name, _), done in zip(asked, followed, strict=True) if not done]
        reward = share if self._config.reward == "share" else strict
        return StepResult(reward=reward, info={"accuracy": strict, "followed": share, "missed": ", ".join(missed)})


def instructions_of(info: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return identifiers and arguments of the instructions in `instruction_id_list` and `kwargs`.

    Raises:
        ValueError: If there are none, or one has no check or does not fit it.
    """
    names, arguments = info.get("instruction_id_list"), info.get("kwargs")
    if not names or not isinstance(names, list | tuple):
        raise ValueError(f"the row needs the list `instruction_id_list`; its fields are {fields_of(info)}")
    arguments = [{}] * len(names) if arguments is None else arguments
    if not isinstance(arguments, list | tuple):
        raise ValueError(f"`kwargs` must be a list with the arguments of each instruction, got {arguments!r:.80}")
    if len(arguments) != len(names):
        raise ValueError(f"the row has {len(names)} instructions and {len(arguments)} entries of `kwargs`")
    return [(str(name), _fitting(name, each)) for name, each in zip(names, arguments, strict=True)]


def is_followed(name: str, response: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a response follows an instruction; an empty one follows none.

    Args:
        name: Name of the instruction in IFEval, such as `punctuation:no_comma`.
        response: Response to check.
        arguments: Keyword arguments of the instruction; those that are None are left out, as columnar files fill them
            in.

    Raises:
        ValueError: If there is no such check, or it takes other arguments.
    """
    given = _fitting(name, arguments)
    return bool(response.strip()) and bool(within(CPU_S, lambda: CHECKS[name](response, **given)))


def _fitting(name: Any, arguments: Any) -> dict[str, Any]:
    """Return the arguments of a check without those that are None."""
    if not isinstance(name, str) or name not in CHECKS:
        raise ValueError(f"there is no check of the instruction {name!r:.80}; there are {', '.join(sorted(CHECKS))}")
    if not isinstance(arguments, Mapping | None):
        raise ValueError(f"the arguments of instruction {name!r} must be an object, got {arguments!r:.80}")
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    parameters = list(inspect.signature(CHECKS[name]).parameters.values())[1:]
    takes = {each.name: str(each.annotation) for each in parameters}
    if set(given) != set(takes):
        raise ValueError(
            f"instruction {name!r} takes the arguments {', '.join(takes) or 'none'}, got {', '.join(given) or 'none'}"
        )
    typed = {key: _typed(name, key, value, takes[key]) for key, value in given.items()}
    if problem := _impossible(name, typed):
        raise ValueError(f"no response can follow instruction {name!r}: {problem}")
    return typed


def _impossible(name: str, given: Mapping[str, Any]) -> str:
    """Return why no response can follow an instruction; empty if one can."""
    word, number, place = given.get("first_word", ""), given.get("num_paragraphs", 1), given.get("nth_paragraph", 1)
    if ended := set(word) & {*WORD_ENDS, *whitespace}:
        return f"the first word of a paragraph ends before {min(ended)!r}, got first_word {word!r}"
    if number < 1:
        return f"num_paragraphs is {number}"
    if not 1 <= place <= number:
        return f"nth_paragraph is {place} of num_paragraphs {number}"
    counts = {key: value for key, value in given.items() if isinstance(value, int) and "paragraph" not in key}
    relation = given.get("relation") or given.get("let_relation") or given.get("capital_relation")
    minimum = 1 if name in ("length_constraints:number_words", "length_constraints:number_sentences") else 0
    too_low = {"less than": minimum + 1, "at most": minimum}.get(str(relation), 0)
    return next((f"{key} is {value} ({relation})" for key, value in counts.items() if value < too_low), "")


def _typed(name: str, key: str, value: Any, kind: str) -> Any:
    if kind == "int" and isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
        return int(value)  # Columnar files write whole numbers as floats.
    is_relation = key.endswith("relation")
    if kind == "str" and isinstance(value, str) and (value in RELATIONS if is_relation else value.strip()):
        return value
    words = value if kind == "list[str]" and isinstance(value, list | tuple) else []
    if words and all(isinstance(word, str) and word.strip() for word in words):
        return list(words)
    wanted = {"int": "a whole number", "str": "a string that is not empty", "list[str]": "a list of texts"}[kind]
    wanted = f"one of {', '.join(RELATIONS)}" if is_relation else wanted
    raise ValueError(f"{key!r} of instruction {name!r} must be {wanted}, got {value!r:.80}")


def check_row(info: Mapping[str, Any], config: InstructionsConfig) -> None:
    """Raise a `ValueError` if the row has no instructions, or one that cannot be checked."""
    instructions_of(info)
