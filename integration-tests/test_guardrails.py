"""Guardrails of real runs."""

import json
import math

from runs import lines_of

from rl_core.testing.exhaustive import exhaustive

SETTINGS = (
    "sft-arithmetic",
    "sft.max_num_steps=10",
    "sft.stop_at_validation_loss=null",
    "sft.val_period=0",
    "checkpointing.save_period=2",
    "checkpointing.keep_top_k=null",
    "checkpointing.metric_name=null",
    "cluster.device=cpu",
    "logger.tensorboard_enabled=false",
)


@exhaustive
def test_a_run_that_diverges_goes_back_and_on_with_a_lower_learning_rate(tmp_path, rl):
    change = "{policy.optimizer.kwargs.lr: x0.01}"
    rule = f"{{metric: train/loss, rises_by: 0.5, patience: 2, action: rollback, change: {change}}}"
    folder, too_fast = tmp_path / "run", "policy.optimizer.kwargs.lr=0.3"
    done = rl("train", *SETTINGS, too_fast, f"guardrails.spike={rule}", f"run_dir={folder}")
    assert done.code == 0, done.output
    (event,) = json.loads((folder / "guardrails.json").read_text())
    step, lr = event["resumes_after"], event["change"]["policy.optimizer.kwargs.lr"]
    assert math.isclose(lr, 0.003)
    assert f"the run goes back to checkpoint step_{step} with policy.optimizer.kwargs.lr=0.003" in done.output
    rows = lines_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[-1]["train/loss"] < min(row["train/loss"] for row in rows[: step + 1])
    # The same command leaves the finished run as it is.
    again = rl("train", *SETTINGS, too_fast, f"guardrails.spike={rule}", f"run_dir={folder}")
    assert again.code == 0, again.output

    # A branch of an undisturbed run with the changed key is the same run.
    plain, branch = tmp_path / "plain", tmp_path / "branch"
    assert rl("train", *SETTINGS, too_fast, f"run_dir={plain}", "sft.max_num_steps=4").code == 0
    arguments = (*SETTINGS, f"policy.optimizer.kwargs.lr={lr}", f"run_dir={branch}", "--from", f"{plain}:{step}")
    assert rl("train", *arguments).code == 0
    found = {row["step"]: row["train/loss"] for row in rows}
    assert {row["step"]: row["train/loss"] for row in lines_of(branch)}.items() <= found.items()


WARMED = "{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.03, total_iters: 10}}"
COLLAPSING = (
    "grpo-arithmetic",
    *("policy.generation.backend=hf", "cluster.device=cpu", "cluster.cpu_ranks_per_node=1"),
    *("logger.tensorboard_enabled=false", "grpo.val_period=0", "checkpointing.metric_name=null"),
    *("checkpointing.keep_top_k=null", "checkpointing.save_period=1", "grpo.num_prompts_per_step=16"),
    *("grpo.num_generations_per_prompt=8", "policy.train_global_batch_size=128"),
    *("policy.optimizer.kwargs.lr=0.003", f"policy.scheduler=[{WARMED}]"),
)
"""A run that warms up to a learning rate which destroys the policy."""


@exhaustive
def test_a_run_that_would_have_collapsed_ends_above_where_it_was(tmp_path, rl):
    change = "{policy.optimizer.kwargs.lr: x0.05}"
    rule = f"{{metric: reward/mean, falls_by: 0.2, patience: 2, action: rollback, change: {change}}}"
    plain, guarded = tmp_path / "plain", tmp_path / "guarded"
    for folder, further in (
        (plain, ["grpo.max_num_steps=12"]),
        (guarded, ["grpo.max_num_steps=30", f"guardrails.collapse={rule}"]),
    ):
        done = rl("train", *COLLAPSING, *further, f"run_dir={folder}")
        assert done.code == 0, done.output
    (event,) = json.loads((guarded / "guardrails.json").read_text())
    assert event["action"] == "rollback"
    assert event["resumes_after"] == event["onset"] - 2
    rewards = {folder: [row["reward/mean"] for row in lines_of(folder)] for folder in (plain, guarded)}
    kept = rewards[guarded][: event["resumes_after"]]
    assert rewards[plain][: len(kept)] == kept
    assert sum(rewards[plain][-2:]) / 2 < 0.2
    assert sum(rewards[guarded][-6:]) / 6 > sum(kept) / len(kept)
