"""Rotations of queries and keys by fused kernels, with the norms before them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from rl_core.torch.kernels.devices import takes
from rl_core.torch.kernels.norm import NormForm, rms_norm, takes_norm
from rl_core.torch.kernels.rotary import HeadNorm, rotated
from rl_dtensor.model.attention import MODEL_ERRORS, pass_on_meta
from rl_dtensor.model.formulas import ROTATE, rotating_forward
from rl_dtensor.model.kernels import Softmax
from rl_dtensor.model.layout import Segments

logger = logging.getLogger(__name__)

HEAD_NORMS = ("q_norm", "k_norm")
"""Names that families have for the norms of each query and key head."""


class Rotation:
    """The rotation of an attention layer's queries and keys, which may do their norms as well.

    A norm that is left to it returns what it is called with, and the rotation takes its weight.

    Args:
        module: Attention layer, whose code calls the rotation by its name.
    """

    def __init__(self, module: Any, original: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.module = module
        self._original = original
        self._waiting: dict[str, HeadNorm] = {}
        self._watched: dict[str, Tensor] | None = None
        self.was_seen = False

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if self._watched is not None:
            self._compare(q, k)
        norms, self._waiting = self._waiting, {}
        if takes(q, k, cos, sin):
            return (
                rotated(q, cos, sin, norms.get("q_norm"), heads_dim=unsqueeze_dim),
                rotated(k, cos, sin, norms.get("k_norm"), heads_dim=unsqueeze_dim),
            )
        if norms:
            q, k = (
                rms_norm(part, *norms[name]) if name in norms else part for name, part in (("q_norm", q), ("k_norm", k))
            )
        return self._original(q, k, cos, sin, unsqueeze_dim)

    def has_norms(self, forms: dict[int, NormForm]) -> bool:
        """Return whether the layer has norms of queries and keys that kernels know."""
        return all(id(self.module._modules.get(name)) in forms for name in HEAD_NORMS)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note meanwhile whether queries and keys come from the norms as they are; `was_seen` then says so."""
        self._watched = {}
        hooks = [self.module._modules[name].register_forward_hook(partial(self._note, name)) for name in HEAD_NORMS]
        try:
            yield
        finally:
            self._watched = None
            for hook in hooks:
                hook.remove()

    def _note(self, name: str, norm: Any, args: Any, out: Tensor) -> None:
        if self._watched is not None:
            self._watched[name] = out

    def _compare(self, q: Tensor, k: Tensor) -> None:
        watched = self._watched or {}
        self.was_seen = all(
            name in watched
            and part.untyped_storage()._cdata == watched[name].untyped_storage()._cdata
            and part.numel() == watched[name].numel()
            and part.shape[-1] == self.module._modules[name].weight.numel()
            for name, part in (("q_norm", q), ("k_norm", k))
        )

    def defer(self, name: str, form: NormForm) -> None:
        """Leave a norm to the rotation."""
        norm: Any = self.module._modules[name]
        alone = norm.forward

        @wraps(alone)
        def forward(x: Tensor) -> Tensor:
            if not takes_norm(x, norm.weight):
                normed: Tensor = alone(x)
                return normed
            self._waiting[name] = HeadNorm(norm.weight, form)
            return x

        norm.forward = forward


def fuse_rotation(module: Any) -> Rotation:
    """Rotate an attention layer's queries and keys by kernels."""
    own = cast("FunctionType", rotating_forward(module))
    rotation = Rotation(module, own.__globals__[ROTATE])
    rotate_by(rotation, module, own)
    return rotation


def rotate_by(rotate: Callable[..., tuple[Tensor, Tensor]], module: Any, own: FunctionType) -> None:
    """Run an attention layer's own code with another function of the name of its rotation.

    Args:
        rotate: Function of the arguments of the rotation.
        module: Attention layer.
        own: Function of its class, which calls the rotation by its name.
    """
    names = {**own.__globals__, ROTATE: rotate}
    forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    module.forward = MethodType(wraps(own)(forward), module)


def defer_norms(hf: PreTrainedModel, rotations: Sequence[Rotation], forms: dict[int, NormForm]) -> int:
    """Leave norms of heads to the rotation where a pass of the model shows that nothing is between them.

    Returns:
        Number of layers whose norms are left to it.
    """
    with ExitStack() as stack:
        for rotation in rotations:
            stack.enter_context(rotation.watched())
        try:
            if rotations:
                pass_on_meta(hf, _no_attention)
        except MODEL_ERRORS as error:
            logger.info("norms of heads are not fused with their rotation: %s: %s", type(error).__name__, error)
    seen = [rotation for rotation in rotations if rotation.was_seen]
    for rotation in seen:
        for name in HEAD_NORMS:
            rotation.defer(name, forms[id(rotation.module._modules[name])])
    return len(seen)


def _no_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
    """A result of the right shape without a value."""
    return query.new_empty((*query.shape[:-1], value.shape[-1]))
