"""The model that policy and generator should both compute, in `transformers`, with one change at a time.

The change that brings its logprobs to those of the side that is off is the fault of that side.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_algos.rollouts.mismatch import (
    MIN_GAP,
    MismatchCase,
    MismatchGap,
    MismatchRows,
    Side,
    TriedChange,
    bounded,
    mean_difference,
)
from rl_algos.tokenizer import load_tokenizer
from rl_core.errors import ConfigError
from rl_core.model_config import TokenizerConfig
from rl_core.torch.files.language_part import KEY_MAPPING, read_language_config

_log = logging.getLogger(__name__)

MAX_PADDED = 16384
"""Maximum number of tokens of a forward pass, padding included."""

FEW_SAMPLED = 128
"""Number of sampled tokens on which a number of the model is fitted, each value being a pass."""

ATTENTION = "mismatch"
"""Name of the attention function that changes can alter."""

FAMILY_ERRORS = (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors of a family's code for a change that it does not have."""

BY_ROW = ("stale", "adapter", "prefix_cache", "stale_part")
"""Causes that may be in some rows only, such as the rows of one replica."""


@dataclass(frozen=True)
class Scored:
    """Rows as a change has them scored: other tokens than those that are recorded, perhaps.

    Args:
        tokens: Int64 `[tokens]`.
        places: Int64 `[sampled]`, places of the sampled tokens.
    """

    tokens: Tensor
    places: Tensor


class Sampled(NamedTuple):
    """Sampled tokens of some rows.

    Attributes:
        logits: Float32 `[sampled, vocab]`.
        ids: Int64 `[sampled]`.
        before: Int64 `[tokens]` for each of them, the tokens before it in its row.
    """

    logits: Tensor
    ids: Tensor
    before: Sequence[Tensor]


@dataclass
class AttentionChange:
    """The alteration of the attention function; nothing by default.

    Args:
        has_window: False to attend to all tokens before, whatever the model's window is.
        dtype: Dtype that queries, keys and values are rounded to; None for their own.
        of_cache: True to round only keys and values.
    """

    has_window: bool = True
    dtype: torch.dtype | None = None
    of_cache: bool = False


_attention = AttentionChange()


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any) -> Any:
    """Compute attention as `sdpa` does, with the present alteration."""
    change = _attention
    if change.dtype is not None:
        own = query.dtype
        key, value = key.to(change.dtype).to(own), value.to(change.dtype).to(own)
        if not change.of_cache:
            query = query.to(change.dtype).to(own)
    if not change.has_window:
        places = torch.arange(key.shape[2], device=key.device)
        mask = (places[-query.shape[2] :, None] >= places[None])[None, None]
    return sdpa_attention_forward(module, query, key, value, mask, **others)


@contextmanager
def _attending(**change: Any) -> Iterator[None]:
    """Alter attention by the fields of `AttentionChange`."""
    # The function of the interface has no other state.
    global _attention
    _attention = AttentionChange(**change)
    try:
        yield
    finally:
        _attention = AttentionChange()


@contextmanager
def _replaced(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give weights of a model other values."""
    held = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    own = {name: held[name].data for name in tensors}
    try:
        for name, tensor in tensors.items():
            held[name].data = tensor
        yield
    finally:
        for name, tensor in own.items():
            held[name].data = tensor


class MismatchModel:
    """The configured model in `transformers`, and the rows.

    Args:
        case: The mismatch.

    Attributes:
        case: The mismatch.
        rows: Its rows.
        module: The model, in the precision of the policy.
        generation: Float64 `[sampled]`, logprobs of the generator.
        policy: The same of the policy; None if they are not known.
        base: The same of this model with the configured sampling.
        row_of: Int64 `[sampled]`, row of each sampled token.
        sampling: Settings of `filtered_logprobs` as they are configured.
        vocab_size: Number of rows of the head.
        is_tied: True if the head's weight is the embedding's.
    """

    def __init__(self, case: MismatchCase) -> None:
        AttentionInterface.register(ATTENTION, _attend)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        self.case = case
        self.rows = MismatchRows.read(case.rows)
        self.device = torch.device(case.device)
        self.dtype: torch.dtype = getattr(torch, case.precision)
        self.module = self.load(case.model)
        self.scored = [
            Scored(torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(np.flatnonzero(mask)))
            for tokens, mask in zip(self.rows.tokens, self.rows.mask, strict=True)
        ]
        is_sampled = self.rows.mask.values > 0
        self.generation = self.rows.generation.values[is_sampled].astype(np.float64)
        self.policy = None if self.rows.policy is None else self.rows.policy.values[is_sampled].astype(np.float64)
        self.row_of = np.repeat(np.arange(len(self.scored)), [len(each.places) for each in self.scored])
        self.sampling: dict[str, float] = {
            name: getattr(case, name) for name in ("temperature", "top_k", "top_p", "min_p")
        }
        head, embedding = self.module.get_output_embeddings().weight, self.module.get_input_embeddings().weight
        self.vocab_size, self.is_tied = len(head), head.data_ptr() == embedding.data_ptr()
        self._head_dtype: torch.dtype | None = None
        self.base = self.logprobs()
        if self.policy is not None and self.dtype != torch.float32:
            # Trainers compute the head in the dtype of the model, or in float32.
            wide = self.logprobs(head={"dtype": torch.float32})
            if mean_difference(wide, self.policy) < mean_difference(self.base, self.policy):
                self._head_dtype, self.base = torch.float32, wide

    def load(self, folder: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Load the language model of a folder in a dtype, by default the precision of the policy."""
        config = read_language_config(folder, self.case.overrides)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype or self.dtype,
            attn_implementation=ATTENTION if self._takes_attention(config) else "eager",
            key_mapping=KEY_MAPPING,
            trust_remote_code=False,
        )
        return cast("PreTrainedModel", loaded.to(self.device).eval().requires_grad_(False))

    @staticmethod
    def _takes_attention(config: Any) -> bool:
        return not getattr(config, "attn_logit_softcapping", None)

    def rebuilt(self, **fields: Any) -> PreTrainedModel:
        """Return the model with other fields of its config and the same weights, which both share."""
        config = copy.deepcopy(self.module.config)
        for name, value in fields.items():
            setattr(config, name, value)
        family: Any = type(self.module)
        with torch.device("meta"):
            module = family(config)
        own, held = dict(self.module.named_buffers()), self.module.state_dict()
        module.load_state_dict(held, strict=False, assign=True)
        module.config._attn_implementation = self.module.config._attn_implementation
        for name, part in list(module.named_modules()):
            if "Rotary" in type(part).__name__ and hasattr(part, "config"):
                made = type(part)(part.config).to(self.device)
                parent, _, last = name.rpartition(".")
                setattr(module.get_submodule(parent), last, made)
        for name, buffer in list(module.named_buffers()):
            if buffer.is_meta:
                parent, _, last = name.rpartition(".")
                module.get_submodule(parent)._buffers[last] = own[name]
        if any(each.is_meta for each in module.parameters()):
            module.tie_weights()
        if fields.get("tie_word_embeddings"):
            module.get_output_embeddings().weight = module.get_input_embeddings().weight
        if any(each.is_meta for each in module.parameters()):
            raise ValueError("the changed model has other weights")
        return cast("PreTrainedModel", module.eval().requires_grad_(False))

    # Logprobs.

    @torch.inference_mode()
    def logprobs(
        self,
        *,
        rows: Sequence[Scored] | None = None,
        sampling: Mapping[str, Any] | None = None,
        logits: Callable[[Sampled], Tensor] | None = None,
        **model: Any,
    ) -> np.ndarray:
        """Return float64 `[sampled]`.

        Args:
            rows: Rows to score; the recorded ones if not given.
            sampling: Other values of arguments of `filtered_logprobs`.
            logits: Function to other logits, `[sampled, any vocab]`.
            model: Changes of the model, arguments of `_passes`.
        """
        rows = self.scored if rows is None else rows
        passes = self._few_passes if rows is self.few and not model else self._passes(rows, **model)
        parts = [self.sampled_logprobs(logits(each) if logits else each.logits, each.ids, sampling) for each in passes]
        return np.concatenate(parts)

    def sampled_logprobs(self, logits: Tensor, ids: Tensor, changes: Mapping[str, Any] | None = None) -> np.ndarray:
        """Return float64 `[sampled]` from logits `[sampled, vocab]` by the configured sampling, or a changed one."""
        return filtered_logprobs(logits, ids, **{**self.sampling, **(changes or {})}).double().cpu().numpy()

    def left_of_few(self, **how: Any) -> float:
        """Return what a change leaves of the gap on a few rows; infinity if the model does not have it."""
        try:
            found = self.logprobs(rows=self.few, **how)
        except FAMILY_ERRORS:
            return np.inf
        return mean_difference(found, self.target[: len(found)])

    @cached_property
    def _few_passes(self) -> list[Sampled]:
        return list(self._passes(self.few))

    def _passes(
        self,
        rows: Sequence[Scored],
        *,
        module: PreTrainedModel | None = None,
        dtype: torch.dtype | None = None,
        fields: Mapping[str, Any] | None = None,
        weights: Mapping[str, Tensor] | None = None,
        attention: Mapping[str, Any] | None = None,
        head: Mapping[str, Any] | None = None,
    ) -> Iterator[Sampled]:
        """Yield the sampled tokens of several rows at a time, from the model or a changed one.

        Args:
            rows: The rows.
            module: Another model.
            dtype: Dtype to load the model in.
            fields: Fields of its config.
            weights: Weights by name.
            attention: Fields of `AttentionChange`.
            head: `dtype` and `weight` to compute the head with, and `is_rounded` for logits rounded to bfloat16.
        """
        if module is None:
            module = self.load(self.case.model, dtype) if dtype else self.rebuilt(**fields) if fields else self.module
        start = 0
        with _replaced(module, weights or {}), _attending(**attention or {}):
            while start < len(rows):
                end, longest = start, 0
                while end < len(rows) and (
                    end == start or max(longest, len(rows[end].tokens)) * (end + 1 - start) <= MAX_PADDED
                ):
                    longest, end = max(longest, len(rows[end].tokens)), end + 1
                part = rows[start:end]
                # Tokens after the end of a row change nothing before it.
                ids = nn.utils.rnn.pad_sequence([each.tokens for each in part], batch_first=True).to(self.device)
                number = torch.cat([torch.full_like(each.places, n) for n, each in enumerate(part)]).to(self.device)
                place = torch.cat([each.places for each in part]).to(self.device)
                with self._only(module, number, place - 1, **{"dtype": self._head_dtype, **(head or {})}):
                    found = module(input_ids=ids, use_cache=False).logits[0].float()
                before = [each.tokens[:place] for each in part for place in each.places.tolist()]
                yield Sampled(found, ids[number, place], before)
                start = end

    @staticmethod
    @contextmanager
    def _only(
        module: PreTrainedModel,
        number: Tensor,
        place: Tensor,
        *,
        dtype: torch.dtype | None,
        weight: Tensor | None = None,
        is_rounded: bool = False,
    ) -> Iterator[None]:
        """Have the head read only some hidden states, by row and place."""
        head = cast("nn.Linear", module.get_output_embeddings())

        def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (inputs[0][number, place][None], *inputs[1:])

        def after(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if dtype is not None or weight is not None:
                own = dtype or inputs[0].dtype
                bias = None if head.bias is None else head.bias.to(own)
                used = head.weight if weight is None else weight
                output = nn.functional.linear(inputs[0].to(own), used.to(own), bias).float()
            return output.bfloat16().float() if is_rounded else output

        handles = [head.register_forward_pre_hook(before), head.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @cached_property
    def few(self) -> list[Scored]:
        """The first rows, with `FEW_SAMPLED` sampled tokens in all."""
        found, left = [], FEW_SAMPLED
        for row in self.scored:
            places = row.places[:left]
            if len(places):
                found.append(Scored(row.tokens[: int(places[-1]) + 1], places))
                left -= len(places)
        return found

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the rows; None if it cannot be loaded."""
        try:
            return load_tokenizer(TokenizerConfig(**self.case.tokenizer), self.case.model)
        except ConfigError as error:
            _log.warning("changes of tokens cannot all be tried: %s", error)
            return None

    # The gap.

    @cached_property
    def gap(self) -> MismatchGap:
        """The differences between the two sides, and of each from this model."""
        policy = self.base if self.policy is None else self.policy
        differences = np.abs(policy - self.generation)
        counts = np.bincount(self.row_of, minlength=len(self.scored))
        by_row = np.bincount(self.row_of, bounded(differences), len(self.scored)) / np.maximum(counts, 1)
        return MismatchGap(
            mean=float(bounded(differences).mean()),
            largest=float(np.nan_to_num(differences, nan=np.inf).max()),
            rows=float((by_row > MIN_GAP[self.case.precision]).mean()),
            num_tokens=len(differences),
            generator=mean_difference(self.generation, self.base),
            policy=None if self.policy is None else mean_difference(self.policy, self.base),
        )

    @property
    def target(self) -> np.ndarray:
        """The logprobs of the side that is off."""
        return self.policy if self.gap.side == "policy" and self.policy is not None else self.generation

    def attempts(self, cause: str, detail: str, found: np.ndarray, fitted: int) -> Iterator[TriedChange]:
        """Yield what a change leaves of the gap, for each side that may be off.

        Args:
            cause: Name of the cause.
            detail: The change, in words.
            found: Float64 `[sampled]`, logprobs with the change.
            fitted: Number of fitted values.
        """
        policy = self.base if self.policy is None else self.policy
        sides: dict[Side, np.ndarray] = {"generator": self.generation - policy, "policy": policy - self.generation}
        for side, off in sides.items():
            if self.gap.side in (side, "either"):
                own, left = bounded(np.abs(off)), bounded(np.abs(off - (found - self.base)))
                if cause in BY_ROW:
                    is_better = np.bincount(self.row_of, own - left) > 0
                    left = np.where(is_better[self.row_of], left, own)
                yield TriedChange(cause, detail, side, float(left.mean()), fitted)


def filtered_logprobs(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    filters_first: bool = False,
) -> Tensor:
    """Return float32 `[n]`, logprobs of tokens over those that a filter keeps, the token that is there included.

    Args:
        logits: `[n, vocab]`.
        ids: `[n]`.
        temperature: Divides the logits.
        top_k: Number of most likely tokens that are kept; 0 keeps all.
        top_p: Share of the mass that is kept.
        min_p: Share of the largest probability that a token needs.
        filters_first: Filter by the logits before the temperature divides them.
    """
    logprobs = (logits / temperature).log_softmax(-1)
    own = logprobs.gather(1, ids[:, None])
    if not top_k and top_p == 1 and not min_p:
        return own[:, 0]
    order = (logits if filters_first else logits / temperature).log_softmax(-1)
    falling = order.sort(descending=True).values
    probabilities = falling.exp()
    is_kept = probabilities >= min_p * probabilities[:, :1]
    if top_k:
        is_kept[:, top_k:] = False
    held = probabilities * is_kept
    is_kept &= held.cumsum(1) - held < top_p * held.sum(1, keepdim=True)
    lowest = falling.where(is_kept, torch.inf).amin(1, keepdim=True).minimum(order.gather(1, ids[:, None]))
    return (own - logprobs.where(order >= lowest, -torch.inf).logsumexp(1, keepdim=True))[:, 0]
