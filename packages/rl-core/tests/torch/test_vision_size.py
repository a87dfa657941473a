"""The sizes of vision towers that follow from a config are those of the models in transformers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from rl_core.facts.vision_size import VisionSize
from rl_core.model_config import LoraConfig, ModelConfig, VisionConfig
from rl_core.testing.torch.tiny_vision import FAMILIES, TEXT
from rl_core.torch.vision.families import GRID, PIXELS, PLACES, SIZES, VISION_FAMILIES

BOTH = VisionConfig(enabled=True, tower="trained", projector="trained")


def tiny_config(family, **vision):
    kind = FAMILIES[family]
    whole = {name: 9 if isinstance(value, str) else value for name, value in kind.whole.items()}
    return AutoConfig.for_model(
        family, **whole, text_config={**TEXT, **kind.text}, vision_config={**kind.vision, **vision}
    )


def published_config(family):
    """The defaults of a family with a language model of one layer, to whose width the tower projects."""
    config = AutoConfig.for_model(family, vision_config={})
    text, vision = config.text_config, config.vision_config
    text.num_hidden_layers, text.vocab_size = 1, 131072
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    vars(vision)["hidden_size" if family == "qwen2_vl" else "out_hidden_size"] = text.hidden_size
    return config


def model_of(config, *, device="meta", dtype=torch.bfloat16):
    with torch.device(device):
        return AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="sdpa")


def is_in(name, modules):
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def part_of(name, family):
    return "projector" if is_in(name, family.projector) else "tower" if is_in(name, family.tower) else None


@pytest.mark.parametrize("make", [tiny_config, published_config])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(family, make):
    config = make(family)
    model, size = model_of(config), VisionSize.of(config.to_dict())
    counts = dict.fromkeys(("tower", "projector"), 0)
    for name, parameter in model.named_parameters():
        if part := part_of(name, VISION_FAMILIES[family]):
            counts[part] += parameter.numel()
    # Biases and norms are a larger share of tiny layers.
    near = 0.05 if make is tiny_config else 0.002
    assert {part: size.parameters(part) for part in counts} == pytest.approx(counts, rel=near)
    names = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    linear = [each for each in size.matrices if each.is_linear]
    assert {each.name.replace("*", "0") for each in linear} <= names
    # Adapters are on every linear layer except the one that embeds patches and a part that is not used.
    left_out = ("patch_embedding.linear", "patch_embedder.input_proj", *VISION_FAMILIES[family].unused)
    seen = [
        name for name in names if part_of(name, VISION_FAMILIES[family]) and not any(each in name for each in left_out)
    ]
    adapted = VisionConfig(enabled=True, tower="adapters", projector="adapters")
    expected = sum(8 * sum(model.get_submodule(name).weight.shape) for name in seen)
    assert size.adapters(adapted, LoraConfig(enabled=True, dim=8)) == expected


def image_columns(family, config):
    """Columns of some images, of many patches."""
    blank, rng = dict(VISION_FAMILIES[family].blank(config)), np.random.default_rng(0)

    def pixels(*shape):
        return rng.random(shape, np.float32)

    if GRID in blank:
        return {PIXELS: pixels(128, blank[PIXELS].shape[1]), GRID: np.array([[1, 8, 8]] * 2)}
    if SIZES in blank:
        side = 4 * int(blank[SIZES][0][0])
        return {PIXELS: pixels(6 * side * side), SIZES: np.array([[side, side]] * 2)}
    if PLACES in blank:
        side = 4 * config.vision_config.pooling_kernel_size
        places = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(1, -1, 2)
        return {PIXELS: pixels(1, side * side, blank[PIXELS].shape[-1]), PLACES: places}
    return {name: np.repeat(values, 8, 0) for name, values in blank.items()}


def wide_config(family):
    """A tower of a usual shape: MLPs of four times its width, and more layers than ends."""
    vision = {"intermediate_size": 1024, "depth": 8, "num_hidden_layers": 8, "hidden_size": 256, "embed_dim": 256}
    given = {name: value for name, value in vision.items() if name in FAMILIES[family].vision}
    if family == "qwen2_vl":
        given |= {"hidden_size": 64, "mlp_ratio": 4}
    if family == "gemma4":
        given |= {"head_dim": 128}
    config = tiny_config(family, **given)
    if family == "gemma3":
        config.mm_tokens_per_image = 1
    return config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tower", ["trained", "frozen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_images_keep_the_bytes_that_the_size_states(family, tower, dtype):
    config, parts = wide_config(family), VISION_FAMILIES[family]
    model, size = model_of(config, device="cpu", dtype=dtype), VisionSize.of(config.to_dict())
    for unused in parts.unused:
        if unused.endswith(".head"):
            vars(model.get_submodule(unused.rpartition(".")[0]))["use_head"] = False
    trained = {"projector", *(["tower"] if tower == "trained" else [])}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name, parts) in trained)
    columns = {name: torch.from_numpy(values) for name, values in image_columns(family, config).items()}
    columns[PIXELS] = columns[PIXELS].to(dtype)
    known = {each.untyped_storage()._cdata for each in model.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.untyped_storage()._cdata not in known:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features, deep = parts.features(model.train().base_model, parts.arguments(columns))
    for each in (*columns.values(), features, *deep):
        keep(each)
    counted = sum(each.untyped_storage().nbytes() for each in kept.values())
    vision = VisionConfig(enabled=True, tower=tower, projector="trained")
    found = size.kept(vision, len(features), dtype.itemsize, recomputed=False)
    assert found == pytest.approx(counted, rel=0.1)


def test_image_tokens_are_bounded_by_what_the_config_allows():
    size = VisionSize.of(tiny_config("qwen2_5_vl").to_dict())

    def tokens(**vision):
        model = ModelConfig(model_name="model", max_total_sequence_length=1000, vision={"enabled": True, **vision})
        return size.tokens(model, 4000)

    assert tokens() == 4000
    # An image of 100 tokens has 28 x 28 pixels for each.
    assert tokens(max_pixels=100 * 28 * 28, max_images=2) == 800
    assert VisionSize.of(tiny_config("gemma3").to_dict()).largest == 4


def test_a_frozen_tower_keeps_pixels_and_features_only():
    size = VisionSize.of(tiny_config("qwen2_5_vl").to_dict())
    found = size.kept(VisionConfig(enabled=True), 10, 4, recomputed=False)
    assert found == 4 * (10 * 4 * 1176 + 10 * 64)
    assert size.kept(BOTH, 10, 4, recomputed=True) < size.kept(BOTH, 10, 4, recomputed=False)


@pytest.mark.parametrize("fields", [{}, {"model_type": "qwen2_5_vl"}, {"model_type": "mllama", "vision_config": {}}])
def test_other_models_have_no_size(fields):
    assert VisionSize.of(fields) is None


def test_parts_that_train_are_the_ones_that_the_config_names():
    size = VisionSize.of(tiny_config("qwen2_5_vl").to_dict())
    names = [each.name for each in size.training(SimpleNamespace(tower="frozen", projector="trained"))]
    assert names == ["model.visual.merger.mlp.0.weight", "model.visual.merger.mlp.2.weight"]
