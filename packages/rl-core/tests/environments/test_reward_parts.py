import pytest

from rl_core.environments.reward_function import as_environment
from rl_core.environments.rewards import language_consistency, length_penalty, thinking_format
from rl_core.rollouts.environment import Conversation


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>Hm.</think>3", 1.0),
        ("\n<think>\nHm.\n</think>\n\n3\n", 1.0),
        ("3", 0.0),
        ("<think>Hm.</think>", 0.0),
        ("<think></think>3", 0.0),
        ("<think>Hm.3", 0.0),
        ("<think>a</think><think>b</think>3", 0.0),
        ("Well, <think>Hm.</think>3", 0.0),
    ],
)
def test_the_format_of_thoughts_is_one_block_and_an_answer(response, reward):
    assert thinking_format(response) == reward


@pytest.mark.parametrize(
    ("response", "reward"), [("Hm.</think>3", 1.0), ("3", 0.0), ("Hm.</think>", 0.0), ("<think>Hm.</think>3", 0.0)]
)
def test_the_prompt_may_have_opened_the_thoughts(response, reward):
    conversation = Conversation("0", (), {}, response, opened_thoughts="<think>")
    [result] = as_environment(thinking_format).step([conversation], [None])
    assert result.rewards() == {"reward": reward}


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (10, 0.0), (15, -0.5), (20, -1.0), (100, -1.0)])
def test_the_penalty_of_length_grows_past_the_limit(length, penalty):
    assert length_penalty("x" * length, max_characters=10) == penalty


@pytest.mark.parametrize(("response", "share"), [("yes 1", 1.0), ("да", 0.0), ("yesда", 0.6), ("123", 1.0), ("", 1.0)])
def test_consistency_is_the_share_of_letters_in_the_scripts_of_the_prompt(response, share):
    assert language_consistency(response, "Which one?") == pytest.approx(share)


def test_a_prompt_of_two_scripts_allows_both():
    assert language_consistency("世界 world", "世 w") == 1.0
