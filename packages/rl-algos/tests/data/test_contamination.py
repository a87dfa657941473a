"""Overlap of training rows with the prompts of an evaluation: planted leaks, and rows that only look alike."""

import numpy as np
import pytest

from rl_algos.data.contamination import SIMILARITY, PromptIndex

REQUEST = "Think step by step, and end with the final answer in a box on a line of its own."


def user(text):
    return {"role": "user", "content": text}


def sentence(random, length=30):
    words = [f"word{number}" for number in random.integers(3000, size=length)]
    words[5] = str(random.integers(1000))
    return " ".join(words)


@pytest.fixture
def questions():
    """60 questions with the same request after each."""
    random = np.random.default_rng(0)
    return {str(number): [user(f"{sentence(random)}? {REQUEST}")] for number in range(60)}


def other_words(text, every):
    """The text with other words at regular places."""
    return " ".join("other" if place % every == every - 1 else word for place, word in enumerate(text.split()))


LEAKS = {
    "as it is": lambda text: text,
    "in capitals without punctuation": lambda text: text.upper().replace("?", "").replace(",", ""),
    "without the request": lambda text: text.removesuffix(REQUEST),
    "in a longer text": lambda text: f"Here is what somebody asked me the other day: {text} I could not solve it.",
    "its first two thirds": lambda text: " ".join(text.split()[:21]),
    "with another number": lambda text: " ".join("17" if word.isdigit() else word for word in text.split()),
}


def test_planted_leaks_are_found_and_nothing_else(questions):
    index, random = PromptIndex(questions), np.random.default_rng(1)
    for number in range(300):
        index.add([[user(f"{sentence(random)}? {REQUEST}")]], f"clean {number}")
    planted = {}
    for number, (name, leak) in enumerate(LEAKS.items()):
        for role in ("user", "assistant"):
            key = str(2 * number + (role == "user"))
            planted[key] = f"{name}, {role}"
            index.add([[user("Hello."), {"role": role, "content": leak(questions[key][0]["content"])}]], planted[key])
    assert {key: each.place for key, each in index.overlaps.items()} == planted
    assert {each.kind for each in index.overlaps.values()} == {"copied"}


def test_prompts_are_similar_up_to_a_changed_word_in_six(questions):
    for every, kind in ((6, "similar"), (3, None)):
        index = PromptIndex(questions)
        changed = other_words(questions["7"][0]["content"].removesuffix(REQUEST), every) + REQUEST
        index.add([[user(changed)]], "row")
        assert {key: each.kind for key, each in index.overlaps.items()} == ({"7": kind} if kind else {})


def test_the_similarity_is_the_jaccard_index_of_pairs_of_words():
    words = sentence(np.random.default_rng(3), 60)
    changed = other_words(words, 6)
    index = PromptIndex({"0": [user(words)]})
    index.add([[user(changed)]], "row")
    pairs = [set(zip(each.split(), each.split()[1:], strict=False)) for each in (words, changed)]
    [overlap] = index.overlaps.values()
    assert overlap.share == len(pairs[0] & pairs[1]) / len(pairs[0] | pairs[1]) >= SIMILARITY


def test_short_prompts_are_copied_by_messages_with_the_same_words_only():
    index = PromptIndex({"a": [user("12+30=")], "b": [user("7 * 8")], "empty": [user("")]})
    index.add([[user("What is 7 times 8?")], [user("12+31=")]], "other")
    index.add([[user("12 + 30 = ?"), {"role": "assistant", "content": "42"}]], "same")
    assert {key: (each.kind, each.place, each.share) for key, each in index.overlaps.items()} == {
        "a": ("copied", "same", 1.0)
    }


def test_prompts_with_parts_and_calls_are_read():
    content = [{"type": "image", "image": "x"}, {"type": "text", "text": "one two three"}]
    index = PromptIndex({"a": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]})
    index.add([[{"role": "assistant", "content": None, "tool_calls": []}, user("One, two, three!")]], "row")
    assert list(index.overlaps) == ["a"]
