"""Workers for the conformance suite, built in the processes of a rank pool."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_core.data.batch import Batch
from rl_core.devices import CpuDevice, DeviceMemory
from rl_core.model import ENTROPY, LOGPROBS, Loss, ModelSpec, Read, Rendezvous, topk
from rl_core.model_config import ModelConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import HELD
from rl_core.selfcheck.rank_pool import Rank
from rl_core.selfcheck.torch.losses import token_loss
from rl_core.torch.heads.logprobs import LogitTransform
from rl_core.torch.loss import LossSums, Rows
from rl_core.torch.training import export
from rl_core.torch.training.memory import COMMUNICATORS, GAPS
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model import layout, model
from rl_dtensor.model.layers.recompute import CountedMemory
from rl_dtensor.model.whole import decoder_layers
from rl_dtensor.worker import DTensorWorker


def build(config: ModelConfig, spec: ModelSpec, rendezvous: Rendezvous, **settings: object) -> DTensorWorker:
    return DTensorWorker(config, DTensorConfig(**settings), spec, rendezvous)


def build_tensor_parallel(config: ModelConfig, spec: ModelSpec, rendezvous: Rendezvous) -> DTensorWorker:
    """All ranks share each layer, and the tokens between layers where there are several."""
    size = rendezvous.world_size
    return build(config, spec, rendezvous, tensor_parallel_size=size, sequence_parallel=size > 1)


def build_context_parallel(config: ModelConfig, spec: ModelSpec, rendezvous: Rendezvous) -> DTensorWorker:
    """All ranks share the tokens of each row."""
    return build(config, spec, rendezvous, context_parallel_size=rendezvous.world_size)


def build_pipeline_parallel(config: ModelConfig, spec: ModelSpec, rendezvous: Rendezvous) -> DTensorWorker:
    """All ranks hold consecutive layers."""
    return build(config, spec, rendezvous, pipeline_parallel_size=rendezvous.world_size)


def limit_file_bytes(rank: Rank, limit: int) -> None:
    """Have this process split exports at `limit` bytes."""
    export.FILE_BYTES = limit


def show_memory(rank: Rank, room: int, num_ranks: int) -> None:
    """Have the cores of this process show a device's memory, of which a step of so many ranks may take `room` bytes."""
    available = round((room + (COMMUNICATORS if num_ranks > 1 else 0)) / (1 - GAPS)) + 1
    CpuDevice.memory = lambda self: DeviceMemory(10**10, available, 0, 0)


def hide_memory(rank: Rank) -> None:
    """Undo `show_memory`."""
    del CpuDevice.memory


def counted(rank: Rank) -> CountedMemory:
    """The memory that was counted for the held model."""
    return rank.held[HELD]._model.sharded.memory


def recomputation(rank: Rank) -> list[str]:
    """What each layer of the held model recomputes."""
    chunks = rank.held[HELD]._model.sharded.chunks
    found = []
    for layer in (layer for chunk in chunks for layer in decoder_layers(chunk.hf)):
        is_full = layer.gradient_checkpointing and not isinstance(
            layer._gradient_checkpointing_func.keywords["context_fn"], partial
        )
        found.append("full" if is_full else "selective" if layer.gradient_checkpointing else "none")
    return found


def forget_transforms(rank: Rank) -> None:
    """Have this process build models as if no family did anything to its logits."""
    rank.held["logit_transform"] = model.logit_transform
    model.logit_transform = lambda config: LogitTransform()


def recall_transforms(rank: Rank) -> None:
    """Undo `forget_transforms`."""
    model.logit_transform = rank.held.pop("logit_transform")


def compile_by(rank: Rank, backend: str) -> None:
    """Have this process compile by a backend of `torch.compile`; inductor makes code without vector instructions, whose
    headers take g++ most of its time."""
    if backend == "inductor":
        from torch._inductor import config

        config.cpp.simdlen = 1
    rank.held["compile"] = torch.compile
    torch.compile = partial(torch.compile, backend=backend)


def count_compiled(rank: Rank) -> int:
    """Undo `compile_by`; returns the number of graphs that this process has compiled, which it forgets."""
    torch.compile = rank.held.pop("compile")
    torch._inductor.config.cpp.simdlen = None
    count = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return count


def forget_places(rank: Rank) -> None:
    """Have models of this process count tokens from the first of all rows."""
    rank.held["rows_of"] = model.ReadingModel.rows_of
    told = model.ReadingModel.rows_of
    model.ReadingModel.rows_of = lambda self, layout: {
        name: value for name, value in told(self, layout).items() if name != "position_ids"
    }


def recall_places(rank: Rank) -> None:
    """Undo `forget_places`."""
    model.ReadingModel.rows_of = rank.held.pop("rows_of")


def optimizer_settings(rank: Rank) -> list[dict[str, object]]:
    """Settings of this process's optimizer, by parameter group."""
    groups = rank.held[HELD]._optimizer.inner.param_groups
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def count_layouts(rank: Rank) -> None:
    """Count how often this process works out which rows' tokens it has, and the bounds of what they attend to."""
    rank.held["segments"], rank.held["num_layouts"] = layout.Segments.__init__, 0

    def counted(self: layout.Segments, *args: object) -> None:
        rank.held["num_layouts"] += 1
        rank.held["segments"](self, *args)

    layout.Segments.__init__ = counted


def num_layouts(rank: Rank) -> int:
    """Undo `count_layouts`, with what it counted."""
    layout.Segments.__init__ = rank.held.pop("segments")
    return rank.held.pop("num_layouts")


def shares_prefix(rank: Rank) -> bool:
    """Return whether the model in this process can compute the tokens that rows begin with once."""
    return not any(chunk.unshared for chunk in rank.held[HELD]._model.sharded.chunks)


@dataclass(frozen=True)
class PlainLoss(TokenLoss):
    """A `TokenLoss` without reads that depend on further columns."""

    reads: ClassVar[tuple[Read, ...]] = (LOGPROBS, ENTROPY, topk(2))
    sequence_weight: float = 0.0
    implementation: ClassVar[str] = "dtensor_factories:plain_loss"


def plain_loss(loss: PlainLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    none = torch.zeros(rows.num_tokens, 1, dtype=reads["logprobs"].dtype)
    return token_loss(loss, {**reads, "logprobs_at": none}, rows)


def gradients(rank: Rank, batch: Batch, loss: Loss) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the whole gradient of a step of the held model, which is not made, and the metrics of this rank."""
    worker = rank.held[HELD]
    found: dict[str, Tensor] = {}

    def keep() -> None:
        for chunk in worker._model.sharded.chunks:
            for name, parameter in chunk.hf.named_parameters():
                if parameter.grad is not None:
                    grad = parameter.grad
                    found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()

    worker._optimizer.step = keep
    try:
        metrics = worker.train_step(batch, loss)
    finally:
        del worker._optimizer.step
    return found, {name: metric.result() for name, metric in metrics.items()}


def parameter_bytes(rank: Rank) -> int:
    """Return the bytes of the parameters that this rank of the model holds."""
    held = rank.held[HELD]._residency.kept("parameters")
    return sum(tensor.numel() * tensor.element_size() for tensor in held)
