"""`rl doctor mismatch`: why policy and generator compute other logprobs, from rollouts of a run."""

from __future__ import annotations

import json
import logging
import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from rl_algos.requirement import LOSSES
from rl_algos.rollouts.mismatch import (
    MIN_CLOSED,
    MIN_GAP,
    MismatchCase,
    MismatchFinding,
    MismatchGap,
    MismatchRows,
    OlderWeights,
    TriedChange,
    ranked,
)
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigError, RLError
from rl_core.plugins import GENERATORS, BackendPlugin, plugin
from rl_core.rollouts.generation import Placement
from rl_launch.commands.train import train, with_local_models
from rl_launch.doctor.family import worker_answers
from rl_launch.root_config import with_values
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan
from rl_launch.run_session.checkpoints.checkpoints import EXPORT, saved_checkpoints
from rl_launch.run_session.directory.branch import BranchPoint
from rl_launch.run_session.directory.run_folder import RunFolder, is_run
from rl_launch.run_session.rollouts.rollout_store import open_step, steps_in
from rl_launch.worker_envs.provision import provision
from rl_launch.worker_envs.spec import worker_env

_log = logging.getLogger(__name__)

FOLDER = "mismatch"
"""Folder in a run directory of the steps that are made for an examination."""

NUM_STEPS = 2
"""Number of these steps: the second one is sampled with weights that were sent after an update."""

NUM_SHOWN = 6
"""Number of causes that are shown."""

MAX_OLDER = 3
"""Maximum number of earlier checkpoints whose weights are tried."""

EXPLAINED = 0.9
"""Share of the gap that a cause closes, from which on no other engine is started to find a better one."""

ENGINE_CHANGES: Mapping[str, Any] = {
    "enforce_eager": True,
    "kv_cache_dtype": "auto",
    "quantization": None,
    "speculation": None,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "attn_implementation": "eager",
    "vllm_kwargs": {},
}
"""Settings of engines, by key, that leave something out which may compute otherwise."""

_EXAMINE = """
import json, sys
from rl_core import resolve
for found in resolve("rl_algos.torch.mismatch_changes:examine")(sys.argv[1]):
    print("\\nfound " + json.dumps(found), flush=True)
"""

_SCORE = """
import asyncio, json, pickle, sys
from pathlib import Path
import numpy as np
from rl_core import resolve

async def scores(worker, arguments, rows):
    engine = resolve(worker)(*arguments)
    await engine.start()
    try:
        return [(await engine.score(row)).tolist() for row in rows]
    finally:
        await engine.close()

if __name__ == "__main__":
    worker, arguments, rows = pickle.loads(Path(sys.argv[1]).read_bytes())
    print("\\nscores " + json.dumps(asyncio.run(scores(worker, arguments, rows))), flush=True)
"""


@dataclass(frozen=True)
class MismatchReport:
    """The mismatch of a run, with its causes.

    Args:
        run: Run directory whose rollouts were examined.
        step: Step of these rollouts.
        weight_version: Weights that sampled them.
        num_rows: Number of rows.
        gap: Differences between policy and generator.
        is_large: True if the gap is larger than the rounding of kernels.
        findings: Causes by the share of the gap that they close, most first.
        num_tried: Number of changes that were tried.
        remarks: Observations in addition, one sentence each.
    """

    run: str
    step: int
    weight_version: int
    num_rows: int
    gap: MismatchGap
    is_large: bool
    findings: tuple[MismatchFinding, ...]
    num_tried: int
    remarks: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return `schema` (1) and the fields, with the cause as `first`."""
        first = self.first
        return {"schema": 1, **asdict(self), "side": self.gap.side, "first": first and asdict(first)}

    @property
    def first(self) -> MismatchFinding | None:
        """The cause; None if there is no gap, or none of the changes closes enough of it."""
        found = self.findings[0] if self.findings else None
        return found if self.is_large and found is not None and found.closed >= MIN_CLOSED else None


@dataclass(frozen=True)
class SampledStep:
    """Rows of a step, and the folders of weights of its run.

    Args:
        run: The run.
        step: The step.
        version: Version of the weights that sampled the rows.
        rows: The rows.
        model: Folder of these weights.
        older: Weights before.
    """

    run: RunFolder
    step: int
    version: int
    rows: MismatchRows
    model: str
    older: tuple[OlderWeights, ...]


def examine_mismatch(source: str, overrides: Sequence[str] = ()) -> MismatchReport:
    """Find the causes of the mismatch of a run, or of a recipe's first steps.

    The rollouts are those that the run has recorded, of the newest step whose weights it still has. If there are none,
    and for a recipe, two steps are made and recorded.

    Args:
        source: A run directory, a recipe's name or a YAML file.
        overrides: Keys to set.

    Raises:
        ConfigError: If the config has problems, or the run samples nothing.
        RLError: If the steps, or the examination, fail.
    """
    path = Path(source).expanduser()
    plan = read_plan(path if is_run(path) else source, overrides)
    if not plan.plugin.generates:
        raise ConfigError(
            f"{source} is a run of {plan.plugin.name}, which samples nothing, so there is no mismatch to examine"
        )
    if plan.config.policy.vision.enabled:
        raise ConfigError(
            "rl doctor mismatch cannot examine rows with images; set policy.vision.enabled=false to try text"
        )
    if not is_run(path):
        with tempfile.TemporaryDirectory(prefix="rl-mismatch-") as temporary:
            return _report(_made(source, overrides, Path(temporary) / "run", None), plan)
    run = RunFolder(path.absolute())
    recorded = None if overrides else sampled_step(run, _base(plan))
    if recorded is None:
        saved = [step for step, _ in saved_checkpoints(run.path / "checkpoints")]
        number = 1
        while (folder := run.path / FOLDER / str(number)).exists():
            number += 1
        _log.info(
            "making %d steps in %s, because the run has no recorded rollouts with their weights", NUM_STEPS, folder
        )
        point = BranchPoint.parse(f"{run.path}:{saved[-1]}") if saved else None
        recorded = _made(str(path), overrides, folder, point)
    return _report(recorded, plan)


def _made(source: str, overrides: Sequence[str], folder: Path, point: BranchPoint | None) -> SampledStep:
    """Make steps that are recorded, in a folder of their own."""
    plan = read_plan(source, overrides)
    section = next(key for key, each in vars(plan.config).items() if hasattr(each, "num_prompts_per_step"))
    if getattr(getattr(plan.config, section), "serves_users", False):
        raise ConfigError(
            f"{source} learns from users, so no steps can be made for an examination. Examine a run of it that has "
            "recorded rollouts of its newest checkpoint (logger.token_level)"
        )
    last = (0 if point is None else point.name.step or 0) + NUM_STEPS
    fixed = [
        f"run_dir={folder}",
        f"{section}.max_num_steps={last}",
        f"{section}.val_period=0",
        f"{section}.val_at_start=false",
        f"{section}.val_at_end=false",
        "logger.token_level=all",
        "logger.rollout_period=1",
        "checkpointing.enabled=true",
        "checkpointing.save_period=1",
        "checkpointing.keep_top_k=null",
        "checkpointing.metric_name=null",
        "checkpointing.export_period=null",
        "checkpointing.async_save=false",
        "callbacks=[]",
    ]
    if hasattr(plan.config, "loss_fn") and hasattr(plan.config.loss_fn, "force_on_policy_ratio"):
        # The policy then scores the rows before it learns from them.
        fixed.append("loss_fn.force_on_policy_ratio=false")
    plan = read_plan(source, [*overrides, *fixed])
    train(plan, run_dir=folder, title="mismatch", branch_point=point)
    found = sampled_step(RunFolder(folder), _base(plan))
    if found is None:
        raise RLError(f"{folder} has no rollouts that can be examined: no rollout of its steps has sampled tokens")
    return found


def _base(plan: RunPlan) -> str:
    return with_local_models(plan).config.policy.model_name


def sampled_step(run: RunFolder, base: str) -> SampledStep | None:
    """Return the rows of the newest step that are recorded together with the weights that sampled them; None if there
    are none.

    Args:
        run: The run.
        base: Folder of the weights that it began with.
    """
    import pyarrow.parquet as pq

    folders = {
        step + 1: path / EXPORT
        for step, path in saved_checkpoints(run.path / "checkpoints")
        if (path / EXPORT).is_dir()
    }
    weights = {version: str(folder) for version, folder in folders.items()}
    weights.setdefault(1, base)
    folder = run.path / "rollouts"
    for step in reversed(steps_in(folder, "tokens")):
        try:
            with open_step(folder, step, "tokens") as file:
                # A row group has many more tokens than are examined.
                table = pq.ParquetFile(file).read_row_group(0).to_pydict()
        except (OSError, ValueError, BadZipFile) as error:
            _log.warning("the tokens of step %d cannot be read, so an earlier step is examined: %s", step, error)
            continue
        prompts: dict[int, Sequence[Mapping[str, Any]]] = {}
        if step in steps_in(folder):
            prompts = {number: record.get("prompt") or () for number, record in enumerate(run.rollouts(step))}
        sampled = [each for each in table["weight_version"] if each is not None]
        for version in sorted(set(sampled), reverse=True):
            if version in weights and (rows := _rows_of(table, version, prompts)) is not None:
                before = sorted((each for each in weights if each < version), reverse=True)
                older = [
                    OlderWeights(f"the weights before step {each}", weights[each], is_base=weights[each] == base)
                    for each in before[:MAX_OLDER]
                ]
                if version > 1 and not any(each.is_base for each in older):
                    older.append(OlderWeights("the weights of policy.model_name", base, is_base=True))
                return SampledStep(run, step, version, rows, weights[version], tuple(older))
    return None


def _rows_of(
    table: Mapping[str, Sequence[Any]], version: int, prompts: Mapping[int, Sequence[Mapping[str, Any]]]
) -> MismatchRows | None:
    """Return the rows of a table of tokens whose tokens one version sampled."""
    key = np.stack([np.asarray(table[name]) for name in ("rollout", "segment")], 1)
    starts = np.append(np.flatnonzero(np.append(True, (np.diff(key, axis=0) != 0).any(1))), len(key))
    columns: dict[str, list[Any]] = {"tokens": [], "mask": [], "generation": [], "policy": []}
    shown = []
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        own = {name: table[name][start:end] for name in ("weight_version", "generation_logprob", "logprob")}
        mask = np.array([each is not None for each in own["generation_logprob"]]) & np.array(
            table["loss_mask"][start:end], dtype=bool
        )
        mask[0] = False
        versions = {each for each, is_sampled in zip(own["weight_version"], mask, strict=True) if is_sampled}
        if versions != {version}:
            continue
        columns["tokens"].append(np.asarray(table["token_id"][start:end], dtype=np.int32))
        columns["mask"].append(mask.astype(np.uint8))
        # None becomes NaN.
        columns["generation"].append(np.array(own["generation_logprob"], dtype=np.float32))
        columns["policy"].append(np.array(own["logprob"], dtype=np.float32))
        shown.append(prompts.get(int(key[start, 0]), ()))
    if not columns["tokens"]:
        return None
    made = {name: Ragged.from_rows(rows) for name, rows in columns.items()}
    is_known = np.isfinite(made["policy"].values[made["mask"].values > 0]).all()
    return MismatchRows(
        made["tokens"], made["mask"], made["generation"], made["policy"] if is_known else None, tuple(shown)
    )


def _report(sampled: SampledStep, plan: RunPlan) -> MismatchReport:
    """Examine rows, in processes of the worker's environments."""
    config, device = plan.config, plan.device
    policy = config.policy
    generation = policy.generation
    rows = sampled.rows.first()
    engine: BackendPlugin = plugin(GENERATORS, "hf")
    spec = worker_env(engine.requirement, device.extras, also=(LOSSES,))
    python = provision([spec], config.cluster.worker_envs)[spec]
    attempts: list[TriedChange] = []
    with tempfile.TemporaryDirectory(prefix="rl-mismatch-") as folder:
        path = Path(folder) / "rows.npz"
        rows.write(path)
        case = MismatchCase(
            model=sampled.model,
            rows=str(path),
            precision=policy.precision,
            overrides=policy.hf_config_overrides,
            temperature=generation.temperature,
            top_k=generation.top_k or 0,
            top_p=generation.top_p,
            min_p=generation.min_p,
            older=sampled.older,
            has_adapters=policy.lora_cfg.enabled,
            tokenizer=policy.tokenizer.model_dump(mode="json"),
            device="cuda" if device.runs_on_gpus else "cpu",
        )
        found: dict[str, Any] = {}
        answers = worker_answers(python, _EXAMINE, case.as_json(), what="the examination", on_gpus=device.runs_on_gpus)
        for kind, answer in answers:
            if kind == "found":
                given = json.loads(answer)
                if "attempt" in given:
                    attempts.append(TriedChange(**given["attempt"]))
                found |= given
        gap = MismatchGap(**found["gap"])
        is_large = gap.mean > MIN_GAP[policy.precision]
        findings = ranked(gap, attempts)
        remarks: list[str] = []
        is_explained = bool(findings) and findings[0].closed >= EXPLAINED
        if is_large and not is_explained and gap.side != "policy":
            expected = np.array(found["raw"])
            tried, remark = _engines(plan, sampled, rows, gap, expected, np.array(found["base"]), Path(folder))
            attempts += tried
            remarks += [remark] if remark else []
            findings = ranked(gap, attempts)
    return MismatchReport(
        str(sampled.run.path),
        sampled.step,
        sampled.version,
        len(rows.tokens),
        gap,
        is_large,
        findings,
        len(attempts),
        tuple(remarks),
    )


def _engines(
    plan: RunPlan,
    sampled: SampledStep,
    rows: MismatchRows,
    gap: MismatchGap,
    raw: np.ndarray,
    base: np.ndarray,
    folder: Path,
) -> tuple[list[TriedChange], str]:
    """Score rows with the engine as it is configured and, if it is off as well, with one setting changed at a time.

    Args:
        plan: Plan of the run.
        sampled: The rows with their weights.
        rows: The rows that are examined.
        gap: Their gap.
        raw: Float64 `[sampled]`, logprobs of `transformers` at temperature 1 over all tokens.
        base: The same with the configured sampling.
        folder: Folder for files.

    Returns:
        What the changes leave of the gap, and a remark on the engine; empty if there is none.
    """
    backend = plan.backends.generation
    assert backend is not None, "the run generates"
    device = plan.device
    spec = worker_env(backend.plugin.requirement, device.extras, also=(LOSSES,))
    python = provision([spec], plan.config.cluster.worker_envs)[spec]
    mask = rows.mask.values > 0

    def scores(settings: Any) -> np.ndarray:
        model = with_values(backend.model, {"model_name": sampled.model})
        gpus = (device.visible() or ("0",))[: backend.plugin.ranks(settings)] if device.runs_on_gpus else ()
        arguments = (backend.config, settings, model, Placement(device.name, gpus))
        path = folder / "job"
        path.write_bytes(pickle.dumps((backend.plugin.worker, arguments, [*rows.tokens])))
        answers = worker_answers(
            python, _SCORE, str(path), what=f"the engine {backend.plugin.name}", on_gpus=device.runs_on_gpus
        )
        found = [json.loads(answer) for kind, answer in answers if kind == "scores"]
        return np.concatenate([np.asarray(row) for row in found[0]])[mask]

    try:
        own = scores(backend.backend)
    except RLError as error:
        _log.debug("the engine could not be started alone", exc_info=error)
        reason = str(error).strip().splitlines()[-1]
        return [], f"the engine could not score the rows alone, so its settings were not tried: {reason}"
    off = float(np.abs(own - raw).mean())
    if off < MIN_CLOSED * gap.mean:
        return [], (
            f"a new {backend.plugin.name} engine that loads the same weights from files is right (it differs from "
            f"transformers by {off:.2g}): the fault arises while the run samples, by the sampler, the weight sync or "
            "the cache"
        )
    attempts = []
    off_now = rows.generation.values[mask] - (base if rows.policy is None else rows.policy.values[mask])
    for key, value in ENGINE_CHANGES.items():
        if key not in type(backend.backend).model_fields:
            continue
        current = getattr(backend.backend, key)
        # An unset boolean is true on the CPU.
        if current == value or (current is None and not device.runs_on_gpus):
            continue
        try:
            effect = scores(with_values(backend.backend, {key: value})) - own
        except RLError as error:
            _log.warning("%s=%s could not be tried: %s", key, value, error)
            continue
        left = float(np.abs(off_now + effect).mean())
        attempts.append(
            TriedChange("engine", f"policy.generation.{backend.plugin.key}.{key}={value}", "generator", left)
        )
    return attempts, f"a new {backend.plugin.name} engine is off by {off:.2g} as well: its model or settings differ"


def described(report: MismatchReport) -> Iterator[str]:
    """Yield the lines of a report."""
    gap = report.gap
    yield (
        f"step {report.step}, weights {report.weight_version}: policy and generator differ by {gap.mean:.3g} nats on "
        f"average over {gap.num_tokens} tokens, at most by {gap.largest:.3g}, in {gap.rows:.0%} of {report.num_rows} "
        "rows"
    )
    if not report.is_large:
        yield "This is rounding: they compute the same."
        return
    policy = "not recorded" if gap.policy is None else f"{gap.policy:.2g}"
    yield f"from transformers with the same weights and settings: generator {gap.generator:.2g}, policy {policy}"
    yield from report.remarks
    yield f"{'closes':>6}  cause ({report.num_tried} changes were tried)"
    for each in report.findings[:NUM_SHOWN]:
        yield f"{max(each.closed, 0.0):>6.0%}  {each.title}: {each.detail}"
    first = report.first
    if first is None:
        yield f"No change closes {MIN_CLOSED:.0%} of the gap. Compare the models and the versions of both sides."
    else:
        # All other changes show what a side does; one of the engine takes its fault away.
        found = "The gap closes with" if first.cause == "engine" else f"The {first.side} computes with"
        yield f"{found} {first.detail}. {first.remedy}"
