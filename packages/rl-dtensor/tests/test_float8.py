"""Training in float8, emulated: the error is that of the rounding, on every mesh."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig

from rl_core.errors import WorkerError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig, SequencePackingConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.selfcheck import write_random
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.testing.model_worker import make_batch
from rl_core.torch.kernels.float8 import rounded_rows
from rl_dtensor.config import Float8Config
from rl_dtensor.model.layers import low_precision
from rl_dtensor.model.layers.low_precision import convert, use_float8

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "tp2+sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
}
SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.05})
ADAMW = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 3e-3, "weight_decay": 0.0})
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROUNDING = 2.0**-4 / 3**0.5
"""Root mean square of errors up to half a step of 3 bits of mantissa, at the lower end of a binade."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 101, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen2", **sizes, **heads, initializer_range=0.1)
    return write_random(config, tmp_path_factory.mktemp("model"))


def build(ranks: Any, folder: Path, mesh: str = "fsdp2", *, lora: bool = False, **settings: Any) -> PooledModel:
    num_ranks, sizes = MESHES[mesh]
    config = ModelConfig(
        model_name=str(folder),
        precision="bfloat16",
        sequence_packing=SequencePackingConfig(train_mb_tokens=32, logprob_mb_tokens=32),
        optimizer=settings.pop("optimizer", SGD),
        max_grad_norm=None,
        lora_cfg=LoraConfig(enabled=lora, dim=16),
    )
    return PooledModel(ranks, "dtensor_factories:build", config, ModelSpec(), num_ranks, **sizes, **settings)


def float8(recipe: str = "rowwise", **settings: Any) -> dict[str, Any]:
    return {"float8": {"enabled": True, "emulate": True, "recipe": recipe, **settings}}


def step_of(model: PooledModel, folder: Path, target: Path) -> tuple[float, dict[str, Tensor]]:
    """Loss of a step, and how it moved every weight."""
    loss = model.train_step(make_batch(), TokenLoss())["loss"]
    model.export(str(target))
    before, after = load_file(folder / "model.safetensors"), load_file(target / "model.safetensors")
    return loss, {name: after[name].double() - before[name].double() for name in before}


def angle(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Cosine between two steps."""
    flat = [torch.cat([each.flatten() for each in step.values()]) for step in (found, expected)]
    return float(nn.functional.cosine_similarity(*flat, dim=0))


class OneLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({"q_proj": nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)})
        self.config = AutoConfig.for_model("qwen2")


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_and_gradients_are_off_by_the_rounding_of_their_operands(recipe):
    torch.manual_seed(0)
    model: Any = OneLinear()
    use_float8(model, [model.layer], Float8Config(enabled=True, emulate=True, recipe=recipe), set(), num_parts=1)
    layer = model.layer["q_proj"]
    assert type(layer) is not nn.Linear
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    by_out = torch.randn(64, 128, dtype=torch.bfloat16)
    out = layer(x)
    out.backward(by_out)
    exact_x, exact_w, exact_g = (each.detach().double() for each in (x, layer.weight, by_out))
    wide_gradient = 2 if recipe == "tensorwise" else 1  # 2 bits of mantissa instead of 3
    bounds = {
        "out": (out, exact_x @ exact_w.T, 2**0.5),
        "by_x": (x.grad, exact_g @ exact_w, (1 + wide_gradient**2) ** 0.5),
        "by_w": (layer.weight.grad, exact_g.T @ exact_x, (1 + wide_gradient**2) ** 0.5),
    }
    for name, (found, expected, factor) in bounds.items():
        error = float((found.double() - expected).norm() / expected.norm())
        is_exact = name == "by_w" and recipe == "rowwise_with_gw_hp"
        assert error < (0.005 if is_exact else factor * ROUNDING), name
        assert is_exact or error > 0.3 * factor * ROUNDING, name


STEPS = [
    ("tensorwise", "fsdp2", {"recompute": "selective"}),
    ("rowwise", "tp2+sp", {"recompute": "full"}),
    ("rowwise_with_gw_hp", "cp2", {}),
    ("rowwise", "pp2", {"compile": True}),
]


@pytest.mark.parametrize(("recipe", "mesh", "settings"), partly_exhaustive(STEPS, always=STEPS[1:2]))
def test_a_step_is_that_of_bfloat16_but_for_the_rounding(ranks, folder, tmp_path, recipe, mesh, settings):
    if "compile" in settings:
        ranks.run("dtensor_factories:compile_by", [("aot_eager_decomp_partition",)] * 2)
    with build(ranks, folder, mesh) as model:
        plain_loss, plain = step_of(model, folder, tmp_path / "plain")
    with build(ranks, folder, mesh, **settings, **float8(recipe)) as model:
        loss, step = step_of(model, folder, tmp_path / "float8")
    if "compile" in settings:
        ranks.run("dtensor_factories:count_compiled", [()] * 2)
    assert loss == pytest.approx(plain_loss, rel=0.02)
    assert loss != plain_loss
    assert 0.97 < angle(step, plain) < 0.99999
    assert all(bool(each.any()) for each in step.values())


@exhaustive
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_model_learns_as_much_as_in_bfloat16(ranks, folder, recipe):
    nll = TokenLoss(entropy_weight=0, topk_weight=0, candidates_weight=0, sequence_weight=0)
    rows = make_batch((12,) * 8, seed=5)
    ones = np.ones(96)
    columns = ("loss_mask", "weights")
    counted = {name: rows.ragged("tokens").like(ones.astype(rows.ragged(name).values.dtype)) for name in columns}
    batch = rows.with_columns(counted)
    curves = []
    for settings in ({}, float8(recipe)):
        with build(ranks, folder, optimizer=ADAMW, **settings) as model:
            curves.append([step["nll"] for step in model.train_steps([batch] * 25, nll)])
    plain, found = map(np.array, curves)
    learned = plain[0] - plain[-1]
    assert learned > 1
    assert np.abs(found - plain).max() < 0.1 * learned
    assert not np.array_equal(found, plain)


@exhaustive
def test_layers_that_are_left_out_compute_as_before(ranks, folder):
    reads = {}
    for name, settings in {
        "plain": {},
        "all": float8(),
        "none of them": float8(
            num_first_layers_in_bf16=1, exclude_modules=[each for each in LINEAR if each != "o_proj"]
        ),
        "o_proj": float8(num_first_layers_in_bf16=1, exclude_modules=["mlp.gate_proj", "q_proj"]),
    }.items():
        with build(ranks, folder, **settings) as model:
            reads[name] = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values
    errors = {name: float(np.abs(read - reads["plain"]).mean()) for name, read in reads.items()}
    assert 0 < errors["none of them"] < errors["o_proj"] < errors["all"]


@exhaustive
def test_adapters_train_on_a_base_in_float8(ranks, folder, tmp_path):
    for name, settings in {"plain": {}, "float8": float8()}.items():
        with build(ranks, folder, lora=True, **settings) as model:
            model.train_step(make_batch(), TokenLoss())
            model.export_adapter(str(tmp_path / name))
    plain, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "float8"))
    moved = {name for name in plain if "lora_B" in name}
    assert angle({name: found[name] for name in moved}, {name: plain[name] for name in moved}) > 0.97
    assert all(bool(found[name].any()) for name in moved)


def test_layers_that_read_the_same_input_round_it_once(monkeypatch):
    rounded = []
    monkeypatch.setattr(
        low_precision, "rounded_rows", lambda x, **options: rounded.append(x) or rounded_rows(x, **options)
    )
    layers = nn.ModuleDict({name: nn.Linear(32, 16, dtype=torch.bfloat16) for name in "qkv"})
    alone = nn.Linear(32, 16, dtype=torch.bfloat16)
    alone.load_state_dict(layers["v"].state_dict())
    for module, names in ((layers, set("qkv")), (nn.ModuleDict({"v": alone}), {"v"})):
        convert(module, names, Float8Config(enabled=True, emulate=True))
    x = torch.randn(4, 8, 32, dtype=torch.bfloat16)
    found = [layer(x) for layer in layers.values()]
    assert [len(each) for each in rounded] == [32, 16, 16, 16]
    expected = alone(x.clone())
    expected.sum().backward()
    found[2].sum().backward()
    assert torch.equal(found[2], expected)
    assert torch.equal(layers["v"].weight.grad, alone.weight.grad)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"float8": {"enabled": True}}, r"needs GPUs of compute capability 8.9 or higher"),
        (float8(exclude_modules=["lm_head"]), r"float8.exclude_modules: 'lm_head' is not a linear layer"),
        (float8(num_last_layers_in_bf16=2), r"float8 leaves no linear layer of the 2 layers"),
    ],
)
def test_what_cannot_compute_in_float8_is_refused_by_name(ranks, folder, settings, message):
    with pytest.raises(WorkerError, match=message):
        build(ranks, folder, **settings)
