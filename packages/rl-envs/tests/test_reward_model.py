import dataclasses
import math

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from rl_core.rollouts.environment import Conversation, UnusableAnswer
from rl_core.testing.environment import EnvironmentSuite
from rl_envs.reward_model.environment import RewardModelEnvironment, Scorer
from rl_envs.reward_model.plugin import RewardModelConfig

CHARACTERS = "0123456789+="
SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>")
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
OPEN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def save_tokenizer(folder, template=TEMPLATE):
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    # the end of sequence is the padding token, as in many models
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<end>",
        eos_token="<end>",
        additional_special_tokens=list(SPECIAL[2:]),
        chat_template=template,
    ).save_pretrained(folder)


def save_model(folder, kind=Qwen3ForSequenceClassification, **settings):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=1,
        eos_token_id=1,
        initializer_range=0.5,
        **{"num_labels": 1, **settings},
    )
    kind(config).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("reward_model"))


def said(completion, name="0", **info):
    messages = ({"role": "user", "content": "1+1="}, {"role": "assistant", "content": completion})
    return Conversation(id=name, messages=messages, info=info, completion=completion)


def reward(folder, conversation, **settings):
    [result] = RewardModelEnvironment(RewardModelConfig(model=folder, **settings)).step([conversation], [None])
    return result


def oracle(folder, tokens):
    """The score of transformers' own forward on a row without padding, whose padding token is none of the row's."""
    model = Qwen3ForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    model.config.pad_token_id = 0
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits.item()


class TestRewardModelEnvironment(EnvironmentSuite):
    @pytest.fixture(autouse=True)
    def _model(self, folder):
        self.folder = folder

    def environment(self):
        return RewardModelEnvironment(RewardModelConfig(model=self.folder))

    def conversations(self):
        return [said("2", "a"), said("333", "b"), said("1+1+1", "c"), said("", "d")]


def test_a_reward_is_the_score_of_the_last_token_of_the_rendered_conversation(folder):
    ids = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokens = [ids[token] for token in ["<user>", *"1+1=", "<end>", "<assistant>", *"12", "<end>"]]
    found = reward(folder, said("12"))
    assert found.reward == pytest.approx(oracle(folder, tokens), abs=1e-3)
    assert found.done
    assert found.info == {"score": found.reward}


def test_thoughts_are_not_scored(folder):
    opened = dataclasses.replace(said("33"), opened_thoughts="<think>")
    thinking = [said("<think>3</think>12"), said("<think>3"), opened]
    scores = [reward(folder, each).reward for each in thinking]
    assert scores == [reward(folder, said(text)).reward for text in ("12", "", "")]


def test_thoughts_of_earlier_turns_are_not_scored(folder):
    def after(content):
        earlier = ({"role": "assistant", "content": content}, {"role": "user", "content": "1+1="})
        return reward(folder, dataclasses.replace(said("12"), messages=(*earlier, *said("12").messages))).reward

    assert after("<think>3</think>2") == after("2") != after("3")


def test_responses_of_different_lengths_are_scored_together_as_alone(folder):
    scorer = Scorer(folder, device="cpu", precision="float32")
    conversations = [said(text).messages for text in ("2", "333333333", "", "1+2+3")]
    together = scorer.scores(conversations)
    alone = [scorer.scores([conversation])[0] for conversation in conversations]
    np.testing.assert_allclose(together, alone, rtol=1e-4)
    assert len(set(alone)) == len(alone)


def test_a_turn_that_the_template_leaves_open_is_ended_as_in_training(tmp_path):
    folder = save_model(tmp_path)
    closed = Scorer(folder, device="cpu", precision="float32").encode(said("2").messages).tolist()
    save_tokenizer(tmp_path, OPEN)
    opened = Scorer(folder, device="cpu", precision="float32").encode(said("2").messages).tolist()
    assert opened[-1] == closed[-1] == 1
    assert opened.count(1) == 1


def test_a_response_is_compared_with_that_of_the_row(folder):
    conversation = said("12", answer="3")
    alone, other = (reward(folder, said(text)).reward for text in ("12", "3"))
    compared = reward(folder, conversation, compare_with="answer")
    assert compared.reward == pytest.approx(alone - other, abs=2e-4)
    assert compared.info["accuracy"] == float(alone > other)
    preferred = reward(folder, conversation, compare_with="answer", reward="probability")
    assert preferred.reward == pytest.approx(1 / (1 + math.exp(other - alone)), abs=2e-4)
    assert reward(folder, said("3", answer="3"), compare_with="answer").reward == 0.0
    with pytest.raises(UnusableAnswer, match=r"'best', .*; its fields are answer"):
        reward(folder, conversation, compare_with="best")


def test_the_end_of_a_long_conversation_is_scored(folder):
    scorer = Scorer(folder, device="cpu", precision="float32", max_length=5)
    assert scorer.encode(said("1234").messages).tolist() == scorer.encode(said("991234").messages).tolist()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": Qwen3ForCausalLM}, "is not a reward model: its files have no `score` head"),
        ({"num_labels": 3}, "has 3 labels; a reward model has one"),
    ],
)
def test_models_that_score_nothing_are_refused(tmp_path, settings, says):
    with pytest.raises(ValueError, match=says):
        RewardModelEnvironment(RewardModelConfig(model=save_model(tmp_path, **settings)))


class Payload:
    """An object whose unpickling leaves a file."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return open, (str(self.trace), "w")


def test_pickled_weights_are_refused_unread(tmp_path):
    folder = save_model(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    torch.save({"score.weight": Payload(tmp_path / "trace")}, tmp_path / "model/pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no `model\.safetensors`.*pytorch_model\.bin.*save_pretrained"):
        Scorer(folder, device="cpu", precision="float32")
    assert not (tmp_path / "trace").exists()


def test_settings_that_cannot_work_are_refused(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="it has no model; set `model`"):
        RewardModelEnvironment(RewardModelConfig())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=r"its processes see no GPU.*CUDA_VISIBLE_DEVICES"):
        RewardModelEnvironment(RewardModelConfig(model=folder, device="cuda"))
    without = save_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        RewardModelEnvironment(RewardModelConfig(model=without))
