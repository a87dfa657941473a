import numpy as np
import pytest

from rl_algos.data.config import DatasetConfig
from rl_algos.data.rows.preference import preference
from rl_algos.judges.config import RewardModelJudgeConfig
from rl_algos.judges.reward_model import JudgeTokenizer
from rl_algos.losses.preference import ProcessLoss
from rl_algos.preference.comparison import StepVerdict
from rl_algos.preference.data import _encode_steps, encode_response
from rl_algos.preference.rows import StepsRow, steps_batch
from rl_algos.tiny_model import make_tokenizer
from rl_core.errors import DataError
from rl_core.rollouts.judging import JudgedRollout

USER = {"role": "user", "content": "1+1="}
TWO = {"role": "assistant", "content": "2"}
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def with_template(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def said(tokenizer, encoded):
    return tokenizer.decode(encoded.tokens[encoded.loss_mask == 1])


@pytest.mark.parametrize("template", [None, PLAIN])
def test_the_mask_is_on_the_response_and_not_on_earlier_turns(template):
    tokenizer = with_template(template)
    encoded = encode_response(tokenizer, [USER, TWO, USER], [TWO])
    assert tokenizer.decode(encoded.tokens).count("2") == 2
    assert said(tokenizer, encoded) == "2<|end|>"
    assert encoded.loss_mask[-3:].any()


def test_a_response_of_several_turns_leaves_out_what_others_say():
    tokenizer = with_template(None)
    assert said(tokenizer, encode_response(tokenizer, [USER], [TWO, USER, TWO])) == "2<|end|>2<|end|>"


def test_a_response_to_nothing_is_encoded():
    tokenizer = with_template(None)
    assert said(tokenizer, encode_response(tokenizer, [], [TWO])).endswith("2<|end|>")


def test_a_template_that_renders_the_prompt_anew_is_refused():
    rewriting = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else '...' }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(DataError, match="renders the messages before message 3"):
        encode_response(with_template(rewriting), [USER, TWO, USER], [TWO])


def steps_of(labels=(True, False, 0.5), *, texts=("1+1=2", "2+2=5\n\n", "5+1=6"), **row):
    row = {"prompt": "1+1+2+1=", "completions": list(texts), "labels": list(labels), **row}
    return preference(row, DatasetConfig(data_path="a.jsonl"))


def test_labels_of_steps_are_at_the_tokens_that_end_them():
    tokenizer = with_template(None)
    [(response, labels)] = _encode_steps(tokenizer, StepVerdict("\n\n"), steps_of())
    assert said(tokenizer, response) == "1+1=2\n\n2+2=5\n\n5+1=6<|end|>"
    ends = np.flatnonzero(labels >= 0)
    assert labels[ends].tolist() == [1.0, 0.0, 0.5]
    assert ends[-1] == len(response.tokens) - 1
    for end, text in zip(ends, ("1+1=2\n\n", "2+2=5\n\n"), strict=False):
        assert tokenizer.decode(response.tokens[: end + 1]).endswith(text)
    batch = steps_batch([StepsRow("0", response, labels), StepsRow("1", response, labels)])
    assert ProcessLoss().totals(batch) == {"steps": 6.0}


def test_a_judge_reads_the_scores_where_the_labels_of_steps_are():
    tokenizer = with_template(None)
    [(response, labels)] = _encode_steps(tokenizer, StepVerdict("\n\n"), steps_of())
    config = RewardModelJudgeConfig(kind="reward_model", model_name="m", step_end="\n\n")
    rollout = JudgedRollout(
        ({"role": "user", "content": "1+1+2+1="},), ({"role": "assistant", "content": "1+1=2\n\n2+2=5\n\n5+1=6"},)
    )
    [encoded] = JudgeTokenizer("steps", tokenizer, config).encode([rollout], "token")
    assert encoded.rows[0].tolist() == response.tokens.tolist()
    assert encoded.turns[0].places == tuple(np.flatnonzero(labels >= 0))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"labels": (True, False)}, "one label for each of the 3 steps"),
        ({"labels": (True, False, 2)}, "from 0 to 1, got 2"),
        ({"texts": ("1\n\n2", "3", "4")}, "has 3 steps, but 4 are found"),
    ],
)
def test_steps_without_labels_of_their_own_are_refused(row, words):
    with pytest.raises(DataError, match=words):
        _encode_steps(with_template(None), StepVerdict("\n\n"), steps_of(**row))


def test_a_row_without_labels_of_steps_says_what_to_add():
    example = preference({"prompt": "1", "completion": "2", "score": 1.0}, DatasetConfig(data_path="a.jsonl"))
    with pytest.raises(DataError, match="Add `completions`, the list of steps, and `labels`"):
        _encode_steps(with_template(None), StepVerdict("\n\n"), example)
