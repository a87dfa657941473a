"""Passes of the generator that compute the bits of the trainer's passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_core.data.batch import TOKENS
from rl_core.errors import ConfigError
from rl_core.torch.heads.head_pass import HeadPass
from rl_core.torch.heads.logprobs import logit_transform
from rl_core.torch.kernels.exact import exact_rows
from rl_core.torch.loss import Rows
from rl_dtensor.generation.cache import Kind, RowCache, has_states
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.exact import attend_in_blocks, check_exact, inexact_part
from rl_dtensor.model.kernels import Softmax
from rl_dtensor.model.layout import RowLayout, Segments
from rl_dtensor.parallel.body import body_of

_PROBE = (9, 3, 5)
"""Tokens of the row that is probed, tokens of its prompt, and tokens of a prompt that it is padded to."""


class ExactPass:
    """A pass over new tokens of rows that computes attention, head and logits as a trained model does.

    Args:
        hf: Model in its precision, changed to the attention of trained models.
        kinds: Kinds of the layers of its cache; None if it is decoded without one.
        name: Name of the model, for messages.

    Raises:
        ConfigError: If its results depend on the batch.
    """

    def __init__(self, hf: PreTrainedModel, kinds: Sequence[Kind] | None, name: str) -> None:
        problem = "it is decoded without a cache" if kinds is None or has_states(kinds) else ""
        if not problem:
            hf.config.get_text_config()._attn_implementation = ROWS
            problem = inexact_part(hf)
        if kinds is None or problem:
            raise ConfigError(f"policy.generation.exact: {name} cannot be sampled exactly: {problem}; set it to false")
        self._hf, self._body, self._kinds = hf, body_of(hf), kinds
        self._transform = logit_transform(hf.config)
        try:
            check_exact(hf, hf.dtype)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        with exact_rows(), torch.inference_mode():
            self._check(name)

    def __call__(
        self, tokens: Tensor, lengths: Sequence[int], cache: RowCache, positions: Tensor, *, num_last: int = 1
    ) -> Tensor:
        """Compute float32 `[rows, num_last, vocab]`, logits after the last columns; inside `exact_rows`.

        Args:
            tokens: Int64 `[rows, new]`.
            lengths: Number of each row's tokens, these included.
            cache: Cache of the tokens before; these are added to it.
            positions: Int64 `[rows, new]`, places in the rows; 0 for padding on the left.
            num_last: Number of columns whose logits are computed.
        """
        columns = cache.get_seq_length() + tokens.shape[1]
        first = torch.tensor([columns - length for length in lengths], device=tokens.device)
        from_first = None
        if bool(first.any()):
            from_first = (first[:, None] + torch.arange(columns, device=tokens.device)).clamp(max=columns - 1)

        def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
            if from_first is not None:  # Keys are flush with the last column, and blocks begin with the row.
                places = from_first[:, None, :, None]
                key, value = (part.gather(2, places.expand(*part.shape)) for part in (key, value))
            return attend_in_blocks(query, key, value, positions, softmax)

        new = tokens.shape[1]
        row = Rows(torch.tensor([0, new]), {TOKENS: tokens[0]})
        layout = RowLayout(row, tokens, positions, positions[0], None, bounds=((0, new),), length=new, context=None)
        inputs = {"input_ids": tokens, "position_ids": positions, "past_key_values": cache}
        hidden = self._body(**inputs, use_cache=True, layout=layout, attend=attend).last_hidden_state[:, -num_last:]
        head = self._hf.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        flat = hidden.flatten(0, 1).to(head.weight.dtype)
        logits = HeadPass(self._transform, 1.0, len(flat)).logits(flat, head.weight, head.bias)
        return logits.view(len(tokens), -1, logits.shape[-1])

    def _check(self, name: str) -> None:
        """Refuse a model whose code computes a token of a batch in another way than in one pass over its row."""
        length, own, other = _PROBE
        device, embedding = self._hf.device, self._hf.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        row = torch.arange(1, length + 1, device=device) % embedding.num_embeddings
        places = torch.arange(length, device=device)[None]
        whole = self(row[None], [length], RowCache(self._kinds), places, num_last=length)
        cache = RowCache(self._kinds)
        prompts = torch.stack([torch.cat([row.new_zeros(other - own), row[:own]]), row.flip(0)[:other]])
        places = torch.arange(other, device=device).expand(2, -1).clone()
        places[0] = (places[0] - (other - own)).clamp(min=0)
        found = [self(prompts, [own, other], cache, places)[0, 0]]
        for count in range(own, length):
            lengths = [count + 1, count + 1 + other - own]
            places = torch.tensor(lengths, device=device)[:, None] - 1
            found.append(self(row[count].expand(2, 1), lengths, cache, places)[0, 0])
        if not torch.equal(torch.stack(found), whole[0, own - 1 :]):
            raise ConfigError(
                f"policy.generation.exact: {name} cannot be sampled exactly: its code in transformers has operations "
                "whose results depend on the batch; set it to false"
            )
