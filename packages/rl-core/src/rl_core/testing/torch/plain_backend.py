"""The smallest training backend: every rank holds a whole model of `transformers`, and gradients are summed.

It shows what a backend has to supply, and lets the parts that all backends share be tested by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rl_core import (
    HEADLESS_ROLES,
    Batch,
    Coordinates,
    Device,
    Metric,
    ModelConfig,
    ModelPart,
    ModelSpec,
    Pipeline,
    Ragged,
    Rendezvous,
    Role,
    TensorSpec,
)
from rl_core.torch import (
    Head,
    HeldPart,
    Holdings,
    KeptSavePlanner,
    Microbatch,
    Pass,
    Residency,
    TrainingParts,
    TrainingWorker,
    WeightFiles,
    add_grads,
    build_optimizer,
    check_patterns,
    describe_parameters,
    frozen_names,
    join_process_group,
    language_reads,
    new_head,
    no_images,
    padded,
    read_hf_config,
    read_tensors,
    scalar_reads,
    take_grads,
)

SCORE = "score.weight"


class PlainWorker(TrainingWorker):
    """A `ModelWorker` that is data parallel only, and pads rows regardless of the config."""

    def __init__(self, config: ModelConfig, backend: object, spec: ModelSpec, rendezvous: Rendezvous) -> None:
        mesh = PlainMesh(rendezvous)
        super().__init__(config, spec, mesh, partial(build_parts, config, spec, mesh))


def build_parts(config: ModelConfig, spec: ModelSpec, mesh: PlainMesh, folder: Path) -> TrainingParts:
    """Load the model on every rank; collective.

    Raises:
        ValueError: If adapters are asked for.
    """
    if config.lora_cfg.enabled:
        raise ValueError("this backend has no adapters; set policy.lora_cfg.enabled=false")
    auto = AutoModelForSequenceClassification if spec.role in HEADLESS_ROLES else AutoModelForCausalLM
    hf_config = read_hf_config(folder, config.hf_config_overrides)
    hf_config.num_labels = 1
    hf = auto.from_pretrained(folder, config=hf_config, dtype=torch.float32)
    if spec.role in HEADLESS_ROLES and SCORE not in WeightFiles.of(folder).names:
        head = hf.get_parameter(SCORE).detach()
        head.copy_(new_head(spec.role, head.shape, std=hf_config.initializer_range, seed=spec.seed))
    optimizer, inner = None, None
    if spec.trains:
        frozen = frozen_names(config, [name for name, _ in hf.named_parameters()])
        for name, parameter in hf.named_parameters():
            parameter.requires_grad_(name not in frozen)
        trained = {name: parameter for name, parameter in hf.named_parameters() if parameter.requires_grad}
        check_patterns("optimizer.lr_scales", config.optimizer.lr_scales, list(trained))
        inner = build_optimizer(config.optimizer, trained.values(), described=describe_parameters([hf]))
        optimizer = PlainOptimizer(inner, hf)
    model = PlainModel(hf, spec.role, getattr(torch, config.precision), config.logprob_chunk_size)
    return TrainingParts(
        model, PlainWeights(hf), optimizer, PlainState(hf, inner, mesh), PlainResidency(hf, inner, mesh.kind)
    )


class PlainMesh:
    """Data-parallel ranks, which meet when it is made; collective."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        join_process_group(rendezvous)
        assert dist.group.WORLD is not None
        rank, world_size, kind = rendezvous.rank, rendezvous.world_size, rendezvous.kind
        self.rank, self.world_size, self.kind = rank, world_size, kind
        self.device = kind.torch_device
        self.control = self.data = dist.group.WORLD
        self.coordinates = Coordinates({"dp": rank}, {"dp": world_size})
        self.layout = {"dp": world_size}
        self.rng_state, self.set_rng_state = kind.rng_state, kind.set_rng_state
        self.leave = dist.destroy_process_group

    def seed(self, seed: int) -> None:
        """Seed this rank, which draws for its own rows."""
        torch.manual_seed(seed + self.rank)


class PlainModel:
    """Passes of a whole model.

    Args:
        compute: Dtype of matrix products.
        chunk_size: Tokens whose logits exist at one time; None for the default.
    """

    pipeline = Pipeline()
    shape = None
    image_columns = staticmethod(no_images)

    def __init__(self, hf: PreTrainedModel, role: Role, compute: torch.dtype, chunk_size: int | None) -> None:
        self.hf = hf
        self.hf_config = hf.config
        self.architecture = type(hf).__name__
        self._role = role
        self._compute = compute
        self._chunk_size = chunk_size

    def extra_columns(self, batch: Batch, *, for_loss: bool) -> Mapping[str, Ragged]:
        """Return no columns."""
        return {}

    def read(self, run: Pass) -> list[Any]:
        """Run one microbatch after another without gradients."""
        self.hf.train(False)
        with torch.no_grad():
            return [self._run(make(), run) for make in run.microbatches]

    def accumulate(self, run: Pass) -> Mapping[str, Metric]:
        """Run one microbatch after another, then sum gradients over all ranks."""
        self.hf.train(True)
        for make in run.microbatches:
            self._run(make(), run).backward()
        for parameter in self.hf.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        return {}

    def discard(self) -> None:
        """Do nothing: a backward pass changes only gradients."""

    def trained_parts(self) -> list[Tensor]:
        """Return all parameters that train."""
        return [parameter.detach() for parameter in self.hf.parameters() if parameter.requires_grad]

    def close(self) -> None:
        """Do nothing."""

    def _run(self, microbatch: Microbatch, run: Pass) -> Any:
        rows = microbatch.rows
        inputs = padded(rows)
        with torch.autocast(rows.offsets.device.type, self._compute, enabled=self._compute != torch.float32):
            # The class of Llama 4 has another name for its body.
            body = self.hf.get_submodule("model") if self.hf.base_model is self.hf else self.hf.base_model
            hidden = inputs.flatten(body(inputs.input_ids, attention_mask=inputs.attention_mask).last_hidden_state)
            if self._role in HEADLESS_ROLES:
                outputs = self.hf.get_submodule("score")(hidden)[:, 0].float()
                columns = scalar_reads(outputs, rows, run.reads)
            else:
                head = Head(self.hf.get_output_embeddings().weight)
                columns = language_reads(
                    hidden, rows, head, run.reads, temperature=run.temperature, chunk_size=self._chunk_size
                )
        return run.on_reads(microbatch, columns)


class PlainOptimizer:
    """Steps all parameters on every rank, whose gradients are equal."""

    def __init__(self, inner: Optimizer, hf: nn.Module) -> None:
        self.inner = inner
        self._hf = hf

    def grad_norm(self) -> float:
        """Return the norm of the whole gradient."""
        return float(nn.utils.get_total_norm(self._grads()))

    def scale_grads(self, factor: float) -> None:
        """Multiply the gradient."""
        for grad in self._grads():
            grad.mul_(factor)

    def step(self) -> None:
        """Step."""
        self.inner.step()

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.inner.zero_grad(set_to_none=True)

    def take_grads(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradients by parameter, and free them."""
        return take_grads(self._hf.parameters())

    def add_grads(self, taken: dict[nn.Parameter, Tensor]) -> None:
        """Add gradients that were taken."""
        add_grads(taken)

    def _grads(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._hf.parameters() if parameter.grad is not None]


class PlainWeights:
    """The parameters and persistent buffers, which every rank holds whole."""

    def __init__(self, hf: nn.Module) -> None:
        kept = hf.state_dict().keys()
        buffers = {name: buffer for name, buffer in hf.named_buffers() if name in kept}
        self._named: dict[str, Tensor] = {**dict(hf.named_parameters()), **buffers}
        first = {id(parameter): name for name, parameter in self._named.items()}
        every = hf.named_parameters(remove_duplicate=False)
        self.tied = {name: first[id(parameter)] for name, parameter in every if name not in self._named}
        self.holders = range(dist.get_world_size())

    def specs(self, dtype: str) -> list[TensorSpec]:
        """Return all of them, in order."""
        return [TensorSpec(name, tuple(parameter.shape), dtype) for name, parameter in self._named.items()]

    def stream(
        self,
        dtype: str,
        *,
        everywhere: bool = True,
        bucket_bytes: int = 0,
        merges_adapters: bool = True,
        served: bool = False,
    ) -> Iterator[Sequence[tuple[str, Tensor]]]:
        """Yield all of them, one by one, on every rank."""
        for name, parameter in self._named.items():
            yield [(name, parameter.detach().to(getattr(torch, dtype)))]

    def holdings(self, dtype: str) -> Holdings:
        """Return all of them, whole."""
        return {
            name: [HeldPart(tuple((0, extent) for extent in parameter.shape), parameter.detach())]
            for name, parameter in self._named.items()
        }

    def adapter_specs(self, dtype: str) -> list[TensorSpec]:
        """Return no tensors."""
        return []

    def adapters(self, dtype: str = "float32", *, everywhere: bool = True) -> Iterator[tuple[str, Tensor | None]]:
        """Return no tensors."""
        return iter(())


class PlainState:
    """Parameters and optimizer state; torch's distributed checkpoint writes one copy of them."""

    save_planner = KeptSavePlanner

    def __init__(self, hf: nn.Module, optimizer: Optimizer | None, mesh: PlainMesh) -> None:
        self._named = dict(hf.named_parameters())
        self._optimizer = optimizer
        self._mesh = mesh

    def tensors(self, *, copies: bool) -> dict[str, Any]:
        """Return tensors by parameter and key of the optimizer's state."""
        found = self._parameters() | self._states()
        return {name: tensor.clone() for name, tensor in found.items()} if copies else found

    def description(self) -> dict[str, Any]:
        """Return shapes and dtypes of the optimizer's state, which is empty before the first step."""
        return {name: torch.empty_like(tensor, device="meta") for name, tensor in self._states().items()}

    def restore(self, path: Path, description: Mapping[str, Any]) -> None:
        """Read parameters and optimizer state into place; collective."""
        states = {name: torch.empty_like(tensor, device=self._mesh.device) for name, tensor in description.items()}
        read_tensors(path, {**self._parameters(), **states}, group=self._mesh.control)
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        for name, tensor in states.items():
            parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
            self._optimizer.state[self._named[parameter]][key] = tensor

    def weights(self) -> dict[str, Any]:
        """Return copies by parameter."""
        return {name: tensor.clone() for name, tensor in self._parameters().items()}

    def restore_weights(self, path: Path) -> None:
        """Read parameters into place."""
        read_tensors(path, self._parameters(), group=self._mesh.control)

    def layers(self) -> dict[str, Any]:
        """Return no state."""
        return {}

    def restore_layers(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""

    def _parameters(self) -> dict[str, Any]:
        return {f"model/{name}": parameter.detach() for name, parameter in self._named.items()}

    def _states(self) -> dict[str, Tensor]:
        if self._optimizer is None:
            return {}
        return {
            f"optimizer/{name}/{key}": value
            for name, parameter in self._named.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }


class PlainResidency(Residency):
    """Parameters, and the optimizer's state."""

    def __init__(self, hf: nn.Module, optimizer: Optimizer | None, device: Device) -> None:
        super().__init__(device)
        self._hf = hf
        self._optimizer = optimizer

    def kept(self, part: ModelPart) -> list[Tensor]:
        if part == "parameters":
            return list(self._hf.parameters())
        states = {} if self._optimizer is None else self._optimizer.state
        return [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]


def build(config: ModelConfig, spec: ModelSpec, rendezvous: Rendezvous) -> PlainWorker:
    """Return a worker in a process of a rank pool."""
    return PlainWorker(config, None, spec, rendezvous)
