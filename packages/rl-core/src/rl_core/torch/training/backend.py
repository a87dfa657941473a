"""The parts that a training backend supplies; `TrainingWorker` makes a model worker of them.

A backend is a mesh, a function that builds the five parts of a model on it, and a worker class whose constructor hands
both to `TrainingWorker`::

    class MyWorker(TrainingWorker):
        def __init__(self, config, backend, spec, rendezvous):
            mesh = MyMesh.join(rendezvous, backend)
            super().__init__(config, spec, mesh, partial(build, config, backend, spec, mesh))

    def build(config, backend, spec, mesh, folder) -> TrainingParts:
        ...

- `RankMesh`: the ranks, their process groups and their random generators.
- `RankModel`: forward and backward passes over microbatches.
- `RankWeights`: weights by Hugging Face name, for generators and exports.
- `RankOptimizer`: a step on the gradients that a backward pass left.
- `RankState`: contents of a checkpoint, as tensors of the whole model.
- `rl_core.torch.residency.Residency`: which tensors leave the device when others need it.

Sharding over data-parallel ranks, microbatches, losses and metrics, skipped steps, schedules, the reference, checkpoint
files, exports, publishing and the order of all this are written once, in the other modules of this folder. A tiny
backend is in `rl_core.testing.torch.plain_backend`; `rl_core.testing.model_worker.ModelWorkerSuite` holds a backend to
the contract of `rl_core.model.ModelWorker`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from rl_core.data.batch import Batch
from rl_core.data.microbatch import Pipeline
from rl_core.data.ragged import Ragged
from rl_core.devices import Device
from rl_core.metrics import Metric
from rl_core.model import AdapterSettings, Coordinates, Read
from rl_core.torch.loss import Rows
from rl_core.torch.residency import Residency
from rl_core.torch.training.checkpoint_files import KeptSavePlanner
from rl_core.torch.training.flops import ModelShape
from rl_core.torch.training.lora import InitialFactors
from rl_core.torch.training.memory import StepPlan
from rl_core.torch.transport.exchange import Holdings
from rl_core.weights import TensorSpec


class RankMesh(Protocol):
    """The ranks of a model, as one of them sees them; joined when it is made."""

    @property
    def rank(self) -> int:
        """Rank of this process, among all ranks."""

    @property
    def world_size(self) -> int:
        """Number of all ranks."""

    @property
    def kind(self) -> Device:
        """The device of this rank."""

    @property
    def device(self) -> torch.device:
        """The same, for torch."""

    @property
    def control(self) -> dist.ProcessGroup:
        """All ranks, on gloo: scalars that decide what every rank does next."""

    @property
    def data(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the model and other rows, on a backend that reduces CPU tensors."""

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place on the mesh."""

    @property
    def layout(self) -> Mapping[str, int]:
        """Sizes that say which part of the model each rank holds: on equal ones a run resumes bit for bit."""

    def seed(self, seed: int) -> None:
        """Seed this rank's random generators for its place: ranks that compute one thing together draw alike."""

    def rng_state(self) -> dict[str, Any]:
        """Return the state of this rank's random generators, in tensors and plain data."""

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `rng_state` returned."""

    def leave(self) -> None:
        """Leave all process groups."""


class Microbatch(NamedTuple):
    """Rows of one forward pass.

    Args:
        rows: On the device.
        is_own: False for a row that only lets the rank join in a pass of others.
    """

    rows: Rows
    is_own: bool


Microbatches = Sequence[Callable[[], Microbatch]]
"""Made when their turn comes; as many on every rank."""

OnReads = Callable[[Microbatch, Mapping[str, Tensor]], Any]
"""Called with each microbatch and the columns of its reads, on the ranks that have the model's output."""


@dataclass(frozen=True)
class Pass:
    """Microbatches on their way through the model.

    Args:
        reads: Reads to compute of each.
        temperature: Divides logits.
        on_reads: Returns what is kept of a microbatch or, in a backward pass, its share of the loss, a scalar.
        num_tokens: Number of tokens of this rank's rows, in all microbatches.
        compares: True if the results are compared with logprobs of another pass, so that the model's own dropout would
            move their ratio away from 1.
        adds: True if the gradient is added to an earlier pass's gradient before a step.
        loss_scale: Factor that shares of the loss have already, and that losses of the model's own have to be given.
    """

    microbatches: Microbatches
    reads: Sequence[Read]
    temperature: float
    on_reads: OnReads
    num_tokens: int
    compares: bool = False
    adds: bool = False
    loss_scale: float = 1.0


class RankModel(Protocol):
    """This rank's part of a model: passes over microbatches, with all ranks."""

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that microbatches pass, which decides their number."""

    @property
    def shape(self) -> ModelShape | None:
        """Shape of the whole model, to count the operations of a step; None if they are not counted."""

    @property
    def hf_config(self) -> Any:
        """The `transformers` config of the whole model."""

    @property
    def architecture(self) -> str:
        """Name of the `transformers` class that loads an export.

        Raises:
            ValueError: If `transformers` has none for this family and role.
        """

    def extra_columns(self, batch: Batch, *, for_loss: bool) -> Mapping[str, Ragged]:
        """Return columns, in addition to tokens and the loss's columns, that passes take from a batch; often none.

        Args:
            batch: Batch that the passes are computed on.
            for_loss: True if the pass is of a loss. One that only reads does without columns that the batch lacks.

        Raises:
            ValueError: If the batch lacks one that a loss needs.
        """

    def image_columns(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """Return the columns of the images of rows for passes, made on the host; `rl_core.torch.rows.no_images` of a
        model that sees none.

        Args:
            batch: Rows of one microbatch.

        Raises:
            ValueError: Naming a row whose images cannot be used.
        """

    def read(self, run: Pass) -> list[Any]:
        """Forward without gradients and without dropout; what `on_reads` returned, in the order of the microbatches,
        and an empty list on ranks without the model's output."""

    def accumulate(self, run: Pass) -> Mapping[str, Metric]:
        """Forward and backward, until each rank has its part of the gradient of the sum over all microbatches and
        data-parallel ranks; this rank's part of metrics of the model's own."""

    def discard(self) -> None:
        """Undo what the backward passes since the last step changed in addition to gradients, as theirs is skipped."""

    def trained_parts(self) -> list[Tensor]:
        """Return this rank's part of every tensor that trains, the same ones on each call."""

    def close(self) -> None:
        """Release everything that would keep the model's memory or process groups alive."""


class RankWeights(Protocol):
    """The weights of a whole model by Hugging Face name; a rank holds parts of them."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Each name that is not sent, to the name of the tensor that it equals."""

    @property
    def holders(self) -> Sequence[int]:
        """Ranks that get whole tensors from a `stream` that is not `everywhere`, the same on every rank; rank 0 is one
        of them."""

    def specs(self, dtype: str) -> list[TensorSpec]:
        """Return all tensors, floating ones in a dtype, in the order of `stream`."""

    def stream(
        self,
        dtype: str,
        *,
        everywhere: bool = ...,
        bucket_bytes: int = ...,
        merges_adapters: bool = True,
        served: bool = False,
    ) -> Iterator[Sequence[tuple[str, Tensor | None]]]:
        """Yield parameter by parameter its tensors by name; collective. Each is whole or, on a rank that does not get
        it, None.

        Args:
            dtype: Dtype of the floating-point tensors, such as `bfloat16`.
            everywhere: True if every rank gets them whole.
            bucket_bytes: About how many bytes are brought together at one time.
            merges_adapters: True if adapters are added to their weights.
            served: True for the weights that generators compute with, if they differ from those that are trained:
                rounded ones in quantisation-aware training.
        """

    def holdings(self, dtype: str) -> Holdings | None:
        """Return the parts that this rank holds of the tensors that generators compute with; None, on every rank, if
        these are sent whole. Parts may be made when they are read: with adapters added, or rounded. Collective.

        Args:
            dtype: Dtype of the floating-point tensors in `specs`, which the parts need not have yet.
        """

    def adapter_specs(self, dtype: str) -> list[TensorSpec]:
        """Return the tensors of `adapters` in their order, in a dtype; empty without adapters. Collective."""

    def adapters(self, dtype: str = ..., *, everywhere: bool = ...) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the factors of every adapter by name (`rl_core.torch.training.lora`), and a score head that trains with
        them; collective. Each is whole on rank 0, and whole or None elsewhere.

        Args:
            dtype: Dtype of the tensors; float32 if not given.
            everywhere: True if every rank gets them whole.
        """


class RankOptimizer(Protocol):
    """A torch optimizer over this rank's part of the trainable parameters."""

    @property
    def inner(self) -> Optimizer:
        """The torch optimizer, whose parameter groups a schedule sets."""

    def grad_norm(self) -> float:
        """Return the norm of the whole gradient, the same on every rank; collective."""

    def scale_grads(self, factor: float) -> None:
        """Multiply this rank's part of the gradient."""

    def step(self) -> None:
        """Step this rank's part, and have every rank see what the others stepped; collective."""

    def zero_grad(self) -> None:
        """Free or empty gradients, so that the next pass begins with none."""

    def take_grads(self) -> Any:
        """Return this rank's part of the gradient for `add_grads`, and free or empty it."""

    def add_grads(self, taken: Any) -> None:
        """Add what `take_grads` returned to this rank's part of the gradient."""


class RankState(Protocol):
    """Parameters and optimizer state of one rank, for checkpoints."""

    def tensors(self, *, copies: bool) -> dict[str, Any]:
        """Return tensors that this rank writes, by names that do not depend on the mesh; collective.

        Args:
            copies: True if the values share no memory with the model or the optimizer, so that both may change.
        """

    def description(self) -> dict[str, Any]:
        """Return everything that `restore` needs in addition to tensors, as plain data and small tensors; collective,
        after `tensors`."""

    def restore(self, path: Path, description: Mapping[str, Any]) -> None:
        """Read parameters and optimizer state of the checkpoint at `path`, saved on whatever mesh; collective."""

    def weights(self) -> dict[str, Any]:
        """Return the weights among `tensors`, without the optimizer's state; copies, which share no memory with the
        model; collective."""

    def restore_weights(self, path: Path) -> None:
        """Read the weights that were written from `weights` to `path` on whatever mesh, and leave the optimizer as it
        is; collective."""

    def layers(self) -> dict[str, Any]:
        """Return the state of this rank's layers that exists only on this layout; often empty."""

    def restore_layers(self, state: Mapping[str, Any]) -> None:
        """Go on from what `layers` returned on the same layout."""

    def save_planner(self) -> KeptSavePlanner:
        """Return a planner that gives the values of `tensors` to torch's distributed checkpoint, for all saves of the
        same ones."""


class RankAdapters(Protocol):
    """This rank's part of several adapters on one base, by their places; every method is collective."""

    @property
    def count(self) -> int:
        """Number of places."""

    @property
    def max_rank(self) -> int:
        """Largest rank of an adapter."""

    @property
    def settings(self) -> Mapping[int, AdapterSettings]:
        """Settings of the adapters that were made or restored, by place; the others have the config's settings."""

    def describe(self, settings: Mapping[int, AdapterSettings]) -> None:
        """Give the adapters these settings, by place, without a change of their factors."""

    def make(self, place: int, settings: AdapterSettings) -> None:
        """Put a new adapter into a place, with an empty optimizer state."""

    def tensors(self, place: int) -> dict[str, Any]:
        """Return this rank's part of the factors and the optimizer state of an adapter, by names that depend neither on
        the place nor on the mesh."""

    def restore(self, place: int, path: Path, settings: AdapterSettings | None, *, with_optimizer: bool) -> None:
        """Read tensors that were written from `tensors` at `path`, on whatever mesh.

        Args:
            place: Place of the adapter.
            path: Folder of the files.
            settings: Settings of the adapter; None for the config's.
            with_optimizer: False for an empty optimizer state.
        """

    def factors(self, place: int) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the factors of an adapter as `RankWeights.adapters` does."""

    def merging(self, place: int) -> AbstractContextManager[None]:
        """Return a context in which the weights that leave the model have this adapter merged in."""

    def stepping(self, place: int) -> AbstractContextManager[None]:
        """Return a context in which the optimizer has only the parameters of this adapter."""


class HeadParts(NamedTuple):
    """A draft head that lives with the model that it drafts for.

    Args:
        folder: Folder of the files that it was loaded from.
        model: Its passes, which answer only `draft_losses`; passes of the other model are part of them.
        weights: Weights that generators receive, by name in its files.
        exported: All tensors of its files.
        optimizer: Optimizer of the head.
        state: State for checkpoints.
    """

    folder: Path
    model: RankModel
    weights: RankWeights
    exported: RankWeights
    optimizer: RankOptimizer
    state: RankState


class TrainingParts(NamedTuple):
    """A model as a backend builds it.

    Args:
        optimizer: None if the model does not train.
        residency: Also of the draft head.
        draft_head: Draft head that trains with the model; None without one.
        plan_step: Function that plans the memory of training steps (`rl_core.torch.training.memory.planned_step`);
            None if the model does not train or its device has no memory of its own.
        shares_prefixes: True if the model computes tokens that rows begin with in common once.
        initial: The factors of adapters that were taken out of the weights; None if the weights are those of the files.
        adapters: Several adapters on the model; None if it has one or none.
    """

    model: RankModel
    weights: RankWeights
    optimizer: RankOptimizer | None
    state: RankState
    residency: Residency
    draft_head: HeadParts | None = None
    plan_step: Callable[[int], StepPlan] | None = None
    shares_prefixes: bool = False
    initial: InitialFactors | None = None
    adapters: RankAdapters | None = None
