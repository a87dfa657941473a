"""Packed rows attend within themselves alone, whatever computes it."""

import importlib.util
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from rl_core.data.batch import TOKENS
from rl_core.install_command import install_command
from rl_core.testing.exhaustive import exhaustive
from rl_core.torch.loss import Rows
from rl_core.torch.rows import zigzag_tokens
from rl_dtensor.model import kernels
from rl_dtensor.model.attention import ROWS, attention_for, row_attention, rows_problem
from rl_dtensor.model.kernels import Softmax, kernel_of, varlen
from rl_dtensor.model.layout import Alignment, Context, Segment, Segments, lay_out
from rl_dtensor.parallel.body import body_of
from rl_dtensor.preflight import check

LENGTHS = (5, 1, 8, 3)


def dense(query, key, value, sinks=None, *, window=None, softcap=None, chunk=None):
    """One softmax over all tokens with a block-diagonal mask; a sink is a score beside them without a value."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    position = torch.arange(len(row))
    distance = position[:, None] - position
    seen = (row[:, None] == row) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    if chunk is not None:
        place = torch.cat([torch.arange(length) for length in LENGTHS]) // chunk
        seen &= place[:, None] == place
    scores = query @ key.transpose(2, 3) * 0.3
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks[:, None, None].exp()
    return (weights / total @ value).transpose(1, 2)


def attended(tensors, backend, window=None, softcap=None, *, is_packed=True, **told):
    """`[batch, tokens, heads, head_dim]`, by the kernel of a backend, or another one."""
    rows = Rows(torch.tensor([0, *LENGTHS]).cumsum(0), {TOKENS: torch.zeros(sum(LENGTHS), dtype=torch.int64)})
    layout = lay_out(rows, Alignment(), is_packed=is_packed)
    attend = kernel_of(backend) if isinstance(backend, str) else backend
    query, key, value, *sinks = tensors
    options = {"scaling": 0.3, "sliding_window": window, "softcap": softcap, "s_aux": sinks[0] if sinks else None}
    return row_attention(torch.nn.Module(), query, key, value, None, layout=layout, attend=attend, **options, **told)[0]


def random_tensors(key_dim=4, value_dim=4, *, has_sinks=False):
    """Query, key and value of 17 tokens, and a sink of each query head."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 4, 17, key_dim), (1, 2, 17, key_dim), (1, 2, 17, value_dim), *([(4,)] if has_sinks else [])]
    return [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]


def differentiated(function, tensors):
    """The output of a function, and the gradient by each tensor."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    output.sin().sum().backward()
    return output, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("backend", ["auto", "sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_it_is_dense_attention_under_a_block_diagonal_mask(backend, window):
    for value_dim in (4, 6):
        tensors = random_tensors(value_dim=value_dim)
        found = differentiated(lambda *parts: attended(parts, backend, window), tensors)
        torch.testing.assert_close(found, differentiated(lambda *parts: dense(*parts, window=window), tensors))


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_flex_attention_sees_what_dense_attention_does(window):
    """It has no backward pass on CPU."""
    tensors = random_tensors()
    torch.testing.assert_close(attended(tensors, "flex", window), dense(*tensors, window=window))


TREE = [
    [1, 2, 3, 4, 5],
    [1, 2, 3],  # the beginning of others
    [8, 9],
    [1, 2, 3, 6, 7, 8, 9],
    [1, 2, 3, 6, 7, 5],  # a branch of a branch
    [1, 2, 3, 4, 5],  # a row twice
    [1, 2, 3, 6],
]


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        *((backend, window) for backend in ("auto", "packed", "flex") for window in ({}, {"window": 4})),
        *((backend, {"size": 3}) for backend in ("auto", "flex")),
        ("eager", {"softcap": 2.0, "has_sinks": True}),
    ],
)
@pytest.mark.parametrize("context", [None, Context(None, 1, 2, "all_gather")])
def test_rows_of_a_tree_attend_as_each_alone_and_so_do_gradients(backend, options, context):
    lengths = [len(row) for row in TREE]
    rows = Rows(torch.tensor([0, *lengths]).cumsum(0), {TOKENS: torch.tensor([each for row in TREE for each in row])})
    alignment = Alignment() if context is None else Alignment(4, context)
    tree = lay_out(rows, alignment, is_packed=True, shares_prefixes=True, reads_columns=True)
    whole = lay_out(rows, Alignment(), is_packed=True)
    generator = torch.Generator().manual_seed(0)
    # Tokens that are equal up to their place have equal queries, keys and values.
    sequence = torch.from_numpy(tree.tree.sequence)
    assert len(tree.tree.places) < len(sequence) / 2
    heads = [torch.randn(1, n, len(tree.tree.places), 4, dtype=torch.float64, generator=generator) for n in (4, 2, 2)]
    sinks = [torch.randn(4, dtype=torch.float64, generator=generator)] if options.get("has_sinks") else []
    attend = varlen(varlen_attn) if backend == "packed" else kernel_of(backend)
    eager, size = kernel_of("eager"), options.get("size")
    chosen = torch.arange(len(tree.tree.places))
    if context is not None:
        chosen = zigzag_tokens(len(chosen), 2, context.rank)

    def of_tree(query, key, value, *sinks):
        segments = tree.segments if size is None else tree.segments.chunked(size)
        softmax = Softmax(0.3, 0.0, options.get("window"), options.get("softcap"), *sinks)
        return attend(query[:, :, chosen], key, value, segments, softmax)[:, :, tree.held.positions]

    def of_rows(query, key, value, *sinks):
        segments = whole.segments if size is None else whole.segments.chunked(size)
        softmax = Softmax(0.3, 0.0, options.get("window"), options.get("softcap"), *sinks)
        alone = (part[:, :, sequence] for part in (query, key, value))
        return eager(*alone, segments, softmax)[:, :, tree.held.tokens]

    if backend == "flex":  # It has no backward pass on CPU.
        torch.testing.assert_close(of_tree(*heads), of_rows(*heads))
    else:
        torch.testing.assert_close(differentiated(of_tree, [*heads, *sinks]), differentiated(of_rows, [*heads, *sinks]))


FLEX_KINDS = [
    ({}, torch.float32),
    ({"window": 4}, torch.float32),
    ({"softcap": 2.0}, torch.float32),
    ({"window": 4, "softcap": 2.0}, torch.float32),
    ({}, torch.bfloat16),
]


@exhaustive  # Dynamo traces 14 graphs.
def test_flex_attention_is_compiled_twice_for_each_kind_of_scores(monkeypatch):
    """As on GPUs, and more often than torch compiles a function by default."""
    scores, masks = CompileCounter(), CompileCounter()
    for name, counter in (("flex_attention", scores), ("create_block_mask", masks)):
        with monkeypatch.context() as patched:
            patched.setattr(torch, "compile", partial(torch.compile, backend=counter))
            function = kernels.compiled.__wrapped__(getattr(kernels, name))
        monkeypatch.setattr(kernels, name, function)
    counts = []
    for lengths in ((270, 9), (25, 400, 3), (600,)):
        tokens = sum(lengths)
        rows = Rows(torch.tensor([0, *lengths]).cumsum(0), {TOKENS: torch.zeros(tokens, dtype=torch.int64)})
        segments = lay_out(rows, Alignment(), is_packed=True).segments
        for scores_of, dtype in FLEX_KINDS:
            heads = [torch.ones(1, number, tokens, 16, dtype=dtype) for number in (4, 2, 2)]
            kernel_of("flex")(*heads, segments, Softmax(**scores_of))
        counts.append((scores.frame_count, masks.frame_count))
    assert counts[-1] == counts[1]
    assert counts[-1][0] == 2 * len(FLEX_KINDS)
    assert 0 < counts[-1][1] <= 4  # Windows and none.


@pytest.mark.parametrize("backend", ["auto", "sdpa", "eager", "varlen"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_of_a_row_do_not_see_one_another(backend, chunk):
    tensors = random_tensors(8, 8)
    kernel = varlen(varlen_attn) if backend == "varlen" else backend
    found = differentiated(lambda *parts: attended(parts, kernel, chunk_size=chunk), tensors)
    torch.testing.assert_close(found, differentiated(lambda *parts: dense(*parts, chunk=chunk), tensors))


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_flex_attention_and_padded_rows_see_chunks_too(chunk):
    tensors = random_tensors()
    torch.testing.assert_close(attended(tensors, "flex", chunk_size=chunk), dense(*tensors, chunk=chunk))
    side_by_side = [torch.randn(len(LENGTHS), *x.shape[1:2], max(LENGTHS), x.shape[3]) for x in tensors]
    rows = [attended([x[None, row] for x in side_by_side], "sdpa", is_packed=False, chunk_size=chunk) for row in (0, 2)]
    found = attended(side_by_side, "sdpa", is_packed=False, chunk_size=chunk)
    torch.testing.assert_close(found[[0, 2]], torch.cat(rows))


def test_queries_are_scaled_by_their_place_in_the_row():
    query, key, value = random_tensors()
    place = torch.cat([torch.arange(length) for length in LENGTHS])
    found = attended((query, key, value), "sdpa", query_scale=lambda places: 1.0 + places)
    torch.testing.assert_close(found, dense(query * (1.0 + place)[:, None], key, value))


SCORES = [(3.0, False), (None, True), (0.5, True)]
"""Cap of the scores, and whether heads have sinks."""


@pytest.mark.parametrize(("softcap", "has_sinks"), SCORES)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_capped_scores_and_sinks_are_those_of_the_formula(backend, window, softcap, has_sinks):
    for value_dim in (4, 6):
        tensors = random_tensors(value_dim=value_dim, has_sinks=has_sinks)
        found = differentiated(lambda *parts: attended(parts, backend, window, softcap), tensors)
        expected = differentiated(lambda *parts: dense(*parts, window=window, softcap=softcap), tensors)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("softcap", "has_sinks"), SCORES)
@pytest.mark.parametrize("window", [None, 3])
def test_flex_attention_caps_scores_and_adds_sinks(window, softcap, has_sinks):
    tensors = random_tensors(has_sinks=has_sinks)
    found = attended(tensors, "flex", window, softcap)
    torch.testing.assert_close(found, dense(*tensors, window=window, softcap=softcap))


def test_scores_of_half_precision_are_capped_in_single():
    """In bfloat16 the cap itself would be off by a 256th."""
    tensors = random_tensors(has_sinks=True)
    rounded = [tensor.bfloat16() for tensor in tensors]
    found = attended(rounded, "eager", None, 0.5)
    exact = dense(*(tensor.double() for tensor in rounded), softcap=0.5)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=0.01)


@pytest.mark.parametrize(
    ("backend", "softcap", "has_sinks", "lacks"),
    [
        ("sdpa", 3.0, False, "soft cap"),
        ("sdpa", None, True, "sinks"),
        ("flash_attention_2", None, True, "sinks"),
        ("flash_attention_3", 3.0, True, "sinks"),
    ],
)
def test_a_kernel_that_cannot_compute_the_scores_is_refused(monkeypatch, backend, softcap, has_sinks, lacks):
    for package in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, package, FlashAttention)
    with pytest.raises(ValueError, match=f"attention_backend.*{backend}.*{lacks}.*auto or eager"):
        attended(random_tensors(has_sinks=has_sinks), backend, None, softcap)


class FlashAttention:
    """The documented contract of flash-attn's two functions, in plain products: the package itself needs a GPU."""

    @staticmethod
    def flash_attn_func(q, k, v, *, softmax_scale, causal, window_size, softcap=0.0, dropout_p=0.0):
        """`[batch, tokens, heads, head_dim]`; the last query is at the last key; a cap of 0 is none."""
        assert causal
        assert window_size[1] == 0
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        k, v = (part.repeat_interleave(q.shape[2] // k.shape[2], 2) for part in (k, v))
        place = torch.arange(k.shape[1])
        before = place[k.shape[1] - q.shape[1] :, None] - place
        seen = (before >= 0) & ((before <= window_size[0]) | torch.tensor(window_size[0] < 0))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    @classmethod
    def flash_attn_varlen_func(cls, q, k, v, ends_q, ends_k, longest_q, longest_k, **options):
        """`[tokens, heads, head_dim]`, with the rows' ends."""
        assert (longest_q, longest_k) == (ends_q.diff().max(), ends_k.diff().max())
        rows = zip(q.split(ends_q.diff().tolist()), *(x.split(ends_k.diff().tolist()) for x in (k, v)), strict=True)
        return torch.cat([cls.flash_attn_func(*(part[None] for part in row), **options)[0] for row in rows])


def varlen_attn(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
    """The documented contract of torch's kernel, in plain products: it is for GPUs alone."""
    assert ends_q.dtype == ends_k.dtype == torch.int32
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    options = {"softmax_scale": scale, "causal": True, "window_size": window_size}
    return FlashAttention.flash_attn_varlen_func(q, k, v, ends_q, ends_k, longest_q, longest_k, **options)


def test_dropout_takes_other_kernels_than_a_flash_attention_without_it(monkeypatch):
    tensors = random_tensors()
    enabled = []
    attend = F.scaled_dot_product_attention

    def watched(*parts, **options):
        enabled.append(torch.backends.cuda.flash_sdp_enabled())
        return attend(*parts, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    found = []
    for active in (None, "FA3"):
        monkeypatch.setattr(kernels, "current_flash_attention_impl", lambda active=active: active)
        torch.manual_seed(0)
        found.append(attended(tensors, "sdpa", dropout=0.5))
    torch.testing.assert_close(*found)
    assert enabled == [True] * len(LENGTHS) + [False] * len(LENGTHS)


def test_heads_that_fit_the_packed_kernel_are_not_copied():
    seen = []

    def attend(q, k, v, *bounds, **options):
        seen.extend([q, k, v])
        return varlen_attn(q, k, v, *bounds, **options)

    tensors = random_tensors(8, 8)
    attended(tensors, varlen(attend))
    assert [part.data_ptr() for part in seen] == [part.data_ptr() for part in tensors]


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 8), (12, 8), (5, 9)])
def test_heads_of_any_size_fit_the_packed_kernel(window, key_dim, value_dim):
    """Latent attention has keys that are larger than values; the kernel takes one size, a multiple of 8."""
    tensors = random_tensors(key_dim, value_dim)
    found = differentiated(lambda *parts: attended(parts, varlen(varlen_attn), window), tensors)
    torch.testing.assert_close(found, differentiated(lambda *parts: dense(*parts, window=window), tensors))


def test_padding_does_not_change_the_default_scale():
    tensors = random_tensors(12, 8)
    segments = Segments([Segment((0, 17), (0, 17))], torch.device("cpu"))
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(varlen(varlen_attn)(*tensors, segments, Softmax()), expected)


@pytest.mark.parametrize("value_dim", [4, 6])
@pytest.mark.parametrize("window", [None, 3])
def test_only_the_kernel_that_takes_grouped_heads_is_given_them(monkeypatch, window, value_dim):
    """With a mask, or heads of two sizes, torch would make all scores on a GPU."""
    original, calls = torch.nn.functional.scaled_dot_product_attention, []

    def recorded(query, key, value, *, attn_mask, enable_gqa, **options):
        calls.append((attn_mask is not None or query.shape[-1] != value.shape[-1], enable_gqa))
        return original(query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    attended(random_tensors(value_dim=value_dim), "sdpa", window)
    assert len(calls) == len(LENGTHS)
    assert all(is_grouped != is_special for is_special, is_grouped in calls)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(
    ("backend", "package"), [("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn_interface")]
)
def test_flash_attention_is_told_of_rows(monkeypatch, backend, package, window):
    monkeypatch.setitem(sys.modules, package, FlashAttention)
    tensors = random_tensors(12, 8)
    for softcap in (None, 2.0):
        found = attended(tensors, backend, window, softcap)
        torch.testing.assert_close(found, dense(*tensors, window=window, softcap=softcap))
    side_by_side = [torch.randn(len(LENGTHS), *x.shape[1:2], max(LENGTHS), x.shape[3]) for x in tensors]
    torch.testing.assert_close(
        attended(side_by_side, backend, window, is_packed=False),
        attended(side_by_side, "sdpa", window, is_packed=False),
    )


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_a_backend_that_is_not_installed_is_refused_with_the_remedy():
    problems = check({"model_name": "m", "dtensor_cfg": {"attention_backend": "flash_attention_2"}})
    assert len(problems) == 1
    assert install_command("rl-dtensor[flash]") in problems[0]
    assert "cluster.worker_envs=isolated" in problems[0]
    assert "attention_backend=auto" in problems[0]


def test_layers_of_other_kinds_are_neither_packed_nor_split():
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2)
    assert attention_for(config, "auto", packed=True, split=False, supports_sdpa=True) == ROWS
    assert attention_for(config, "auto", packed=False, split=True, supports_sdpa=True) == ROWS
    assert attention_for(config, "auto", packed=True, split=False, supports_sdpa=False) == ROWS
    config.layer_types = ["linear_attention", "full_attention"]
    assert attention_for(config, "auto", packed=True, split=True, supports_sdpa=True) == ROWS
    config.layer_types = ["chunked_attention", "full_attention"]
    assert attention_for(config, "auto", packed=True, split=True, supports_sdpa=True) == ROWS
    config.layer_types = ["indexed_attention", "full_attention"]
    assert attention_for(config, "auto", packed=False, split=False, supports_sdpa=True) == "sdpa"
    with pytest.raises(ValueError, match="layers of type indexed_attention"):
        attention_for(config, "auto", packed=True, split=False, supports_sdpa=True)
    with pytest.raises(ValueError, match=r"cannot be split.*context_parallel_size=1"):
        attention_for(config, "auto", packed=False, split=True, supports_sdpa=True)


def test_a_backend_that_cannot_compute_a_model_is_refused():
    whole = {"packed": False, "split": False}
    capped = AutoConfig.for_model("gemma2", num_hidden_layers=2)
    assert attention_for(capped, "flash_attention_2", **whole, supports_sdpa=True) == ROWS
    own = {**whole, "supports_sdpa": True, "rows_problem": "it is of another kind"}
    assert attention_for(capped, "auto", **own) == "eager"
    with pytest.raises(ValueError, match=r"flash_attention_2 cannot run a gemma2 model.*attention_backend=eager"):
        attention_for(capped, "flash_attention_2", **own)
    dropping = AutoConfig.for_model("qwen3", num_hidden_layers=2, attention_dropout=0.1)
    assert attention_for(dropping, "flash_attention_2", **whole, supports_sdpa=True) == ROWS
    with pytest.raises(ValueError, match=r"flex has no dropout.*attention_dropout is 0.1"):
        attention_for(dropping, "flex", **whole, supports_sdpa=True)


def on_meta(family, **fields):
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 11}
    config = AutoConfig.for_model(family, **sizes, **fields)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=ROWS)


def test_a_model_that_does_not_tell_attention_of_rows_says_why():
    assert rows_problem(on_meta("llama")) == ""
    assert "calls attention without the layout of rows" in rows_problem(on_meta("stablelm"))
    assert "takes no position_ids" in rows_problem(on_meta("bloom"))
    assert "DogeAttention calls attention with a mask of its own" in rows_problem(on_meta("doge"))
    assert "is_causal=False" in rows_problem(on_meta("bert"))


def test_what_a_model_hands_to_attention_beside_known_things_is_named(monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", biased(modeling_llama.LlamaAttention.forward))
    assert "LlamaAttention calls attention with position_bias" in rows_problem(on_meta("llama"))


def biased(forward):
    return lambda *inputs, **kwargs: forward(*inputs, position_bias=torch.zeros(1), output_attentions=False, **kwargs)


def test_a_backend_without_sinks_is_refused_before_weights_are_read():
    assert rows_problem(on_meta("gpt_oss"), "flex") == ""
    with pytest.raises(ValueError, match=r"dtensor_cfg.attention_backend: .*sdpa.*attention sinks"):
        rows_problem(on_meta("gpt_oss"), "sdpa")


def test_a_failure_that_data_would_not_mend_is_not_taken_for_an_answer(monkeypatch):
    hf = on_meta("llama")

    def broken(position_ids, **_):
        raise KeyError("layout")

    monkeypatch.setattr(body_of(hf), "forward", broken)
    with pytest.raises(KeyError, match="layout"):
        rows_problem(hf)
