"""Buffers of tensor-parallel products, on a pretended Transformer Engine."""

import sys
from enum import Enum
from types import ModuleType

import pytest
import torch
from layouts import write_family
from transformers import AutoConfig

from rl_megatron.config import MegatronConfig
from rl_megatron.model.architecture import transformer_config
from rl_megatron.parallel.mesh import close_buffers, open_buffers

pytestmark = pytest.mark.usefixtures("engine_kernels")

SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


class Modes(Enum):
    NONE = "none"
    FP8 = "fp8"


class Engine(ModuleType):
    """Functions with the signatures of the pinned version."""

    UserBufferQuantizationMode = Modes

    def __init__(self):
        super().__init__("transformer_engine.pytorch")
        self.opened = None

    def initialize_ub(
        self,
        shape,
        tp_size,
        use_fp8=False,
        quantization_modes=None,
        dtype=torch.bfloat16,
        ub_cfgs=None,
        bootstrap_backend=None,
        with_cublasmp=False,
    ):
        if self.opened is not None:
            raise RuntimeError("UB communicators are already initialized.")
        self.opened = (shape, tp_size, quantization_modes, dtype, bootstrap_backend)
        self.methods = ub_cfgs

    def destroy_ub(self):
        self.opened = None


@pytest.fixture
def engine(monkeypatch):
    pretended = Engine()
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, pretended.__name__, pretended)
    yield pretended
    close_buffers()


def config_of(folder, family="qwen3", kwargs=None, **settings):
    hf = AutoConfig.from_pretrained(write_family(folder, family))
    backend = MegatronConfig(megatron_kwargs={"tp_comm_overlap": True, **(kwargs or {})}, **SPLIT, **settings)
    return transformer_config(hf, backend, dtype=torch.bfloat16, is_cuda=True, has_te=True)


def test_buffers_have_the_shape_of_a_rank_and_can_be_opened_again(engine, tmp_path):
    config = config_of(tmp_path, kwargs={"tp_comm_bootstrap_backend": "nccl"}, context_parallel_size=2)
    for _ in range(2):
        open_buffers(config, [4096])
        assert engine.opened == ([2048, 32], 2, [Modes.NONE], torch.bfloat16, "nccl")
        assert engine.methods is None
        close_buffers()
        assert engine.opened is None
    close_buffers()


@pytest.mark.parametrize(("off", "scattering"), [({}, {"qkv_dgrad", "fc1_dgrad"}), ({"fc1"}, {"qkv_dgrad"})])
def test_products_whose_gradient_is_scattered_have_buffers_that_scatter(engine, tmp_path, off, scattering):
    kwargs = {"tp_comm_overlap_rs_dgrad": True, **{f"tp_comm_overlap_disable_{name}": True for name in off}}
    open_buffers(config_of(tmp_path, kwargs=kwargs), [64])
    assert engine.methods == {name: {"method": "ring_exchange"} for name in scattering}
    assert engine.opened[-1] == "gloo"


def test_products_in_8_bits_have_buffers_of_their_own(engine, tmp_path):
    both = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    open_buffers(config_of(tmp_path, kwargs=both, fp8_cfg={"enabled": True}), [64])
    assert engine.opened[2] == [Modes.FP8, Modes.NONE]


@pytest.mark.parametrize("lengths", [[], [64, 128]])
def test_sequences_of_several_lengths_are_refused(engine, tmp_path, lengths):
    with pytest.raises(ValueError, match="the same train_mb_tokens and logprob_mb_tokens"):
        open_buffers(config_of(tmp_path), lengths)
    assert engine.opened is None


def test_latent_attention_is_refused(engine, tmp_path):
    with pytest.raises(ValueError, match="latent attention have no buffers"):
        open_buffers(config_of(tmp_path, "deepseek_v3"), [64])


def test_layers_are_told_of_the_overlap(tmp_path):
    fields = {"tp_comm_overlap_rs_dgrad": True, "tp_comm_bulk_dgrad": False, "tp_comm_overlap_disable_qkv": True}
    config = config_of(tmp_path, kwargs=fields)
    assert config.tp_comm_overlap
    assert {name: getattr(config, name) for name in fields} == fields
