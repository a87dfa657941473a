"""Steps of real runs, made again."""

import json

import pytest
from runs import lines_of

from rl_core.testing.exhaustive import exhaustive

SMALL = (
    "checkpointing.save_period=2",
    "checkpointing.keep_top_k=null",
    "checkpointing.metric_name=null",
    "cluster.device=cpu",
    "cluster.cpu_ranks_per_node=1",
    "logger.tensorboard_enabled=false",
)
RECORDED = ("logger.replay_enabled=true", "logger.token_level=all")
ROLLOUTS = ("max_num_steps=4", "num_prompts_per_step=4", "num_generations_per_prompt=4", "val_period=2")
REWARD = """
def score(response, answer):
    return float(response.strip() == answer)
"""


def of_rollouts(recipe, section):
    settings = [f"{section}.{each}" for each in ROLLOUTS]
    return recipe, *RECORDED, "policy.generation.backend=hf", "policy.train_global_batch_size=8", *settings


RUNS = {
    "grpo": of_rollouts("grpo-arithmetic", "grpo"),
    "ppo": (*of_rollouts("ppo-tiny", "ppo"), "value.train_global_batch_size=8"),
    "distillation": of_rollouts("distill-tiny", "distillation")[:-2],
    "agent": ("grpo-agent-tiny", *RECORDED, "policy.generation.backend=hf", "grpo.max_num_steps=4"),
    "dpo": ("dpo-tiny", "dpo.max_num_steps=4"),
}


def stages(output):
    """Return whether each stage is equal."""
    lines = (line.split(": ", 1) for line in output.splitlines() if line.endswith((" equal", " differ")))
    return {name: text.endswith("equal") for name, text in lines}


@exhaustive
@pytest.mark.parametrize("name", RUNS)
def test_a_step_is_made_again_bit_for_bit(tmp_path, rl, name):
    folder = tmp_path / name
    done = rl("train", *RUNS[name], *SMALL, f"run_dir={folder}")
    assert done.code == 0, done.output
    again = rl("replay", f"{folder}:4")
    assert again.code == 0, again.output
    found = stages(again.output)
    assert {"loss", "gradient", "update"} <= set(found)
    assert all(found.values()), again.output
    assert "have been sampled" not in again.output


@exhaustive
def test_what_has_changed_is_named_at_its_stage(tmp_path, rl):
    folder, reward = tmp_path / "run", tmp_path / "reward.py"
    reward.write_text(REWARD)
    done = rl("train", *RUNS["grpo"], *SMALL, f"data.train.env_name={reward}:score", f"run_dir={folder}")
    assert done.code == 0, done.output

    clipped = rl("replay", f"{folder}:4", "loss_fn.surrogate.clip_high=1e-6", "loss_fn.surrogate.clip_low=1e-6")
    assert clipped.code == 0, clipped.output
    assert "first difference, in loss of step 3: " in clipped.output

    reward.write_text(REWARD.replace("float(", "0.5 * float("))
    rewarded = rl("replay", f"{folder}:4")
    assert rewarded.code == 1, rewarded.output
    assert "first difference, in rewards of step 3: " in rewarded.output

    reward.write_text(REWARD)
    path = next((folder / "rollouts").glob("step_4.jsonl"))
    first, *others = path.read_text().splitlines(keepends=True)
    record = json.loads(first)
    record["turns"][0]["text"] += "!"
    path.write_text("".join([json.dumps(record) + "\n", *others]))
    corrupted = rl("replay", f"{folder}:4")
    assert corrupted.code == 1, corrupted.output
    assert "first difference, in rollouts of step 4: text of rollout 0" in corrupted.output
    assert len(lines_of(folder)) == 4


LOOK = """
import json
from pathlib import Path


def look(step, variables):
    batch, groups = variables["batch"], variables["groups"]
    found = {"step": step, "groups": len(groups), "rows": len(batch), "advantages": "advantages" in batch}
    Path(__file__).with_suffix(".json").write_text(json.dumps(found))
"""


@exhaustive
def test_a_step_stops_at_a_stage_is_profiled_and_is_made_of_one_row(tmp_path, rl):
    folder, look = tmp_path / "run", tmp_path / "look.py"
    look.write_text(LOOK)
    done = rl("train", *RUNS["grpo"], *SMALL, f"run_dir={folder}")
    assert done.code == 0, done.output

    again = rl("replay", f"{folder}:4", "--break", f"advantages={look}:look", "--profile", "--json")
    assert again.code == 0, again.output
    assert json.loads(look.with_suffix(".json").read_text()) == {"step": 4, "groups": 4, "rows": 16, "advantages": True}
    report = json.loads(again.output[again.output.index("{\n") :])
    assert report["first"] is None
    assert any(path.endswith("policy-0.torch.json.gz") for path in report["profiles"])

    rows = [json.loads(line) for line in (folder / "rollouts/step_4.jsonl").read_text().splitlines()]
    # The step makes two updates. In the first of them, the ratio to the policy before the step is 1.
    number = next(place for place, row in enumerate(rows[:8]) if row["advantage"])
    alone = rl("replay", f"{folder}:4", "--row", str(number), "--json")
    assert alone.code == 0, alone.output
    report = json.loads(alone.output[alone.output.index("{\n") :])
    assert report["first"]["name"] == "loss"
    (made,) = (row for row in lines_of(tmp_path / report["folder"]) if row["step"] == 4)
    assert made["train/loss"] == pytest.approx(-rows[number]["advantage"] / 2, rel=1e-4)
    beyond = rl("replay", f"{folder}:4", "--row", "16")
    assert beyond.code == 2
    assert "--row 16: there is no such row; the step has the rollouts 0 to 15" in beyond.output
