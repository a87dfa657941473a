"""GRPO steps of TRL's `GRPOTrainer`, timed by phase; run by `grpo_step.py` in TRL's own environment.

python trl_steps.py SETTINGS.json: writes the seconds of each phase of each step to `output`.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class TimedTrainer(GRPOTrainer):
    """Adds up the seconds of each phase in `times`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times = {"generation": 0.0, "logprobs": 0.0, "training": 0.0}
        self.lengths: list[int] = []
        self._preparing = False
        self._prepared_s = 0.0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        found = super()._generate(*args, **kwargs)
        self.times["generation"] += time.perf_counter() - started
        self.lengths += [len(ids) for ids in found[1]]
        return found

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._preparing:  # otherwise it is the training pass's own
            self.times["logprobs"] += time.perf_counter() - started
        return found

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        started, self._preparing = time.perf_counter(), True
        prepared = super()._prepare_inputs(*args, **kwargs)
        self._preparing = False
        self._prepared_s = time.perf_counter() - started
        return prepared

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        loss = super().training_step(*args, **kwargs)
        self.times["training"] += time.perf_counter() - started - self._prepared_s
        return loss


class StepClock(TrainerCallback):
    """Seconds from the end of one step to the end of the next, and the optimizer's share of its training."""

    def __init__(self) -> None:
        self.trainer: TimedTrainer
        self.steps: list[dict[str, Any]] = []
        self._ended = time.perf_counter()
        self._stepping = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._ended = time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._stepping = time.perf_counter()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.trainer.times["training"] += time.perf_counter() - self._stepping

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.steps.append({**self.trainer.times, "step": now - self._ended, "lengths": self.trainer.lengths})
        self.trainer.times = dict.fromkeys(self.trainer.times, 0.0)
        self.trainer.lengths = []
        self._ended = now


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return 1 if the last number of a completion is the answer."""
    texts = [completion[0]["content"] for completion in completions]
    numbers = [re.findall(r"\d+", text) for text in texts]
    return [float(bool(found) and found[-1] == right) for found, right in zip(numbers, answer, strict=True)]


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    rows = [json.loads(line) for line in Path(settings["prompts"]).read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    )
    arguments = GRPOConfig(
        output_dir=settings["scratch"],
        per_device_train_batch_size=settings["microbatch"],
        gradient_accumulation_steps=settings["rows"] // settings["microbatch"],
        num_generations=settings["group"],
        max_completion_length=settings["tokens"],
        max_steps=settings["steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )
    clock = StepClock()
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        args=arguments,
        reward_funcs=reward,
        train_dataset=data,
        callbacks=[clock],
    )
    clock.trainer = trainer
    trainer.train()
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")}
    Path(settings["output"]).write_text(json.dumps({"versions": versions, "steps": clock.steps}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
