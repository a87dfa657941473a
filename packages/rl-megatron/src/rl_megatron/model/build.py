"""Build this rank's part of a model, and check beforehand that it can be built."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rl_core.data.microbatch import Batching
from rl_core.model import HEADLESS_ROLES, ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.torch.files.model_files import WeightFiles, read_hf_config, untie_apart
from rl_megatron.config import MegatronConfig
from rl_megatron.conversion.splits import padded_vocab
from rl_megatron.engine_names import restore_names
from rl_megatron.families.catalog import family_of
from rl_megatron.families.rotary import inverse_frequencies
from rl_megatron.families.supported import image_problems, refuse, rotary_kinds
from rl_megatron.model.architecture import has_engine_layers, transformer_config
from rl_megatron.model.attention import disable_transformer_engine, patch_down_projections, set_latent_epsilon
from rl_megatron.model.layers import block_spec, patch_expert_biases
from rl_megatron.model.layout import row_multiple, up
from rl_megatron.model.lora import targeted_adapters
from rl_megatron.model.model import EMBEDDING, LM_HEAD, Chunk, ReadingModel, ScoreHead, alignment_of
from rl_megatron.model.recompute import recompute_fields, recomputed_modules
from rl_megatron.model.routing import MegatronReplay, Routing
from rl_megatron.model.vision import MegatronVision
from rl_megatron.parallel.mesh import MegatronMesh, open_buffers


def check_design(config: ModelConfig, backend: MegatronConfig, folder: Path, *, is_cuda: bool) -> None:
    """Raise the errors of building a model, without weights and ranks. It calls the functions that build the model.

    Args:
        config: Config of the model.
        backend: Settings of the backend.
        folder: Folder of the model's files.
        is_cuda: True if the model is to run on GPUs.

    Raises:
        ValueError: If the model, the settings and the layout do not fit together.
    """
    hf, whole = _read_configs(config, backend, folder)
    has_te = has_engine_layers(backend, is_cuda=is_cuda, has_adapters=config.lora_cfg.enabled)
    dtype = getattr(torch, config.precision)
    megatron = transformer_config(hf, backend, dtype=dtype, is_cuda=is_cuda, has_te=has_te)
    if backend.recompute not in ("none", "full"):
        recomputed_modules(backend, megatron, has_te=has_te)
    family = family_of(hf)
    maps = family.weights(hf)
    known_as: Callable[[str], str] = str
    if whole is not None:
        vision = MegatronVision(whole, config, folder)
        maps, known_as = vision.maps(maps), vision.names.__getitem__
    if config.lora_cfg.enabled:
        num_ranks = backend.tensor_model_parallel_size
        targeted_adapters(maps, hf.model_type, config.lora_cfg, num_ranks, known_as=known_as)
    tensor = backend.tensor_model_parallel_size
    sizes = {"tp": tensor, "etp": backend.expert_tensor_parallel_size or tensor}
    for entry in maps:
        entry.check_split(sizes[entry.over])
    if not megatron.multi_latent_attention:
        for kind in rotary_kinds(hf.rope_parameters):
            inverse_frequencies(hf, family.rotary_dim(hf), kind)


def build_model(
    config: ModelConfig, backend: MegatronConfig, spec: ModelSpec, *, folder: Path, is_packed: bool, mesh: MegatronMesh
) -> ReadingModel:
    """Build this rank's part without weights.

    Raises:
        ValueError: If the files, the config, the layout and the role do not fit together.
    """
    hf, whole = _read_configs(config, backend, folder)
    is_headless = spec.role in HEADLESS_ROLES
    if whole is not None and is_headless:
        raise ValueError(f"vision.enabled: is not supported for a {spec.role}, whose head has one output; use false")
    vision = None if whole is None else MegatronVision(whole, config, folder)
    if hf.tie_word_embeddings and not is_headless:
        pair = (EMBEDDING, LM_HEAD) if vision is None else (vision.file_name(EMBEDDING), vision.file_name(LM_HEAD))
        if untie_apart(hf, [pair], WeightFiles.of(folder, is_whole=vision is not None), mesh.control) and whole:
            whole.tie_word_embeddings = False
    is_cuda = mesh.kind.kernels == "cuda"
    has_te = has_engine_layers(backend, is_cuda=is_cuda, has_adapters=config.lora_cfg.enabled)
    if has_te:
        restore_names()
    configured = partial(
        transformer_config, hf, backend, dtype=getattr(torch, config.precision), is_cuda=is_cuda, has_te=has_te
    )
    recompute, memory = recompute_fields(
        config, backend, hf, configured(), mesh=mesh, has_te=has_te, trains=spec.trains, whole=whole
    )
    megatron = configured(recompute=recompute)
    budgets: tuple[int, ...] = ()
    if is_packed and backend.pads_microbatches:
        # A row longer than a microbatch, in training or in forward-only passes, fills a whole one.
        longest = up(config.max_total_sequence_length, row_multiple(backend.context_parallel_size))
        each = [Batching.of(config, training=training).max_tokens or 0 for training in (True, False)]
        budgets = tuple(max(tokens, longest) for tokens in each)
    alignment = alignment_of(megatron, budgets)
    if megatron.tp_comm_overlap:
        # Layers look for their buffers when they are built.
        open_buffers(megatron, alignment.lengths)
    virtual = backend.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if virtual is None else list(range(virtual))
    chunks = [chunk_of(hf, megatron, stage, has_te=has_te, is_headless=is_headless, vision=vision) for stage in stages]
    if backend.freeze_moe_router:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if ".router." in name:
                    parameter.requires_grad_(False)
    return ReadingModel(
        chunks,
        megatron,
        hf,
        spec.role,
        has_te,
        config.logprob_chunk_size,
        is_packed,
        alignment,
        routing=None if megatron.num_moe_experts is None else Routing(chunks, megatron),
        replay=MegatronReplay(chunks, megatron) if backend.moe_router_replay else None,
        asks_for_dropout=any(name.endswith("dropout") for name in config.hf_config_overrides),
        memory=memory,
        vision=vision,
    )


def _read_configs(
    config: ModelConfig, backend: MegatronConfig, folder: Path
) -> tuple[PreTrainedConfig, PreTrainedConfig | None]:
    """Return the Hugging Face configs of a language model, and of the whole model if it sees images.

    Raises:
        ValueError: If the model does not train with these settings of images.
    """
    if not config.vision.enabled:
        return read_hf_config(folder, config.hf_config_overrides), None
    whole = read_hf_config(folder, config.hf_config_overrides, is_whole=True)
    refuse(next(image_problems(config, backend, whole.to_dict()), None))
    hf = whole.get_text_config()
    hf.tie_word_embeddings = whole.tie_word_embeddings
    return hf, whole


def chunk_of(
    hf: PreTrainedConfig,
    config: TransformerConfig,
    virtual_stage: int | None,
    *,
    has_te: bool,
    is_headless: bool,
    vision: MegatronVision | None,
) -> Chunk:
    """Build a run of consecutive layers of this rank.

    Args:
        hf: Hugging Face config of the language model.
        config: Megatron's config of the model and the layout.
        virtual_stage: Number of the run among the runs of the rank; None if it has one.
        has_te: True if the layers are Transformer Engine's.
        is_headless: True for a head of one output.
        vision: Vision tower and projector; None for a language model.
    """
    place: dict[str, Any] = {} if virtual_stage is None else {"ignore_virtual": False, "vp_stage": virtual_stage}
    is_last = parallel_state.is_pipeline_last_stage(**place)
    is_mla, family = config.multi_latent_attention, family_of(hf)
    if is_mla and not has_te:
        disable_transformer_engine()
    chunk = Chunk(
        config,
        block_spec(
            config,
            family,
            has_te=has_te,
            virtual_stage=virtual_stage,
            has_axes=vision is not None and vision.rotary is not None,
        ),
        vocab_size=padded_vocab(hf.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=is_last,
        position_embedding_type="none" if is_mla else "rope",
        share_embeddings_and_output_weights=bool(hf.tie_word_embeddings) and not is_headless,
        vp_stage=virtual_stage,
    )
    if chunk.pre_process and hf.pad_token_id is not None:
        freeze_padding_token(chunk.embedding.word_embeddings, hf.pad_token_id, is_scattered=config.sequence_parallel)
    if chunk.pre_process and family.embedding_scale is not None:
        scale_embedding(chunk.embedding.word_embeddings, family.embedding_scale(hf))
    if is_mla:
        set_latent_epsilon(chunk)
        if not has_te:
            patch_down_projections(chunk)
    if config.add_bias_linear:
        patch_expert_biases(chunk)
    if not is_mla:
        rotate_by_kind(chunk, hf, family.rotary_dim(hf))
    if vision is not None:
        vision.add_to(chunk)
    if is_last and is_headless:
        del chunk.output_layer
        chunk.score = ScoreHead(config.hidden_size)
    return chunk


def rotate_by_kind(chunk: Chunk, hf: PreTrainedConfig, dim: int) -> None:
    """Set the frequencies that the layers of a chunk rotate with, which may differ between kinds of layers.

    Megatron makes one rotary embedding for all layers. With several kinds it has the frequencies of each in turn, and
    each layer takes its own.

    Args:
        chunk: Layers of this rank.
        hf: Hugging Face config of the model.
        dim: Dims of a head that are rotated.
    """
    kinds = rotary_kinds(hf.rope_parameters)
    frequencies = torch.cat([inverse_frequencies(hf, dim, kind) for kind in kinds])
    chunk.rotary_pos_emb.inv_freq = frequencies.to(chunk.rotary_pos_emb.inv_freq.device)
    if len(kinds) == 1:
        return
    for layer in chunk.decoder.layers:
        place = kinds.index(hf.layer_types[layer.layer_number - 1])
        layer.self_attention.register_forward_pre_hook(partial(_take_own_angles, place, len(kinds)), with_kwargs=True)


def _take_own_angles(
    place: int, num_kinds: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Select the angles of one kind of layer among `[seq, 1, 1, 2 * kinds * dim / 2]`."""
    own = kwargs["rotary_pos_emb"].unflatten(-1, (2, num_kinds, -1))[..., place, :].flatten(-2)
    return args, {**kwargs, "rotary_pos_emb": own}


def scale_embedding(embedding: nn.Module, scale: float) -> None:
    """Multiply the output of an embedding by a number, rounded to the output's dtype as in transformers."""
    embedding.register_forward_hook(lambda _, __, output: output * torch.tensor(scale).to(output))


def freeze_padding_token(embedding: nn.Module, pad_token_id: int, *, is_scattered: bool) -> None:
    """Let no gradient reach an embedding from positions that look up the padding token (`padding_idx`): Hugging Face's
    models never train it through their inputs.

    Args:
        embedding: The word embedding of the first pipeline rank.
        pad_token_id: Token id at whose positions no gradient passes.
        is_scattered: True if its output is spread over the tensor-parallel ranks by sequence parallelism.
    """

    def detach(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        is_padding = inputs[0] == pad_token_id  # [batch, seq]
        if is_scattered:
            size = parallel_state.get_tensor_model_parallel_world_size()
            is_padding = is_padding.T.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        return torch.where(is_padding[..., None], output.detach(), output).contiguous()

    embedding.register_forward_hook(detach)
