"""Pairs of answers of known truth: a value in two forms, or two values in the same forms.

The truth comes from the values that a pair is made of. Kinds are those of public datasets (GSM8K, MATH, AIME,
OlympiadBench) and of public reports about graders.
"""

from __future__ import annotations

import datetime
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import sympy


@dataclass(frozen=True)
class Pair:
    """A known answer, a response, and whether they are the same."""

    kind: str
    known: str
    said: str
    same: bool


def forms(value: Fraction) -> list[str]:
    """Return the ways in which people write a rational number."""
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


UNITS = ["m", "cm", "km", "kg", "g", "s", "cm^2", "cm^3", "m/s", "km/h"]


def units(rng: random.Random) -> Iterator[Pair]:
    while True:
        value, unit = rng.randint(1, 500), rng.choice(UNITS)
        written = rng.choice([f"{value} {unit}", f"{value}\\text{{ {unit}}}", f"{value}\\ \\mathrm{{{unit}}}"])
        yield Pair("units", f"{value} {unit}", written, True)
        other = rng.choice([each for each in UNITS if each != unit])
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
    names = ["Monday", "Tuesday", "Alice", "Bob Smith", "U.S.", "U.K.", "no solution", "even", "odd", "No", "on", "été"]
    while True:
        one, other = rng.sample(names, 2)
        yield Pair("names and words", one, f"\\text{{{one}}}", True)
        yield Pair("names and words", one, one.lower(), True)
        if {one, other} != {"No", "on"} or rng.random() < 0.5:
            yield Pair("names and words", one, other, False)


def not_arithmetic(rng: random.Random) -> Iterator[Pair]:
    kind = "dates, scores, ranges, hex"
    while True:
        day = datetime.date(rng.randint(1950, 2030), rng.randint(1, 12), rng.randint(1, 12))
        other = datetime.date(day.year, day.day, day.month)
        if day != other:
            yield Pair(kind, day.isoformat(), other.isoformat(), False)
            yield Pair(kind, f"{day.day}/{day.month}/{day.year}", f"{day.month}/{day.day}/{day.year}", False)
        a, b, k = rng.randint(2, 30), rng.randint(0, 30), rng.randint(1, 9)
        yield Pair(kind, f"{a}-{b}", rng.choice([f"{a + k}-{b + k}", f"{a + k} - {b + k}", f"{a + k}–{b + k}"]), False)
        yield Pair(kind, f"{a}-{b}", rng.choice([f"{a} - {b}", f"{a}–{b}", f"\\text{{{a}-{b}}}"]), True)
        yield Pair(kind, str(a - b), f"{a}-{b}", False)
        yield Pair(kind, f"0x{a + 16:X}", f"0x{a + 17:X}", False)
        yield Pair(kind, f"0x{a + 16:X}", f"0x{a + 16:x}", True)
        corners = rng.sample("ABCDEFGH", 3)
        yield Pair(kind, "".join(corners), "".join(corners[::-1]), False)
        yield Pair(kind, f"{corners[0]}{k}", f"{k}{corners[0]}", False)


def fraction_words(rng: random.Random) -> Iterator[Pair]:
    kind = "number and fraction word"
    parts = {"halves": 2, "thirds": 3, "quarters": 4, "fifths": 5, "sixths": 6, "eighths": 8, "tenths": 10}
    while True:
        (word, part), a = rng.choice(list(parts.items())), rng.randint(2, 40)
        yield Pair(kind, str(a), f"{a} {word}", False)
        yield Pair(
            kind, str(a), f"{a}\\text{{ {rng.choice([word, 'dozen', 'pairs', 'squared', 'percent more'])}}}", False
        )
        yield Pair(kind, f"\\frac{{{a}}}{{{part}}}", f"{a}\\text{{ {word}}}", True)


def symbolic(rng: random.Random) -> str:
    k, n = rng.randint(2, 60), rng.choice([2, 3, 5, 7])
    return rng.choice(
        [f"{k}\\pi", f"{k}\\sqrt{{{n}}}", f"\\frac{{{k}\\pi}}{{{n * 11}}}", f"{k}+\\sqrt{{{n}}}", f"{k}x"]
    )


def units_behind(rng: random.Random) -> Iterator[Pair]:
    kind = "symbolic value with a unit"
    shown = {"cm": "centimeters", "m": "meters", "cm^2": "square centimeters", "cm^3": "cubic centimeters",
             "m/s": "meters per second", "kg": "kilograms", "\\circ": "degrees"}  # fmt: skip
    while True:
        value, (unit, spoken) = symbolic(rng), rng.choice(list(shown.items())[:6])
        head, _, power = unit.partition("^")
        mark = f"^{{{power}}}" if power else ""
        spellings = [
            f"\\text{{ {spoken}}}",
            f"\\text{{ {unit}}}",
            f"\\,\\mathrm{{{head}}}{mark}",
            f"\\text{{ {head}}}{mark}",
        ]
        yield Pair(kind, value, value + rng.choice(spellings), True)
        yield Pair(kind, value + rng.choice(spellings), value + rng.choice(spellings), True)
        other = rng.choice([each for each in shown.values() if each != spoken])
        yield Pair("symbolic, two units", value + rng.choice(spellings), f"{value}\\text{{ {other}}}", False)
        yield Pair(kind, value, f"2{value}\\text{{ {spoken}}}", False)


def circles(rng: random.Random) -> Iterator[Pair]:
    while True:
        a, b, r = rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 9)
        known = f"(x-{a})^2+(y+{b})^2={r * r}"
        expanded = f"x^2+y^2-{2 * a}x+{2 * b}y+{a * a + b * b - r * r}=0".replace("+-", "-")
        yield Pair("circles", known, rng.choice([f"(y+{b})^2+(x-{a})^2={r * r}", expanded]), True)
        yield Pair("circles", known, f"\\left(x-{a}\\right)^{{2}} + (y+{b})^{{2}} = {r}^2", True)
        yield Pair("circles", known, f"(x+{a})^2+(y+{b})^2={r * r}", False)
        yield Pair("circles", known, f"(x-{a})^2+(y+{b})^2={r * r + 1}", False)


def named_pairs(rng: random.Random) -> Iterator[Pair]:
    kind = "pairs and named values"
    while True:
        a, b = rng.sample(range(-9, 30), 2)
        x, y = rng.choice(["xy", "ab", "mn", "pq"])
        named = rng.choice([f"{x}={a}, {y}={b}", f"{x} = {a} \\text{{ and }} {y} = {b}", f"({x},{y})=({a},{b})"])
        yield Pair(kind, f"({a},{b})", named, True)
        yield Pair(kind, named, rng.choice([f"({a}, {b})", f"{y}={b}, {x}={a}"]), True)
        yield Pair(kind, f"({a},{b})", f"{x}={b}, {y}={a}", False)
        yield Pair(kind, named, f"({b}, {a})", False)


def binomials(rng: random.Random) -> Iterator[Pair]:
    kind = "binomials as written"
    while True:
        n = rng.randint(4, 20)
        k = rng.randint(1, n // 2)
        spellings = [
            f"\\binom{{{n}}}{{{k}}}", f"\\dbinom{{{n}}}{{{k}}}", f"C({n},{k})", f"{{{n} \\choose {k}}}",
            f"{{}}_{{{n}}}C_{{{k}}}", f"C_{{{n}}}^{{{k}}}", f"\\binom{{{n}}}{{{n - k}}}", str(math.comb(n, k)),
        ]  # fmt: skip
        one, other = rng.sample(spellings, 2)
        yield Pair(kind, one, other, True)
        yield Pair(kind, one, f"\\binom{{{n + 1}}}{{{k}}}", False)
    # (n+1 choose k) differs from (n choose k) for k >= 1


def approximations(rng: random.Random) -> Iterator[Pair]:
    while True:
        value = Fraction(rng.randint(101, 99999), 100)
        written = f"{float(value):.2f}"
        sign = rng.choice(["\\approx ", "≈ ", "\\approx", "about ", "approximately ", "\\simeq "])
        yield Pair("approximation sign", written, sign + written, True)
        about = rng.choice(["\\approx", "≈"])
        yield Pair("approximation sign", written, f"x {about} {written}", True)
        yield Pair("approximation sign", written, f"{sign}{float(value) + 0.01:.2f}", False)
        yield Pair("approximation sign", f"{rng.randint(2, 9)}\\pi", f"{sign}{written}", False)


def clocks(rng: random.Random) -> Iterator[Pair]:
    while True:
        hour, minute = rng.randint(1, 11), rng.randint(0, 59)
        known = rng.choice([f"{hour}:{minute:02d} PM", f"{hour}:{minute:02d}\\text{{ p.m.}}"])
        yield Pair("clock times", known, rng.choice([f"{hour}:{minute:02d}pm", f"{hour}:{minute:02d} p.m."]), True)
        yield Pair("clock times", known, f"{hour + 12}:{minute:02d}", True)
        yield Pair("clock times", known, f"{hour}:{minute:02d} AM", False)
        yield Pair("clock times", known, f"{hour}:{(minute + 7) % 60:02d} PM", False)


def degrees(rng: random.Random) -> Iterator[Pair]:
    known = {"\\sin 30": "\\frac{1}{2}", "\\cos 60": "0.5", "\\tan 45": "1", "\\cos 30": "\\frac{\\sqrt{3}}{2}",
             "\\sin 45": "\\frac{\\sqrt{2}}{2}", "\\tan 60": "\\sqrt{3}", "\\sin 120": "\\frac{\\sqrt{3}}{2}",
             "\\cos 15": "\\frac{\\sqrt{6}+\\sqrt{2}}{4}"}  # fmt: skip
    while True:
        k, ((angle, value), (_, other)) = rng.randint(2, 30), rng.sample(list(known.items()), 2)
        sign = rng.choice(["^\\circ", "^{\\circ}", "°"])
        yield Pair("trigonometry in degrees", f"{k}\\cdot {value}", f"{k}{angle}{sign}", True)
        if {value, other} != {"\\frac{1}{2}", "0.5"} and value != other:
            yield Pair("trigonometry in degrees", f"{k}\\cdot {other}", f"{k}{angle}{sign}", False)


def unions(rng: random.Random) -> Iterator[Pair]:
    kind = "unions"
    while True:
        a = rng.randint(-9, 5)
        b = a + rng.randint(1, 9)
        known = f"(-\\infty,{a})\\cup[{b},\\infty)"
        word = rng.choice([" or ", " \\text{ or } ", " \\lor "])
        yield Pair(kind, known, f"x<{a}{word}x \\ge {b}", True)
        yield Pair(kind, known, f"x\\geq {b}{word}x<{a}", True)
        without = rng.choice([f"x\\neq {a}", f"\\mathbb{{R}}\\setminus\\{{{a}\\}}"])
        yield Pair(kind, f"(-\\infty,{a})\\cup({a},\\infty)", without, True)
        yield Pair(kind, known, f"x\\le {a}{word}x \\ge {b}", False)
        yield Pair(kind, known, f"x<{a}{word}x > {b + 1}", False)


def unicode(rng: random.Random) -> Iterator[Pair]:
    vulgar = {"½": "1/2", "¾": "\\frac34", "⅔": "\\frac{2}{3}", "⅛": "1/8"}
    while True:
        k, n = rng.randint(2, 40), rng.choice([2, 3, 5, 7])
        (sign, value), (_, other) = rng.sample(list(vulgar.items()), 2)
        yield Pair("Unicode", value, sign, True)
        yield Pair("Unicode", other, sign, False)
        yield Pair("Unicode", f"{k}\\sqrt{{{n}}}", f"{k}√{n}", True)
        yield Pair("Unicode", f"x^2+{k}", f"x²+{k}", True)
        yield Pair("Unicode", f"x^3+{k}", f"x²+{k}", False)
        yield Pair("Unicode", f"10^{{{n}}}", f"10{'⁰¹²³⁴⁵⁶⁷⁸⁹'[n]}", True)
        yield Pair("Unicode", f"-{k}\\pi", f"−{k}π", True)
        yield Pair("Unicode", str(k), "".join(chr(0x0660 + int(each)) for each in str(k)), True)


def letters(rng: random.Random) -> Iterator[Pair]:
    while True:
        chosen = sorted(rng.sample("ABCDE", rng.randint(2, 4)))
        listed = rng.choice([", ", ",", " and "]).join(chosen)
        yield Pair("letters", listed, "".join(chosen), True)
        yield Pair("letters", listed, ", ".join(reversed(chosen)), True)
        other = next(each for each in "FGH" if each not in chosen)
        yield Pair("letters", listed, "".join([*chosen[:-1], other]), False)
        yield Pair("letters", listed, ", ".join(chosen[:-1]), False)


SAME_FUNCTIONS = [
    ("\\sin^2 {x}", "1-\\cos^2 {x}"),
    ("\\sin 2{x}", "2\\sin {x}\\cos {x}"),
    ("\\tan {x}", "\\frac{{\\sin {x}}}{{\\cos {x}}}"),
    ("\\cos 2{x}", "1-2\\sin^2 {x}"),
    ("\\sec^2 {x}", "1+\\tan^2 {x}"),
    ("\\sin 3{x}", "3\\sin {x}-4\\sin^3 {x}"),
    ("\\sqrt{{{x}^2}}", "|{x}|"),
    ("2^{{{x}+1}}", "2\\cdot 2^{x}"),
    ("\\tan\\frac{{{x}}}{{2}}", "\\frac{{\\sin {x}}}{{1+\\cos {x}}}"),
]
OTHER_FUNCTIONS = [
    ("\\sin 2{x}", "2\\sin {x}"),
    ("|{x}|", "{x}"),
    ("\\cos^2 {x}", "\\cos {x}^2"),
    ("\\sqrt{{{x}^2}}", "{x}"),
    ("\\sin^{{-1}} {x}", "\\frac{{1}}{{\\sin {x}}}"),
    ("\\frac{{d{x}}}{{dy}}", "\\frac{{{x}}}{{y}}"),
    ("f'({x})", "f({x})"),
]


def identities(rng: random.Random) -> Iterator[Pair]:
    while True:
        k, x = rng.randint(2, 30), rng.choice(["x", "t", "a", "\\theta "])
        for functions, is_same in ((SAME_FUNCTIONS, True), (OTHER_FUNCTIONS, False)):
            one, two = (f"{k}+{each.format(x=x)}" for each in rng.choice(functions))
            yield Pair("identities", one, two, is_same)


def money(rng: random.Random) -> Iterator[Pair]:
    while True:
        value = f"{rng.randint(1, 900)}.{rng.choice(['50', '25', '00'])}"
        mark, word = rng.choice([("\\$", "dollars"), ("€", "euros"), ("₹", "rupees"), ("US\\$", "USD")])
        yield Pair("money", value, mark + value, True)
        yield Pair("money", mark + value, f"{value} {word}", True)
        yield Pair("money", f"{mark}{value}", f"{value}\\text{{ cents}}", False)
        yield Pair("money", f"£{value}", f"{value} {word}", False)


def grouping(rng: random.Random) -> Iterator[Pair]:
    while True:
        value = rng.randint(10**6, 10**9)
        commas = f"{value:,}"
        for mark in (" ", "\\,", ".", "'", "{,}", "\u202f"):
            yield Pair("grouping", str(value), commas.replace(",", mark), True)
        yield Pair("grouping", f"{value}.5", f"{commas.replace(',', '.')},5", True)
        yield Pair("grouping", str(value), f"{value + 1000:,}".replace(",", " "), False)
        yield Pair("grouping", str(value), f"{commas}0", False)


def repeating(rng: random.Random) -> Iterator[Pair]:
    while True:
        cycle = str(rng.randint(1, 98)).lstrip("0")
        value = Fraction(int(cycle), 10 ** len(cycle) - 1)
        spellings = [
            f"0.\\overline{{{cycle}}}",
            f"0.({cycle})",
            f"0.{cycle * 3}..." if len(set(cycle)) == len(cycle) else f"0.({cycle})",
        ]
        yield Pair("repeating", f"\\frac{{{value.numerator}}}{{{value.denominator}}}", rng.choice(spellings), True)
        yield Pair("repeating", f"\\frac{{{value.numerator}}}{{{value.denominator}}}", f"0.{cycle * 4}", False)


def logarithms(rng: random.Random) -> Iterator[Pair]:
    while True:
        a, b, k = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 5)
        log = rng.choice(["\\log", "\\ln", "\\log_3"])
        yield Pair("logarithms", f"{log} {a**k}", f"{k}{log} {a}", True)
        yield Pair("logarithms", f"{log} {a * b}", f"{log} {a} + {log} {b}", True)
        yield Pair("logarithms", f"\\log_{{{a}}} {a**k}", str(k), True)
        yield Pair("logarithms", f"{log} {a + b + a * b}", f"{log} {a} + {log} {b}", False)


def assignments(rng: random.Random) -> Iterator[Pair]:
    while True:
        a, b = rng.randint(2, 90), rng.randint(2, 90)
        left = rng.choice(["x", "f(2)", "n", "a_1", "P(A)", "m+n", "\\text{Area}", "AB"])
        yield Pair("assignments", str(a), f"{left} = {a}", True)
        yield Pair("assignments", str(a + b), f"{left} = {a} + {b} = {a + b}", True)
        yield Pair("assignments", str(a + b), f"{a} + {b} = {a + b}", True)
        yield Pair("assignments", str(a), f"{left} = {a + b}", False)
        yield Pair("assignments", str(a), f"{a + b} = {a}", False)


def algebra(rng: random.Random) -> Iterator[Pair]:
    kind = "algebra"
    while True:
        a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
        yield Pair(kind, f"\\frac{{x^2-{a * a}}}{{x-{a}}}", f"x+{a}", True)
        yield Pair(kind, f"\\frac{{{a}}}{{x+{b}}}+{c}", f"\\frac{{{c}x+{a + b * c}}}{{x+{b}}}", True)
        yield Pair(kind, f"e^{{-{a}x^2}}", f"\\frac{{1}}{{e^{{{a}x^2}}}}", True)
        yield Pair(kind, f"{a}x^2y+{b}y^2", f"y({a}x^2+{b}y)", True)
        yield Pair(kind, f"f(x)={a}x^2-{b}", f"{a}x^2-{b}", True)
        yield Pair(kind, f"({a}+{b}i)^2", f"{a * a - b * b}+{2 * a * b}i".replace("+-", "-"), True)
        yield Pair(kind, f"{a}x+{b}y={c}", f"{2 * a}x+{2 * b}y-{2 * c}=0", True)
        yield Pair(
            kind,
            f"\\begin{{pmatrix}}{a}&{b}\\\\{c}&1\\end{{pmatrix}}",
            f"\\begin{{bmatrix}}{a} & {b} \\\\ {c} & 1\\end{{bmatrix}}",
            True,
        )
        yield Pair(
            kind,
            f"\\begin{{pmatrix}}{a}\\\\{b}\\end{{pmatrix}}",
            f"\\begin{{pmatrix}}{a}\\\\{b + 1}\\end{{pmatrix}}",
            False,
        )
        yield Pair(kind, f"{a}x^2y+{b}y^2", f"{a}xy^2+{b}y^2", False)
        yield Pair(kind, f"{a}x+{b}y={c}", f"{a}x+{b}y={c + 1}", False)
        yield Pair(kind, f"e^{{{a}x}}", f"e^{{{a + 1}x}}", False)


def solutions(rng: random.Random) -> Iterator[Pair]:
    kind = "solutions"
    while True:
        a, b = rng.sample(range(1, 30), 2)
        yield Pair(kind, f"{a}, {b}", f"x={b} \\text{{ or }} x={a}", True)
        yield Pair(kind, f"\\{{-{a},{a}\\}}", f"\\pm {a}", True)
        yield Pair(kind, f"{a}\\pm\\sqrt{{{b}}}", f"{a}-\\sqrt{{{b}}}, {a}+\\sqrt{{{b}}}", True)
        yield Pair(kind, f"{a}, {b}", f"x={a}", False)
        yield Pair(kind, f"\\pm {a}", str(a), False)
        yield Pair(kind, f"x>{a}", f"y>{a}", False)


def scientific(rng: random.Random) -> Iterator[Pair]:
    while True:
        value, power = rng.randint(11, 99), rng.randint(2, 9)
        known = str(value * 10 ** (power - 1))
        spellings = [
            f"{value / 10}\\times 10^{{{power}}}",
            f"{value / 10} × 10^{power}",
            f"{value / 10}e{power}",
            f"{value / 10} \\cdot 10^{power}",
        ]
        yield Pair("scientific", known, rng.choice(spellings), True)
        yield Pair("scientific", known, f"{value / 10}\\times 10^{{{power + 1}}}", False)


def percentages(rng: random.Random) -> Iterator[Pair]:
    while True:
        value = rng.randint(2, 99)
        yield Pair(
            "percentages",
            f"{value}\\%",
            rng.choice([f"{value} percent", f"{value}\\text{{ per cent}}", f"0.{value:02d}"]),
            True,
        )
        yield Pair("percentages", f"{value}\\%", f"{value + 1}\\%", False)


def numbers_in_words(rng: random.Random) -> Iterator[Pair]:
    ones = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    tens = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    while True:
        a, b = rng.randint(1, 9), rng.randint(2, 9)
        yield Pair("numbers in words", str(10 * b + a), f"{tens[b - 2]}-{ones[a - 1]}", True)
        yield Pair("numbers in words", str(100 * a + 10 * b), f"\\text{{{ones[a - 1]} hundred {tens[b - 2]}}}", True)
        yield Pair("numbers in words", str(10 * b + a + 1), f"{tens[b - 2]} {ones[a - 1]}", False)


KINDS: tuple[Callable[[random.Random], Iterator[Pair]], ...] = (
    rationals, huge, units, digits, bases, intervals, collections, irrationals, polynomials, words, not_arithmetic,
    fraction_words, units_behind, circles, named_pairs, binomials, approximations, clocks, degrees, unions, unicode,
    letters, identities, money, grouping, repeating, logarithms, assignments, algebra, solutions, scientific,
    percentages, numbers_in_words,
)  # fmt: skip


def pairs(seed: int, per_kind: int) -> list[Pair]:
    """Return different pairs of every kind, in an order that the seed decides."""
    found: dict[Pair, None] = {}
    for make in KINDS:
        made = make(random.Random(seed))
        chosen = dict.fromkeys(pair for pair, _ in zip(made, range(per_kind * 3), strict=False))
        found |= dict.fromkeys(list(chosen)[:per_kind])
    return list(found)
