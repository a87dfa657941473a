"""Sizes of vision towers and projectors, from the fields of a composite model's config: parameters and activations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rl_core.facts.hf_config import language_fields
from rl_core.facts.model_size import WIDE_BYTES, ModelTensor

TOWER, PROJECTOR = "tower", "projector"


class VisionMatrix(NamedTuple):
    """Equal matrices of a tower or a projector.

    Args:
        part: `tower` or `projector`.
        name: Name of the module in transformers; of layers with `*` in place of their number.
        inputs: Values that a product takes.
        outputs: Values that it makes.
        number: Number of such matrices.
        is_linear: True for a layer that can have an adapter; convolutions, tables and unused parts cannot.
    """

    part: str
    name: str
    inputs: int
    outputs: int
    number: int = 1
    is_linear: bool = True


class _Form(NamedTuple):
    """Names and kinds of the layers of a family.

    Args:
        tower: Module of the tower.
        layers: Its list of layers.
        attention: Projections of attention; queries, keys and values are one if there are two.
        mlp: Layers of an MLP; three if it is gated.
        unset: Values of fields that a config may leave out.
        copies: Tensors of the width of the tower that a layer keeps of a patch in addition to those of every layer: of
            joined queries, keys and values, of attention's result in another order, and of scaled results.
        activated: Tensors of the width of the MLP that a layer keeps of a patch.
        norms: RMSNorms of a layer, which are not one kernel in transformers; the first two follow one another's blocks.
        ends: Tensors of the width of the tower that the norms before projectors keep of a patch.
        has_mask: True if pixels have a mask, of int64.
    """

    tower: str
    layers: str
    attention: Sequence[str]
    mlp: Sequence[str]
    unset: Mapping[str, Any] = {}
    copies: int = 1
    activated: int = 2
    norms: int = 0
    ends: int = 1
    has_mask: bool = False


_QKV, _FC = ("attn.qkv", "attn.proj"), ("mlp.fc1", "mlp.fc2")
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_QWEN_UNSET = {"depth": 32, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}
_DEEP_UNSET = {
    **_QWEN_UNSET,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
}
_SIGLIP_UNSET = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224}


def _heads(prefix: str, out: str = "o_proj") -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in ("q_proj", "k_proj", "v_proj", out))


_DEEP = _Form("model.visual", "blocks", _QKV, ("mlp.linear_fc1", "mlp.linear_fc2"), unset=_DEEP_UNSET, copies=3)
_GLM = _Form(
    "model.visual",
    "blocks",
    _QKV,
    _GATED,
    copies=3,
    activated=4,
    norms=2,
    unset={**_QWEN_UNSET, "depth": 24, "hidden_size": 1536, "intermediate_size": 13696, "image_size": 336},
)
_IDEFICS = _Form(
    "model.vision_model",
    "encoder.layers",
    _heads("self_attn", "out_proj"),
    _FC,
    unset={**_SIGLIP_UNSET, "hidden_size": 1152, "patch_size": 32},
    ends=0,
    has_mask=True,
)
FORMS: Mapping[str, _Form] = {
    "qwen2_vl": _Form(
        "model.visual",
        "blocks",
        _QKV,
        _FC,
        copies=3,
        activated=3,
        unset={**_QWEN_UNSET, "embed_dim": 1280, "mlp_ratio": 4},
    ),
    "qwen2_5_vl": _Form(
        "model.visual",
        "blocks",
        _QKV,
        _GATED,
        copies=3,
        activated=4,
        norms=2,
        unset={**_QWEN_UNSET, "hidden_size": 3584, "intermediate_size": 3420},
    ),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _DEEP),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), _GLM),
    "gemma3": _Form(
        "model.vision_tower",
        "encoder.layers",
        _heads("self_attn", "out_proj"),
        _FC,
        ends=0,
        unset={**_SIGLIP_UNSET, "patch_size": 16},
    ),
    "gemma4": _Form(
        "model.vision_tower",
        "encoder.layers",
        tuple(f"{each}.linear" for each in _heads("self_attn")),
        tuple(f"{each}.linear" for each in _GATED),
        activated=4,
        norms=7,
        ends=0,
        unset={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 16,
            "patch_size": 16,
            "position_embedding_size": 10240,
            "pooling_kernel_size": 3,
        },
    ),
    "mistral3": _Form(
        "model.vision_tower",
        "transformer.layers",
        _heads("attention"),
        tuple(f"feed_forward.{each.partition('.')[2]}" for each in _GATED),
        activated=4,
        norms=2,
        unset={"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 14},
    ),
    "llama4": _Form(
        "vision_model",
        "model.layers",
        _heads("self_attn"),
        _FC,
        ends=0,
        unset={
            "hidden_size": 768,
            "intermediate_size": 5632,
            "num_hidden_layers": 34,
            "image_size": 448,
            "patch_size": 14,
            "projector_input_dim": 4096,
            "projector_output_dim": 4096,
            "vision_output_dim": 7680,
            "pixel_shuffle_ratio": 0.5,
        },
    ),
    **dict.fromkeys(("idefics3", "smolvlm"), _IDEFICS),
    "internvl": _Form(
        "model.vision_tower",
        "encoder.layer",
        tuple(f"attention.{each}" for each in ("q_proj", "k_proj", "v_proj", "projection_layer")),
        _FC,
        copies=3,
        unset={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "image_size": 448,
            "patch_size": 14,
        },
    ),
}
"""Model type to the layers of its tower."""


@dataclass(frozen=True)
class VisionSize:
    """A vision tower and its projector.

    Args:
        matrices: Their matrices; biases and norms are left out.
        layers: Layers of the tower.
        hidden: Width of the tower.
        inner: Width of its MLPs.
        form: Names and kinds of its layers.
        patches: Patches of an image token.
        pixels: Values of a patch.
        text: Width of the language model.
        num_deep: Layers of the language model that get features of images in addition to its first one.
        largest: Maximum number of tokens of an image; None if the config does not limit it.
    """

    matrices: Sequence[VisionMatrix]
    layers: int
    hidden: int
    inner: int
    form: _Form
    patches: float
    pixels: int
    text: int
    num_deep: int
    largest: int | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> VisionSize | None:
        """Return the size of a composite model's tower and projector; None for any other model.

        Args:
            fields: Fields of the whole Hugging Face config.
        """
        kind, given = str(fields.get("model_type")), fields.get("vision_config")
        form = FORMS.get(kind)
        text = language_fields(fields).get("hidden_size")
        if form is None or not isinstance(given, Mapping) or not isinstance(text, int):
            return None
        vision = {**form.unset, **{name: value for name, value in given.items() if value is not None}}
        hidden = vision.get("embed_dim") or vision["hidden_size"]
        layers = vision.get("depth") or vision["num_hidden_layers"]
        inner = round(hidden * vision["mlp_ratio"]) if kind == "qwen2_vl" else vision["intermediate_size"]
        if form is _GLM:
            inner = text
        patch = _side(vision["patch_size"])
        pixels = 3 * patch**2 * vision.get("temporal_patch_size", 1)
        merged = _merged(kind, fields, vision)
        prefix = f"{form.tower}.{form.layers}.*"
        matrices = [
            VisionMatrix(TOWER, f"{form.tower}.{_FIRST}", pixels, hidden, is_linear=False),
            *_tables(form.tower, kind, vision, hidden),
            *_of_layers(prefix, form, hidden, inner, layers),
            *_ends(kind, form.tower, vision, hidden, inner, text, round(hidden * merged)),
        ]
        # The learnt head of SigLIP, which no feature depends on, is among the weights.
        return cls(
            matrices=matrices,
            layers=layers,
            hidden=hidden,
            inner=inner,
            form=form,
            patches=merged,
            pixels=pixels,
            text=text,
            num_deep=len(vision.get("deepstack_visual_indexes") or ()) if form is _DEEP else 0,
            largest=fields.get("mm_tokens_per_image"),
        )

    def parameters(self, part: str | None = None) -> int:
        """Return the parameters of a part, or of both."""
        return sum(each.inputs * each.outputs * each.number for each in self.matrices if part in (None, each.part))

    @property
    def outside(self) -> int:
        """Parameters outside of the layers of the tower."""
        return sum(each.inputs * each.outputs for each in self.matrices if "*" not in each.name)

    def training(self, vision: Any) -> list[ModelTensor]:
        """Return the tensors that train with all their weights, equal ones of all layers together.

        Args:
            vision: Section `vision` of the model.
        """
        parts = parts_that(vision, "trained")
        return [
            ModelTensor(f"{each.name}.weight", "vision", each.inputs * each.outputs * each.number)
            for each in self.matrices
            if each.part in parts and _UNUSED not in each.name
        ]

    def adapters(self, vision: Any, lora: Any) -> int:
        """Return the parameters of low-rank adapters, as far as the names of layers determine it.

        Args:
            vision: Section `vision` of the model.
            lora: Section `lora_cfg` of the model.
        """
        parts = parts_that(vision, "adapters")
        targets, excluded = (
            {name.rpartition(".")[2] for name in names} for names in (lora.target_modules, lora.exclude_modules)
        )

        def is_chosen(matrix: VisionMatrix) -> bool:
            last = matrix.name.removesuffix(".linear").rpartition(".")[2]
            return (not targets or last in targets) and last not in excluded

        chosen = [each for each in self.matrices if each.is_linear and each.part in parts and is_chosen(each)]
        return sum(lora.dim * (each.inputs + each.outputs) * each.number for each in chosen)

    def tokens(self, model: Any, rows: float) -> float:
        """Return the maximum number of image tokens among so many tokens of rows.

        Args:
            model: Section of the model.
            rows: Tokens of the rows together.
        """
        most, pixels = self.largest, model.vision.max_pixels
        if pixels is not None:
            most = max(1, round(pixels / (self.pixels_across * self.patches)))
        share = 1.0 if most is None else model.vision.max_images * most / model.max_total_sequence_length
        return rows * min(1.0, share)

    @property
    def pixels_across(self) -> float:
        """Pixels of an image that are a patch, which may have two frames."""
        values = self.pixels // 3
        return float(values if math.isqrt(values) ** 2 == values else values // 2)

    def kept(self, vision: Any, tokens: float, itemsize: int, *, recomputed: bool) -> float:
        """Return the bytes of images that stay on a rank until the backward pass of a microbatch.

        A tower that does not train keeps nothing between its layers, and its passes are over before the layers of the
        language model keep anything.

        Args:
            vision: Section `vision` of the model, which says what trains.
            tokens: Tokens of its images.
            itemsize: Bytes of a value in the dtype that the model computes in.
            recomputed: True if the layers of the tower keep only their inputs.
        """
        patches, form = tokens * self.patches, self.form
        tower, projector = (part not in parts_that(vision, "frozen") for part in (TOWER, PROJECTOR))
        values = patches * self.pixels + tokens * self.text * (1 + self.num_deep)
        if tower:
            values += patches * self.layers * (self.hidden if recomputed else self._of_layer(itemsize))
        if tower or projector:
            of_projector = [each for each in self.matrices if each.part == PROJECTOR]
            values += tokens * sum(each.number * (each.inputs + each.outputs) for each in of_projector)
            values += patches * self.hidden * form.ends * (1 + self.num_deep)
        return values * itemsize + (patches * self.pixels / 3 * _INT64 if form.has_mask else 0)

    def layer(self, tokens: float, itemsize: int) -> float:
        """Return the bytes of one layer of the tower in a pass, of so many tokens of images."""
        return tokens * self.patches * self._of_layer(itemsize) * itemsize

    def _of_layer(self, itemsize: int) -> float:
        """Return the values that a layer keeps of a patch."""
        form = self.form
        # Inputs and outputs of both norms; queries, keys, values and the result of attention.
        found = (8 + form.copies) * self.hidden + form.activated * self.inner
        # Normalised inputs, in float32 if that is wider, and of further norms their inputs too.
        wide = 1 + (itemsize < WIDE_BYTES)
        return found + self.hidden * wide * (form.norms + max(0, form.norms - 2))


def parts_that(vision: Any, choice: str) -> list[str]:
    """Return the parts that train in a way."""
    return [part for part, chosen in ((TOWER, vision.tower), (PROJECTOR, vision.projector)) if chosen == choice]


_FIRST, _UNUSED = "patch_embed.proj", ".head."
_INT64 = 8


def _side(size: Any) -> int:
    return int(size[0] if isinstance(size, list | tuple) else size)


def _merged(kind: str, fields: Mapping[str, Any], vision: Mapping[str, Any]) -> float:
    """Return the number of patches that become a token."""
    if kind == "gemma3":
        return (_side(vision["image_size"]) // _side(vision["patch_size"])) ** 2 / fields.get(
            "mm_tokens_per_image", 256
        )
    sides = {
        "gemma4": vision.get("pooling_kernel_size"),
        "idefics3": fields.get("scale_factor", 2),
        "smolvlm": fields.get("scale_factor", 2),
        "mistral3": fields.get("spatial_merge_size", 2),
        "llama4": 1 / vision.get("pixel_shuffle_ratio", 0.5),
        "internvl": 1 / fields.get("downsample_ratio", 0.5),
    }
    return float(sides.get(kind) or vision["spatial_merge_size"]) ** 2


def _tables(tower: str, kind: str, vision: Mapping[str, Any], hidden: int) -> list[VisionMatrix]:
    """Return the tables of places, and parts that no feature depends on."""
    places = vision.get("num_position_embeddings") or 0
    if not places and "image_size" in vision and kind not in ("qwen2_vl", "qwen2_5_vl", "mistral3", "gemma4"):
        places = (_side(vision["image_size"]) // _side(vision["patch_size"])) ** 2
    if kind == "gemma4":
        places = 2 * vision["position_embedding_size"]
    found = [VisionMatrix(TOWER, f"{tower}.embeddings.position_embedding", places, hidden, is_linear=False)]
    if kind == "gemma3":
        unused = 4 * hidden + 2 * vision["intermediate_size"]
        found.append(VisionMatrix(TOWER, f"{tower}{_UNUSED}attention", unused, hidden, is_linear=False))
    return found


def _of_layers(prefix: str, form: _Form, hidden: int, inner: int, layers: int) -> list[VisionMatrix]:
    first = 3 * hidden if len(form.attention) == 2 else hidden
    sizes = dict.fromkeys(form.attention[:-1], (hidden, first))
    sizes |= {form.attention[-1]: (hidden, hidden)}
    sizes |= dict.fromkeys(form.mlp[:-1], (hidden, inner)) | {form.mlp[-1]: (inner, hidden)}
    return [VisionMatrix(TOWER, f"{prefix}.{name}", *ends, number=layers) for name, ends in sizes.items()]


def _ends(
    kind: str, tower: str, vision: Mapping[str, Any], hidden: int, inner: int, text: int, merged: int
) -> list[VisionMatrix]:
    """Return what follows the layers of a tower.

    Args:
        kind: Model type.
        tower: Module of the tower.
        vision: Fields of the vision tower.
        hidden: Its width.
        inner: Width of its MLPs.
        text: Width of the language model.
        merged: Width of the patches of a token together.
    """
    other = "model.multi_modal_projector"
    found: list[tuple[str, int, int]]
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        found = [(f"{tower}.merger.mlp.0", merged, merged), (f"{tower}.merger.mlp.2", merged, text)]
    elif FORMS[kind] is _DEEP:
        mergers = ["merger", *(f"deepstack_merger_list.{each}" for each in _deep(kind, vision))]
        found = [
            (f"{tower}.{name}.{layer}", merged, width)
            for name in mergers
            for layer, width in (("linear_fc1", merged), ("linear_fc2", text))
        ]
    elif FORMS[kind] is _GLM:
        wide = vision["intermediate_size"]
        down = VisionMatrix(PROJECTOR, f"{tower}.downsample", merged, text, is_linear=False)
        found = [(f"{tower}.merger.{name}", text, wide) for name in ("gate_proj", "up_proj")]
        found += [(f"{tower}.merger.proj", text, text), (f"{tower}.merger.down_proj", wide, text)]
        return [down, *(VisionMatrix(PROJECTOR, *each) for each in found)]
    elif kind == "gemma3":
        # A parameter of the projector itself.
        return [VisionMatrix(PROJECTOR, f"{other}.mm_input_projection", hidden, text, is_linear=False)]
    elif kind == "gemma4":
        found = [("model.embed_vision.embedding_projection", hidden, text)]
    elif kind == "mistral3":
        found = [(f"{other}.patch_merger.merging_layer", merged, hidden), (f"{other}.linear_1", hidden, text)]
        found += [(f"{other}.linear_2", text, text)]
    elif kind == "llama4":
        middle, out = vision["projector_input_dim"], vision["projector_output_dim"]
        adapter = f"{tower}.vision_adapter.mlp"
        ends = [(f"{adapter}.fc1", inner, middle), (f"{adapter}.fc2", middle, out)]
        last = VisionMatrix(PROJECTOR, "multi_modal_projector.linear_1", vision["vision_output_dim"], text)
        return [*(VisionMatrix(TOWER, *each) for each in ends), last]
    elif kind == "internvl":
        found = [(f"{other}.linear_1", merged, text), (f"{other}.linear_2", text, text)]
    else:
        found = [("model.connector.modality_projection.proj", merged, text)]
    return [VisionMatrix(PROJECTOR, *each) for each in found]


def _deep(kind: str, vision: Mapping[str, Any]) -> range:
    given = vision.get("deepstack_visual_indexes", () if kind.startswith("qwen3_5") else (8, 16, 24))
    return range(len(given))
