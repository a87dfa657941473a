"""Memory of reads at a large vocabulary: one chunk of logits at a time."""

import pytest
import torch
import torch.distributed as dist

from rl_core.testing.torch.live_memory import LiveMemory
from rl_core.torch.heads.logprobs import Head, head_reads
from rl_core.torch.heads.vocab_parallel import VocabShard, vocab_parallel_reads

VOCABULARY, HIDDEN, TOKENS, CHUNK, K = 131_072, 4, 48, 4, 64
OF_CHUNK = CHUNK * VOCABULARY * 4
OF_ALL = TOKENS * VOCABULARY * 4


@pytest.fixture(scope="module")
def shard():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield VocabShard(0, VOCABULARY, dist.group.WORLD)
    dist.destroy_process_group()


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    ids = torch.randint(VOCABULARY, (TOKENS, K), generator=generator)
    return hidden, Head(weight), targets, ids


def readings(*shard):
    """The most likely tokens, as a teacher reads them, and logprobs at ids with their gradient, as a student does."""
    hidden, head, targets, ids = inputs()
    read = vocab_parallel_reads if shard else head_reads
    with LiveMemory() as of_teacher, torch.no_grad():
        topk = read(hidden, head, targets, *shard, k=K, chunk_size=CHUNK)
    with LiveMemory() as of_student:
        read(hidden, head, targets, *shard, ids=ids, chunk_size=CHUNK).logprobs_at.sum().backward()
    return topk, hidden.grad, of_teacher, of_student


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split over ranks"])
def test_reads_of_single_tokens_hold_one_chunk_of_logits_at_a_time(is_split, shard):
    topk, gradient, of_teacher, of_student = readings(*([shard] if is_split else []))
    for memory in (of_teacher, of_student):
        assert memory.largest <= OF_CHUNK
        assert memory.peak < 1.5 * OF_CHUNK
    hidden, head, _, ids = inputs()
    logprobs = (hidden @ head.weight.T).log_softmax(1)
    assert topk.topk_ids.equal(logprobs.topk(K).indices)
    (expected,) = torch.autograd.grad(logprobs.gather(1, ids).sum(), [hidden])
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-3)


def test_whole_logits_would_be_noticed():
    hidden, head, _, _ = inputs()
    with LiveMemory() as memory:
        (hidden @ head.weight.T).log_softmax(1)
    assert memory.largest == OF_ALL
    assert memory.peak == 2 * OF_ALL
