"""Does a model family train on every mesh as it does in one process? A tiny random model of it says.

The usage loop::

    with RankPool(4) as pool:
        for outcome in check_family(pool, AutoConfig.from_pretrained(folder), workspace, all_cases()):
            ...                                   # outcome.is_off(TOLERANCE) where the family is not right yet

Every case trains three steps in float32 and is held against `transformers` (and peft) in float64, row by row, in one
process; the weight stream is held against the files, bit for bit.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rl_core.batch import Batch
from rl_core.errors import ConfigError, WorkerDied, WorkerError
from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig, SequencePackingConfig
from rl_core.ragged import Ragged
from rl_core.selfcheck import FamilyCase, MeshCase, Verdict
from rl_core.testing.losses import TokenLoss
from rl_core.testing.pooled_model import PooledModel
from rl_core.testing.rank_pool import RankPool, free_port
from rl_core.testing.torch.oracle import Oracle
from rl_core.testing.torch.received import receive
from rl_core.torch.files.model_files import WeightFiles
from rl_core.weights import Transport
from rl_dtensor.config import DTensorConfig
from rl_dtensor.lora import BASE, add_adapters, init_adapters
from rl_dtensor.names import FileNames
from rl_dtensor.worker import DTensorWorker

TOLERANCE = 1e-5
NUM_STEPS = 3
LENGTHS = (9, 3, 17, 1, 12, 2, 7)
SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.05, "momentum": 0.9})
LORA = LoraConfig(enabled=True)

TENSOR = {"tensor_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
MESHES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "1": (1, {}),
    "fsdp2": (2, {}),
    "hsdp 2x2": (4, {"dp_replicate_size": 2}),
    "tp2": (2, TENSOR),
    "tp2+sp": (2, {**TENSOR, "sequence_parallel": True}),
    "tp2 x fsdp2": (4, TENSOR),
    "cp2": (2, CONTEXT),
    "cp2 ulysses": (2, {**CONTEXT, "context_parallel_method": "ulysses"}),
    "cp2 x fsdp2": (4, CONTEXT),
    "cp2 x tp2": (4, {**CONTEXT, **TENSOR, "sequence_parallel": True}),
    "pp2": (2, PIPELINE),
    "pp2 x fsdp2": (4, PIPELINE),
    "ep2 x fsdp2": (4, {"expert_parallel_size": 2}),
}
"""Name of each mesh to its ranks and settings; the last is for models with experts alone."""

SMALL: Mapping[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 128,
    "initializer_range": 0.2,
    "sliding_window": 4,
    "window_size": 4,
    "query_pre_attn_scalar": 8,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 101,
    "hidden_size_per_layer_input": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
}
"""Sizes of the tiny model, for those of these fields that the family's config has a value of, under whatever name."""

DERIVED = ("head_dim", "num_key_value_heads")
"""Fields that follow from others where they have no value; not every family's code does without one."""

LONGEST_PERIOD = 8
"""Most layers of the tiny model."""


@dataclass(frozen=True)
class Outcome:
    """How far a case is from one process.

    Args:
        loss, grad_norm: largest difference over the steps, relative where they are more than 1.
        weights: largest difference after the last step.
        inexact: names that the weight stream gets wrong before the first step.
        refused: why the mesh cannot be, where it is refused.
        failed: what went wrong, where it did not get to the end.
    """

    case: MeshCase
    loss: float = 0.0
    grad_norm: float = 0.0
    weights: float = 0.0
    inexact: tuple[str, ...] = ()
    refused: str = ""
    failed: str = ""

    def is_off(self, tolerance: float) -> bool:
        """Whether something differs by more than that, or failed."""
        is_close = max(self.loss, self.grad_norm, self.weights) <= tolerance
        return not is_close or bool(self.inexact) or bool(self.failed)


@dataclass(frozen=True)
class Expected:
    """What one process does, in float64.

    Args:
        steps: `loss` and `grad_norm` of each step.
        weights: by name in `transformers`, adapters merged, after the last step.
    """

    steps: tuple[Mapping[str, float], ...]
    weights: Mapping[str, Tensor]


def cases_of(model: str, only: MeshCase | None = None) -> Iterator[FamilyCase]:
    """Every case of `check_family`, as `rl doctor model` shows it, or one.

    Args:
        model: a folder with a `config.json`, or a hub name.
        only: the one to check; `all_cases` if None.

    Raises:
        ConfigError: where transformers knows no such family, or no language model of it.
    """
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model} has no config that transformers can read: {str(error).splitlines()[0]}") from None
    if type(config.get_text_config()) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{model} is a {config.model_type} model, and transformers has no language model of that kind"
        )
    cases = all_cases() if only is None else [only]
    num_ranks = max(case.num_ranks for case in cases)
    with RankPool(num_ranks) as pool, tempfile.TemporaryDirectory() as workspace:
        for outcome in check_family(pool, config, Path(workspace), cases):
            yield _as_case(outcome)


def case_on(mesh: str, *, is_packed: bool, has_adapters: bool) -> MeshCase:
    """A case on one of `MESHES`."""
    num_ranks, settings = MESHES[mesh]
    return MeshCase(mesh, num_ranks, settings, is_packed, has_adapters)


def all_cases() -> list[MeshCase]:
    """Every mesh, packed and padded, and with adapters."""
    layouts = ((True, False), (False, False), (True, True))
    return [
        case_on(mesh, is_packed=is_packed, has_adapters=has_adapters)
        for mesh in MESHES
        for is_packed, has_adapters in layouts
    ]


def check_family(
    pool: RankPool, config: PreTrainedConfig, workspace: Path, cases: Sequence[MeshCase]
) -> Iterator[Outcome]:
    """Train a tiny model of the family in each way.

    Args:
        pool: of as many ranks as the largest mesh has.
        workspace: an empty folder.
    """
    folder = write_tiny(config, workspace / "tiny")
    kinds = {case.has_adapters for case in cases}
    expected: dict[bool, Expected | Exception] = {lora: _expect_or_why(folder, lora=lora) for lora in sorted(kinds)}
    for case in cases:
        wanted = expected[case.has_adapters]
        if isinstance(wanted, Exception):
            yield Outcome(case, refused=f"transformers cannot train it in one process, in float64: {wanted}")
            continue
        try:
            yield check_case(pool, folder, case, wanted)
        except (WorkerError, WorkerDied, TimeoutError) as error:
            refused = str(error).partition("ValueError: ")[2]
            yield Outcome(case, refused=refused, failed="" if refused else str(error))


def _expect_or_why(folder: Path, *, lora: bool) -> Expected | Exception:
    try:
        return expect(folder, lora=lora)
    except Exception as error:  # noqa: BLE001  # any kind, from code that is not ours
        return error


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """The family's config at a tiny size, without dropout, with one layer of each kind and two at least.

    Raises:
        ConfigError: where the family's own code refuses a config of such sizes.
    """
    text = config.get_text_config()
    fields = text.to_dict()
    called = {name: text.attribute_map.get(name, name) for name in ("num_hidden_layers", *SMALL)}
    small = {
        called[name]: value
        for name, value in SMALL.items()
        if called[name] in fields
        and (isinstance(fields[called[name]], int | float) or name in DERIVED or isinstance(value, list))
    }
    heads, kv_heads = called["num_attention_heads"], called["num_key_value_heads"]
    if kv_heads in small and fields[kv_heads] in (fields.get(heads), None):
        small[kv_heads] = SMALL["num_attention_heads"]
    if "qk_rope_head_dim" in small and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]
    small |= {name: 0.0 for name, value in fields.items() if _is_dropout(name) and isinstance(value, float)}
    small |= {name: _token(value, place) for place, (name, value) in enumerate(_tokens(fields))}
    small |= _shorter(fields, called["num_hidden_layers"])
    if "max_window_layers" in fields:
        small["max_window_layers"] = 1
    with _made_tiny(text.model_type):
        return type(text).from_dict({**fields, **small})


def _shorter(fields: Mapping[str, Any], num_layers: str) -> dict[str, Any]:
    """Number of layers, and what is said layer by layer, for one layer of each kind and two at least.

    Args:
        num_layers: name of that number.
    """
    count = fields.get(num_layers) or 0
    stated = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == count}
    sparse = {name: _by_layer(value) for name, value in fields.items() if _by_layer(value)}
    kinds = [
        (*(value[index] for value in stated.values()), *(value.get(index) for value in sparse.values()))
        for index in range(count)
    ]
    first = [index for index, kind in enumerate(kinds) if kinds.index(kind) == index][:LONGEST_PERIOD]
    kept = first if len(first) > 1 else [0, 0]
    return {
        num_layers: len(kept),
        **{name: [SMALL.get(name, value[index]) for index in kept] for name, value in stated.items()},
        **{
            name: {place: _smaller(value[index]) for place, index in enumerate(kept) if index in value}
            for name, value in sparse.items()
        },
    }


def _by_layer(value: Any) -> dict[int, Mapping[str, Any]]:
    """What a field says of some layers, by their numbers; nothing where it is another kind of field."""
    if not isinstance(value, dict) or not all(isinstance(said, dict) for said in value.values()):
        return {}
    return {int(key): said for key, said in value.items()} if all(str(key).isdigit() for key in value) else {}


def _smaller(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: SMALL.get(name, value) for name, value in said.items()}


def _is_dropout(name: str) -> bool:
    return name.endswith(("dropout", "pdrop", "dropout_prob", "dropout_rate", "layerdrop"))


def _tokens(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in sorted(fields.items()) if name.endswith("token_id") and value is not None]


def _token(value: Any, place: int) -> Any:
    """A special token of the tiny vocabulary."""
    return [place] if isinstance(value, list) else place


def write_tiny(config: PreTrainedConfig, folder: Path, seed: int = 0) -> Path:
    """A random model of the family at a tiny size, no parameter of it the same as another, as Hugging Face files."""
    small = shrink(config)
    with torch.random.fork_rng(devices=[]), _made_tiny(small.model_type):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.save_pretrained(folder)
    return folder


@contextmanager
def _made_tiny(kind: str) -> Iterator[None]:
    """Whatever a family's own code says to sizes it did not foresee, as an answer of the self-check."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # any kind, from code that is not ours
        raise ConfigError(
            f"a tiny {kind} model cannot be made, so this check cannot say: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from None


def expect(folder: Path, *, lora: bool) -> Expected:
    """Train in one process."""
    oracle = Oracle(folder)
    if lora:
        add_adapters(oracle.model, LORA)
        init_adapters(oracle.model, ModelSpec().seed)
        oracle.model.double()
    steps = tuple(oracle.train_step(make_batch(seed), TokenLoss(), SGD, 1.0) for seed in range(NUM_STEPS))
    for module in oracle.model.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    weights = {
        name.replace(BASE, ""): parameter.detach()
        for name, parameter in oracle.model.named_parameters()
        if ".lora_" not in name
    }
    return Expected(steps, weights)


def check_case(pool: RankPool, folder: Path, case: MeshCase, expected: Expected) -> Outcome:
    """Train on a mesh.

    Raises:
        WorkerError: where a rank fails, or refuses the mesh.
    """
    config = ModelConfig(
        model_name=str(folder),
        precision="float32",
        optimizer=SGD,
        lora_cfg=LORA if case.has_adapters else LoraConfig(),
        train_micro_batch_size=3,
        sequence_packing=SequencePackingConfig(enabled=case.is_packed, train_mb_tokens=16),
    )
    with PooledModel(pool, "rl_dtensor.selfcheck:build", config, ModelSpec(), case.num_ranks, **case.settings) as model:
        before = _streamed(model)
        steps = [model.train_step(make_batch(seed), TokenLoss()) for seed in range(NUM_STEPS)]
        after = _streamed(model)
    files = WeightFiles.of(folder)
    with files.open() as opened:
        source = {name: opened.read(name, ()) for name in files.file_of}
    inexact = [name for name in {*source, *before} if name not in source or not _same(before.get(name), source[name])]
    outcome = Outcome(case, inexact=tuple(sorted(inexact)))
    for found, wanted in zip(steps, expected.steps, strict=True):
        outcome = replace(
            outcome,
            loss=max(outcome.loss, _difference(found["loss"], wanted["loss"])),
            grad_norm=max(outcome.grad_norm, _difference(found["grad_norm"], wanted["grad_norm"])),
        )
    return replace(outcome, weights=_weight_difference(folder, after, expected.weights))


def build(config: ModelConfig, spec: ModelSpec, rendezvous: Rendezvous, **settings: Any) -> DTensorWorker:
    """A worker in a process of the pool."""
    return DTensorWorker(config, DTensorConfig(**settings), spec, rendezvous)


def make_batch(seed: int) -> Batch:
    """Random rows with the columns that `TokenLoss` needs."""
    rng = np.random.default_rng(seed)
    tokens = Ragged.from_rows([rng.integers(0, SMALL["vocab_size"], length) for length in LENGTHS], dtype=np.int32)
    mask = (rng.random(len(tokens.values)) < 0.7).astype(np.int8)
    weights = rng.normal(size=len(mask)).astype(np.float32)
    return Batch({"tokens": tokens, "loss_mask": tokens.like(mask), "weights": tokens.like(weights)})


def _as_case(outcome: Outcome) -> FamilyCase:
    mesh, layout = outcome.case.mesh, outcome.case.layout
    if outcome.refused:
        return FamilyCase(mesh, layout, "refused", reason=outcome.refused)
    if outcome.failed:
        return FamilyCase(mesh, layout, "off", reason=outcome.failed)
    differences = {"loss": outcome.loss, "grad_norm": outcome.grad_norm, "weights": outcome.weights}
    verdict: Verdict = "off" if outcome.is_off(TOLERANCE) else "exact"
    return FamilyCase(mesh, layout, verdict, differences, outcome.inexact)


def _streamed(model: PooledModel) -> dict[str, Tensor]:
    manifest = model.manifest(1)
    transport = Transport("collective", f"127.0.0.1:{free_port()}", 1, bucket_bytes=4096, timeout_s=60)
    received: list[dict[str, Tensor]] = []
    receiver = threading.Thread(target=lambda: received.append(receive(manifest, transport)[0]))
    receiver.start()
    model.send(manifest, transport)
    receiver.join(60)
    return received[0]


def _weight_difference(folder: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Over all weights, those of the files put together as `transformers` does."""
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    names = FileNames(hf)
    largest = 0.0
    for name, tensor in wanted.items():
        for piece in names.pieces(name, tuple(tensor.shape)):
            part = tensor[piece.region] if piece.region else tensor
            largest = max(largest, float((found[piece.name] - part).abs().max()))
    return largest


def _same(found: Tensor | None, wanted: Tensor) -> bool:
    return found is not None and found.dtype == wanted.dtype and torch.equal(found, wanted)


def _difference(found: float, wanted: float) -> float:
    return abs(found - wanted) / max(1.0, abs(wanted))
