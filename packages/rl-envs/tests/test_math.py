from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.environments.pool import EnvironmentPool
from rl_core.plugins import ENVIRONMENTS, plugin, resolve
from rl_core.rollouts.environment import Conversation
from rl_core.testing.environment import EnvironmentSuite
from rl_envs.math.environment import MathEnvironment
from rl_envs.math.extraction import last_box
from rl_envs.math.number import read_number
from rl_envs.math.plugin import MathConfig
from rl_envs.time_limit import outside_of_limit, within


def said(completion: str, answer: Any = "7", name: str = "0") -> Conversation:
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": completion})
    return Conversation(id=name, messages=messages, info={"answer": answer}, completion=completion)


def accuracy(completion: str, answer: Any, answer_format: str = "auto") -> float:
    environment = MathEnvironment(MathConfig(answer_format=answer_format))
    return environment.step([said(completion, answer)], [None])[0].info["accuracy"]


class TestMathEnvironment(EnvironmentSuite):
    def environment(self) -> MathEnvironment:
        return MathEnvironment(MathConfig())

    def conversations(self) -> list[Conversation]:
        return [
            said(r"\boxed{7}", name="a"),
            said("nothing", name="b"),
            said(r"\boxed{x + 1}", "1 + x", name="c"),
            said("The answer is (B)", "B", name="d"),
        ]


EQUAL = [
    ("1/2", r"\boxed{0.5}"),
    ("1/2", r"\boxed{\frac12}"),
    ("0.5", r"\boxed{\dfrac{1}{2}}"),
    (r"\frac{1}{2}", "The answer is $1/2$."),
    ("-1/2", r"\boxed{-\frac{1}{2}}"),
    ("-1/2", r"\boxed{\frac{-1}{2}}"),
    pytest.param("1000", r"\boxed{1,000}", id="thousands [open-compass/opencompass#2647]"),
    pytest.param("1000", r"\boxed{1{,}000}", id="thousands of LaTeX [open-compass/opencompass#2647]"),
    ("1000", r"\boxed{1\,000}"),
    ("1000", r"\boxed{10^{3}}"),
    ("1200", r"\boxed{1.2 \times 10^{3}}"),
    ("1000", "Answer: 1e3"),
    ("3000000", r"\boxed{3 \text{ million}}"),
    ("7/2", r"\boxed{3\frac{1}{2}}"),
    ("3.5", "The answer is 3 1/2"),
    ("0.5", r"\boxed{50\%}"),
    pytest.param("50", r"\boxed{50\%}", id="percent without its sign [huggingface/Math-Verify#67]"),
    ("50%", r"\boxed{0.5}"),
    ("12", r"\boxed{12\text{ cm}}"),
    ("12", r"\boxed{12\ \mathrm{cm}^2}"),
    ("12 cm", r"\boxed{12}"),
    ("12", "The answer is 12 apples."),
    ("90", r"\boxed{90^\circ}"),
    ("90", "The answer is 90°"),
    ("18", r"\boxed{\$18}"),
    ("18", "#### 18"),
    ("0", r"\boxed{-0}"),
    ("0", r"\boxed{0.0}"),
    ("-5", r"\boxed{−5}"),
    (5, r"\boxed{5}"),
    (0.1, r"\boxed{\frac{1}{10}}"),
    (["1", "2"], r"\boxed{2}"),
    (r"\boxed{4}", r"\boxed{4.0}"),
    ("5", r"\boxed{\boxed{5}}"),
    pytest.param("5", r"First \boxed{4}, no: \boxed{5}", id="the last box [thinking-machines-lab/tinker-cookbook#903]"),
    ("5", r"\boxed{5} but the box \boxed{6 is never closed"),
    ("5", "Answer: 4. Wait.\n**Answer:** 5"),
    ("5", "The answer is:\n5"),
    pytest.param("5", r"Answer: \boxed{5}", id="a box behind a cue [THUDM/slime#543]"),
    pytest.param(
        "1",
        r"The answer is \boxed{1}. Yeah, it is \boxed{1} because of x.",
        id="a box twice [huggingface/Math-Verify#57]",
    ),
    pytest.param("42", r"\fbox{42}", id="a frame [OpenRLHF/OpenRLHF#1285]"),
    pytest.param(r"\frac{1}{2}", r"\fbox{\frac{1}{2}}", id="a fraction in a frame [THUDM/slime#2150]"),
    pytest.param("42", r"<answer>\boxed{42}</answer>", id="a box in a tag [AI-Hypercomputer/maxtext#4150]"),
    pytest.param("29", "#### $29.00", id="dollars and cents [EleutherAI/lm-evaluation-harness#3254]"),
    pytest.param("1/2", "#### 1/2", id="a fraction behind a mark [greynewell/matchspec#306]"),
    pytest.param("9500", "The answer is $9{,}500.", id="dollars and thousands [open-compass/opencompass#2647]"),
    pytest.param(r"28\%", r"$\boxed{28 pct}$", id="percent in a box [huggingface/Math-Verify#61]"),
    pytest.param(r"\sqrt{17}", r"The answer is \sqrt{17}", id="a root without dollars [huggingface/Math-Verify#29]"),
    pytest.param(
        r"1-\sqrt{2}", r"The answer is 1 - \sqrt{2}", id="a difference without dollars [huggingface/Math-Verify#74]"
    ),
    ("17", "Final: **17**"),
    ("17", "**Final:** 17"),
    ("17", "The answer is 16? No.\nFinal result = 17."),
    ("9" * 5000, r"\boxed{" + "9" * 5000 + ".0}"),
    (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}"),
    (r"\sqrt{2}", "The answer is sqrt(2)"),
    (r"2\pi", "The answer is 2pi"),
    ("x^2+1", r"\boxed{1 + x^2}"),
    ("x=5", r"\boxed{5}"),
    (r"[0,\infty)", r"\boxed{[0, \infty)}"),
    ("(0,1)", r"\boxed{\left(0, 1\right)}"),
    (r"\{1,2\}", r"\boxed{\{2, 1\}}"),
    ("1,2", r"\boxed{2, 1}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"),
    ("Tuesday", "The answer is tuesday."),
    (r"\text{no solution}", r"\boxed{\text{No solution}}"),
    ("B", "The answer is (B)"),
    ("B", r"\boxed{B}"),
    ("B", r"\boxed{\text{(B) } 12}"),
    ("(B)", "Answer: b"),
    ("B", "I think so.\nB"),
    ("B", "Options (A) and (B) remain; I say (B), since it is larger"),
]

DIFFERENT = [
    ("1/2", r"\boxed{0.50001}"),
    ("0.1", r"\boxed{0.10000001}"),
    ("1/3", r"\boxed{0.333333}"),
    ("0.5", r"\boxed{50}"),
    ("1000", r"\boxed{1,0000}"),
    ("12 cm", r"\boxed{12\text{ m}}"),
    ("12345678901234567890", r"\boxed{12345678901234567891}"),
    ("9" * 5000, r"\boxed{" + "9" * 4999 + "8}"),
    ("9007199254740993", r"\boxed{9007199254740992}"),
    ("5", r"\boxed{5} then \boxed{6}"),
    ("5", r"\boxed{5"),
    ("5", ""),
    pytest.param("5", r"\boxed{}", id="an empty box [marin-community/marin#9163]"),
    ("5", "It is 5 or maybe 6"),
    ("7", r"\boxed{7x}"),
    ("[0,1)", r"\boxed{(0,1)}"),
    (r"\{1,2\}", r"\boxed{\{1,3\}}"),
    ("x^2+1", r"\boxed{x^2-1}"),
    ("Tuesday", r"\boxed{Tuesyda}"),
    ("B", "The answer is (C)"),
    ("B", r"\boxed{12}"),
    ("B", "Because of that, no"),
    ("B", r"Not (B): \boxed{C}"),
    pytest.param(r"\frac{63}{400}", r"\boxed{\frac{64}{400}}", id="fractions [huggingface/open-r1#566]"),
]

STATED = [
    ("12", "The answer is $12$ dollars."),
    ("12", "La réponse est 12."),
    ("12", "Die Antwort ist 12"),
    ("12", "La respuesta es $12$."),
    ("12", "答案是12。"),
    ("12", "答えは12です。"),
    ("12", "Ответ: 12"),
    ("12", "A resposta é 12"),
    ("12", "La risposta è: 12"),
    ("12", "정답은 12입니다."),
    ("12", "<answer>12</answer>"),
    ("12", "<answer> $12$ </answer>"),
    ("12", r"<think>x</think><answer>\boxed{12}</answer>"),
    ("7", r"\boxed 7"),
    ("x", r"so \boxed x"),
    ("12", "The answer to the question is 12."),
    ("One plus one is 2.\n#### 2", "1+1=2\n#### 2"),
    ("#### 2", "2"),
    ("The answer is 2", "2"),
    ("$2$ dollars", "2"),
    ("Answer: 2", r"\boxed{2}"),
    ("12", "Final Answer: The final answer is $12$. I hope it is correct."),
    ("5", "**Answer:** $x=5$"),
    ("0.5", "The answer is: \n\n$$\\frac{1}{2}$$"),
    ("12", r"The final answer is $\boxed{12}$"),
    ("12", "**12**"),
    ("12", "Answer: 12."),
    ("12", "I get 12"),
    ("12", "The correct answer is 12 cm."),
    ("12", r"Therefore, the answer is \(12\)."),
    ("12", "x = 12"),
    ("12", "The value is $x = 12$."),
    ("12", "So the total is 12."),
]
WHOLE_NUMBERS = [
    ("12", "The answer is 3*4 = 12"),
    ("2.5", "2 1/2"),
    ("2.5", "The answer is 2 1/2"),
    ("42", "12+30=42"),
    ("42", "it makes 42 in all"),
    ("12", "The answer is $12$ dollars."),
    ("12", r"\boxed{12 \text{ cm}}"),
    ("25000", r"\boxed{25 000 \text{ people}}"),
    ("5", "#### 5"),
    ("5", "<answer>5</answer>"),
    ("5", "<answer>the answer is 5</answer>"),
    ("7", r"\boxed 7"),
    ("7", r"\boxed7"),
    ("5", "So we get $x=5$."),
    ("72", "the total is 72 clips, altogether."),
    ("1234", "The answer is 1,234."),
    ("42", "42"),
    ("1024", r"\boxed{2^{10}}"),
    ("-2", "so it is -2."),
    ("-2", "so it is $-2$"),
    ("42", "=42"),
    ("5", "The price is $5."),
    ("5.5", "The price is $5.50"),
    ("7", "I have 3 and 4, so 7"),
    ("1000", "1e3"),
    ("3000000", "3 million"),
    ("0.5", "The answer is 0.5 of the total"),
    ("0.5", "The answer is ½"),
    ("5", "It takes 5 hours"),
    ("0.5", "50%"),
    ("7", "therefore 3+4=7"),
    ("7", "Thus the sum is 3 + 4 = 7."),
    ("5", "a) 5"),
]
NOT_NUMBERS = [
    ("5", r"\boxed{5\sqrt{2}}"),
    ("5", r"\boxed{\sqrt{5}}"),
    ("5", r"\boxed{5!}"),
    ("5", r"\boxed{5x}"),
    ("5", r"\boxed{5 \text{ or } 6}"),
    ("1", r"\boxed{[1,2]}"),
    ("2", r"\boxed{\log_2 5}"),
    ("3", r"\boxed{3+4i}"),
    ("3", r"$3\pi$"),
    ("3", r"The answer is $3\pi$"),
    ("2", "2^10"),
    ("1", r"1 \times 10^5"),
    ("3", "The answer is between 3 and 4"),
    ("3", "between 3 and 4"),
    ("4", "between 3 and 4"),
    ("3", "The answer is 3 halves"),
    ("3", "it is 3 dozen"),
    ("5", "5 squared"),
    ("5", "x5"),
    ("0.06", "5%"),
    ("3", "3/4"),
    ("5", "-5"),
    ("1", "1e5"),
    ("3", "3:4"),
    ("6", "5 to 6"),
    ("4", "the ratio 3:4"),
    ("6", "5 or 6"),
    ("6", "x = 5, y = 6"),
    ("5", r"\boxed{x=5, y=6}"),
    ("3", r"\boxed{5=3}"),
    ("3", "10 - 3"),
    ("2", "2024-01-02"),
    ("1", "3.5.1"),
    ("3", "answer: 1/2/3"),
    ("5", "it is 5 factorial"),
    ("0.5", r"\boxed{\frac{1}{2}x}"),
    ("2", "1,2"),
    ("5", "5 and a half"),
    ("2", "1 2"),
    ("5", r"\boxed{5_8}"),
    ("4", "(3, 4)"),
    ("6", "|5|"),
    ("5", r"$5 \pm 1$"),
    ("5", "5°C = 41°F"),
]


@pytest.mark.parametrize(("answer", "completion"), EQUAL)
def test_equal_answers_are_right(answer: Any, completion: str) -> None:
    assert accuracy(completion, answer) == 1.0


@pytest.mark.parametrize(("answer", "completion"), DIFFERENT)
def test_different_answers_are_wrong(answer: Any, completion: str) -> None:
    assert accuracy(completion, answer) == 0.0


@pytest.mark.parametrize(("answer", "completion"), STATED)
def test_an_answer_is_found_behind_its_phrase_tag_or_mark(answer: Any, completion: str) -> None:
    assert accuracy(completion, answer) == 1.0


@pytest.mark.parametrize(("answer", "completion"), WHOLE_NUMBERS)
def test_a_numeric_answer_is_read_as_a_whole(answer: Any, completion: str) -> None:
    assert accuracy(completion, answer, "numeric") == 1.0


@pytest.mark.parametrize(("answer", "completion"), NOT_NUMBERS)
def test_a_number_that_is_part_of_something_else_is_not_a_numeric_answer(answer: Any, completion: str) -> None:
    assert accuracy(completion, answer, "numeric") == 0.0


@pytest.mark.parametrize(
    ("answer_format", "completion", "answer", "expected"),
    [
        ("boxed", "The answer is 5", "5", 0.0),
        pytest.param(
            "auto",
            "The answer is 72, in total, so the farmer earns that much.",
            "72",
            1.0,
            id="a reason behind it [stanford-crfm/helm#4337]",
        ),
        ("auto", "The answer is 72. This is because 70 + 2 is.", "72", 1.0),
        ("auto", "The answer is 72, or 73, as it seems.", "72", 0.0),
        ("auto", "The answer is 72. So no, it is 73.", "72", 0.0),
        ("auto", "The answer is 5, the second is 6", "5", 0.0),
        pytest.param(
            "auto", r"\boxed{\text{The answer is 460}}", "460", 1.0, id="a sentence in a box [modelscope/evalscope#906]"
        ),
        ("boxed", r"\boxed{5}", "5", 1.0),
        ("plain", r"I had \boxed{6}. The answer is 5", "5", 1.0),
        ("plain", "5", "5", 1.0),
        ("numeric", "12+30=42", "42", 1.0),
        ("numeric", "it makes 42 in all", "42", 1.0),
        pytest.param(
            "numeric", "The total is 72 clips, altogether.", "72", 1.0, id="a comma behind it [jundot/omlx#3484]"
        ),
        pytest.param(
            "numeric", "The answer is 72, in total, so it is.", "72", 1.0, id="two commas [stanford-crfm/helm#4337]"
        ),
        pytest.param("numeric", "3a5", "5", 0.0, id="a letter between [stanford-crfm/helm#4289]"),
        ("numeric", "The answer is 42, as 40 + 2 = 41 + 1", "42", 1.0),
        ("numeric", "5-2", "2", 0.0),
        ("numeric", "is it -2", "2", 0.0),
        ("numeric", "1,234", "1234", 1.0),
        ("numeric", r"\boxed{x = 1/2}", "0.5", 1.0),
        ("numeric", "no idea", "42", 0.0),
        ("choice", "(A) is wrong. (C)", "C", 1.0),
        ("choice", "C. because it is", "C", 1.0),
        ("choice", "A bird in the hand", "A", 0.0),
    ],
)
def test_the_answer_is_read_where_the_format_says(
    answer_format: str, completion: str, answer: str, expected: float
) -> None:
    assert accuracy(completion, answer, answer_format) == expected


def test_rewards_are_those_of_the_config() -> None:
    environment = MathEnvironment(MathConfig(correct_reward=2.0, wrong_reward=-1.0, format_reward=0.25))
    conversations = [said(r"\boxed{7}"), said(r"\boxed{8}"), said("7"), said("8")]
    results = environment.step(conversations, [None] * 4)
    assert [result.rewards()["reward"] for result in results] == [2.25, -0.75, 2.0, -1.0]
    assert [result.rewards()["format"] for result in results] == [0.25, 0.25, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "answer_format", "says"),
    [
        ("", "auto", "empty"),
        ([], "auto", "empty list"),
        (None, "auto", "string or a number"),
        ("12", "choice", "letter"),
        ("x", "numeric", "number"),
    ],
)
def test_an_unusable_known_answer_is_an_error(answer: Any, answer_format: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        accuracy("1", answer, answer_format)


def test_a_prompt_without_answer_is_an_error() -> None:
    conversation = Conversation(id="0", messages=(), info={"question": "?"}, completion="1")
    with pytest.raises(ValueError, match="question"):
        MathEnvironment(MathConfig()).step([conversation], [None])


fractions = st.fractions(min_value=-(10**40), max_value=10**40)
decimals = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**30), max_value=10**30, places=12)


@given(fractions)
def test_fractions_are_read_exactly(value: Fraction) -> None:
    sign, size = ("-" if value < 0 else ""), abs(value)
    for text in (str(value), f"{sign}\\frac{{{size.numerator}}}{{{size.denominator}}}", f"${sign}{size}$".strip("$")):
        number = read_number(text)
        assert number is not None
        assert number.value == value


@given(decimals)
def test_decimals_are_read_exactly(value: Decimal) -> None:
    for text in (f"{value:f}", f"{value:,f}", f"{value:e}"):
        number = read_number(text)
        assert number is not None
        assert number.value == Fraction(value)


@given(st.integers(min_value=-(10**60), max_value=10**60), st.integers(min_value=-(10**60), max_value=10**60))
def test_integers_are_equal_when_they_are(a: int, b: int) -> None:
    assert accuracy(rf"\boxed{{{a:,}}}", str(b), "numeric") == float(a == b)
    assert accuracy(f"The answer is {a}.", str(a)) == 1.0


@given(st.text(alphabet=r"0123456789.,/-+^{}\%$ eE()ab", max_size=30))
def test_any_text_is_a_number_or_not_but_never_an_error(text: str) -> None:
    number = read_number(text)
    assert number is None or isinstance(number.value, Fraction)


@given(st.text(alphabet=r"ab{}\ ", max_size=20))
def test_a_box_gives_back_what_is_in_it(text: str) -> None:
    depth, balanced = 0, not text.endswith("\\")
    escaped = False
    for character in text:
        depth += 0 if escaped else {"{": 1, "}": -1}.get(character, 0)
        escaped = character == "\\" and not escaped
        balanced = balanced and depth >= 0
    if balanced and not depth and not escaped:
        assert last_box(rf"so \boxed{{{text}}} it is") == text


def test_numbers_need_no_sympy() -> None:
    code = r"""
import sys
import time
from test_math import accuracy
assert accuracy("\\boxed{12}", "12") and not accuracy("14", "15") and not accuracy("no idea", "15")
assert accuracy("(B)", "B")
assert not {"sympy", "math_verify"} & set(sys.modules)
assert accuracy("\\boxed{x+1}", "1+x")
assert "sympy" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def test_an_answer_that_would_hang_sympy_is_wrong_and_costs_no_other() -> None:
    tower = r"\boxed{\left(x+1\right)^{10^{9}} + 9^{9^{9^{9}}}}"

    async def run() -> None:
        environment = plugin(ENVIRONMENTS, "math")
        assert resolve(environment.environment) is MathEnvironment
        # long enough for the others on a loaded machine, as sympy takes seconds to import
        config = MathConfig(num_workers=1, deadline_s=15.0)
        pool = EnvironmentPool.of(environment.environment, config, name="math")
        try:
            outcomes = await pool.step(
                [said(tower, "x^2", "0"), said(r"\boxed{7}", name="1"), said(r"\boxed{8}", name="2")]
            )
            assert [outcome.reward for outcome in outcomes] == [0.0, 1.0, 0.0]
        finally:
            await pool.close()

    asyncio.run(run())


def test_an_import_is_neither_counted_nor_cut_off_by_the_limit(tmp_path, monkeypatch):
    slow = "import time\nwhile time.process_time() < {end}:\n    pass\nvalue = 7\n"
    (tmp_path / "slow_to_import.py").write_text(slow.format(end=time.process_time() + 0.5))
    monkeypatch.syspath_prepend(str(tmp_path))

    def compute():
        with outside_of_limit():
            import slow_to_import
        return slow_to_import.value

    assert within(0.2, compute) == 7

    def spin():
        with outside_of_limit():
            pass
        while True:
            pass

    assert within(0.2, spin) is None
