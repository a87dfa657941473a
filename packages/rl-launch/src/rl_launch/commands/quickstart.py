"""`rl quickstart`: a tiny language model learns sums on this machine, by SFT and then by GRPO."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_algos.tiny_model import make_tiny_model
from rl_core.errors import WorkerEnvironmentError
from rl_launch.commands.train import keep_warmed_up, train
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan
from rl_launch.run_session.checkpoints.checkpoints import newest_checkpoint
from rl_launch.run_session.directory.run_folder import RunFolder, is_run
from rl_launch.run_session.directory.writable import check_writable

_MEASURED = (("initial", "before SFT"), ("sft", "after SFT"), ("grpo", "after GRPO"))

_NUM_STEPS = 24
_DECAY = f"kwargs: {{start_factor: 1.0, end_factor: 0.05, total_iters: {4 * _NUM_STEPS}}}"
"""Decreasing rates end with a higher accuracy, which varies less from seed to seed. A step makes four updates."""

GRPO = (
    f"grpo.max_num_steps={_NUM_STEPS}",
    "policy.optimizer.kwargs.lr=3e-4",
    f"policy.scheduler=[{{name: torch.optim.lr_scheduler.LinearLR, {_DECAY}}}]",
)
"""Raise the accuracy by about a fifth of the sums in less than a minute. The smaller, constant rate of the recipe suits
more losses."""

_log = logging.getLogger(__name__)


class Quickstart:
    """The stages of a quickstart, each timed, in one folder.

    Args:
        folder: Where everything is written.
        console: Shows the stages.
        cluster: Overrides of the `cluster` section.
    """

    def __init__(self, folder: Path, console: Console, cluster: Sequence[str]) -> None:
        self._folder = folder
        self._cluster = tuple(cluster)
        self._console = console
        self.seconds: dict[str, float] = {}
        self.accuracy: dict[str, float] = {}
        self._summary = folder / "summary.json"
        with suppress(OSError, ValueError, KeyError, TypeError):
            earlier = json.loads(self._summary.read_text(encoding="utf-8"))
            self.accuracy, self.seconds = dict(earlier["accuracy"]), dict(earlier["seconds"])

    @property
    def is_finished(self) -> bool:
        """True if an earlier quickstart in this folder has completed all stages."""
        runs = [self._folder / name for name in ("sft", "grpo")]
        is_measured = self.accuracy.keys() >= {label for label, _ in _MEASURED}
        return is_measured and all(is_run(path) and RunFolder(path).state().status == "finished" for path in runs)

    @property
    def model(self) -> Path:
        """The model that the quickstart ends with."""
        return newest_checkpoint(self._folder / "grpo") / "hf"

    @contextmanager
    def stage(self, name: str, what: str) -> Iterator[None]:
        """Announce a stage, and time it."""
        self._console.print(f"\n[bold]{what}[/bold]")
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 1)

    def make_model(self) -> Path:
        """Make a tiny Qwen3 with random weights and its tokenizer."""
        folder = self._folder / "model"
        if not (folder / "model.safetensors").exists():
            make_tiny_model(folder)
        return folder

    def prepare_workers(self, model: Path) -> None:
        """Build the environment of the first stages, and start building the vLLM environment, which the last stage
        needs."""
        from rl_launch.runtime.role_envs import role_specs
        from rl_launch.worker_envs.provision import provision

        settings = [f"policy.model_name={model}", *self._cluster]

        def plan_with(backend: str) -> RunPlan:
            return read_plan("grpo-arithmetic", [*settings, f"policy.generation.backend={backend}"])

        def prepare(plan: RunPlan) -> None:
            provision(role_specs(plan.backends, (), plan.device).values(), plan.config.cluster.worker_envs)

        # Both configs are read before anything is built, so that a wrong one is refused at once.
        first, last = plan_with("hf"), plan_with("vllm")

        def prepare_last() -> None:
            # The last stage tries again, and reports a failure.
            with suppress(WorkerEnvironmentError):
                prepare(last)

        prepare(first)
        threading.Thread(target=prepare_last, daemon=True).start()

    def score(self, model: Path) -> float:
        """Return the greedy accuracy on held-out sums, sampled in the trainer's environment, which starts sooner than
        vLLM."""
        from rl_launch.commands.evaluate import evaluate

        settings = [f"policy.model_name={model}", "policy.generation.backend=hf", *self._cluster]
        return evaluate(read_plan("grpo-arithmetic", settings), folder=self._folder / "initial").mean_reward

    def fine_tune(self, model: Path) -> Path:
        """Fine-tune on generated sums; returns the folder of the trained model. Later runs of
        `grpo-arithmetic` begin.
        """
        run_dir = self._folder / "sft"
        settings = [f"policy.model_name={model}", f"run_dir={run_dir}", *self._cluster]
        train(read_plan("sft-arithmetic", settings), run_dir=run_dir, title="sft").exit_if_stopped()
        trained = newest_checkpoint(run_dir) / "hf"
        if not self._cluster:
            keep_warmed_up("tiny-arithmetic-sft", trained)
        return trained

    def reinforce(self, model: Path) -> Path:
        """Train by GRPO on further sums, validated before the first step and after the last."""
        run_dir = self._folder / "grpo"
        settings = [f"policy.model_name={model}", f"run_dir={run_dir}", *GRPO, *self._cluster]
        validated = read_plan("grpo-arithmetic", [*settings, "grpo.val_at_start=true", "grpo.val_period=6"])
        train(validated, run_dir=run_dir, title="grpo").exit_if_stopped()
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        scores = [line["val/accuracy"] for line in lines if "val/accuracy" in line]
        self.accuracy |= {"sft": scores[0], "grpo": scores[-1]}
        return self.model

    def write_summary(self) -> None:
        """Write the results so far."""
        model = {"model": str(self.model)} if is_run(self._folder / "grpo") else {}
        summary = {"accuracy": self.accuracy, "seconds": self.seconds, **model}
        self._summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

    def show(self) -> None:
        """Show the table and the next command."""
        table = Table(title="Accuracy on held-out sums (greedy)")
        table.add_column("model")
        table.add_column("accuracy", justify="right")
        for name, label in _MEASURED:
            table.add_row(label, f"{100 * self.accuracy[name]:.1f} %")
        self._console.print()
        self._console.print(table)
        self._console.print(
            f"Model, in Hugging Face format:  {self.model}\n"
            f"Runs, metrics and rollouts:     {self._folder}/sft  {self._folder}/grpo\n"
            f"These results:                  {self._summary}",
            soft_wrap=True,
        )
        self._console.print(f"It took {self.seconds['total']:.0f} s. Next, change something and train again:")
        self._console.print(
            f"  rl train grpo-arithmetic policy.model_name={self.model} grpo.normalize_rewards=false", soft_wrap=True
        )


def run(folder: Path, cluster: Sequence[str] = (), console: Console | None = None) -> None:
    """Run all stages that have not been completed; nothing is started if all have.

    Args:
        folder: Where everything is written.
        cluster: Overrides of the `cluster` section, such as `cluster.device=rehearsal`.
        console: Shows the stages.
    """
    started = time.monotonic()
    folder = folder.absolute()
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stages = Quickstart(folder, console or Console(), cluster)
    if stages.is_finished:
        _log.info("%s holds a finished quickstart. To run it again, choose another run_dir.", folder)
        stages.show()
        return

    # one Ray for all stages; imported here so that help and errors in arguments answer at once
    from rl_launch.cluster.virtual_cluster import VirtualCluster

    with stages.stage("model", "1/4  Making a tiny Qwen3 (about 0.7M parameters) and its tokenizer"):
        model = stages.make_model()
    stages.prepare_workers(model)
    plan = read_plan("grpo-arithmetic", [f"policy.model_name={model}", *cluster])
    with VirtualCluster.of(plan.config.cluster, plan.device):
        if "initial" not in stages.accuracy:
            with stages.stage("initial", "2/4  Scoring it on held-out sums"):
                stages.accuracy["initial"] = stages.score(model)
            stages.write_summary()
        with stages.stage("sft", "3/4  Supervised fine-tuning on generated sums, FSDP2 on two ranks"):
            model = stages.fine_tune(model)
        with stages.stage("grpo", "4/4  GRPO: sample with vLLM, check the sums, train with FSDP2"):
            stages.reinforce(model)
    stages.seconds["total"] = round(time.monotonic() - started, 1)
    stages.write_summary()
    stages.show()
