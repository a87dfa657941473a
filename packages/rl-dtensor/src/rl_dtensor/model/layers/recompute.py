"""Activations that the backward pass computes again and parameters that stay gathered, by the memory of the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rl_core.data.batch import TOKENS
from rl_core.facts.optimizer_arguments import state_bytes
from rl_core.model_config import BASE_BYTES, ModelConfig
from rl_core.torch.loss import Rows
from rl_core.torch.optim.parameters import is_hidden_matrix
from rl_core.torch.training.memory import StepPlan
from rl_core.torch.training.recompute import (
    WIDE,
    ActivationMemory,
    ActivationsUnknown,
    LayerActivations,
    RecomputePlan,
    image_bytes,
    log_unknown,
    logit_bytes,
    max_tokens,
    passes_kept,
)
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.kernels import Softmax
from rl_dtensor.model.layout import RowLayout, Segments
from rl_dtensor.parallel.body import body_of, is_composite
from rl_dtensor.parallel.dispatch import keeping_sizes
from rl_dtensor.parallel.experts import expert_modules
from rl_dtensor.parallel.fsdp import LAYERS_AHEAD, layers_of_unit, vision_layers
from rl_dtensor.parallel.mesh import DTensorMesh
from rl_dtensor.parallel.sizes import AxisSizes

_aten = torch.ops.aten
KEPT = frozenset(
    (
        _aten.mm.default,
        _aten.addmm.default,
        _aten._grouped_mm.default,
        _aten._scaled_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
    )
)
"""Operations that cost most for the size of their results; scores (`bmm`) are not among them."""

KEPT_NAMESPACES = ("torch_attn", "flash_attn", "flash_attn_3")
"""Namespaces of variable-length attention, in torch and in packages."""


def checkpoint_activations(hf: PreTrainedModel, layers: Sequence[nn.Module], plan: RecomputePlan) -> None:
    """Make layers of a model keep less for the backward pass, and compute the rest again.

    If a model's layers cannot be treated separately, all of them recompute as most of them should.

    Args:
        hf: The model, or a stage of it.
        layers: Its repeated layers, in order.
        plan: Numbers of layers that recompute everything, or some operations.
    """
    plan = plan.clamped(len(layers))
    if plan == RecomputePlan():
        return

    full = partial(checkpoint, use_reentrant=False, context_fn=keeping_sizes)
    selective = partial(full, context_fn=partial(keeping_sizes, products_kept))
    hf.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keeping_sizes})
    if not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        if not plan.num_full:
            hf._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=selective)
        return
    for place, layer in enumerate(layers):
        own: Any = layer
        recomputes, is_full = place < plan.num_full + plan.num_selective, place < plan.num_full
        if isinstance(own.forward, SelectiveWithin):
            own.forward.selective = selective if recomputes and not is_full else None
            recomputes = is_full
        own.gradient_checkpointing = recomputes
        own._gradient_checkpointing_func = full if is_full else selective


@runtime_checkable
class SelectiveWithin(Protocol):
    """Forward pass of a layer that recomputes selectively within its compiled parts.

    Attributes:
        selective: Checkpoint for the operations outside of them; None if nothing is recomputed selectively.
    """

    selective: Callable[..., Any] | None


def products_kept() -> Any:
    """Return the contexts of a checkpoint that keeps the results of matrix products and attention."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operation) else CheckpointPolicy.PREFER_RECOMPUTE


def is_kept(operation: Any) -> bool:
    """Return whether selective recomputation keeps the results of an operation."""
    return operation in KEPT or operation.namespace in KEPT_NAMESPACES


@dataclass(frozen=True)
class CountedMemory:
    """Memory of a rank's training step, counted before the model is split, and the plans that it allows.

    Args:
        backend: Settings of this backend, which fix choices or leave them to the memory.
        num_layers: Number of layers of the rank.
        parts: Bytes by name of everything that no choice changes.
        gathered: Bytes of parameters that can stay gathered.
        whole_gradients: Bytes of whole gradients, which accumulate over microbatches if that is chosen.
        activations: Activations of the layers; None if they cannot be counted.
    """

    backend: DTensorConfig
    num_layers: int
    parts: Mapping[str, int]
    gathered: int
    whole_gradients: int
    activations: ActivationMemory | None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        backend: DTensorConfig,
        hf: PreTrainedModel,
        layers: Sequence[nn.Module],
        *,
        mesh: DTensorMesh,
        trained: Set[nn.Parameter],
    ) -> CountedMemory:
        """Count the memory of a rank, the same on every rank.

        Args:
            config: Model's config, whose microbatches decide how many activations there are.
            backend: Settings of this backend.
            hf: Whole model on `meta`, in the dtype that it computes in.
            layers: Its repeated layers.
            mesh: Mesh of the run.
            trained: Parameters of the model that train; none with adapters.
        """
        sizes = mesh.sizes
        here = -(-len(layers) // sizes.pp)
        parameters = RankParameters.of(hf, layers, here, sizes, trained)
        activations = None
        try:
            counted = activations_of(hf, layers, tensor_ranks=sizes.tp, splits_tokens=backend.sequence_parallel)
            passes = passes_kept(sizes.pp, backend.pipeline_chunks_per_rank)
            images = image_bytes(config, hf.config, recomputes_tower=True)
            activations = ActivationMemory(counted[-here:], max_tokens(config, sizes.cp), passes, images)
        except ActivationsUnknown as problem:
            if mesh.rank == 0:
                log_unknown(problem)
        return cls(
            backend,
            here,
            parameters.bytes_besides(config, backend),
            parameters.bytes_gathered(config),
            parameters.trained_whole * WIDE,
            activations,
        )

    def plan(self, room: int, *, keeps_whole: bool) -> tuple[RecomputePlan, bool, StepPlan]:
        """Choose the use of the memory.

        Args:
            room: Bytes that a step may take.
            keeps_whole: True if whole gradients accumulate over microbatches.

        Returns:
            The plan for the layers of the rank, whether parameters stay gathered over the microbatches of a step, and
            the bytes of both with everything else.
        """
        backend, activations = self.backend, self.activations
        parts = {**self.parts, **({"whole gradients": self.whole_gradients} if keeps_whole else {})}
        keeps_gathered = backend.reshard_after == "step"
        room -= sum(parts.values()) + keeps_gathered * self.gathered
        plan = fixed_plan(backend, self.num_layers)
        decision = f"dtensor_cfg.recompute={backend.recompute}"
        if activations is not None:
            plan = activations.choose(plans_of(self.num_layers), room) if plan is None else plan
            parts["activations"] = activations.size(plan)
            # Recomputing more would cost more than gathering again.
            if backend.reshard_after == "auto":
                keeps_gathered = parts["activations"] + self.gathered <= room
            decision += f": {activations.in_words(plan)}"
        if keeps_gathered:
            parts["parameters that stay gathered"] = self.gathered
        times = "step" if keeps_gathered else "pass of each layer"
        decision += f"; reshard_after={backend.reshard_after}: parameters are gathered once a {times}"
        return plan or RecomputePlan(num_full=self.num_layers), keeps_gathered, StepPlan(decision, parts)


def fixed_plan(backend: DTensorConfig, num_layers: int) -> RecomputePlan | None:
    """Return the plan of so many layers that the settings fix; None if the memory decides."""
    return {
        "none": RecomputePlan(),
        "selective": RecomputePlan(num_selective=num_layers),
        "full": RecomputePlan(num_full=num_layers),
    }.get(backend.recompute)


def plans_of(num_layers: int) -> list[RecomputePlan]:
    """Return the plans from the one that recomputes least to the one that recomputes most.

    Recomputing selectively costs little and comes first; then whole layers replace it, one after another.

    Args:
        num_layers: Number of layers.
    """
    selective = [RecomputePlan(0, num) for num in range(num_layers + 1)]
    return selective + [RecomputePlan(num, num_layers - num) for num in range(num_layers + 1)]


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters of a rank, and of the parameters that a pass gathers.

    Args:
        whole: In its layers and at the ends of the model, not sharded by FSDP.
        sharded: In its shards of these.
        trained_whole: Those of `whole` that train.
        trained: Those of `sharded` that train.
        trained_matrices: Those of `trained` in matrices of hidden layers.
        layer: In its largest layer, or in the layers of a unit if several share one, not sharded.
        ends: In embedding, head and the rest outside of layers, not sharded; without the layers of a vision tower.
        itemsize: Bytes of each in the dtype that the model computes in.
        vocab: Tokens of its part of the head.
    """

    whole: int
    sharded: int
    trained_whole: int
    trained: int
    trained_matrices: int
    layer: int
    ends: int
    itemsize: int
    vocab: int

    @classmethod
    def of(
        cls, hf: PreTrainedModel, layers: Sequence[nn.Module], here: int, sizes: AxisSizes, train: Set[nn.Parameter]
    ) -> RankParameters:
        """Count a whole model.

        Args:
            hf: The model, on `meta`.
            layers: Its repeated layers.
            here: Number of layers of a rank.
            sizes: Ranks along each axis.
            train: Parameters that train.
        """
        in_experts = {id(each) for module in expert_modules(hf) for each in module.parameters()}
        in_layers = {id(each) for layer in layers for each in layer.parameters()}
        tower = [] if not is_composite(hf) else list(vision_layers(hf, body_of(hf)))
        inside = in_layers | {id(each) for layer in tower for each in layer.parameters()}
        # Tensor-parallel ranks split the language model only.
        language: list[Any] = [body_of(hf), hf.get_output_embeddings()] if is_composite(hf) else [hf]
        split = {id(each) for module in language for each in module.parameters()}

        def counted(is_counted: Callable[[nn.Parameter], bool]) -> tuple[int, int, int, int]:
            """Return the numbers of a rank's parameters, of those in its shards, in its largest layer and at the
            ends."""
            by_layer = []
            for layer in layers:
                held = [each for each in layer.parameters() if is_counted(each)]
                experts = sum(each.numel() for each in held if id(each) in in_experts)
                dense = sum(each.numel() for each in held) - experts
                by_layer.append((experts // (sizes.ep * sizes.tp), dense // sizes.tp))
            outside = [
                each.numel() // (sizes.tp if id(each) in split else 1)
                for each in hf.parameters()
                if id(each) not in inside and is_counted(each)
            ]
            # The first stage has the embedding, the last one the head.
            ends = sum(outside) if sizes.pp == 1 else max(outside, default=0)
            experts = sum(each for each, _ in by_layer[-here:])
            seeing = sum(each.numel() for layer in tower for each in layer.parameters() if is_counted(each))
            dense = sum(each for _, each in by_layer[-here:]) + ends + seeing
            sharded = dense // sizes.fsdp + experts // (sizes.fsdp // sizes.ep)
            return dense + experts, sharded, max(sum(each) for each in by_layer), ends

        whole, sharded, layer, ends = counted(lambda _: True)
        trained_whole, trained, _, _ = counted(train.__contains__)
        named = hf.named_parameters()
        matrices = {each for name, each in named if each in train and is_hidden_matrix(name, each.shape)}
        _, trained_matrices, _, _ = counted(matrices.__contains__)
        itemsize = next(hf.parameters()).element_size()
        vocab = hf.config.get_text_config().vocab_size // sizes.tp
        if not in_experts:
            layer *= layers_of_unit(here, layer * itemsize)
        return cls(whole, sharded, trained_whole, trained, trained_matrices, layer, ends, itemsize, vocab)

    def bytes_gathered(self, config: ModelConfig) -> int:
        """Return the bytes of all parameters of a rank while they stay gathered."""
        return round((self.whole - self.ends) * self.stored_bytes(config) + self.ends * self.itemsize)

    def stored_bytes(self, config: ModelConfig) -> float:
        """Return the bytes of a frozen parameter in a layer."""
        lora = config.lora_cfg
        if lora.enabled and lora.base_quantization is not None:
            return BASE_BYTES[lora.base_quantization]
        return self.itemsize

    def bytes_besides(self, config: ModelConfig, backend: DTensorConfig) -> dict[str, int]:
        """Return the bytes of a rank's device next to activations, by name."""
        frozen, stored = self.sharded - self.trained, self.stored_bytes(config)
        in_layers = frozen * (self.whole - self.ends) / self.whole
        weights = self.trained * WIDE + in_layers * stored + (frozen - in_layers) * self.itemsize
        shards = {"weights": round(weights)}
        if self.trained:
            each = state_bytes(config.optimizer.name, config.optimizer.kwargs)
            others = self.trained - self.trained_matrices
            state = round(self.trained_matrices * each.matrices + others * each.others)
            shards |= {"gradients": self.trained * WIDE, "optimizer state": state}
        grads = self.itemsize + WIDE if self.trained else 0
        dequantised = self.itemsize if stored != self.itemsize else 0
        layers = round(self.layer * ((1 + LAYERS_AHEAD) * stored + dequantised + 2 * grads))
        return {
            **({} if backend.cpu_offload else shards),
            "gathered layers and their gradients": layers + self.ends * (self.itemsize + grads),
            "logits": logit_bytes(config, self.vocab),
        }


@dataclass
class _Count:
    """Bytes of one layer.

    Tensors with the width of hidden states are between blocks. They are whole on tensor-parallel ranks unless tokens
    are split; the rest is split.

    Args:
        width: Width of hidden states.
        tensor_ranks: Ranks that share the inside of blocks.
        splits_tokens: True if they share the tokens between blocks too.
    """

    width: int
    tensor_ranks: int
    splits_tokens: bool
    saved: float = 0.0
    products: float = 0.0
    entered: float = 0.0
    alive: dict[int, Tensor] = field(default_factory=dict)

    def save(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.alive:
            self.alive[storage._cdata] = tensor  # Another storage must not get its address.
            self.saved += self.share(tensor, storage.nbytes())

    def share(self, tensor: Tensor, num_bytes: int) -> float:
        is_between = bool(tensor.dim()) and tensor.shape[-1] == self.width
        return num_bytes if is_between and not self.splits_tokens else num_bytes / self.tensor_ranks


class _Counter(TorchDispatchMode):
    """Counts of layers, one after another, and of the results that selective recomputation keeps."""

    def __init__(self, hf: PreTrainedModel, counts: Sequence[_Count], layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self._now: _Count | None = None
        self._parameters = {parameter.untyped_storage()._cdata for parameter in hf.parameters()}
        self._hooks = ExitStack()

        def leave(*_: Any) -> None:
            self._now = None

        for count, layer in zip(counts, layers, strict=True):
            hook = layer.register_forward_pre_hook(partial(self._enter, count), with_kwargs=True, prepend=True)
            self._hooks.callback(hook.remove)
            self._hooks.callback(layer.register_forward_hook(leave).remove)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_kept(func):
            for each in result if isinstance(result, tuple | list) else (result,):
                if isinstance(each, Tensor):
                    self.product(each)
        return result

    def product(self, tensor: Tensor) -> None:
        if self._now is not None:
            self._now.products += self._now.share(tensor, tensor.numel() * tensor.element_size())

    def pack(self, tensor: Tensor) -> Tensor:
        if self._now is not None and tensor.untyped_storage()._cdata not in self._parameters:
            self._now.save(tensor)
        return tensor

    def _enter(self, count: _Count, layer: nn.Module, args: Any, kwargs: Any) -> None:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        self._now = count
        count.entered = count.share(hidden, hidden.numel() * hidden.element_size())


def activations_of(
    hf: PreTrainedModel, layers: Sequence[nn.Module], *, tensor_ranks: int, splits_tokens: bool
) -> list[LayerActivations]:
    """Count the bytes that each layer keeps, by a forward pass of one token on `meta`.

    Args:
        hf: Whole model on `meta` in the dtype that it computes in.
        layers: Its repeated layers.
        tensor_ranks: Ranks that share the inside of each layer.
        splits_tokens: True if they share the tokens between blocks too.

    Raises:
        ActivationsUnknown: If the model's code needs data.
    """
    width = hf.config.get_text_config().hidden_size
    counts = [_Count(width, tensor_ranks, splits_tokens) for _ in layers]
    counter = _Counter(hf, counts, layers)

    def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
        out: Tensor = _Attention.apply(query, key, value)
        counter.product(out)
        return out

    place = torch.zeros(1, 1, dtype=torch.long, device="meta")
    inputs = {"input_ids": place, "attention_mask": torch.ones_like(place)}
    if hf.config.get_text_config()._attn_implementation == ROWS:
        rows = Rows(place[0], {TOKENS: place[0]})
        layout = RowLayout(rows, place, place, place[0], None, bounds=((0, 1),), length=1, context=None)
        inputs |= {"position_ids": place, "layout": layout, "attend": attend}
    was_training = hf.training
    hf.train()
    saving = torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda tensor: tensor)
    try:
        with torch.enable_grad(), saving, counter:
            body_of(hf)(**inputs, use_cache=False)
    except (KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ActivationsUnknown(f"{type(error).__name__}: {error}") from error
    finally:
        hf.train(was_training)
    found = []
    # The inputs of both blocks are gathered from the ranks that split tokens, and stay.
    gathered = 2 * width * next(hf.parameters()).element_size() * (1 - 1 / tensor_ranks) if splits_tokens else 0.0
    for count in counts:
        entered = round(count.entered)
        saved = round(count.saved + gathered)
        # The first operation of a layer keeps its input, and a checkpoint does.
        found.append(LayerActivations(max(saved, entered), round(count.products) + entered, entered))
    return found


class _Attention(torch.autograd.Function):
    """Keeps the same tensors as flash attention: its inputs, its results and a number per token and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise NotImplementedError("only counted")
