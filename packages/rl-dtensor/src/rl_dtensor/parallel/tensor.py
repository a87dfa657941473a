"""Tensor and sequence parallelism: parameters are DTensors, modules compute on this rank's part of them.

The modules of `transformers` see plain tensors: while one runs, its parameters are the local ones. Collectives are only
where blocks begin and end, so no operation is dispatched over a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from transformers import PreTrainedModel

from rl_dtensor.config import Style
from rl_dtensor.parallel.body import body_name
from rl_dtensor.parallel.collectives import distribute, enter, gather, leave, localize, scatter_sum, split
from rl_dtensor.parallel.experts import check_stacked, mask_foreign_experts
from rl_dtensor.parallel.plan import blocks_of, whole_blocks_of

SEQUENCE = -2
"""The dim of tokens in hidden states, `[batch, seq, hidden]` or `[tokens, hidden]`."""

LORA_A, LORA_B, MAGNITUDE = ".lora_A.", ".lora_B.", ".lora_magnitude_vector."


def split_tensors(
    hf: PreTrainedModel,
    plan: Mapping[str, Style],
    mesh: DeviceMesh,
    *,
    layers: Sequence[nn.Module],
    sequence_parallel: bool,
    final_norm: str | None,
    has_split_head: bool,
    apart: Sequence[nn.Module] = (),
    is_exact: bool = False,
) -> None:
    """Split a model on `meta` over the ranks of a mesh of one axis.

    Args:
        hf: Model on `meta`, changed in place.
        plan: Style of a module or a parameter by its name; entries that this model lacks are skipped.
        mesh: Mesh of the tensor-parallel ranks.
        layers: The repeated ones, which may read parameters of their parts without calling these.
        sequence_parallel: True if tokens are split between blocks.
        final_norm: Name of the module whose output is made whole for the head; None if another rank has the head.
        has_split_head: True if the head is split, so that ranks have different gradients by its input.
        apart: Modules that are split over other ranks too, and are not changed here.
        is_exact: True to compute whole products of features and hidden states on some rank, in the order of one rank,
            instead of adding up the products of each rank.
    """
    splitter = _Splitter(hf, plan, mesh, layers, sequence_parallel, is_exact)
    splitter.split_parameters({id(module) for module in apart})
    if sequence_parallel and final_norm is not None:
        group = mesh.get_group()

        def whole(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return gather(output, SEQUENCE, group, sums_grad=has_split_head)

        hf.get_submodule(final_norm).register_forward_hook(whole)


class _Splitter:
    def __init__(
        self,
        hf: PreTrainedModel,
        plan: Mapping[str, Style],
        mesh: DeviceMesh,
        layers: Sequence[nn.Module],
        sequence_parallel: bool,
        is_exact: bool,
    ) -> None:
        self._hf, self._is_exact = hf, is_exact
        self._plan = plan
        self._mesh = mesh
        self._group = mesh.get_group()
        self._layers = layers
        self._tokens_are_split = sequence_parallel
        self._blocks = blocks_of(plan)
        self._whole_blocks = whole_blocks_of(plan)
        self._between: Placement = Partial() if sequence_parallel else Replicate()

    def split_parameters(self, apart: Set[int]) -> None:
        tied = self._hf.get_output_embeddings()
        embedding = self._hf.get_input_embeddings()
        table = None if embedding is None else embedding._parameters.get("weight")
        is_tied = isinstance(tied, nn.Linear) and embedding is not None and tied.weight is table
        for name, module in list(self._hf.named_modules()):
            plain = name.replace(".base_layer", "")
            if plain in self._blocks:
                module.register_forward_pre_hook(self._open, with_kwargs=True)
            if plain in self._whole_blocks and self._tokens_are_split:
                module.register_forward_pre_hook(self._make_whole, with_kwargs=True)
                module.register_forward_hook(self._split_again)
            has_parameters = any(parameter is not None for parameter in module._parameters.values())
            if has_parameters and id(module) not in apart:
                self._split(plain, module)
        if is_tied:
            assert isinstance(tied, nn.Linear)
            tied.weight = cast("nn.Embedding", embedding).weight

    def _split(self, plain: str, module: nn.Module) -> None:
        owner, is_a, is_b = plain, LORA_A in plain, LORA_B in plain or MAGNITUDE in plain
        is_adapter = is_a or is_b
        for part in (LORA_A, LORA_B, MAGNITUDE):
            owner = owner.partition(part)[0]
        style = self._plan.get(owner)
        gathers = style == "colwise_gather_output" or (self._is_exact and style == "rowwise_split_input")
        if is_a and style == "colwise":
            self._place(module, Replicate(), Partial())
        elif is_b and style == "rowwise":
            self._place(module, Replicate(), self._between)
        elif style == "colwise" or (style == "head" and not is_adapter):
            self._place(module, Shard(0), Shard(0))
        elif style == "rowwise" and self._is_exact:
            self._gathered_column(plain, module, closes_block=True)
        elif style == "rowwise":
            self._row(plain, module, has_whole_inputs=False)
        elif gathers and not is_adapter:
            self._gathered_column(plain, module)
        elif style == "rowwise_split_input" and not is_adapter:
            self._row(plain, module, has_whole_inputs=True)
        elif style == "embedding" and isinstance(module, nn.Embedding):
            self._embedding(module)
        elif style == "experts":
            self._experts(module)
        else:
            self._own_parameters(plain, module)

    def _own_parameters(self, plain: str, module: nn.Module) -> None:
        """Leave the module's parameters whole on every rank, except the ones that the plan contains."""
        split = {name for name in module._parameters if f"{plain}.{name}" in self._plan}
        within = [block for block in self._whole_blocks if plain.startswith(f"{block}.")]
        # The gradients of a part of a split block are summed; a whole block and a score head have whole gradients.
        if any(f"{plain}.".startswith(f"{block}.") for block in self._blocks):
            whole: Placement = Partial()
        elif plain in self._whole_blocks or within or plain == "score":
            whole = Replicate()
        else:
            whole = self._between
        self._distribute(module, {name: Shard(0) if name in split else Replicate() for name in module._parameters})
        # The module around it may read its parameters without calling it: its whole block, or its layer.
        around = [layer for layer in self._layers if any(part is module for part in layer.modules())]
        reader = around[0] if len(around) == 1 else None
        if within:
            reader = self._hf.get_submodule(within[0])
        if reader is None and isinstance(module, nn.Embedding) and not plain.startswith(body_name(self._hf)):
            # A vision tower may interpolate its table of places.
            reader = self._hf.get_submodule(plain.rpartition(".")[0])
        localize(module, {name: Shard(0) if name in split else whole for name in module._parameters}, reader=reader)

    def _place(self, module: nn.Module, held: Placement, grad: Placement) -> None:
        """Distribute all parameters of a module, and place the gradients of its computation."""
        self._distribute(module, dict.fromkeys(module._parameters, held))
        localize(module, dict.fromkeys(module._parameters, grad))

    def _row(self, name: str, module: nn.Module, *, has_whole_inputs: bool) -> None:
        """Sum the products of split inputs before the bias.

        If every rank has the inputs whole, each multiplies its part of them, and all get the whole sum.
        """
        assert isinstance(module, nn.Linear)
        if has_whole_inputs:
            self._check_even(name, module.in_features)
        self._distribute(module, {"weight": Shard(1), "bias": Replicate()})

        def forward(x: Tensor) -> Tensor:
            if has_whole_inputs:
                out = leave(product(module, split(x, -1, self._group)), self._group)
            else:
                out = self._close(product(module, x))
            return out if module.bias is None else out + module.bias

        cast("Any", module).forward = forward
        localize(module, {"weight": Shard(1), "bias": Replicate() if has_whole_inputs else self._between})

    def _gathered_column(self, name: str, module: nn.Module, *, closes_block: bool = False) -> None:
        """Multiply with the rows of each rank, and gather all products on every rank.

        Args:
            name: Name of the module.
            module: Linear layer.
            closes_block: True if its inputs are split, and its results leave a block.
        """
        assert isinstance(module, nn.Linear)
        self._check_even(name, module.out_features)
        self._distribute(module, dict.fromkeys(module._parameters, Shard(0)))

        def forward(x: Tensor) -> Tensor:
            whole = gather(x, -1, self._group) if closes_block else enter(x, self._group)
            products = gather(type(module).forward(module, whole), -1, self._group, sums_grad=False)
            return split(products, SEQUENCE, self._group) if closes_block and self._tokens_are_split else products

        cast("Any", module).forward = forward
        localize(module, {"weight": Shard(0), "bias": Shard(0)})

    def _check_even(self, name: str, width: int) -> None:
        if width % self._mesh.size():
            raise ValueError(
                f"tensor_parallel_size={self._mesh.size()} does not divide the {width} features of {name}; choose a "
                "size that does"
            )

    def _embedding(self, module: nn.Embedding) -> None:
        vocab, padding = module.num_embeddings, module.padding_idx
        self._distribute(module, {"weight": Shard(0)})
        start, stop = part_of(vocab, self._mesh.size(), self._mesh.get_local_rank())
        module.padding_idx = padding - start if padding is not None and start <= padding < stop else None
        original = module.forward

        def forward(ids: Tensor) -> Tensor:
            is_here = (ids >= start) & (ids < stop)
            rows = original((ids - start).clamp(0, max(stop - start - 1, 0)))
            return self._close(rows.where(is_here[..., None], 0.0))

        cast("Any", module).forward = forward
        localize(module, {"weight": Shard(0)})

    def _experts(self, module: nn.Module) -> None:
        """Let each rank's experts see all tokens, and sum the results of all ranks for a token."""
        check_stacked(module, self._hf.config.model_type)
        self._distribute(module, dict.fromkeys(module._parameters, Shard(0)))
        mask_foreign_experts(module, self._mesh.get_local_rank(), self._mesh.size())
        localize(module, dict.fromkeys(module._parameters, Shard(0)))
        original = module.forward

        def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            assert hidden.dim() == 2, "experts are called with tokens of all rows in one dim"
            if self._tokens_are_split:
                hidden, ids, weights = (gather(part, 0, self._group) for part in (hidden, ids, weights))
                return scatter_sum(original(hidden, ids, weights), 0, self._group)
            return leave(original(enter(hidden, self._group), ids, enter(weights, self._group)), self._group)

        cast("Any", module).forward = forward

    def _distribute(self, module: nn.Module, placements: Mapping[str, Placement]) -> None:
        for name in list(module._parameters):
            if module._parameters[name] is not None:
                distribute(module, name, self._mesh, placements[name])

    def _open(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Give a block whole tokens; each rank has a part of the gradients by them."""
        if self._tokens_are_split:
            return _through(partial(gather, dim=SEQUENCE, group=self._group), args, kwargs)
        return _through(partial(enter, group=self._group), args, kwargs)

    def _make_whole(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Give whole tokens to a block whose ranks all have the gradients by all of them."""
        return _through(partial(gather, dim=SEQUENCE, group=self._group, sums_grad=False), args, kwargs)

    def _split_again(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return this rank's tokens of the result of a whole block, which may be the first of a tuple."""
        if isinstance(output, tuple):
            return (split(output[0], SEQUENCE, self._group), *output[1:])
        return split(output, SEQUENCE, self._group)

    def _close(self, products: Tensor) -> Tensor:
        """Return the sum over the ranks: of all tokens, or of this rank's."""
        if self._tokens_are_split:
            return scatter_sum(products, SEQUENCE, self._group)
        return leave(products, self._group)


def product(module: nn.Linear, x: Tensor) -> Tensor:
    """Return the result of a linear layer by its class, without the bias."""
    held = module.__dict__["_parameters"]
    module.__dict__["_parameters"] = {**held, "bias": None}
    try:
        return type(module).forward(module, x)
    finally:
        module.__dict__["_parameters"] = held


def _through(change: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a block with its hidden states changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def part_of(extent: int, size: int, rank: int) -> tuple[int, int]:
    """Return start and end of a rank's part of a dim, as DTensor splits it."""
    width = -(-extent // size)
    return min(width * rank, extent), min(width * (rank + 1), extent)
