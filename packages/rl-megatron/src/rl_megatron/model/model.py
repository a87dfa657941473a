"""A Megatron model, spread over the ranks, answering reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rl_core.model import HEADLESS_ROLES, Read, Role
from rl_core.torch.heads.logprobs import Head
from rl_core.torch.heads.reads import join_tokens, scalar_reads, split_language_reads
from rl_core.torch.heads.vocab_parallel import VocabShard
from rl_core.torch.loss import Rows
from rl_megatron.conversion.weight_map import AdapterMap, WeightMap
from rl_megatron.families.catalog import family_of
from rl_megatron.model.layout import Alignment, RowLayout, lay_out
from rl_megatron.model.recompute import StageMemory
from rl_megatron.model.routing import MegatronReplay, Routing
from rl_megatron.model.vision import PREFIX, MegatronVision

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def token_multiple(config: TransformerConfig) -> int:
    """Return the divisor of the number of tokens in a rank's matrix products."""
    return get_fp8_align_size(config.fp8_recipe) if config.fp8 else 1


def alignment_of(config: TransformerConfig, budgets: tuple[int, ...]) -> Alignment:
    """Return this rank's alignment of sequences.

    Args:
        config: Config of Megatron.
        budgets: Lengths for packed microbatches, which are padded; none if they are as long as their rows.
    """
    return Alignment(
        context_size=parallel_state.get_context_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        sequence_size=config.tensor_model_parallel_size if config.sequence_parallel else 1,
        multiple=token_multiple(config),
        budgets=budgets,
    )


class Chunk(GPTModel):
    """The layers of one pipeline rank, or of one of its virtual stages; its output are hidden states, also at the end.

    The head is applied by `ReadingModel.reads`, chunk by chunk of tokens, so that logits for all tokens never exist.
    """

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._preprocess(*args, **kwargs)
        # Rotary embedding of `transformers` for tokens with three places each (M-RoPE).
        rotary: Any = self._modules.get("rotary_of_axes")
        if rotary is None:
            return found
        angles = kwargs["position_ids"].expand(3, -1, -1)[..., None].float() * rotary.inv_freq
        return found[0], rotary.recomposition_frequencies(angles).transpose(0, 1)[:, :, None], *found[2:]

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class ScoreHead(nn.Module):
    """One float32 output per token."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, device=torch.cuda.current_device()))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `[tokens]` for `[tokens, hidden]`."""
        return (hidden.float() @ self.weight.T)[:, 0]


@dataclass
class ReadingModel:
    """This rank's part of a model.

    Args:
        chunks: Its virtual stages in order, one without them.
        config: Config of Megatron.
        hf: Config of Hugging Face.
        has_te: True if the layers are Transformer Engine's.
        chunk_size: Tokens whose logits exist at one time; None for the default.
        is_packed: True if rows are end to end instead of padded.
        alignment: Lengths of sequences, and this rank's part of each.
        adapters: Adapters by the name of the weight that each adapts, over the whole model.
        routing: The routers of a mixture of experts.
        replay: Replay of the generator's routing; None if it is not replayed.
        asks_for_dropout: True if the user set the model's dropout, which is then active under every loss.
        memory: Memory of a training step; None for a model that does not train or a device without its own memory.
        vision: Parts next to a language model that sees images; None if it sees none.
    """

    chunks: list[Chunk]
    config: TransformerConfig
    hf: PreTrainedConfig
    role: Role
    has_te: bool
    chunk_size: int | None
    is_packed: bool
    alignment: Alignment
    adapters: dict[str, AdapterMap] = field(default_factory=dict)
    routing: Routing | None = None
    replay: MegatronReplay | None = None
    asks_for_dropout: bool = False
    memory: StageMemory | None = None
    vision: MegatronVision | None = None

    @property
    def maps(self) -> list[WeightMap]:
        """Maps of the weights of the whole model except its head."""
        maps = family_of(self.hf).weights(self.hf)
        return maps if self.vision is None else self.vision.maps(maps)

    def file_name(self, name: str) -> str:
        """Return the name in the files of a weight of the language model, which is named as if it were alone."""
        return name if self.vision is None else self.vision.file_name(name)

    def known_as(self, name: str) -> str:
        """Return the name in `transformers` of a weight of the files; other names are as they are."""
        return name if self.vision is None else self.vision.names.get(name, name)

    @property
    def is_headless(self) -> bool:
        """True if it has a head of one output."""
        return self.role in HEADLESS_ROLES

    def train(self, mode: bool, *, compares: bool = False) -> None:
        """Turn dropout on or off.

        Args:
            mode: True for training, which turns dropout on.
            compares: True if results are compared with logprobs of another pass: the model's own dropout is then off
                unless the user asked for it. Dropout of adapters is always on.
        """
        drops = not compares or self.asks_for_dropout
        hidden = self.config.hidden_dropout if drops else 0.0
        # The modules of attention, like Transformer Engine's, have their share as `attention_dropout`.
        attention = self.config.attention_dropout if drops else 0.0
        for chunk in self.chunks:
            chunk.train(mode)
            for name, module in chunk.named_modules():
                if name.startswith(PREFIX):
                    module.training = mode and drops  # The tower has its own dropout.
                elif isinstance(module, TransformerLayer):
                    module.hidden_dropout = hidden
                elif isinstance(module, nn.Dropout):
                    module.p = attention if ".core_attention." in name else hidden
                elif "attention_dropout" in vars(module):
                    module.attention_dropout = attention

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters of this rank."""
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def lay_out(self, rows: Rows) -> RowLayout:
        """Return the layout of a microbatch for this rank.

        Raises:
            ValueError: If rows that stay together are longer than the buffers of tensor-parallel products.
        """
        layout = lay_out(rows, self.alignment, packed=self.is_packed)
        length = layout.input_ids.shape[1] * self.alignment.context_size
        if self.config.tp_comm_overlap and length != self.alignment.lengths[0]:
            raise ValueError(
                f"megatron_cfg.megatron_kwargs.tp_comm_overlap has buffers for microbatches of "
                f"{self.alignment.lengths[0]} tokens, and one has {length}, because its rows stay together; increase "
                "sequence_packing.train_mb_tokens and logprob_mb_tokens"
            )
        return layout

    def reads(
        self, hidden: Tensor, layout: RowLayout, rows: Rows, reads: Sequence[Read], temperature: float
    ) -> Mapping[str, Tensor]:
        """Return the columns of the reads of whole rows: `[tokens]`, `[tokens, k]` or `[rows]`; on the last pipeline
        rank.

        Args:
            hidden: `[seq, batch, hidden]`, the last chunk's output.
            layout: This rank's tokens of the rows.
            rows: Rows of the microbatch.
            reads: Reads to compute.
            temperature: Divides the logits.
        """
        size = self.config.tensor_model_parallel_size
        # Sequences are made whole; if each rank has part of the head, their gradient is summed over the ranks.
        if self.config.sequence_parallel:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            hidden = gather(hidden, tensor_parallel_output_grad=not self.is_headless)
        elif size > 1 and not self.is_headless:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        if hidden.requires_grad:
            # Collectives need contiguous tensors, and the gradient of the transposition is not contiguous.
            hidden.register_hook(lambda grad: grad.contiguous())
        flat = hidden.transpose(0, 1).flatten(0, 1)
        group = parallel_state.get_context_parallel_group() if self.alignment.context_size > 1 else None
        if self.is_headless:
            score = self.chunks[-1].get_submodule("score")
            outputs = join_tokens(score(flat)[layout.held.positions], layout.held.tokens, rows.num_tokens, group)
            return scalar_reads(outputs, rows, reads)
        weight = self.head_weight()
        shard = None
        if size > 1:
            start = parallel_state.get_tensor_model_parallel_rank() * len(weight)
            shard = VocabShard(start, self.hf.vocab_size, parallel_state.get_tensor_model_parallel_group())
        return split_language_reads(
            flat,
            layout.held,
            rows,
            Head(weight),
            reads,
            temperature=temperature,
            chunk_size=self.chunk_size,
            shard=shard,
            group=group,
            sums_hidden_grad=False,
        )

    def head_weight(self) -> Tensor:
        """Return `[vocab, hidden]`, this rank's part of the weight that makes logits, in the dtype of hidden states."""
        return self.head_parameter().to(self.config.params_dtype)

    def head_parameter(self) -> Tensor:
        """Return the weight of the head in memory; the embedding's weight if they are tied."""
        last = self.chunks[-1]
        if last.share_embeddings_and_output_weights:
            return last.shared_embedding_or_output_weight()
        weight: Tensor = last.output_layer.weight
        return weight


def forget_embeddings() -> None:
    """Empty Megatron's caches of rotary embeddings, which keep the last 32 models' process groups and sockets open."""
    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        kind.forward.cache_clear()


def forget_tokens(chunks: Sequence[nn.Module]) -> None:
    """Make dispatchers of tokens to experts drop the tensors of their last pass. Through them a model holds that pass's
    graph, whose hooks hold the model with its process groups: a cycle that garbage collection does not see.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MoELayer):
                kept = vars(module.token_dispatcher)
                kept.update({name: None for name, value in kept.items() if isinstance(value, Tensor)})
