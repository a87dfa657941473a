"""Packed rows attend within themselves alone."""

import pytest
import torch
from transformers import AutoConfig

from rl_core.batch import TOKENS
from rl_core.torch.loss import Rows
from rl_dtensor.attention import ROWS, attention_for, row_attention
from rl_dtensor.layout import Alignment, lay_out

LENGTHS = (5, 1, 8, 3)


def dense(query, key, value, window):
    """One softmax over all tokens with a block-diagonal mask."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    position = torch.arange(len(row))
    distance = position[:, None] - position
    seen = (row[:, None] == row) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_it_is_dense_attention_under_a_block_diagonal_mask(window):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, 17, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]
    rows = Rows(torch.tensor([0, *LENGTHS]).cumsum(0), {TOKENS: torch.zeros(sum(LENGTHS), dtype=torch.int64)})
    layout = lay_out(rows, Alignment(), is_packed=True)
    gradients = []
    outputs = []
    for function in (
        lambda q, k, v: row_attention(
            torch.nn.Module(), q, k, v, None, layout=layout, scaling=0.3, sliding_window=window
        )[0],
        lambda q, k, v: dense(q, k, v, window),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output = function(*leaves)
        output.sin().sum().backward()
        outputs.append(output)
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)


def test_layers_that_carry_state_across_rows_are_neither_packed_nor_split():
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2)
    assert attention_for(config, packed=True, split=False, supports_sdpa=True) == ROWS
    assert attention_for(config, packed=False, split=True, supports_sdpa=True) == ROWS
    assert attention_for(config, packed=False, split=False, supports_sdpa=False) == "eager"
    with pytest.raises(ValueError, match=r"cannot be split.*context_parallel_size=1"):
        attention_for(config, packed=False, split=True, supports_sdpa=False)
    config.layer_types = ["linear_attention", "full_attention"]
    assert attention_for(config, packed=False, split=False, supports_sdpa=True) == "sdpa"
    with pytest.raises(ValueError, match="layers of type linear_attention"):
        attention_for(config, packed=True, split=False, supports_sdpa=True)
