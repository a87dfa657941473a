"""Parts of a parameter, put together, are the tensors it was made of."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_megatron.conversion.splits import (
    Alternating,
    Blocks,
    Chunks,
    QueryKeyValue,
    Split,
    Vocabulary,
    Whole,
    gate_up,
    held_boxes,
    padded_vocab,
)

HIDDEN = 6


def numbered(*shape):
    """A tensor whose every element differs, at another start for every call's shape."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape) + 1


def reader(tensors, counts):
    """Reads slices, and counts the elements read."""

    def read(index, slices):
        part = tensors[index][slices] if slices else tensors[index]
        counts.append(part.numel())
        return part

    return read


def check(split: Split, tensors, size):
    parts, counts = [], []
    for rank in range(size):
        parts.append(split.part(reader(tensors, counts), rank, size))
    for joined, tensor in zip(split.join(parts), tensors, strict=True):
        assert torch.equal(joined, tensor)
    assert len({part.shape for part in parts}) == 1
    times = [torch.zeros_like(tensor) for tensor in tensors]
    for rank, part in enumerate(parts):
        for rows, index, box in held_boxes(split, [tensor.shape for tensor in tensors], rank, size):
            place = tuple(slice(*span) for span in box)
            assert torch.equal(split.in_file_order(part)[rows], tensors[index][place])
            times[index][place] += 1
    assert all((count == (size if split.dim is None else 1)).all() for count in times)
    return parts, sum(counts)


@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from([0, 1]))
def test_chunks(size, width, dim):
    shape = [HIDDEN, HIDDEN]
    shape[dim] = size * width
    tensor = numbered(*shape)
    _, num_read = check(Chunks(size * width, dim), [tensor], size)
    assert num_read == tensor.numel()


@given(st.integers(1, 4), st.integers(1, 30))
def test_a_vocabulary_is_padded_at_its_end(size, num_rows):
    parts, num_read = check(Vocabulary(num_rows), [numbered(num_rows, HIDDEN)], size)
    assert num_read == num_rows * HIDDEN
    whole = torch.cat(parts)
    assert len(whole) == padded_vocab(num_rows, size)
    assert not whole[num_rows:].any()


@given(st.integers(1, 4), st.integers(1, 5))
def test_gate_and_up_lie_below_each_other_on_each_rank(size, width):
    gate, up = numbered(size * width, HIDDEN), -numbered(size * width, HIDDEN)
    parts, num_read = check(gate_up(size * width), [gate, up], size)
    assert num_read == gate.numel() * 2
    assert all((part[:width] > 0).all() and (part[width:] < 0).all() for part in parts)


@given(st.integers(1, 4), st.integers(1, 5))
def test_rows_of_gate_and_up_that_alternate_lie_below_each_other_on_each_rank(size, width):
    tensor = numbered(2 * size * width, HIDDEN)
    parts, num_read = check(Alternating(size * width), [tensor], size)
    assert num_read == tensor.numel()
    assert torch.equal(torch.cat([part[:width] for part in parts]), tensor[::2])
    assert torch.equal(torch.cat([part[width:] for part in parts]), tensor[1::2])


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_blocks_of_several_tensors_lie_below_each_other_on_each_rank(size, first, second):
    tensors = [numbered(size * (first + 2 * second), HIDDEN), -numbered(size * first, HIDDEN)]
    split = Blocks(((size * first, size * 2 * second), (size * first,)))
    parts, num_read = check(split, tensors, size)
    assert num_read == sum(tensor.numel() for tensor in tensors)
    assert torch.equal(
        parts[0], torch.cat([tensors[0][:first], tensors[0][size * first :][: 2 * second], tensors[1][:first]])
    )
    assert [len(piece) for piece in split.slices(parts[0])] == [first, 2 * second, first]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_gates_of_a_group_follow_its_queries(size, ratio, dim):
    query, key = numbered(size * ratio * 2 * dim, HIDDEN), 1000 + numbered(size * dim, HIDDEN)
    parts, _ = check(QueryKeyValue(size * ratio, size, dim, has_gates=True), [query, key, -key], size)
    heads = query[: ratio * 2 * dim].split(dim)
    assert torch.equal(parts[0][: ratio * 2 * dim], torch.cat([*heads[::2], *heads[1::2]]))


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_queries_keys_and_values_lie_by_group(size, groups, ratio, dim, is_bias):
    num_groups = size * groups
    inner = () if is_bias else (HIDDEN,)
    query = numbered(num_groups * ratio * dim, *inner)
    key, value = 1000 + numbered(num_groups * dim, *inner), 2000 + numbered(num_groups * dim, *inner)
    split = QueryKeyValue(num_groups * ratio, num_groups, dim)
    parts, num_read = check(split, [query, key, value], size)
    assert num_read == query.numel() + key.numel() + value.numel()
    first = parts[0][: (ratio + 2) * dim]
    assert torch.equal(first, torch.cat([query[: ratio * dim], key[:dim], value[:dim]]))


@given(st.integers(1, 2), st.integers(2, 4), st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_ranks_share_the_rows_of_a_group(groups, ranks_of_group, ratio, width, has_gates):
    dim = ranks_of_group * width
    query = numbered(groups * ratio * dim * (2 if has_gates else 1), HIDDEN)
    key = 1000 + numbered(groups * dim, HIDDEN)
    split = QueryKeyValue(groups * ratio, groups, dim, has_gates)
    size = groups * ranks_of_group
    assert split.divides(size)
    assert not split.is_even(size)
    parts, num_read = check(split, [query, key, -key], size)
    assert torch.equal(torch.cat(parts), split.part(reader([query, key, -key], []), 0, 1))
    if not has_gates:
        assert num_read == query.numel() + 2 * key.numel()


def test_what_every_rank_holds_is_read_whole():
    parts, _ = check(Whole(), [numbered(HIDDEN)], 3)
    assert all(torch.equal(part, parts[0]) for part in parts)


@pytest.mark.parametrize("split", [Chunks(6), gate_up(6), Blocks(((12, 6), (18,))), QueryKeyValue(12, 6, 2)])
def test_sizes_that_do_not_divide_are_known(split):
    assert [size for size in range(1, 7) if split.divides(size)] == [1, 2, 3, 6]
