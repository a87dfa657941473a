"""Cases run by the ranks of a pool: float64 reads from parts of a vocabulary and of rows."""

from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from joined_rank import joined

from rl_core.model import COLLISION, ENTROPY, LOGPROBS, HeadFiles, divergences_from, logprobs_at, topk
from rl_core.selfcheck.rank_pool import Rank
from rl_core.token_filter import TokenFilter
from rl_core.torch.heads import reads
from rl_core.torch.heads.divergences import Other, divergences
from rl_core.torch.heads.head_pass import AllowedSets, HeadVocabulary, lowest_kept
from rl_core.torch.heads.logprobs import Head, LogitTransform
from rl_core.torch.heads.reads import HeldTokens, join_tokens, split_language_reads
from rl_core.torch.heads.vocab_parallel import VocabShard, vocab_parallel_reads
from rl_core.torch.loss import Rows

NUM, HIDDEN = 7, 5


@dataclass(frozen=True)
class Case:
    """Sizes and options of one comparison with whole logits."""

    vocab: int = 11
    rows_per_rank: int = 6
    transform: LogitTransform = field(default_factory=LogitTransform)
    chunk_size: int = 3
    k: int = 4
    below: int = 0
    sums_hidden_grad: bool = True
    has_bias: bool = True
    token_filter: TokenFilter | None = None


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def vocabulary(rank: Rank, case: Case) -> dict[str, float]:
    """Largest errors of reads and gradients of a split head."""
    with joined(rank) as group:
        return vocabulary_errors(rank, case, group)


def rows(rank: Rank, shares_vocabulary: bool) -> dict[str, float]:
    """Largest errors where positions of the rows, or rows of the head, are spread over the ranks."""
    with joined(rank) as group:
        return row_errors(rank, shares_vocabulary, group)


def rows_of(rank: Rank, case: Case, whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a head, with rows of padding that would win every maximum."""
    padding = torch.full((case.rows_per_rank * rank.rendezvous.world_size - case.vocab, *whole.shape[1:]), 50.0)
    padded = torch.cat([whole, padding.double()])
    return padded.split(case.rows_per_rank)[rank.rendezvous.rank].clone()


def candidates(case: Case, num: int) -> torch.Tensor:
    """Ids `[num, 3]`, the target's among them, and -1 for none."""
    return torch.randint(-1, case.vocab, (num, 3), generator=torch.Generator().manual_seed(5))


def whole_reads(hidden, weight, bias, targets, ids, case: Case, temperature: float):
    """The same from whole logits."""
    logits = case.transform(torch.nn.functional.linear(hidden, weight, bias)) / temperature
    if case.token_filter is not None:
        is_target = torch.nn.functional.one_hot(targets, case.vocab).bool()
        if (allowed := allowed_of(case)) is not None:
            is_allowed = np.unpackbits(allowed.bits.numpy(), axis=1, bitorder="little")[:, : case.vocab]
            logits = logits.masked_fill(torch.from_numpy(is_allowed[allowed.sets] == 0) & ~is_target, -1e30)
        lowest = lowest_kept(logits, case.token_filter, HeadVocabulary(case.vocab))
        logits = logits.masked_fill((logits < lowest) & ~is_target, -1e30)
    logprobs = logits.log_softmax(-1)
    best = logprobs[:, : case.below or case.vocab].topk(case.k)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    at = logprobs.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    collision = logprobs.exp().square().sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy, best.values, best.indices, at, collision


def allowed_of(case: Case) -> AllowedSets | None:
    """Four sets of tokens, each at one or two of the positions."""
    if case.token_filter is None or not case.token_filter.allowed:
        return None
    bits = torch.randint(256, (4, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(6))
    bits[0] = 255
    return AllowedSets(bits, torch.tensor([3, 0, 1, 2, 0, 2, 1]))


def weighted(reads) -> torch.Tensor:
    """A scalar that weighs every differentiable read differently at every place."""
    reads = [read for read in reads if read.is_floating_point()]
    return sum((read * draw(*read.shape, seed=20 + index)).sum() for index, read in enumerate(reads))


def vocabulary_errors(rank: Rank, case: Case, group: dist.ProcessGroup) -> dict[str, float]:
    hidden, weight, bias = draw(NUM, HIDDEN, seed=0), draw(case.vocab, HIDDEN, seed=1), draw(case.vocab, seed=2)
    targets = torch.randint(case.vocab, (NUM,), generator=torch.Generator().manual_seed(3))
    whole = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    ids = candidates(case, NUM)[:, : 3 if case.token_filter is None else 0]
    expected = whole_reads(whole[0], whole[1], whole[2] if case.has_bias else None, targets, ids, case, 0.7)
    weighted(expected).backward()
    local = [hidden.clone(), rows_of(rank, case, weight), rows_of(rank, case, bias)]
    local = [tensor.requires_grad_() for tensor in local]
    start = rank.rendezvous.rank * case.rows_per_rank
    found = vocab_parallel_reads(
        local[0],
        Head(local[1], local[2] if case.has_bias else None, case.transform),
        targets,
        VocabShard(start, case.vocab, group),
        temperature=0.7,
        entropy=True,
        k=case.k,
        below=case.below,
        ids=ids if case.token_filter is None else None,
        collision=True,
        token_filter=case.token_filter,
        allowed=allowed_of(case),
        chunk_size=case.chunk_size,
        sums_hidden_grad=case.sums_hidden_grad,
    )
    weighted(found).backward()
    if not case.sums_hidden_grad:
        dist.all_reduce(local[0].grad, group=group)
    pairs = zip(found._fields, found, expected, strict=True)
    errors = {name: (a - b).abs().max().item() for name, a, b in pairs if b.numel()}
    errors["grad_hidden"] = (local[0].grad - whole[0].grad).abs().max().item()
    for name, mine, oracle in zip(("weight", "bias")[: 1 + case.has_bias], local[1:], whole[1:], strict=False):
        own = max(0, min(case.rows_per_rank, case.vocab - start))
        difference = mine.grad[:own] - oracle.grad[start : start + own]
        errors[f"grad_{name}"] = difference.abs().max().item() if own else 0.0
        errors[f"grad_{name}_padding"] = mine.grad[own:].abs().sum().item()
    return errors


def row_errors(rank: Rank, shares_vocabulary: bool, group: dist.ProcessGroup) -> dict[str, float]:
    lengths = np.array([4, 1, 6])
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    num_tokens, case = int(lengths.sum()), Case()
    tokens = torch.randint(case.vocab, (num_tokens,), generator=torch.Generator().manual_seed(4))
    ids = candidates(case, num_tokens)
    flat = Rows(offsets, {"tokens": tokens, "candidates": ids.int()})
    hidden, weight = draw(num_tokens, HIDDEN, seed=0), draw(case.vocab, HIDDEN, seed=1)
    world, index = rank.rendezvous.world_size, rank.rendezvous.rank
    whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    is_first = torch.zeros(num_tokens, dtype=torch.bool).index_fill(0, offsets[:-1], True)
    expected = whole_reads(whole[0].roll(1, 0), whole[1], None, tokens, ids, case, 0.7)
    masks = (is_first, is_first, is_first[:, None], is_first[:, None], is_first)
    expected = [read.masked_fill(mask, 0.0) for read, mask in zip((*expected[:3], *expected[4:]), masks, strict=True)]
    weighted(expected).backward()
    places = torch.arange(num_tokens)
    if not shares_vocabulary:
        places = torch.cat([places[index::world].flip(0), torch.tensor([-1, -1])])
    local_hidden = torch.where((places < 0)[:, None], 7.0, hidden[places]).requires_grad_()
    local_weight = (rows_of(rank, case, weight) if shares_vocabulary else weight.clone()).requires_grad_()
    held = HeldTokens(*map(torch.from_numpy, HeldTokens.arrays(places.numpy(), offsets.numpy())))
    found = split_language_reads(
        local_hidden,
        held,
        flat,
        Head(local_weight),
        [LOGPROBS, ENTROPY, topk(case.k), logprobs_at("candidates"), COLLISION],
        temperature=0.7,
        chunk_size=2,
        shard=VocabShard(index * case.rows_per_rank, case.vocab, group) if shares_vocabulary else None,
        group=None if shares_vocabulary else group,
    )
    names = ("logprobs", "entropy", "topk_logprobs", "logprobs_at", "collision")
    ordered = [found[name] for name in names]
    weighted(ordered).backward()
    grad = local_weight.grad
    if shares_vocabulary:
        own = slice(index * case.rows_per_rank, (index + 1) * case.rows_per_rank)
        grad = grad[: len(whole[1].grad[own])] - whole[1].grad[own]
    else:
        dist.all_reduce(grad, group=group)
        grad = grad - whole[1].grad
    errors = {f"read {i}": (a - b).abs().max().item() for i, (a, b) in enumerate(zip(ordered, expected, strict=True))}
    kept = places >= 0
    errors["grad_hidden"] = (local_hidden.grad[kept] - whole[0].grad[places[kept]]).abs().max().item()
    errors["grad_padding"] = local_hidden.grad[~kept].abs().sum().item()
    errors["grad_weight"] = grad.abs().max().item()
    together = join_tokens(held.tokens.double(), held.tokens, num_tokens, None if shares_vocabulary else group)
    errors["joined"] = (together - torch.arange(num_tokens)).abs().max().item()
    return errors


def diverging(rank: Rank, below: int) -> dict[str, float]:
    """Largest errors of the divergences from another head, and of their gradients, if both vocabularies are split."""
    with joined(rank) as group:
        case, index = Case(), rank.rendezvous.rank
        hidden, weight = draw(NUM, HIDDEN, seed=0), draw(case.vocab, HIDDEN, seed=1)
        other_hidden, other_weight = draw(NUM, 3, seed=2), draw(13, 3, seed=3)
        targets = torch.randint(below, (NUM,), generator=torch.Generator().manual_seed(3))
        options = {"below": below, "beta": 0.3, "temperature": 0.7, "chunk_size": 3}
        whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        expected = divergences(whole[0], Head(whole[1]), targets, Other(other_hidden, Head(other_weight)), **options)
        weighted([expected[:, :3]]).backward()
        start = index * case.rows_per_rank
        local = [hidden.clone().requires_grad_(), rows_of(rank, case, weight).requires_grad_()]
        its_rows = other_weight[start:] if index == rank.rendezvous.world_size - 1 else other_weight[start : start + 6]
        shard = VocabShard(start, case.vocab, group)
        other = Other(other_hidden, Head(its_rows))
        found = divergences(local[0], Head(local[1]), targets, other, shard=shard, **options)
        weighted([found[:, :3]]).backward()
        own = slice(start, start + case.rows_per_rank)
        of_weight = whole[1].grad[own]
        return {
            "values": (found - expected).abs().max().item(),
            "grad_hidden": (local[0].grad - whole[0].grad).abs().max().item(),
            "grad_weight": (local[1].grad[: len(of_weight)] - of_weight).abs().max().item(),
            "grad_padding": local[1].grad[len(of_weight) :].abs().sum().item(),
        }


def diverging_from_several(rank: Rank) -> dict[str, float]:
    """As `diverging`, from heads of two models of other sizes, of which each token has one."""
    heads = {"small": draw(13, 3, seed=3), "large": draw(11, 4, seed=4)}

    def read_head(files: HeadFiles, start: int, stop: int | None) -> Head:
        return Head(heads[files.model_name][start:stop])

    with joined(rank) as group, patch.object(reads, "read_head", read_head):
        case, index = Case(), rank.rendezvous.rank
        hidden, weight = draw(NUM, HIDDEN, seed=0), draw(case.vocab, HIDDEN, seed=1)
        columns = {
            "tokens": torch.arange(NUM),
            "states": draw(NUM, 4, seed=2),
            "number": torch.tensor([0, 1, 1, 0, 1, 0, 0], dtype=torch.int32),
        }
        read = divergences_from([HeadFiles(name, "float32") for name in heads], "states", "number", below=9, beta=0.3)
        rows, places = Rows(torch.tensor([0, NUM]), columns), torch.arange(NUM)
        whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        options = {"temperature": 0.7, "chunk_size": 3}
        expected = reads.position_reads(whole[0], Head(whole[1]), rows, places, [read], **options)["divergences"]
        weighted([expected[:, :3]]).backward()
        start = index * case.rows_per_rank
        local = [hidden.clone().requires_grad_(), rows_of(rank, case, weight).requires_grad_()]
        shard = VocabShard(start, case.vocab, group)
        found = reads.position_reads(local[0], Head(local[1]), rows, places, [read], shard=shard, **options)
        weighted([found["divergences"][:, :3]]).backward()
        of_weight = whole[1].grad[start : start + case.rows_per_rank]
        return {
            "values": (found["divergences"] - expected).abs().max().item(),
            "grad_hidden": (local[0].grad - whole[0].grad).abs().max().item(),
            "grad_weight": (local[1].grad[: len(of_weight)] - of_weight).abs().max().item(),
        }
