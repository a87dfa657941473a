"""One spelling of characters of Unicode, commands of LaTeX and functions."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

MAX_LENGTH = 100_000
"""Longest string that is respelled."""

_FROM_UNICODE = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "÷": "/", "∕": "/", "⁄": "/", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ",
    "δ": r"\delta ", "λ": r"\lambda ", "φ": r"\phi ", "ω": r"\omega ", "Δ": r"\Delta ", "∞": r"\infty ",
    "≤": r"\le ", "⩽": r"\le ", "≦": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≧": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
    "∩": r"\cap ", "∖": r"\setminus ", "∈": r"\in ", "∅": r"\emptyset ", "⌀": r"\emptyset ", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "±": r"\pm ", "…": "...",
    "⋯": "...", "≈": r"\approx ", "≃": r"\approx ", "≅": r"\approx ", "∼": r"\approx ", "º": "°", "˚": "°", "′": "'",
    "″": '"', "’": "'", "‘": "'", "“": '"', "”": '"', "٫": ".", "٬": ",", "、": ",", "，": ",", "⟨": "(", "⟩": ")",
    "∠": r"\angle ", "△": r"\triangle ", "→": r"\to ", "∣": "|", "√": r"\sqrt", "∛": r"\sqrt[3]",
    "∜": r"\sqrt[4]", "Ω": "Ω", "㎡": "m^2", "㎥": "m^3", "㎠": "cm^2", "㎤": "cm^3", "㎢": "km^2",
}  # fmt: skip
_SCRIPTS = (("^", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n"), ("_", "₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-"))
_FRACTION = re.compile(r"(?<=\d)(\s*)(?=[¼-¾⅐-⅞])")
_SPECIAL = str.maketrans(_FROM_UNICODE)

_DIGIT_GAP = r"(?:\\[,; !:]|~|\{,\}|\{\\,\}|[ '\u00a0\u2009\u202f\u2019])"
_GROUPED = re.compile(rf"(?<![\w.,\\])\d{{1,3}}(?:{_DIGIT_GAP}{{1,2}}\d{{3}})+(?![\d'])(?:,(\d+)(?![\d,]))?")
_EUROPEAN = re.compile(r"(?<![\w.,([{])(?:\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,})(?![\w.,])")
_INDIAN = re.compile(r"(?<![\w.,([{])\d{1,2}(?:,\d\d)+,\d{3}(?!\d|,\d)")
_MATH = re.compile(r"(?<![\\\d])\$(?![\s$])([^$]*[^\s$\\])\$(?!\d)")
_SYSTEM = re.compile(r"(?:\\\{\s*)?\\begin\{(cases|array|aligned)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}\.?", re.DOTALL)
_NAMED_ROOT = re.compile(r"\\?\b(sqrt|cbrt|[aA]bs|exp)\s*\(")
_ROOT_OF_DIGITS = re.compile(r"(\\sqrt|(?<![\\A-Za-z])sqrt)\s*(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z]))")
_FUNCTIONS = "arcsin arccos arctan arccot sinh cosh tanh sin cos tan cot sec csc ln log exp pi theta infty sqrt"
_FUNCTION = re.compile(rf"(?<![\\A-Za-z])({'|'.join(_FUNCTIONS.split())}|(?:max|min|gcd|lcm)(?=\s*\())(?![A-Za-z])")
_OTHER_NAMES = {"infinity": r"\infty ", "inf": r"\infty ", "oo": r"\infty ", "asin": r"\arcsin ", "acos": r"\arccos ",
                "atan": r"\arctan "}  # fmt: skip
_OTHER_NAME = re.compile(rf"(?<![\\A-Za-z])({'|'.join(_OTHER_NAMES)})(?![A-Za-z])")

_COMMANDS: tuple[tuple[str, str], ...] = (
    (r"\\m?(?:left|right)(?![A-Za-z])|\\[bB]igg?[lrm]?(?![A-Za-z])", ""),
    (r"\\(?:displaystyle|textstyle|limits)(?![A-Za-z])", ""),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"(?<![A-Za-z\\])Rational\(([^(),]*),([^(),]*)\)", r"\\frac{\1}{\2}"),
    (r"\\(?:text|mathrm)\{\s*C\s*\}(?=\s*[_(])", "C"),
    (r"\\(?:text|mathrm)\{\s*\\?([$€£¥₹]|Rs\.?)\s*\}", r"\1 "),
    (r"\\(?:langle|lang)(?![A-Za-z])", "("),
    (r"\\(?:rangle|rang)(?![A-Za-z])", ")"),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
    (r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}", r"\\binom{\1}{\2}"),
    (r"(?<![\w}])(?:\{\}|\\,)?[_^]\{?(\d+|[a-z])\}?\s*\\?(?:text|mathrm)?\{?C\}?_\{?(\d+|[a-z])\}?",
     r"\\binom{\1}{\2}"),
    (r"(?<![A-Za-z\\])C_\{?(\d+)\}?\^\{?(\d+)\}?", r"\\binom{\1}{\2}"),
    (r"(?<![A-Za-z\\])C\^\{?(\d+)\}?_\{?(\d+)\}?", r"\\binom{\2}{\1}"),
    (r"(?<![A-Za-z\\])C\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)", r"\\binom{\1}{\2}"),
    (r"(?<![\w.])(\d+)\s*(?:C|\\?(?:text|mathrm)\{\s*C\s*\}|choose|\\?text\{\s*choose\s*\})\s*(\d+)(?![\w.])",
     r"\\binom{\1}{\2}"),
    (r"(?<![A-Za-z\\])(?:nCr|comb|binom|binomial)\s*\(\s*(\w+)\s*,\s*(\w+)\s*\)", r"\\binom{\1}{\2}"),
    (r"\\(?:mathrm|mbox|textrm|textbf|textit|textsf|textnormal|mathit|mathsf|operatorname\*?)\s*(?=\{)", r"\\text"),
    (r"\\text\{\s*(sin|cos|tan|cot|sec|csc|ln|log|lg|exp|arcsin|arccos|arctan|lcm|gcd)\s*\}", r"\\\1 "),
    (r"\\text\{\s*([ei])\s*\}", r"\1"),
    (r"\\math(?:bf|cal|frak)\{(\d+)\}", r"\1"),
    (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\(?:textdegree|degree)(?![A-Za-z])(?:\{\})?", "°"),
    (r"\\lg(?![A-Za-z])", r"\\log_{10}"),
    (r"\\log\s*_\s*\{?\s*e\s*\}?", r"\\ln "),
    (r"\\mu\s*\\text\s*\{\s*", r"\\text{μ"),
    (r"^\*\*(.+)\*\*$", r"\1"),
    (r"\\(?:leqslant|leqq|leq)(?![A-Za-z])|<=", r"\\le "),
    (r"\\(?:geqslant|geqq|geq)(?![A-Za-z])|>=", r"\\ge "),
    (r"\\neq(?![A-Za-z])|!=|\\not\s*=", r"\\ne "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\(?:varnothing|O)(?![A-Za-z])", r"\\emptyset "),
    (r"\\mathbb\s*\{?\s*([RZNQC])\s*\}?|\\mathbf\{R\}|\\(?:Reals|R)(?![A-Za-z])", r"\\mathbb{\1}"),
    (r"\\mathbb\{\}", r"\\mathbb{R}"),
    (r"\\l?[dc]dots[cbmio]?(?![A-Za-z])|\\[lc]?dots[cbmio]?(?![A-Za-z])", "..."),
    (r"\\(?:thickapprox|simeq|cong|doteq|sim|approxeq)(?![A-Za-z])", r"\\approx "),
    (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
    (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
    (r"\\(?:lbrack)(?![A-Za-z])", "["),
    (r"\\(?:rbrack)(?![A-Za-z])", "]"),
    (r"\\[lr]?vert(?![A-Za-z])|\\mid(?![A-Za-z])", "|"),
    (r"\\(?:ast|star)(?![A-Za-z])", "*"),
    (r"\\div(?![A-Za-z])", "/"),
    (r"\\varphi(?![A-Za-z])", r"\\phi "),
    (r"(?<!\\)\\!", ""),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\\[hv]space\*?\{[^{}]*\}|\\thinspace", " "),
    (r"\\([%$#&])", r"\1"),
    (r"(?<!\\)\\[()[\]]", " "),
    (r"(?<=[\d ])\\Omega$", r"\\text{Ω}"),
    (r"\*\*", "^"),
    (r"\\sqrt\s*(\[\d+\])\s*(\d)", r"\\sqrt\1{\2}"),
)  # fmt: skip
_RULES = tuple((re.compile(pattern), replacement) for pattern, replacement in _COMMANDS)


def canonical(text: str) -> str:
    """Return an answer in one spelling. Numbers lose the spaces between their groups of digits, text stays marked."""
    if len(text) > MAX_LENGTH:
        return text.strip()
    if not text.isascii():
        text = _without_unicode(text)
    text = _GROUPED.sub(
        lambda found: re.sub(r"\D", "", found[0].removesuffix(f",{found[1]}")) + (f".{found[1]}" if found[1] else ""),
        text,
    ).replace("{,}", ",")
    text = _EUROPEAN.sub(lambda match: match[0].replace(".", "").replace(",", "."), text)
    text = _INDIAN.sub(lambda match: match[0].replace(",", ""), text)
    if "\\" not in text and text.isascii() and len(text) < 2:
        return text
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _SYSTEM.sub(_listed, text)
    text = _MATH.sub(r" \1 ", text).strip()
    if text.startswith("$$") and text.endswith("$$"):
        text = text[2:-2]
    text = _bracketed(_OTHER_NAME.sub(lambda found: _OTHER_NAMES[found[1]], text))
    text = _ROOT_OF_DIGITS.sub(r"\\sqrt{\2}", text)
    return " ".join(_FUNCTION.sub(lambda found: f"\\{found[1]} ", text).split())


def _listed(found: re.Match[str]) -> str:
    """Return the lines of a system of equations as a list."""
    lines = [line.replace("&", "").strip(" ,") for line in found[2].split(r"\\")]
    return ", ".join(line for line in lines if line) if all("=" in line for line in lines if line) else found[0]


def _without_unicode(text: str) -> str:
    text = _FRACTION.sub(" ", text)
    for mark, written, plain in _SCRIPTS:
        table = str.maketrans(written, plain)
        runs = dict.fromkeys(re.findall(f"[{written}]+", text))
        for run in sorted(runs, key=len, reverse=True):
            text = text.replace(run, f"{mark}{{{run.translate(table)}}}")
    for sign in set(re.findall("[¼-¾⅐-⅞]", text)):
        above, _, below = unicodedata.normalize("NFKC", sign).partition("⁄")
        text = text.replace(sign, rf"\frac{{{above}}}{{{below}}}")
    text = re.sub("(\\d)\u0305", r"\\overline{\1}", text)
    text = unicodedata.normalize("NFKC", text.translate(_SPECIAL)).translate(_SPECIAL)
    return re.sub(r"[^\x00-\x7f]", lambda found: _decimal(found[0]), text)


def _decimal(character: str) -> str:
    """Return a digit of any script as an ASCII digit."""
    digit = unicodedata.decimal(character, None)
    return character if digit is None else str(digit)


def _bracketed(text: str) -> str:
    r"""Return `sqrt(x)`, `cbrt(x)`, `abs(x)` and `exp(x)` as LaTeX writes them."""
    written: dict[str, Callable[[str], str]] = {
        "sqrt": lambda inner: rf"\sqrt{{{inner}}}",
        "cbrt": lambda inner: rf"\sqrt[3]{{{inner}}}",
        "abs": lambda inner: f"|{inner}|",
        "exp": lambda inner: f"e^{{{inner}}}",
    }
    for _ in range(20):
        # The last one first, so that what is inside of another is already respelled.
        found = max(_NAMED_ROOT.finditer(text), key=lambda match: match.start(), default=None)
        end = None if found is None else closing(text, found.end() - 1)
        if found is None or end is None:
            break
        text = text[: found.start()] + written[found[1].lower()](text[found.end() : end]) + text[end + 1 :]
    return text


def closing(text: str, start: int) -> int | None:
    """Return the position of the bracket that closes the one at `start`; None if it is not closed."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] in "([{") - (text[index] in ")]}")
        if depth == 0:
            return index
    return None
