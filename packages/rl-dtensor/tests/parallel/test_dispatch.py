"""Tokens that are sent to experts of other ranks are computed as if all experts were here."""

import dispatch_cases
import pytest
import torch

from rl_core.model_config import ModelConfig
from rl_dtensor.preflight import check

ROUTINGS = {
    # experts of each token of four ranks, which have two each
    "even": [[[0, 2, 7], [5, 3, 1]], [[4, 6, 0], [2, 3, 7]], [[7, 6, 5], [1, 0, 4]], [[3, 5, 2], [6, 1, 4]]],
    "uneven, one rank without tokens, two whose experts get none": [
        [[0, 1, 2], [1, 0, 3], [3, 2, 1], [0, 2, 3], [2, 1, 0]],
        [],
        [[1, 3, 0]],
        [[2, 3, 1], [0, 1, 3]],
    ],
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("kind", "num_chunks"),
    [("flat", 1), ("flat", 2), ("flat", 3), ("two levels", 1), ("two levels", 2), ("deep_ep", 1)],
)
def test_outputs_and_gradients_are_those_of_one_process(ranks, kind, num_chunks, routing):
    chosen = ROUTINGS[routing]
    found = ranks.run(dispatch_cases.passes, [(kind, each, num_chunks) for each in chosen])
    for own, wanted in zip(found, dispatch_cases.expected(chosen), strict=True):
        assert own.keys() == wanted.keys()
        for name, value in wanted.items():
            # DeepEP takes weights in float32
            atol = 1e-6 if kind == "deep_ep" else 1e-12
            torch.testing.assert_close(own[name], value, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_recomputation_asks_for_no_sizes_again(ranks, num_chunks):
    for forward, backward in ranks.run(dispatch_cases.exchanges_of_recomputation, [(num_chunks,)] * 2):
        # choices and tokens out, results back; the same again, and their gradients
        assert forward == {"numbers": 1, "tokens": 3 * num_chunks}
        assert backward == {"tokens": 6 * num_chunks}


def test_a_dispatcher_that_is_not_installed_is_refused_with_what_to_do():
    section = ModelConfig(model_name="any").model_dump()
    (problem,) = check({**section, "dtensor_cfg": {"expert_parallel_size": 2, "expert_dispatcher": "deep_ep"}})
    assert "dtensor_cfg.expert_dispatcher=deep_ep needs DeepEP" in problem
    assert "expert_dispatcher=all_to_all" in problem
