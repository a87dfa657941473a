"""A tiny model on disk and what `transformers` computes with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rl_core.rollouts.generation import SamplingParams
from rl_core.selfcheck.torch.tiny_model import SIZES

VOCAB_SIZE = 320
EOS_TOKEN_ID: int = SIZES["eos_token_id"]

TOP_P_ROUNDING = 1e-5
"""Relative error of a sum of probabilities in float32, with room."""


def write_reference_model(folder: Path, *, seed: int, head_dim: int = 32) -> Path:
    """Write a Qwen3 of some 10^5 parameters with peaked predictions, and a byte-level tokenizer."""
    torch.manual_seed(seed)
    sizes = {**SIZES, "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "head_dim": head_dim}
    others = {"max_position_embeddings": 1024, "initializer_range": 0.15, "bos_token_id": None}
    config = Qwen3Config(**{**sizes, **others}, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"what is {i} + {j} ? {i + j}" for i in range(50) for j in range(50)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")


class ReferenceModel:
    """Plain forward passes of `transformers` over one row at a time: no cache, no padding, float32."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def greedy(self, prompt: np.ndarray, num_tokens: int) -> list[int]:
        """Return the most likely continuation, token by token."""
        tokens = [int(token) for token in prompt]
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def logits(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return float64 `[tokens, vocab]`."""
        with torch.no_grad():
            return self._model(torch.tensor([list(token_ids)])).logits[0].double().numpy()

    def score(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return float64 `[tokens]`, logprobs at temperature 1, the first 0."""
        logprobs = _log_softmax(self.logits(token_ids))
        following = logprobs[np.arange(len(token_ids) - 1), np.asarray(token_ids[1:], dtype=np.int64)]
        return np.concatenate([[0.0], following])

    def completion_logprobs(
        self, prompt: np.ndarray, completion: np.ndarray, sampling: SamplingParams | None = None
    ) -> np.ndarray:
        """Return float64 `[completion]`, logprobs after temperature, top-k and top-p; unchanged ones without
        parameters."""
        return _of_tokens(completion, self._logits_before(prompt, completion), sampling)

    def nearest_logprobs(
        self,
        found: np.ndarray,
        prompt: np.ndarray,
        completion: np.ndarray,
        sampling: SamplingParams,
        is_allowed: np.ndarray | None = None,
    ) -> np.ndarray:
        """`completion_logprobs` for comparison with those that an engine found `[completion]`. Where rounding decides
        whether the last token of `top_p` is one too many, both are right: the nearer of the two. `is_allowed`, bool
        `[completion, vocab]`, has the tokens that a grammar allows."""
        logits = self._logits_before(prompt, completion)
        if is_allowed is not None:
            logits = np.where(is_allowed, logits, -np.inf)
        changes = (0.0,) if sampling.top_p == 1 else (-TOP_P_ROUNDING, TOP_P_ROUNDING)
        shares = [min(sampling.top_p * (1 + change), 1.0) for change in changes]
        either = np.stack([_of_tokens(completion, logits, replace(sampling, top_p=share)) for share in shares])
        return either[np.abs(either - found).argmin(axis=0), np.arange(len(completion))]

    def _logits_before(self, prompt: np.ndarray, completion: np.ndarray) -> np.ndarray:
        """Return float64 `[completion, vocab]`, which each token of a completion was drawn from."""
        return self.logits([*prompt, *completion])[len(prompt) - 1 : -1]


def processed_logprobs(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Return float64 `[vocab]`, written as the definition: tokens of at least `min_p` times the largest probability,
    the `top_k` most likely of them, of these the fewest that hold `top_p`."""
    if sampling.temperature == 0:
        return _log_softmax(logits)
    scaled = logits / sampling.temperature
    falling = np.argsort(-scaled, kind="stable")
    probabilities = np.exp(_log_softmax(scaled[falling]))
    falling = falling[probabilities >= sampling.min_p * probabilities[0]]
    kept = falling[: sampling.top_k or len(falling)]
    held = np.cumsum(np.exp(_log_softmax(scaled[kept])))
    kept = kept[: 1 + int(np.searchsorted(held, sampling.top_p))] if sampling.top_p < 1 else kept
    filtered = np.full_like(scaled, -np.inf)
    filtered[kept] = scaled[kept]
    return _log_softmax(filtered)


def _of_tokens(tokens: np.ndarray, logits: np.ndarray, sampling: SamplingParams | None) -> np.ndarray:
    """Return float64 `[tokens]`, the logprob of each by its row of logits `[tokens, vocab]`."""
    rows = [processed_logprobs(row, sampling) if sampling else _log_softmax(row) for row in logits]
    return np.array([row[token] for row, token in zip(rows, tokens, strict=True)])


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
