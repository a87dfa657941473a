"""A model built from its files: on `meta`, split, sharded, then loaded."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rl_core.model import HEADLESS_ROLES, ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.torch.files.buffers import rebuild_buffers
from rl_core.torch.files.model_files import WeightFiles, read_hf_config, untie_apart
from rl_core.torch.heads.reads import new_head
from rl_core.torch.heads.vocab_parallel import VocabShard
from rl_core.torch.kernels.devices import runs_kernels
from rl_core.torch.kernels.exact import exact_rows
from rl_core.torch.optim.parameters import check_patterns, frozen_names
from rl_core.torch.process_group import on_all_ranks
from rl_core.torch.training.lora import MAGNITUDE, InitialFactors
from rl_core.torch.training.recompute import max_tokens
from rl_core.torch.vision.parts import VisionParts
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model import settings
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.exact import check_exact, exact_attention, inexact_part
from rl_dtensor.model.kernels import activate_flash_attention, kernel_of
from rl_dtensor.model.layers.compilation import compile_layers
from rl_dtensor.model.layers.experts import dispatch_experts, fuse_experts
from rl_dtensor.model.layers.fusion import fuse_layers
from rl_dtensor.model.layers.lora import adapters_of, add_adapters, init_adapters, names_of, without_adapter
from rl_dtensor.model.layers.low_precision import fit_to_ranks, formats_of, lower_precision, token_multiple
from rl_dtensor.model.layers.quantized_base import BASE, check_blocks, quantize_base
from rl_dtensor.model.layers.recompute import CountedMemory, checkpoint_activations, fixed_plan
from rl_dtensor.model.layers.replay import RouterReplay
from rl_dtensor.model.layout import Alignment, Context, lay_out
from rl_dtensor.model.loading import check_logits, check_packing, probe_row
from rl_dtensor.model.model import ReadingModel, ShardedModel
from rl_dtensor.model.precision import Kept, widen
from rl_dtensor.model.tiny import is_dropout
from rl_dtensor.model.vision import vision_of
from rl_dtensor.model.weights import SCORE, Catalog, ShardedWeights, persistent, stored_weight, tied_pairs
from rl_dtensor.model.whole import LM_HEAD, decoder_layers, fix_frequencies, model_on_meta, shape_of
from rl_dtensor.parallel.dispatch import AllToAll, DeepEP, Dispatch, default_chunks
from rl_dtensor.parallel.experts import expert_modules, split_experts
from rl_dtensor.parallel.fsdp import ends_of, local, local_slices, shard_model, units_of
from rl_dtensor.parallel.mesh import DTensorMesh
from rl_dtensor.parallel.plan import plan_of
from rl_dtensor.parallel.sizes import shape_problems
from rl_dtensor.parallel.stages import AbsentModule, Stages
from rl_dtensor.parallel.tensor import part_of, split_tensors


def build_model(
    config: ModelConfig, backend: DTensorConfig, spec: ModelSpec, *, folder: Path, is_packed: bool, mesh: DTensorMesh
) -> ShardedModel:
    """Build on `meta`, split, shard, then load this rank's slices; collective.

    Parameters that train are float32. The others have the compute dtype, except those that stay float32
    (`rl_dtensor.model.precision`).

    Raises:
        ValueError: If the files, the config, the mesh and the role do not fit together.
    """
    hf_config = read_hf_config(folder, config.hf_config_overrides, is_whole=config.vision.enabled)
    text = hf_config.get_text_config()
    fields = text.to_dict()
    # Checks use the field names of most families.
    fields |= {name: fields[own] for name, own in text.attribute_map.items() if own in fields}
    problems = (
        *settings.vision_build_problems(config.vision, backend, hf_config, spec.role),
        *settings.device_problems(backend, precision=config.precision, device=mesh.kind),
        *shape_problems(backend, fields),
        *settings.kernel_problems(backend, fields),
        *settings.adapter_problems(backend, config.lora_cfg),
        *settings.low_precision_problems(backend, config.lora_cfg, precision=config.precision, device=mesh.kind),
    )
    for problem in problems:
        raise ValueError(f"{problem.key}: {problem.message}")
    if spec.exact and (inexact := settings.exact_training_problem(backend, config, mesh.kind)):
        raise ValueError(f"generation.exact: {inexact}")
    if backend.attention_backend == "auto" and mesh.kind.runs_on_gpus:
        activate_flash_attention(settings.largest_head(fields))
    files = WeightFiles.of(folder, is_whole=config.vision.enabled)
    model = ModelBuilder(config, backend, spec, hf_config, files=files, is_packed=is_packed, mesh=mesh).build()
    is_headless = spec.role in HEADLESS_ROLES
    new, foreign = ([SCORE], [LM_HEAD]) if is_headless else ([], [])
    model.weights.load(files, new=new, foreign=foreign)

    def stored(name: str) -> Tensor:
        return stored_weight(files, model.weights.catalog, name).to(mesh.device, model.compute)

    initial = InitialFactors.of(config.lora_cfg, spec.seed, is_whole=config.vision.enabled, stored=stored)
    for chunk in model.chunks:
        for name in names_of(chunk.hf):
            init_adapters(chunk.hf, initial, name)
        if is_headless and chunk.is_last and SCORE not in files.names:
            std = chunk.hf.config.get_text_config().initializer_range
            score = cast("nn.Linear", chunk.hf.get_submodule("score"))
            full = new_head(spec.role, score.weight.shape, std=std, seed=initial.seed)
            with torch.no_grad():
                local(score.weight).copy_(full[local_slices(score.weight)])
    if not is_headless:
        on_all_ranks(mesh.control, lambda: check_logits(model, mesh))
        on_all_ranks(mesh.control, lambda: check_packing(model, mesh))
    model.initial = initial if initial.is_principal else None
    return model


class ModelBuilder:
    """Builds a model on `meta`, splits and shards it, and leaves its weights without values; collective.

    Args:
        config: Model, as the run configures it.
        backend: Mesh, recomputation and kernels.
        spec: Purpose of the model.
        hf_config: Hugging Face config of the model; changed if the files hold apart what it ties.
        files: Files of the model. Only their dtypes and tied weights are read.
        is_packed: True if rows lie end to end.
        mesh: Mesh of the run.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: DTensorConfig,
        spec: ModelSpec,
        hf_config: PreTrainedConfig,
        *,
        files: WeightFiles,
        is_packed: bool,
        mesh: DTensorMesh,
    ) -> None:
        self.config, self.backend, self.mesh = config, backend, mesh
        self.trains, self.is_headless, self.role = spec.trains, spec.role in HEADLESS_ROLES, spec.role
        self.initial = InitialFactors.of(config.lora_cfg, spec.seed, is_whole=config.vision.enabled)
        self.hf_config, self.files, self.is_packed = hf_config, files, is_packed
        self.compute: torch.dtype = getattr(torch, config.precision)
        self.trains_all, self.is_exact = spec.trains and not config.lora_cfg.enabled, spec.exact
        self.fuses = backend.fused_kernels and runs_kernels(mesh.device)
        self.dispatch: Dispatch | None = None
        self.frozen: set[str] = set()
        self._parts = VisionParts.of(hf_config.model_type, config.vision)
        self.token_part = (mesh.on("tp"), mesh.sizes.tp) if backend.sequence_parallel else (0, 1)

    def build(self) -> ShardedModel:
        """Build all chunks of this rank, sharded and without weights."""
        config, sizes, backend, mesh = self.config, self.mesh.sizes, self.backend, self.mesh
        whole = self._on_meta()
        while untie_apart(self.hf_config, tied_pairs(whole), self.files, mesh.control):
            whole = self._on_meta()
        if sizes.ep > 1 and not expert_modules(whole):
            raise ValueError(
                f"dtensor_cfg.expert_parallel_size is {sizes.ep} and {whole.config.model_type} models have no "
                "stacked experts, and only stacked experts can be split over ranks; set it to 1"
            )
        num_stages = sizes.pp * backend.pipeline_chunks_per_rank
        stages = Stages.of(whole, num_stages) if num_stages > 1 else None
        catalog = Catalog.of(whole, (lambda name: 0) if stages is None else stages.stage_of)
        kept = Kept.of(whole, catalog, self.files, self.compute)
        if self.trains_all:
            self.frozen = frozen_names(config, [name for name, _ in whole.named_parameters()])
        self.frozen |= self._parts.frozen(name for name, _ in whole.named_parameters())
        parameters = {name for name, _ in whole.named_parameters()}
        replicates = self.trains_all and not kept.computed.isdisjoint(parameters)
        replicates |= self.trains and config.lora_cfg.enabled and config.lora_cfg.use_dora
        memory = None
        if self.trains and mesh.kind.memory() is not None:
            named = whole.named_parameters() if self.trains_all else ()
            trained = {parameter for name, parameter in named if name not in self.frozen}
            memory = CountedMemory.of(config, backend, whole, decoder_layers(whole), mesh=mesh, trained=trained)
        if mesh.experts is not None and backend.expert_dispatcher == "deep_ep":
            hidden = self.hf_config.get_text_config().hidden_size
            self.dispatch = DeepEP(mesh.experts.get_group("ep"), hidden, fused=self.fuses)
        elif mesh.experts is not None:
            num_chunks = backend.expert_chunks or default_chunks(max_tokens(config, sizes.cp) // sizes.tp)
            self.dispatch = AllToAll(mesh.exchanges, fused=self.fuses, num_chunks=num_chunks)
        self._prepare(whole, kept)
        if self.trains:
            names = [without_adapter(name) for name, each in whole.named_parameters() if each.requires_grad]
            check_patterns("optimizer.lr_scales", config.optimizer.lr_scales, names)
        self.initial.check(adapters_of(whole))
        shape, formats = shape_of(whole), formats_of(whole)
        here = [chunk * sizes.pp + mesh.on("pp") for chunk in range(backend.pipeline_chunks_per_rank)]
        wholes = [whole, *(self._prepare(self._on_meta(), kept) for _ in here[1:])]
        chunks = [self._chunk(hf, stages, stage, kept) for hf, stage in zip(wholes, here, strict=True)]
        served = formats if backend.qat.sync == "rounded" else {}
        return ShardedModel(
            chunks,
            here,
            num_stages,
            compute=self.compute,
            weights=ShardedWeights(catalog.keeping(kept.stored), [chunk.hf for chunk in chunks], mesh, served),
            shape=shape,
            mesh=mesh,
            is_adapted=config.lora_cfg.enabled,
            asks_for_dropout=any(map(is_dropout, config.hf_config_overrides)),
            memory=memory,
            shares_prefixes=self._shares_prefixes(chunks[0].unshared),
            replicated=[each for chunk in chunks for each in self._replicated(chunk, kept)] if replicates else None,
        )

    def _on_meta(self) -> PreTrainedModel:
        """Build the whole model in the compute dtype."""
        return model_on_meta(
            self.hf_config,
            self.role,
            self.backend.attention_backend,
            dtype=self.compute,
            is_packed=self.is_packed,
            is_split=self.mesh.sizes.cp > 1 or self.backend.sequence_parallel,
            longest_row=self.config.max_total_sequence_length,
        )

    def _prepare(self, hf: PreTrainedModel, kept: Kept) -> PreTrainedModel:
        """Give a model its dtypes, and adapters if the config enables them."""
        if self.fuses and self.backend.compile:
            fuse_experts(hf)  # The compiler fuses the rest of a layer.
        elif self.fuses:
            fuse_layers(hf, decoder_layers(hf))
        if self.dispatch is not None:
            dispatch_experts(hf, self.dispatch, fused=self.fuses)
        if self.backend.compile:
            compile_layers(hf, decoder_layers(hf))
        frozen = self.frozen
        if not self.trains_all:
            widen(hf, kept.stored)
        else:
            widen(hf, kept.stored | (persistent(hf).keys() - frozen) if frozen else None)
        hf.requires_grad_(self.trains_all)
        for name, parameter in hf.named_parameters():
            if name in frozen:
                parameter.requires_grad_(False)
        if self.config.lora_cfg.enabled:
            with torch.device("meta"):
                add_adapters(hf, self.config.lora_cfg, is_left_out=self._parts.has_no_adapter)
            # What trains is float32, even if the frozen parameters have the compute dtype.
            for module in hf.modules() if self.trains else ():
                for parameter in module.parameters(recurse=False):
                    if parameter.requires_grad:
                        parameter.data = parameter.data.float()
        lower_precision(hf, decoder_layers(hf), self.backend, kept.stored)
        if self.config.lora_cfg.enabled and self.config.lora_cfg.base_quantization is not None:
            quantize_base(hf, decoder_layers(hf), self.config.lora_cfg.base_quantization)
        return hf

    def _replicated(self, model: ReadingModel, kept: Kept) -> list[nn.Parameter]:
        """Return the parameters that compute in float32 and are left out of FSDP, whose groups compute in one dtype:
        those that a family keeps, and the magnitudes of adapters.

        Those of the head are sharded as a group, as they may be large.
        """
        heads = {id(parameter) for module in self._wide(model, kept) for parameter in module.parameters()}
        return [
            parameter
            for name, parameter in model.hf.named_parameters()
            if (name.replace(BASE, "") in kept.computed or MAGNITUDE in name) and id(parameter) not in heads
        ]

    def _wide(self, model: ReadingModel, kept: Kept) -> list[nn.Module]:
        """Return the head, if it computes in float32."""
        if not model.is_last:
            return []
        if self.is_headless:
            return [model.hf.get_submodule("score")]
        named = {id(parameter): name for name, parameter in model.hf.named_parameters()}
        head = model.hf.get_output_embeddings()
        is_kept = {named[id(parameter)].replace(BASE, "") in kept.computed for parameter in head.parameters()}
        return [head] if is_kept == {True} else []

    def _chunk(self, hf: PreTrainedModel, stages: Stages | None, stage: int, kept: Kept) -> ReadingModel:
        backend, mesh, sizes = self.backend, self.mesh, self.mesh.sizes
        is_last = stages is None or stage == stages.count - 1
        vocab, final_norm, plan = None, None, {}
        if sizes.tp > 1:
            # The plan and the size of the head belong to the whole model, before it is cut.
            plan = plan_of(hf, backend.custom_parallel_plan, decoder_layers(hf))
            final_norm = Stages.of(hf, 1).final_norm if backend.sequence_parallel and is_last else None
            if not self.is_headless:
                vocab_size = hf.get_output_embeddings().weight.shape[0]
                start, _ = part_of(vocab_size, sizes.tp, mesh.on("tp"))
                vocab = VocabShard(start, vocab_size, mesh.group("tp"))
        if self.is_exact and (problem := inexact_part(hf)):
            raise ValueError(f"generation.exact: the model cannot be computed exactly: {problem}; set it to false")
        replay = RouterReplay(hf, self.token_part) if backend.moe_router_replay else None
        ends = ends_of(hf) if stages is None else (stages.embedding, stages.final_norm)
        unshared = self._unshared(hf)
        if stages is not None:
            stages.cut(hf, stage)
        if sizes.tp > 1:
            split_tensors(
                hf,
                plan,
                mesh.dense["tp"],
                layers=decoder_layers(hf),
                sequence_parallel=backend.sequence_parallel,
                final_norm=final_norm,
                has_split_head=not self.is_headless,
                apart=[] if mesh.experts is None else expert_modules(hf),
                is_exact=self.is_exact,
            )
            fit_to_ranks(hf)
            check_blocks(hf)
        experts: list[nn.Module] = []
        if mesh.experts is not None:
            # Tensor-parallel ranks have the same tokens, unless these are split between blocks.
            sharing = mesh.group("tp") if sizes.tp > 1 and not backend.sequence_parallel else None
            experts = split_experts(hf, mesh.experts["ep"], grad_scale=1.0 / sizes.ep, sharing=sharing)
        layers = decoder_layers(hf)
        recompute = fixed_plan(backend, len(layers)) if self.trains else None
        if recompute is not None:
            checkpoint_activations(hf, layers, recompute)
        model = ReadingModel(
            hf,
            self.role,
            attend=exact_attention if self.is_exact else kernel_of(backend.attention_backend),
            chunk_size=self.config.logprob_chunk_size,
            alignment=self._alignment(),
            is_packed=self.is_packed,
            is_last=is_last,
            vocab=vocab,
            tokens_are_split=backend.sequence_parallel,
            replay=replay,
            vision=vision_of(hf, self.config.vision, self.files.folder, self.compute, token_part=self.token_part),
            unshared=unshared,
        )
        if self.is_exact:
            on_all_ranks(mesh.control, lambda: check_exact(hf, self.compute))
            model.forward = exact_rows()(model.forward)  # type: ignore[method-assign]
        self._shard(model, ends, experts, kept)
        if stages is not None:
            layout = lay_out(probe_row(hf.config, mesh.device), Alignment(), is_packed=self.is_packed)
            stages.check_cut(hf, model.rows_of(layout), len(layout.places), mesh.device)
        return model

    def _unshared(self, hf: PreTrainedModel) -> str:
        """Return why rows cannot share the tokens that they begin with; empty if they can."""
        if not self.is_packed:
            return "rows are padded"
        if self.is_exact:
            return "generation.exact computes each row by itself"
        if hf.config.get_text_config()._attn_implementation != ROWS:
            return f"attention of {hf.config.model_type} models does not know where rows begin"
        if self.config.lora_cfg.enabled and self.config.lora_cfg.max_adapters > 1:
            return "rows have several adapters (lora_cfg.max_adapters)"
        return "images belong to one row" if self.config.vision.enabled else ""

    def _shares_prefixes(self, unshared: str) -> bool:
        """Return whether passes compute what rows begin with in common once.

        Args:
            unshared: Reason why they cannot; empty if they can.

        Raises:
            ValueError: If the config demands it and they cannot.
        """
        wanted = self.config.sequence_packing.shared_prefixes
        if not unshared and self.trains:
            fields = self.hf_config.get_text_config().to_dict()
            drawn = [
                f"hf_config_overrides.{name}"
                for name, value in fields.items()
                if value and (is_dropout(name) or name.endswith("jitter_noise"))
            ]
            drawn += ["lora_cfg.dropout"] if self.config.lora_cfg.enabled and self.config.lora_cfg.dropout else []
            if drawn:
                unshared = f"each row draws its own dropout or noise; set {' and '.join(drawn)} to 0"
        if unshared and wanted is True:
            raise ValueError(f"sequence_packing.shared_prefixes: {unshared}, or set this key to auto or false")
        return bool(wanted) and not unshared

    def _shard(self, model: ReadingModel, ends: tuple[str, str] | None, experts: list[nn.Module], kept: Kept) -> None:
        mesh, offloads = self.mesh, self.backend.cpu_offload
        units = units_of(model.hf, ends, layers=decoder_layers(model.hf), experts=experts, wide=self._wide(model, kept))
        replicated = set(self._replicated(model, kept))
        shard_model(model, units, replicated=replicated, mesh=mesh, compute=self.compute, cpu_offload=offloads)
        model.to_empty(device=torch.device("cpu") if offloads else mesh.device)
        rebuild_buffers(model.hf, (AbsentModule,))
        fix_frequencies(model.hf, self.config.max_total_sequence_length)
        if offloads:
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(mesh.device))
            for parameter in self._replicated(model, kept):
                parameter.data = parameter.data.to(mesh.device)

    def _alignment(self) -> Alignment:
        sizes = self.mesh.sizes
        tokens = (sizes.tp if self.backend.sequence_parallel else 1) * token_multiple(self.backend)
        if sizes.cp == 1:
            return Alignment(tokens)
        context = Context(self.mesh.group("cp"), self.mesh.on("cp"), sizes.cp, self.backend.context_parallel_method)
        return Alignment(2 * sizes.cp * tokens, context)
