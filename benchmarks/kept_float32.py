"""Do trainer, export and engine agree on models whose files hold float32 tensors next to bfloat16 ones?

    python benchmarks/kept_float32.py [--only FAMILY ...] [--page FILE]

For each family a tiny random model is written in bfloat16, with the tensors in float32 that its family keeps so or that
models on the hub have so. Biases that correct the load of experts are near 7, as in trained models, where bfloat16 has
steps of 1/32. rl-dtensor then serves the model in float32 and in bfloat16 and exports it, transformers loads the
export, and an engine that starts without weights receives them: vLLM's CPU build, or transformers (`hf`) if vLLM does
not serve the family. Each family runs in processes of its own, one after another.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import engine
from served_models import CORRECTION, SYNC_SIZES, config_of, one_line, write_served
from torch.overrides import TorchFunctionMode

from rl_core.facts.hf_config import num_experts_of

PAGE_PATH = Path(__file__).parent / "results" / "kept_float32.md"

FAMILIES = (
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "dots1",
    "exaone_moe",
    "hy_v3",
    "mimo_v2_flash",
    "solar_open",
    "minimax_m2",
    "afmoe",
    "olmo_hybrid",
    "nemotron_h",
    "qwen3_next",
    "bamba",
)

ON_THE_HUB = (
    r"A_log$",
    r"\.D$",
    r"dt_bias$",
    r"e_score_correction_bias$",
    r"expert_bias$",
    r"sparse_moe\.gate\.weight$",
)
"""Names of tensors that models on the hub have in float32, whether their family keeps them or not."""

CHOSEN = {"ernie4_5_moe": "moe_k", "hunyuan_v1_moe": "moe_topk"}
"""Families whose config has its own name for the number of experts of a token."""

PROMPTS = (3, 17, 40, 64)
LONGEST = 128
TOLERANCE = 1e-5
ENGINES = ("vllm", "hf")
PRECISIONS = ("float32", "bfloat16")

PAGE = """\
# Tensors that stay float32

Tiny random models in bfloat16 with some float32 tensors, on CPU; `benchmarks/kept_float32.py` makes this page and says
how. torch {torch}, transformers {transformers}, {engine}.

- *float32 tensors*: the kinds that the files hold in float32. They are sent and exported in float32, bit for bit, in
  both precisions.
- *by*: the engine. *export*, *engine*: the largest difference of logprobs, in float32, between the trainer and
  transformers with the export, and between the trainer and the engine. At most {tolerance:g} counts as agreement.
- *bf16 export*, *bf16 engine*: the same in bfloat16.
- *choices*: choices of experts by transformers with the export, in bfloat16. *trainer*, *engine*: how many of them
  differ. The engine has kernels of its own, whose rounding decides near ties otherwise. *rounded*: how many differ in
  transformers if the float32 tensors are rounded to bfloat16.

{count} of {total} families agree.

| family | float32 tensors | by | export | engine | bf16 export | bf16 engine | choices | trainer | engine | rounded |
|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|
"""


@dataclass(frozen=True)
class Trained:
    """What rl-dtensor makes of a model.

    Args:
        logprobs: Of all rows, end to end.
        routing: Experts by row, `[tokens, layers, k]`; empty if there are none.
    """

    logprobs: np.ndarray
    routing: Sequence[np.ndarray]


def write_model(family: str, folder: Path) -> list[str]:
    """Write a model; returns the names of its float32 tensors in the files."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from rl_core.testing.torch.reference_model import write_reference_model
    from rl_dtensor.model.precision import kept_by_family
    from rl_dtensor.model.weights import Catalog

    place = write_reference_model(folder, seed=1)  # for its tokenizer
    write_served(config_of(family), place, seed=1, sizes={**SYNC_SIZES, "initializer_range": 0.04})
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    kept = kept_by_family(hf, torch.bfloat16)
    pieces = {piece.name for each in Catalog.of(hf, lambda _: 0).entries if each.name in kept for piece in each.pieces}
    path, wide = folder / "model.safetensors", []
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(CORRECTION):
            tensor.mul_(0.05).add_(7)
        if name in pieces or any(re.search(pattern, name) for pattern in ON_THE_HUB):
            wide.append(name)
        else:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, path, {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**fields, "dtype": "bfloat16"}, indent=2), encoding="utf-8")
    return wide


def rows(lengths: Sequence[int] = PROMPTS) -> list[np.ndarray]:
    """Return rows of random tokens, one of each length."""
    return [np.random.default_rng(length).integers(3, 300, length).astype(np.int32) for length in lengths]


def train(
    folder: Path, precision: Any, exported: Path, *, lengths: Sequence[int] = PROMPTS, longest: int = LONGEST
) -> Trained:
    """Return the logprobs and routing of the trainer, which also exports.

    Args:
        lengths: Number of tokens of each row.
        longest: Maximum number of tokens of a row in the run.

    Raises:
        AssertionError: If it sends or exports anything other than the contents of the files.
    """
    import torch
    from safetensors.torch import load_file

    from rl_core.data.batch import Batch
    from rl_core.data.ragged import Ragged
    from rl_core.model import LOGPROBS, ModelSpec, Rendezvous
    from rl_core.model_config import ModelConfig, SequencePackingConfig
    from rl_core.selfcheck.rank_pool import free_port
    from rl_dtensor.config import DTensorConfig
    from rl_dtensor.worker import DTensorWorker

    def build(*, packs: bool) -> DTensorWorker:
        packing = SequencePackingConfig(enabled=packs)
        config = ModelConfig(
            model_name=str(folder), precision=precision, sequence_packing=packing, max_total_sequence_length=longest
        )
        return DTensorWorker(config, DTensorConfig(), ModelSpec(), Rendezvous(0, 1, 0, "127.0.0.1", free_port(), "cpu"))

    try:
        worker = build(packs=True)
    except ValueError:  # rows of this family cannot be packed
        worker = build(packs=False)
    try:
        choices = Choices(worker._model.hf_config)
        logprobs, routing = [], []
        for row in rows(lengths):
            with choices:
                read = worker.infer(Batch({"tokens": Ragged.from_rows([row], np.int32)}), [LOGPROBS])
            assert read is not None
            logprobs.append(read.ragged("logprobs").values)
            routing += [each[: len(row)] for each in choices.take()]
        sent = dict(named for tensors in worker._weights.stream(precision) for named in tensors)
        specs = {spec.name: spec.dtype for spec in worker._weights.specs(precision)}
        worker.export(str(exported))
    finally:
        worker.close()
    source, saved = load_file(folder / "model.safetensors"), load_file(exported / "model.safetensors")
    for name, tensor in source.items():
        for found in (sent[name], saved[name]):
            dtype = tensor.dtype if precision == "bfloat16" else torch.float32
            assert found.dtype == dtype, f"{name} leaves as {found.dtype}"
            assert found.equal(tensor.to(dtype)), f"{name} leaves with other values"
        assert specs[name] == str(sent[name].dtype).removeprefix("torch."), name
    return Trained(np.concatenate(logprobs), routing)


class Choices(TorchFunctionMode):
    """Records the experts that a model chooses in the forward passes within its context.

    Args:
        config: The model's.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        fields = config.to_dict()
        self._sizes = num_experts_of(fields), fields.get(CHOSEN.get(config.model_type, "num_experts_per_tok"))
        self._layers: list[np.ndarray] = []

    def take(self) -> list[np.ndarray]:
        """Return int64 `[tokens, layers with experts, k]` of the last pass; empty for a model without experts."""
        layers, self._layers = self._layers, []
        return [np.stack(layers, 1)] if layers else []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            scores = args[0] if args else kwargs["input"]
            # within groups of experts there is one more dim
            if scores.dim() == 2 and (scores.shape[-1], found.indices.shape[-1]) == self._sizes:
                self._layers.append(found.indices.numpy().copy())
        return found


def loaded(folder: Path, precision: str, *, rounds: bool = False) -> Trained:
    """Return the model that transformers loads from a folder.

    Args:
        rounds: True if tensors that it keeps in float32 are rounded.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from rl_core.model_config import ModelConfig
    from rl_dtensor.generation.loading import hf_config, load_model

    config = ModelConfig(model_name=str(folder), precision=precision)  # type: ignore[arg-type]
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config(config))]
    hf = load_model(config, "sdpa" if kind._supports_sdpa else "eager", torch.device("cpu"))
    if rounds:
        for tensor in hf.state_dict().values():
            tensor.copy_(tensor.bfloat16())
    choices = Choices(hf.config)
    logprobs, routing = [], []
    for row in rows():
        tokens = torch.from_numpy(row).long()
        with torch.no_grad(), choices:
            logits = hf(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
        logprobs.append(np.concatenate([[0.0], logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()]))
        routing += choices.take()
    return Trained(np.concatenate(logprobs), routing)


def routed_by_vllm() -> list[np.ndarray]:
    """Return a list; vLLM's router in this process adds the experts of each layer and pass to it, `[tokens, k]`."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    chosen: list[np.ndarray] = []
    compute = CPURouter._compute_routing

    def recorded(*args: Any, **kwargs: Any) -> Any:
        weights, ids = compute(*args, **kwargs)
        chosen.append(ids.numpy().copy())
        return weights, ids

    CPURouter._compute_routing = recorded
    return chosen


def served(
    name: str, folder: Path, precision: Any, lengths: Sequence[int] = PROMPTS, longest: int = LONGEST
) -> Trained:
    """Return the logprobs and routing of an engine that starts without weights and receives those of a folder.

    Args:
        lengths: Number of tokens of each row.
        longest: Maximum number of tokens of a row in the run.
    """
    from rl_core.model_config import GenerationConfig, ModelConfig
    from rl_core.rollouts.generation import Placement
    from rl_core.testing.torch.weight_sender import SenderProcess
    from rl_core.testing.weights import Bench
    from rl_dtensor.generation.generator import HFGenerator
    from rl_dtensor.generation.plugin import HFConfig

    model = ModelConfig(model_name=str(folder), precision=precision, max_total_sequence_length=longest)
    placement = Placement("cpu", awaits_weights=True)
    generator: Any
    if name == "hf":
        generator = HFGenerator(GenerationConfig(), HFConfig(attn_implementation="eager"), model, placement)
    else:
        from rl_vllm import VllmConfig, VllmGenerator

        generator = VllmGenerator(GenerationConfig(), VllmConfig(kv_cache_gib=0.25), model, placement)
    sender = SenderProcess()
    try:
        bench = Bench(generator, folder, folder, sender)
        try:
            bench.runner.run(bench.sync(folder))
            chosen = routed_by_vllm() if name == "vllm" else []
            logprobs, routing = [], []
            for row in rows(lengths):
                chosen.clear()
                logprobs.append(bench.runner.run(generator.score(row)))
                layers = [ids[: len(row)] for ids in chosen if len(ids) >= len(row)]
                routing += [np.stack(layers, 1)] if layers else []
            return Trained(np.concatenate(logprobs), routing)
        finally:
            bench.runner.run(generator.close())
    finally:
        sender.close()


def num_different(found: Trained, wanted: Trained) -> int:
    """Return the number of choices of experts, for a token in a layer, that differ."""
    pairs = list(zip(found.routing, wanted.routing, strict=True))
    assert all(one.shape == other.shape for one, other in pairs), "not the same layers"
    return sum(int((np.sort(one, -1) != np.sort(other, -1)).any(-1).sum()) for one, other in pairs)


def off(found: Trained, wanted: Trained) -> float:
    """Return the largest difference of logprobs."""
    return float(np.abs(found.logprobs - wanted.logprobs).max())


def check(family: str, served_by: str) -> dict[str, Any]:
    """Return all results of a family with an engine for the page; routing is from the last of the precisions."""
    with tempfile.TemporaryDirectory() as workspace:
        folder = Path(workspace, "model")
        wide = write_model(family, folder)
        kinds = sorted({re.sub(r".*?layers\.\d+\.", "", name) for name in wide})
        found: dict[str, Any] = {"family": family, "engine": served_by, "kinds": kinds}
        models = {}
        for precision in PRECISIONS:
            exported = Path(workspace, precision)
            models[precision] = trained = train(folder, precision, exported)
            reference = loaded(exported, precision)
            found[precision] = {"export": off(trained, reference)}
        rounded = loaded(exported, precision, rounds=True)
        for precision in PRECISIONS:
            # vLLM changes the class of a model that it serves through transformers, so each engine has its own process
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                engine_found = process.submit(served, served_by, Path(workspace, precision), precision).result()
            found[precision]["engine"] = off(models[precision], engine_found)
        if trained.routing:
            found["choices"] = sum(each[..., 0].size for each in reference.routing)
            found["different"] = {
                "trainer": num_different(trained, reference),
                **({"engine": num_different(engine_found, reference)} if engine_found.routing else {}),
                "rounded": num_different(rounded, reference),
            }
        return found


def run(family: str) -> dict[str, Any]:
    """Run the check in its own process, with the first engine that serves the family."""
    problems = []
    for served_by in ENGINES:
        found = answer_of(__file__, family, served_by)
        if not isinstance(found, str):
            return {**found, "problems": problems}
        problems.append(f"{served_by}: {found}")
    return {"family": family, "problems": problems}


def answer_of(script: str, *work: str) -> dict[str, Any] | str:
    """Return the answer of a script's `--work` in its own process, or the end of its messages if it has none."""
    done = subprocess.run([sys.executable, script, "--work", *work], capture_output=True, text=True, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("answer ")]
    return dict(json.loads(answers[-1].removeprefix("answer "))) if answers else one_line(done.stderr, 300)


def page(results: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]]) -> str:
    """Return the page of results."""
    agreeing = [each for each in results if max(each["float32"].values()) <= TOLERANCE]
    head = PAGE.format(
        torch=version("torch").partition("+")[0],
        transformers=version("transformers"),
        engine=engine(),
        tolerance=TOLERANCE,
        count=len(agreeing),
        total=len(results) + len(failed),
    )
    lines = []
    for each in results:
        different = each.get("different", {})
        cells = (
            f"`{each['family']}`",
            ", ".join(f"`{kind}`" for kind in each["kinds"]),
            each["engine"],
            *(f"{each['float32'][name]:.1e}" for name in ("export", "engine")),
            *(f"{each['bfloat16'][name]:.1e}" for name in ("export", "engine")),
            str(each.get("choices", "")),
            *(str(different.get(name, "")) for name in ("trainer", "engine", "rounded")),
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        f"| `{each['family']}` | not checked: {one_line(each['problems'][-1], 150)} {'| ' * 9}|" for each in failed
    ]
    return head + "\n".join(lines) + "\n"


def main() -> None:
    """Check the families that are asked for and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--page", type=Path, default=PAGE_PATH)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print("answer " + json.dumps(check(*options.work)), flush=True)
        return
    found = []
    for family in options.only:
        found.append(run(family))
        print(json.dumps(found[-1]), flush=True)
    results = [each for each in found if "float32" in each]
    options.page.write_text(page(results, [each for each in found if "float32" not in each]), encoding="utf-8")


if __name__ == "__main__":
    main()
