"""Weights that a model's loader copies into its parameters itself, past their own loaders, while vLLM reloads it.

- Fault: vLLM's reload keeps what the parameters' loaders are given until a layer is complete. Some models copy by
  themselves, such as gpt-oss the sinks of its attention and the weights of its experts. During a reload the parameters
  have no memory, so such a copy has no effect and the layer gets its earlier weights back.
- vLLM 0.32.0, `vllm/model_executor/model_loader/reload/layerwise.py` and `vllm/model_executor/models/gpt_oss.py`.
- Upstream: https://github.com/vllm-project/vllm/pull/57795 (open) describes the fault for attention sinks of several
  families; https://github.com/vllm-project/vllm/pull/57805 (open) mends the sinks of gpt-oss, not its experts.
- Delete when `tests/patches/test_direct_copies.py::test_vllms_reload_drops_what_a_model_copies_itself` fails. If
  `tests/patches/test_direct_copies.py::test_gpt_oss_copies_its_sinks_by_itself` fails, look for other models that copy,
  and delete it if there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from rl_core.torch.transport.bucket import Region


@contextmanager
def keeps_direct_copies(model: nn.Module) -> Iterator[None]:
    """Make vLLM's reload, which has begun and ends inside, also keep copies that a model's loader makes directly."""
    copies = _DirectCopies(model)
    try:
        with copies:
            yield
    finally:
        copies.put_back()


def copy_region(param: Tensor, loaded_weight: Tensor, region: Region) -> None:
    """Load a part of a parameter."""
    region.read(param.data).copy_(loaded_weight)


class _DirectCopies(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._places: dict[int, tuple[nn.Module, str]] = {}
        self._loaders: list[tuple[Tensor, Any]] = []
        self._is_in_loader = False
        for layer in model.modules():
            for name, tensor in get_layer_tensors(layer).items():
                if tensor.is_meta and hasattr(tensor, "weight_loader"):
                    self._places.setdefault(_storage(tensor), (layer, name))
                    self._loaders.append((tensor, tensor.weight_loader))
                    tensor.weight_loader = self._watched(tensor.weight_loader)

    def put_back(self) -> None:
        """Give the parameters back their loaders."""
        for tensor, loader in self._loaders:
            tensor.weight_loader = loader

    def _watched(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(loader)
        def watched(*args: Any, **kwargs: Any) -> Any:
            outer, self._is_in_loader = self._is_in_loader, True
            try:
                return loader(*args, **kwargs)
            finally:
                self._is_in_loader = outer

        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and not self._is_in_loader and _storage(args[0]) in self._places:
            layer, name = self._places[_storage(args[0])]
            tensor, target = getattr(layer, name), args[0]
            if tensor.is_meta:  # Otherwise the layer is complete.
                tensor.weight_loader = copy_region
                make_online_process_loader(layer, name)(tensor, args[1].expand(target.shape), Region.of(target))
            return target
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
