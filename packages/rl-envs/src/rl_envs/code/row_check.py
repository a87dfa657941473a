"""Check of a row's tests before a run starts."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from rl_envs.code.cases import Assertions, Calls, InputOutput, read_tests
from rl_envs.code.config import CodeConfig


def check(info: Mapping[str, Any], config: CodeConfig) -> None:
    """Raise a `ValueError` if the row has no tests, tests of another form, or one that no program passes."""
    match read_tests(info, config.max_tests):
        case Assertions(texts):
            for text in texts:
                _require_python(text)
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


def _require_python(text: str) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, "test_code", "exec", dont_inherit=True)
    except RecursionError:
        return  # the program's process may have a larger stack
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"no program passes `test_code`, which is not Python: {error}: {text!r:.80}") from None


def _is_json(value: Any) -> bool:
    """Return whether the result of a test can be equal to a value that was read from JSON."""
    try:
        json.dumps(value)
    except TypeError:
        return False
    except (ValueError, RecursionError):
        return True  # such as an integer of more than 4,300 digits
    return True
