"""The tokens of an image see one another, packed, padded and split over ranks, whatever computes it."""

import numpy as np
import pytest
import torch

from rl_core.data.batch import TOKENS
from rl_core.torch.loss import Rows
from rl_core.torch.vision.columns import image_blocks
from rl_core.torch.vision.families import IMAGE_BLOCKS, WINDOW_BLOCKS
from rl_dtensor.model.kernels import Softmax, kernel_of
from rl_dtensor.model.layout import Alignment, Segments, _segments, lay_out

LENGTHS = (7, 2, 9)
IS_IMAGE = np.array([*[0, 1, 1, 1, 0, 0, 1], *[1, 0], *[0, 0, 1, 1, 1, 1, 0, 1, 1]], dtype=bool)
OFFSETS = np.cumsum([0, *LENGTHS])


def seen(window):
    """Which token sees which, by the definition: what comes before in its row, and its image."""
    blocks = image_blocks(IS_IMAGE, OFFSETS)
    row = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    distance = np.arange(len(row))[:, None] - np.arange(len(row))
    found = (row[:, None] == row) & ((distance >= 0) | ((blocks[:, None] == blocks) & (blocks >= 0)))
    return torch.from_numpy(found if window is None else found & (distance < window))


def dense(query, key, value, window):
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    return scores.masked_fill(~seen(window), -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)


def tensors():
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, len(IS_IMAGE)), (2, len(IS_IMAGE)), (2, len(IS_IMAGE)))
    return [torch.randn(1, *size, 4, dtype=torch.float64, generator=generator) for size in sizes]


def rows(name=IMAGE_BLOCKS):
    columns = {
        TOKENS: torch.zeros(len(IS_IMAGE), dtype=torch.int64),
        name: torch.from_numpy(image_blocks(IS_IMAGE, OFFSETS)),
    }
    return Rows(torch.from_numpy(OFFSETS), columns)


def test_runs_end_where_rows_do():
    assert image_blocks(IS_IMAGE, OFFSETS).tolist() == [
        *[-1, 0, 0, 0, -1, -1, 1],
        *[2, -1],
        *[-1, -1, 3, 3, 3, 3, -1, 4, 4],
    ]


@pytest.mark.parametrize("backend", ["auto", "sdpa", "eager", "flex"])
@pytest.mark.parametrize("window", [None, 2, 4])
def test_packed_rows(backend, window):
    layout = lay_out(rows(), Alignment(), is_packed=True)
    found = kernel_of(backend)(*tensors(), layout.segments, Softmax(0.3, window=window))
    torch.testing.assert_close(found, dense(*tensors(), window))


@pytest.mark.parametrize("backend", ["auto", "flex"])
def test_padded_rows(backend):
    layout = lay_out(rows(), Alignment(), is_packed=False)
    places = layout.places.view(layout.shape)
    side = [part[0][:, places.clamp(min=0)].transpose(0, 1) for part in tensors()]
    found = kernel_of(backend)(*side, layout.segments, Softmax(0.3, window=4))
    expected = dense(*tensors(), 4)[0]
    torch.testing.assert_close(found.transpose(0, 1)[:, places >= 0], expected[:, places[places >= 0]])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("backend", ["auto", "flex"])
def test_queries_that_are_part_of_an_image_see_the_rest_of_it(backend, window):
    query, key, value = tensors()
    blocks = image_blocks(IS_IMAGE, OFFSETS)[None]
    chunks = ((2, 5), (12, 14))  # both end within an image or begin in one
    bounds = list(zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist(), strict=True))
    segments = Segments(_segments(chunks, bounds, blocks), torch.device("cpu"), blocks)
    own = torch.cat([torch.arange(*chunk) for chunk in chunks])
    found = kernel_of(backend)(query[:, :, own], key, value, segments, Softmax(0.3, window=window))
    torch.testing.assert_close(found, dense(query, key, value, window)[:, :, own])


def test_rows_without_images_have_no_masks():
    plain = Rows(torch.from_numpy(OFFSETS), {TOKENS: torch.zeros(len(IS_IMAGE), dtype=torch.int64)})
    assert lay_out(plain, Alignment(), is_packed=True).segments.blocks is None


def test_images_that_are_seen_both_ways_only_in_windows():
    layout = lay_out(rows(WINDOW_BLOCKS), Alignment(), is_packed=True)
    whole = lay_out(rows(), Alignment(), is_packed=True)
    assert whole.segments_of(None) is whole.segments
    assert layout.segments_of(4) is layout.segments
    assert torch.equal(layout.segments.blocks, whole.segments.blocks)
    query, key, value = tensors()
    row = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    before = torch.from_numpy((row[:, None] == row) & (np.arange(len(row))[:, None] >= np.arange(len(row))))
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    expected = scores.masked_fill(~before, -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)
    found = kernel_of("auto")(query, key, value, layout.segments_of(None), Softmax(0.3))
    torch.testing.assert_close(found, expected)
