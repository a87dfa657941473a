"""How evaluation tasks grade made-up answers of known truth, next to the reference implementations of the tasks.

    uv run --isolated --package rl-envs --with lm-eval --with nvidia-simple-evals benchmarks/task_graders.py

MMLU-Pro and GPQA are compared with the filters of lm-evaluation-harness and the pattern of simple-evals, MATH with the
harness's `is_equiv` of Hendrycks et al. and `math-verify`. Each has 200 answers by default. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from runpy import run_path
from types import SimpleNamespace
from typing import Any, NamedTuple

import yaml
from answer_pairs import Pair, pairs

from rl_core.rollouts.environment import Conversation
from rl_envs.math.environment import MathEnvironment
from rl_envs.math.plugin import MathConfig

STATED = (
    "The answer is ({stated}).",
    "the answer is {stated}",
    "Answer: {stated}",
    "**Answer:** {stated}",
    "So the correct answer is {stated}.",
    "Let's think step by step. Force is mass times acceleration, so 6 N.\n\nThe answer is ({stated}).",
    "Answer: {stated}) 6 N",
    "\\boxed{{{stated}}}",
    "The final answer is $\\boxed{{{stated}}}$.",
    "The best option is ({stated}).",
    "Therefore, option {stated} is correct.",
    "({stated})",
    "{stated}",
    "ANSWER: {stated}",
    "({other}) is wrong, because the sign is. The answer is ({stated}).",
    "At first, the answer is ({other}) seems right. But the mass doubles, so the answer is ({stated}).",
    "Answer: {other}\nWait, I forgot the sign.\nAnswer: {stated}",
    "All except ({stated}) violate a law, so I choose {stated}.",
)
"""Responses that state one letter."""
UNSTATED = (
    "The answer is either ({stated}) or ({other}).",
    "I cannot decide between these options.",
    "({stated}) and ({other}) are both plausible, and I have no further information.",
)
"""Responses that state no letter, or two."""


class Response(NamedTuple):
    """A response to a question, and the letter that it states; empty if it states none."""

    kind: str
    text: str
    stated: str


def responses(seed: int, count: int, letters: str) -> list[Response]:
    """Return made-up responses, most of which state a letter."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        letter, other = rng.sample(letters, 2)
        form = (*STATED, *UNSTATED)[number % (len(STATED) + len(UNSTATED))]
        found.append(Response(form, form.format(stated=letter, other=other), letter if form in STATED else ""))
    return found


Readers = Mapping[str, Callable[[Sequence[str]], list[str]]]
"""Functions from responses to their letters, empty for none, by name."""


def harness_filters(folder: str, file: str) -> Readers:
    """Return the filters of a task of lm-evaluation-harness."""
    from lm_eval.filters.extraction import MultiChoiceRegexFilter, RegexFilter

    kinds: Mapping[str, type[RegexFilter]] = {"regex": RegexFilter, "multi_choice_regex": MultiChoiceRegexFilter}
    text = (files("lm_eval") / "tasks" / folder / file).read_text(encoding="utf-8").replace("!function", "")

    def reader(given: Mapping[str, Any]) -> Callable[[Sequence[str]], list[str]]:
        settings = {key: value for key, value in given.items() if key != "function"}
        chosen = kinds[given["function"]](**settings)
        choices = [f"option {number}" for number in range(10)]

        def read(texts: Sequence[str]) -> list[str]:
            found = chosen.apply([[text] for text in texts], [{"choices": choices}] * len(texts))
            return [re.sub(r"[^A-Z]", "", letter) if letter != "[invalid]" else "" for [letter] in found]

        return read

    return {each["name"]: reader(each["filter"][0]) for each in yaml.safe_load(text)["filter_list"]}


def by_simple_evals(letters: str) -> Callable[[Sequence[str]], list[str]]:
    """Return simple-evals' reader of letters."""
    from simple_evals.common import ANSWER_PATTERN_MULTICHOICE

    pattern = re.compile(ANSWER_PATTERN_MULTICHOICE.replace("A-D", f"A-{letters[-1]}"))
    return lambda texts: [found[1].upper() if (found := pattern.search(text)) else "" for text in texts]


GRADER = MathEnvironment(MathConfig())


def is_paid(response: str, answer: str) -> bool:
    """Return whether the task of this project scores 1."""
    asked: Any = [{"role": "user", "content": "?"}, {"role": "assistant", "content": response}]
    return GRADER.score(Conversation("", asked, {"answer": answer}, response)).reward == 1.0


def compare_letters(name: str, chosen: Sequence[Response], letters: str, references: Readers) -> None:
    """Print how many letters each grader reads as they are stated, and the kinds of response with other results."""
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    unlike: dict[str, Counter[str]] = {}
    texts = [response.text for response in chosen]
    read = {"ours": ["".join(letter for letter in letters if is_paid(text, letter)) for text in texts]}
    read |= {each: reader(texts) for each, reader in references.items()}
    for grader, found in read.items():
        for response, letter in zip(chosen, found, strict=True):
            right[grader] += letter == response.stated
            wrong[grader] += letter not in ("", response.stated)
            if letter != response.stated:
                unlike.setdefault(response.kind, Counter())[grader] += 1
    print(f"\n## {name}: {len(chosen)} responses\n\n| grader | as stated | another letter | no letter |")
    print("|---|---:|---:|---:|")
    for grader in ("ours", *references):
        missed = len(chosen) - right[grader] - wrong[grader]
        print(f"| {grader} | {right[grader]} | {wrong[grader]} | {missed} |")
    print("\n| response | read otherwise by |\n|---|---|")
    for kind, graders in unlike.items():
        shown = kind.replace("\n", " ").format(stated="B", other="C")
        print(f"| `{shown}` | {', '.join(f'{each} ({count})' for each, count in graders.items())} |")


MATH_FORMS = (
    (r"\frac{{{a}}}{{{b}}}", r"\frac{a}{b}"),
    (r"\frac{{{a}}}{{{b}}}", r"\dfrac{{{a}}}{{{b}}}"),
    (r"\frac{{{a}}}{{{b}}}", r"{a}/{b}"),
    (r"({a},{b})", r"\left({a}, {b}\right)"),
    (r"{a}\sqrt{{{b}}}", r"{a}\sqrt{b}"),
    (r"{a}", r"{a}^\circ"),
    (r"{a}", r"{a}\%"),
    (r"{a}", r"\${a}"),
    (r"{a}", r"x={a}"),
    (r"{a}", r"{a}\text{{ cm}}"),
    (r"0.{a}", r".{a}"),
    (r"\frac{{1}}{{2}}", r"0.5"),
    (r"{a}\pi", r"{a}\pi\!"),
    (r"\text{{even}}", r"\text{{even}}"),
)
"""A known answer and a form of it, in the notation of MATH's solutions."""


def math_answers(seed: int, count: int) -> list[Pair]:
    """Return answers in the notation of MATH, every second one of another value."""
    rng, found = random.Random(seed), []
    for number in range(count):
        known, said = MATH_FORMS[number // 2 % len(MATH_FORMS)]
        a, b = rng.sample(range(3, 9), 2)
        same = number % 2 == 0
        other = {"a": a, "b": b} if same else {"a": a + 1, "b": b}
        wrong = said if same or "{a" in said else {"0.5": "0.4"}.get(said, r"\text{{odd}}")
        found.append(Pair("MATH", known.format(a=a, b=b), wrong.format(**other), same))
    return found


def compare_math(name: str, chosen: Sequence[Pair]) -> None:
    """Print how many answers each grader of MATH pays, of those that are right and of those that are wrong."""
    from math_verify import parse, verify

    # Importing it as a module would import all tasks.
    utils = SimpleNamespace(**run_path(str(files("lm_eval") / "tasks" / "hendrycks_math" / "utils.py")))

    def by_hendrycks(response: str, known: str) -> bool:
        return bool(utils.is_equiv(utils.remove_boxed(utils.last_boxed_only_string(response)), known))

    def by_math_verify(response: str, known: str) -> bool:
        gold, said = (parse(text, parsing_timeout=None) for text in (f"${known}$", response))
        return bool(verify(gold, said, timeout_seconds=None))

    graders = {"ours": is_paid, "is_equiv (Hendrycks)": by_hendrycks, "math-verify": by_math_verify}
    paid: Counter[tuple[str, bool]] = Counter()
    unlike: list[str] = []
    for pair in chosen:
        response = f"We add both sides, and therefore the answer is $\\boxed{{{pair.said}}}$."
        found = {grader: grade(response, pair.known) for grader, grade in graders.items()}
        paid.update({(grader, pair.same): int(is_right) for grader, is_right in found.items()})
        if found["ours"] != found["is_equiv (Hendrycks)"]:
            unlike.append(f"| `{pair.known}` | `{pair.said}` | {pair.same} | {found['ours']} |")
    num_same = sum(pair.same for pair in chosen)
    print(f"\n## {name}: {num_same} right answers in another form, {len(chosen) - num_same} wrong ones\n")
    print("| grader | right answers paid | wrong answers paid |\n|---|---:|---:|")
    for grader in graders:
        print(f"| {grader} | {paid[grader, True]} | {paid[grader, False]} |")
    if unlike:
        print("\n| known | said | same | ours, where is_equiv differs |\n|---|---|---|---|")
        print("\n".join(list(dict.fromkeys(unlike))[:SHOWN]))


SHOWN = 12
"""Maximum number of answers that are shown for a table."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--answers", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--quick", action="store_true")
    given = arguments.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    count = 42 if given.quick else given.answers
    of_pro = harness_filters("mmlu_pro", "_default_template_yaml")
    of_gpqa = harness_filters("gpqa/cot_zeroshot", "_gpqa_cot_zeroshot_yaml")
    for name, letters, filters in (("MMLU-Pro", "ABCDEFGHIJ", of_pro), ("GPQA", "ABCD", of_gpqa)):
        references = {f"lm-evaluation-harness, {each}": reader for each, reader in filters.items()}
        references["simple-evals"] = by_simple_evals(letters)
        compare_letters(name, responses(given.seed, count, letters), letters, references)
    compare_math("MATH, in its notation", math_answers(given.seed, count))
    mixed = pairs(given.seed, 12)
    random.Random(given.seed).shuffle(mixed)
    compare_math("Answers of 34 kinds (`answer_pairs.py`)", mixed[:count])


if __name__ == "__main__":
    main()
