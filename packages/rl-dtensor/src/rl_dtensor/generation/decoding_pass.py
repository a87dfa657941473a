"""A pass over one token of every row, by the layers of most families written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl_dtensor.generation.cache import Kind, RowCache, RowLayer, row_layers
from rl_dtensor.model.layers import formulas
from rl_dtensor.model.layers.fusion import HEAD_NORMS
from rl_dtensor.model.tiny import shrink
from rl_dtensor.model.whole import decoder_layers
from rl_dtensor.parallel.body import body_of

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")

_TRIAL_PLACES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 100, 5_000, 200_000)
"""Places of the tokens of the trial in their row. Some families scale queries by the place, from a far one on."""

_TOLERANCE = 1e-4
"""Largest difference of logits in the trial, relative to the largest logit. Rounding is a hundred times smaller."""


class DecodingPass:
    """Computes logits of one token of every row, without the model's own code around its products.

    For few rows on a CPU that code takes longer than the products. Layers are pre-norm layers with rotated queries and
    keys, as in Llama; projections of one input are one product. The pass computes with the memory of the model's
    parameters, so weights that are written into the model are the weights of the pass.

    Args:
        hf: Model, whose parameters move into shared memory.

    Raises:
        ValueError: With the reason, if the parts of the model are not those of such layers. Whether they compute the
            same is for `pass_problem` to find.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        body: Any = body_of(hf)
        self._embed, self._head = hf.get_input_embeddings(), hf.get_output_embeddings()
        self._norm, self._rotary = _Norm(_part(body, "norm")), _part(body, "rotary_emb")
        self._layers = [_DecodingLayer(layer) for layer in decoder_layers(hf)]
        self._angles: tuple[Tensor, ...] = ()

    def share_weights(self) -> None:
        """Share the memory of parameters again that the model has got since."""
        for layer in self._layers:
            layer.share_weights()

    def __call__(self, tokens: Tensor, positions: Sequence[int], cache: RowCache, mask: Tensor | None) -> Tensor:
        """Compute logits `[rows, vocab]`.

        Args:
            tokens: Int64 `[rows]`, the next token of each row.
            positions: Its place in the row.
            cache: Keys and values of the tokens before; these are added to it.
            mask: Added to the scores, `[rows, 1, 1, columns]` in the dtype of the model; None if no row is padded.
        """
        x: Tensor = self._embed(tokens)
        if not self._angles or len(self._angles[0]) <= max(positions):
            # Angles of all places up to the next power of two, for the heads of a row.
            places = torch.arange(1 << max(positions).bit_length(), device=x.device)
            cos, sin = (each[0, :, None] for each in self._rotary(x, places[None]))
            left, right = sin.chunk(2, -1)
            self._angles = cos, torch.cat([-left, right], -1)
        places = torch.tensor(positions, device=x.device)
        cos, sin = (each.index_select(0, places) for each in self._angles)
        for layer, pages in zip(self._layers, cache.layers, strict=True):
            x = layer(x, cos, sin, mask, pages)
        return cast("Tensor", self._head(self._norm(x)))


class _DecodingLayer:
    """One layer of a `DecodingPass`."""

    def __init__(self, layer: nn.Module) -> None:
        kind: Any = type(layer)
        if "forward" in vars(layer) or not formulas.is_pre_norm_layer(kind):
            raise ValueError("its layers do other things than attention and an MLP, each after a norm")
        attention, self._mlp = _part(layer, "self_attn"), _part(layer, "mlp")
        self._norm = _Norm(_part(layer, "input_layernorm"))
        self._mlp_norm = _Norm(_part(layer, "post_attention_layernorm"))
        others = sorted(attention._modules.keys() - {*_PROJECTIONS, *HEAD_NORMS})
        if others or attention._parameters:
            raise ValueError(f"its attention has {', '.join([*others, *attention._parameters])}")
        query, key, value, self._out = (_part(attention, name) for name in _PROJECTIONS)
        self._head_norms = [_Norm(attention._modules[name]) for name in HEAD_NORMS if name in attention._modules]
        self._head_dim, self._scaling = int(attention.head_dim), float(attention.scaling)
        self._shared = key.out_features // self._head_dim
        self._heads = query.out_features // self._head_dim
        self._qkv = _SharedProduct([query, key, value])
        self._gate_up: _SharedProduct | None = None
        activation = formulas.activation_of(self._mlp)
        if activation is not None and {"gate_proj", "up_proj", "down_proj"} <= self._mlp._modules.keys():
            self._activation = activation
            self._gate_up = _SharedProduct([self._mlp.gate_proj, self._mlp.up_proj])

    def share_weights(self) -> None:
        for product in (self._qkv, self._gate_up):
            if product is not None:
                product.share_weights()

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, pages: RowLayer) -> Tensor:
        """Return `[rows, features]`, given the same."""
        rows, heads, shared, size = x.shape[0], self._heads, self._shared, self._head_dim
        projected = self._qkv(self._norm(x)).view(rows, heads + 2 * shared, size)
        value = projected.narrow(1, heads + shared, shared)
        if self._head_norms:
            parts = projected.narrow(1, 0, heads), projected.narrow(1, heads, shared)
            rotating = torch.cat([norm(part) for norm, part in zip(self._head_norms, parts, strict=True)], 1)
        else:
            rotating = projected.narrow(1, 0, heads + shared)
        rotating = _rotated(rotating, cos, sin)
        keys, values = pages.update(rotating.narrow(1, heads, shared).unsqueeze(2), value.unsqueeze(2))
        # The heads that share keys are places of one head, so that no key is copied.
        query = rotating.narrow(1, 0, heads).reshape(rows, shared, heads // shared, size)
        attended = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self._scaling)
        x = _add_product(x, attended.reshape(rows, heads * size), self._out)
        normed = self._mlp_norm(x)
        if self._gate_up is None:
            return x + cast("Tensor", self._mlp(normed[:, None])[:, 0])
        gated = self._gate_up(normed)
        width = gated.shape[1] // 2
        gate = self._activation(gated.narrow(1, 0, width)) * gated.narrow(1, width, width)
        return _add_product(x, gate, self._mlp.down_proj)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first entries of each head as `plain_rotation`, given sines whose first half has the other sign."""
    size = cos.shape[-1]
    turned = x.narrow(-1, 0, size)
    out = torch.addcmul(turned * cos, turned.roll(size // 2, -1), sin)
    return out if size == x.shape[-1] else torch.cat([out, x[..., size:]], -1)


def _add_product(x: Tensor, features: Tensor, layer: nn.Module) -> Tensor:
    """Return `x + layer(features)`."""
    if type(layer) is not nn.Linear or layer.bias is not None:
        return x + cast("Tensor", layer(features))
    return torch.addmm(x, features, layer.weight.t())


class _Norm:
    """A norm, computed by one operator in float32. In other precisions its own code decides what is rounded."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._form = formulas.norm_form(module)

    def __call__(self, x: Tensor) -> Tensor:
        form = self._form
        if form is None or x.dtype != torch.float32:
            return cast("Tensor", self._module(x))
        weight: Tensor = self._module.weight
        return rms_norm(x, weight.shape, weight + form.offset if form.offset else weight, form.eps)


class _SharedProduct:
    """Linear layers of one input, computed as one product. Their parameters are parts of its own."""

    def __init__(self, layers: Sequence[Any]) -> None:
        if any(type(layer) is not nn.Linear for layer in layers):
            raise ValueError(f"its projections are {', '.join(sorted({type(each).__name__ for each in layers}))}")
        if len({layer.weight.dtype for layer in layers}) > 1 or len({layer.bias is None for layer in layers}) > 1:
            raise ValueError("its projections of one input differ in their dtype, or only some have a bias")
        self._layers = layers
        self._bias: Tensor | None = None
        self._weight = torch.empty(0)
        self.share_weights()

    @torch.no_grad()
    def share_weights(self) -> None:
        self._weight = _shared([layer.weight for layer in self._layers], self._weight)
        if self._layers[0].bias is not None:
            self._bias = _shared([layer.bias for layer in self._layers], self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self._weight, self._bias)


def _shared(parts: Sequence[nn.Parameter], held: Tensor | None) -> Tensor:
    """Return a tensor that the parameters are parts of, one after another: the one held, if they are parts of it."""
    sizes = [len(part) for part in parts]
    if held is not None and len(held) == sum(sizes):
        places = zip(parts, held.split(sizes), strict=True)
        if all(part.data_ptr() == place.data_ptr() and part.dtype == place.dtype for part, place in places):
            return held
    whole = torch.cat([part.detach() for part in parts])
    for part, place in zip(parts, whole.split(sizes), strict=True):
        part.data = place
    return whole


def _part(module: nn.Module, name: str) -> Any:
    if module._modules.get(name) is None:
        raise ValueError(f"its {type(module).__name__} has no {name}")
    return module._modules[name]


@torch.no_grad()
def pass_problem(hf: PreTrainedModel, kinds: Sequence[Kind]) -> str:
    """Return why a `DecodingPass` does not compute what a model's code does; empty if it does.

    Both compute a row of a small random model of the same family and settings, with windows shorter than the row.
    """
    if hf.config._attn_implementation != "sdpa":
        return f"its attention is {hf.config._attn_implementation}"
    if any(kind is not RowLayer for kind in kinds):
        return "its layers carry states"
    config = shrink(hf.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
        for parameter in small.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    compute, cache = DecodingPass(small), RowCache(row_layers(config))
    places = torch.tensor(_TRIAL_PLACES)[None]
    tokens = torch.arange(1, 1 + places.shape[1])[None]
    # Without a mask, gaps between places would begin another row.
    expected = small(
        input_ids=tokens, position_ids=places, attention_mask=torch.ones_like(tokens), use_cache=False
    ).logits[0]
    pairs = zip(tokens.T, _TRIAL_PLACES, strict=True)
    found = torch.cat([compute(token, [place], cache, None) for token, place in pairs])
    off = float((found - expected).abs().max() / expected.abs().max())
    return "" if off <= _TOLERANCE else f"its code computes something else (logits are off by {off:.2g})"
