"""Do trainer, export and engine agree on models with unusual rotary embeddings?

    python benchmarks/rope_types.py [--only CASE ...] [--page FILE]

For each case a tiny random model is written in float32, with rotary embeddings of one type and rows that reach beyond
the length that their frequencies are scaled from. rl-dtensor serves the model and exports it, plain transformers loads
the export, and an engine that starts without weights receives them: vLLM's CPU build. Each case runs in its own
processes, one after another.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from families import engine
from kept_float32 import TOLERANCE, Trained, answer_of, off, rows, served, train
from served_models import STATED, SYNC_SIZES, one_line, write_served

PAGE_PATH = Path(__file__).parent / "results" / "rope_types.md"

ORIGINAL, POSITIONS = 32, 128
"""Length that frequencies are scaled from, and number of positions of the model."""
LONG = (3, 17, 40, 64, 120)

PAGE = """\
# Types of rotary embeddings

Tiny random models in float32 on CPU, with rotary embeddings scaled from {original} positions to {positions} unless the
case says otherwise. `python benchmarks/rope_types.py` makes this page. torch {torch}, transformers {transformers},
{engine}.

- *rows*: number of tokens of the longest row that is scored. *limit*: `max_total_sequence_length` of the run.
- *export*: largest difference of logprobs between the trainer and plain transformers, which loads the export and reads
  all rows as one padded batch.
- *engine*: largest difference of logprobs between the trainer and vLLM.
- *unscaled*: largest difference between transformers with these rotary embeddings and with `rope_type` default at the
  same base: the error of a side that ignored them. For `gemma3 bases` it has one base for all layers, for the dynamic
  and partial cases base 100, since nothing is scaled there.

At most {tolerance:g} counts as agreement; {count} of {total} cases agree.

| case | family | `rope_type` | rows | limit | export | engine | unscaled |
|---|---|---|--:|--:|--:|--:|--:|
"""


@dataclass(frozen=True)
class Case:
    """A type of rotary embeddings in a model of one family.

    Args:
        family: `model_type` of the model.
        rope: `rope_parameters` of its config.
        unscaled: `rope_parameters` of the model to compare with, over the default type at the same base.
        lengths: Number of tokens of each row.
        longest: Maximum number of tokens of a row in the run.
        fields: Further fields of the config.
        sizes: Sizes that differ from other benchmarks.
    """

    family: str
    rope: Mapping[str, Any]
    unscaled: Mapping[str, Any] = field(default_factory=dict)
    lengths: Sequence[int] = LONG
    longest: int = POSITIONS - 1
    fields: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def without_scaling(self) -> dict[str, Any]:
        """Return the `rope_parameters` of the model to compare with."""
        by_layer = {name: _default(each) for name, each in self.rope.items() if isinstance(each, Mapping)}
        return {**(by_layer or _default(self.rope)), **self.unscaled}

    @property
    def types(self) -> list[str]:
        """Return the types that are not the default one."""
        layers = [each for each in self.rope.values() if isinstance(each, Mapping)] or [self.rope]
        found = {f"{each['rope_type']}{_part(each)}" for each in layers}
        return sorted(found - {"default"}) or ["default"]


def _default(rope: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return {"rope_type": "default", **kept}


def _part(rope: Mapping[str, Any]) -> str:
    share = rope.get("partial_rotary_factor", 1.0)
    return "" if share == 1.0 else f" ({share:g} of a head)"


THETA = {"rope_theta": 10_000.0}
SCALED = {**THETA, "factor": POSITIONS / ORIGINAL, "original_max_position_embeddings": ORIGINAL}
YARN = {**SCALED, "rope_type": "yarn"}
LLAMA3 = {**SCALED, "rope_type": "llama3", "rope_theta": 500_000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {**THETA, "rope_type": "linear", "factor": 4.0}
DYNAMIC = {**THETA, "rope_type": "dynamic", "factor": 4.0}
LATENT = {"partial_rotary_factor": 1.0}
SLIDING = {**THETA, "rope_type": "default"}


def _longrope(num_frequencies: int, original: int, **others: Any) -> dict[str, Any]:
    """Return parameters of LongRoPE with other factors for each frequency, short ones too."""
    return {
        **THETA,
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * index for index in range(num_frequencies)],
        "long_factor": [2.0 + 0.5 * index for index in range(num_frequencies)],
        "original_max_position_embeddings": original,
        **others,
    }


def _phi3(original: int, **others: Any) -> dict[str, Any]:
    """Return what cases of Phi-3 share; its head has 16 frequencies."""
    sizes = {"original_max_position_embeddings": original}
    return {"family": "phi3", "rope": _longrope(16, original, **others), "sizes": sizes}


def _partial(family: str, share: float, **fields: Any) -> Case:
    """Return a case that rotates a part of each head; *unscaled* rotates with another base."""
    rope = {**THETA, "rope_type": "default", "partial_rotary_factor": share}
    return Case(family, rope, {"rope_theta": 100.0}, fields={"partial_rotary_factor": share, **fields})


CASES: Mapping[str, Case] = {
    "longrope short": Case(**_phi3(64), lengths=(3, 17, 40, 63), longest=63),
    "longrope long": Case(**_phi3(ORIGINAL)),
    "yarn qwen2": Case("qwen2", YARN),
    "yarn qwen3": Case("qwen3", YARN),
    "yarn qwen3 attention_factor": Case("qwen3", {**YARN, "attention_factor": 0.8}),
    "yarn deepseek_v3 mscale": Case("deepseek_v3", {**YARN, **LATENT, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "yarn deepseek_v2 mscale": Case("deepseek_v2", {**YARN, **LATENT, "mscale": 0.707, "mscale_all_dim": 0.5}),
    "yarn gpt_oss": Case("gpt_oss", {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}),
    "yarn olmo3": Case("olmo3", {"full_attention": YARN, "sliding_attention": SLIDING}),
    "llama3": Case("llama", LLAMA3),
    "linear": Case("llama", LINEAR),
    "dynamic": Case("llama", DYNAMIC, {"rope_theta": 100.0}, lengths=(*LONG, POSITIONS - 1)),
    "partial glm": _partial("glm", 0.5),
    "partial glm4_moe": _partial("glm4_moe", 0.5),
    "partial phi": _partial("phi", 0.5),
    "partial stablelm": _partial("stablelm", 0.25),
    "partial gpt_neox": _partial("gpt_neox", 0.25),
    "gemma3 bases": Case(
        "gemma3_text",
        {"full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0}, "sliding_attention": SLIDING},
        {"full_attention": SLIDING},
    ),
    "gemma3 linear": Case(
        "gemma3_text",
        {"full_attention": {**LINEAR, "rope_theta": 1_000_000.0, "factor": 8.0}, "sliding_attention": SLIDING},
    ),
}


def write_model(case: Case, folder: Path, rope: Mapping[str, Any]) -> None:
    """Write a model of a case; other rotary embeddings leave its weights the same."""
    from transformers import AutoConfig

    from rl_core.testing.torch.reference_model import write_reference_model

    place = write_reference_model(folder, seed=1)  # for its tokenizer
    fields = {**STATED.get(case.family, {}), **case.fields}
    sizes = {**SYNC_SIZES, "max_position_embeddings": POSITIONS, "initializer_range": 0.06, **case.sizes}
    config = AutoConfig.for_model(case.family, **fields)
    config.get_text_config().rope_parameters = {**rope}
    write_served(config, place, seed=1, sizes=sizes)


def plain(folder: Path, lengths: Sequence[int]) -> Trained:
    """Return the logprobs of plain transformers for all rows as one padded batch."""
    import torch
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    read = rows(lengths)
    tokens = torch.zeros(len(read), max(lengths), dtype=torch.long)
    for place, row in enumerate(read):
        tokens[place, : len(row)] = torch.from_numpy(row)
    mask = (torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]).long()
    with torch.no_grad():
        logits = hf(input_ids=tokens, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
    taken = logits[:, :-1].gather(2, tokens[:, 1:, None])[..., 0].numpy()
    found = [np.concatenate([[0.0], taken[place, : len(row) - 1]]) for place, row in enumerate(read)]
    return Trained(np.concatenate(found), ())


def check(name: str) -> dict[str, Any]:
    """Return everything that the page shows of a case."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as workspace:
        folder, exported, unscaled = (Path(workspace, part) for part in ("model", "exported", "unscaled"))
        write_model(case, folder, case.rope)
        write_model(case, unscaled, case.without_scaling)
        trained = train(folder, "float32", exported, lengths=case.lengths, longest=case.longest)
        reference = plain(exported, case.lengths)
        found = {"name": name, "export": off(trained, reference)}
        found["unscaled"] = off(reference, plain(unscaled, case.lengths))
        # vLLM changes the class of a model that it serves through transformers, so it has its own process
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            work = process.submit(served, "vllm", exported, "float32", case.lengths, case.longest)
            found["engine"] = off(trained, work.result())
        return found


def run(name: str) -> dict[str, Any]:
    """Return the result of a case, checked in its own process."""
    found = answer_of(__file__, name)
    return {"name": name, "problem": found} if isinstance(found, str) else found


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of results."""
    lines = [_line(each) for each in results]
    agree = [each for each in results if "problem" not in each and max(each["export"], each["engine"]) <= TOLERANCE]
    head = PAGE.format(
        original=ORIGINAL,
        positions=POSITIONS,
        torch=version("torch").partition("+")[0],
        transformers=version("transformers"),
        engine=engine(),
        tolerance=TOLERANCE,
        count=len(agree),
        total=len(results),
    )
    return head + "\n".join(lines) + "\n"


def _line(found: Mapping[str, Any]) -> str:
    case = CASES[found["name"]]
    if "problem" in found:
        numbers = [f"not checked: {one_line(found['problem'], 150)}", "", ""]
    else:
        numbers = [f"{found[name]:.1e}" for name in ("export", "engine", "unscaled")]
    types = ", ".join(case.types)
    cells = (found["name"], f"`{case.family}`", types, str(max(case.lengths)), str(case.longest), *numbers)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Check the given cases and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--page", type=Path, default=PAGE_PATH)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print("answer " + json.dumps(check(options.work)), flush=True)
        return
    results = []
    for name in options.only:
        results.append(run(name))
        print(json.dumps(results[-1]), flush=True)
    options.page.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
