"""Layers of `transformers` models that compute by the fused kernels of `rl_core.torch.kernels`.

A module is chosen by the formula of its code, as trials show (`rl_dtensor.model.layers.formulas`), and keeps its
parameters and parts: adapters, sharding and hooks work as on the original. Tensors that the kernels do not take, such
as tensors on a CPU, go through the original code.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_core.torch.kernels.devices import takes
from rl_core.torch.kernels.norm import NormForm, add_rms_norm, rms_norm, takes_norm
from rl_core.torch.kernels.rotary import HeadNorm, rotated_pair
from rl_core.torch.kernels.swiglu import swiglu, swiglu_of_halves
from rl_dtensor.model.attention import MODEL_ERRORS, pass_on_meta
from rl_dtensor.model.kernels import Softmax
from rl_dtensor.model.layers import formulas
from rl_dtensor.model.layers.experts import fuse_experts
from rl_dtensor.model.layout import Segments

logger = logging.getLogger(__name__)

HEAD_NORMS = ("q_norm", "k_norm")
"""Names that families have for the norms of each query and key head."""


def fuse_layers(hf: PreTrainedModel, layers: Sequence[nn.Module]) -> Counter[str]:
    """Make modules of a model compute by fused kernels where these run.

    To be called before the model is split or sharded, which wraps the computation of modules.

    Args:
        hf: Whole model on `meta` or with values, changed in place.
        layers: The repeated layers.

    Returns:
        Number of modules of each kind: `norms`, `mlps`, `experts`, `rotations`, `normed rotations`, `residuals`.
    """
    forms = _fuse_norms(hf)
    rotations = []
    for module in (module for layer in layers for module in layer.modules()):
        if own := formulas.rotating_forward(module):
            rotations.append(Rotation(module, own.__globals__[formulas.ROTATE]))
            rotate_by(rotations[-1], module, own)
    counts = Counter(
        {
            "norms": len(forms),
            "mlps": _fuse_mlps(hf),
            "experts": fuse_experts(hf),
            "rotations": len(rotations),
            "normed rotations": _defer_norms(hf, rotations, forms),
            "residuals": sum(fuse_residuals(layer, forms, takes) for layer in layers),
        }
    )
    logger.info("fused kernels in %s: %s", type(hf).__name__, ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    return counts


def _fuse_norms(hf: PreTrainedModel) -> dict[int, NormForm]:
    """Compute norms by kernels; return their formulas by the identity of the module."""
    tried: dict[Any, NormForm | None] = {}
    forms = {}
    for module in hf.modules():
        settings = sorted((name, value) for name, value in vars(module).items() if isinstance(value, float))
        kind = (type(module), *settings)
        if kind not in tried:
            tried[kind] = formulas.norm_form(module)
        form = tried[kind]
        if form is not None and "forward" not in vars(module):
            forms[id(module)] = form
            _fuse_norm(module, form)
    return forms


def _fuse_norm(module: Any, form: NormForm) -> None:
    original = module.forward

    @wraps(original)
    def forward(x: Tensor, addend: Tensor | None = None, *, with_sum: bool = False) -> Any:
        if with_sum:
            return add_rms_norm(x, addend, module.weight, form)
        return rms_norm(x, module.weight, form) if takes_norm(x, module.weight) else original(x)

    module.forward = forward


def _fuse_mlps(hf: PreTrainedModel) -> int:
    """Compute the gates of MLPs by kernels; return their number."""
    tried: dict[Any, tuple[bool, bool]] = {}
    count = 0
    for module in hf.modules():
        names = frozenset(module._modules)
        if "down_proj" not in names:
            continue
        kind = (type(module), str(formulas.activation_of(module)), names)
        if kind not in tried:
            is_gated = formulas.is_gated_mlp(module)
            tried[kind] = is_gated, not is_gated and formulas.is_packed_mlp(module)
        if any(tried[kind]):
            _fuse_mlp(module, is_gated=tried[kind][0])
            count += 1
    return count


def _fuse_mlp(module: Any, *, is_gated: bool) -> None:
    original = module.forward

    @wraps(original)
    def forward(x: Tensor) -> Tensor:
        if not takes(x):
            return cast("Tensor", original(x))
        gate = swiglu(module.gate_proj(x), module.up_proj(x)) if is_gated else swiglu_of_halves(module.gate_up_proj(x))
        return cast("Tensor", module.down_proj(gate))

    module.forward = forward


def fuse_residuals(layer: Any, norms: Container[int], takes: Callable[[Tensor], bool]) -> bool:
    """Leave the sums of a layer to the norms that follow them, if its code is the code of most families.

    Args:
        layer: Layer, changed in place.
        norms: Identities of norms that also take an addend, and return the sum as well if called with `with_sum`.
        takes: Returns whether they take a tensor; the layer's own code computes with others.

    Returns:
        True if the layer has been changed.
    """
    kind: Any = type(layer)
    own = [layer._modules.get(name) for name in ("input_layernorm", "post_attention_layernorm")]
    if "forward" in vars(layer) or not formulas.is_pre_norm_layer(kind) or any(id(norm) not in norms for norm in own):
        return False
    original = layer.forward
    arguments = list(inspect.signature(original).parameters.values())[1:]
    defaults = {each.name: each.default for each in arguments if each.default is not each.empty}

    @wraps(original)
    def forward(hidden_states: Tensor, **given: Any) -> Any:
        if not takes(hidden_states):
            return original(hidden_states, **given)
        normed, residual = layer.input_layernorm(hidden_states, with_sum=True)
        attended, _ = layer.self_attn(hidden_states=normed, **{**defaults, **given})
        normed, residual = layer.post_attention_layernorm(attended, residual, with_sum=True)
        return residual + layer.mlp(normed)

    layer.forward = forward
    return True


class Rotation:
    """The rotation of an attention layer's queries and keys by kernels, which may compute their norms as well.

    A norm that is left to it returns its input, and the rotation takes its weight.

    Args:
        module: Attention layer, whose code calls the rotation by its name.
        original: That rotation, for tensors that the kernels do not take.
    """

    def __init__(self, module: Any, original: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.module = module
        self._original = original
        self._waiting: dict[str, HeadNorm] = {}
        self._watched: dict[str, Tensor] | None = None
        self.was_seen = False

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if self._watched is not None:
            # Queries and keys come from the norms unchanged if they are the same values in the same memory.
            watched = self._watched
            self.was_seen = all(
                name in watched
                and part.untyped_storage()._cdata == watched[name].untyped_storage()._cdata
                and part.numel() == watched[name].numel()
                and part.shape[-1] == self.module._modules[name].weight.numel()
                for name, part in (("q_norm", q), ("k_norm", k))
            )
        norms, self._waiting = self._waiting, {}
        if takes(q, k, cos, sin):
            own = norms.get("q_norm"), norms.get("k_norm")
            return rotated_pair(q, k, cos, sin, own, heads_dim=unsqueeze_dim)
        if "q_norm" in norms:
            q = rms_norm(q, *norms["q_norm"])
        if "k_norm" in norms:
            k = rms_norm(k, *norms["k_norm"])
        return self._original(q, k, cos, sin, unsqueeze_dim)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note meanwhile in `was_seen` whether queries and keys come from the norms unchanged."""
        watched = self._watched = {}

        def note(name: str, norm: Any, args: Any, out: Tensor) -> None:
            watched[name] = out

        hooks = [self.module._modules[name].register_forward_hook(partial(note, name)) for name in HEAD_NORMS]
        try:
            yield
        finally:
            self._watched = None
            for hook in hooks:
                hook.remove()

    def defer(self, name: str, form: NormForm) -> None:
        """Leave a norm to the rotation."""
        norm: Any = self.module._modules[name]
        original = norm.forward

        @wraps(original)
        def forward(x: Tensor) -> Tensor:
            if not takes_norm(x, norm.weight):
                return cast("Tensor", original(x))
            self._waiting[name] = HeadNorm(norm.weight, form)
            return x

        norm.forward = forward


def rotate_by(rotate: Callable[..., tuple[Tensor, Tensor]], module: Any, own: FunctionType) -> None:
    """Run an attention layer's own code with another function of the name of its rotation.

    Args:
        rotate: Function of the arguments of the rotation.
        module: Attention layer.
        own: Function of its class, which calls the rotation by its name.
    """
    names = {**own.__globals__, formulas.ROTATE: rotate}
    forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    module.forward = MethodType(wraps(own)(forward), module)


def _defer_norms(hf: PreTrainedModel, rotations: Sequence[Rotation], forms: dict[int, NormForm]) -> int:
    """Leave norms of heads to the rotation where a pass of the model shows that nothing is between them.

    Returns:
        Number of layers whose norms are left to it.
    """

    def empty(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    normed = [each for each in rotations if all(id(each.module._modules.get(name)) in forms for name in HEAD_NORMS)]
    with ExitStack() as stack:
        for rotation in normed:
            stack.enter_context(rotation.watched())
        try:
            if normed:
                pass_on_meta(hf, empty)
        except MODEL_ERRORS as error:
            logger.info("norms of heads are not fused with their rotation: %s: %s", type(error).__name__, error)
    seen = [rotation for rotation in normed if rotation.was_seen]
    for rotation in seen:
        for name in HEAD_NORMS:
            rotation.defer(name, forms[id(rotation.module._modules[name])])
    return len(seen)
