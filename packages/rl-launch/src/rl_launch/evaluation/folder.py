"""The folder of an evaluation: finished groups are appended, so that an interrupted evaluation can resume.

Digests of its inputs prevent that rollouts of different evaluations are mixed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from rl_algos.data.pass_rates import ROLLOUTS
from rl_algos.evaluation.summary import PromptScore
from rl_algos.judges.needs import judges_identity
from rl_algos.rollouts.driver.task_evaluation import EvaluationPlan
from rl_core.config import Config, as_written, tree_to_yaml, with_absolute_paths
from rl_core.environments.instance import instance_of
from rl_core.environments.rewards import RewardSum
from rl_core.errors import RunDirectoryError
from rl_core.rollouts.group import RECORD, RolloutGroup
from rl_core.rollouts.rollout import Prompt
from rl_core.user_code import FromFile
from rl_launch.root_config import RunConfig
from rl_launch.run_session.config import Access
from rl_launch.run_session.directory import lock
from rl_launch.run_session.directory.lock import DirectoryLock
from rl_launch.run_session.directory.row_files import names_without_rows
from rl_launch.run_session.directory.writable import check_writable, make_folder, write_atomically

_WEIGHTS = ("*.safetensors", "*.json")


CONFIG = "config.yaml"

PLAN = "plan.json"

RESULT = "eval.json"

_UNFINISHED = {CONFIG, f"{CONFIG}.part", f"{PLAN}.part"}
"""Files that an evaluation leaves if it is killed while it begins."""

Done = dict[tuple[str, str], PromptScore]
"""Scores by name of the task and id of the prompt."""

_log = logging.getLogger(__name__)


def identity_of(config: RunConfig, plan: EvaluationPlan) -> dict[str, str]:
    """Return a digest of each part of an evaluation that its rollouts depend on, by a name for messages.

    Args:
        config: Resolved root, with the folder of the model in `policy.model_name`.
        plan: Plan of the evaluation.
    """
    policy = config.policy
    # Weights that are trained again differ in the sizes and times of their files.
    folder = Path(policy.model_name).expanduser()
    paths = [path for pattern in _WEIGHTS if folder.is_dir() for path in sorted(folder.glob(pattern))]
    files = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    return {
        "the model": _digest([policy.model_name, policy.precision, policy.hf_config_overrides, *files]),
        "the engine": _digest(policy.generation.backend),
        "prompts": _digest([[task.name, *map(_prompt, task.groups)] for task in plan.tasks]),
        "sampling": _digest(
            [[task.name, task.num_samples, *({**asdict(g.sampling), "seeds": g.seeds} for g in task.groups)]]
            for task in plan.tasks
        ),
        "environments": _digest(
            [
                [name, as_written(instance.config), _code(instance.environment)]
                for name in sorted(plan.needs.environments)
                for instance in [instance_of(config.env, name)]
            ]
        ),
        "turns": _digest([_code(plan.needs.program), dict(plan.needs.program_args), plan.needs.max_seconds]),
        **({"judges": _digest(judges)} if (judges := judges_identity(config)) else {}),
    }


def prompt_digest(prompt: Prompt) -> str:
    """Return a short digest of a prompt's messages, which identifies it in two evaluations."""
    return _digest(list(prompt.messages))[:12]


def _prompt(group: Any) -> list[Any]:
    prompt = group.prompt
    return [prompt.id, prompt.environment, dict(prompt.info), prompt.token_ids.tolist()]


def _code(code: str | FromFile | RewardSum | None) -> Any:
    if isinstance(code, RewardSum):
        return [_code(code.environment), *([part.name, part.weight, _code(part.function)] for part in code.parts)]
    return [code.source.sha256, code.name] if isinstance(code, FromFile) else code


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    for part in value if isinstance(value, Iterator) else [value]:
        digest.update(json.dumps(part, sort_keys=True, default=repr).encode())
    return digest.hexdigest()


class EvaluationFolder:
    """A folder that holds one evaluation, taken by one process at a time.

    It has the resolved config (`config.yaml`), digests of the measured parts (`plan.json`), a JSON object per rollout
    (`rollouts.jsonl`, as of training, with the name of the task) and the result (`eval.json`).

    Args:
        path: Path of the folder.
        access: Readers of a folder that does not exist yet.
    """

    def __init__(self, path: str | Path, access: Access = "owner") -> None:
        self.path = Path(path).expanduser().absolute()
        self._access: Access = access
        self._lock = DirectoryLock(self.path)
        self._file: BinaryIO | None = None

    @property
    def logs(self) -> Path:
        """Logs of the driver and its workers."""
        return self.path / "logs"

    def check(self) -> None:
        """Refuse a folder that cannot be written, or that holds anything else than an evaluation.

        Raises:
            RunDirectoryError: If that is not possible; contains the reason.
        """
        check_writable(self.path)
        if self.path.is_dir() and not is_evaluation(self.path):
            names = names_without_rows(self.path) - {"logs"}
            foreign = sorted(name for name in names if not lock.is_own(name))
            if (self.path / lock.FILE_NAME).is_file() and set(foreign) <= _UNFINISHED:
                foreign = []
            if foreign:
                raise RunDirectoryError(
                    f"{self.path} holds files that do not belong to an evaluation ({', '.join(foreign[:3])}). Choose "
                    "another run_dir."
                )

    def open(self, identity: Mapping[str, str], config: Config, num_samples: Mapping[str, int]) -> Done:
        """Take the folder; returns the scores of the groups that an earlier evaluation has finished in it.

        Args:
            identity: Digests of the measured parts, by a name.
            config: Resolved root.
            num_samples: Samples of each prompt, by the task's name.

        Raises:
            RunDirectoryError: If another process has it, or it holds an evaluation of something else.
        """
        self.check()
        make_folder(self.path, self._access)
        self.logs.mkdir(exist_ok=True)
        self._lock.acquire()
        try:
            earlier = identity
            if (self.path / PLAN).is_file():
                earlier = json.loads((self.path / PLAN).read_text(encoding="utf-8"))["identity"]
            if changed := [name for name in {**earlier, **identity} if earlier.get(name) != identity.get(name)]:
                raise RunDirectoryError(
                    f"{self.path} holds an evaluation of something else: {', '.join(changed)} "
                    f"{'differs' if len(changed) == 1 else 'differ'}. Choose another run_dir, or evaluate as it was "
                    f"begun: rl eval {self.path}"
                )
            write_atomically(self.path / CONFIG, tree_to_yaml(with_absolute_paths(config)))
            write_atomically(self.path / PLAN, json.dumps({"schema": 1, "identity": dict(identity)}, indent=2) + "\n")
            done, size = self._finished(num_samples)
            self._file = (self.path / ROLLOUTS).open("ab")
            # the group that was being written when the process was killed
            self._file.truncate(size)
            self._file.seek(size)
        except BaseException:
            self.close()
            raise
        return done

    def append(self, task: str, group: RolloutGroup) -> PromptScore:
        """Write the rollouts of a finished group; returns its scores."""
        assert self._file is not None, "the folder is open"
        records = [row.tobytes() for row in group.records.ragged(RECORD)]
        # Each record is an object on one line, and gets one more entry.
        ending = f', "task": {json.dumps(task)}}}\n'.encode()
        self._file.write(b"".join(record[:-1] + ending for record in records))
        self._file.flush()
        return PromptScore.of_records([json.loads(record) for record in records])

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write `eval.json`, whole or not at all."""
        write_atomically(self.path / RESULT, json.dumps(result, indent=1) + "\n")

    def set_aside(self) -> Path:
        """Move the rollouts away, so that the next evaluation here begins anew; returns their new file."""
        aside = self.path / f"failed-{ROLLOUTS}"
        (self.path / ROLLOUTS).replace(aside)
        return aside

    def close(self) -> None:
        """Release the folder."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.release()

    def _finished(self, num_samples: Mapping[str, int]) -> tuple[Done, int]:
        """Return the scores of the groups whose rollouts are all in the file, and its size up to the last of them."""
        done: Done = {}
        size = position = 0
        group: list[Mapping[str, Any]] = []
        path = self.path / ROLLOUTS
        for line in path.open("rb") if path.is_file() else ():
            position += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                break
            if group and record["prompt_id"] != group[0]["prompt_id"]:
                break
            group.append(record)
            if len(group) == num_samples[record["task"]]:
                done[record["task"], record["prompt_id"]] = PromptScore.of_records(group)
                group, size = [], position
        if done:
            _log.info("%d prompts are already evaluated in this folder", len(done))
        return done, size


def rollouts_in(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the rollouts in the folder of an evaluation, which may be in progress."""
    path = folder / ROLLOUTS
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def is_evaluation(path: Path) -> bool:
    """Return whether a folder holds an evaluation."""
    return (path / PLAN).is_file() and (path / CONFIG).is_file()
