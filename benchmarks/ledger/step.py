"""Costs of the microbatches of a step on one of many ranks that do not exist."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedConfig

from ledger.answers import Answers
from ledger.costs import Costs
from ledger.counter import CostCounter
from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.facts.hf_config import num_experts_of
from rl_core.model import LOGPROBS, ModelSpec, Read, Rendezvous
from rl_core.model_config import ModelConfig, SequencePackingConfig
from rl_core.torch.files.model_files import WeightFiles
from rl_core.torch.kernels.devices import as_on_gpus
from rl_core.torch.rows import to_rows
from rl_core.torch.training.backend import Microbatch, Pass
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.build import ModelBuilder
from rl_dtensor.model.kernels import varlen
from rl_dtensor.parallel.mesh import DTensorMesh
from rl_dtensor.parallel.sizes import AxisSizes
from rl_dtensor.training.step import DTensorModel

DEVICE = "cpu"
"""Fake tensors are on it, because autograd of fake tensors on CUDA needs a driver."""


@dataclass(frozen=True)
class Workload:
    """The work of a rank between two steps of the optimizer.

    Args:
        num_tokens: Number of tokens of each microbatch.
        num_microbatches: Number of microbatches.
        reads: Reads of the head.
        chunk_size: Tokens whose logits exist at one time.
        rows: Tokens of the rows of each microbatch; one row if empty.
        shares_prefixes: True to compute tokens that rows begin with in common once.
    """

    num_tokens: int
    num_microbatches: int = 1
    reads: Sequence[Read] = (LOGPROBS,)
    chunk_size: int = 1024
    rows: Sequence[Sequence[int]] = ()
    shares_prefixes: bool = False


class PassCosts(NamedTuple):
    """Costs of microbatches.

    Args:
        forward: Forward pass of the first microbatch.
        training: Forward and backward passes of all microbatches.
        kept_bytes: Memory of what is there between the passes of the first microbatch: activations, and parameters that
            stay gathered.
    """

    forward: Costs
    training: Costs
    kept_bytes: int = 0

    @property
    def backward(self) -> Costs:
        """Costs of training after the first forward pass: if there is one microbatch, those of its backward pass, with
        what is recomputed."""
        return self.training - self.forward

    def __sub__(self, other: PassCosts) -> PassCosts:
        return PassCosts(
            self.forward - other.forward, self.training - other.training, self.kept_bytes - other.kept_bytes
        )


def pass_costs(
    hf_config: PreTrainedConfig,
    backend: DTensorConfig,
    workload: Workload,
    *,
    num_ranks: int,
    node_size: int | None = None,
) -> PassCosts:
    """Return the costs on rank 0 of a policy's microbatches, computed by the code that trains it, in bfloat16 and with
    torch's flash attention as on GPUs.

    Nothing is computed and nothing is sent: tensors have no data, and a collective returns at once. Tokens are taken
    to go to all experts alike. Choices that are left to the memory of a device (`auto`) are those of a CPU: gradients
    and parameters stay sharded.

    Args:
        hf_config: Hugging Face config of the model.
        backend: Mesh, recomputation and sharding.
        workload: The rank's microbatches.
        num_ranks: Number of ranks of the model.
        node_size: Number of them on each node; None for all.

    Raises:
        ValueError: If config, mesh and model do not fit together, or for what is not counted: pipelines, whose ranks
            differ, and compiled layers.
    """
    _check(backend)
    config = ModelConfig(
        model_name=hf_config.model_type,
        max_total_sequence_length=workload.num_tokens,
        logprob_chunk_size=workload.chunk_size,
        sequence_packing=SequencePackingConfig(
            train_mb_tokens=workload.num_tokens, shared_prefixes=workload.shares_prefixes
        ),
    )
    with _fake_ranks(num_ranks, node_size or num_ranks, backend) as mesh, ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        hf_config.save_pretrained(folder)  # the builder asks the files for dtypes that differ; there are none
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(as_on_gpus())
        routed = partial(_even_exchange, mesh, hf_config, workload.num_tokens)
        stack.enter_context(Answers(partial(_read, workload.num_tokens, routed), workload.num_tokens))
        files = WeightFiles(folder, {})
        sharded = ModelBuilder(
            config, backend, ModelSpec(), deepcopy(hf_config), files=files, is_packed=True, mesh=mesh
        ).build()
        for chunk in sharded.chunks:
            chunk.attend = varlen()
        model = DTensorModel(sharded, mesh, keeps_whole_gradients=backend.gradient_accumulation == "unsharded")
        if backend.reshard_after == "step":
            model.keep_gathered()
        passed: list[tuple[Costs, int]] = []
        with CostCounter(DEVICE) as counter:
            model.accumulate(_run(workload, mesh, lambda: passed.append((counter.costs, counter.live_bytes))))
        return PassCosts(passed[0][0], counter.costs, passed[0][1])


def _check(backend: DTensorConfig) -> None:
    if backend.pipeline_parallel_size > 1:
        raise ValueError(
            f"dtensor_cfg.pipeline_parallel_size is {backend.pipeline_parallel_size}, and costs are counted for ranks "
            "that hold all layers; set it to 1, and count the layers of a stage by hf_config.num_hidden_layers"
        )
    if backend.compile:
        raise ValueError(
            "dtensor_cfg.compile is true, and the kernels that it makes are not counted; set it to false to count "
            "those of the code as it is written"
        )


def layer_costs(
    hf_config: PreTrainedConfig,
    backend: DTensorConfig,
    workload: Workload,
    *,
    num_ranks: int,
    node_size: int | None = None,
) -> tuple[PassCosts, PassCosts]:
    """Return the costs of one layer, and of all of a model except its layers: embedding, final norm and head.

    They are what a model of two layers costs in excess of a model of one, so all layers must be alike.
    """
    one, two = (
        pass_costs(with_layers(hf_config, count), backend, workload, num_ranks=num_ranks, node_size=node_size)
        for count in (1, 2)
    )
    layer = two - one
    return layer, one - layer


def model_costs(
    hf_config: PreTrainedConfig, backend: DTensorConfig, workload: Workload, *, num_ranks: int
) -> PassCosts:
    """Return the costs of a whole model. Only models of one layer and of two are built."""
    layer, rest = layer_costs(hf_config, backend, workload, num_ranks=num_ranks)
    count = hf_config.num_hidden_layers
    one = rest.training.peak_bytes + layer.training.peak_bytes
    # the peak is where most activations are kept, or where most gradients are there
    peak = one + (count - 1) * max(layer.kept_bytes, layer.training.peak_bytes)
    training = replace(_stacked(layer.training, rest.training, count), peak_bytes=peak)
    return PassCosts(_stacked(layer.forward, rest.forward, count), training, rest.kept_bytes + count * layer.kept_bytes)


def _stacked(layer: Costs, rest: Costs, num_layers: int) -> Costs:
    return sum((layer for _ in range(num_layers)), rest)


def with_layers(hf_config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """Copy a config with another number of layers."""
    changed = deepcopy(hf_config)
    changed.num_hidden_layers = count
    kinds = getattr(changed, "layer_types", None)
    if kinds is not None:
        changed.layer_types = kinds[:count]
    return changed


def _run(workload: Workload, mesh: DTensorMesh, on_loss: Callable[[], None]) -> Pass:
    tokens = Ragged.from_rows(workload.rows or [np.zeros(workload.num_tokens)], dtype=np.int32)

    def make() -> Microbatch:
        return Microbatch(to_rows(Batch({TOKENS: tokens}), mesh.device), is_own=True)

    def total(_: Microbatch, columns: Any) -> Tensor:
        on_loss()
        return torch.stack([column.sum() for column in columns.values()]).sum()

    count = workload.num_microbatches
    return Pass([make] * count, workload.reads, 1.0, total, count * workload.num_tokens)


@contextmanager
def _fake_ranks(num_ranks: int, node_size: int, backend: DTensorConfig) -> Iterator[DTensorMesh]:
    """Yield the mesh of rank 0, whose other ranks do not exist."""
    rendezvous = Rendezvous(0, num_ranks, 0, "", 0, DEVICE)
    sizes = AxisSizes.of(backend, num_ranks)
    dist.init_process_group(dist.Backend.FAKE, store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        mesh = DTensorMesh.of_joined(rendezvous, sizes, control=dist.Backend.FAKE, node_size=node_size)
    except BaseException:
        dist.destroy_process_group()
        raise
    try:
        yield mesh
    finally:
        mesh.leave()


def _read(num_tokens: int, routed: Callable[[int], Tensor], asked: Tensor) -> Tensor:
    """Read a tensor without data: the offsets and lengths of the one row, no errors, and tokens that go to all experts
    alike."""
    if asked.dtype == torch.bool:
        return torch.tensor(False)
    if asked.dim() == 3:  # the host reads one table, that of the exchanges of all chunks
        return routed(asked.shape[1])
    return torch.tensor(num_tokens, dtype=asked.dtype)


def _even_exchange(mesh: DTensorMesh, hf_config: PreTrainedConfig, num_tokens: int, num_chunks: int) -> Tensor:
    """Return the tokens that a rank exchanges with each rank and the choices of its experts, by chunk, if every token
    goes to experts at random, as `rl_dtensor.parallel.dispatch` reads them."""
    config = hf_config.get_text_config()
    num_experts, num_chosen = num_experts_of(config.to_dict()), config.num_experts_per_tok
    num_tokens //= mesh.sizes.tp * num_chunks
    sizes = [dist.get_world_size(group) for group in mesh.exchanges]
    table: list[list[int]] = []
    num_ranks = 1
    for size in sizes:
        num_ranks *= size
        # a token stays away from a rank if all that it chooses are experts elsewhere
        away = math.comb(num_experts - num_experts // num_ranks, num_chosen) / math.comb(num_experts, num_chosen)
        each = round(num_tokens * num_ranks // size * (1 - away))
        table += [[each, each]] * size
    choices = num_tokens * num_chosen
    return torch.tensor([*table, [choices, choices]])[:, None].expand(-1, num_chunks, -1)
