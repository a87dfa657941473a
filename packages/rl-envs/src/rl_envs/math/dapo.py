"""The verifier of DAPO (arXiv:2503.14476): the text after the last `Answer:`, normalised as for Minerva
(arXiv:2206.14858, appendix D.1), must equal the normalised answer.
"""

from __future__ import annotations

import re

LAST = 300
"""Characters at the end of a response in which the answer must stand."""

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
# fmt: off
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue",
    "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals",
    "edges", "students", "childrentickets", "multiples", r"\text{s}", r"\text{.}", r"\text{}^2",
    r"\text{}^3", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)
# fmt: on
_WRAPPERS = tuple(re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline", "boxed"))


def answer_in(response: str) -> str | None:
    """The text after the last `Answer:` on its line; None if there is none near the end."""
    found = _ANSWER.findall(response[-LAST:])
    return found[-1].strip() if found else None


def normalised(answer: str) -> str:
    """An answer without units, filler words, LaTeX wrappers and spaces."""
    text = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for word in _REMOVED:
        text = text.replace(word, "")
    if (formula := re.search(r"\$(.*?)\$", text)) is not None:
        text = formula[1]
    for wrapper in _WRAPPERS:
        text = wrapper.sub(r"\1", text)
    text = re.sub(r"(frac)([^{])(.)", r"\1{\2}{\3}", text)
    text = re.sub(r"(sqrt)([^{])", r"\1{\2}", text).replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()
