"""Reads of rows from the hidden states of their tokens, whole or split over ranks.

A backend with context parallelism gives each rank some positions of each row, and one with tensor parallelism some rows
of the head; the losses still see whole rows. Results, a few numbers per token, are joined; hidden states are joined
only if they are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, Required, TypedDict, Unpack

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rl_core.data.batch import TOKENS
from rl_core.model import HeadFiles, Read, Role, read_columns
from rl_core.torch.files.model_files import WeightFiles, model_folder, read_hf_config
from rl_core.torch.heads.divergences import Other, divergences
from rl_core.torch.heads.head_pass import AllowedSets, wide_dtype
from rl_core.torch.heads.logprobs import Head, HeadOptions, head_reads, logit_transform
from rl_core.torch.heads.vocab_parallel import VocabShard, vocab_parallel_reads
from rl_core.torch.loss import Rows, followers_of
from rl_core.torch.rows import ALLOWED_BITS, ALLOWED_SET

LANGUAGE_READS = ("logprobs", "entropy", "collision", "topk", "logprobs_at", "hidden", "divergences")
"""Reads that a language-model head can answer."""

READS_OF_ROLE: Mapping[Role, tuple[str, ...]] = {
    "policy": LANGUAGE_READS,
    "teacher": LANGUAGE_READS,
    "reward_model": ("scores", "values"),
    "critic": ("values", "scores"),
}
"""Reads that the head of each role can answer."""

FILTERED_READS = ("logprobs", "entropy", "collision")
"""Reads of the distribution over the tokens that a filter keeps."""

ROW_READS = ("scores",)
"""Reads with one value per row; all others have one per token."""


def check_reads(role: Role, reads: Sequence[Read]) -> None:
    """Raise a `ValueError` naming the reads that a role's head cannot answer, or two of a kind that differ."""
    unknown = [read.name for read in reads if read.name not in READS_OF_ROLE[role]]
    if unknown:
        raise ValueError(f"a {role} cannot read {', '.join(unknown)}; it has {', '.join(READS_OF_ROLE[role])}")
    if len({(read.k, read.below) for read in reads if read.name == "topk"}) > 1:
        raise ValueError("a pass can read only one topk; request the largest k")
    if len({read.column for read in reads if read.name == "logprobs_at"}) > 1:
        raise ValueError("a pass can read logprobs_at of only one column; put all ids in one column, `[tokens, k]`")
    if sum(read.name == "divergences" for read in reads) > 1:
        raise ValueError("a pass can read the divergences only once; list the heads of all other models in one read")
    if any(read.token_filter is not None for read in reads):
        whole = [read.name for read in reads if read.name not in FILTERED_READS]
        if whole:
            raise ValueError(
                f"{', '.join(whole)} cannot be read together with reads that have a filter; use two passes"
            )
        if len({read.token_filter for read in reads}) > 1:
            raise ValueError("all reads of a pass must have the same filter; use one pass per filter")


class PassOptions(TypedDict, total=False):
    """Options of `position_reads`.

    Args:
        temperature: Divides the logits.
        chunk_size: Number of positions whose logits exist at one time; None for `chunk_size_of`.
        shard: Place of this rank's rows in the head; None if it has the whole head.
        sums_hidden_grad: As in `vocab_parallel_reads`.
    """

    temperature: Required[float]
    chunk_size: int | None
    shard: VocabShard | None
    sums_hidden_grad: bool


def reads_columns(reads: Sequence[Read], rows: Rows) -> bool:
    """Return whether results of a token depend on columns of its row, in addition to the tokens up to it."""
    return ALLOWED_SET in rows or any(read.column or read.choice for read in reads)


def language_reads(
    hidden: Tensor, rows: Rows, head: Head, reads: Sequence[Read], **options: Unpack[PassOptions]
) -> dict[str, Tensor]:
    """Return the columns of the reads of a language-model head, `[tokens]` or `[tokens, k]`.

    They are 0 at the first token of each row.

    Args:
        hidden: `[tokens, hidden]`, after the model's last norm.
        rows: Rows of the pass, with the columns that the reads take.
        head: The whole head.
        reads: Reads of the head; each adds its columns to the result.
        **options: How the head is read.

    Raises:
        ValueError: For ids that are not in the vocabulary, or not `[tokens, k]`.
    """
    follows = rows.followers
    found = position_reads(hidden[follows - 1], head, rows, follows, reads, **options)
    return {name: join_tokens(column, follows, len(hidden), None) for name, column in found.items()}


class HeldTokens(NamedTuple):
    """The tokens of some rows that a rank's forward pass has, and where.

    Args:
        positions: Int64 `[n]`, the positions that hold a token.
        tokens: Int64 `[n]`, the index among the rows' tokens of each.
        followed: Int64 `[m]`, the positions whose token is followed by another of its row.
        followers: Int64 `[m]`, the index among the rows' tokens of each that follows.
        originals: Int64 `[tokens]`, the token that each of the rows' tokens has its results from, if rows share tokens
            and `tokens` and `followers` have each of these once; None if they have all.
    """

    positions: Tensor
    tokens: Tensor
    followed: Tensor
    followers: Tensor
    originals: Tensor | None = None

    def join(self, values: Tensor, tokens: Tensor, num_tokens: int, group: dist.ProcessGroup | None) -> Tensor:
        """Return `[num_tokens, *inner]`, as `join_tokens` does, with the results of shared tokens in all their rows.

        The gradient of such a token is the sum of its rows' gradients.
        """
        joined = join_tokens(values, tokens, num_tokens, group)
        return joined if self.originals is None else joined[self.originals]

    @staticmethod
    def arrays(places: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
        """Return the fields in order, on the host.

        Args:
            places: Int64 `[positions]`, the index among the rows' tokens of each position; -1 for padding.
            offsets: Where each row starts and ends among the tokens.
        """
        positions = np.flatnonzero(places >= 0)
        tokens = places[positions]
        is_followed = np.zeros(int(offsets[-1]), dtype=bool)
        is_followed[followers_of(offsets) - 1] = True
        reads = is_followed[tokens]
        return [positions, tokens, positions[reads], tokens[reads] + 1]


def split_language_reads(
    hidden: Tensor,
    held: HeldTokens,
    rows: Rows,
    head: Head,
    reads: Sequence[Read],
    *,
    group: dist.ProcessGroup | None = None,
    **options: Unpack[PassOptions],
) -> dict[str, Tensor]:
    """Read as `language_reads` does, from the positions and the part of the head that this rank holds.

    Args:
        hidden: `[positions, hidden]`, after the model's last norm.
        held: The tokens of the positions.
        rows: Whole rows, the same on all ranks of both groups, with the columns that the reads take.
        head: The whole head, or this rank's rows of it if there is a `shard`.
        reads: Reads of the head; each adds its columns to the result.
        group: The ranks that hold all positions between them, each token once; None if this one does.
        **options: How the head is read.

    Returns:
        Columns of whole rows, the same on all ranks of both groups. The loss must be computed alike on each.
    """
    found = position_reads(hidden[held.followed], head, rows, held.followers, reads, **options)
    return {name: held.join(column, held.followers, rows.num_tokens, group) for name, column in found.items()}


def join_tokens(values: Tensor, tokens: Tensor, num_tokens: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return `[num_tokens, *inner]`: the values of all ranks of the group at their places, and 0 elsewhere.

    The gradient goes back to the rank that has the token, unsummed: the loss is computed alike on every rank of the
    group.

    Args:
        values: `[n, *inner]`.
        tokens: Int64 `[n]`, the index among the rows' tokens of each value.
        num_tokens: Number of tokens of all rows.
        group: The ranks that hold all positions between them, each token once; None if this one does.
    """
    spread = values.new_zeros((num_tokens, *values.shape[1:])).index_copy(0, tokens, values)
    joined: Tensor = spread if group is None else _Join.apply(spread, group)
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        joined = values.clone()
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def position_reads(
    hidden: Tensor, head: Head, rows: Rows, places: Tensor, reads: Sequence[Read], **options: Unpack[PassOptions]
) -> dict[str, Tensor]:
    """Return the columns of the reads of a language-model head at some tokens, each `[n]` or `[n, k]`.

    Collective over the group of a shard.

    Args:
        hidden: `[n, hidden]`, that the tokens follow on.
        head: This rank's rows of it if there is a `shard`.
        rows: Rows of the pass, with the columns that the reads take.
        places: Int64 `[n]`, indices of the tokens.
        reads: Reads of the head; each adds its columns to the result.
        **options: How the head is read.

    Raises:
        ValueError: For ids that are not in the vocabulary, or not `[tokens, k]`.
    """
    if unknown := options.keys() - PassOptions.__annotations__.keys():
        raise TypeError(f"unknown options of a read: {', '.join(sorted(unknown))}")
    targets = rows[TOKENS][places]
    columns: dict[str, Tensor] = {}
    for read in reads:
        if read.name == "hidden":
            wide = hidden.to(wide_dtype(hidden.dtype))
            columns["hidden"] = pad(wide, (0, max(0, read.width - wide.shape[1])))
        if read.name == "divergences":
            others = rows[read.column][places], rows[read.choice][places]
            columns["divergences"] = _divergences(hidden, head, targets, others, read, **options)
    of_head = [read for read in reads if read.name not in columns]
    if not of_head:
        return columns
    shard = options.get("shard")
    vocab_size = len(head.weight) if shard is None else shard.vocab_size
    ids = None
    for name in read_columns([read for read in of_head if read.name == "logprobs_at"]):
        held = rows.host_column(name)
        if held.ndim != 2 or held.shape[1] == 0 or held.dtype.kind not in "iu":
            raise ValueError(
                f"column {name!r} must hold ids as integers [tokens, k]; got {held.dtype} {list(held.shape)}"
            )
        lowest, highest = int(held.min()), int(held.max())
        if lowest < -1 or highest >= vocab_size:
            raise ValueError(
                f"column {name!r} has ids from {lowest} to {highest}; the model has the ids 0 to {vocab_size - 1}, "
                "and -1 stands for none"
            )
        ids = rows[name][places].long()
    token_filter = next((read.token_filter for read in of_head if read.token_filter is not None), None)
    allowed = None
    if token_filter is not None and token_filter.allowed:
        if ALLOWED_BITS in rows:
            allowed = AllowedSets(rows[ALLOWED_BITS], rows[ALLOWED_SET][places])
        else:
            # No grammar constrained these rows, so kernels read them unless there is another filter.
            token_filter = replace(token_filter, allowed=False)
            token_filter = None if token_filter.keeps_all else token_filter
    names = {read.name for read in of_head}
    wanted = HeadOptions(
        temperature=options["temperature"],
        chunk_size=options.get("chunk_size"),
        entropy="entropy" in names,
        collision="collision" in names,
        token_filter=token_filter,
        allowed=allowed,
        k=max(read.k for read in of_head),
        below=max(read.below for read in of_head),
        ids=ids,
    )
    if shard is None:
        found = head_reads(hidden, head, targets, **wanted)
    else:
        sums = options.get("sums_hidden_grad", True)
        found = vocab_parallel_reads(hidden, head, targets, shard, sums_hidden_grad=sums, **wanted)
    results = {**found._asdict(), "topk_ids": found.topk_ids.int()}
    return columns | {name: results[name] for read in of_head for name in read.columns}


def _divergences(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    others: tuple[Tensor, Tensor],
    read: Read,
    **options: Unpack[PassOptions],
) -> Tensor:
    """Return `[n, 6]`, computed for the tokens of one other model after another.

    Collective over the group of a shard, whose ranks have the same tokens.

    Args:
        hidden: `[n, hidden]`, that the tokens follow on.
        head: This rank's rows of it if there is a `shard`.
        targets: Int64 `[n]`, the tokens.
        others: Hidden states `[n, width]` of the other models, and the number of each token's, int `[n]`.
        read: Read with the heads of the other models, the ids to compare and the mixture's weight.
        **options: How both heads are read.
    """
    shard = options.get("shard")
    # The other model's rows have the ids of this rank; the last rank has the ids beyond them as well.
    start, stop = 0, None
    if shard is not None:
        num_rows = len(shard.trim(head.weight))
        start, stop = shard.start, shard.start + num_rows
        stop = None if num_rows and stop == shard.vocab_size else stop
    device = head.weight.device
    states, numbers = others
    found, rows = [], []
    # Without tokens the first model is there for the gradients, which are 0.
    for number in numbers.unique().tolist() or [0]:
        own = (numbers == number).nonzero()[:, 0]
        # If one model has all tokens, they are not copied.
        its_hidden, its_states, its_targets = (
            values if len(own) == len(numbers) else values[own] for values in (hidden, states, targets)
        )
        stored = read_head(read.heads[number], start, stop)
        bias = None if stored.bias is None else stored.bias.to(device)
        other = Head(stored.weight.to(device), bias, stored.transform)
        rows.append(own)
        compared = Other(its_states[:, : other.weight.shape[1]], other)
        found.append(divergences(its_hidden, head, its_targets, compared, below=read.below, beta=read.beta, **options))
    return found[0] if len(found) == 1 else torch.cat(found)[torch.cat(rows).argsort()]


@cache
def read_head(files: HeadFiles, start: int = 0, stop: int | None = None) -> Head:
    """Return rows `start` to `stop` of another model's head, on the CPU, in that model's precision.

    They are kept for the next call.

    Raises:
        ValueError: If the files have no such tensor.
    """
    # It comes with the backends' transformers, as in `read_hf_config`.
    from transformers import AutoModelForCausalLM

    folder = model_folder(files.model_name)
    config = read_hf_config(folder, json.loads(files.overrides))
    weights = WeightFiles.of(folder)
    dtype: torch.dtype = getattr(torch, files.precision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def stored_as(parameter: Tensor) -> str | None:
        # The head's own name is last in the model, and first here: files may hold other values under it.
        aliases = [name for name, each in reversed(parameters.items()) if each is parameter]
        exact = [name for name in aliases if name in weights.names]
        # A family may keep its tensors under another prefix than its modules.
        alike = [name for name in sorted(weights.names) if any(name.endswith(f".{alias}") for alias in aliases)]
        return next(iter([*exact, *alike]), None)

    weight = stored_as(head.weight)
    bias = None if getattr(head, "bias", None) is None else stored_as(head.bias)
    if weight is None:
        raise ValueError(
            f"{files.model_name}: its files do not have the weight of its head under a name of {type(model).__name__}; "
            "save the model with save_pretrained(), or compare its most likely tokens only"
        )
    with weights.open() as opened:
        found = [opened.read(name, (slice(start, stop),)).to(dtype) for name in (weight, bias) if name]
    return Head(found[0], found[1] if bias else None, logit_transform(config))


def scalar_reads(outputs: Tensor, rows: Rows, reads: Sequence[Read]) -> Mapping[str, Tensor]:
    """Return the columns of the reads of a head of one output: a critic's values, a reward model's scores.

    `values` `[tokens]` are 0 at the first token of a row, and at others the output at the token before. `scores`
    `[rows]` are the outputs at the last token of each row.

    Args:
        outputs: `[tokens]`, of the head.
        rows: Rows that the tokens belong to.
        reads: Reads named `values` or `scores`.
    """
    columns = {}
    for read in reads:
        if read.name == "values":
            follows = rows.followers
            columns["values"] = join_tokens(outputs.float()[follows - 1], follows, len(outputs), None)
        else:
            columns["scores"] = outputs.float()[rows.offsets[1:] - 1]
    return columns


def new_head(role: Role, shape: Sequence[int], *, std: float, seed: int) -> Tensor:
    """Return weights `[1, hidden]` of a head that the model's files do not have, the same whatever the number of ranks.

    A critic's are zero, so that its first values are 0 and only the rewards decide the first advantages. A reward
    model, which could not tell two responses apart with zeros, has weights drawn from N(0, std).
    """
    if role == "critic":
        return torch.zeros(*shape)
    return torch.empty(*shape).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))
