"""Pages of the config keys, from the schemas of the installed packages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from rl_core.config import Explanation, explain, explain_all, show
from rl_launch.commands.explain import FoundKey, every_key, page_of, roots_of_all
from rl_launch.submit.profile import PROFILE
from website.reference.text import code, prose, table

_OPENING = """# Config

A config has these sections. Every key has its allowed values, its default, and what a change of it means for a run that
has begun. `rl config explain KEY` prints the same in a terminal, and `rl config explain RECIPE KEY` also the value in a
recipe and where it was set.

"""
_PROFILE = "only in a profile of `rl submit`"


def pages() -> dict[str, str]:
    """Return the text of each page by its place: an index, and a page for each section at the root of a config."""
    found: dict[str, list[FoundKey]] = {}
    for each in (*_keys(), *_of_profile()):
        page = page_of(each.explanation)
        found.setdefault(page.partition(".html")[0] + ".md", []).append(each)
    rules = _rules()
    texts = {place: _page(keys, rules) for place, keys in found.items()}
    index = "reference/config/index.md"
    sections = [(place, keys[0]) for place, keys in found.items() if place != index]
    rows = [
        (f"[{code(key.explanation.key)}]({place.rpartition('/')[2]})", prose(key.explanation.doc.partition("\n\n")[0]))
        for place, key in sections
    ]
    texts[index] = _OPENING + table(("section", "meaning"), rows) + "\n" + "\n".join(_entries(found[index], rules, 2))
    return {index: texts.pop(index), **texts}


def _keys() -> list[FoundKey]:
    """Return every key of a config, apart from entries of lists, which are in the defaults of the lists."""
    return [each for each in every_key() if "[" not in each.explanation.key]


def _of_profile() -> Iterator[FoundKey]:
    for explanation in explain_all(PROFILE):
        if "[" not in explanation.key:
            yield FoundKey(explanation, _PROFILE)


def _rules() -> Mapping[str, str]:
    """Return the rule of each key for a change in a run that has begun."""
    found: dict[str, str] = {}
    for root in roots_of_all().values():
        for each in explain_all(root):
            if each.key not in found:
                rule = explain(root, each.key).when_changed
                found[each.key] = rule.value if rule is not None else ""
    return found


def _page(keys: list[FoundKey], rules: Mapping[str, str]) -> str:
    top = keys[0].explanation.key.partition(".")[0]
    return f"# {code(top)} {{ #{top} }}\n\n" + "\n".join(_entries(keys, rules))


def _entries(keys: list[FoundKey], rules: Mapping[str, str], level: int = 3) -> Iterator[str]:
    """Yield the keys with a heading each, a section's own keys before the sections in it."""
    sections = [each.explanation.key for each in keys if _is_section(each.explanation)]
    order = {key: place for place, key in enumerate(dict.fromkeys(each.explanation.key for each in keys))}

    def place(each: FoundKey) -> tuple[int, bool, int]:
        key = each.explanation.key
        around = key if key in sections else _around(key, sections)
        return order.get(around, -1), key != around, order[key]

    for key, meanings in groupby(sorted(keys, key=place), key=lambda each: each.explanation.key):
        yield _entry(key, list(meanings), rules, level=2 if key in sections else level)


def _around(key: str, sections: Iterable[str]) -> str:
    return max((each for each in sections if key.startswith(f"{each}.")), key=len, default="")


def _entry(key: str, meanings: list[FoundKey], rules: Mapping[str, str], level: int) -> str:
    is_page = "." not in key and _is_section(meanings[0].explanation)
    heading = "" if is_page else f"{'#' * level} {code(key)} {{ #{key} }}\n\n"
    alike = groupby(meanings, key=lambda each: (each.explanation.doc, each.explanation.type))
    return heading + "\n".join(_meaning(list(group), rules.get(key, "")) for _, group in alike)


def _meaning(alike: list[FoundKey], rule: str) -> str:
    """Return the text of one meaning of a key, whose default may depend on other keys."""
    first, conditions = alike[0].explanation, [each.condition for each in alike]
    text = f"{prose(first.doc)}\n\n" if first.doc else ""
    if _is_section(first):
        return text + (f"This section exists {_only(conditions)}.\n" if all(conditions) else "")
    facts = [f"allowed: {prose(first.type)}"]
    if len(alike) == 1:
        facts.append(_default(first))
    else:
        facts += [f"{_default(each.explanation)} with {code(each.condition)}" for each in alike]
    facts += [f"once a run has begun: {rule}"] if rule else []
    facts += [_only(conditions)] if len(alike) == 1 and all(conditions) else []
    return text + "".join(f"- {fact}\n" for fact in facts)


def _default(explanation: Explanation) -> str:
    return "must be set" if explanation.required else f"default: {code(show(explanation.default))}"


def _only(conditions: list[str]) -> str:
    if conditions == [_PROFILE]:
        return _PROFILE
    return f"only with {' or '.join(map(code, conditions))}"


def _is_section(explanation: Explanation) -> bool:
    return explanation.type == "section"
