"""Pairs of answers that are the same or not. A case is a line: two answers, in whatever form people write them.

More cases are the lines of `same_answers.txt` and `different_answers.txt`.
"""

from pathlib import Path

import pytest

from rl_core.rollouts.environment import Conversation
from rl_envs.math.environment import MathEnvironment
from rl_envs.math.form import Expression, read
from rl_envs.math.number import exact_value
from rl_envs.math.plugin import MathConfig
from rl_envs.math.verdict import judge


def lines(name):
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return [tuple(line.split(" ~ ")) for line in text.splitlines()]


SAME = [
    ("1:2", "2:4"),
    ("3:4", r"\frac{3}{4}"),
    ("09:05", "9:05"),
    ("17", "m+n = 17"),
    ("1/2", r"P(A)=\frac{1}{2}"),
    ("5", r"\text{Total cost} = 5"),
    ("7", "3+4=7"),
    (r"1,2", r"x=1 \text{ or } x=2"),
    (r"\text{5 m}", r"5\text{ m}"),
    ("30", r"30^\circ"),
    ("30 degrees", "30°"),
    (r"\$5", "5 dollars"),
    (r"[-5,-3)", r"-5 \le x < -3"),
    (r"(1,2]", r"2 \geq t > 1"),
    ("1 1/2", "3/2"),
    ("1.5", "1 1/2"),
    ("1000", r"1\,000\text{ km}"),
    (r"(-\infty,2]", r"x \le 2"),
    (r"x \le 2", r"(-\infty,2]"),
    ("1/3", r"0.\overline{3}"),
    (r"0.\overline{3}", r"\frac13"),
    ("0.(3)", "1/3"),
    (r"[1,2]\cup[3,4]", r"[3,4]\cup[1,2]"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("1,2", "2 and 1"),
    ("1,2", "x=1, x=2"),
    (r"1\pm\sqrt2", r"1+\sqrt{2}, 1-\sqrt{2}"),
    ("1010_2", "1010_{2}"),
    ("60 mph", "60 miles per hour"),
    ("12 cm^2", "12 square centimeters"),
    ("5 m", "5 meters"),
    pytest.param("1<x<2", "(1,2)", id="an open interval [huggingface/Math-Verify#10]"),
    ("f(x)=x+1", "f(x) = 1+x"),
    ("(1,2)", "(1, 2)"),
    (r"\{1,2\}", "{2,1}"),
    ("2^{100}", "1267650600228229401496703205376"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"\log 8", r"3\log 2"),
    ("U.S.", "u.s."),
    ("2x+1", "1+2x"),
    (r"\binom{5}{2}", "10"),
    ("y=2x+3", "y = 3+2x"),
    (r"\text{Monday}", "monday"),
    (r"x\in[1,2)", "[1,2)"),
    (r"50\%", "0.5"),
    (r"1, 2, \ldots, n", r"1,2,\dots,n"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
    ("-3", "- 3"),
    ("3!", "6"),
    (r"\cos x", r"\cos(x)"),
    (r"e^{i\pi}", "-1"),
    pytest.param("x>3", r"(3,\infty)", id="a ray [huggingface/Math-Verify#71]"),
    ("a=1, b=2", "a=1,b=2"),
    pytest.param(r"m \geq \sqrt{2}", r"m \in [\sqrt{2}, +\infty)", id="a bound and a set [huggingface/Math-Verify#25]"),
    pytest.param(r"\text{13}", "13", id="a number as text [huggingface/Math-Verify#37]"),
    pytest.param("2x+4y-3=0", "y = -1/2*x + 3/4", id="a line in two forms [huggingface/Math-Verify#26]"),
    pytest.param(r"28\%", "28 percent", id="percent as a word [huggingface/Math-Verify#61]"),
    pytest.param(r"\frac{0.5a}{b}/0.5", r"2\frac{a}{2b}", id="a decimal in a fraction [openai/prm800k#19]"),
    pytest.param("[8.124,12.852]", "[8.124, 12.852]", id="decimals without a space [databricks/officeqa#23]"),
    ("1:2", "1:2"),
    ("12:30", "12:30"),
    (r"e^{i\pi}", "-1"),
]

DIFFERENT = [
    pytest.param("12:00", "1:00", id="times of day [huggingface/Math-Verify#14]"),
    ("2:40", "1:20"),
    ("1:2:3", "1:2:4"),
    (r"\frac{1}{0}", r"\frac{5}{0}"),
    ("4", "x^2=4"),
    ("17", "m+n = 18"),
    (r"\sin(1)", r"\sin(1^\circ)"),
    (r"30\text{ rad}", r"30^\circ"),
    (r"\$5", "€5"),
    ("£5", r"5\text{ euros}"),
    ("11/2", "1 1/2"),
    ("12", "1 2"),
    pytest.param("1/2^{60}", "1/2^{61}", id="tiny [huggingface/Math-Verify#14]"),
    pytest.param(
        r"\frac{2^{100}+1}{3\cdot 2^{101}}",
        r"\frac{1}{3\cdot 2^{101}}",
        id="a tiny difference [huggingface/Math-Verify#14]",
    ),
    ("U.S.", "U.K."),
    ("5 m", "5 cm"),
    (r"5\text{ m}", "5 cm"),
    ("12 cm^2", "12 cm^3"),
    ("5 m/s", "5 m"),
    ("1010_2", "1010_3"),
    ("1010_2", "1010"),
    pytest.param(r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1", id="sequences [huggingface/Math-Verify#14]"),
    ("[1,2]", "(1,2)"),
    ("(1,2)", "(2,1)"),
    ("1,2", "1,3"),
    ("1,2", "1,2,3"),
    ("1,1", "1"),
    (r"\{1,2\}", "(1,2)"),
    ("x<2", r"x \le 2"),
    ("x=5", "6"),
    ("x=5", "y=6"),
    (r"\pi", "3.14159265358979"),
    ("1/3", "0.333"),
    ("0.1", "0.10000000001"),
    (r"(-\infty,2]", r"(-\infty,2)"),
    ("60 mph", "60 km/h"),
    ("x+1", "x+2"),
    ("sqrt(2)", "1.41421356"),
    ("12:30", "12.5"),
    ("1:2", "2:1"),
    ("a=1, b=2", "a=2,b=1"),
    ("10^{-8}", "10^{-9}"),
    ("5", "5x"),
    ("x^2", "x"),
    ("John Smith", "Smith"),
    (r"\frac{1}{7}", "0.142857"),
    ("3", "-3"),
    ("1,000", "1,0000"),
    ("1000", "1 000,5"),
    (r"\sin x", r"\cos x"),
    ("2 hours", "2 minutes"),
    ("y=x+1", "y=x-1"),
    pytest.param("x=1 or x=2", "x=1", id="one of two [huggingface/Math-Verify#47]"),
    ("5!", "5"),
    (r"\{1, \{2\}\}", r"\{1,2\}"),
    ("5", "nan"),
    ("e^{2}", "e^{3}"),
    ("i", "-i"),
    pytest.param("n=2, 3, 4", "n=1, 2, 3", id="values of a name [huggingface/Math-Verify#14]"),
    pytest.param("D = (0, 1)", "D = (0, 1.5)", id="an interval with a name [huggingface/Math-Verify#14]"),
    pytest.param(r"\pm 2021", "2021", id="one sign of both [huggingface/Math-Verify#14]"),
    pytest.param(
        r"1 - \frac{1}{\mathrm{e}}",
        r"1 + \frac{1}{\mathrm{e}}",
        id="the same number in both [huggingface/Math-Verify#82]",
    ),
    pytest.param("3*x-1*y+13=0", "3x + 4y + 14=0", id="equations with 0 [huggingface/Math-Verify#60]"),
    pytest.param("4", r"4\sqrt(2)", id="a root in other brackets [huggingface/Math-Verify#41]"),
    pytest.param(
        r"\left( 3, \frac{\pi}{2} \right)",
        r"(3, \frac{2\pi}{3})",
        id="pairs without dollars [huggingface/Math-Verify#56]",
    ),
]

HOSTILE = {
    "brackets": r"\boxed{" + "(" * 50 + "1" + ")" * 50 + "}",
    "many brackets": r"\boxed{" + "(" * 800 + "1" + ")" * 800 + "}",
    "a tower [huggingface/Math-Verify#65]": r"\boxed{9^{9^{9^{9}}}}",
    "a factorial": r"\boxed{(10^7)!}",
    "open boxes": r"\boxed{" * 6000,
    "nested boxes": r"\boxed{" * 3000 + "1" + "}" * 3000,
    "spaces": "answer" + " " * 100_000 + "x",
    "braces": r"\boxed{" + "{" * 20_000 + "}" * 20_000 + "}",
    "commas": "1,111" * 20_000,
    "letters": r"\boxed{" + "x" * 200_000 + "}",
    "a product": r"\boxed{\prod_{k=1}^{999} k!}",
    "many spaces": r"\boxed{" + "x " * 100_000 + "}",
    "half a surrogate pair": "\\boxed{\ud83d}",
}


@pytest.mark.parametrize(("one", "other"), [*SAME, *lines("same_answers.txt")])
def test_the_same_answer_is_right_whichever_is_known(one, other):
    assert (judge(one, other, "auto"), judge(other, one, "auto")) == (True, True)


@pytest.mark.parametrize(("one", "other"), [*DIFFERENT, *lines("different_answers.txt")])
def test_another_answer_is_wrong_whichever_is_known(one, other):
    assert True not in (judge(one, other, "auto"), judge(other, one, "auto"))


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ("7", "10-3"),
        ("10-3", "9-2"),
        ("9", r"9\text{ squared}"),
        ("3", "3 blorps"),
        ("12 apples", "12 oranges"),
        ("ABC", "CBA"),
        ("x>3", "y>3"),
        ("x=5", "y=5"),
        ("3", "5=3"),
        ("2", "x^2=4"),
        ("(2,3)", "y=2, x=3"),
        ("f(x)", "f'(x)"),
        ("3:45 PM", "3:45"),
        ("2x", r"\frac{d}{dx}x^2"),
        (r"\ln x^2", r"2\ln x"),
        ("3,14", "3.14"),
        (r"\log 2", r"\ln 2"),
    ],
)
def test_what_can_be_neither_proven_nor_refuted_is_undecided(known, said):
    assert judge(said, known, "auto") is None


def test_two_whole_numbers_with_a_comma_are_a_decimal_if_the_known_answer_is_one():
    assert judge("3,14", "3.14", "auto") is True
    assert judge("3,14", "14, 3", "auto") is True


def test_a_string_that_is_too_long_is_not_read():
    assert isinstance(read("9" * 200_000), Expression)


@pytest.mark.parametrize("completion", HOSTILE.values(), ids=HOSTILE)
def test_an_answer_that_would_cost_time_is_wrong_within_the_limit(completion):
    conversation = Conversation("0", (), {"answer": r"\sqrt{2}"}, completion)
    [result] = MathEnvironment(MathConfig()).step([conversation], [None])
    assert result.reward == 0.0


@pytest.mark.parametrize(
    ("known", "said", "unparsed"),
    [
        ("x^2", r"\boxed{x^2}", 0.0),
        ("x^2", r"\boxed{x^3}", 0.0),
        ("x^2", r"\boxed{\foo{x}}", 1.0),
        ("2", "no idea", 0.0),
    ],
)
def test_the_record_says_where_the_grader_could_not_decide(known, said, unparsed):
    [result] = MathEnvironment(MathConfig()).step([Conversation("0", (), {"answer": known}, said)], [None])
    assert result.info["unparsed"] == unparsed


@pytest.mark.parametrize("answer", ["U.S.", "x", "B cell", "AB", "b"])
def test_only_a_capital_letter_alone_makes_a_row_multiple_choice(answer):
    [result] = MathEnvironment(MathConfig()).step([Conversation("0", (), {"answer": answer}, r"\boxed{B}")], [None])
    assert result.reward == 0.0


@pytest.mark.parametrize(
    "answer",
    [float("nan"), float("inf"), "NaN", pytest.param("", id="empty [huggingface/open-r1#503]"), None, True, []],
)
def test_an_answer_that_nobody_can_give_is_refused(answer):
    with pytest.raises(ValueError, match="answer"):
        MathEnvironment(MathConfig()).step([Conversation("0", (), {"answer": answer}, "1")], [None])


@pytest.mark.parametrize("text", ["1 2", "1,00", "x", "", "1/0", "9^{9^{9}}", "3000!", "(1", "1)", "--", "2^{1/2}"])
def test_what_is_no_constant_expression_has_no_exact_value(text):
    assert exact_value(text) is None
