"""Token mixers that carry a state see each row by itself."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.data.batch import TOKENS
from rl_core.selfcheck.torch.selfcheck import case_on
from rl_core.testing.exhaustive import exhaustive
from rl_core.torch.loss import Rows
from rl_dtensor.model.attention import RowsUnknown
from rl_dtensor.model.layers.recurrent import mix_rows, recurrent_mixers, run_rows_alone
from rl_dtensor.model.layout import Alignment, lay_out
from rl_dtensor.selfcheck import CHECK, MESHES, SMALL, shrink, write_tiny

LENGTHS = (5, 1, 17, 2, 16, 33, 3)


def layout_of(lengths, *, is_packed=True, multiple=1):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    rows = Rows(ends, {TOKENS: torch.arange(int(ends[-1]))})
    return lay_out(rows, Alignment(multiple), is_packed=is_packed)


@pytest.fixture
def gru():
    torch.manual_seed(0)
    return nn.GRU(4, 4, batch_first=True).double()


def test_rows_end_to_end_are_mixed_as_rows_alone_and_so_are_gradients(gru):
    layout = layout_of(LENGTHS, multiple=8)
    hidden = torch.randn(1, layout.shape[1], 4, dtype=torch.float64, requires_grad=True)
    mixed = mix_rows(lambda rows: gru(rows)[0], hidden, layout)
    seen = torch.randn_like(mixed)
    found = torch.autograd.grad(mixed, [hidden, *gru.parameters()], seen)
    alone = torch.cat([gru(hidden[:, start:end])[0] for start, end in layout.bounds], 1)
    assert torch.allclose(mixed, alone, atol=1e-13)
    for ours, expected in zip(found, torch.autograd.grad(alone, [hidden, *gru.parameters()], seen), strict=True):
        assert torch.allclose(ours, expected, atol=1e-12)


def test_padded_rows_are_mixed_at_once():
    layout = layout_of((3, 2), is_packed=False)
    hidden = torch.randn(2, 3, 4)
    assert mix_rows(lambda rows: rows.cumsum(1), hidden, layout).equal(hidden.cumsum(1))


def tiny(family, **fields):
    config = shrink(AutoConfig.for_model(family, **fields), SMALL)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    return hf, list(hf.model.layers)


CONVOLUTIONS = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
DELTA_RULE = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {
    "mamba_num_heads": 16,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "chunk_size": 8,  # rows of several chunks
    "moe_shared_expert_intermediate_size": 24,
}


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("qwen3_next", {}, ["linear_attn"]),
        ("nemotron_h", {}, ["mixer"]),  # a mixer of its other layers is no such one
        ("minimax", {}, ["self_attn"]),  # known by what the config says of its layer
        ("lfm2", CONVOLUTIONS, ["conv"]),
        ("falcon_h1", {}, ["mamba", "mamba"]),  # beside attention
        ("llama", {}, []),
    ],
)
def test_mixers_are_found(family, fields, expected):
    hf, layers = tiny(family, **fields)
    names = {id(module): name for name, module in hf.named_modules()}
    assert [names[id(mixer)].rpartition(".")[2] for mixer in recurrent_mixers(hf, layers)] == expected


def test_a_layer_without_a_mixer_of_its_kind_is_refused():
    hf, layers = tiny("llama", num_hidden_layers=2)
    hf.config.layer_types = ["linear_attention", "full_attention"]
    layers[0].self_attn = nn.Linear(4, 4)
    with pytest.raises(RowsUnknown, match=r"no module of LlamaDecoderLayer .* hidden states"):
        recurrent_mixers(hf, layers)


def test_a_mixer_that_is_not_told_of_rows_says_so():
    hf, layers = tiny("qwen3_next")
    run_rows_alone(hf, layers)
    with pytest.raises(RowsUnknown, match="GatedDeltaNet is called without the layout of rows"):
        layers[0].linear_attn(torch.zeros(1, 2, 32, device="meta"))


@pytest.mark.parametrize(
    ("family", "fields", "ways"),
    [
        (
            "qwen3_next",  # a gated delta rule; experts beside a shared one
            DELTA_RULE,
            [("cp2", True, True)],
        ),
        pytest.param(
            "qwen3_next", DELTA_RULE, [("tp2+sp", True, True), ("ep2 x fsdp2", True, False)], marks=exhaustive
        ),
        ("nemotron_h", MAMBA, [("pp2", True, True)]),
        pytest.param("nemotron_h", MAMBA, [("tp2+sp", True, False)], marks=exhaustive),
        pytest.param("minimax", {}, [("cp2 x tp2", True, False)], marks=exhaustive),  # lightning attention
        # short convolutions
        pytest.param("lfm2", CONVOLUTIONS, [("cp2 ulysses", True, False), ("tp2", True, False)], marks=exhaustive),
    ],
)
def test_hybrid_models_train_as_one_process_of_transformers_does(ranks, tmp_path, family, fields, ways):
    folder = write_tiny(AutoConfig.for_model(family, **fields), tmp_path / "model")
    cases = [case_on(MESHES, mesh, is_packed=packed, has_adapters=adapters) for mesh, packed, adapters in ways]
    found = list(CHECK.check_family(ranks, folder, cases))
    assert [case.verdict for case in found] == ["exact"] * len(ways), found
