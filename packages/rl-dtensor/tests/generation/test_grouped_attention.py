from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rl_dtensor.generation.loading import grouped_attention

ROWS, HEADS, COLUMNS, SIZE = 3, 6, 11, 8


def _layer(groups: int) -> Any:
    layer = nn.Module()
    layer.num_key_value_groups = groups  # type: ignore[assignment]
    return layer


def _inputs(shared: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    room = torch.randn(2, ROWS, shared, COLUMNS + 5, SIZE, dtype=torch.float64)
    key, value = room[:, :, :, :COLUMNS].unbind(0)  # not contiguous, as those of a cache with room
    return torch.randn(ROWS, HEADS, queries, SIZE, dtype=torch.float64), key, value


def _mask(queries: int, heads: int = 1) -> Tensor:
    starts = torch.arange(ROWS)[:, None, None, None]
    return (torch.arange(COLUMNS) >= starts).expand(ROWS, heads, queries, COLUMNS)


@pytest.mark.parametrize("shared", [1, 2, 3, 6])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("kind", ["none", "boolean", "scores", "by head"])
def test_attention_in_groups_equals_that_of_transformers(shared: int, queries: int, kind: str) -> None:
    query, key, value = _inputs(shared, queries)
    masks = {
        "none": None,
        "boolean": _mask(queries),
        "scores": torch.zeros(_mask(queries).shape, dtype=torch.float64).masked_fill(~_mask(queries), -torch.inf),
        "by head": _mask(queries, HEADS),
    }
    layer, mask = _layer(HEADS // shared), masks[kind]
    found, _ = grouped_attention(layer, query, key, value, mask, scaling=0.3)
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert found.is_contiguous()


def test_keys_and_values_of_shared_heads_are_not_copied() -> None:
    query, key, value = _inputs(2, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        grouped_attention(_layer(3), query, key, value, _mask(1))
    copied = [event.input_shapes for event in profile.events() if event.name == "aten::clone"]
    assert not [shapes for shapes in copied if COLUMNS in shapes[0]], copied
