import pytest

from rl_core.rollouts.thoughts import THOUGHTS, closing_text, final_text, last_thoughts, only_thoughts, opened_by


@pytest.mark.parametrize(("begin", "end"), THOUGHTS.items())
def test_the_final_text_follows_the_last_thoughts_whatever_their_marks(begin, end):
    assert final_text(f"{begin}41{end}\n\n42") == "42"
    assert final_text(f"41{end}42", begin) == "42"
    assert final_text(f"{begin}a{end}41{begin}b{end}42") == "42"
    assert final_text(f"{begin}42") == final_text("42", begin) == final_text(f"{begin}42{end}") == ""
    assert opened_by(f"user: {begin}{end}\nassistant: {begin}\n") == begin
    assert opened_by(f"user: {begin}\nassistant: {begin}\n{end}\n\n") == ""


@pytest.mark.parametrize(("begin", "end"), THOUGHTS.items())
def test_thoughts_are_open_until_their_mark_and_a_closing_text_ends_them(begin, end):
    assert last_thoughts(f"{begin}41") == (len(begin), begin)
    assert last_thoughts("41", begin) == (0, begin)
    assert last_thoughts("41") == (0, "")
    assert last_thoughts(f"{begin}41{end}42") == (len(f"{begin}41{end}"), "")
    for text, opened in ((f"{begin}41", ""), ("41", begin)):
        assert final_text(f"{text}{closing_text(begin)}42", opened) == "42"


@pytest.mark.parametrize(
    ("text", "opened", "found"),
    [
        ("42", "", "42"),
        (" 42\n", "", " 42\n"),
        ("41</think>42", "", "42"),
        ("a</think>b</think>42", "<think>", "42"),
        ("<think>a<think>b</think>42", "", "42"),
        ("<think>\\boxed{41}</think> 42", "", "42"),
        ("<think>a</think>41<think>b", "", ""),
        ("I think <think>42", "", ""),
        # an answer that is drafted in thoughts with other marks
        ("<think><reasoning>a</reasoning><answer>42</answer>", "", ""),
        ("<reasoning>a</reasoning><answer>42</answer>", "<think>", ""),
        ("<think>a</think><reasoning>b</reasoning>42", "", "42"),
        # marks that are only mentioned
        ("`<think>` and `</think>` mark it", "", "`<think>` and `</think>` mark it"),
        ("<think>a</think>text.split('</think>')[-1]", "", "text.split('</think>')[-1]"),
        ('<think>They said "no"</think>"yes"', "", '"yes"'),
        ("", "", ""),
    ],
)
def test_the_final_text_is_what_the_last_end_of_thought_leaves(text, opened, found):
    assert final_text(text, opened) == found


@pytest.mark.parametrize(
    ("text", "opened", "found"),
    [
        ("<think>a</think>b", "", ("a", "b")),
        ("a</think>b", "", ("a", "b")),
        ("a</think>b", "<think>", ("a", "b")),
        ("[THINK]a[/THINK]b", "", ("a", "b")),
        ("b", "", None),
        ("b", "<think>", None),
        ("<think>b", "", None),
        ("</think><think>b", "", None),
        ("<think>a</think></think>", "", None),
        ("<think><think>a</think>", "", None),
        ("<think>a</think>b", "<think>", None),
        ("<think>a[/THINK]b", "", None),
    ],
)
def test_thoughts_are_closed_once(text, opened, found):
    assert only_thoughts(text, opened) == found


def test_many_marks_take_linear_time():
    text = "<think></think>" * 200_000
    assert final_text(text) == ""
