"""Checks that an engine computes with the weights that it received."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from rl_vllm.load_plan import LoadPlan, Piece

NUM_COLUMNS = 8


class WeightProbe:
    """Samples the tensors that arrive and compares them with the results of the layers, bit by bit.

    A few columns of every matrix are kept, different ones in each version. A layer applied to one-hot rows must give
    them back exactly, whatever packed copy it computes with: products with 1 and 0 do not round. Vectors are kept
    whole.
    Layers that quantise, and stacked expert weights, whose layout the kernels choose, are left to the coverage check.

    Args:
        model: this rank's part of the engine's model.
        plan: of the load into it.
        version: chooses the columns.
    """

    def __init__(self, model: nn.Module, plan: LoadPlan, version: int) -> None:
        self._layers: dict[str, nn.Module] = {}
        self._expected: dict[str, Tensor] = {}  # matrix: [rows, columns sampled]; vector: whole
        self._columns: dict[str, Tensor] = {}
        self._targets: dict[str, list[tuple[str, Piece]]] = {}
        self._filled: dict[str, set[str]] = {}
        self._pieces = plan.pieces
        generator = torch.Generator("cpu").manual_seed(version)
        for name, pieces in plan.pieces.items():
            layer = model.get_submodule(name.rpartition(".")[0])
            if name not in plan.opaque and _is_plain(layer) and all(_is_block(piece) for piece in pieces):
                self._watch(name, layer, pieces, generator)

    def _watch(self, name: str, layer: nn.Module, pieces: list[Piece], generator: torch.Generator) -> None:
        self._layers[name] = layer
        width = pieces[0].write.stride[0] if len(pieces[0].write.size) == 2 else 0
        if width:
            order = torch.randperm(width, generator=generator, device="cpu")
            self._columns[name] = order[:NUM_COLUMNS].sort().values
        for piece in pieces:
            self._targets.setdefault(piece.source, []).append((name, piece))

    def take(self, source: str, tensor: Tensor) -> None:
        """Keep samples of a tensor that arrived, contiguous, before it is handed to the loaders."""
        for name, piece in self._targets.get(source, ()):
            block = piece.read.read(tensor)
            self._filled.setdefault(name, set()).add(piece.name)
            if name not in self._columns:
                self._put_vector(name, piece, block)
            else:
                self._put_columns(name, piece, block)

    def _put_vector(self, name: str, piece: Piece, block: Tensor) -> None:
        length = max(p.write.offset + p.write.size[0] for p in self._pieces[name])
        expected = self._expected.setdefault(name, block.new_zeros(length))
        expected[piece.write.offset : piece.write.offset + len(block)] = block

    def _put_columns(self, name: str, piece: Piece, block: Tensor) -> None:
        columns = self._columns[name]
        width = piece.write.stride[0]
        top, left = divmod(piece.write.offset, width)
        if name not in self._expected:
            height = max(p.write.offset // width + p.write.size[0] for p in self._pieces[name])
            self._expected[name] = block.new_zeros(height, len(columns))
        inside = (columns >= left) & (columns < left + block.shape[1])
        picked = block[:, (columns[inside] - left).to(block.device)]
        self._expected[name][top : top + block.shape[0], inside.to(block.device)] = picked

    def stale(self) -> list[str]:
        """Hugging Face names of the tensors that the engine does not compute with, in the order of its layers."""
        names: list[str] = []
        for name, layer in self._layers.items():
            arrived = self._filled.get(name, set())
            late = [piece.name for piece in self._pieces[name] if piece.name not in arrived]
            wrong = [] if name not in self._expected else self._wrong(name, layer)
            names += [found for found in (*late, *wrong) if found not in names]
        return names

    def _wrong(self, name: str, layer: nn.Module) -> list[str]:
        expected = self._expected[name]
        actual = self._computed(name, layer, expected)
        if isinstance(layer, LinearBase):
            expected = expected.to(layer.params_dtype)  # the CPU engine widens a bias after it was rounded
        expected = expected.to(actual.dtype)
        bad = (actual != expected) & ~(actual.isnan() & expected.isnan())
        if bad.ndim == 2:
            bad = _beyond_rounding(actual, expected, bad).any(dim=1)
        wrong: list[str] = []
        for piece in self._pieces[name]:
            width = self._width(name)
            top = piece.write.offset // width
            if bad[top : top + piece.write.size[0]].any() and piece.name not in wrong:
                wrong.append(piece.name)
        return wrong

    def _width(self, name: str) -> int:
        return self._pieces[name][0].write.stride[0] if name in self._columns else 1

    def _computed(self, name: str, layer: nn.Module, expected: Tensor) -> Tensor:
        """Return the layer's values for the sampled columns `[rows, columns]`, or its vector."""
        parameter = layer.get_parameter(name.rpartition(".")[2])
        if name not in self._columns:
            return parameter[: len(expected)]
        columns = self._columns[name].to(parameter.device)
        if isinstance(layer, LinearBase | ParallelLMHead):
            one_hot = torch.zeros(len(columns), self._width(name), dtype=parameter.dtype, device=parameter.device)
            one_hot.scatter_(1, columns[:, None], 1)
            return layer.quant_method.apply(layer, one_hot, None).t()[: len(expected)]
        return parameter[: len(expected), columns]


def _is_plain(layer: nn.Module) -> bool:
    if isinstance(layer, LinearBase | VocabParallelEmbedding):
        return isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    return all(parameter.ndim == 1 for parameter in layer.parameters(recurse=False))


def _is_block(piece: Piece) -> bool:
    write = piece.write
    if len(write.size) == 1:
        return write.stride == (1,) and len(piece.read.size) == 1
    return len(write.size) == 2 and write.stride[1] == 1 and len(piece.read.size) == 2


def _beyond_rounding(actual: Tensor, expected: Tensor, bad: Tensor) -> Tensor:
    """Mask of the elements that differ by more than a matrix product in reduced precision (TF32) may."""
    if actual.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return bad
    return bad & ((actual - expected).abs() > 2.0**-9 * expected.abs())
