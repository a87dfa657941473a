"""Attention of packed and padded rows, and of rows that share prefixes, by every backend, compared with plain products
in float32, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import get_args

import torch
from torch import Tensor, nn

from gpu_check.environment import seconds_of
from gpu_check.report import Report, Skip
from gpu_check.setup import Setup
from rl_core.data.batch import TOKENS
from rl_core.torch.loss import Rows
from rl_dtensor.config import AttentionBackend, DTensorConfig
from rl_dtensor.model.attention import row_attention
from rl_dtensor.model.kernels import kernel_of
from rl_dtensor.model.layout import Alignment, RowLayout, lay_out
from rl_dtensor.model.settings import device_problems, without_sinks, without_softcap

LENGTHS = (1, 700, 37, 1500, 3, 129, 512, 64)
SMALL_LENGTHS = (1, 21, 5, 64, 3)
BOUND = {torch.bfloat16: 1.5e-2, torch.float32: 2e-4}
"""Of the root mean square of differences in the worst row, relative to that of the oracle, in the row or in all rows,
whichever is larger."""

LAYOUTS = ("packed", "padded", SHARED := "shared prefixes")

GENERATIONS = {"auto": "FA2", "flash_attention_2": "FA2", "flash_attention_3": "FA3"}
"""Flash attention's generation of a backend; `auto` is torch's."""


@dataclass(frozen=True)
class Case:
    """Heads of queries, heads of keys, their dimension, the window, the cap of scores, and whether heads have sinks."""

    heads: int
    key_value_heads: int
    head_dim: int
    window: int | None
    softcap: float | None = None
    has_sinks: bool = False

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        softcap = "" if self.softcap is None else f", scores capped at {self.softcap:g}"
        sinks = ", sinks" if self.has_sinks else ""
        return f"{self.heads}/{self.key_value_heads} heads of {self.head_dim}{window}{softcap}{sinks}"

    def sinks(self, device: torch.device) -> Tensor | None:
        """Return sinks `[heads]` of different sizes."""
        return torch.linspace(-2, 4, self.heads, device=device) if self.has_sinks else None

    def is_of(self, backend: AttentionBackend) -> bool:
        """Return whether a backend has kernels for it."""
        if self.softcap is not None and without_softcap(backend):
            return False
        return not (self.has_sinks and without_sinks(backend))


CASES = (
    Case(16, 8, 128, None),
    Case(8, 8, 64, None),
    Case(16, 2, 128, 100),
    Case(4, 2, 256, None),
    Case(8, 4, 256, 100, softcap=3.0),
    Case(16, 2, 64, 128, has_sinks=True),
)
SMALL_CASES = (Case(4, 2, 32, None), Case(4, 2, 32, 7), Case(4, 2, 32, 7, softcap=1.0, has_sinks=True))


def check(setup: Setup, report: Report) -> None:
    """Check each backend in half and in full precision, then measure the speed of each."""
    cases = SMALL_CASES if setup.is_small else CASES
    for backend in get_args(AttentionBackend):
        for dtype in (torch.bfloat16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            with report.attempt(f"{backend}, {name}"):
                _refuse(backend, name, setup)
                for case in (case for case in cases if case.is_of(backend)):
                    for layout in LAYOUTS:
                        with report.attempt(f"{backend}, {name}, {layout}, {case}"):
                            worst = _worst_error(setup, backend, dtype, case, layout)
                            report.within(
                                f"{backend}, {name}, {layout}, {case}: {worst[0]} of row {worst[1]}",
                                "float32 products, row by row",
                                worst[2],
                                BOUND[dtype],
                            )
    report.figures(
        f"Forward and backward, bfloat16, {setup.pick(64, 8192)} tokens, packed",
        ("backend", "rows of", "ms", "TFLOP/s"),
        _speeds(setup, report),
    )


def _refuse(backend: AttentionBackend, precision: str, setup: Setup) -> None:
    """Raise `Skip` with the reason for which a run would be refused."""
    for problem in device_problems(DTensorConfig(attention_backend=backend), precision=precision, device=setup.kind):
        raise Skip(problem.message)
    try:
        kernel_of(backend)
    except ValueError as error:
        raise Skip(str(error)) from None


def _worst_error(
    setup: Setup, backend: AttentionBackend, dtype: torch.dtype, case: Case, kind: str
) -> tuple[str, int, float]:
    """Return which of the output and the gradients is most wrong, the row, and the error."""
    lengths = SMALL_LENGTHS if setup.is_small else LENGTHS
    parts = _parts(sum(lengths), case, dtype, setup.torch_device)
    grad = torch.randn_like(parts[0]).transpose(1, 2)  # [1, tokens, heads, head_dim]
    layout = _layout(lengths, kind, setup.torch_device)
    found = _with_gradients(lambda *p: _attended(p, lengths, backend, case, layout), parts, grad)
    # Rows that share a token take it from the same row, so that its gradients add up there.
    source = torch.arange(sum(lengths), device=setup.torch_device)
    source = source if layout.tree is None else layout.places[layout.whole_rows[0]]
    expected = _with_gradients(
        lambda *p: _by_row([part.index_select(2, source) for part in p], lengths, case),
        [part.float() for part in parts],
        grad.float(),
    )
    bounds = list(pairwise([0, *torch.tensor(lengths).cumsum(0).tolist()]))
    errors = []
    for name, ours, theirs in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        scale = theirs.square().mean().sqrt().item()
        for row, (start, end) in enumerate(bounds):
            # keys of a short row get more weight each, so its gradients are larger, and rounded in proportion
            own = theirs[0, start:end].square().mean().sqrt().item()
            difference = (ours[0, start:end].float() - theirs[0, start:end]).square().mean().sqrt().item()
            errors.append((name, row, difference / max(scale, own)))
    nan = [error for error in errors if error[2] != error[2]]
    return nan[0] if nan else max(errors, key=lambda error: error[2])


def _parts(num_tokens: int, case: Case, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return query, key and value, `[1, heads, tokens, head_dim]`."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(1, heads, num_tokens, case.head_dim, device=device, generator=generator).to(dtype)
        for heads in (case.heads, case.key_value_heads, case.key_value_heads)
    ]


def _with_gradients(function: Callable[..., Tensor], parts: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the output and the gradients by query, key and value, all `[1, tokens, heads, head_dim]`."""
    leaves = [part.clone().requires_grad_() for part in parts]
    output = function(*leaves)
    output.backward(grad)
    grads = [leaf.grad for leaf in leaves]
    assert all(found is not None for found in grads)
    return [output.detach(), *(found.transpose(1, 2) for found in grads if found is not None)]


def _layout(lengths: Sequence[int], kind: str, device: torch.device) -> RowLayout:
    """Return the layout of a kind in `LAYOUTS`. Each row begins with the same tokens, for two thirds of its length."""
    tokens = [torch.where(torch.arange(length) < 2 * length // 3, 0, row + 1) for row, length in enumerate(lengths)]
    rows = Rows(torch.tensor([0, *lengths], device=device).cumsum(0), {TOKENS: torch.cat(tokens).to(device)})
    return lay_out(rows, Alignment(), is_packed=kind != "padded", shares_prefixes=kind == SHARED)


def _attended(
    parts: Sequence[Tensor], lengths: Sequence[int], backend: AttentionBackend, case: Case, layout: RowLayout
) -> Tensor:
    """Return the output `[1, tokens, heads, head_dim]` of the product's attention function, from rows end to end."""
    laid: Sequence[Tensor] = parts
    if layout.attention_mask is not None:
        laid = [_side_by_side(part, lengths) for part in parts]
    elif layout.tree is not None:
        laid = [part.index_select(2, layout.places) for part in parts]
    options = {"sliding_window": case.window, "softcap": case.softcap, "s_aux": case.sinks(parts[0].device)}
    out = row_attention(nn.Module(), *laid, None, layout=layout, attend=kernel_of(backend), **options)[0]
    if layout.attention_mask is not None:
        return torch.cat([row[:length] for row, length in zip(out, lengths, strict=True)])[None]
    return out if layout.tree is None else out.index_select(1, layout.whole_rows[0])


def _side_by_side(part: Tensor, lengths: Sequence[int]) -> Tensor:
    rows = [row[0].transpose(0, 1) for row in part.split(list(lengths), 2)]  # [tokens, heads, head_dim]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True).transpose(1, 2)


def _by_row(parts: Sequence[Tensor], lengths: Sequence[int], case: Case) -> Tensor:
    """Return the oracle: a softmax of products, row by row."""
    repeats = case.heads // case.key_value_heads
    outputs = []
    for query, key, value in zip(*(part.split(list(lengths), 2) for part in parts), strict=True):
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        place = torch.arange(query.shape[2], device=query.device)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < (case.window or len(place)))
        scores = (query @ key.transpose(2, 3)) * case.head_dim**-0.5
        if case.softcap is not None:
            scores = case.softcap * (scores / case.softcap).tanh()
        scores = scores.masked_fill(~seen, -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)
        sinks = case.sinks(query.device)
        if sinks is not None:
            total = total.logaddexp(sinks[:, None, None])
        outputs.append(((scores - total).exp() @ value).transpose(1, 2))
    return torch.cat(outputs, 1)


def _speeds(setup: Setup, report: Report) -> list[tuple[str, str, str, str]]:
    tokens, case = setup.pick(64, 8192), SMALL_CASES[0] if setup.is_small else CASES[0]
    lines = []
    for backend in get_args(AttentionBackend):
        for length in (setup.pick(16, 1024), tokens):
            with report.attempt(f"speed of {backend}, rows of {length}"):
                _refuse(backend, "bfloat16", setup)
                lengths = [length] * (tokens // length)
                took = seconds_of(partial(_pass, setup, backend, case, lengths), setup, repeats=3)
                # of pairs under the causal mask: two products forward, five backward
                flops = 7 * 2 * case.heads * case.head_dim * len(lengths) * length * (length + 1) / 2
                lines.append((backend, str(length), f"{took * 1e3:.2f}", f"{flops / took / 1e12:.2f}"))
                generation = GENERATIONS.get(backend)
                if generation:
                    expected = setup.chip and setup.chip.attention(generation) / 1e12
                    basis = f"published rates of {generation}"
                    report.speed(f"{backend}, rows of {length}", "TFLOP/s", flops / took / 1e12, expected, basis)
    return lines


def _pass(setup: Setup, backend: AttentionBackend, case: Case, lengths: Sequence[int]) -> None:
    parts = _parts(sum(lengths), case, torch.bfloat16, setup.torch_device)
    leaves = [part.requires_grad_() for part in parts]
    out = _attended(leaves, lengths, backend, case, _layout(lengths, "packed", setup.torch_device))
    out.backward(out.detach())
