"""A page of the files of a run directory."""

from __future__ import annotations

from pathlib import PurePosixPath

from rl_launch.run_session.checkpoints import manifest
from rl_launch.run_session.directory import lock, recording, row_files, run_folder, run_state
from rl_launch.run_session.traces import trace_folder
from rl_launch.runtime.opponents import WEIGHTS
from website.reference.text import code, table

PLACE = "reference/run-directory.md"
_OPENING = """# Files of a run

A run directory has these files and folders. Folders that a run has no use for do not exist. `RunFolder` reads them in
Python, and `rl show RUN` in a terminal. [Resume and checkpoints](../resume-and-checkpoints.md) describes how they
change in long runs.

"""

FILES = {
    run_folder.DESCRIPTION: "Identity of the run: algorithm, model, creation time, versions, labels, and its origin if "
    "it is a branch.",
    run_folder.CONFIG: "The whole resolved config.",
    recording.ORIGINS: "Where each value of the config comes from: a recipe, a file, the command line or a default.",
    run_state.FILE_NAME: "Status, step and best metric of the run.",
    lock.FILE_NAME: "Process and host that hold the run. It is locked while the run is in progress.",
    "metrics.jsonl": "A line for each step, with its [metrics](../metrics.md).",
    "rollouts/step_*.jsonl": "Rollouts of a step: text, rewards, advantage.",
    "rollouts/val_*.jsonl": "Rollouts of a validation.",
    "rollouts/tokens_*.parquet": "Logprobs, advantage, loss mask and weight version of "
    "[each token](../view.md#tokens) of sampled groups.",
    "rollouts/steps_*-*.zip": "The files of earlier steps.",
    "checkpoints/step_*/**": "A checkpoint: everything that a resume needs, and the model in Hugging Face format in "
    f"`hf`. `{manifest.FILE_NAME}` lists its files with their sizes and digests.",
    "checkpoints/damaged_step_*/**": "A checkpoint that did not pass its check and was set aside.",
    "logs/driver.log": "Log of the driver.",
    "logs/tensorboard/**": "Metrics for TensorBoard.",
    "logs/agents/**": "Output of [agents](../agents.md).",
    "logs/**": "Logs of workers and environments by role and rank, and stacks of workers. A log that reaches its limit "
    "is kept as `NAME.1`. Trackers keep their files here, too.",
    f"{trace_folder.FOLDER}/**": "[Traces](../profiling.md) of all processes, 20 steps in a file, and the shares of "
    "time for which processes were busy.",
    "profiles/**": "[Profiles](../profiling.md) of the steps of `profiling.steps`.",
    f"{recording.CODE}/**": "Your own files that the config refers to, as the run uses them.",
    f"{row_files.FOLDER}/**": "Rows that were given from Python.",
    f"{WEIGHTS}/**": "Weights on their way to generators that share only a file system with the trainer.",
    "opponents/**": "Older versions of the policy that it plays against.",
    f"{row_files.JOBS}/**": "The script, the record and the logs of each job of a queue, by attempt.",
}
"""Meaning of each file of a run directory, by pattern."""


def pages() -> dict[str, str]:
    """Return the text of the page by its place."""
    rows = ((code(pattern.removesuffix("**")), text) for pattern, text in FILES.items())
    return {PLACE: _OPENING + table(("file", "contents"), rows)}


def is_listed(path: str) -> bool:
    """Return whether the page lists a file.

    Args:
        path: Path of the file in the run directory, with `/` between parts.
    """
    return any(_matches(path, pattern) for pattern in FILES)


def _matches(path: str, pattern: str) -> bool:
    parts = PurePosixPath(path).parts
    wanted = PurePosixPath(pattern).parts
    if wanted[-1] == "**":
        wanted, parts = wanted[:-1], parts[: len(wanted) - 1]
    return len(parts) == len(wanted) and all(map(lambda part, each: PurePosixPath(part).match(each), parts, wanted))
