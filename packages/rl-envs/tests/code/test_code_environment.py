"""The environment `code`: programs in responses are scored by their tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rl_core.rollouts.environment import Conversation, UnusableAnswer
from rl_core.testing.environment import EnvironmentSuite
from rl_envs.code import harness
from rl_envs.code.cases import Assertions, Calls, InputOutput, read_tests
from rl_envs.code.environment import CodeEnvironment, program_in
from rl_envs.code.grading import grade, same_text, same_value
from rl_envs.code.plugin import CodeConfig
from rl_envs.sandbox.config import SandboxConfig
from rl_envs.sandbox.program import Limits, Outcome, Program
from rl_envs.sandbox.sandbox import Sandbox, SandboxUnavailable

DOUBLE = {"tests": [{"input": "2\n", "output": "4\n"}, {"input": "5\n", "output": "10"}]}
ADD = {"function": "add", "tests": [{"arguments": [1, 2], "result": 3}, {"arguments": [[1], [2]], "result": [1, 2]}]}
ASSERT = {"test_code": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}


@pytest.fixture(scope="module")
def isolation() -> str:
    for level in ("namespaces", "landlock"):
        try:
            Sandbox(level).close()
        except SandboxUnavailable:
            continue
        return level
    pytest.skip("this machine offers no sandbox")


@pytest.fixture(scope="module")
def share(isolation: str) -> CodeEnvironment:
    return CodeEnvironment(_config(isolation, reward="share"))


@pytest.fixture(scope="module")
def strict(isolation: str) -> CodeEnvironment:
    return CodeEnvironment(_config(isolation))


def _config(isolation: str, **settings: Any) -> CodeConfig:
    sandbox = SandboxConfig.model_validate({"isolation": isolation, "cpu_s": 20.0, "wall_s": 120.0})
    return CodeConfig(sandbox=sandbox, **settings)


def _turn(code: str, info: dict[str, Any], id: str = "0") -> Conversation:
    return Conversation(id=id, messages=(), info=info, completion=f"Thus:\n```python\n{code}\n```\nDone.")


@pytest.mark.parametrize(
    ("code", "info", "passes"),
    [
        ("print(2 * int(input()))", DOUBLE, 1.0),
        ("print(4)", DOUBLE, 0.5),
        pytest.param(
            "import sys\nsys.stdout.buffer.write(b'%d' % (2 * int(input())))",
            DOUBLE,
            1.0,
            id="bytes to stdout [NVIDIA-NeMo/Gym#2956]",
        ),
        ("print(1 / 0)", DOUBLE, 0.0),
        ("def add(a, b):\n    return a + b", ADD, 1.0),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", ADD, 1.0),
        ("def add(a, b):\n    return 3", ADD, 0.5),
        ("def add(a: List[int], b) -> Optional[int]:\n    print('noise')\n    return a + b", ADD, 1.0),
        ("def other():\n    pass", ADD, 0.0),
        ("def add(a, b):\n    return a + b", ASSERT, 1.0),
        ("def add(a, b):\n    return 3", ASSERT, 0.5),
        pytest.param("import sys\nsys.exit(0)", ASSERT, 0.0, id="an early end [codewars/codewars.com#2179]"),
        ("import os\nos._exit(0)", ASSERT, 0.0),
        ("def add(a, b):\n    import os; os._exit(0)", ADD, 0.0),
        ("def add(a, b):\n    return {1, 2}.union", ADD, 0.0),
        ("print('unfinished", ADD, 0.0),
    ],
)
def test_a_program_is_scored_by_the_share_of_its_tests_and_by_all(
    share: CodeEnvironment, strict: CodeEnvironment, code: str, info: dict[str, Any], passes: float
) -> None:
    [result] = share.step([_turn(code, info)], [None])
    assert result.rewards()["reward"] == passes, result.info
    [result] = strict.step([_turn(code, info)], [None])
    assert result.rewards()["reward"] == float(passes == 1.0), result.info
    assert bool(result.info["problem"]) == (passes < 1.0)


def test_the_problem_names_the_test_and_the_error(share: CodeEnvironment) -> None:
    [result] = share.step([_turn("def add(a, b):\n    return a / 0", ADD)], [None])
    assert result.info["problem"] == "test 1: ZeroDivisionError: division by zero"
    [result] = share.step([_turn("print(1)", DOUBLE)], [None])
    assert result.info["problem"] == "test 1: another output"


def test_a_response_without_a_program_earns_nothing(strict: CodeEnvironment) -> None:
    [result] = strict.step([Conversation("0", (), DOUBLE, "I do not know.")], [None])
    assert result.rewards()["reward"] == 0.0
    assert result.info["has_code"] == 0.0


def test_expected_results_are_not_where_the_program_is(share: CodeEnvironment) -> None:
    code = """
import gc
def add(a, b):
    known = [each for each in gc.get_objects() if isinstance(each, dict) and each.get("result") == 3]
    return 3 if known else None
"""
    [result] = share.step([_turn(code, ADD)], [None])
    assert result.rewards()["reward"] == 0.0


class TestConformance(EnvironmentSuite):
    @pytest.fixture(autouse=True)
    def _level(self, isolation: str) -> None:
        self.isolation = isolation

    def environment(self) -> CodeEnvironment:
        return CodeEnvironment(_config(self.isolation))

    def conversations(self) -> list[Conversation]:
        codes = ["print(2 * int(input()))", "print(4)", "raise ValueError"]
        return [_turn(code, DOUBLE, id=str(index)) for index, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```\noutput\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```cpp\nint x;\n```", None),
        ("print(1)", None),
        pytest.param(
            "```python\na\n", "a\n", id="a block that is not closed runs to the end [cuga-project/cuga-agent#252]"
        ),
        pytest.param("1. So:\n\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b\n", id="within a list"),
        pytest.param("```python\r\na\r\nb\r\n```\r\n", "a\nb\n", id="line ends of Windows"),
        pytest.param("````python\na = 1\n```\nb\n````", "a = 1\n```\nb\n", id="a longer fence [gptme/gptme#1009]"),
        pytest.param("~~~python\na\n~~~", "a\n", id="tildes"),
        pytest.param("~~~python\n```\n~~~", "```\n", id="the other kind does not close"),
        pytest.param("```python\na\n``` That is all.", "a\n", id="words behind the closing fence"),
        pytest.param("Use ```a``` here.\n```python\nb\n```", "b\n", id="code in a line is no block"),
        pytest.param(
            "```python\nf('```x```')\n```", "f('```x```')\n", id="backticks in a line [huggingface/smolagents#2472]"
        ),
        pytest.param("```{python}\na\n```", "a\n", id="braces around the language"),
        pytest.param("```{.python .numberLines}\na\n```", "a\n", id="attributes"),
        pytest.param("```python:main.py\na\n```", "a\n", id="a name behind the language"),
        pytest.param("~~~python ``` x\na\n~~~", "a\n", id="backticks behind tildes"),
        pytest.param("1. ```python\n   a\n   ```\n2. Done.", "a\n", id="behind the number of a list"),
        pytest.param("- ```py\n  if a:\n      b\n  ```", "if a:\n    b\n", id="behind the mark of a list"),
        pytest.param("> ```python\n> a\n>\n> b\n> ```", "a\n\nb\n", id="a quotation"),
        pytest.param(
            '```python\n"""\n    ```\n    a\n    ```\n"""\n```',
            '"""\n    ```\n    a\n    ```\n"""\n',
            id="a fence that is indented further [commonmark/commonmark-spec#94]",
        ),
        pytest.param("```python\na\n   ```", "a\n", id="a closing fence with three spaces"),
        pytest.param("```python\na\n`````", "a\n", id="a longer closing fence"),
        pytest.param("   ```python\n a\n     b\n   ```", "a\n  b\n", id="less indented than its fence"),
        pytest.param("```python\nx = '\u2028\x0c'\n```", "x = '\u2028\x0c'\n", id="other separators are no line ends"),
        pytest.param("```python\ra\rb\r```", "a\nb\n", id="line ends of old machines"),
        pytest.param("```python\na\n```\nFurther:\n```python\nb", "b\n", id="the last one is cut off"),
        pytest.param("````markdown\n```python\na\n```\n````", None, id="within a block of another language"),
        pytest.param("> " * 60_000 + "```\na", "a\n", id="many quotations"),
        pytest.param("\t```python\n\ta\n\t```", "a\n", id="tabs"),
        pytest.param("`" * 200_000, None, id="many backticks"),
        pytest.param("```\n" * 50_000, None, id="only fences"),
        ("```python\n\n```", None),
        ("```Python3 title\na\n```", "a\n"),
    ],
)
def test_the_last_block_of_python_counts(response: str, program: str | None) -> None:
    assert program_in(response) == program


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        pytest.param(float("nan"), float("nan"), True, id="NaN"),
        pytest.param(1.0, float("nan"), False, id="a number for NaN"),
        pytest.param(float("inf"), float("inf"), True, id="infinity"),
        pytest.param(float("inf"), float("-inf"), False, id="the other infinity"),
        pytest.param(10**400, 1.0, False, id="a whole number beyond the floats"),
        pytest.param(10**5000, 10**5000, True, id="huge"),
        pytest.param(-0.0, 0.0, True, id="zeros"),
        pytest.param({"a": [float("nan")]}, {"a": [float("nan")]}, True, id="NaN within"),
        pytest.param(10**400, 10.0**300, False, id="huge for a large float"),
    ],
)
def test_unusual_numbers_are_compared(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected, 1e-9) == same


DEEP = "def f():\n    x = []\n    for _ in range(20_000):\n        x = [x]\n    return x"


@pytest.mark.parametrize(
    ("code", "info", "reward"),
    [
        pytest.param(DEEP, {"function": "f", "tests": [{"arguments": [], "result": 1}]}, 0.0, id="a deep result"),
        pytest.param(
            "def f():\n    return 10**5000",
            {"function": "f", "tests": [{"arguments": [], "result": 10**5000}]},
            1.0,
            id="a huge whole number [NVIDIA-NeMo/Gym#2956]",
        ),
        pytest.param(
            "def f():\n    return {'c', 'a', 'b'}",
            {"function": "f", "tests": [{"arguments": [], "result": ["a", "b", "c"]}]},
            1.0,
            id="a set is in order",
        ),
        pytest.param(
            "def f():\n    x = []\n    x.append(x)\n    return x",
            {"function": "f", "tests": [{"arguments": [], "result": []}]},
            0.0,
            id="a list that holds itself",
        ),
        pytest.param(
            "def f():\n    return 10**200_000",
            {"function": "f", "tests": [{"arguments": [], "result": 0}]},
            0.0,
            id="a whole number beyond the limit",
        ),
        pytest.param(
            "print(int(input()) + 1)\nexit()",
            {"tests": [{"input": "9" * 9_000, "output": f"1{'0' * 9_000}\n"}]},
            1.0,
            id="a whole number of 9,000 digits, and exit [DMOJ/judge-server#988]",
        ),
        pytest.param(
            "print('1' * 5_000)", {"tests": f'[{{"input": "", "output": {"1" * 5_000}}}]'}, 1.0, id="such an output"
        ),
        pytest.param("def add(a, b):\n    return b'3'", ADD, 0.0, id="bytes"),
        pytest.param("print('\ud83d')", DOUBLE, 0.0, id="half of a surrogate pair"),
        pytest.param("def add(a, b):\n    return '\ud83d'", ADD, 0.0, id="the same in a function"),
        pytest.param("def add(a, b):\n    return float('nan')", ADD, 0.0, id="NaN for a number"),
    ],
)
def test_an_unusual_program_scores_and_raises_nothing(
    share: CodeEnvironment, code: str, info: Any, reward: float
) -> None:
    [result] = share.step([_turn(code, info)], [None])
    assert result.reward == reward


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        pytest.param("1 2\n", "1 2", True, id="a line end [RunestoneInteractive/rs#1020]"),
        pytest.param("1 2  \n3\n\n", "1 2\n3", True, id="spaces at the end [AzenAnn/DSA-Mastery#125]"),
        ("1  2", "1 2", True),
        ("1 2", "1\n2", False),
        ("1.0", "1", True),
        pytest.param("0.3333333", "0.33333333", True, id="digits [LiveCodeBench/LiveCodeBench#133]"),
        ("0.334", "0.333", False),
        pytest.param("1000000", "1000001", False, id="whole numbers [NVIDIA-NeMo/Gym#2956]"),
        ("YES", "Yes", False),
        pytest.param("nan", "1.5", False, id="NaN [DMOJ/judge-server#279]"),
        ("NaN", "nan", True),
        ("Infinity", "inf", True),
        ("-inf", "inf", False),
        ("1_000", "1000", False),
        ("1e99999999999999999999", "1.0", False),
        ("9" * 5000, "9" * 4999 + "8", False),
        ("", "1", False),
        ("1e999999999", "1.0", False),
    ],
)
def test_outputs_are_compared_line_by_line_and_then_as_numbers(output: str, expected: str, same: bool) -> None:
    assert same_text(output, expected, 1e-6) == same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (3, 3, True),
        (3.0, 3, True),
        (True, 1, False),
        ([1, [2.0000000001]], [1, [2.0]], True),
        ([1], [1, 2], False),
        pytest.param([5 * 10**16 + 1], [5 * 10**16], False, id="large whole numbers [NVIDIA-NeMo/Gym#2956]"),
        pytest.param([0.333333], [0.333333333333], True, id="a list of decimals [NVIDIA-NeMo/Gym#2956]"),
        ({"a": 1}, {"a": 1}, True),
        ("3", 3, False),
        (None, None, True),
        (None, [], False),
    ],
)
def test_values_are_compared_by_type(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected, 1e-6) == same


@pytest.mark.parametrize(
    ("line", "found"),
    [
        pytest.param('{"index": 0, "result": 1}', {"index": 0, "result": 1}, id="a report"),
        pytest.param('{"index": 0, "result": ' + "[" * 100_000, None, id="deep"),
        pytest.param('{"index": 0, "result": ' + "9" * 200_000 + "}", None, id="a whole number beyond the limit"),
        pytest.param('{"index": 0, "resu', None, id="cut off"),
        pytest.param("[]", None, id="no object"),
        pytest.param('{"index": "0"}', None, id="no index"),
    ],
)
def test_forged_reports_are_left_out(line: str, found: Any) -> None:
    reports = harness.reports(Outcome("exit", 0, stdout=f"noise\nmark {line}\n".encode()), "mark")
    assert reports == ({} if found is None else {0: found})


def test_a_forged_error_is_no_text_of_any_depth() -> None:
    class Forger:
        def run(self, program: Program, limits: Limits | None = None) -> Outcome:
            mark = json.loads(program.stdin)["mark"]
            deep = "[" * 900 + "]" * 900
            return Outcome("exit", 0, stdout=f'{mark} {{"index": 0, "error": {deep}}}\n'.encode())

        def close(self) -> None:
            pass

    calls = Calls("f", ([],), ([1],))
    assert grade("", calls, Forger(), Limits(), tolerance=0.0, stop_early=False)[2] == "test 1: no result"


def test_a_test_may_have_a_huge_whole_number() -> None:
    text = f'[{{"arguments": [], "result": {"9" * 5000}}}]'
    assert read_tests({"tests": text, "function": "f"}, None) == Calls("f", ([],), ([10**5000 - 1],))


def test_tests_have_three_forms() -> None:
    assert read_tests(DOUBLE, None) == InputOutput((("2\n", "4\n"), ("5\n", "10")))
    assert read_tests({"tests": json.dumps(DOUBLE["tests"])}, 1) == InputOutput((("2\n", "4\n"),))
    assert read_tests(ADD, None) == Calls("add", ([1, 2], [[1], [2]]), ([3], [[1, 2]]))
    assert read_tests({"test_code": "assert x"}, None) == Assertions(("assert x",))


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"answer": "1"}, "its fields are answer"),
        ({"tests": []}, "at least one test"),
        ({"tests": "["}, "not valid JSON"),
        ({"tests": [{"in": 1}]}, "input and output"),
        ({"tests": [{"input": 1}], "function": "f"}, "arguments and result"),
        ({"test_code": []}, "test_code"),
        ({"test_code": 5}, "test_code"),
        ({"tests": [{"input": None, "output": "x"}]}, "both strings"),
        ({"tests": [{"arguments": {"a": 1}, "result": 1}], "function": "f"}, "the first a list"),
        ({"tests": [{"arguments": "ab", "result": 1}], "function": "f"}, "the first a list"),
        ({"tests": [{"arguments": [b"x"], "result": 1}], "function": "f"}, "plain data of JSON"),
        ({"tests": [{"arguments": [10**5000], "result": 1}], "function": "f"}, "4300 digits"),
        ({"tests": "[" * 100_000}, "not valid JSON"),
    ],
)
def test_a_row_without_usable_tests_is_refused(info: dict[str, Any], says: str) -> None:
    with pytest.raises(UnusableAnswer, match=says):
        read_tests(info, None)


@pytest.mark.parametrize(
    "info",
    [
        pytest.param({"test_code": ["def check(c):\n    assert c(2) == 4\n\ncheck(f)\n"]}, id="humaneval_plus"),
        pytest.param({"test_code": ["\nassert f(2) == 4"]}, id="mbpp_plus"),
        pytest.param({"function": "f", "tests": [{"arguments": [2], "results": [[4], 4]}]}, id="taco"),
        pytest.param({"function": "f", "tests": [{"arguments": [2], "result": 4}]}, id="livecodebench"),
    ],
)
def test_a_right_program_passes_the_tests_of_its_row(strict: CodeEnvironment, info: dict[str, Any]) -> None:
    results = strict.step([_turn(f"def f(a):\n    return {n} * a", info, str(n)) for n in (2, 3)], [None, None])
    assert [result.rewards()["reward"] for result in results] == [1.0, 0.0]
