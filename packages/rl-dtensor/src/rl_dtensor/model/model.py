"""A Hugging Face model, split and sharded over the ranks, answering reads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from rl_core.data.microbatch import PREFIX_GROUP
from rl_core.model import HEADLESS_ROLES, Read, Role
from rl_core.rollouts.group import ROUTED_EXPERTS
from rl_core.torch.heads.logprobs import Head, logit_transform
from rl_core.torch.heads.reads import reads_columns, scalar_reads, split_language_reads
from rl_core.torch.heads.vocab_parallel import VocabShard
from rl_core.torch.loss import Rows
from rl_core.torch.optim.parameters import OptimizedParameter, describe_parameters
from rl_core.torch.training.flops import ModelShape
from rl_core.torch.training.lora import InitialFactors
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.kernels import Attend
from rl_dtensor.model.layers.lora import several_adapters, without_adapter
from rl_dtensor.model.layers.recompute import CountedMemory
from rl_dtensor.model.layers.replay import RouterReplay
from rl_dtensor.model.layout import Alignment, RowLayout, lay_out
from rl_dtensor.model.vision import Vision
from rl_dtensor.model.weights import ShardedWeights, persistent
from rl_dtensor.parallel.body import body_of
from rl_dtensor.parallel.collectives import to_local
from rl_dtensor.parallel.fsdp import local, local_slices
from rl_dtensor.parallel.mesh import DTensorMesh

ADAPTER_DROPOUT = "lora_dropout"
"""Part of the name of modules that drop inputs of adapters."""


class ReadingModel(nn.Module):
    """Consecutive layers of a Hugging Face model, whose forward pass answers reads of rows instead of returning logits.

    Its forward is the FSDP root's, so the head's weight is gathered while the reads are computed.

    Args:
        hf: The model, with the parameter names of the checkpoint.
        role: Purpose of the model, which decides how the head is read.
        attend: Kernel of its attention, if that takes the layout of rows.
        chunk_size: Tokens whose logits exist at one time; None for the default.
        alignment: Constraints on the layout of a forward pass.
        is_packed: True if rows lie end to end instead of being padded.
        is_last: True if it has the last layers and the head.
        vocab: This rank's part of the vocabulary; None if it has the whole head, or none.
        tokens_are_split: True if tensor-parallel ranks split the tokens between blocks. The gradient by the hidden
            states is then summed when they are scattered.
        replay: Replay of the generator's routing; None if its routers choose.
        vision: Embeddings of the images of rows; None if the model does not see them.
        unshared: Reason why rows cannot share the tokens that they begin with; empty if they can.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        role: Role,
        *,
        attend: Attend,
        chunk_size: int | None,
        alignment: Alignment,
        is_packed: bool,
        is_last: bool,
        vocab: VocabShard | None,
        tokens_are_split: bool,
        replay: RouterReplay | None = None,
        vision: Vision | None = None,
        unshared: str = "",
    ) -> None:
        super().__init__()
        self.hf, self.role, self.attend = hf, role, attend
        self.chunk_size, self.alignment, self.is_packed = chunk_size, alignment, is_packed
        self.is_last, self._vocab, self.tokens_are_split = is_last, vocab, tokens_are_split
        self.replay, self.vision, self.several = replay, vision, several_adapters(hf)
        self.transform = logit_transform(hf.config)
        self.sees_rows = hf.config.get_text_config()._attn_implementation == ROWS
        self.unshared = unshared
        self.takes_positions = "position_ids" in inspect.signature(body_of(hf).forward).parameters

    def forward(
        self,
        layout: RowLayout,
        entered: Tensor | None,
        reads: Sequence[Read],
        temperature: float,
        *,
        checks_logits: bool = False,
    ) -> Any:
        """Return hidden states for the next stage; from the last, columns of the reads, `[tokens]`, `[tokens, k]` or
        `[rows]`, or a check of the head, by `logit_error`.

        Args:
            layout: Rows of the microbatch, and which of their tokens this rank has.
            entered: Hidden states from the previous stage; None in the first.
            reads: Reads that the last stage computes.
            temperature: Divides the logits.
            checks_logits: True to check the head instead of computing reads.
        """
        self.give(layout)
        inputs = self._inputs(layout, entered)
        if self.vision is not None:
            del inputs["input_ids"]
            inputs |= self.vision.inputs(self.hf, layout)
        # After the last norm if this is the last stage, `[batch, seq, hidden]`.
        hidden: Tensor = body_of(self.hf)(use_cache=False, **inputs).last_hidden_state
        if not self.is_last:
            return hidden
        if checks_logits:
            # Gemma 4 would read its table of embeddings, of which each tensor-parallel rank has a part.
            own = inputs if "per_layer_inputs" in inputs else self._inputs(layout, entered)
            return {"logit_error": self._logit_error(hidden, layout, own)}
        hidden, rows = hidden.flatten(0, 1), layout.rows
        group = None if layout.context is None else layout.context.group
        if self.role in HEADLESS_ROLES:
            scores = self.hf.get_submodule("score")(hidden)[:, 0]
            outputs = layout.held.join(scores[layout.held.positions], layout.held.tokens, rows.num_tokens, group)
            return scalar_reads(outputs, rows, reads)
        head = self._head()
        return split_language_reads(
            hidden.to(head.weight.dtype),
            layout.held,
            rows,
            head,
            reads,
            temperature=temperature,
            chunk_size=self.chunk_size,
            shard=self._vocab,
            group=group,
            sums_hidden_grad=not self.tokens_are_split,
        )

    def give(self, layout: RowLayout) -> None:
        """Send the tokens of a pass to the experts of the generator, if those are replayed, and to their adapters, if
        there are several."""
        if self.replay is not None:
            self.replay.give(layout)
        if self.several is not None:
            self.several.give(layout)

    def _head(self) -> Head:
        lm_head = self.hf.get_output_embeddings()
        if isinstance(lm_head, FSDPModule):  # It computes in float32, so it is gathered apart from the rest.
            lm_head.unshard()
        bias = None if lm_head.bias is None else to_local(lm_head.bias, Shard(0))
        return Head(to_local(lm_head.weight, Shard(0)), bias, self.transform)

    def _logit_error(self, hidden: Tensor, layout: RowLayout, inputs: Mapping[str, Any]) -> Tensor:
        """Return the largest difference of the head's logits from the model's own, relative to the largest of these.

        Args:
            hidden: Last hidden states, `[batch, seq, hidden]`.
            layout: Rows of the pass.
            inputs: Arguments of the whole model.
        """
        head = self._head()
        if hidden.shape[-1] != head.weight.shape[-1]:
            raise ValueError(
                f"logits of {self.hf.config.model_type} models are not a product of the last hidden states with the "
                f"head: it takes {head.weight.shape[-1]} features, and they have {hidden.shape[-1]}"
            )
        logits = head.transform(F.linear(hidden.to(head.weight.dtype), head.weight, head.bias).float())
        own = self.hf(use_cache=False, **inputs).logits.float()
        is_token = (layout.places >= 0).view(layout.shape)[..., None]
        largest = own.abs().where(is_token, 0.0).amax()
        return (logits - own).abs().where(is_token, 0.0).amax() / largest.clamp(min=1e-6)

    def _inputs(self, layout: RowLayout, entered: Tensor | None) -> dict[str, Any]:
        first = {"input_ids": layout.input_ids} if entered is None else {"inputs_embeds": entered}
        return {**first, **self.rows_of(layout)}

    def rows_of(self, layout: RowLayout) -> dict[str, Any]:
        """Return arguments that show attention where rows start and end, and the place of each token in its row.

        A family that takes no places counts from the first token of each row, which is then padded.
        """
        places = {"position_ids": layout.position_ids} if self.takes_positions else {}
        if self.sees_rows:
            return {**places, "layout": layout, "attend": self.attend}
        return {**places, "attention_mask": layout.attention_mask}


class ShardedModel:
    """This rank's part of a model: one run of layers, or several that a pipeline interleaves.

    Args:
        chunks: Chunks in the order of their stages.
        stages_here: Stage of each chunk.
        num_stages: Number of stages of all pipeline ranks.
        compute: Dtype of hidden states.
        shape: Shape of the whole model.
        replicated: Parameters of this rank that train and that every rank of its stage has whole, in float32; None if
            no stage has any.
        is_adapted: True if the model has adapters, on this rank or another.
        asks_for_dropout: True if the user set the model's dropout, which is then active under every loss.
        memory: Memory of a training step; None for a model that does not train or a device without its own memory.
        shares_prefixes: True to compute tokens that rows begin with in common once, in all passes.

    Attributes:
        hf: Hugging Face model of the last chunk, for its config.
        initial: The factors that were taken out of the weights; None if the weights are those of the files.
    """

    initial: InitialFactors | None = None

    def __init__(
        self,
        chunks: Sequence[ReadingModel],
        stages_here: Sequence[int],
        num_stages: int,
        *,
        compute: torch.dtype,
        weights: ShardedWeights,
        shape: ModelShape,
        mesh: DTensorMesh,
        replicated: Sequence[nn.Parameter] | None = None,
        is_adapted: bool = False,
        asks_for_dropout: bool = False,
        memory: CountedMemory | None = None,
        shares_prefixes: bool = False,
    ) -> None:
        self.asks_for_dropout, self.memory, self.shares_prefixes = asks_for_dropout, memory, shares_prefixes
        self.chunks = list(chunks)
        self.hf = self.chunks[-1].hf
        self.stages_here = list(stages_here)
        self.num_stages, self.compute, self.weights = num_stages, compute, weights
        self.shape, self.replicated, self._is_adapted = shape, replicated, is_adapted
        self._split_tokens = mesh.sizes.tp if chunks[0].tokens_are_split else 1

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters of this rank."""
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that train."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def trained_groups(self) -> list[list[nn.Parameter]]:
        """Return the parameters that train, in groups that an optimizer can step together: sharded ones, and replicated
        ones if the whole model has some."""
        if self.replicated is None:
            return [self.trained()]
        replicated = {id(parameter) for parameter in self.replicated}
        trained = self.trained()
        return [[each for each in trained if (id(each) in replicated) == kind] for kind in (False, True)]

    def described(self) -> dict[nn.Parameter, OptimizedParameter]:
        """Return the descriptions of all parameters for the optimizer."""
        names = {name: without_adapter(name) for chunk in self.chunks for name, _ in chunk.hf.named_parameters()}
        return describe_parameters(
            [chunk.hf for chunk in self.chunks], {**names, **self.weights.catalog.tied}, local_slices
        )

    def trained_parts(self) -> list[Tensor]:
        """Return this rank's part of each parameter that trains; gathered parameters are sharded again."""
        self.reshard_all()
        return [local(parameter) for parameter in self.trained()]

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint holds, by name: persistent buffers and all parameters, or only the
        adapters and a score head of a model with adapters."""
        tied = self.weights.catalog.tied
        found: dict[str, Tensor] = {}
        for chunk in self.chunks:
            for name, parameter in chunk.hf.named_parameters():
                # Without adapters, frozen parameters are in the checkpoint too.
                if parameter.requires_grad or not self._is_adapted:
                    found[tied.get(name, name)] = parameter
            kept = persistent(chunk.hf)
            found |= {name: kept[name] for name, _ in chunk.hf.named_buffers() if name in kept}
        return found

    def train(self, mode: bool, *, compares: bool = False) -> None:
        """Turn dropout on or off.

        Args:
            mode: True for training, which turns dropout on.
            compares: True if results are compared with logprobs of another pass: the model's own dropout is then off
                unless the user asked for it; dropout of adapters is always asked for.
        """
        for chunk in self.chunks:
            chunk.train(mode)
            if mode and compares and not self.asks_for_dropout:
                for name, module in chunk.named_modules():
                    module.training = ADAPTER_DROPOUT in name

    def reshard_all(self) -> None:
        """Free every gathered parameter.

        FSDP keeps the root's gathered after a forward pass without a backward, and would continue computing with them
        after the shards have changed.
        """
        for chunk in self.chunks:
            for module in chunk.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def lay_out(self, rows: Rows, reads: Sequence[Read] | None = None) -> RowLayout:
        """Return the layout of a microbatch for this rank.

        Args:
            rows: The rows.
            reads: Reads of the pass; None for one in which each row has all of its tokens.
        """
        first = self.chunks[0]
        is_alike = self.shares_prefixes or (PREFIX_GROUP in rows and not first.unshared)
        return lay_out(
            rows,
            first.alignment,
            is_packed=first.is_packed,
            shares_prefixes=reads is not None and is_alike,
            inputs=[ROUTED_EXPERTS] if first.replay is not None and ROUTED_EXPERTS in rows else [],
            reads_columns=reads_columns(reads or (), rows),
        )

    def hidden_shape(self, layout: RowLayout) -> tuple[int, int, int]:
        """Return the shape of the hidden states between stages."""
        batch, tokens = layout.shape
        return batch, tokens // self._split_tokens, self.hf.config.get_text_config().hidden_size
