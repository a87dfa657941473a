"""A reward model that scores conversations, several in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl_core.devices import device_named
from rl_core.rollouts.rollout import Message

HEAD = "score"
"""Name of the head in the sequence classifiers of `transformers`."""


class Scorer:
    """A sequence classifier with one label.

    Args:
        name: Folder or hub name.
        device: `cpu` or `cuda`.
        precision: Dtype of the model.
        max_length: Maximum number of tokens of a conversation, of which the last ones are scored; None for as many as
            the model has positions.

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
        """A score for each conversation: that of its last token."""
        if not conversations:
            return []
        rows = [self.encode(messages) for messages in conversations]
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device)
        mask = torch.arange(tokens.shape[1], device=self._device) < lengths[:, None]
        # the classifier's own forward looks for the last token that is not padding, and takes an end of sequence that
        # is the padding token for padding
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
