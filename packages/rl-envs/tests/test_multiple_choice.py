"""The environment `multiple_choice`, and the grammar of stated letters."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.rollouts.environment import Conversation, UnusableAnswer
from rl_core.testing.environment import EnvironmentSuite
from rl_envs.multiple_choice.environment import MultipleChoiceEnvironment, right_letters
from rl_envs.multiple_choice.letter import letter_of, stated_letter
from rl_envs.multiple_choice.plugin import MultipleChoiceConfig

WRAPPED = [
    "B",
    "(B)",
    "[B]",
    "B.",
    "B)",
    "**B**",
    "**(B)**",
    "*B*",
    "_B_",
    "__B__",
    "***B***",
    "“B”",
    "‘B’",
    '"B"',
    "'B'",
    "`B`",
    "$B$",
    r"\(B\)",
    "<B>",
    "{B}",
    "( B )",
    "“b”",
    "(b)",
    r"\text{B}",
    r"\textbf{(B)}",
    r"$\mathbf{B}$",
    r"\boxed{B}",
    r"\boxed{b}",
    r"\boxed{ B }",
    r"\boxed{(B)}",
    r"$\boxed{\text{B}}$",
    r"\boxed{\text{(B)}}",
    r"\boxed{\textbf{(B)}\ 12}",
    r"\fbox{B}",
    r"\boxed{\text{Option B}}",
    r"\boxed{B) 12}",
    r"\[\boxed{B}\]",
    r"\boxed{B",
    "<answer>B</answer>",
    "<answer>(B)</answer>",
    "<answer>B) Paris</answer>",
    "<answer>\nB\n</answer>",
    "（B）",
    "Ｂ",
    "Option B",
    "option b",
    "**B) Paris**",
    "B) Paris",
    "B: Paris",
    "B. Paris",
]
"""The letter B as models write it. Each is an answer by itself, and behind every one of `CUES`."""

CUES = [
    "Answer:",
    "Answer :",
    "ANSWER:",
    "**Answer:**",
    "**Answer**:",
    "Answer:\n",
    "Answer:\n\n",
    "### Answer\n",
    "Answer →",
    "Answer ->",
    "Answer =",
    "Answer -",
    "Answer —",
    "Final answer:",
    "Final:",
    "Correct:",
    "Correct Answer -",
    "Ans.",
    "Antwort:\n\nAntwort:",
    "Solution:",
    "Choice:",
    "Selected option:",
    "My final choice:",
    "Response:",
    "The answer is",
    "the answer is:",
    "The answer’s",
    "The correct answer is",
    "The correct option is",
    "The right choice is",
    "The correct one is",
    "The correct letter is",
    "The best answer among the choices is",
    "So the answer would be",
    "The answer must therefore be",
    "The correct answer, therefore, is",
    "The answer has to be",
    "The answer is most likely",
    "The answer is actually",
    "The answer to this question is",
    "The answer to question 5 is",
    "My answer is",
    "The option that best describes this is",
    "I think the answer is",
    "If we apply the law, the answer is",
    "There is no doubt that the answer is",
    "A is incorrect, so the answer is",
    "The answer is not A but",
    "I choose",
    "I'd pick",
    "We select",
    "I would go with",
    "Let's go with",
    "It is",
    "It's",
    "It must be",
    "That leaves",
    "This leaves us with",
    "I believe it is",
    "Thus the answer must be",
    "答案是",
    "正确答案：",
    "故选：",
    "所以选",
    "Die Antwort ist",
    "La réponse est",
    "La respuesta correcta es la",
]
"""What stands before a letter that is stated."""


def _turn(completion: str, answer: Any = "B", id: str = "0") -> Conversation:
    return Conversation(id=id, messages=(), info={"answer": answer}, completion=completion)


class TestMultipleChoiceConformance(EnvironmentSuite):
    def environment(self) -> MultipleChoiceEnvironment:
        return MultipleChoiceEnvironment(MultipleChoiceConfig())

    def conversations(self) -> list[Conversation]:
        return [_turn(text, id=text) for text in ("The answer is B.", "A", r"\boxed{B}")]


def test_a_letter_is_stated_in_any_marks_behind_any_cue() -> None:
    endings = ("", "\n\nExplanation: A is wrong.")
    texts = [f"{cue} {letter}{end}" for cue, letter, end in product(["", *CUES], WRAPPED, endings)]
    assert [text for text in texts if stated_letter(text) != "B"] == []


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        pytest.param("The answer is B because of x.", "B", id="a reason behind it"),
        pytest.param("正解はBです", "B", id="Japanese"),
        pytest.param(" b.\n", "B", id="a small letter alone"),
        pytest.param("If I had to guess, B.", "B", id="a guess"),
        pytest.param("A, C and D are wrong. The remaining is B.", "B", id="the remaining one"),
        pytest.param("The answer is B<|im_end|>", "B", id="a special token behind it"),
        pytest.param("B</s>", "B", id="the end of a sequence behind it"),
        pytest.param("The answer is C because I computed the integral.", "C", id="a pronoun [jundot/omlx#3668]"),
        pytest.param("ANSWER IS D. A is incorrect.", "D", id="others behind it [jundot/omlx#3668]"),
        pytest.param("I would pick B — a safe choice.", "B", id="an article [EleutherAI/lm-evaluation-harness#4188]"),
        pytest.param("Antwort:\n\nAntwort: C", "C", id="a cue twice [openai/simple-evals#33]"),
        pytest.param(
            r"\boxed{\langle H\rangle \ll \Delta E}" + "\n\n**Answer: D**", "D", id="box [NVIDIA-NeMo/Skills#1526]"
        ),
        pytest.param(
            "* Muscle (A) is old.\n* Tips (B) grow.\n* Veins (C) not.\nThe answer is (B).",
            "B",
            id="options in brackets [EleutherAI/lm-evaluation-harness#2237]",
        ),
        pytest.param("B because it is so.", "B", id="a letter and its reason"),
        pytest.param("Answer: I think it is C", "C", id="a pronoun behind the cue [antirez/ds4#321]"),
        pytest.param("Answer: It is not B, the answer is D", "D", id="a distractor first [antirez/ds4#321]"),
        pytest.param("Answer: rules out C, leaving D", "D", id="one ruled out [antirez/ds4#321]"),
        pytest.param(
            "Answer: A\nI need to correct this.\nAnswer: B", "B", id="the cue again [openai/frontier-evals#125]"
        ),
        pytest.param(r"\boxed{\text{Answer: G}}", "G", id="a cue in a box [NVIDIA-NeMo/Gym#1945]"),
        pytest.param("Answer: B because C is wrong", "B", id="a reason behind the cue [NVIDIA-NeMo/Gym#1945]"),
        pytest.param(
            r"\boxed{C} or so. \boxed{E: A polygenic score}", "E", id="a text in the last box [NVIDIA-NeMo/Gym#1844]"
        ),
        pytest.param("It is 11.\n\nAnswer seems to be A.\n\nAnswer: A", "A", id="seems to be [groq/openbench#348]"),
        pytest.param(r"Thus \boxed{B}", "B", id="a box [MakazhanAlpamys/Soup#357]"),
        pytest.param("***ANSWER***: ***B***", "B", id="bold [Azure/azureml-assets#5274]"),
        pytest.param("ANSWER: $A$", "A", id="dollars [UKGovernmentBEIS/inspect_ai#5055]"),
        pytest.param("B, since A is small.", "B", id="a letter, comma and reason"),
        pytest.param("Option B is correct.", "B", id="option that is correct"),
        pytest.param("(B) is the best choice.", "B", id="the best choice"),
        pytest.param("Only B is correct, A is wrong.", "B", id="correct and wrong"),
        pytest.param("B must be the answer.", "B", id="must be the answer"),
        pytest.param("B it is.", "B", id="inverted"),
        pytest.param("Option B (Paris) is correct.", "B", id="option with its text"),
        pytest.param("Option C, which says 12, is the correct answer.", "C", id="option with a clause"),
        pytest.param("The answer is 12 (B).", "B", id="text and letter"),
        pytest.param("The answer is Paris, which is option B.", "B", id="text, then letter"),
        pytest.param("This makes B the correct answer.", "B", id="makes it so"),
        pytest.param("So B.", "B", id="so"),
        pytest.param("Therefore, (C).", "C", id="therefore"),
        pytest.param("Without a doubt, B.", "B", id="an adverb"),
        pytest.param("A) 1\nB) 2\nC) 3\nD) 4\nIt is B.", "B", id="options and then one"),
        pytest.param("A. 1\nB. 2\nC. 3\n\nB", "B", id="options and a letter"),
        pytest.param("A) 1\nB) 2\nC) 3\n\nB) 2", "B", id="options and one of them again"),
        pytest.param("(a) 1\n(b) 2\n(c) 3\nThe answer is (b).", "B", id="options in lower case"),
        pytest.param("A: wrong\nB: wrong\nC: correct", "C", id="a verdict on each option"),
        pytest.param("A) incorrect\nB) correct\nC) incorrect", "B", id="a verdict behind brackets"),
        pytest.param("Answer: B\n\nA: too small\nB: fits\nC: too large", "B", id="options explained behind it"),
        pytest.param("(A) is wrong. (C)", "C", id="a letter as the last sentence"),
        pytest.param("Which one? B.", "B", id="an answered question"),
        pytest.param("Both A and C are wrong, B is correct.", "B", id="two wrong, one correct"),
        pytest.param("Neither A nor C is correct. The answer is B.", "B", id="neither nor"),
        pytest.param("Not A, B, or C, so it must be D.", "D", id="by exclusion"),
        pytest.param("It can't be A, so it must be D.", "D", id="cannot be"),
        pytest.param("The answer is B, not A.", "B", id="another is denied [antirez/ds4#321]"),
        pytest.param("B rather than C.", "B", id="rather than"),
        pytest.param("It isn't A, but rather B.", "B", id="not but"),
        pytest.param("I don't think it is A. It is D.", "D", id="not thought"),
        pytest.param("Between A and B, I choose B.", "B", id="chosen of two"),
        pytest.param("The answer is A. Wait, no, the answer is B.", "B", id="corrected [openai/frontier-evals#125]"),
        pytest.param("First I thought the answer is A, but it is B.", "B", id="thought before"),
        pytest.param("You might be tempted to choose A. It is B.", "B", id="a temptation"),
        pytest.param("<think>It may be A.</think>\nThe answer is (B)", "B", id="behind a thought"),
        pytest.param("The answer is B. Statement B is false, as asked.", "B", id="a false statement as the answer"),
        pytest.param("The answer is B. If it was A, x would hold.", "B", id="a condition behind it"),
        pytest.param("Answer: B\n" + r"\boxed{12}", "B", id="a box with the option's text"),
        pytest.param(r"\boxed{A}" + "\nHmm, the answer is C.", "C", id="a box that is taken back"),
        pytest.param('{"answer": "b"}', "B", id="JSON"),
        pytest.param("The answer is b.", "B", id="lower case behind a cue"),
        pytest.param("The answer is A, since B is small.", "A", id="A is no article here"),
        pytest.param("A because it is.", "A", id="A with a reason"),
        pytest.param("The answer is I.", "I", id="I is no pronoun here"),
        pytest.param("It might be B.", "B", id="tentative"),
        pytest.param("This corresponds to option B.", "B", id="corresponds"),
    ],
)
def test_the_last_statement_counts(completion: str, letter: str) -> None:
    assert stated_letter(completion) == letter


@pytest.mark.parametrize(
    "completion",
    [
        pytest.param("", id="nothing"),
        pytest.param("If A had to be right, B.", id="a condition that is not a guess"),
        pytest.param("5", id="a digit"),
        pytest.param("Vitamin C is the answer.", id="a letter in the text of an option"),
        pytest.param("Answer:", id="cut off"),
        pytest.param("The answer is 12.", id="text of an option"),
        pytest.param("Answer: Let's think step by step.", id="a word behind the cue [open-compass/opencompass#1933]"),
        pytest.param(r"\boxed{x=2}", id="a formula"),
        pytest.param("not B", id="not"),
        pytest.param("The answer is not B.", id="denied"),
        pytest.param("The answer isn’t B.", id="isn't"),
        pytest.param("The answer cannot be B.", id="cannot be"),
        pytest.param("B is wrong", id="wrong"),
        pytest.param("B is not correct", id="not correct"),
        pytest.param("B is definitely not the answer.", id="not the answer"),
        pytest.param("B can't be right.", id="can't be right"),
        pytest.param("B is partially correct.", id="partially"),
        pytest.param("Neither A nor B is correct.", id="neither"),
        pytest.param("None of A, B, and C is correct", id="none of"),
        pytest.param("rather than B", id="rather than"),
        pytest.param("We rule out B.", id="ruled out"),
        pytest.param("All except B", id="except"),
        pytest.param("I would not choose B.", id="not chosen"),
        pytest.param("I don't believe the answer is B.", id="not believed"),
        pytest.param("I doubt the answer is B.", id="doubted"),
        pytest.param("It is false that the answer is B.", id="false that"),
        pytest.param("There is no way it is B.", id="no way"),
        pytest.param("Everyone would choose B, but it is wrong.", id="a trap"),
        pytest.param("The answer is B. Wait, B is wrong.", id="taken back"),
        pytest.param("The answer is B. No, the answer is not B.", id="denied afterwards"),
        pytest.param("The wrong one is B.", id="the wrong one"),
        pytest.param("Either A or B.", id="either or"),
        pytest.param("The answer is A or B.", id="or"),
        pytest.param("The answer is A and B", id="and"),
        pytest.param("The answer is A, B", id="comma"),
        pytest.param("Answer: A/B", id="slash [NVIDIA-NeMo/Gym#1945]"),
        pytest.param("The answer is B (or A).", id="or in brackets"),
        pytest.param("The answer is B, or maybe A.", id="or maybe"),
        pytest.param("The answer is B. Or C.", id="or as a sentence"),
        pytest.param("B is correct. C is also correct.", id="also"),
        pytest.param("Both A and B are correct.", id="both"),
        pytest.param(r"\boxed{A, B}", id="two in a box"),
        pytest.param(r"\boxed{AB}", id="a product"),
        pytest.param(r"\boxed{A \cup B}", id="a union"),
        pytest.param("<answer>B or C</answer>", id="two in a tag"),
        pytest.param("It might be B. It might be C.", id="tentative twice"),
        pytest.param("Is it B?", id="question"),
        pytest.param("What if B is correct?", id="what if"),
        pytest.param("If the answer is B then it rains.", id="condition"),
        pytest.param("Suppose the answer is B.", id="assumption"),
        pytest.param("Let's see whether the answer is B", id="whether"),
        pytest.param("B would be correct if x were 2.", id="under a condition"),
        pytest.param("A bird in the hand", id="article"),
        pytest.param("The answer is A bird in the hand", id="article behind a cue"),
        pytest.param("I think so.", id="pronoun"),
        pytest.param("Vitamin C is good. The answer is vitamin C", id="vitamin"),
        pytest.param("Angle B is right.", id="angle"),
        pytest.param("The answer is B-cells", id="compound"),
        pytest.param("The answer is C++", id="language"),
        pytest.param("The U.S. is big. The answer is U.S.", id="abbreviation"),
        pytest.param("x = B + 2 and f(A)", id="variables"),
        pytest.param("A) 1\nB) 2\nC) 3", id="options"),
        pytest.param("A\n1\nB\n2\nC\n3", id="options in lines"),
        pytest.param("(A) 1 (B) 2 (C) 3 (D) 4", id="options in one line"),
        pytest.param("Answer options:\nA) 12\nB) 13", id="options behind a heading"),
        pytest.param("Let me check option A first", id="a mention"),
        pytest.param("Option B says 12.", id="a description"),
    ],
)
def test_what_is_not_stated_is_not_decided(completion: str) -> None:
    assert stated_letter(completion) is None


def test_letters_beyond_the_options_are_words() -> None:
    assert stated_letter("The answer is X.", num_choices=4) is None
    assert stated_letter("The answer is B.\nThe reagent is X.\nIt is X.", num_choices=4) == "B"


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        pytest.param("B", "B", id="bare"),
        pytest.param("(b)", "B", id="brackets"),
        pytest.param("B) 12", "B", id="with its text"),
        pytest.param("B: Paris, or so", "B", id="with a text of several words"),
        pytest.param(r"\text{(B)}", "B", id="LaTeX"),
        pytest.param(r"\boxed{B}", "B", id="box"),
        pytest.param("Option B", "B", id="noun"),
        pytest.param("A", "A", id="A"),
        pytest.param("U.S.", None, id="abbreviation"),
        pytest.param("B Paris", None, id="no mark between letter and text"),
        pytest.param("B, C", None, id="two"),
        pytest.param("A and B", None, id="and"),
        pytest.param("not B", None, id="not"),
        pytest.param("12", None, id="number"),
        pytest.param("", None, id="empty"),
    ],
)
def test_a_known_answer_is_one_letter(answer: str, letter: str | None) -> None:
    assert letter_of(answer) == letter


@pytest.mark.parametrize(
    ("info", "message"),
    [
        pytest.param({"answer": "B, C"}, "write them as a list", id="letters together"),
        pytest.param({"answer": "BC"}, "write them as a list", id="letters without a comma"),
        pytest.param({"answer": 1}, "the letter of an option, such as 'B', got 1", id="an index"),
        pytest.param({"answer": None}, "got None", id="null"),
        pytest.param({"answer": []}, "empty list", id="empty list"),
        pytest.param({"answer": ["A", "12"]}, "got '12'", id="one of a list"),
        pytest.param({"answer": "E"}, "not one of 4 options", id="beyond the options"),
        pytest.param({"label": "A"}, "its fields are label", id="another field"),
    ],
)
def test_a_row_without_the_letter_of_an_option_is_refused(info: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        right_letters(info, MultipleChoiceConfig(num_choices=4))


@pytest.mark.parametrize(
    ("completion", "reward", "unparsed"),
    [
        pytest.param("The answer is C.", 1.1, 0.0, id="right"),
        pytest.param("The answer is A.", 0.1, 0.0, id="wrong"),
        pytest.param("The answer is E.", 0.0, 1.0, id="no option"),
        pytest.param("C or A", 0.0, 1.0, id="undecided [vllm-project/tpu-inference#3518]"),
    ],
)
def test_only_a_stated_option_earns_the_format_reward(completion: str, reward: float, unparsed: float) -> None:
    environment = MultipleChoiceEnvironment(MultipleChoiceConfig(num_choices=4, format_reward=0.1))
    [result] = environment.step([_turn(completion, "c")], [None])
    assert result.rewards()["reward"] == reward
    assert result.info["unparsed"] == unparsed


def test_any_letter_of_a_list_is_right() -> None:
    environment = MultipleChoiceEnvironment(MultipleChoiceConfig())
    [result] = environment.step([_turn("Answer: C", ["B", "C"])], [None])
    assert result.reward == 1.0
    with pytest.raises(UnusableAnswer, match="write them as a list"):
        environment.step([_turn("Answer: C", "B, C")], [None])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([*WRAPPED[:20], *CUES, "not", "if", "or", ",", "?", "\ud800", "é", "A) 1\n"]), max_size=30)
)
def test_any_text_is_read(pieces: list[str]) -> None:
    assert stated_letter(" ".join(pieces)) in (None, "A", "B", "D")


@pytest.mark.parametrize(
    "piece",
    ["A and ", "(", "**", r"\boxed{", "answer ", "The answer is not ", "A) 1\n", "A, ", "<answer>", "i.e. ", " "],
)
def test_reading_takes_linear_time(piece: str) -> None:
    """In quadratic time it would take longer than a test may."""
    stated_letter((piece * 300_000)[:300_000])


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        pytest.param("The answer is A.\nActually, A is wrong.", None, id="taken back in the next line"),
        pytest.param("The answer is A. A is wrong.", None, id="taken back in the next sentence"),
        pytest.param("The answer is A.\nNo, A is incorrect. The answer is C.", "C", id="taken back for another"),
        pytest.param("The answer is B because B is wrong.", "B", id="the wrong one is asked for"),
        pytest.param("B is wrong. The answer is B.", "B", id="the wrong one is asked for, and named first"),
        pytest.param(r"\boxed{B} or \boxed{C}", None, id="two boxes"),
    ],
)
def test_what_is_taken_back_is_not_stated(completion: str, letter: str | None) -> None:
    assert stated_letter(completion) == letter
