"""Time of the host for one layer, forward and backward, by its own code, with fused kernels and with `compile`.

    python packages/rl-dtensor/benchmarks/host_cost.py qwen3 qwen3_moe

It runs on a CPU, at a size whose arithmetic takes hardly any time. Attention copies its queries, and programs of Triton
return at once, so the time of their launches is missing from the figures of fused kernels; the time that CUDA takes to
launch an operation is missing from all. Compiled layers run Inductor's code for CPUs. So the figures compare the Python
around the operations, and are not the time of a GPU's host.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from figures import median, table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime import JITFunction

from rl_core.torch.kernels.devices import as_on_gpus
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.layers.compilation import compile_layers
from rl_dtensor.model.layers.fusion import fuse_layers
from rl_dtensor.model.tiny import made_tiny, shrink
from rl_dtensor.model.whole import decoder_layers

TOKENS, WARM_UP, REPEATS = 16, 3, 200
WAYS = ("own code", "fused kernels", "compile")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(key, value)
        return query.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros_like(each) for each in ctx.saved_tensors)


def passes(family: str, way: str) -> Callable[[], tuple[float, float]]:
    """Return a function that runs one layer and returns seconds of the processor, forward and backward."""
    config = shrink(AutoConfig.for_model(family))
    with made_tiny(config.model_type):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ROWS).train()
    layers = decoder_layers(model)
    if way == "fused kernels":
        fuse_layers(model, layers)
    elif way == "compile":
        compile_layers(model, layers)
    size = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    angles = torch.randn(1, TOKENS, size)
    given = {"attention_mask": None, "position_ids": None, "past_key_values": None, "use_cache": False}
    given |= {"layout": SimpleNamespace(context=None, segments=None, position_ids=None)}

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
        return _Attention.apply(query, key, value)

    def run() -> tuple[float, float]:
        hidden = torch.randn(1, TOKENS, config.hidden_size, requires_grad=True)
        with ExitStack() as stack:
            if way == "fused kernels":
                stack.enter_context(as_on_gpus())
                stack.enter_context(patch.object(JITFunction, "run", lambda *_, **__: None))
            start = time.process_time()
            out = layers[0](hidden, position_embeddings=(angles, angles), attend=attend, **given)
            middle = time.process_time()
            out.backward(torch.ones_like(out))
            return middle - start, time.process_time() - middle

    for _ in range(WARM_UP):
        run()
    return run


def main() -> None:
    """Print a table of the families."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", help="types of models, such as qwen3")
    rows = []
    for family in parser.parse_args().families:
        runs = {way: passes(family, way) for way in WAYS}
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(REPEATS):  # Interleaved, because the machine's speed varies.
            for way, run in runs.items():
                found[way].append(run())
        base = sum(median([each[part] for each in found[WAYS[0]]]) for part in (0, 1))
        for way, times in found.items():
            forward, backward = (1e6 * median([each[part] for each in times]) for part in (0, 1))
            ratio = f"{(forward + backward) / (1e6 * base):.2f}"
            rows.append([family, way, f"{forward:.0f}", f"{backward:.0f}", ratio])
    print(table(["family", "layer", "forward, us", "backward, us", "of its own code"], rows))


if __name__ == "__main__":
    main()
