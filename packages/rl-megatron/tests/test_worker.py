"""The worker keeps the contract of model workers."""

import os

import pytest

from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import ModelConfig
from rl_core.testing.exhaustive import partly_exhaustive, with_exhaustive
from rl_core.testing.model_worker import LAYOUTS, ModelWorkerSuite
from rl_megatron import worker
from rl_megatron.config import MegatronConfig

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


@pytest.mark.parametrize(
    ("device", "size", "set_before", "expected"),
    [("cuda", 2, None, "1"), ("cuda", 2, "8", "8"), ("cuda", 1, None, None), ("rehearsal", 2, None, None)],
)
def test_gpus_of_tensor_parallel_ranks_start_kernels_in_order(monkeypatch, device, size, set_before, expected):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, set_before or "")
    if set_before is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(worker.cpu_shim, "install", lambda: None)

    def join(*_):
        raise InterruptedError(os.environ.get(name))

    monkeypatch.setattr(worker.MegatronMesh, "join", join)
    backend = MegatronConfig(tensor_model_parallel_size=size)
    with pytest.raises(InterruptedError) as stopped:
        worker.MegatronWorker(
            ModelConfig(model_name="model"), backend, ModelSpec(), Rendezvous(0, 1, 0, "127.0.0.1", 1, device)
        )
    assert stopped.value.args == (expected,)
