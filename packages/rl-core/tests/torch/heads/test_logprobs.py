"""Chunked head reads are those of whole logits, forward and backward."""

import math

import pytest
import torch

from rl_core.token_filter import TokenFilter
from rl_core.torch.heads.head_pass import AllowedSets, HeadVocabulary, lowest_kept
from rl_core.torch.heads.logprobs import Head, LogitTransform, head_reads

IDS = torch.tensor([[3, -1, 3], [0, 10, 4], [-1, -1, -1], [7, 7, 2], [1, 2, 3], [10, 9, -1], [5, 6, 0]])
TRANSFORMS = [LogitTransform(), LogitTransform(scale=0.3), LogitTransform(scale=2.0, softcap=1.5)]


def inputs(dtype=torch.float64, num=7, vocab=11, with_bias=True):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()

    targets = torch.randint(vocab, (num,), generator=generator)
    return draw(num, 5), draw(vocab, 5), draw(vocab) if with_bias else None, targets


def whole(hidden, weight, bias, targets, transform, temperature, k):
    """The same from whole logits."""
    logits = transform(torch.nn.functional.linear(hidden, weight, bias))
    logprobs = (logits / temperature).log_softmax(-1)
    topk = logprobs.topk(k)
    entropy = torch.distributions.Categorical(logits=logits / temperature).entropy()
    ids = IDS[: len(targets)]
    at = logprobs[: len(ids)].gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    collision = logprobs.exp().square().sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy, topk.values, topk.indices, at, collision


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_values_are_those_of_whole_logits(transform, chunk_size):
    hidden, weight, bias, targets = inputs()
    options = {"temperature": 0.7, "entropy": True, "collision": True, "k": 4, "ids": IDS, "chunk_size": chunk_size}
    found = head_reads(hidden, Head(weight, bias, transform), targets, **options)
    for got, expected in zip(found, whole(hidden, weight, bias, targets, transform, 0.7, 4), strict=True):
        torch.testing.assert_close(got, expected)


def test_the_most_likely_of_the_first_ids_have_logprobs_of_the_whole_vocabulary():
    hidden, weight, bias, targets = inputs()
    found = head_reads(hidden, Head(weight, bias), targets, k=3, below=5, chunk_size=3)
    expected = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1)[:, :5].topk(3)
    torch.testing.assert_close(found.topk_logprobs, expected.values)
    assert found.topk_ids.equal(expected.indices)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients_are_numerically_right(transform):
    hidden, weight, bias, targets = inputs()

    def reads(hidden, weight, bias):
        head = Head(weight, bias, transform)
        options = {"temperature": 0.7, "entropy": True, "collision": True, "chunk_size": 3}
        found = head_reads(hidden, head, targets, k=3, ids=IDS, **options)
        alone = head_reads(hidden, head, targets, **(options | {"entropy": False}))
        return found.logprobs, found.entropy, found.topk_logprobs, found.logprobs_at, found.collision, alone.collision

    assert torch.autograd.gradcheck(reads, (hidden, weight, bias))


FILTERS = [
    TokenFilter(top_k=3),
    TokenFilter(top_p=0.6),
    TokenFilter(min_p=0.3),
    TokenFilter(top_k=8, top_p=0.8, min_p=0.02),
    TokenFilter(top_k=1),
    TokenFilter(top_k=99, top_p=1.0),
]


def kept(logits, targets, token_filter):
    """Written as the definition, in plain Python: for each row the ids that a filter keeps, and the target."""
    rows = []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        falling = sorted(range(len(row)), key=lambda token: -row[token])
        weights = [math.exp(row[token] - row[falling[0]]) for token in falling]
        likely = [
            (token, weight) for token, weight in zip(falling, weights, strict=True) if weight >= token_filter.min_p
        ]
        likely = likely[: token_filter.top_k or len(likely)]
        total, above, ids = sum(weight for _, weight in likely), 0.0, {target}
        for token, weight in likely:
            if token_filter.top_p < 1 and above >= token_filter.top_p * total:
                break
            ids.add(token)
            above += weight
        rows.append(sorted(ids))
    return rows


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("token_filter", FILTERS, ids=str)
def test_filtered_reads_are_those_of_the_distribution_over_the_kept_tokens_and_the_target(token_filter, transform):
    hidden, weight, bias, targets = inputs()
    found = head_reads(
        hidden,
        Head(weight, bias, transform),
        targets,
        temperature=0.7,
        entropy=True,
        collision=True,
        token_filter=token_filter,
    )
    logits = transform(torch.nn.functional.linear(hidden, weight, bias)) / 0.7
    for row, ids in enumerate(kept(logits, targets, token_filter)):
        own = logits[row, ids].softmax(-1)
        assert found.logprobs[row].exp().item() == pytest.approx(own[ids.index(int(targets[row]))].item(), rel=1e-9)
        assert found.entropy[row].item() == pytest.approx(-(own * own.log()).sum().item(), abs=1e-12)
        assert found.collision[row].item() == pytest.approx(own.square().sum().item(), rel=1e-9)


@pytest.mark.parametrize("token_filter", [FILTERS[1], FILTERS[3]], ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients_of_filtered_reads_are_numerically_right(token_filter, transform):
    hidden, weight, bias, targets = inputs()

    def reads(hidden, weight, bias):
        head = Head(weight, bias, transform)
        options = {"entropy": True, "collision": True, "token_filter": token_filter, "chunk_size": 3}
        found = head_reads(hidden, head, targets, temperature=0.7, **options)
        return found.logprobs, found.entropy, found.collision

    assert torch.autograd.gradcheck(reads, (hidden, weight, bias))


def allowed_sets():
    """At each of seven positions the ids that a grammar allows, None for all, and the same for a head."""
    given = [None, [2], [0, 3, 8, 10], [1, 2, 3, 4, 5, 6, 7, 8, 9], None, [0, 3, 8, 10], []]
    bits = torch.zeros(len(given), 2, dtype=torch.uint8)
    bits[0] = 255
    for row, ids in enumerate(given):
        for token in ids or ():
            bits[row, token >> 3] |= 1 << (token & 7)
    return given, AllowedSets(bits, torch.tensor([0 if ids is None else row for row, ids in enumerate(given)]))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("further", [{}, {"top_p": 0.6}, {"top_k": 3, "min_p": 0.3}], ids=str)
def test_constrained_reads_are_of_the_distribution_over_the_allowed_tokens_and_the_target(further, transform):
    hidden, weight, bias, targets = inputs()
    given, allowed = allowed_sets()
    token_filter = TokenFilter(allowed=True, **further)

    def reads(hidden, weight, bias):
        options = {"entropy": True, "collision": True, "token_filter": token_filter, "chunk_size": 3}
        head = Head(weight, bias, transform)
        found = head_reads(hidden, head, targets, temperature=0.7, allowed=allowed, **options)
        return found.logprobs, found.entropy, found.collision

    logits = transform(torch.nn.functional.linear(hidden, weight, bias)) / 0.7
    found = reads(hidden, weight, bias)
    for row, ids in enumerate(given):
        own = list(range(11)) if ids is None else sorted({*ids, int(targets[row])})
        (places,) = kept(logits[row, own][None], torch.tensor([own.index(int(targets[row]))]), token_filter)
        own = [own[place] for place in places]
        weights = logits[row, own].exp()
        probability = (weights / weights.sum())[own.index(int(targets[row]))]
        shares = weights / weights.sum()
        assert found[0][row].exp().item() == pytest.approx(probability.item(), rel=1e-9)
        assert found[1][row].item() == pytest.approx(-(shares * shares.log()).sum().item(), abs=1e-12)
        assert found[2][row].item() == pytest.approx(shares.square().sum().item(), rel=1e-9)
    assert torch.autograd.gradcheck(reads, (hidden, weight, bias))


def test_sets_of_allowed_tokens_take_a_byte_for_each_logit():
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.data_ptr() != logits.data_ptr():
                sizes.append(result.numel() * result.element_size())
            return result

    logits, allowed = torch.zeros(40, 800), AllowedSets(torch.zeros(3, 100, dtype=torch.uint8), torch.arange(40) % 3)
    with Watch():
        allowed.leave_out_(logits, torch.zeros(40, 1, dtype=torch.int64))
    assert max(sizes) == logits.numel()
    assert logits[:, 1:].max() < -1e29


def test_top_p_looks_at_as_many_tokens_as_it_takes_and_ties_are_kept():
    flat = torch.zeros(2, 3000)
    flat[1, :900] = 1.0
    lowest = lowest_kept(flat, TokenFilter(top_p=0.95), HeadVocabulary(3000))
    assert lowest[:, 0].tolist() == [0.0, 0.0]
    lowest = lowest_kept(flat, TokenFilter(top_p=0.5), HeadVocabulary(3000))
    # 900 e of 900 e + 2100
    assert lowest[:, 0].tolist() == [0.0, 1.0]
    assert lowest_kept(flat, TokenFilter(top_k=7), HeadVocabulary(3000))[:, 0].tolist() == [0.0, 1.0]


def test_single_tokens_are_not_read_of_filtered_ones():
    hidden, weight, bias, targets = inputs()
    for options in ({"k": 2}, {"ids": IDS}):
        with pytest.raises(ValueError, match="without a filter"):
            head_reads(hidden, Head(weight, bias), targets, token_filter=TokenFilter(top_k=3), **options)


@pytest.mark.parametrize("chunk_size", [2, 100])
def test_half_precision_is_reduced_in_float32(chunk_size):
    hidden, weight, _, targets = inputs(torch.bfloat16, num=64, vocab=300, with_bias=False)
    found = head_reads(hidden, Head(weight), targets, entropy=True, chunk_size=chunk_size)
    assert found.logprobs.dtype == torch.float32
    rounded_logits = (hidden @ weight.T).double()
    expected = rounded_logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    (found.logprobs.sum() + found.entropy.sum()).backward()
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logprobs, entropy, *_ = whole(*wide, None, targets, LogitTransform(), 1.0, 1)
    (logprobs.sum() + entropy.sum()).backward()
    for tensor, exact in zip((hidden, weight), wide, strict=True):
        assert tensor.grad.dtype == torch.bfloat16
        error = (tensor.grad.double() - exact.grad).norm() / exact.grad.norm()
        assert error < 0.01


def test_frozen_heads_and_hidden_states_cost_no_gradient():
    hidden, weight, bias, targets = inputs()
    head_reads(hidden, Head(weight.detach(), bias.detach()), targets).logprobs.sum().backward()
    assert hidden.grad is not None
    head_reads(hidden.detach(), Head(weight), targets).logprobs.sum().backward()
    assert weight.grad is not None
    assert bias.grad is None


def test_no_positions_still_send_zero_gradients():
    hidden, weight, _, targets = inputs(num=0)
    found = head_reads(hidden, Head(weight), targets, entropy=True, k=2)
    assert found.topk_ids.shape == (0, 2)
    (found.logprobs.sum() + found.entropy.sum()).backward()
    assert weight.grad.abs().max() == 0


def test_whole_logits_never_exist():
    hidden, weight, _, targets = inputs(torch.float32, num=64, vocab=500, with_bias=False)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    ids = targets[:, None].repeat(1, 20)
    with Watch():
        found = head_reads(hidden, Head(weight), targets, entropy=True, k=20, ids=ids, chunk_size=8)
        parts = found.logprobs, found.entropy, found.topk_logprobs, found.logprobs_at
        sum(part.sum() for part in parts).backward()
    assert largest <= 8 * 500
    assert largest < 64 * 500


@pytest.mark.parametrize(("settings", "message"), [({"temperature": 0.0}, "temperature"), ({"k": 12}, "11 tokens")])
def test_what_makes_no_sense_is_refused(settings, message):
    hidden, weight, bias, targets = inputs()
    with pytest.raises(ValueError, match=message):
        head_reads(hidden, Head(weight, bias), targets, **settings)
