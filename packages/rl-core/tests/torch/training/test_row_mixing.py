"""A token mixer sees each row by itself."""

import torch
from torch import nn

from rl_core.torch.training.row_mixing import mix_each_row

LENGTHS = (5, 1, 17, 2, 16, 33, 3)


def test_rows_end_to_end_are_mixed_as_rows_alone_and_so_are_gradients():
    torch.manual_seed(0)
    gru = nn.GRU(4, 3, batch_first=True).double()
    tokens = torch.randn(sum(LENGTHS), 4, dtype=torch.float64, requires_grad=True)
    mixed = mix_each_row(lambda rows: gru(rows)[0], tokens, LENGTHS)
    seen = torch.randn_like(mixed)
    found = torch.autograd.grad(mixed, [tokens, *gru.parameters()], seen)
    alone = torch.cat([gru(row)[0] for row in tokens.split(LENGTHS)])
    assert torch.allclose(mixed, alone, atol=1e-13)
    for ours, expected in zip(found, torch.autograd.grad(alone, [tokens, *gru.parameters()], seen), strict=True):
        assert torch.allclose(ours, expected, atol=1e-12)


def test_less_than_half_of_what_is_mixed_is_padding():
    sizes = []

    def mix(rows):
        sizes.append(rows.shape[:2].numel())
        return rows

    lengths = (*LENGTHS, 1000, *[7] * 50)
    mix_each_row(mix, torch.zeros(sum(lengths), 4), lengths)
    assert sum(sizes) < 2 * sum(lengths)
