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
