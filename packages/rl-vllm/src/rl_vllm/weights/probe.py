"""Checks that an engine computes with the weights that it received."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from rl_core.torch.transport.bucket import Region
from rl_vllm.weights.load_plan import LoadPiece, LoadPlan
from rl_vllm.weights.planned_load import is_plain

NUM_COLUMNS = 8


class WeightProbe:
    """Samples the tensors that arrive and compares them with the results of the layers, bit by bit.

    A few columns of every matrix are kept, different ones in each version, the same ones of matrices of one width. A
    layer applied to one-hot rows must give them back exactly, whatever packed copy it computes with: products with 1
    and 0 do not round. Vectors, scalars and the weights of convolutions are kept whole.
    Weights of layers that quantise are left to `QuantisationCheck`, and stacked expert weights, whose layout the
    kernels choose, to the coverage check.

    Args:
        model: This rank's part of the engine's model.
        plan: Plan of the load into it.
        version: Chooses the columns.
    """

    def __init__(self, model: nn.Module, plan: LoadPlan, version: int) -> None:
        self._layers: dict[str, nn.Module] = {}
        self._expected: dict[str, Tensor] = {}  # A matrix has `[rows, columns sampled]`; a vector or a scalar is whole.
        self._widths: dict[str, int] = {}
        self._columns: dict[int, Tensor] = {}
        self._targets: dict[str, list[tuple[str, LoadPiece]]] = {}
        self._filled: dict[str, set[str]] = {}
        self._pieces = plan.pieces
        self._version = version
        for name, pieces in plan.pieces.items():
            layer = model.get_submodule(name.rpartition(".")[0])
            is_kept = is_plain(layer) or name.rpartition(".")[2] == "bias"
            if name in plan.opaque or not is_kept or not all(_is_block(piece) for piece in pieces):
                continue
            self._layers[name] = layer
            if len(pieces[0].write.size) == 2:
                self._widths[name] = pieces[0].write.stride[0]
            for piece in pieces:
                self._targets.setdefault(piece.source, []).append((name, piece))

    def take(self, source: str, read: Callable[[Region], Tensor]) -> None:
        """Keep samples of a tensor that arrived, before it is handed to the loaders.

        Args:
            source: Name that it was sent under.
            read: Returns a part of it.
        """
        for name, piece in self._targets.get(source, ()):
            block = read(piece.read)
            self._filled.setdefault(name, set()).add(piece.name)
            if name not in self._widths:
                length = max(p.write.offset + prod(p.write.size) for p in self._pieces[name])
                expected = self._expected.setdefault(name, block.new_zeros(length))
                expected[piece.write.offset : piece.write.offset + block.numel()] = block.reshape(-1)
                continue
            width = self._widths[name]
            columns = self._columns_of(width, block.device)
            top, left = divmod(piece.write.offset, width)
            if name not in self._expected:
                height = max(p.write.offset // width + p.write.size[0] for p in self._pieces[name])
                self._expected[name] = block.new_zeros(height, len(columns))
            rows = self._expected[name][top : top + block.shape[0]]
            if block.shape[1] == width:
                torch.index_select(block, 1, columns, out=rows)
            else:
                inside = (columns >= left) & (columns < left + block.shape[1])
                rows[:, inside] = block[:, columns[inside] - left]

    def _columns_of(self, width: int, device: torch.device) -> Tensor:
        """Return int64, the columns that are sampled of matrices of a width."""
        if width not in self._columns:
            generator = torch.Generator("cpu").manual_seed(self._version)
            order = torch.randperm(width, generator=generator, device="cpu")
            self._columns[width] = order[:NUM_COLUMNS].sort().values.to(device)
        return self._columns[width]

    def stale(self) -> list[str]:
        """Return the Hugging Face names of the tensors that the engine does not compute with, in the order of its
        layers."""
        names: list[str] = []
        one_hot: dict[tuple[int, torch.dtype], Tensor] = {}
        for name, layer in self._layers.items():
            arrived = self._filled.get(name, set())
            late = [piece.name for piece in self._pieces[name] if piece.name not in arrived]
            wrong = [] if name not in self._expected else self._wrong(name, layer, one_hot)
            names += [found for found in (*late, *wrong) if found not in names]
        return names

    def _wrong(self, name: str, layer: nn.Module, one_hot: dict[tuple[int, torch.dtype], Tensor]) -> list[str]:
        expected = self._expected[name]
        actual = self._computed(name, layer, expected, one_hot)
        if isinstance(layer, LinearBase) and name.rpartition(".")[2] == "bias":
            expected = expected.to(layer.params_dtype)  # The CPU engine widens a bias after it was rounded.
        expected = expected.to(actual.dtype)
        if torch.equal(actual, expected):
            return []
        bad = (actual != expected) & ~(actual.isnan() & expected.isnan())
        if bad.ndim == 2:
            # A matrix product in reduced precision (TF32) may round.
            if actual.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
                bad = bad & ((actual - expected).abs() > 2.0**-9 * expected.abs())
            bad = bad.any(dim=1)
        wrong: list[str] = []
        for piece in self._pieces[name]:
            top = piece.write.offset // self._widths.get(name, 1)
            num_rows = piece.write.size[0] if name in self._widths else prod(piece.write.size)
            if bad[top : top + num_rows].any() and piece.name not in wrong:
                wrong.append(piece.name)
        return wrong

    def _computed(
        self, name: str, layer: nn.Module, expected: Tensor, one_hot: dict[tuple[int, torch.dtype], Tensor]
    ) -> Tensor:
        """Return the layer's values for the sampled columns `[rows, columns]`, or its vector."""
        parameter = get_layer_tensors(layer)[name.rpartition(".")[2]]
        if name not in self._widths:
            return parameter.reshape(-1)[: len(expected)]
        width = self._widths[name]
        columns = self._columns_of(width, parameter.device)
        if not isinstance(layer, LinearBase | ParallelLMHead):
            return parameter[: len(expected), columns]
        key = width, parameter.dtype
        if key not in one_hot:
            rows = torch.zeros(len(columns), width, dtype=parameter.dtype, device=parameter.device)
            one_hot[key] = rows.scatter_(1, columns[:, None], 1)
        return layer.quant_method.apply(layer, one_hot[key], None).t()[: len(expected)]


def _is_block(piece: LoadPiece) -> bool:
    write = piece.write
    if not write.size:
        return not piece.read.size
    if len(write.size) == 1:
        return write.stride == (1,) and len(piece.read.size) == 1
    if len(write.size) > 2:
        return list(write.stride) == [prod(write.size[place + 1 :]) for place in range(len(write.size))]
    return write.stride[1] == 1 and len(piece.read.size) == 2
