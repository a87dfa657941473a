"""Record the runs of a release, which later versions must be able to resume.

Run it with the Python of the release, `uv run python integration-tests/released_runs/record.py`. It trains small runs
of SFT, of SFT with adapters and of GRPO for two steps, and each of them once more for four steps in one session.
`VERSION.tar.xz` then holds the model, the data, the run folders, and the metrics of the uninterrupted runs. An argument
is the name in place of the version: `unreleased` for the formats of a tree that has no release yet.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from rl_algos.tiny_model import make_tiny_model

HERE = "@HERE@"
"""In place of the folder in which the runs were made."""

SFT = (
    "sft-tiny",
    "data.validation=null",
    "sft.val_period=0",
    "policy.train_global_batch_size=8",
    "policy.train_micro_batch_size=8",
    "data.train={data_path: rows.jsonl}",
)
RUNS = {
    "sft": SFT,
    "lora": (*SFT, "policy.lora_cfg={enabled: true, dim: 2}"),
    "grpo": (
        "grpo-arithmetic",
        "policy.train_global_batch_size=64",
        "policy.generation={backend: hf, max_new_tokens: 2}",
        "grpo.num_prompts_per_step=16",
        "grpo.val_period=0",
        "data.validation=null",
        "checkpointing.metric_name=null",
        "data.train.settings.max_operand=2",
    ),
}
"""Recipe and overrides of each run."""

ALWAYS = (
    "policy.model_name=model",
    "checkpointing.save_period=2",
    "checkpointing.keep_top_k=1",
    "logger.tensorboard_enabled=false",
    "cluster.cpu_ranks_per_node=1",
)


def record(folder: Path) -> None:
    """Make the model, the data and the runs in a folder."""
    make_tiny_model(
        folder / "model",
        characters="0123456789+-*=? ",
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    rows = [{"prompt": f"{number}+{number}=", "response": str(2 * number)} for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (recipe, *overrides) in RUNS.items():
        steps = f"{recipe.partition('-')[0]}.max_num_steps"
        _train(folder, recipe, *overrides, f"{steps}=4", f"run_dir=whole/{name}")
        _train(folder, recipe, *overrides, f"{steps}=2", f"run_dir={name}")
        (folder / "whole" / name / "metrics.jsonl").rename(folder / f"{name}.jsonl")


def pack(folder: Path, target: Path) -> None:
    """Write the model, the data and the runs into an archive that is the same whenever it is made of the same files."""
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.is_file() and not {"whole", "logs", "home"} & set(name.parts) and not path.name.endswith(".lock"):
                content = path.read_bytes()
                if path.suffix in (".yaml", ".json"):
                    content = content.replace(str(folder).encode(), HERE.encode())
                entry = tarfile.TarInfo(name.as_posix())
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


def _train(folder: Path, *arguments: str) -> None:
    command = [Path(sys.executable).with_name("rl"), "train", *arguments, *ALWAYS]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=folder, check=True, env=environment)


if __name__ == "__main__":
    released = sys.argv[1] if len(sys.argv) > 1 else version("rl-launch")
    with tempfile.TemporaryDirectory() as made:
        record(Path(made))
        pack(Path(made), Path(__file__).with_name(f"{released}.tar.xz"))
