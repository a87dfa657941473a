"""A model built from its files: on `meta`, split, sharded, then loaded."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from rl_core.model import HEADLESS_ROLES, ModelSpec, Role
from rl_core.model_config import ModelConfig
from rl_core.torch.collective_errors import on_all_ranks
from rl_core.torch.files.model_files import WeightFiles, read_hf_config
from rl_core.torch.heads.scalar import new_head
from rl_core.torch.heads.vocab_parallel import VocabShard
from rl_core.torch.kernels.devices import runs_kernels
from rl_core.torch.training.lora import InitialFactors
from rl_core.torch.training.recompute import RecomputePlan
from rl_core.torch.training.ties import untie_apart
from rl_dtensor.config import AttentionBackend, DTensorConfig
from rl_dtensor.model.attention import ROWS, RowsUnknown, attention_for, rows_problem, tell_chunks
from rl_dtensor.model.compilation import compile_layers
from rl_dtensor.model.expert_layers import dispatch_experts
from rl_dtensor.model.flash import activate_flash_attention
from rl_dtensor.model.fusion import fuse_layers
from rl_dtensor.model.kernels import kernel_of
from rl_dtensor.model.layout import Alignment, Context, lay_out
from rl_dtensor.model.loading import rebuild_buffers, set_head
from rl_dtensor.model.lora import BASE, adapters_of, add_adapters, init_adapters
from rl_dtensor.model.low_precision import lower_precision, token_multiple
from rl_dtensor.model.low_precision_checks import low_precision_problems
from rl_dtensor.model.model import HeadShard, ReadingModel, ShardedModel
from rl_dtensor.model.precision import Kept, widen
from rl_dtensor.model.probes import check_logits, check_packing, probe_row
from rl_dtensor.model.qat import fit_to_ranks, formats_of
from rl_dtensor.model.recompute import checkpoint_activations
from rl_dtensor.model.recompute_choice import recompute_plan
from rl_dtensor.model.recurrent import run_rows_alone
from rl_dtensor.model.replay import Replay
from rl_dtensor.model.rope import fix_frequencies
from rl_dtensor.model.settings import device_problems, kernel_problems, largest_head
from rl_dtensor.model.shape import shape_of
from rl_dtensor.model.tiny import is_dropout
from rl_dtensor.model.units import ends_of, units_of
from rl_dtensor.model.vision.build import VisionParts, build_problems, vision_of
from rl_dtensor.model.vision.vision import Vision
from rl_dtensor.model.weights import SCORE, Catalog, Weights, persistent, tied_pairs
from rl_dtensor.parallel.body import body_of, is_composite
from rl_dtensor.parallel.dispatch import Dispatch
from rl_dtensor.parallel.dispatchers import dispatcher
from rl_dtensor.parallel.experts import expert_modules, split_experts
from rl_dtensor.parallel.fsdp import shard_model
from rl_dtensor.parallel.mesh import Mesh
from rl_dtensor.parallel.plan import plan_of
from rl_dtensor.parallel.sizes import shape_problems
from rl_dtensor.parallel.stages import Stages
from rl_dtensor.parallel.tensor import part_of, split_tensors

LM_HEAD = "lm_head.weight"


def build_model(
    config: ModelConfig, backend: DTensorConfig, spec: ModelSpec, *, folder: Path, is_packed: bool, mesh: Mesh
) -> ShardedModel:
    """Build on `meta`, split, shard, then load this rank's slices; collective.

    Parameters that train are float32. The others have the compute dtype, except those that stay float32
    (`rl_dtensor.model.precision`).

    Raises:
        ValueError: If the files, the config, the mesh and the role do not fit together.
    """
    hf_config = read_hf_config(folder, config.hf_config_overrides, is_whole=config.vision.enabled)
    problems = (
        *build_problems(config.vision, backend, hf_config, spec.role),
        *device_problems(backend, precision=config.precision, device=mesh.kind),
        *shape_problems(backend, _fields(hf_config)),
        *kernel_problems(backend, _fields(hf_config)),
        *low_precision_problems(backend, config.lora_cfg, precision=config.precision, device=mesh.kind),
    )
    for problem in problems:
        raise ValueError(f"{problem.key}: {problem.message}")
    if backend.attention_backend == "auto" and mesh.kind.runs_on_gpus:
        activate_flash_attention(largest_head(_fields(hf_config)))
    initial = InitialFactors.of(config.lora_cfg, spec.seed, is_whole=config.vision.enabled)
    files = WeightFiles.of(folder, is_whole=config.vision.enabled)
    model = unloaded_model(config, backend, spec, hf_config, files=files, is_packed=is_packed, mesh=mesh)
    _load(model, files, role=spec.role, initial=initial)
    if spec.role not in HEADLESS_ROLES:
        on_all_ranks(mesh.control, lambda: check_logits(model, mesh))
        on_all_ranks(mesh.control, lambda: check_packing(model, mesh))
    return model


def unloaded_model(
    config: ModelConfig,
    backend: DTensorConfig,
    spec: ModelSpec,
    hf_config: PreTrainedConfig,
    *,
    files: WeightFiles,
    is_packed: bool,
    mesh: Mesh,
) -> ShardedModel:
    """Build on `meta`, split and shard, and leave the weights without values; collective.

    Args:
        config: Model, as the run configures it.
        backend: Mesh, recomputation and kernels.
        spec: Purpose of the model.
        hf_config: Hugging Face config of the model; changed if the files hold apart what it ties.
        files: Files of the model, of which only the dtypes and tied weights are looked at.
        is_packed: True if rows lie end to end.
        mesh: Mesh of the run.
    """
    builder = _Builder(config, backend, spec, hf_config, files, is_packed, mesh)
    return builder.build(InitialFactors.of(config.lora_cfg, spec.seed, is_whole=config.vision.enabled))


@dataclass
class _Builder:
    config: ModelConfig
    backend: DTensorConfig
    spec: ModelSpec
    hf_config: PreTrainedConfig
    files: WeightFiles
    is_packed: bool
    mesh: Mesh

    def build(self, initial: InitialFactors) -> ShardedModel:
        """All chunks of this rank, sharded and without weights.

        Args:
            initial: That its adapters will start from.
        """
        sizes, backend = self.mesh.sizes, self.backend
        whole = self._on_meta()
        while untie_apart(self.hf_config, tied_pairs(whole), self.files, self.mesh.control):
            whole = self._on_meta()
        if sizes.ep > 1 and not expert_modules(whole):
            raise ValueError(
                f"dtensor_cfg.expert_parallel_size is {sizes.ep} and {whole.config.model_type} models have no "
                "stacked experts, and only stacked experts can be split over ranks; set it to 1"
            )
        num_stages = sizes.pp * backend.pipeline_chunks_per_rank
        stages = Stages.of(whole, num_stages) if num_stages > 1 else None
        catalog = Catalog.of(whole, (lambda name: 0) if stages is None else stages.stage_of)
        kept = Kept.of(whole, catalog, self.files, self._compute)
        parameters = {name for name, _ in whole.named_parameters()}
        replicates = self._trains_all and not kept.computed.isdisjoint(parameters)
        recompute = RecomputePlan()
        if self.spec.trains:
            layers = decoder_layers(whole)
            recompute = recompute_plan(self.config, backend, whole, layers, mesh=self.mesh, trains_all=self._trains_all)
        self._prepare(whole, kept)
        initial.check(adapters_of(whole))
        shape, formats = shape_of(whole), formats_of(whole)
        here = [chunk * sizes.pp + self.mesh.on("pp") for chunk in range(backend.pipeline_chunks_per_rank)]
        wholes = [whole, *(self._prepare(self._on_meta(), kept) for _ in here[1:])]
        chunks = [self._chunk(hf, stages, stage, kept, recompute) for hf, stage in zip(wholes, here, strict=True)]
        served = formats if self.backend.qat.sync == "rounded" else {}
        weights = Weights(catalog.keeping(kept.stored), [chunk.hf for chunk in chunks], self.mesh, served)
        return ShardedModel(
            chunks,
            here,
            num_stages,
            compute=self._compute,
            weights=weights,
            shape=shape,
            mesh=self.mesh,
            is_adapted=self.config.lora_cfg.enabled,
            asks_for_dropout=any(map(is_dropout, self.config.hf_config_overrides)),
            replicated=[each for chunk in chunks for each in self._replicated(chunk, kept)] if replicates else None,
        )

    @property
    def _compute(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.config.precision)
        return dtype

    @property
    def _trains_all(self) -> bool:
        return self.spec.trains and not self.config.lora_cfg.enabled

    def _on_meta(self) -> PreTrainedModel:
        """The whole model in the compute dtype."""
        return model_on_meta(
            self.hf_config,
            self.spec.role,
            self.backend.attention_backend,
            dtype=self._compute,
            is_packed=self.is_packed,
            is_split=self.mesh.sizes.cp > 1 or self.backend.sequence_parallel,
            longest_row=self.config.max_total_sequence_length,
        )

    def _prepare(self, hf: PreTrainedModel, kept: Kept) -> PreTrainedModel:
        """The same model in the dtypes that it is held in, with adapters if the config asks for them."""
        if self._fuses:
            fuse_layers(hf, decoder_layers(hf))
        if self.mesh.experts is not None:
            dispatch_experts(hf, self._dispatch, fused=self._fuses)
        if self.backend.compile:
            compile_layers(hf, decoder_layers(hf))
        parts = VisionParts.of(hf, self.config.vision)
        widen(hf, self._widened(hf, kept, parts))
        hf.requires_grad_(self._trains_all)
        parts.freeze(hf)
        if self.config.lora_cfg.enabled:
            with torch.device("meta"):
                add_adapters(hf, self.config.lora_cfg, is_left_out=parts.has_no_adapter)
            if self.spec.trains:
                _widen_trained(hf)
        lower_precision(hf, decoder_layers(hf), self.backend, kept.stored)
        return hf

    def _widened(self, hf: PreTrainedModel, kept: Kept, parts: VisionParts) -> Set[str] | None:
        """Names of the tensors that are held in float32; None for all."""
        if not self._trains_all:
            return kept.stored
        frozen = parts.frozen(hf)
        return kept.stored | (persistent(hf).keys() - frozen) if frozen else None

    @property
    def _fuses(self) -> bool:
        return self.backend.fused_kernels and runs_kernels(self.mesh.device)

    @cached_property
    def _dispatch(self) -> Dispatch:
        """Transport of tokens to experts, for all layers of this rank."""
        hidden = self.hf_config.get_text_config().hidden_size
        return dispatcher(self.backend.expert_dispatcher, self.mesh, hidden, fused=self._fuses)

    def _replicated(self, model: ReadingModel, kept: Kept) -> list[nn.Parameter]:
        """Parameters that compute in float32 and so are left out of FSDP, whose groups compute in one dtype. Those of
        the head are sharded as a group, as they may be large."""
        heads = {id(parameter) for module in self._wide(model, kept) for parameter in module.parameters()}
        return [
            parameter
            for name, parameter in model.hf.named_parameters()
            if name.replace(BASE, "") in kept.computed and id(parameter) not in heads
        ]

    def _wide(self, model: ReadingModel, kept: Kept) -> list[nn.Module]:
        """The head, if it computes in float32."""
        if not model.is_last:
            return []
        if self.spec.role in HEADLESS_ROLES:
            return [model.hf.get_submodule("score")]
        named = {id(parameter): name for name, parameter in model.hf.named_parameters()}
        head = model.hf.get_output_embeddings()
        is_kept = {named[id(parameter)].replace(BASE, "") in kept.computed for parameter in head.parameters()}
        return [head] if is_kept == {True} else []

    def _chunk(
        self, hf: PreTrainedModel, stages: Stages | None, stage: int, kept: Kept, recompute: RecomputePlan
    ) -> ReadingModel:
        backend, mesh, role = self.backend, self.mesh, self.spec.role
        is_last = stages is None or stage == stages.count - 1
        is_headless = role in HEADLESS_ROLES
        vocab, final_norm = None, None
        plan = {}
        if mesh.sizes.tp > 1:
            plan = plan_of(hf, backend.custom_parallel_plan, decoder_layers(hf))
            final_norm = Stages.of(hf, 1).final_norm if backend.sequence_parallel and is_last else None
            if not is_headless:
                vocab = self._vocab_shard(hf)
        replay = None
        if backend.moe_router_replay:
            split = mesh.sizes.tp > 1 and backend.sequence_parallel
            replay = Replay(hf, (mesh.on("tp"), mesh.sizes.tp) if split else (0, 1))
        ends = ends_of(hf) if stages is None else (stages.embedding, stages.final_norm)
        if stages is not None:
            stages.cut(hf, stage)
        if mesh.sizes.tp > 1:
            split_tensors(
                hf,
                plan,
                mesh.dense["tp"],
                layers=decoder_layers(hf),
                sequence_parallel=backend.sequence_parallel,
                final_norm=final_norm,
                has_split_head=not is_headless,
                apart=[] if mesh.experts is None else expert_modules(hf),
            )
            fit_to_ranks(hf)
        experts = [] if mesh.experts is None else self._split_experts(hf, mesh.experts)
        checkpoint_activations(hf, decoder_layers(hf), recompute)
        model = ReadingModel(
            hf,
            role,
            attend=kernel_of(backend.attention_backend),
            chunk_size=self.config.logprob_chunk_size,
            alignment=self._alignment(),
            is_packed=self.is_packed,
            is_last=is_last,
            head=HeadShard(vocab, backend.sequence_parallel),
            replay=replay,
            vision=self._vision(hf),
        )
        self._shard(model, ends, experts, kept)
        if stages is not None:
            layout = lay_out(probe_row(hf.config, mesh.device), Alignment(), is_packed=self.is_packed)
            stages.check_cut(hf, model.rows_of(layout), len(layout.places), mesh.device)
        return model

    def _split_experts(self, hf: PreTrainedModel, experts: DeviceMesh) -> list[nn.Module]:
        """Split stacked experts. Tensor-parallel ranks have the same tokens, unless these are split between blocks."""
        sizes = self.mesh.sizes
        same_tokens = sizes.tp > 1 and not self.backend.sequence_parallel
        sharing = self.mesh.group("tp") if same_tokens else None
        return split_experts(hf, experts["ep"], grad_scale=1.0 / sizes.ep, sharing=sharing)

    def _shard(self, model: ReadingModel, ends: tuple[str, str] | None, experts: list[nn.Module], kept: Kept) -> None:
        mesh, offloads = self.mesh, self.backend.cpu_offload
        layers, wide = decoder_layers(model.hf), self._wide(model, kept)
        shard_model(
            model,
            units_of(model.hf, ends, layers=layers, experts=experts, wide=wide),
            replicated=set(self._replicated(model, kept)),
            mesh=mesh,
            compute=self._compute,
            cpu_offload=offloads,
        )
        model.to_empty(device=torch.device("cpu") if offloads else mesh.device)
        rebuild_buffers(model.hf)
        fix_frequencies(model.hf, self.config.max_total_sequence_length)
        if offloads:
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(mesh.device))
            for parameter in self._replicated(model, kept):
                parameter.data = parameter.data.to(mesh.device)

    def _vision(self, hf: PreTrainedModel) -> Vision | None:
        if not self.config.vision.enabled:
            return None
        part = (self.mesh.on("tp"), self.mesh.sizes.tp) if self.backend.sequence_parallel else (0, 1)
        return vision_of(hf, self.config.vision, self.files.folder, self._compute, token_part=part)

    def _alignment(self) -> Alignment:
        sizes = self.mesh.sizes
        tokens = (sizes.tp if self.backend.sequence_parallel else 1) * token_multiple(self.backend)
        if sizes.cp == 1:
            return Alignment(tokens)
        context = Context(self.mesh.group("cp"), self.mesh.on("cp"), sizes.cp, self.backend.context_parallel_method)
        return Alignment(2 * sizes.cp * tokens, context)

    def _vocab_shard(self, hf: PreTrainedModel) -> VocabShard:
        vocab = hf.get_output_embeddings().weight.shape[0]
        start, _ = part_of(vocab, self.mesh.sizes.tp, self.mesh.on("tp"))
        return VocabShard(start, vocab, self.mesh.group("tp"))


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of a config, also by the names that most families have for them."""
    text = config.get_text_config()
    fields = text.to_dict()
    return {**fields, **{name: fields[own] for name, own in text.attribute_map.items() if own in fields}}


def decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """The repeated layers, which are gathered one at a time: those that the family names, or else its largest list of
    modules of one kind."""
    part = body_of(hf) if is_composite(hf) else hf
    names = set(part._no_split_modules or ())
    layers = [module for module in part.modules() if type(module).__name__ in names]
    if not layers:
        lists = [module for module in part.modules() if isinstance(module, nn.ModuleList)]
        alike = [module for module in lists if len({type(layer) for layer in module}) == 1]
        layers = list(max(alike, key=lambda module: sum(part.numel() for part in module.parameters()), default=()))
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    layers = [layer for layer in layers if id(layer) not in inner]
    if not layers:
        raise ValueError(f"{type(hf).__name__} has no list of layers; it cannot be sharded layer by layer")
    return layers


def model_on_meta(
    config: PreTrainedConfig,
    role: Role,
    backend: AttentionBackend,
    *,
    dtype: torch.dtype,
    is_packed: bool,
    is_split: bool,
    longest_row: int,
) -> PreTrainedModel:
    """A whole model without data.

    Args:
        config: Its config.
        role: What it is trained for.
        backend: Value of `dtensor_cfg.attention_backend`.
        dtype: Dtype of its parameters.
        is_packed: True if rows lie end to end.
        is_split: True if rows are split over ranks, by context or sequence parallelism.
        longest_row: Maximum number of tokens in a row.

    Raises:
        ValueError: If it is not a causal language model, or rows of it cannot be packed or split.
    """
    is_whole = config.get_text_config() is not config
    classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_whole else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in classes:
        raise ValueError(f"{config.model_type} models are not causal language models")
    auto: Any = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
    if role in HEADLESS_ROLES:
        config.num_labels = 1
        auto = AutoModelForSequenceClassification

    def built(attention: str) -> PreTrainedModel:
        with torch.device("meta"):
            chosen = {"text_config": attention, "vision_config": "sdpa"} if is_whole else attention
            hf: PreTrainedModel = auto.from_config(config, dtype=dtype, attn_implementation=chosen)
        fix_frequencies(hf, longest_row)
        return hf

    family: Any = classes[type(config)]
    choose = partial(
        attention_for,
        config,
        backend,
        packed=is_packed,
        split=is_split,
        supports_sdpa=family._supports_sdpa,
    )
    attention = choose()
    if attention != ROWS:
        return built(attention)
    try:
        hf = built(ROWS)
        run_rows_alone(hf, decoder_layers(hf))
        tell_chunks(hf, decoder_layers(hf))
        if config.get_text_config().model_type == "llama4_text":
            from rl_dtensor.model.llama4 import patch_llama4  # imports the code of that family, for others in vain

            patch_llama4(hf)
    except RowsUnknown as error:
        problem = str(error)
    except KeyError as error:
        if error.args != (ROWS,):
            raise
        problem = "its code has its own table of attention implementations"
    else:
        problem = rows_problem(hf, backend)
        if not problem:
            return hf
    return built(choose(rows_problem=problem))


def _widen_trained(hf: PreTrainedModel) -> None:
    """Make parameters that train float32, even if the frozen ones have the compute dtype."""
    for module in hf.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                parameter.data = parameter.data.float()


def _load(model: ShardedModel, files: WeightFiles, *, role: Role, initial: InitialFactors) -> None:
    if role not in HEADLESS_ROLES:
        model.weights.load(files)
    else:
        model.weights.load(files, new=[SCORE], foreign=[LM_HEAD])
    for chunk in model.chunks:
        init_adapters(chunk.hf, initial)
        if role in HEADLESS_ROLES and chunk.is_last and SCORE not in files.names:
            std = chunk.hf.config.get_text_config().initializer_range
            score = cast("nn.Linear", chunk.hf.get_submodule("score"))
            set_head(score, new_head(role, score.weight.shape, std=std, seed=initial.seed))
