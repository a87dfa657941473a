"""The worker keeps the contract of model workers."""

import pytest

from rl_core.testing.exhaustive import partly_exhaustive, with_exhaustive
from rl_core.testing.model_worker import LAYOUTS, ModelWorkerSuite

LAID_OUT = partly_exhaustive(LAYOUTS, always=["packed-16", "padded-3", "padded-alike"])
"""Rows packed, padded, and padded by length; the others differ in the sizes of microbatches, which rl-core cuts."""


# `model/test_lora` has a reference that has moved and is saved
@with_exhaustive("test_a_checkpoint_holds_a_reference_that_has_moved")
class TestMegatronWorker(ModelWorkerSuite):
    factory = "megatron_factories:build"

    @pytest.fixture(scope="session")
    def pool(self, ranks):
        return ranks

    @pytest.mark.parametrize("layout", LAID_OUT)
    def test_every_read_of_a_policy_is_that_of_transformers(self, layout):
        super().test_every_read_of_a_policy_is_that_of_transformers(layout)

    @pytest.mark.parametrize("layout", LAID_OUT)
    def test_losses_gradients_and_weights_are_those_of_one_process(self, tmp_path, layout):
        super().test_losses_gradients_and_weights_are_those_of_one_process(tmp_path, layout)
