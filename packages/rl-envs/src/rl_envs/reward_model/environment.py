"""The environment `reward_model`, and the model that scores; imports torch and transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl_core.devices import device_named
from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_core.rollouts.rollout import Message
from rl_core.rollouts.thoughts import final_text
from rl_envs.reward_model.plugin import RewardModelConfig

DECIMALS = 4
"""Digits of a score; further ones depend on the other responses of the forward pass."""


class RewardModelEnvironment:
    """Scores the newest turn of a conversation, or every one of several turns."""

    def __init__(self, config: RewardModelConfig) -> None:
        if config.model is None:
            raise ValueError("it has no model; set `model` to the folder of a reward model, or to its hub name")
        self._config = config
        self._scorer = Scorer(
            config.model, device=config.device, precision=config.precision, max_length=config.max_length
        )

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        # The messages of the policy lose their thoughts.
        said = [
            (*map(_final, each.messages[:-1]), _final(each.messages[-1], each.opened_thoughts))
            for each in conversations
        ]
        compared = zip(conversations, said, strict=True) if self._config.compare_with else ()
        others = [self._other(*each) for each in compared]
        scores = self._scorer.scores([*said, *others])
        own, baselines = scores[: len(said)], scores[len(said) :] or [0.0] * len(said)
        return [self._result(score, baseline) for score, baseline in zip(own, baselines, strict=True)]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _result(self, score: float, baseline: float) -> StepResult:
        value = round(score - baseline, DECIMALS)
        reward = value
        if self._config.reward == "probability":
            reward = 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
            reward = round(reward, DECIMALS)
        info = {"score": round(score, DECIMALS)}
        if self._config.compare_with:
            info |= {"score_to_beat": round(baseline, DECIMALS), "accuracy": float(value > 0)}
        return StepResult(reward=reward, info=info)

    def _other(self, conversation: Conversation, said: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages of a conversation with the response of the row in place of the newest turn."""
        field = self._config.compare_with
        assert field is not None
        if field not in conversation.info:
            fields = ", ".join(sorted(map(str, conversation.info))) or "none"
            raise UnusableAnswer(
                f"`compare_with` is {field!r}, which is not a field of the row; its fields are {fields}"
            )
        return (*said[:-1], {"role": "assistant", "content": str(conversation.info[field])})


def _final(message: Message, opened: str = "") -> Message:
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return message
    return {**message, "content": final_text(content, opened)}


HEAD = "score"
"""Name of the head in the sequence classifiers of `transformers`."""


class Scorer:
    """A sequence classifier with one label.

    Args:
        name: Folder or hub name.
        device: `cpu` or `cuda`.
        precision: Dtype of the model.
        max_length: Maximum number of tokens of a conversation, whose last ones are scored; None for as many as the
            model has positions.

    Raises:
        ValueError: If the model has no safetensors or no head of one score, or the process sees no GPU for it.
    """

    def __init__(self, name: str, *, device: str, precision: str, max_length: int | None = None) -> None:
        kind = device_named(device)
        if kind.runs_on_gpus and not kind.visible():
            raise ValueError(
                f"its device is {device}, but its processes see no GPU; choose one that no model of the run uses in "
                'env_vars: {CUDA_VISIBLE_DEVICES: "7"}, or set device: cpu'
            )
        self._device = kind.torch_device
        self._model = _load(name, getattr(torch, precision)).to(self._device)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer of {name!r} has no chat template, with which its conversations were rendered"
            )
        self._special = {str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        self._max_length = max_length or self._model.config.get_text_config().max_position_embeddings

    @torch.inference_mode()
    def scores(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """Return a score for each conversation, the score of its last token."""
        if not conversations:
            return []
        rows = [self.encode(messages) for messages in conversations]
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device)
        mask = torch.arange(tokens.shape[1], device=self._device) < lengths[:, None]
        # The classifier's own forward looks for the last token that is not padding, and takes an end of sequence that
        # is the padding token for padding.
        hidden = self._model.base_model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        last: Tensor = hidden[torch.arange(len(rows), device=self._device), lengths - 1]
        scores: list[float] = self._model.get_submodule(HEAD)(last)[:, 0].float().tolist()
        return scores

    def encode(self, messages: Sequence[Message]) -> Tensor:
        """Tokens of a conversation as in training: rendered by the chat template, the last turn ended."""
        plain = [dict(message) for message in messages]
        text: str = self._tokenizer.apply_chat_template(plain, tokenize=False)
        tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not text.rstrip().endswith(tuple(self._special)):
            tokens = [*tokens, self._tokenizer.eos_token_id]
        return torch.tensor(tokens[-self._max_length :])


def _load(name: str, dtype: torch.dtype) -> Any:
    """Return the classifier, in evaluation mode, from safetensors only: pickled weights can run code when read.

    Raises:
        ValueError: If the model has no safetensors, no head of its own, or several labels.
    """
    try:
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            name, dtype=dtype, output_loading_info=True, trust_remote_code=False, use_safetensors=True
        )
    except OSError as error:
        if "safetensors" not in str(error):
            raise
        raise ValueError(
            f"{name!r} has no `model.safetensors`, the only format of weights that a reward model is loaded from. "
            "Weights that PyTorch pickled (`pytorch_model.bin`) can run code when they are read: `rl convert FOLDER "
            "NEW_FOLDER` writes safetensors without running any; otherwise, if you trust them, load the model with "
            "transformers once, and save it with `save_pretrained`"
        ) from error
    if dict(model.named_children()).get(HEAD) is None or any(key.startswith(HEAD) for key in loaded["missing_keys"]):
        raise ValueError(
            f"{name!r} is not a reward model: its files have no `{HEAD}` head. Train one with `algorithm: rm` and name "
            "the folder `hf` of a checkpoint"
        )
    if model.config.num_labels != 1:
        raise ValueError(f"{name!r} has {model.config.num_labels} labels; a reward model has one")
    return model.eval()
