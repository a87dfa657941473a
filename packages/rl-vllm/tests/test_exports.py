"""Exports of tiny models of many families, served by vLLM alone and by the generator, against float64 transformers.

A model is exported after three steps of SGD. vLLM gets the arguments that `SERVING.md` of the export lists. Families
whose experts have other names in files than in memory are not among them, because the plain backend does not rename.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served_exports import NUM_TOKENS
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.facts.vllm_readings import SERVING_NOTE
from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import Rank, RankPool
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.model_worker import make_batch
from rl_core.testing.torch.reference_model import write_reference_model

pytestmark = pytest.mark.timeout(1800)  # with every case, two processes start twenty engines each

VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 31}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GROUPS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LONG = {
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 16 for i in range(16)],
        "long_factor": [2.0 + i / 4 for i in range(16)],
        "original_max_position_embeddings": 512,
        "factor": 4.0,
    },
}
LLAMA_4 = {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 96,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 512,
    "floor_scale": 4,
}
GEMMA_3N = {
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "laurel_rank": 8,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 41}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_with_biases": ("qwen3", {"attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "olmoe_with_biases": ("olmoe", {**EXPERTS, "attention_bias": True}),
    "gemma2": ("gemma2", SLIDING),
    "gemma3": ("gemma3_text", SLIDING),
    "gemma3n": ("gemma3n_text", {**SLIDING, **GEMMA_3N}),
    "cohere2": ("cohere2", SLIDING),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "phi": ("phi", {}),
    "phi3_longrope": ("phi3", LONG),
    "glm4_moe": ("glm4_moe", {**EXPERTS, **GROUPS, "n_group": 1, "topk_group": 1}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "conv_dim": 128, "block_dim": 128}),
    "llama4": ("llama4_text", LLAMA_4),
}
REFUSED = {"qwen3_with_biases": "o_proj.bias", "olmoe_with_biases": "k_proj.bias"}
"""Models that vLLM cannot load whole, to a weight that it leaves out."""

TOLERANCE = 1e-3
"""Difference of logprobs that float32 makes in the worst of these models, with room."""


def write(_rank: Rank, folder: Path, name: str) -> Path:
    """Write a family's model; in a process without engines, because vLLM changes the classes of models that it serves
    by their own code."""
    family, fields = FAMILIES[name]
    write_reference_model(folder, seed=1)  # for its tokenizer
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **fields}), dtype=torch.float32)
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if path.endswith(("bias", "correct_output_scale")):
            torch.nn.init.normal_(tensor, std=0.3)
    model.save_pretrained(folder)
    return folder


def export(pool: RankPool, source: Path, target: Path) -> Path:
    """Export a model after three steps."""
    optimizer = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.01})
    config = ModelConfig(
        model_name=str(source), precision="float32", optimizer=optimizer, max_total_sequence_length=400
    )
    with PooledModel(pool, "rl_core.testing.torch.plain_backend:build", config, ModelSpec(), 1) as model:
        for seed in range(3):
            model.train_step(make_batch(seed=seed), TokenLoss())
        model.export(str(target))
    return target


def arguments_of(folder: Path) -> dict[str, Any]:
    """Arguments that an export lists for vLLM."""
    text = (folder / SERVING_NOTE).read_text(encoding="utf-8")
    command = next(line for line in text.splitlines() if line.startswith("vllm serve MODEL"))
    words = shlex.split(command)[3:]
    found = {}
    for name, value in zip(words[::2], words[1::2], strict=True):
        found[name.removeprefix("--").replace("-", "_")] = json.loads(value) if value[0] in "{0123456789" else value
    return found


def rows_of(count: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(3, VOCAB, length).tolist() for length in np.linspace(40, 300, count).astype(int)]


def served(engine: str, orders: list[tuple[str, dict[str, Any], list[list[int]]]]) -> list[Any]:
    """The answers of `served_exports.py`."""
    program = Path(__file__).with_name("served_exports.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment["TORCHDYNAMO_DISABLE"] = "1"  # vLLM compiles its sampler, which takes longer than all completions
    done = subprocess.run(
        [sys.executable, program, engine],
        input=json.dumps(orders),
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


class Exports:
    """The exports of some families, which engines serve when they are asked for.

    Args:
        workspace: Folder to write them to.
        names: Names of the families.
    """

    def __init__(self, workspace: Path, names: list[str]) -> None:
        self.rows = rows_of(16)
        self.folders = {}
        with RankPool(1) as pool:
            for name in names:
                (source,) = pool.run(write, [(workspace / f"{name}-source", name)])
                self.folders[name] = export(pool, source, workspace / name)

    @cache  # noqa: B019 - there is one for the module
    def served_by(self, engine: str) -> dict[str, Any]:
        """Return the answers of `served_exports.py` by the name of the family."""
        # the corrections that an argument loads stay in the process, so models that need none come first
        arguments = {name: arguments_of(folder) for name, folder in self.folders.items()}
        names = sorted(arguments, key=lambda name: "worker_extension_cls" in arguments[name])
        orders = [(str(self.folders[name]), arguments[name], self.rows) for name in names]
        return dict(zip(names, served(engine, orders), strict=True))


@pytest.fixture(scope="module")
def exports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exports:
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    selected = {item.callspec.params["name"] for item in items}
    return Exports(tmp_path_factory.mktemp("exports"), [name for name in FAMILIES if name in selected])


@pytest.mark.parametrize(
    ("engine", "name"),
    partly_exhaustive([(engine, name) for engine in ("vllm", "rl") for name in FAMILIES], always=[("vllm", "cohere2")]),
)
def test_an_export_is_served_as_transformers_computes_it_or_refused_by_name(
    exports: Exports, name: str, engine: str
) -> None:
    answer = exports.served_by(engine)[name]
    if name in REFUSED and engine == "rl":
        assert "vLLM does not load" in answer
        assert REFUSED[name] in answer
        return
    assert not isinstance(answer, str), answer
    # fused products of experts have no float64
    model = AutoModelForCausalLM.from_pretrained(
        exports.folders[name], dtype=torch.float64, experts_implementation="eager"
    )
    worst, wrong = 0.0, 0
    for row, (tokens, logprobs) in zip(exports.rows, answer, strict=True):
        assert len(tokens) == NUM_TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([row + tokens])).logits[0, len(row) - 1 : -1]
        expected = logits.log_softmax(-1)
        of_tokens = expected[torch.arange(NUM_TOKENS), tokens]
        worst = max(worst, float((of_tokens - torch.tensor(logprobs)).abs().max()))
        wrong += int((of_tokens < expected.max(-1).values - TOLERANCE).sum())
    total = NUM_TOKENS * len(answer)
    sys.stdout.write(f"{name} by {engine}: {wrong} of {total} tokens wrong, logprobs off by up to {worst:.1e}\n")
    if name in REFUSED:
        assert wrong  # vLLM alone serves another model in silence, which is why rl refuses it
    else:
        assert wrong == 0
        assert worst < TOLERANCE
