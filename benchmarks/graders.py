"""How the math grader scores pairs of answers of known truth, next to math-verify and plain sympy.

    uv run --isolated --package rl-envs benchmarks/graders.py [--per-kind N] [--disagreements N]

Pairs are made of values whose equality is known: the same value in another form, and other values in the same forms, by
kinds of answers as datasets have them (GSM8K, MATH, AIME, OlympiadBench). Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import sympy
from math_verify import parse, verify
from sympy.parsing.sympy_parser import parse_expr

from rl_envs.math.verdict import judge
from rl_envs.time_limit import within

Verdict = bool | None
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Pair:
    """A known answer, what was said, and whether they are the same."""

    kind: str
    known: str
    said: str
    same: bool


def forms(value: Fraction) -> list[str]:
    """A rational number as people write it."""
    n, d = value.numerator, value.denominator
    sign, size = ("-" if n < 0 else ""), abs(n)
    if d == 1:
        found = [str(n), f"{n:,}", f"{n}.0", f"\\frac{{{2 * n}}}{{2}}"]
        return [*found, f"{n:,}".replace(",", "{,}"), f"{n:,}".replace(",", r"\,")] if size >= 1000 else found
    found = [
        f"{n}/{d}",
        f"{sign}\\frac{{{size}}}{{{d}}}",
        f"{sign}\\dfrac{{{size}}}{{{d}}}",
        f"{sign}\\frac{{{3 * size}}}{{{3 * d}}}",
    ]
    if size > d:
        found.append(f"{sign}{size // d}\\frac{{{size % d}}}{{{d}}}")
        if sign == "":
            found.append(f"{size // d} {size % d}/{d}")
    if d in (2, 4, 5, 8, 10, 20):
        found.append(f"{float(value):.10f}".rstrip("0"))
    return found


def rationals(rng: random.Random) -> Iterator[Pair]:
    while True:
        value = Fraction(rng.randint(-3000, 3000), rng.choice([1, 1, 2, 3, 4, 5, 7, 8, 10, 12, 20]))
        one = rng.choice(forms(value))
        yield Pair("integers and fractions", one, rng.choice(forms(value)), True)
        other = value + rng.choice([Fraction(1, 100), Fraction(-1, 7), 1, -1, 10, -2 * value or 1])
        yield Pair("integers and fractions", one, rng.choice(forms(other)), False)


def huge(rng: random.Random) -> Iterator[Pair]:
    while True:
        power = rng.randint(50, 120)
        written = rng.choice([f"2^{{{power}}}", str(2**power)])
        yield Pair("huge and tiny", written, str(2**power), True)
        yield Pair("huge and tiny", written, str(2**power + 1), False)
        tiny = f"1/2^{{{power}}}"
        yield Pair("huge and tiny", tiny, f"\\frac{{1}}{{{2**power}}}", True)
        yield Pair("huge and tiny", tiny, f"1/2^{{{power + 1}}}", False)


def units(rng: random.Random) -> Iterator[Pair]:
    known = ["m", "cm", "km", "kg", "g", "s", "cm^2", "cm^3", "m/s", "km/h"]
    while True:
        value, unit = rng.randint(1, 500), rng.choice(known)
        written = rng.choice([f"{value} {unit}", f"{value}\\text{{ {unit}}}", f"{value}\\ \\mathrm{{{unit}}}"])
        yield Pair("units", f"{value} {unit}", written, True)
        other = rng.choice([each for each in known if each != unit])
        yield Pair("units", f"{value} {unit}", rng.choice([f"{value} {other}", f"{value}\\text{{ {other}}}"]), False)


def digits(rng: random.Random) -> Iterator[Pair]:
    while True:
        a, b, c = rng.randint(1, 9), rng.randint(1, 9), rng.randint(2, 9)
        yield Pair("digits apart", f"{10 * a + b}", f"{a} {b}", False)
        yield Pair("digits apart", f"{10 * a + 1}/{c}", f"{a} 1/{c}", False)
        yield Pair("digits apart", f"{a * c + 1}/{c}", f"{a} 1/{c}", True)


def bases(rng: random.Random) -> Iterator[Pair]:
    while True:
        value, base = rng.randint(2, 200), rng.choice([2, 3, 5, 8])
        text = sympy.ntheory.digits(value, base)[1:]
        numeral = "".join(map(str, text))
        yield Pair("bases", f"{numeral}_{base}", f"{numeral}_{{{base}}}", True)
        yield Pair("bases", f"{numeral}_{base}", f"{numeral}_{{{base + 1}}}", False)
        yield Pair("bases", f"{numeral}_{base}", f"1{numeral}_{base}", False)


def intervals(rng: random.Random) -> Iterator[Pair]:
    while True:
        a = rng.randint(-9, 9)
        b = a + rng.randint(1, 9)
        yield Pair("intervals", f"(-\\infty,{b}]", f"x \\le {b}", True)
        yield Pair("intervals", f"(-\\infty,{b}]", f"(-\\infty,{b})", False)
        yield Pair("intervals", f"[{a},{b})", f"{a} \\le x < {b}", True)
        yield Pair("intervals", f"[{a},{b}]", f"({a},{b})", False)
        yield Pair("intervals", f"x > {a}", f"({a},\\infty)", True)


def collections(rng: random.Random) -> Iterator[Pair]:
    while True:
        items = rng.sample(range(-20, 20), 3)
        listed, shuffled = ", ".join(map(str, items)), ", ".join(map(str, reversed(items)))
        yield Pair("sets and tuples", f"\\{{{listed}\\}}", f"\\{{{shuffled}\\}}", True)
        yield Pair("sets and tuples", f"({listed})", f"\\left({listed}\\right)", True)
        yield Pair("sets and tuples", f"({listed})", f"({shuffled})", False)
        yield Pair("sets and tuples", f"\\{{{listed}\\}}", f"\\{{{items[0]}, {items[1]}\\}}", False)


def irrationals(rng: random.Random) -> Iterator[Pair]:
    while True:
        n, k = rng.choice([2, 3, 5, 6, 7]), rng.randint(2, 9)
        yield Pair("roots and constants", f"{k}\\sqrt{{{n}}}", f"\\sqrt{{{k * k * n}}}", True)
        yield Pair("roots and constants", f"\\frac{{1}}{{\\sqrt{{{n}}}}}", f"\\frac{{\\sqrt{{{n}}}}}{{{n}}}", True)
        yield Pair("roots and constants", f"{k}\\pi", f"{k}*pi", True)
        yield Pair("roots and constants", f"{k}\\sqrt{{{n}}}", f"{k}\\sqrt{{{n + 1}}}", False)
        yield Pair("roots and constants", f"\\sqrt{{{n}}}", f"{n**0.5:.8f}", False)
        yield Pair("roots and constants", f"{k}\\pi", f"{k * 3.14159265:.6f}", False)


def polynomials(rng: random.Random) -> Iterator[Pair]:
    while True:
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        yield Pair("expressions", f"(x+{a})(x+{b})", f"x^2+{a + b}x+{a * b}", True)
        yield Pair("expressions", f"(x+{a})(x+{b})", f"x^2+{a + b}x+{a * b + 1}", False)
        yield Pair("expressions", f"y={a}x+{b}", f"y = {b} + {a}x", True)
        yield Pair("expressions", f"x={a}", str(a), True)
        yield Pair("expressions", f"x={a}", str(a + 1), False)


def words(rng: random.Random) -> Iterator[Pair]:
    names = ["Monday", "Tuesday", "Alice", "Bob Smith", "U.S.", "U.K.", "no solution", "even", "odd"]
    while True:
        one, other = rng.sample(names, 2)
        yield Pair("names and words", one, f"\\text{{{one}}}", True)
        yield Pair("names and words", one, one.lower(), True)
        yield Pair("names and words", one, other, False)


KINDS: tuple[Callable[[random.Random], Iterator[Pair]], ...] = (
    rationals, huge, units, digits, bases, intervals, collections, irrationals, polynomials, words,
)  # fmt: skip


def ours(pair: Pair) -> Verdict:
    return within(2.0, lambda: judge(pair.said, pair.known, "auto"))


def by_math_verify(pair: Pair) -> Verdict:
    def compare() -> Verdict:
        known, said = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (pair.known, pair.said))
        return verify(known, said, timeout_seconds=None) if known and said else None

    return within(5.0, compare)


def by_sympy(pair: Pair) -> Verdict:
    def compare() -> Verdict:
        try:
            known, said = (parse_expr(text.replace("^", "**")) for text in (pair.known, pair.said))
            return bool(sympy.simplify(known - said) == 0)
        except (SyntaxError, TypeError, ValueError, AttributeError, sympy.SympifyError):
            return None

    return within(5.0, compare)


GRADERS = {"ours": ours, "math-verify": by_math_verify, "sympy": by_sympy}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--per-kind", type=int, default=300)
    arguments.add_argument("--disagreements", type=int, default=4)
    arguments.add_argument("--quick", action="store_true")
    given = arguments.parse_args()
    per_kind = 12 if given.quick else given.per_kind
    columns = ["wrong answers paid", "right answers unpaid", "undecided"]
    print("| kind | pairs | " + " | ".join(f"{name}: {column}" for name in GRADERS for column in columns) + " |")
    print("|---|---:|" + "---:|" * (len(GRADERS) * len(columns)))
    shown: list[str] = []
    seconds: Counter[str] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    num_pairs = 0
    for make in KINDS:
        pairs = dict.fromkeys(pair for pair, _ in zip(make(random.Random(1)), range(per_kind * 3), strict=False))
        chosen = list(pairs)[:per_kind]
        num_pairs += len(chosen)
        counts: Counter[tuple[str, str]] = Counter()
        unlike: list[str] = []
        for pair in chosen:
            verdicts = {}
            for name, grade in GRADERS.items():
                started = time.process_time()
                verdicts[name] = grade(pair)
                seconds[name] += time.process_time() - started
                for column, holds in zip(
                    columns,
                    (
                        verdicts[name] is True and not pair.same,
                        verdicts[name] is not True and pair.same,
                        verdicts[name] is None,
                    ),
                    strict=True,
                ):
                    counts[name, column] += holds
            if verdicts["ours"] is not verdicts["math-verify"] and verdicts["math-verify"] is not None:
                truth = "same" if pair.same else "different"
                unlike.append(
                    f"| `{pair.known}` | `{pair.said}` | {truth} | {verdicts['ours']} | {verdicts['math-verify']} |"
                )
        total.update(counts)
        shown += unlike[: given.disagreements]
        row = [str(counts[name, column]) for name in GRADERS for column in columns]
        print(f"| {chosen[0].kind} | {len(chosen)} | " + " | ".join(row) + " |")
    row = [str(total[name, column]) for name in GRADERS for column in columns]
    print(f"| all | {num_pairs} | " + " | ".join(row) + " |")
    print("\nSeconds of processor time: " + ", ".join(f"{name} {seconds[name]:.1f}" for name in GRADERS))
    print("\n| known | said | truth | ours | math-verify |\n|---|---|---|---|---|")
    print("\n".join(shown))


if __name__ == "__main__":
    signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
    main()
