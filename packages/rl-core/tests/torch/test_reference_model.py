from dataclasses import replace

import numpy as np
import pytest

from rl_core.rollouts.generation import SamplingParams
from rl_core.testing.torch.reference_model import ReferenceModel, processed_logprobs, write_reference_model

PROMPT = np.array([5, 6, 7], np.int32)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return ReferenceModel(write_reference_model(tmp_path_factory.mktemp("model"), seed=0))


def test_either_side_of_the_edge_of_top_p_is_right_and_nothing_else(reference):
    likely = np.sort(np.exp(processed_logprobs(reference.logits(PROMPT)[-1], SamplingParams(1))))[::-1]
    edge = SamplingParams(1, top_p=float(likely[:10].sum()))
    completion = np.array([int(reference.logits(PROMPT)[-1].argmax())], np.int32)
    sides = [
        reference.completion_logprobs(PROMPT, completion, replace(edge, top_p=edge.top_p * change))
        for change in (1 - 1e-3, 1 + 1e-3)
    ]
    assert abs(sides[0] - sides[1]) > 1e-3
    for side in sides:
        near = reference.nearest_logprobs(side + 1e-5, PROMPT, completion, edge)
        np.testing.assert_allclose(near, side, atol=1e-9)
        apart = replace(edge, top_p=edge.top_p + 0.4 * float(likely[10]))
        expected = reference.completion_logprobs(PROMPT, completion, apart)
        np.testing.assert_array_equal(reference.nearest_logprobs(side, PROMPT, completion, apart), expected)
