"""Runs of elements as rectangles."""

from math import prod

import numpy as np
import pytest

from rl_megatron.training.pieces import rectangles

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rectangles_of_a_run_are_its_elements_in_their_order(shape):
    whole = np.arange(prod(shape)).reshape(shape)
    for start in range(whole.size + 1):
        for stop in range(start, whole.size + 1):
            found = list(rectangles(start, stop, shape))
            parts = [
                whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] for offsets, sizes in found
            ]
            assert [part.shape for part in parts] == [sizes for _, sizes in found]
            assert np.concatenate([[], *(part.ravel() for part in parts)]).tolist() == list(range(start, stop))
            assert len(found) <= max(1, 2 * len(shape) - 1)
