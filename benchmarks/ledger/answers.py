"""Values that the host reads from tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class Answers(TorchDispatchMode):
    """Lets the host read tensors without data, on `meta` or fake: code that depends on a few numbers of the device runs
    as it would with these.

    It is entered after a mode that makes tensors fake, and before the one that counts::

        with FakeTensorMode(allow_non_fake_inputs=True), Answers(lambda tensor: ..., 0), CostCounter("cpu") as counter:
            ...

    All entries of a mask are taken to be true, so that `nonzero` and the like have as many results as there can be.

    Args:
        values: From a tensor without data to a tensor on the host with what is read from it, of its shape or a scalar.
        num_repeated: Number of results of `repeat_interleave`.
    """

    def __init__(self, values: Callable[[Tensor], Tensor], num_repeated: int) -> None:
        super().__init__()
        self._values = values
        self._num_repeated = num_repeated
        self._entered = ExitStack()

    def __enter__(self) -> Answers:
        super().__enter__()
        # its own reads entry by entry, each of which would count as a wait
        self._entered.callback(setattr, FakeTensor, "tolist", FakeTensor.tolist)
        setattr(FakeTensor, "tolist", lambda tensor: self._read_all(tensor))  # noqa: B010, as mypy sees a method
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.close()
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = next((value for value in args if isinstance(value, Tensor)), None)
        if asked is None or function is _aten.lift_fresh.default or function.namespace == "prim":
            return function(*args, **kwargs)
        if not _has_no_data(asked):
            with unset_fake_temporarily():  # a mesh, for example, has a tensor with the ranks of each group
                return function(*args, **kwargs)
        if function is _aten._local_scalar_dense.default:
            with unset_fake_temporarily():
                return self._read(asked).item()
        if function is _aten._to_copy.default and asked.is_meta and _goes_to_host(kwargs):
            return self._read(asked).to(kwargs.get("dtype") or asked.dtype)
        if function is _aten.equal.default:
            return True
        if function is _aten.nonzero.default:
            return asked.new_empty((asked.numel(), asked.dim()), dtype=torch.int64)
        if function is _aten.bincount.default:
            return asked.new_empty(args[2] if len(args) > 2 else kwargs["minlength"], dtype=torch.int64)
        if function is _aten.repeat_interleave.Tensor:
            return asked.new_empty(self._num_repeated, dtype=torch.int64)
        return function(*args, **kwargs)

    def _read_all(self, asked: Tensor) -> Any:
        if asked.numel():
            asked.flatten()[0].item()  # one wait
        with unset_fake_temporarily():
            return self._read(asked).tolist()

    def _read(self, asked: Tensor) -> Tensor:
        with unset_fake_temporarily():
            return self._values(asked).expand(asked.shape)


def _has_no_data(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _goes_to_host(kwargs: Any) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
