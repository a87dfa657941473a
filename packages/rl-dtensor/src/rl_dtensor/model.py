"""A Hugging Face model, split and sharded over the ranks, answering reads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rl_core.batch import TOKENS
from rl_core.model import HEADLESS_ROLES, LOGPROBS, ModelSpec, Read, Role
from rl_core.model_config import ModelConfig
from rl_core.torch.collective_errors import on_all_ranks
from rl_core.torch.files.model_files import WeightFiles, read_hf_config
from rl_core.torch.heads.logprobs import Head, LogitTransform
from rl_core.torch.heads.reads import score_reads, value_reads
from rl_core.torch.heads.split_reads import join_tokens, split_language_reads
from rl_core.torch.heads.vocab_parallel import VocabShard
from rl_core.torch.loss import Rows
from rl_core.torch.training.flops import ModelShape
from rl_dtensor.attention import ROWS, attention_for, body_of, takes_rows
from rl_dtensor.compilation import compile_layers
from rl_dtensor.config import AttentionBackend, DTensorConfig
from rl_dtensor.kernels import Attend, kernel_of
from rl_dtensor.layout import Alignment, Context, Layout, lay_out
from rl_dtensor.loading import init_head, rebuild_buffers
from rl_dtensor.lora import add_adapters, init_adapters
from rl_dtensor.parallel.experts import expert_modules, split_experts
from rl_dtensor.parallel.fsdp import local, shard_model
from rl_dtensor.parallel.mesh import Mesh
from rl_dtensor.parallel.plan import check_token_split, plan_of
from rl_dtensor.parallel.sizes import shape_problems
from rl_dtensor.parallel.stages import Stages
from rl_dtensor.parallel.tensor import part_of, split_tensors, to_local
from rl_dtensor.recompute import checkpoint_activations
from rl_dtensor.settings import device_problems, head_problems
from rl_dtensor.shape import shape_of
from rl_dtensor.weights import Catalog, Weights, persistent

SCORE = "score.weight"
LM_HEAD = "lm_head.weight"

MAX_LOGIT_ERROR = 0.05
"""Relative; rounding in half precision stays below a fifth of it."""

MAX_PACKING_ERROR = 0.15
"""Relative; in half precision tokens may also go to other experts behind another row."""


@dataclass(frozen=True)
class HeadShard:
    """Which part of the head this rank has, where it has one.

    Args:
        vocab: this rank's part of the vocabulary; None where it has the whole head.
        tokens_are_split: whether tokens are, so that the gradient by the hidden states is summed where they are
            scattered.
    """

    vocab: VocabShard | None
    tokens_are_split: bool


class ReadingModel(nn.Module):
    """Consecutive layers of a Hugging Face model, whose forward pass answers reads of rows instead of returning logits.

    Its forward is the FSDP root's, so the head's weight is gathered while the reads are computed.

    Args:
        hf: the model; its names are those of the checkpoint.
        role: decides how the head is read.
        attend: its attention, where that is told of rows.
        chunk_size: tokens whose logits exist at one time.
        alignment: what a forward pass must fit.
        is_packed: rows lie end to end instead of being padded.
        is_last: whether it has the last layers and the head.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        role: Role,
        *,
        attend: Attend,
        chunk_size: int,
        alignment: Alignment,
        is_packed: bool,
        is_last: bool,
        head: HeadShard,
    ) -> None:
        super().__init__()
        self.hf = hf
        self.role = role
        self.attend = attend
        self.chunk_size = chunk_size
        self.alignment = alignment
        self.is_packed = is_packed
        self.is_last = is_last
        self.head_shard = head
        self.transform = logit_transform(hf.config)
        self.sees_rows = hf.config._attn_implementation == ROWS
        self.takes_positions = "position_ids" in inspect.signature(body_of(hf).forward).parameters

    def forward(
        self,
        layout: Layout,
        entered: Tensor | None,
        reads: Sequence[Read],
        temperature: float,
        *,
        checks_logits: bool = False,
    ) -> Any:
        """Hidden states for the next stage; from the last, columns of the reads, `[tokens]`, `[tokens, k]` or
        `[rows]`, or a check of the head, by `logit_error`.

        Args:
            entered: hidden states from the stage before; None in the first.
        """
        hidden = self._hidden(layout, entered)
        if not self.is_last:
            return hidden
        if checks_logits:
            return {"logit_error": self._logit_error(hidden, layout, entered)}
        return self._reads(hidden.flatten(0, 1), layout, reads, temperature)

    def _reads(self, hidden: Tensor, layout: Layout, reads: Sequence[Read], temperature: float) -> Mapping[str, Tensor]:
        rows = layout.rows
        group = None if layout.context is None else layout.context.group
        if self.role in HEADLESS_ROLES:
            outputs = join_tokens(self.hf.score(hidden)[:, 0], layout.places, int(rows.offsets[-1]), group)
            return value_reads(outputs, rows) if self.role == "critic" else score_reads(outputs, rows)
        return split_language_reads(
            hidden,
            layout.places,
            rows,
            self._head(),
            reads,
            temperature=temperature,
            chunk_size=self.chunk_size,
            shard=self.head_shard.vocab,
            group=group,
            sums_hidden_grad=not self.head_shard.tokens_are_split,
        )

    def _head(self) -> Head:
        lm_head = self.hf.get_output_embeddings()
        own = Shard(0)
        bias = None if lm_head.bias is None else to_local(lm_head.bias, own)
        return Head(to_local(lm_head.weight, own), bias, self.transform)

    def _logit_error(self, hidden: Tensor, layout: Layout, entered: Tensor | None) -> Tensor:
        """How far the head's logits are from the model's own, relative to the largest of those."""
        head = self._head()
        logits = head.transform(F.linear(hidden, head.weight, head.bias).float())
        own = self.hf(use_cache=False, **self._inputs(layout, entered)).logits.float()
        is_token = (layout.places >= 0).view(layout.shape)[..., None]
        largest = own.abs().where(is_token, 0.0).amax()
        return (logits - own).abs().where(is_token, 0.0).amax() / largest.clamp(min=1e-6)

    def _hidden(self, layout: Layout, entered: Tensor | None) -> Tensor:
        """`[batch, seq, hidden]`, after the last norm where this is the last stage."""
        hidden: Tensor = body_of(self.hf)(use_cache=False, **self._inputs(layout, entered)).last_hidden_state
        return hidden

    def _inputs(self, layout: Layout, entered: Tensor | None) -> dict[str, Any]:
        first = {"input_ids": layout.input_ids} if entered is None else {"inputs_embeds": entered}
        return {**first, **self.rows_of(layout)}

    def rows_of(self, layout: Layout) -> dict[str, Any]:
        """What tells attention where rows start and end and how to compute them, and where in them each token is; a
        family that takes no places counts from the first token of each row, which is then padded."""
        places = {"position_ids": layout.position_ids} if self.takes_positions else {}
        if self.sees_rows:
            return {**places, "layout": layout, "attend": self.attend}
        return {**places, "attention_mask": layout.attention_mask}


class ShardedModel:
    """This rank's part of a model: one run of layers, or several that a pipeline interleaves.

    Args:
        chunks: in the order of their stages.
        stages_here: which stage each is.
        num_stages: of all pipeline ranks.
        compute: dtype of hidden states.
        shape: of the whole model.
    """

    def __init__(
        self,
        chunks: Sequence[ReadingModel],
        stages_here: Sequence[int],
        num_stages: int,
        *,
        compute: torch.dtype,
        weights: Weights,
        shape: ModelShape,
        mesh: Mesh,
    ) -> None:
        self.chunks = list(chunks)
        self.stages_here = list(stages_here)
        self.num_stages = num_stages
        self.compute = compute
        self.weights = weights
        self.shape = shape
        self._split_tokens = mesh.sizes.tp if chunks[0].head_shard.tokens_are_split else 1

    @property
    def hf(self) -> PreTrainedModel:
        """The Hugging Face model of the last chunk, for its config."""
        return self.chunks[-1].hf

    def parameters(self) -> list[nn.Parameter]:
        """All parameters of this rank."""
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def trained(self) -> list[nn.Parameter]:
        """Those that steps change."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def trained_parts(self) -> list[Tensor]:
        """This rank's part of each of those, put back where it was gathered."""
        self.reshard_all()
        return [local(parameter) for parameter in self.trained()]

    def state(self) -> dict[str, Tensor]:
        """What steps change, by name: parameters that train, adapters among them, and persistent buffers."""
        tied = self.weights.tied
        found: dict[str, Tensor] = {}
        for chunk in self.chunks:
            for name, parameter in chunk.hf.named_parameters():
                if parameter.requires_grad:
                    found[tied.get(name, name)] = parameter
            kept = persistent(chunk.hf)
            found |= {name: kept[name] for name, _ in chunk.hf.named_buffers() if name in kept}
        return found

    def train(self, mode: bool) -> None:
        """Put dropout on or off."""
        for chunk in self.chunks:
            chunk.train(mode)

    def reshard_all(self) -> None:
        """Free every gathered parameter.

        FSDP keeps the root's gathered after a forward pass without a backward, and would go on computing with them
        after the shards have changed.
        """
        for chunk in self.chunks:
            for module in chunk.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def lay_out(self, rows: Rows) -> Layout:
        """The layout of a microbatch for this rank."""
        return lay_out(rows, self.chunks[0].alignment, is_packed=self.chunks[0].is_packed)

    def hidden_shape(self, layout: Layout) -> tuple[int, int, int]:
        """Of hidden states between stages."""
        batch, tokens = layout.shape
        return batch, tokens // self._split_tokens, self.hf.config.get_text_config().hidden_size


def logit_transform(config: PreTrainedConfig) -> LogitTransform:
    """What a model family does between its head and its logits, as its config says."""
    settings = config.get_text_config().to_dict()
    scale = settings.get("logit_scale") or 1.0
    divisor = settings.get("logits_scaling") or 1.0
    return LogitTransform(scale / divisor, settings.get("final_logit_softcapping"))


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of a config, also by the names that most families have for them."""
    text = config.get_text_config()
    fields = text.to_dict()
    return {**fields, **{name: fields[own] for name, own in text.attribute_map.items() if own in fields}}


def build_model(
    config: ModelConfig, backend: DTensorConfig, spec: ModelSpec, *, folder: Path, is_packed: bool, mesh: Mesh
) -> ShardedModel:
    """Build on `meta`, split, shard, then load this rank's slices; collective.

    Parameters are float32 where they train, and of the compute dtype where they don't.

    Raises:
        ValueError: where the files, the config, the mesh and the role do not fit together.
    """
    hf_config = read_hf_config(folder, config.hf_config_overrides)
    problems = (
        *device_problems(backend, precision=config.precision, device=mesh.kind),
        *shape_problems(backend, _fields(hf_config)),
        *head_problems(backend, _fields(hf_config)),
    )
    for problem in problems:
        raise ValueError(f"{problem.key} {problem.message}")
    builder = _Builder(config, backend, spec, hf_config, is_packed, mesh)
    model = builder.build()
    _load(model, WeightFiles.of(folder), role=spec.role, seed=spec.seed)
    if spec.role not in HEADLESS_ROLES:
        on_all_ranks(mesh.control, lambda: _check_logits(model, mesh))
        on_all_ranks(mesh.control, lambda: _check_packing(model, mesh))
    return model


@dataclass
class _Builder:
    config: ModelConfig
    backend: DTensorConfig
    spec: ModelSpec
    hf_config: PreTrainedConfig
    is_packed: bool
    mesh: Mesh

    def build(self) -> ShardedModel:
        """All chunks of this rank, sharded and without weights."""
        sizes, backend = self.mesh.sizes, self.backend
        whole = self._on_meta()
        if sizes.ep > 1 and not expert_modules(whole):
            raise ValueError(
                f"policy.dtensor_cfg.expert_parallel_size is {sizes.ep} and {whole.config.model_type} models have no "
                "stacked experts, which alone can be split over ranks; set it to 1"
            )
        num_stages = sizes.pp * backend.pipeline_chunks_per_rank
        stages = Stages.of(whole, num_stages) if num_stages > 1 else None
        catalog = Catalog.of(whole, (lambda name: 0) if stages is None else stages.stage_of)
        self._adapt(whole)
        shape = shape_of(whole)
        here = [chunk * sizes.pp + self.mesh.on("pp") for chunk in range(backend.pipeline_chunks_per_rank)]
        wholes = [whole, *(self._adapt(self._on_meta()) for _ in here[1:])]
        chunks = [self._chunk(hf, stages, stage) for hf, stage in zip(wholes, here, strict=True)]
        compute: torch.dtype = getattr(torch, self.config.precision)
        weights = Weights(catalog, [chunk.hf for chunk in chunks], self.mesh)
        return ShardedModel(chunks, here, num_stages, compute=compute, weights=weights, shape=shape, mesh=self.mesh)

    def _on_meta(self) -> PreTrainedModel:
        trains_all = self.spec.trains and not self.config.lora_cfg.enabled
        return _on_meta(
            self.hf_config,
            self.spec.role,
            self.backend.attention_backend,
            dtype=torch.float32 if trains_all else getattr(torch, self.config.precision),
            is_packed=self.is_packed,
            is_split=self.mesh.sizes.cp > 1 or self.backend.sequence_parallel,
        )

    def _adapt(self, hf: PreTrainedModel) -> PreTrainedModel:
        """The same model, with adapters where they are asked for."""
        if self.config.lora_cfg.enabled:
            with torch.device("meta"):
                add_adapters(hf, self.config.lora_cfg)
            if self.spec.trains:
                _widen_trained(hf)
        return hf

    def _chunk(self, hf: PreTrainedModel, stages: Stages | None, stage: int) -> ReadingModel:
        backend, mesh, role = self.backend, self.mesh, self.spec.role
        is_last = stages is None or stage == stages.count - 1
        is_headless = role in HEADLESS_ROLES
        vocab, final_norm = None, None
        plan = {}
        if mesh.sizes.tp > 1:
            plan = plan_of(hf, backend.custom_parallel_plan)
            if backend.sequence_parallel:
                check_token_split(hf, plan, decoder_layers(hf))
            final_norm = Stages.of(hf, 1).final_norm if backend.sequence_parallel and is_last else None
            if not is_headless:
                vocab = self._vocab_shard(hf)
        if stages is not None:
            stages.cut(hf, stage)
        if mesh.sizes.tp > 1:
            split_tensors(
                hf,
                plan,
                mesh.dense["tp"],
                sequence_parallel=backend.sequence_parallel,
                final_norm=final_norm,
                has_split_head=not is_headless,
            )
        experts = [] if mesh.experts is None else split_experts(hf, mesh.experts["ep"])
        if backend.activation_checkpointing:
            checkpoint_activations(hf, backend.recompute_granularity)
        if backend.compile:
            compile_layers(decoder_layers(hf))
        model = ReadingModel(
            hf,
            role,
            attend=kernel_of(backend.attention_backend),
            chunk_size=self.config.logprob_chunk_size,
            alignment=self._alignment(),
            is_packed=self.is_packed,
            is_last=is_last,
            head=HeadShard(vocab, backend.sequence_parallel),
        )
        self._shard(model, experts)
        if stages is not None:
            layout = lay_out(_probe(hf.config, mesh.device), Alignment(), is_packed=self.is_packed)
            stages.check_cut(hf, stage, model.rows_of(layout), len(layout.places), mesh.device)
        return model

    def _shard(self, model: ReadingModel, experts: list[nn.Module]) -> None:
        mesh, offloads = self.mesh, self.backend.cpu_offload
        shard_model(
            model,
            decoder_layers(model.hf),
            [model.hf.score] if self.spec.role in HEADLESS_ROLES and model.is_last else [],
            experts,
            mesh=mesh,
            compute=getattr(torch, self.config.precision),
            cpu_offload=offloads,
        )
        model.to_empty(device=torch.device("cpu") if offloads else mesh.device)
        rebuild_buffers(model.hf)
        if offloads:
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(mesh.device))

    def _alignment(self) -> Alignment:
        sizes = self.mesh.sizes
        tokens = sizes.tp if self.backend.sequence_parallel else 1
        if sizes.cp == 1:
            return Alignment(tokens)
        context = Context(self.mesh.group("cp"), self.mesh.on("cp"), sizes.cp, self.backend.context_parallel_method)
        return Alignment(2 * sizes.cp * tokens, context)

    def _vocab_shard(self, hf: PreTrainedModel) -> VocabShard:
        vocab = hf.get_output_embeddings().weight.shape[0]
        start, _ = part_of(vocab, self.mesh.sizes.tp, self.mesh.on("tp"))
        return VocabShard(start, vocab, self.mesh.group("tp"))


def _check_logits(model: ShardedModel, mesh: Mesh) -> None:
    """Compare a few tokens' logits with those of the model's own forward pass, where the head is."""
    last = model.chunks[-1]
    if not last.is_last:
        return
    rows = _probe(model.hf.config, mesh.device)
    layout = model.lay_out(rows)
    entered = None
    if model.num_stages > 1:
        shape = model.hidden_shape(layout)
        entered = torch.linspace(-1, 1, shape[1] * shape[2], device=mesh.device).view(1, *shape[1:]).to(model.compute)
    model.train(False)
    with torch.no_grad():
        error = last(layout, entered, (), 1.0, checks_logits=True)["logit_error"].item()
    model.reshard_all()
    if not error < MAX_LOGIT_ERROR:
        kind = last.hf.config.model_type
        raise ValueError(f"logits of {kind} models are no scaled or capped product with the head (off by {error:.2g})")


def _check_packing(model: ShardedModel, mesh: Mesh) -> None:
    """Compare what a row reads behind another with what it reads alone, where one rank sees whole rows and layers."""
    chunk = model.chunks[0]
    if not chunk.is_packed or chunk.alignment.context is not None or model.num_stages > 1:
        return
    row = _probe(model.hf.config, mesh.device)
    tokens, count = row.columns[TOKENS], len(row.columns[TOKENS])
    ends = torch.tensor([0, count - 1, 2 * count - 1], device=mesh.device)
    both = Rows(ends, {TOKENS: torch.cat([tokens.flip(0)[:-1], tokens])})
    model.train(False)
    with torch.no_grad():
        read = [chunk(model.lay_out(rows), None, (LOGPROBS,), 1.0)["logprobs"][-count:] for rows in (row, both)]
    model.reshard_all()
    alone, behind = (logprobs.float() for logprobs in read)
    error = ((alone - behind).abs().max() / alone.abs().max().clamp(min=1e-6)).item()
    if not error < MAX_PACKING_ERROR:
        raise ValueError(
            f"rows of {model.hf.config.model_type} models cannot be packed: one changes another (by {error:.2g}); set "
            "policy.sequence_packing.enabled=false"
        )


def _probe(config: PreTrainedConfig, device: torch.device) -> Rows:
    """A row of different tokens; padding alone would have an embedding of zeros."""
    tokens = torch.arange(1, 5, device=device) % config.get_text_config().vocab_size
    return Rows(torch.tensor([0, len(tokens)], device=device), {TOKENS: tokens})


def decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """The repeated layers, which are gathered one at a time: those that the family names, or else its largest list of
    modules of one kind."""
    names = set(hf._no_split_modules or ())
    layers = [module for module in hf.modules() if type(module).__name__ in names]
    if not layers:
        lists = [module for module in hf.modules() if isinstance(module, nn.ModuleList)]
        alike = [module for module in lists if len({type(layer) for layer in module}) == 1]
        layers = list(max(alike, key=lambda module: sum(part.numel() for part in module.parameters()), default=()))
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    layers = [layer for layer in layers if id(layer) not in inner]
    if not layers:
        raise ValueError(f"{type(hf).__name__} has no list of layers; it cannot be sharded layer by layer")
    return layers


def _on_meta(
    config: PreTrainedConfig,
    role: Role,
    backend: AttentionBackend,
    *,
    dtype: torch.dtype,
    is_packed: bool,
    is_split: bool,
) -> PreTrainedModel:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{config.model_type} models are no causal language models")
    auto = AutoModelForCausalLM
    if role in HEADLESS_ROLES:
        config.num_labels = 1
        auto = AutoModelForSequenceClassification

    def built(attention: str) -> PreTrainedModel:
        with torch.device("meta"):
            return auto.from_config(config, dtype=dtype, attn_implementation=attention)

    choose = partial(
        attention_for,
        config,
        backend,
        packed=is_packed,
        split=is_split,
        supports_sdpa=MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa,
    )
    attention = choose()
    if attention != ROWS:
        return built(attention)
    try:
        hf = built(ROWS)
    except KeyError as error:  # from a table of its own in the family's code
        if error.args != (ROWS,):
            raise
    else:
        if takes_rows(hf):
            return hf
    return built(choose(takes_rows=False))


def _widen_trained(hf: PreTrainedModel) -> None:
    """What trains is float32, also where the frozen rest is of the compute dtype."""
    for module in hf.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                parameter.data = parameter.data.float()


def _load(model: ShardedModel, files: WeightFiles, *, role: Role, seed: int) -> None:
    if role not in HEADLESS_ROLES:
        model.weights.load(files)
    else:
        model.weights.load(files, new=[SCORE], foreign=[LM_HEAD])
    for chunk in model.chunks:
        init_adapters(chunk.hf, seed)
        if role in HEADLESS_ROLES and chunk.is_last and SCORE not in files.file_of:
            init_head(chunk.hf.score, chunk.hf.config.get_text_config().initializer_range, seed)
