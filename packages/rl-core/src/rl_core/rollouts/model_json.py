"""JSON that a model wrote, which is hostile until it has been read within bounds."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

MAX_DEPTH = 32
"""Default limit of nested lists and objects, far below what pickling and printing a value can take."""
MAX_DIGITS = 4300
"""Maximum number of digits of an integer, as in Python."""

_SPACE = re.compile(r"[ \t\n\r]*")
_PIECE = re.compile(
    r"""
    [ \t\n\r,:\w.+\-]*+                                                        # numbers, words, commas and colons
    (?: " (?: [^"\\\x00-\x1f]++ | \\["\\/bfnrtu] )* (?P<closed>")?             # a string, perhaps without its end
      | (?P<bracket>[\[\]{}])
    )?
    """,
    re.VERBOSE | re.ASCII,
)
"""Text of JSON up to a bracket or the end of a string; nothing is matched twice."""
_SURROGATE = re.compile("[\ud800-\udfff]")


class MalformedJson(ValueError):
    """A string that is not JSON within the bounds. The message is for the model that wrote it.

    Args:
        problem: Description of the fault.
        end: End of the examined text. A reader that continues there takes linear time in all.
    """

    def __init__(self, problem: str, end: int = 0) -> None:
        super().__init__(problem)
        self.end = end


def read_model_json(text: str, *, max_depth: int = MAX_DEPTH) -> Any:
    """Return the JSON value that a whole string is, in linear time.

    Args:
        text: Output of a model. White space around the value is allowed.
        max_depth: Maximum number of nested lists and objects.

    Raises:
        MalformedJson: If it is not valid JSON, is nested too deeply, has an integer of more than `MAX_DIGITS` digits, a
            number that is not finite, a key twice in an object, half of a surrogate pair, or text after the value.
    """
    value, end = read_model_json_at(text, 0, max_depth=max_depth)
    end = after_space(text, end)
    if end < len(text):
        raise MalformedJson(f"there is text after the JSON value: {text[end : end + 20]!r}", end)
    return value


def read_model_json_at(text: str, start: int, *, max_depth: int = MAX_DEPTH) -> tuple[Any, int]:
    """Return the JSON value that begins at a position, and the position after it.

    Args:
        text: Output of a model, with anything before and after the value.
        start: Position of the value, or of white space before it.
        max_depth: Maximum number of nested lists and objects.

    Raises:
        MalformedJson: See `read_model_json`; text after the value is allowed.
    """
    start = after_space(text, start)
    if start == len(text):
        raise MalformedJson("no JSON value was found", start)
    stop = _examined(text, start, max_depth) if text[start] in "[{" else len(text)
    part = text[start : stop + 2]  # the two characters let the decoder say what it cannot read
    try:
        value, length = _DECODER.raw_decode(part)
    except json.JSONDecodeError as error:
        raise MalformedJson(f"it is not valid JSON: {error}", stop) from None
    except MalformedJson as error:
        raise MalformedJson(str(error), stop) from None
    # No tokenizer and no file can take half of a surrogate pair.
    used = part[:length]
    may_have = "\\ud" in used or "\\uD" in used or _SURROGATE.search(used)
    if may_have and (found := _SURROGATE.search(json.dumps(value, ensure_ascii=False))):
        raise MalformedJson(f"a string has half of a surrogate pair, \\u{ord(found[0]):04x}", stop)
    return value, start + length


def after_space(text: str, start: int) -> int:
    """Return the position of the first character at or after `start` that is not white space of JSON."""
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def _examined(text: str, start: int, max_depth: int) -> int:
    """Return the position after the bracket that closes a value, or of the first character that it cannot have.

    No decoder that reads up to there meets more than `max_depth` open brackets.
    """
    depth, end = 0, start
    while True:
        piece = _PIECE.match(text, end)
        assert piece is not None
        end = piece.end()
        if piece["closed"]:
            continue
        if not piece["bracket"]:
            return end
        depth += 1 if piece["bracket"] in "[{" else -1
        if depth > max_depth:
            raise MalformedJson(f"its lists and objects are nested more than {max_depth} deep", end)
        if depth == 0:
            return end


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise MalformedJson(f"an object has the key {key[:60]!r} twice")
    return made


def _integer(digits: str) -> int:
    if len(digits.removeprefix("-")) > MAX_DIGITS:
        raise MalformedJson(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise MalformedJson(f"the number {digits[:40]} is too large")
    return number


def _refused(constant: str) -> NoReturn:
    raise MalformedJson(f"it is not valid JSON: {constant} is not a number of JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_integer, parse_float=_finite, parse_constant=_refused)
