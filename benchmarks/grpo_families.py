"""Five GRPO steps of `rl train` for the model families that people train: mismatch, weight sync and the checkpoint.

    python benchmarks/grpo_families.py [--only FAMILY ...] [--again] [--generators vllm hf]
    python benchmarks/grpo_families.py --table

Each family is a tiny random model, trained in float32 by rl-dtensor on two ranks, with packed rows. vLLM's CPU build
generates; if the run fails with it, transformers does (`hf`), and the table says why. The learning rate is so large
that logprobs move by far more than the mismatch may be: an engine that kept old weights would show.

Two checkpoints are then read by programs that know nothing of the run:

- the checkpoint of the step before the last, by plain transformers: it must compute the logprobs that the engine
  reported for the tokens of the last step. These weights sampled them, and the policy agreed (`mismatch/max`);
- the last one, by transformers and by a fresh engine of vLLM (if vLLM generated): both must compute the same logprobs.

Results are kept in `--folder` as they come. A family that has one is not run again; each part of a run that takes
longer than `--deadline` is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from families import engine
from measurement import read_metrics, rl_command, sums_data, surroundings, write_sums
from served_models import SYNC_SIZES, one_line, write_served

HERE = Path(__file__)
PAGE = HERE.parent / "results" / "grpo_families.md"
FAMILIES = (
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "kimi_linear",
    "gemma2",
    "gemma3_text",
    "llama4_text",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "granite",
    "minimax",
    "minimax_m2",
    "gemma3",
    "llama4",
    "mistral3",
    "qwen3_5",
)
"""Model types; Kimi K2 is one of `deepseek_v3`. The last ones are composite models, as the hub has them, whose language
model trains."""

CHUNK = 32
"""Tokens of a chunk of attention in the families that have some, and so of a block of keys and values in vLLM."""
CHUNKED = ("llama4_text", "llama4")
"""Those families, whose completions are longer than a chunk."""
IN_BLOCKS: dict[str, Any] = {"block_size": CHUNK}
"""`vllm_cfg.vllm_kwargs` of those families."""

OVERRIDES: dict[str, dict[str, Any]] = {"nemotron_h": {"time_step_min": 0.0}}
"""`policy.hf_config_overrides` of families that need some. The code of Nemotron-H in transformers keeps time steps
above that field in a pass over several tokens, and not in one over the next token; the model's own code and vLLM never
do."""

GENERATORS = ("vllm", "hf")
"""Generators in the order of the attempts."""

NUM_STEPS = 5
PROMPTS, GROUP, TOKENS = 4, 4, 12
LONGEST = 64
VOCABULARY = 128
RANKS = 2
LEARNING_RATE = 3e-3

MOST_OFF = 1e-3
"""Largest difference of logprobs in float32."""

LEAST_MOVED = 1e-2
"""Smallest change of logprobs by training for which the mismatch tests the weight sync."""

PAGE_HEAD = """\
# GRPO by model family

Five GRPO steps of `rl train` on a tiny random model of each family, in float32 on CPU; `benchmarks/grpo_families.py`
makes this page and says how. {surroundings}.

- *generator*: vLLM's CPU build, or transformers (`hf`) if the run fails with it.
- *mismatch/max*, *mismatch/kl*: the largest of the five steps. The first must be below {most_off:g}.
- *weight sync*: median seconds of `time/weight_sync`. Every sync is verified: digests, coverage, canary.
- *moved*: largest change of a logprob by the training, without which the mismatch would say nothing of the sync.
- *transformers*: the largest difference between the logprobs that the engine reported in the last step and those that
  plain transformers computes with the checkpoint of the step before it.
- *vLLM*: the largest difference between the logprobs of plain transformers and of a fresh engine, both with the last
  checkpoint; left out with `hf`.

{passed} of {total} families have all of it{hf}.

| family | generator | steps | mismatch/max | mismatch/kl | weight sync, s | moved | transformers | vLLM |
|---|---|--:|--:|--:|--:|--:|--:|--:|
"""


@dataclass(frozen=True)
class Result:
    """Outcome for one family.

    Args:
        generator: Generator that the run succeeded with; empty if there is none.
        refused: Reason for which the run failed, by generator.
        metrics: `mismatch/max`, `mismatch/kl` and `time/weight_sync` of each step.
        checks: Number of each check of a checkpoint by name, or the reason for which there is none.
    """

    generator: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, float]] = ()
    checks: Mapping[str, float | str] = field(default_factory=dict)

    def largest(self, metric: str) -> float:
        """Return largest value over the steps."""
        return max(step[metric] for step in self.metrics)

    @property
    def passes(self) -> bool:
        """True if every figure is as it must be."""
        if not self.metrics or len(self.metrics) < NUM_STEPS:
            return False
        found = [self.checks.get(name) for name in ("transformers", *(["vllm"] if self.generator == "vllm" else []))]
        differences = [self.largest("mismatch/max"), *found]
        moved = self.checks.get("moved")
        return (
            all(isinstance(each, float) and each < MOST_OFF for each in differences)
            and isinstance(moved, float)
            and moved > LEAST_MOVED
        )


class Results:
    """Outcomes by family, in a file.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.surroundings = ""
        self.families: dict[str, Result] = {}
        self._read()

    def _read(self) -> None:
        held = json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else {}
        self.surroundings = held.get("surroundings", "")
        self.families = {family: Result(**fields) for family, fields in held.get("families", {}).items()}

    def put(self, family: str, result: Result) -> None:
        """Save an outcome at once, and keep the outcomes that other processes have saved."""
        self._read()
        self.families[family] = result
        self.surroundings = f"{surroundings('torch', 'transformers')}, {engine()}"
        held = {
            "surroundings": self.surroundings,
            "families": {name: asdict(each) for name, each in self.families.items()},
        }
        aside = self._path.with_suffix(".part")
        aside.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
        aside.rename(self._path)


def main() -> None:
    """Run the requested families that have no result yet, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", default=list(FAMILIES), help="model types")
    parser.add_argument("--generators", nargs="+", choices=GENERATORS, default=list(GENERATORS), help="those to try")
    parser.add_argument("--deadline", type=float, default=600.0, metavar="S", help="seconds of a part of a run")
    parser.add_argument("--folder", type=Path, default=Path("runs/grpo_families"), help="of the runs (%(default)s)")
    parser.add_argument("--again", action="store_true", help="run families that have a result, too")
    parser.add_argument("--table", action="store_true", help="write the page of the results, and run nothing")
    parser.add_argument("--quick", action="store_true", help="see that it runs: one family, with transformers")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        name, *arguments = options.work
        PARTS[name](*arguments)
        return
    folder = options.folder.absolute()
    if options.quick:
        folder, options.only, options.generators, options.again = folder / "quick", ["olmo2"], ["hf"], True
    folder.mkdir(parents=True, exist_ok=True)
    results = Results(folder / "results.json")
    if options.table:
        PAGE.write_text(page(results), encoding="utf-8")
        return
    for family in options.only:
        if options.again or family not in results.families:
            results.put(family, outcome(family, folder / family, options.generators, options.deadline))
            print(line_of(family, results.families[family], {}), flush=True)


def outcome(family: str, folder: Path, generators: Sequence[str], deadline_s: float) -> Result:
    """Train with the first generator that can, then check the checkpoints."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    model = folder / "model"
    try:
        part("make", family, str(model), log=folder / "make.log", deadline_s=deadline_s)
    except PartFailed as failure:
        return Result(refused={"model": str(failure)})
    write_sums(folder / "prompts.jsonl", PROMPTS * NUM_STEPS)
    refused: dict[str, str] = {}
    for generator in generators:
        recipe, run = folder / f"{generator}.yaml", folder / generator
        config = recipe_of(family, folder, generator)
        recipe.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        try:
            command = rl_command("train", str(recipe), f"run_dir={run}", "--fresh")
            run_part(command, folder / f"{generator}.log", deadline_s)
        except PartFailed as failure:
            refused[generator] = str(failure)
            continue
        names = ("mismatch/max", "mismatch/kl", "time/weight_sync")
        metrics = [{name: line[name] for name in names} for line in read_metrics(run) if line["step"] > 0]
        return Result(generator, refused, metrics, checks_of(folder, run, generator, deadline_s))
    return Result(refused=refused)


def checks_of(folder: Path, run: Path, generator: str, deadline_s: float) -> dict[str, float | str]:
    """Read the checkpoints with plain programs: a number for each check, or a reason."""
    answer = folder / "checks.json"
    failed: dict[str, float | str] = {}
    try:
        arguments = ("check", str(folder / "model"), str(run), generator, str(answer))
        part(*arguments, log=folder / "checks.log", deadline_s=deadline_s)
    except PartFailed as failure:
        failed = {"vllm" if answer.is_file() else "transformers": str(failure)}
    return {**failed, **(json.loads(answer.read_text(encoding="utf-8")) if answer.is_file() else {})}


class PartFailed(Exception):
    """A part of a run ended with an error, or not in time; the message is the reason."""


def part(name: str, *arguments: str, log: Path, deadline_s: float) -> None:
    """Run a part of this script in a process of its own."""
    run_part([sys.executable, str(HERE), "--work", name, *arguments], log, deadline_s)


def run_part(command: Sequence[str], log: Path, deadline_s: float) -> None:
    """Run a command with its output in a file.

    Raises:
        PartFailed: with the end of that output.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise PartFailed(f"no end within {deadline_s:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        said = reason_in(log.read_text(encoding="utf-8", errors="replace"))
        raise PartFailed(said.replace(f"{log.parent}/", "") or f"exit code {code}")


def reason_in(output: str) -> str:
    """Return the message with which a program ended: what follows `error:`, or its last line."""
    _, is_said, message = output.rpartition("\nerror: ")
    lines = [line for line in output.splitlines() if line.strip()]
    return one_line(message.partition("\ntraceback: ")[0] if is_said else "".join(lines[-1:]))


def recipe_of(family: str, folder: Path, generator: str) -> dict[str, Any]:
    """Return the config of a run with the model in a folder."""
    engines = {
        "vllm": {
            "vllm_cfg": {
                "kv_cache_gib": 0.25,
                "max_num_seqs": 32,
                "vllm_kwargs": IN_BLOCKS if family in CHUNKED else {},
            }
        },
        "hf": {"hf_cfg": {"attn_implementation": "eager"}},
    }
    return {
        "algorithm": "grpo",
        "policy": {
            "model_name": str(folder / "model"),
            "hf_config_overrides": OVERRIDES.get(family, {}),
            "precision": "float32",
            "train_global_batch_size": PROMPTS * GROUP,
            "max_total_sequence_length": LONGEST,
            "sequence_packing": {"enabled": True, "train_mb_tokens": 2 * LONGEST, "logprob_mb_tokens": 2 * LONGEST},
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
            "generation": {
                "backend": generator,
                "max_new_tokens": TOKENS if family not in CHUNKED else CHUNK + TOKENS,
                **engines[generator],
            },
        },
        "grpo": {
            "num_prompts_per_step": PROMPTS,
            "num_generations_per_prompt": GROUP,
            "max_num_steps": NUM_STEPS,
            "rollout_program": f"{HERE.with_name('recorded_tokens.py')}:RecordedTokens",
        },
        "loss_fn": {"kl": {"weight": 0.0}},
        "data": sums_data(folder / "prompts.jsonl", f"{HERE.with_name('recorded_tokens.py')}:score"),
        "checkpointing": {"save_period": NUM_STEPS - 1, "keep_top_k": None},
        "cluster": {"device": "cpu", "cpu_ranks_per_node": RANKS},
        "logger": {"tensorboard_enabled": False},
    }


def make(family: str, folder: str) -> None:
    """Write a tiny random model of the family, with a tokenizer of single characters; of a composite one its language
    model, too."""
    from transformers import AutoConfig

    from rl_algos.tiny_model import CHARACTERS, make_tokenizer
    from rl_core.selfcheck.torch.tiny_model import write_composite

    least = len(make_tokenizer())
    more = "".join(chr(ord("α") + place) for place in range(VOCABULARY - least))
    tokenizer = make_tokenizer(CHARACTERS + more, model_max_length=LONGEST)
    assert len(tokenizer) == VOCABULARY
    sizes = {
        **SYNC_SIZES,
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "attention_chunk_size": CHUNK,
    }
    config, place = AutoConfig.for_model(family), Path(folder)
    if config.get_text_config() is config:
        write_served(config, place, seed=1, sizes=sizes)
    else:
        write_composite(place, family, write_served(config, language_of(place), seed=1, sizes=sizes))
    tokenizer.save_pretrained(folder)


def language_of(model: Path) -> Path:
    """Return the folder of the language model of a composite one."""
    return model.with_name("language")


def check(model: str, run: str, generator: str, answer: str) -> None:
    """Compare plain transformers with the engine that generated, and with a fresh engine of vLLM."""
    import numpy as np

    rows = recorded(Path(run), NUM_STEPS)
    tokens = [np.array(row["tokens"], dtype=np.int32) for row in rows]
    masks = [np.array(row["loss_mask"], dtype=bool) for row in rows]
    reported = [np.array(row["logprobs"]) for row in rows]
    before, last = scores(exported(run, NUM_STEPS - 1), tokens), scores(exported(run, NUM_STEPS), tokens)
    language = language_of(Path(model))
    first = scores(language if language.is_dir() else Path(model), tokens)
    found = {"transformers": largest(before, reported, masks), "moved": largest(last, first, masks)}
    Path(answer).write_text(json.dumps(found), encoding="utf-8")
    if generator == "vllm":
        # last: vLLM changes the class of a model that it serves through transformers
        found["vllm"] = largest(served_scores(exported(run, NUM_STEPS), tokens), last, masks)
        Path(answer).write_text(json.dumps(found), encoding="utf-8")


def served_scores(folder: Path, rows: Sequence[Any]) -> list[Any]:
    """Return float32 `[tokens]` of each row: logprobs by vLLM with the weights in a folder."""
    import asyncio

    from rl_core.model_config import GenerationConfig, ModelConfig
    from rl_core.rollouts.generation import Placement
    from rl_vllm import VllmConfig, VllmGenerator

    served = ModelConfig(model_name=str(folder), precision="float32", max_total_sequence_length=LONGEST)
    is_chunked = "attention_chunk_size" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = VllmConfig(kv_cache_gib=0.25, vllm_kwargs=IN_BLOCKS if is_chunked else {})
    generator = VllmGenerator(GenerationConfig(), config, served, Placement("cpu"))

    async def score() -> list[Any]:
        await generator.start()
        try:
            return [await generator.score(row) for row in rows]
        finally:
            await generator.close()

    return asyncio.run(score())


PARTS = {"make": make, "check": check}


def recorded(run: Path, step: int) -> list[dict[str, Any]]:
    """Return the tokens, loss mask and logprobs of each rollout of a step."""
    path = run / "rollouts" / f"step_{step}.jsonl"
    return [json.loads(line)["info"] for line in path.read_text(encoding="utf-8").splitlines()]


def exported(run: str, step: int) -> Path:
    """Return the Hugging Face files of a checkpoint."""
    return Path(run, "checkpoints", f"step_{step}", "hf")


def scores(folder: Path, rows: Sequence[Any]) -> list[Any]:
    """Return float64 `[tokens]` of each row: logprobs by plain transformers in float32, whose files must have all
    weights."""
    import torch
    from transformers import AutoModelForCausalLM

    # sdpa leaves out the softcap of Gemma 2
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {what: sorted(names) for what, names in loading.items() if names}
    assert not wrong, f"transformers does not load {folder.name} whole: {wrong}"
    model.eval()
    found = []
    with torch.no_grad():
        for row in rows:
            tokens = torch.as_tensor(row).long()
            logprobs = model(tokens[None, :-1]).logits[0].double().log_softmax(-1)
            following = logprobs.gather(1, tokens[1:, None])[:, 0]
            found.append(torch.cat([following.new_zeros(1), following]).numpy())
    return found


def largest(found: Sequence[Any], expected: Sequence[Any], masks: Sequence[Any]) -> float:
    """Return largest absolute difference where the masks say; not a number if one is not."""
    import numpy as np

    pairs = zip(found, expected, masks, strict=True)
    return float(np.max([np.abs(one - other)[mask].max() for one, other, mask in pairs]))


def page(results: Results) -> str:
    """Return the results as a page of the docs."""
    reasons: dict[str, int] = {}
    order = sorted(results.families, key=lambda family: (*FAMILIES, family).index(family))
    rows = [line_of(family, results.families[family], reasons) for family in order]
    passed = {family: each for family, each in results.families.items() if each.passes}
    with_hf = [family for family, each in passed.items() if each.generator == "hf"]
    head = PAGE_HEAD.format(
        surroundings=results.surroundings,
        most_off=MOST_OFF,
        passed=len(passed),
        total=len(results.families),
        hf=f", {len(with_hf)} of them with `hf`, and without vLLM" if with_hf else "",
    )
    listed = "".join(f"{number}. {reason}\n" for reason, number in reasons.items())
    return head + "\n".join(rows) + "\n" + (f"\n## Reasons\n\n{listed}" if listed else "")


def line_of(family: str, result: Result, reasons: dict[str, int]) -> str:
    """Return a row of the table."""

    def cell(found: float | str | None) -> str:
        if found is None:
            return ""
        if isinstance(found, float):
            return f"{found:.1e}" if found < 1 else f"{found:.2g}"
        reason = found.replace("|", "\\|").replace("<", "&lt;")
        return f"no ({reasons.setdefault(reason, len(reasons) + 1)})"

    failed = [f"{name}: {cell(reason)}" for name, reason in result.refused.items()]
    cells = [f"`{family}`", "; ".join([*([result.generator] if result.generator else []), *failed])]
    if result.metrics:
        sync = median(step["time/weight_sync"] for step in result.metrics)
        cells += [str(len(result.metrics)), cell(result.largest("mismatch/max")), cell(result.largest("mismatch/kl"))]
        cells += [f"{sync:.2f}", *(cell(result.checks.get(name)) for name in ("moved", "transformers", "vllm"))]
    else:
        cells += [""] * 7
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
