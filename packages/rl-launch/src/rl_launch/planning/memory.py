"""Bytes of a rank by phase: what a model, an engine and the passes of a step keep on a device and in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rl_core.devices import Device
from rl_core.facts.model_size import WIDE_BYTES, ModelSize, RankMemory
from rl_core.facts.rank_layout import EngineLayout, RankLayout
from rl_core.facts.vision_size import VisionSize
from rl_core.model_config import ModelConfig, VisionConfig
from rl_core.weights import ITEM_BYTES
from rl_launch.planning.accelerators import Accelerator
from rl_launch.planning.shapes import Shape
from rl_launch.planning.workload import microbatch_tokens

GIB = 2**30
LOGIT_COPIES = 3
"""Float32 tensors of the size of a chunk's logits that the head has at one time."""
HEAD_CHUNK = 1024
"""Tokens whose logits exist at one time if the config does not say."""
UNIT_BYTES = 256 * 2**20
"""Maximum bytes of the gathered layers that are one unit."""
WHOLE_SHARE = 0.5
"""Share of a device in which the state and whole gradients must fit for these to add up over microbatches."""
GAPS = 0.1
"""Share of the memory that is left to gaps between tensors, as a run leaves it."""
CONTEXT = GIB
"""Bytes of a process's CUDA context, its kernels and workspaces."""
COMMUNICATORS = GIB
"""Bytes of communicators of several ranks."""
ASLEEP = 4 * GIB
"""Bytes that an engine keeps on the device while it sleeps: its context, graphs and communicators."""
ENGINE_PASS = 2 * GIB
"""Bytes of the largest pass of an engine, and of its graphs."""
CONTEXTS, GAPS_BETWEEN, ENGINE_WEIGHTS = "contexts and communicators", "gaps between tensors", "engine's weights"
IMAGES = "images"
"""Pixels and features of images, and what their tower keeps if it trains."""
OF_OTHERS = (CONTEXTS, GAPS_BETWEEN, ENGINE_WEIGHTS)
"""Parts of a device that are not tensors of the process that computes."""
RANK_PROCESS, ENGINE_PROCESS, NODE_PROCESSES = 0.28e9, 0.53e9, 0.53e9
"""Bytes of host memory of the process of a rank, of the process of an engine, and of the driver and Ray on a node, in
addition to tensors. They were measured on a CPU; libraries of CUDA are not among them."""
PENDING_PARTS = 2
"""Buckets of a weight sync that are on their way at one time."""


@dataclass(frozen=True)
class Usage:
    """Memory that one holder takes in one phase.

    Args:
        role: Role of the model, or `generation`.
        phase: Name of the phase.
        device: Bytes of the fullest rank's device, by what takes them.
        host: Bytes of host memory of one rank, by what takes them.
    """

    role: str
    phase: str
    device: Mapping[str, float]
    host: Mapping[str, float]

    @property
    def total(self) -> float:
        """Bytes of the device."""
        return sum(self.device.values())

    @property
    def tensors(self) -> float:
        """Bytes of the holder's own tensors."""
        return sum(size for name, size in self.device.items() if name not in OF_OTHERS)

    def scaled(self, factor: float) -> Usage:
        """Return the usage with its tensors multiplied by a factor."""
        device = {name: size * (1 if name in OF_OTHERS else factor) for name, size in self.device.items()}
        return replace(self, device=device)


@dataclass(frozen=True)
class Recomputed:
    """Layers of a rank whose activations the backward pass computes again.

    Args:
        full: Layers that keep only their input.
        selective: Layers that recompute selectively.
        layers: Layers of the rank.
    """

    full: int
    selective: int
    layers: int

    def __str__(self) -> str:
        parts = [f"{self.full} in full"] if self.full else []
        parts += [f"{self.selective} selectively"] if self.selective else []
        return f"{' and '.join(parts)} of {self.layers} layers" if parts else "no layer"


def held_passes(layout: RankLayout) -> float:
    """Return the microbatches whose activations the first pipeline rank holds of all its layers."""
    stages, chunks = layout.pipeline, layout.chunks
    return float(stages) if chunks == 1 else (2 * (stages - 1) + (chunks - 1) * stages + 1) / chunks


def activation_bytes(
    shape: Shape, layout: RankLayout, model: ModelConfig, recomputed: Recomputed, *, tokens: float
) -> float:
    """Return the bytes of the activations of a rank's layers in a training step.

    Args:
        shape: Shape of the model.
        layout: Ranks that share it.
        model: Section of the model.
        recomputed: Layers that are recomputed.
        tokens: Tokens of a microbatch on a rank.
    """
    itemsize = ITEM_BYTES[model.precision]
    has_adapters = model.lora_cfg.enabled
    dense, experts = (
        shape.kept(layout, itemsize, has_experts=has, has_adapters=has_adapters) for has in (False, bool(shape.experts))
    )
    # The last stage's layers, which have experts; a stage that begins with dense layers keeps less.
    first = max(0, shape.dense_layers - (shape.layers - recomputed.layers)) if shape.experts else recomputed.layers
    kept, largest = 0.0, 0.0
    for place in range(recomputed.layers):
        layer = dense if place < first else experts
        largest = max(largest, layer.none)
        if place < recomputed.full:
            kept += layer.full
        elif place < recomputed.full + recomputed.selective:
            kept += layer.selective
        else:
            kept += layer.none
    # A layer that is recomputed has all of its activations while its backward pass runs.
    again = largest if recomputed.full + recomputed.selective else 0.0
    ends = _end_widths(layout, has_adapters=has_adapters) * shape.hidden
    if not layout.is_fused:
        ends += 2 * shape.queries / shape.heads  # Cosines and sines of the rotation.
    return tokens * (held_passes(layout) * kept + again + ends * itemsize)


def _end_widths(layout: RankLayout, *, has_adapters: bool) -> float:
    """Return the tensors of the width of hidden states that stay outside of layers: the input of the last norm, its
    normalised input unless it is fused or frozen, and the rows that logits are computed from."""
    between, whole = 1.0 + (not layout.is_fused and not has_adapters), 1.0
    if layout.splits_tokens and layout.joins_projections:
        # The result of the norm stays, and is gathered for a head that trains.
        between, whole = between + has_adapters, whole + (not has_adapters)
    return between / (layout.tensor if layout.splits_tokens else 1) + whole


def logit_bytes(shape: Shape, layout: RankLayout, model: ModelConfig) -> float:
    """Return the bytes of the logits that exist at one time."""
    chunk = model.logprob_chunk_size or HEAD_CHUNK
    return float(LOGIT_COPIES * WIDE_BYTES * chunk * shape.vocab / layout.tensor)


def whole_parameters(size: ModelSize, layout: RankLayout) -> float:
    """Return the parameters of a rank's layers and ends before they are sharded."""
    experts = size.experts / (layout.pipeline * layout.expert_ranks)
    return size.dense_of_rank(layout.pipeline, layout.tensor) + experts


def _whole_layer(size: ModelSize, shape: Shape, layout: RankLayout) -> float:
    """Return the parameters of a rank's layer before it is sharded."""
    dense, sparse = size.layers / shape.layers, size.experts / max(1, shape.layers - shape.dense_layers)
    return dense / layout.tensor + sparse / layout.expert_ranks


def layers_of_unit(size: ModelSize, shape: Shape, layout: RankLayout, itemsize: int) -> float:
    """Return the layers of a rank that are gathered together."""
    if shape.experts:
        return 1.0
    layer, here = _whole_layer(size, shape, layout) * itemsize, shape.layers // layout.pipeline
    return max(1.0, min(UNIT_BYTES // max(1.0, layer), here // 4))


def gathered_bytes(size: ModelSize, shape: Shape, layout: RankLayout, itemsize: int, *, trained: ModelSize) -> float:
    """Return the bytes of gathered layers, of the ends of the model and of their gradients, which exist at one time
    if layers are shards. A single rank has copies of them if it computes in another dtype than it keeps."""
    if not layout.is_sharded or (layout.data * layout.context == 1 and itemsize == WIDE_BYTES):
        return 0.0
    layer = _whole_layer(size, shape, layout) * layers_of_unit(size, shape, layout, itemsize)
    ahead = 2
    ends = size.ends_of_rank(layout.pipeline, layout.tensor)
    grads = (itemsize + WIDE_BYTES) * trained.count / size.count
    return layer * ((1 + ahead) * itemsize + 2 * grads) + ends * (itemsize + grads)


@dataclass(frozen=True)
class TrainingRank:
    """A rank of a model, and the choices that follow from a device's memory.

    Args:
        model: Section of the model.
        shape: Shape of the model; None if only its size is known.
        size: Numbers of parameters, adapters included.
        trained: Those that train.
        layout: Ranks that share it.
        memory: Bytes of weights, gradients and optimizer state.
        repeated: Those of `trained` that are copies on tensor-parallel ranks, which a checkpoint has once.
        vision: Its vision tower and projector; None without images.
    """

    model: ModelConfig
    shape: Shape | None
    size: ModelSize
    trained: ModelSize
    layout: RankLayout
    memory: RankMemory
    repeated: float = 0.0
    vision: VisionSize | None = None

    @property
    def state(self) -> dict[str, float]:
        """Weights, gradients and optimizer state on the device."""
        memory = self.memory
        if memory.device == 0:
            return {}
        parts = {
            "weights": memory.kept - memory.optimizer,
            "gradients": memory.gradients,
            "optimizer state": memory.optimizer,
        }
        return {name: size for name, size in parts.items() if size}

    @property
    def copied(self) -> float:
        """Bytes of host memory for the copies of an asynchronous save: a rank's part of what trains, and of frozen
        weights unless adapters train."""
        layout, weights, state = self.layout, self.memory.weights, self.memory.optimizer
        if not self.model.lora_cfg.enabled:
            state = max(state, self.memory.kept - weights)
        if layout.is_sharded:
            return weights + state
        copies = layout.data * layout.context
        experts = self.trained.experts / (layout.pipeline * layout.expert_ranks)
        experts *= ITEM_BYTES[self.model.precision]
        return (weights - experts) / copies + experts / max(1, copies // layout.experts) + state

    @property
    def layers(self) -> int:
        """Layers of a rank."""
        assert self.shape is not None
        return -(-self.shape.layers // self.layout.pipeline)

    def besides_activations(self, capacity: float | None) -> dict[str, float]:
        """Return the bytes of a training step that recomputation does not change.

        Args:
            capacity: Bytes of the device, which decide whether whole gradients add up; None if it is not known.
        """
        parts = dict(self.state)
        if self.shape is None:
            return parts
        itemsize = ITEM_BYTES[self.model.precision]
        gathered = self._gathered(self.trained)
        if gathered:
            parts["gathered layers"] = gathered
        if self.layout.offloads:
            parts["gathered layers"] = max(gathered, 2 * self.size.layers / self.shape.layers * itemsize)
        whole = whole_parameters(self.trained, self.layout) * WIDE_BYTES
        keeps_whole = self.layout.keeps_whole and self.layout.data * self.layout.context > 1
        if keeps_whole and capacity is not None and sum(self.state.values()) + whole <= WHOLE_SHARE * capacity:
            parts["whole gradients"] = whole
        parts["logits"] = logit_bytes(self.shape, self.layout, self.model)
        return parts

    def _gathered(self, trained: ModelSize) -> float:
        """Return the bytes of gathered layers and of their gradients; layers of a vision tower are smaller."""
        assert self.shape is not None
        size = replace(self.size, vision=0 if self.vision is None else self.vision.outside)
        return gathered_bytes(size, self.shape, self.layout, ITEM_BYTES[self.model.precision], trained=trained)

    def _image_tokens(self, *, training: bool) -> float:
        """Return the maximum number of image tokens of a microbatch, whose images every context-parallel rank
        computes."""
        assert self.vision is not None
        return self.vision.tokens(self.model, microbatch_tokens(self.model, training=training))

    def images(self, recomputed: Recomputed) -> float:
        """Return the bytes that the images of a training step keep."""
        if self.vision is None:
            return 0.0
        again = self.layout.recomputes_tower and bool(recomputed.full + recomputed.selective)
        tokens, itemsize = self._image_tokens(training=True), ITEM_BYTES[self.model.precision]
        kept = self.vision.kept(self.model.vision, tokens, itemsize, recomputed=again)
        return held_passes(self.layout) * kept

    def plans(self) -> list[Recomputed]:
        """Return the plans that the settings allow, from the one that recomputes least."""
        layers, choice = self.layers, self.layout.recompute
        fixed = {"none": (0, 0), "selective": (0, layers), "full": (layers, 0)}.get(choice)
        if fixed is not None:
            return [Recomputed(*fixed, layers)]
        selective = [Recomputed(0, count, layers) for count in range(layers + 1)]
        return selective + [Recomputed(count, layers - count, layers) for count in range(1, layers + 1)]

    def microbatch(self, *, training: bool) -> float:
        """Return the tokens of a microbatch on a rank."""
        return microbatch_tokens(self.model, training=training) / self.layout.context

    def training(self, capacity: float | None, room: float | None) -> tuple[dict[str, float], Recomputed | None]:
        """Return the bytes of a training step by what takes them, and what is recomputed so that they fit.

        Args:
            capacity: Bytes of the device; None if it is not known.
            room: Bytes that the step may take; None without a limit.
        """
        parts = self.besides_activations(capacity)
        if self.shape is None:
            return parts, None
        chosen, size, images = None, 0.0, 0.0
        for chosen in self.plans():
            tokens = self.microbatch(training=True)
            size = activation_bytes(self.shape, self.layout, self.model, chosen, tokens=tokens)
            images = self.images(chosen)
            if room is None or sum(parts.values()) + size + images <= room:
                break
        parts["activations"] = size
        if self.vision is not None:
            parts[IMAGES] = images
            # A layer of the tower is over before layers of the language model keep anything.
            tower = self.vision.layer(self._image_tokens(training=True), ITEM_BYTES[self.model.precision])
            parts["activations"] = max(size, tower)
        return parts, chosen

    def forward(self) -> dict[str, float]:
        """Return the bytes of a pass that reads logprobs or values, by what takes them."""
        parts = {name: size for name, size in self.state.items() if name != "gradients"}
        if self.shape is None:
            return parts
        itemsize = ITEM_BYTES[self.model.precision]
        gathered = self._gathered(ModelSize(0))
        if gathered:
            parts["gathered layers"] = gathered
        layer = self.shape.kept(self.layout, itemsize, has_experts=bool(self.shape.experts))
        parts["activations"] = self.microbatch(training=False) * layer.none
        if self.vision is not None:
            tokens = self._image_tokens(training=False)
            parts[IMAGES] = self.vision.kept(VisionConfig(), tokens, itemsize, recomputed=False)
            parts["activations"] = max(parts["activations"], self.vision.layer(tokens, itemsize))
        parts["logits"] = logit_bytes(self.shape, self.layout, self.model)
        return parts

    def largest_tensor(self) -> float:
        """Return the bytes of the largest whole tensor, which a weight sync or an export puts together."""
        if self.shape is None:
            return 0.0
        itemsize = ITEM_BYTES[self.model.precision]
        return max(self.shape.vocab * self.shape.hidden, self.size.layers / self.shape.layers) * itemsize


@dataclass(frozen=True)
class EngineRank:
    """A rank of a replica.

    Args:
        layout: Ranks of the replica, and what they keep of a device.
        shape: Shape of the model; None if only its size is known.
        size: Numbers of parameters.
        is_shared: True if the engine takes turns on its devices.
    """

    layout: EngineLayout
    shape: Shape | None
    size: ModelSize
    is_shared: bool

    @property
    def weights(self) -> float:
        """Bytes of the weights of a rank."""
        layout = self.layout
        dense = self.size.layers / (layout.pipeline * layout.tensor)
        dense += self.size.ends_of_rank(layout.pipeline, 1) / layout.tensor
        experts = self.size.experts / (layout.pipeline * layout.tensor * layout.engines)
        return (dense + experts) * layout.weight_bytes

    @property
    def cache_of_token(self) -> float:
        """Bytes of the KV cache of a rank for a token."""
        if self.shape is None:
            return 0.0
        return self.shape.cache_values(self.layout.tensor) / self.layout.pipeline * self.layout.cache_bytes

    def parts(self, accelerator: Accelerator, device: Device, longest_row: int) -> dict[str, float]:
        """Return the bytes of a rank while it generates, by what takes them.

        Args:
            accelerator: Device of the plan.
            device: Kind of the device.
            longest_row: Maximum tokens of a row, for engines whose cache grows with their rows.
        """
        parts = {"weights": self.weights}
        if not device.runs_on_gpus:
            slots = self.layout.num_sequences or 1
            parts["KV cache"] = self.layout.cache_size or slots * longest_row * self.cache_of_token
            return parts
        parts["passes and graphs"] = float(ENGINE_PASS)
        if self.layout.cache_size is not None:
            parts["KV cache"] = self.layout.cache_size
        elif self.layout.share is not None and accelerator.memory is not None:
            parts["KV cache"] = max(0.0, self.layout.share * accelerator.memory - sum(parts.values()))
        else:
            parts["KV cache"] = (self.layout.num_sequences or 1) * longest_row * self.cache_of_token
        return parts

    def slots(self, cache: float, row: float) -> float:
        """Return the sequences of this many tokens that an engine decodes at a time with this KV cache."""
        most = float(self.layout.num_sequences or 10**6)
        return max(1.0, min(most, cache / (row * self.cache_of_token)) if self.cache_of_token else most)
