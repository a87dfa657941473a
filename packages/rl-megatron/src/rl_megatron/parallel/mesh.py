"""The process groups of one model, with the random generators and the buffers that belong to them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig

from rl_core.devices import Device
from rl_core.model import Coordinates, Rendezvous
from rl_core.torch.process_group import join_process_group
from rl_megatron.config import MegatronConfig

_ENGINE = "transformer_engine.pytorch"
_is_open = False


@dataclass(frozen=True)
class MegatronMesh:
    """The place of this rank among the ranks of its model. Megatron keeps the groups themselves, one set per process.

    Args:
        kind: The device that it computes on.
        control: All ranks, on gloo: scalars that decide the next step of every rank.
        data: The ranks that hold the same part of the model and other rows. It reduces tensors of the host too.
        layout: Sizes that determine which part of the model each rank holds: all ranks (`world`), the ranks along each
            axis and those that share an expert's matrices (`etp`), and the layers of pipeline ranks (0 layers are an
            equal share).
    """

    rank: int
    world_size: int
    kind: Device
    control: dist.ProcessGroup
    data: dist.ProcessGroup
    layout: Mapping[str, int]

    @classmethod
    def join(cls, rendezvous: Rendezvous, backend: MegatronConfig) -> MegatronMesh:
        """Meet the other ranks; collective. If that fails, this process is in no group afterwards.

        Raises:
            ValueError: If the world is not a multiple of the ranks that one model needs.
        """
        join_process_group(rendezvous)
        timeout = timedelta(seconds=rendezvous.timeout_s)
        try:
            with _shared_groups():
                parallel_state.initialize_model_parallel(
                    backend.tensor_model_parallel_size,
                    backend.pipeline_model_parallel_size,
                    backend.virtual_pipeline_model_parallel_size,
                    context_parallel_size=backend.context_parallel_size,
                    expert_model_parallel_size=backend.expert_model_parallel_size,
                    expert_tensor_parallel_size=backend.expert_tensor_parallel_size,
                    distributed_timeout_minutes=max(1, int(rendezvous.timeout_s // 60)),
                    # The other groups reduce tensors of the host by gloo too.
                    create_gloo_process_groups=False,
                )
            control = dist.new_group(backend="gloo", timeout=timeout)
        except BaseException:
            cls.leave()
            raise
        stages = backend.megatron_kwargs.get("pipeline_model_parallel_layout")
        layout = {
            "world": rendezvous.world_size,
            **_sizes(),
            "etp": parallel_state.get_expert_tensor_parallel_world_size(),
            "vpp": backend.virtual_pipeline_model_parallel_size or 1,
            "first_layers": backend.num_layers_in_first_pipeline_stage or 0,
            "last_layers": backend.num_layers_in_last_pipeline_stage or 0,
            **({} if stages is None else {"stages": crc32(str(stages).encode())}),
        }
        data = parallel_state.get_data_parallel_group()
        return cls(rendezvous.rank, rendezvous.world_size, rendezvous.kind, control, data, layout)

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on, as torch's object."""
        return self.kind.torch_device

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place; `ep` folds into the others."""
        index = {
            "dp": parallel_state.get_data_parallel_rank(),
            "pp": parallel_state.get_pipeline_model_parallel_rank(),
            "cp": parallel_state.get_context_parallel_rank(),
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "ep": parallel_state.get_expert_model_parallel_rank(),
        }
        return Coordinates(index, _sizes())

    def seed(self, seed: int) -> None:
        """Seed all generators: ranks that hold parts of one model on one shard's rows agree if they must."""
        place = 100 * parallel_state.get_pipeline_model_parallel_rank()
        place += 10_000 * parallel_state.get_data_parallel_rank()
        torch.manual_seed(seed + place)
        tensor_parallel.model_parallel_cuda_manual_seed(seed + place, force_reset_rng=True)

    def rng_state(self) -> dict[str, Any]:
        """Return the state of torch's generators, and of those that Megatron keeps for regions of the model."""
        return {**self.kind.rng_state(), "regions": get_cuda_rng_tracker().get_states()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `rng_state` returned."""
        self.kind.set_rng_state(state)
        get_cuda_rng_tracker().set_states(state["regions"])

    @staticmethod
    def leave() -> None:
        """Leave all groups, Megatron's and torch's, and free the buffers that were made with them."""
        close_buffers()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def _shared_groups() -> Iterator[None]:
    """Make one group where Megatron would make several of the same ranks for the same kind of traffic.

    Groups of other kinds (`DATA`, `TENSOR`, `EXPERT`, `PIPELINE` ... in their descriptions) stay apart, because
    collectives of one group wait for one another: a reduction of gradients would hold up the tokens of experts.
    """
    create, made = parallel_state.create_group, {}

    def create_once(ranks: list[int], *, group_desc: str, **options: Any) -> Any:
        key = (group_desc.partition("_")[0], tuple(ranks))
        if key not in made:
            made[key] = create(ranks, group_desc=group_desc, **options)
        return made[key]

    parallel_state.create_group = create_once
    try:
        yield
    finally:
        parallel_state.create_group = create


def _sizes() -> dict[str, int]:
    """Return the number of ranks along each axis, in the groups of this process."""
    return {
        "dp": parallel_state.get_data_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }


def open_buffers(config: TransformerConfig, lengths: Sequence[int]) -> None:
    """Create the buffers of Transformer Engine's collectives of tensor-parallel ranks that overlap with matrix
    products; collective over all ranks, before layers are built.

    Args:
        config: Config of Megatron, with `tp_comm_overlap`.
        lengths: Lengths of packed sequences, on all context-parallel ranks together. Buffers hold exactly one.

    Raises:
        ValueError: If sequences have several lengths, or the model's projections have no buffers.
    """
    global _is_open
    key = "megatron_cfg.megatron_kwargs.tp_comm_overlap"
    if config.multi_latent_attention:
        raise ValueError(f"{key}: the projections of latent attention have no buffers; remove the key")
    if len(lengths) != 1:
        raise ValueError(
            f"{key} needs packed microbatches of one length, and those of this model have {list(lengths) or 'any'}; "
            "set sequence_packing.enabled=true with the same train_mb_tokens and logprob_mb_tokens"
        )
    engine: Any = importlib.import_module(_ENGINE)
    modes = engine.UserBufferQuantizationMode
    used = [modes.FP8 if config.fp8 else modes.NONE]
    if config.fp8 and config.first_last_layers_bf16:
        used.append(modes.NONE)
    # Buffers of these products gather by default; a layer that scatters in one of them would use it the wrong way.
    is_off = {"qkv": config.tp_comm_overlap_disable_qkv, "fc1": config.tp_comm_overlap_disable_fc1}
    scattering = [name for name in is_off if config.tp_comm_overlap_rs_dgrad and not is_off[name]]
    engine.initialize_ub(
        shape=[lengths[0] // config.context_parallel_size, config.hidden_size],
        tp_size=config.tensor_model_parallel_size,
        quantization_modes=used,
        dtype=config.params_dtype,
        ub_cfgs={f"{name}_dgrad": {"method": "ring_exchange"} for name in scattering} or None,
        bootstrap_backend=config.tp_comm_bootstrap_backend,
    )
    _is_open = True


def close_buffers() -> None:
    """Free the buffers, if there are any."""
    global _is_open
    if _is_open:
        engine: Any = importlib.import_module(_ENGINE)
        engine.destroy_ub()
        _is_open = False
