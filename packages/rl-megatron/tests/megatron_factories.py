"""Workers for the suites, built in the processes of a rank pool."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from rl_core.devices import CpuDevice, DeviceMemory
from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import ModelConfig
from rl_core.selfcheck.pooled_model import HELD
from rl_core.selfcheck.rank_pool import Rank
from rl_core.torch.training.memory import GAPS
from rl_megatron.config import MegatronConfig
from rl_megatron.worker import MegatronWorker


def build(config: ModelConfig, spec: ModelSpec, rendezvous: Rendezvous, **settings: object) -> MegatronWorker:
    return MegatronWorker(config, MegatronConfig(**settings), spec, rendezvous)


def kept_tensors(rank: Rank) -> dict[str, np.ndarray]:
    """Tensors that steps change, as a rank holds them, by Megatron's name."""
    kept = rank.held[HELD]._weights.kept
    return {name: tensor.detach().float().numpy().copy() for name, tensor in kept.items()}


def forget_engine(rank: Rank) -> None:
    """Leave Megatron's functions for experts as they are imported where Transformer Engine is not installed."""
    from megatron.core.transformer.moe import moe_utils

    assert not moe_utils.HAVE_TE
    vars(moe_utils).pop("te_general_gemm", None)


def multiple_of(rank: Rank, recipe: str | None) -> int:
    """Of how many tokens products take a multiple, in 8 bits with a recipe or without."""
    from rl_megatron.model.model import token_multiple

    return token_multiple(SimpleNamespace(fp8=None if recipe is None else "hybrid", fp8_recipe=recipe))


def count_row_attention(rank: Rank, window: int | None, context_size: int) -> int:
    """How many of four layers beside Transformer Engine have this package's attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from rl_megatron.model.attention import RowAttention
    from rl_megatron.model.layers import adapt_layers

    config = SimpleNamespace(
        window_size=None if window is None else (window - 1, 0),
        context_parallel_size=context_size,
        attention_output_gate=False,
        softmax_type="vanilla",
    )
    spec = TransformerBlockSubmodules(layer_specs=[get_gpt_layer_local_spec() for _ in range(4)])
    adapt_layers(spec, config, has_te=True)
    return sum(layer.submodules.self_attention.submodules.core_attention is RowAttention for layer in spec.layer_specs)


def fixed_lengths(rank: Rank) -> list[int]:
    """Lengths to which packed microbatches are padded."""
    return list(rank.held[HELD]._model.reading.alignment.lengths)


def count_shapes(rank: Rank) -> int:
    """How often this pipeline rank has exchanged the shapes of tensors since the call before; the first begins."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    if "shapes" not in rank.held:
        exchange = P2PCommunicator._communicate_shapes
        rank.held["shapes"] = mock.patch.object(P2PCommunicator, "_communicate_shapes", autospec=True)
        rank.held["shapes"].start().side_effect = exchange
        return 0
    counted = P2PCommunicator._communicate_shapes.call_count
    rank.held.pop("shapes").stop()
    return int(counted)


def count_8_bit_copies(rank: Rank, adds: bool = True) -> int:
    """Copies that a layer keeps as those of Transformer Engine do, one more first."""
    (chunk,) = rank.held[HELD]._model.reading.chunks
    kept = vars(chunk.decoder.layers[0].mlp.linear_fc1).setdefault("_fp8_workspaces", {})
    if adds:
        kept["weight"] = object()
    return len(kept)


def layers_held(rank: Rank) -> list[int]:
    """Numbers of this rank's layers in the whole model, from 1, stage by stage."""
    chunks = rank.held[HELD]._model.reading.chunks
    return [layer.layer_number for chunk in chunks for layer in chunk.decoder.layers]


def note_runs_without_gradients(rank: Rank) -> None:
    """Have each layer of a pipeline rank note that it runs without gradients, as one that is computed again later."""
    import torch

    def note(layer: Any, _: object) -> None:
        layer.ran_without_gradients |= not torch.is_grad_enabled()

    for layer in rank.held[HELD]._model.reading.chunks[0].decoder.layers:
        layer.ran_without_gradients = False
        layer.register_forward_pre_hook(note)


def layers_run_without_gradients(rank: Rank) -> list[int]:
    """Numbers of the layers that have run so, from 1."""
    layers = rank.held[HELD]._model.reading.chunks[0].decoder.layers
    return [layer.layer_number for layer in layers if layer.ran_without_gradients]


def latent_rotary(rank: Rank, settings: dict[str, Any], dim: int, length: int) -> dict[str, Any]:
    """Cosines and sines `[length, dim]` that latent attention rotates with, and the factor of its softmax scale.

    Args:
        settings: Fields of Megatron's config for the rotary embedding.
        dim: Dims that are rotated.
    """
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_mscale

    from rl_megatron import cpu_shim

    cpu_shim.install()
    given = dict(settings)
    kind, factor, all_dim = given.pop("rope_type"), given["rotary_scaling_factor"], given["mscale_all_dim"]
    if kind == "rope":
        rotary = RotaryEmbedding(dim, rotary_percent=1.0, rotary_base=given["rotary_base"])
        angles, scale = rotary.get_emb(length), 1.0
    else:
        given["scaling_factor"] = given.pop("rotary_scaling_factor")
        angles, scale = YarnRotaryEmbedding(dim, **given).get_emb(length)
    return {
        "cosines": (angles.cos() * scale)[:, 0, 0].numpy(),
        "sines": (angles.sin() * scale)[:, 0, 0].numpy(),
        "attention_scale": _yarn_get_mscale(factor, all_dim) ** 2,
    }


def dropout_rates(rank: Rank) -> dict[str, set[float]]:
    """Shares that attention and adapters of the model drop in training."""
    (chunk,) = rank.held[HELD]._model.reading.chunks
    layers = [layer.self_attention for layer in chunk.decoder.layers]
    return {
        "attention": {layer.core_attention.attention_dropout for layer in layers},
        "adapters": {layer.linear_qkv.adapters.dropout for layer in layers},
    }


def hidden_dropout(rank: Rank, rate: float, compares: bool) -> set[float]:
    """Shares of hidden states that layers and the embedding drop in training, with a config that says so."""
    reading = rank.held[HELD]._model.reading
    reading.config.hidden_dropout = rate
    reading.train(True, compares=compares)
    (chunk,) = reading.chunks
    return {chunk.embedding.embedding_dropout.p, *(layer.hidden_dropout for layer in chunk.decoder.layers)}


def whole_weights(rank: Rank) -> tuple[list[int], dict[str, np.ndarray]]:
    """The ranks that hold whole weights, and those of this rank by Hugging Face name; none if it holds none."""
    weights = rank.held[HELD]._weights
    stream = [named for tensors in weights.stream("float32") for named in tensors]
    return list(weights.holders), {name: tensor.numpy().copy() for name, tensor in stream if tensor is not None}


def kept_by_layers(rank: Rank, lengths: list[int]) -> list[float]:
    """Bytes per token that each layer keeps for its backward pass, counted in a forward pass of packed rows."""
    import torch

    from rl_core.data.batch import TOKENS
    from rl_core.torch.loss import Rows

    reading = rank.held[HELD]._model.reading
    (chunk,) = reading.chunks
    layers = list(chunk.decoder.layers)
    kept: list[dict[int, torch.UntypedStorage]] = [{} for _ in layers]
    parameters = {each.untyped_storage()._cdata for each in chunk.parameters()}
    running: int | None = None

    def enter(number: int | None) -> None:
        nonlocal running
        running = number

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if running is not None and storage._cdata not in parameters:
            kept[running][storage._cdata] = storage
        return tensor

    # a layer that is recomputed has its input saved after it has run
    hooks = [layer.register_forward_pre_hook(lambda *_, at=at: enter(at)) for at, layer in enumerate(layers)]
    hooks.append(chunk.decoder.final_layernorm.register_forward_pre_hook(lambda *_: enter(None)))
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    rows = Rows(offsets, {TOKENS: torch.arange(int(offsets[-1])) % reading.hf.vocab_size})
    layout = reading.lay_out(rows)
    reading.train(True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunk(layout.input_ids, layout.position_ids, None, packed_seq_params=layout.packing)
    for hook in hooks:
        hook.remove()
    return [sum(storage.nbytes() for storage in each.values()) / sum(lengths) for each in kept]


def show_memory(rank: Rank, room: int) -> None:
    """Have the cores of this process show a device's memory, of which a step of one rank may take `room` bytes."""
    available = round(room / (1 - GAPS)) + 1
    CpuDevice.memory = lambda self: DeviceMemory(10**13, available, 0, 0)


def hide_memory(rank: Rank) -> None:
    """Undo `show_memory`."""
    del CpuDevice.memory


def switched_on(rank: Rank) -> list[str]:
    """The attributes of all modules that are true."""
    (chunk,) = rank.held[HELD]._model.reading.chunks
    return sorted(
        f"{name}.{key}"
        for name, module in chunk.named_modules()
        for key, value in vars(module).items()
        if value is True
    )


def set_full_recomputation(rank: Rank) -> None:
    """Recompute all layers of a model that was built without recomputation."""
    config = rank.held[HELD]._model.reading.config
    config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1


def estimated_by_layers(rank: Rank, modules: list[str]) -> list[Any]:
    """The estimate of the same, as `LayerActivations`."""
    from rl_megatron.model.recompute import LayerShapes

    config = rank.held[HELD]._model.reading.config
    shapes = LayerShapes(config, has_te=False, longest=1)
    return [shapes.activations(layer, modules) for layer in shapes.layers()]


def num_parameters(rank: Rank) -> tuple[int, float]:
    """Parameters of a rank's weight matrices, and the estimate of them."""
    from rl_megatron.model.recompute import LayerShapes, rank_parameters

    worker = rank.held[HELD]
    reading, mesh = worker._model.reading, worker._mesh
    found = sum(each.numel() for each in reading.parameters() if each.dim() > 1)
    layers = LayerShapes(reading.config, has_te=False, longest=1).layers()
    estimate = rank_parameters(reading.hf, reading.config, layers[-len(layers) // mesh.layout["pp"] :], mesh)
    return found, sum(estimate)


def save_as_megatron(rank: Rank, folder: str, arguments: dict[str, Any]) -> None:
    """Write a model as Megatron-LM does: its own names, in the format `torch_dist`, with the run's arguments."""
    import multiprocessing
    import queue
    from argparse import Namespace

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Megatron writes in processes of its own, which ranks of the pool may not have, and starts another one for a queue
    multiprocessing.current_process()._config["daemon"] = False
    filesystem_async._results_queue = queue.Queue()

    reading = rank.held[HELD]._model.reading
    tensors: dict[str, Any] = {}
    for chunk in reading.chunks:
        tensors |= chunk.sharded_state_dict(metadata={})
    dist_checkpointing.save({"model": tensors, "args": Namespace(**arguments), "iteration": 7}, folder)


def train_plain_megatron(rank: Rank, settings: dict[str, Any], folder: str, fields: dict[str, Any]) -> np.ndarray:
    """Train megatron-core's own `GPTModel` for two steps by its own schedule and optimizer, save it as
    Megatron-LM does, and return its logits of 12 tokens, `[tokens, vocab]`, on ranks of the last stage."""
    import multiprocessing
    import queue
    from argparse import Namespace

    import torch
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    from rl_megatron import cpu_shim

    cpu_shim.install()
    vars(moe_utils).setdefault("te_general_gemm", None)  # Without Transformer Engine, 0.16.1 does not define it.
    multiprocessing.current_process()._config["daemon"] = False
    filesystem_async._results_queue = queue.Queue()
    backend, meeting = MegatronConfig(**settings), rank.rendezvous
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{meeting.address}:{meeting.port}", rank=meeting.rank, world_size=meeting.world_size
    )
    parallel_state.initialize_model_parallel(
        backend.tensor_model_parallel_size,
        backend.pipeline_model_parallel_size,
        expert_model_parallel_size=backend.expert_model_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layernorm_epsilon=1e-6,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=backend.tensor_model_parallel_size,
        pipeline_model_parallel_size=backend.pipeline_model_parallel_size,
        expert_model_parallel_size=backend.expert_model_parallel_size,
        sequence_parallel=backend.sequence_parallel,
        finalize_model_grads_func=finalize_model_grads,
        **fields,
    )
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=101 + 27,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=10000,
    )
    # The distributed optimizer of megatron-core takes tensors of CUDA only.
    reduction = DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, reduction, model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0), [wrapped])
    tokens = torch.arange(12)[None] * 7 % 101
    positions, mask = torch.arange(12)[None], torch.ones(1, 1, 12, 12).triu(1).bool()

    def forward(_: Any, chunk: Any) -> Any:
        labels = tokens.roll(-1, 1)
        return chunk(tokens, positions, mask, labels=labels), lambda losses: (losses.mean(), {})

    for _ in range(2):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=wrapped,
            num_microbatches=2,
            seq_length=12,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
    weights = model.sharded_state_dict()
    arguments = {"num_attention_heads": 4, "norm_epsilon": 1e-6, "rotary_base": 10000, "kv_channels": 8}
    content = {
        "model": weights,
        "args": Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": 2,
        "optimizer": optimizer.sharded_state_dict(weights),
        "opt_param_scheduler": {"max_lr": 1e-2, "num_steps": 2},
    }
    dist_checkpointing.save(content, folder)
    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=lambda _, chunk: (
                chunk(tokens, positions, mask),
                lambda logits, non_loss_data=False: logits,
            ),
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=12,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    logits = np.zeros((0, 0))
    if parallel_state.is_pipeline_last_stage():
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(found[0].contiguous())
        logits = whole[0, :, :101].detach().numpy().copy()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return logits


def note_features_of_blocks(rank: Rank) -> None:
    """Have the last block of a vision tower of Qwen note whether its results have gradients."""

    def note(module: Any, inputs: object, output: Any) -> None:
        rank.held.setdefault("blocks", set()).add(output.requires_grad)

    rank.held[HELD]._model.reading.chunks[0].vision.visual.blocks[-1].register_forward_hook(note)


def blocks_had_gradients(rank: Rank) -> set[bool]:
    """What `note_features_of_blocks` has noted."""
    return set(rank.held.pop("blocks"))
