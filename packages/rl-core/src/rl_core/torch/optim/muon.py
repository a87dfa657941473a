"""Muon over matrices whose parts are on several ranks, and AdamW over the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from rl_core.torch.optim.parameters import MatrixPiece, Pieces, local_part, loss_of

WAVE_BYTES = 2**28
"""Bytes of whole matrices that a rank holds at one time, if more than one fits."""

IS_MATRIX = "is_matrix"
"""Key of a parameter group that Muon steps; AdamW steps the others."""

Box = tuple[int, int, int, int]
"""First row and column of a piece of a matrix, and its numbers of rows and columns."""


class Muon(Optimizer):
    """Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) with the formula and the
    arguments of `torch.optim.Muon`, for parameters of which each rank may hold any part.

    The direction of a step follows from the whole matrix: its parts meet on one of the ranks that hold it, which
    orthogonalises it and sends every holder its part back. Ranks share this work, and no rank holds more than
    `WAVE_BYTES`, or one matrix, of others at a time. Momentum stays with the parts.

    Args:
        params: Groups of parameters; those with `is_matrix` are stepped by Muon, the others by AdamW.
        pieces: Function for each parameter of Muon from this rank's part of a tensor of its shape to its matrices.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as of `torch.optim.Muon`.
        ns_dtype: Dtype of the orthogonalisation, `bfloat16` or `float32`.
        adamw: Arguments of AdamW. `lr` and `weight_decay` are Muon's if they are not given.

    Raises:
        ValueError: If one of these is out of range.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        pieces: Mapping[nn.Parameter, Pieces],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_dtype: str = "bfloat16",
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        if ns_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"ns_dtype must be bfloat16 or float32, got {ns_dtype!r}")
        if not 0 < ns_steps < 100:
            raise ValueError(f"ns_steps must be from 1 to 99, got {ns_steps}")
        own: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        own |= {"ns_coefficients": tuple(ns_coefficients), "eps": eps, "ns_steps": ns_steps}
        own["adjust_lr_fn"] = adjust_lr_fn
        # Torch's class checks the arguments that both have.
        torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], **own)
        own["ns_dtype"] = ns_dtype
        rest = {"lr": lr, "weight_decay": weight_decay, **(adamw or {})}
        self._adamw = AdamW([nn.Parameter(torch.zeros(1))], **rest)
        defaults = {True: own, False: self._adamw.defaults}
        super().__init__([{**defaults[group[IS_MATRIX]], **group} for group in params], own)
        self._pieces = pieces
        self._exchange: MatrixExchange | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter that has a gradient; collective over all ranks of the default process group."""
        loss = loss_of(closure)
        # Both may have been replaced since the last step.
        self._adamw.state = self.state
        self._adamw.param_groups = [group for group in self.param_groups if not group[IS_MATRIX]]
        self._adamw.step()
        groups = [group for group in self.param_groups if group[IS_MATRIX]]
        matrices = [(parameter, group) for group in groups for parameter in group["params"]]
        directions = {parameter: self._direction(parameter, group) for parameter, group in matrices}
        held = [piece for parameter, tensor in directions.items() for piece in self._pieces[parameter](tensor)]
        settings = self.defaults
        if self._exchange is None:
            self._exchange = MatrixExchange(held)
        dtype = getattr(torch, settings["ns_dtype"])

        def orthogonalise(matrix: Tensor) -> Tensor:
            return orthogonalised(matrix, settings["ns_coefficients"], settings["ns_steps"], settings["eps"])

        self._exchange.apply(held, orthogonalise, dtype)
        for piece in held:
            piece.values.mul_(rate_ratio(settings["adjust_lr_fn"], piece.shape))
        for parameter, group in matrices:
            if parameter.grad is not None:
                local_part(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(
                    directions[parameter], alpha=-group["lr"]
                )
        return loss

    def _direction(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        """Return this rank's part of the momentum, updated, or of Nesterov's extrapolation of it, which may be changed.
        A parameter without a gradient takes part with zeros, since others wait for its pieces."""
        if parameter.grad is None:
            return torch.zeros_like(local_part(parameter))
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        momentum, grad = local_part(state["momentum_buffer"]), local_part(parameter.grad)
        momentum.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone()


def orthogonalised(matrix: Tensor, coefficients: Sequence[float], num_steps: int, eps: float) -> Tensor:
    """Return about `U @ V.T` of a matrix `U @ S @ V.T`, by the Newton-Schulz iteration of `torch.optim.Muon` in the
    dtype of the matrix."""
    a, b, c = coefficients
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x


def rate_ratio(adjust_lr_fn: str | None, shape: tuple[int, int]) -> float:
    """Return the factor of the learning rate for a matrix of a shape, as `torch.optim.Muon` has it."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(shape))
    return math.sqrt(max(1, shape[0] / shape[1]))


class Way(NamedTuple):
    """Way of a piece between two ranks, one of which is this one."""

    matrix: str
    box: Box
    source: int
    target: int


class Wave(NamedTuple):
    """Matrices that are brought together at one time.

    Args:
        owned: Shapes of the matrices that this rank gets, by name.
        there: Ways of pieces to the ranks that get the matrices.
        back: Ways of pieces to all ranks that hold them.
    """

    owned: dict[str, tuple[int, int]]
    there: list[Way]
    back: list[Way]


class MatrixExchange:
    """Brings matrices together, each on one of the ranks that hold parts of it, and spreads them again.

    All ranks of the default process group make it and call `apply`, also those that hold nothing. Without a process
    group it works on whole matrices.

    Args:
        held: Pieces that this rank holds, the same in every call of `apply` except for their values.
    """

    def __init__(self, held: Sequence[MatrixPiece]) -> None:
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._rank: int = 0 if is_alone else dist.get_rank()
        self._size: int = 1 if is_alone else dist.get_world_size()
        mine = [(piece.matrix, piece.shape, _box(piece)) for piece in held]
        everyone: list[list[tuple[str, tuple[int, int], Box]]] = [mine]
        if not is_alone:
            everyone = [[] for _ in range(self._size)]
            dist.all_gather_object(everyone, mine)
        shapes: dict[str, tuple[int, int]] = {}
        holders: dict[str, dict[Box, list[int]]] = {}
        for rank, pieces in enumerate(everyone):
            for name, shape, box in pieces:
                shapes[name] = shape
                holders.setdefault(name, {}).setdefault(box, []).append(rank)
        # The holder with the least work so far gets a matrix. The largest come first, so that work is even.
        costs = {name: rows * columns * min(rows, columns) for name, (rows, columns) in shapes.items()}
        work, taken = [0] * self._size, [0] * self._size
        waves: dict[int, Wave] = {}
        for name in sorted(shapes, key=lambda each: (-costs[each], each)):
            owner = min(
                {rank for ranks in holders[name].values() for rank in ranks}, key=lambda rank: (work[rank], rank)
            )
            wave = waves.setdefault(taken[owner] // WAVE_BYTES, Wave({}, [], []))
            work[owner] += costs[name]
            taken[owner] += math.prod(shapes[name]) * torch.float32.itemsize
            if owner == self._rank:
                wave.owned[name] = shapes[name]
            for box, ranks in sorted(holders[name].items()):
                # Of ranks that hold the same piece, the first one sends it.
                ways = [Way(name, box, ranks[0], owner)], [Way(name, box, owner, rank) for rank in ranks]
                for kept, found in zip((wave.there, wave.back), ways, strict=True):
                    kept += [way for way in found if self._rank in (way.source, way.target)]
        # Every rank makes the same waves, since all take part in each exchange.
        self._waves = [waves[number] for number in sorted(waves)]

    def apply(self, held: Sequence[MatrixPiece], function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        """Replace the values of pieces by a function of the whole matrices; collective.

        Args:
            held: Pieces that this rank holds.
            function: Function from a matrix to another one of its shape.
            dtype: Dtype of the matrices on their way and in the function.
        """
        own: dict[tuple[str, Box], Tensor] = {(piece.matrix, _box(piece)): piece.values for piece in held}
        device = _exchange_device(held)
        for wave in self._waves:
            wholes = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in wave.owned.items()}
            parts = {(way.matrix, way.box): way.box for way in (*wave.there, *wave.back) if way.matrix in wholes}
            self._send(wave.there, own, {key: _part(wholes[key[0]], box) for key, box in parts.items()}, dtype, device)
            wholes = {name: function(matrix) for name, matrix in wholes.items()}
            self._send(wave.back, {key: _part(wholes[key[0]], box) for key, box in parts.items()}, own, dtype, device)

    def _send(
        self,
        ways: Sequence[Way],
        sources: Mapping[tuple[str, Box], Tensor],
        targets: Mapping[tuple[str, Box], Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Copy pieces between ranks.

        Args:
            ways: Ways of the pieces, in the same order on both ranks of each.
            sources: Values of pieces that this rank sends, by matrix and box.
            targets: Memory of pieces that this rank receives.
            dtype: Dtype on the way.
            device: Device of messages.
        """
        sent: list[list[Way]] = [[] for _ in range(self._size)]
        received: list[list[Way]] = [[] for _ in range(self._size)]
        for way in ways:
            if way.source == self._rank:
                sent[way.target].append(way)
            if way.target == self._rank:
                received[way.source].append(way)
        out, into = ([sum(math.prod(way.box[2:]) for way in each) for each in side] for side in (sent, received))
        message = arrived = torch.empty(sum(out), dtype=dtype, device=device)
        for way, place in _placed(sent, message):
            place.copy_(sources[way.matrix, way.box])
        if self._size > 1:
            arrived = torch.empty(sum(into), dtype=dtype, device=device)
            dist.all_to_all_single(arrived, message, into, out)
        for way, place in _placed(received, arrived):
            targets[way.matrix, way.box].copy_(place)


def _placed(ways: Iterable[Iterable[Way]], message: Tensor) -> Iterator[tuple[Way, Tensor]]:
    """Yield each way with the view of its piece in a message."""
    start = 0
    for way in chain.from_iterable(ways):
        rows, columns = way.box[2:]
        yield way, message[start : start + rows * columns].view(rows, columns)
        start += rows * columns


def _box(piece: MatrixPiece) -> Box:
    return (*piece.offsets, *piece.values.shape)


def _part(matrix: Tensor, box: Box) -> Tensor:
    row, column, rows, columns = box
    return matrix[row : row + rows, column : column + columns]


def _exchange_device(held: Sequence[MatrixPiece]) -> torch.device:
    """Return the device of messages: a GPU if ranks talk by NCCL, wherever the values are."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return held[0].values.device if held else torch.device("cpu")
