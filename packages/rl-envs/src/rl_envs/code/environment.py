"""The environment `code`, and its checks of rows and of the machine."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult
from rl_envs.code.cases import Assertions, Calls, InputOutput, read_tests
from rl_envs.code.grading import grade
from rl_envs.code.plugin import CodeConfig
from rl_envs.fences import fenced_blocks
from rl_envs.grader import Grader
from rl_envs.sandbox.config import row_image
from rl_envs.sandbox.sandbox import machine_problem, open_sandbox

SHOWN = 300
"""Maximum number of characters of a problem that are reported."""


class CodeEnvironment(Grader[CodeConfig]):
    """Scores a single turn by the tests of its row; `read_tests` describes their forms.

    Raises:
        SandboxUnavailable: If the machine does not offer the sandbox that the settings ask for.
    """

    def __init__(self, config: CodeConfig) -> None:
        super().__init__(config)
        self._runner = open_sandbox(config.sandbox)

    def score(self, conversation: Conversation) -> StepResult:
        config = self._config
        tests = read_tests(conversation.info, config.max_tests)
        solution = program_in(conversation.final_text)
        if solution is None:
            return StepResult(reward=0.0, info={"accuracy": 0.0, "has_code": 0.0, "problem": "no block of Python"})
        limits, stop_early = config.sandbox.limits, config.reward == "all"
        image = row_image(conversation.info, config.sandbox)
        num_passed, num_tests, problem = grade(
            solution, tests, self._runner, limits, tolerance=config.tolerance, stop_early=stop_early, image=image
        )
        accuracy = float(num_passed == num_tests)
        reward = num_passed / num_tests if config.reward == "share" else accuracy
        info = {"accuracy": accuracy, "has_code": 1.0, "tests_passed": num_passed, "problem": problem[:SHOWN]}
        return StepResult(reward=reward, info=info)


def program_in(response: str) -> str | None:
    """Return the last fenced block of Python, or else the last without a language; None if there is none."""
    blocks = list(fenced_blocks(response))
    named = [body for language, body in blocks if language in ("python", "python3", "py", "py3")]
    chosen = named or [body for language, body in blocks if not language]
    return chosen[-1] if chosen and chosen[-1].strip() else None


def check_row(info: Mapping[str, Any], config: CodeConfig) -> None:
    """Raise a `ValueError` if the row has no tests, tests of another form, or one that no program passes."""
    row_image(info, config.sandbox)
    match read_tests(info, config.max_tests):
        case Assertions(texts):
            for text in texts:
                try:
                    with warnings.catch_warnings(action="ignore"):
                        compile(text, "test_code", "exec", dont_inherit=True)
                except RecursionError:
                    # The program's process may have a larger stack.
                    continue
                except (SyntaxError, ValueError) as error:
                    reason = f"which is not Python: {error}: {text!r:.80}"
                    raise ValueError(f"no program passes `test_code`, {reason}") from None
        case Calls(function, _, results):
            if not function.isidentifier():
                raise ValueError(f"`function` must be the name of a function, got {function!r:.80}")
            for each in results:
                if not any(map(_is_json, each)):
                    raise ValueError(f"no program can return {each[0]!r:.80}: results are plain data of JSON")
        case InputOutput(pairs):
            longest = max(len(output.encode(errors="replace")) for _, output in pairs)
            if longest > config.sandbox.output_kib * 1024:
                raise ValueError(
                    f"no program can write the output of a test, which has {longest / 1024:.0f} KiB: "
                    f"sandbox.output_kib is {config.sandbox.output_kib}"
                )


def _is_json(value: Any) -> bool:
    """Return whether the result of a test can be equal to a value that was read from JSON."""
    try:
        json.dumps(value)
    except TypeError:
        return False
    except (ValueError, RecursionError):
        return True  # An integer may have more than 4,300 digits.
    return True


def check_machine(config: CodeConfig) -> str:
    """Return why programs cannot run by the settings, and what to do; an empty string if they can."""
    return machine_problem(config.sandbox)
