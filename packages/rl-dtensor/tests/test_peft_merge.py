"""A model that starts from an adapter which peft saved is exported with the weights of peft's `merge_and_unload`."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.errors import WorkerError
from rl_core.model import ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.testing.exhaustive import partly_exhaustive
from rl_dtensor.selfcheck import MESHES, write_tiny

ATTENTION, ALL = ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STACKS = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]


@dataclass(frozen=True)
class Case:
    """An adapter that peft makes on a tiny model.

    Args:
        made: Arguments of peft's config.
        family: `model_type` of the model.
        mesh: DTensorMesh that merges it.
    """

    made: dict[str, Any]
    family: str = "llama"
    mesh: str = "1"


CASES = {
    "plain": Case({"r": 8, "lora_alpha": 8, "target_modules": ATTENTION}),
    "alpha above r": Case({"r": 4, "lora_alpha": 32, "target_modules": ATTENTION}),
    "alpha below r": Case({"r": 8, "lora_alpha": 3, "target_modules": ATTENTION}),
    "rslora": Case({"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": ATTENTION}),
    "patterns": Case(
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ATTENTION,
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"1.self_attn.v_proj": 3},
        }
    ),
    "DoRA": Case({"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ALL}, mesh="tp2"),
    "DoRA with transposed weights": Case(
        {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["c_attn", "c_proj"]}, family="gpt2"
    ),
    "rank 1": Case({"r": 1, "lora_alpha": 2, "target_modules": ["down_proj"]}),
    "dropout": Case({"r": 4, "lora_alpha": 8, "lora_dropout": 0.3, "target_modules": ATTENTION}),
    "every linear layer": Case({"r": 4, "lora_alpha": 8, "target_modules": ALL}),
    "every linear layer on two ranks": Case({"r": 4, "lora_alpha": 8, "target_modules": ALL}, mesh="tp2"),
    "one layer of two": Case({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "gaussian start": Case({"r": 4, "init_lora_weights": "gaussian", "target_modules": ATTENTION}),
    "orthogonal start": Case({"r": 4, "init_lora_weights": "orthogonal", "target_modules": ATTENTION}),
    "tied embedding": Case({"r": 4, "lora_alpha": 8, "target_modules": ALL}, family="qwen3"),
    "transposed weights": Case({"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj"]}, family="gpt2"),
    "transposed weights on two ranks": Case(
        {"r": 4, "target_modules": ["c_attn", "c_fc"]}, family="gpt2", mesh="fsdp2"
    ),
    "stacked experts": Case(
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": STACKS}, family="qwen3_moe"
    ),
    "transposed experts": Case(
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": STACKS}, family="gpt_oss"
    ),
}
"""Each kind of adapter that is accepted."""


def write_base(family, folder):
    if family in ("llama", "qwen3"):
        return write_tiny_model(folder, family)
    return write_tiny(AutoConfig.for_model(family), folder)


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def write_adapter(base, made, folder):
    """Save an adapter whose factors are all random."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft corrects fan_in_fan_out and says so
        adapted = get_peft_model(loaded(base), PeftConfig(task_type="CAUSAL_LM", **made))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return folder


def lora_cfg(adapter):
    """The settings that start from an adapter: those in its config, and its layers by the names of its tensors."""
    said = PeftConfig.from_pretrained(adapter)
    stacks = list(said.target_parameters or ())
    names = [name.removeprefix("base_model.model.") for name in load_file(adapter / "adapter_model.safetensors")]
    layers = sorted({name.partition(".lora_")[0] for name in names})
    return LoraConfig(
        enabled=True,
        match_all_linear=False,
        target_modules=[layer for layer in layers if ".experts" not in layer],
        target_parameters=stacks,
        dim=said.r,
        alpha=said.lora_alpha,
        use_rslora=said.use_rslora,
        use_dora=said.use_dora,
        rank_pattern=said.rank_pattern,
        alpha_pattern=said.alpha_pattern,
        adapter=str(adapter),
    )


def open_model(ranks, base, mesh, lora):
    num_ranks, settings = MESHES[mesh]
    config = ModelConfig(model_name=str(base), precision="float32", lora_cfg=lora)
    return PooledModel(ranks, "rl_dtensor.selfcheck:build", config, ModelSpec(), num_ranks, **settings)


LIKE_OTHERS = ("alpha below r", "dropout", "every linear layer", "gaussian start", "orthogonal start")
"""Kinds whose files differ from those of others only in numbers of their config, or in the number of their layers."""


@pytest.mark.parametrize("kind", partly_exhaustive(CASES, always=[kind for kind in CASES if kind not in LIKE_OTHERS]))
def test_merged_weights_are_those_of_peft(ranks, tmp_path, kind):
    case = CASES[kind]
    base = write_base(case.family, tmp_path / "base")
    adapter = write_adapter(base, case.made, tmp_path / "adapter")
    PeftModel.from_pretrained(loaded(base), adapter).merge_and_unload().save_pretrained(tmp_path / "expected")
    with open_model(ranks, base, case.mesh, lora_cfg(adapter)) as model:
        model.export(str(tmp_path / "merged"))
    plain, expected, found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("base", "expected", "merged")
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    changed = [name for name, tensor in expected.items() if (tensor - plain[name]).abs().max() > 1e-2]
    assert changed, "the adapter changes nothing"


REFUSED = {
    "DoRA": ({"use_dora": True}, "lora_magnitude_vector"),
    "rank_pattern": ({"rank_pattern": {"q_proj": 2}}, "which needs"),
    "bias": ({"lora_bias": True}, "lora_B.bias"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "lm_head"),
    "embedding": ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens"),
}
"""Kinds of adapters whose tensors are not the factors of linear layers; rl-launch refuses more of them by their config
before the start."""


@pytest.mark.parametrize(("changes", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_tensors_of_other_kinds_are_refused_by_name(ranks, tmp_path, changes, says):
    base = write_base("llama", tmp_path / "base")
    made = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, **changes}
    adapter = write_adapter(base, made, tmp_path / "adapter")
    plain = {"target_modules": ATTENTION, "use_dora": False, "rank_pattern": {}}
    lora = lora_cfg(adapter).model_copy(update=plain)
    with pytest.raises(WorkerError, match=says):
        open_model(ranks, base, "1", lora).__enter__()
