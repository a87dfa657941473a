"""How far the tiny recipe of each algorithm moves the metric that it is there to move, beside the noise between seeds.

    python benchmarks/learning.py [--only NAME ...] [--seeds 1 2 3] [--jobs 2] [--png FILE]

Every run is what `rl train` makes, on the CPU, with one thread for each process, so that runs on different cores do not
wait for one another; one Ray serves all runs of a job. Algorithms that start from a model that answers some sums get
one that SFT has warmed up, made once in the same folder; their start is what that model scores. It is also the teacher
of distillation. Runs are kept in `--folder`: a finished one is not made again, an interrupted one resumes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measurement import surroundings, table
from pictures import write_captions, write_preferences

import rl_launch
from rl_core.errors import RLError
from rl_launch.cluster.device import resolve_device
from rl_launch.cluster.virtual_cluster import VirtualCluster
from rl_launch.run_config.reading import read_plan
from rl_launch.run_session.directory.run_folder import RunFolder, is_run

SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Aim:
    """Aim of a metric in the mean over seeds, in words and as a test of its start and its end."""

    text: str
    is_met: Callable[[float, float], bool]


def rises_by(points: float) -> Aim:
    """Return the aim to end at least this much above the start."""
    return Aim(f"+{points:g}", lambda start, end: end >= start + points)


def ends_above(bound: float) -> Aim:
    """Return the aim to end above a bound."""
    return Aim(f"above {bound:g}", lambda start, end: end > bound)


def falls_to(share: float) -> Aim:
    """Return the aim to end at this share of the start or below."""
    return Aim(f"to {share:g} of the start", lambda start, end: end <= share * start)


@dataclass(frozen=True)
class Measure:
    """A metric, as `metrics.jsonl` spells it, and its aim from the first value to the last."""

    metric: str
    aim: Aim


Beside = Callable[[Path], AbstractContextManager[None]]
"""Work that the process of a run does during the run, whose folder it is given."""


@dataclass(frozen=True)
class Case:
    """A recipe with its changed settings, the section that holds its seed, and the measured metrics."""

    recipe: str
    section: str
    measures: tuple[Measure, ...]
    settings: tuple[str, ...] = ()
    warm_key: str = "policy.model_name"
    """Key that is given the warmed-up model; empty if none is."""
    beside: Beside = nullcontext
    data: Callable[[Path], Sequence[str]] | None = None
    """Writes files of data to a folder, and returns the keys that name them."""
    baseline: str = ""
    """Case that the change is shown beside, in the table and in the picture; empty if there is none."""

    def settings_of(self, seed: int, warm: Path, files: Path) -> list[str]:
        """Return the keys of the run with a seed.

        Args:
            seed: The seed.
            warm: Model that SFT has warmed up.
            files: Folder for the case's files of data.
        """
        start = [f"{self.warm_key}={warm}"] if self.warm_key else []
        data: Sequence[str] = ()
        if self.data is not None:
            files.mkdir(parents=True, exist_ok=True)
            data = self.data(files)
        return [*start, *ON_CPU, *data, *self.settings, f"{self.section}.seed={seed}"]


ON_CPU = (
    "cluster.device=cpu",
    "cluster.cpu_ranks_per_node=1",
    # A run takes all cores otherwise, and two runs at once then wait for each other's threads.
    "cluster.env_vars={OMP_NUM_THREADS: '1', MKL_NUM_THREADS: '1'}",
    "logger.tensorboard_enabled=false",
)

TWO_RANKS = "cluster.cpu_ranks_per_node=2"
"""As the recipe has it: most of a step is the training's."""

MOST_RANKS = 3
"""Of any case."""

WARM_UP = ("sft.stop_at_validation_loss=0.8",)
"""Leaves more to learn from rewards than the recipe does."""

UNCHOSEN = "checkpointing.metric_name=null"
GENERATION = (
    "policy.generation.backend=hf",  # starts sooner than vLLM, and is as quick for such completions
    "policy.generation.hf_cfg.max_batch_size=256",
    "checkpointing.save_period=100",  # at the end alone
    UNCHOSEN,
)
TEACHER = "teacher={model_name: tiny-arithmetic-sft, precision: float32, logprob_batch_size: 256}"
SEVERAL_REWARDS = f"{Path(__file__).with_name('several_rewards.py')}:score"
FEW_PROMPTS = "data.train.settings.num_rows=640"
"""Each comes five times, so that a curriculum can choose."""
STALE = (
    "cluster.cpu_ranks_per_node=2",  # one for the policy, one for generation
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.max_trajectory_age_steps=8",
    "loss_fn.ratio_denominator=generation",
)
"""Rollouts of weights that are up to eight steps old, and a ratio to these weights."""


def on_policy(recipe: str, *settings: str, section: str = "grpo", baseline: str = "") -> Case:
    """Return a recipe that learns from rewards: greedy accuracy on held-out sums, starting from the warmed-up model."""
    keys = ("val_at_start=true", "val_at_end=true", "val_period=12", "max_num_steps=48")
    measures = (Measure("val/accuracy", rises_by(0.2)),)
    given = (*GENERATION, *(f"{section}.{key}" for key in keys), *settings)
    return Case(recipe, section, measures, given, baseline=baseline)


def from_nothing(recipe: str, *settings: str, baseline: str = "") -> Case:
    """Return a recipe of sums from a model that has learned nothing: greedy accuracy on held-out sums."""
    case = on_policy(recipe, "policy.model_name=tiny-arithmetic", *settings, baseline=baseline)
    return replace(case, warm_key="")


def in_environment(recipe: str, *settings: str, baseline: str = "") -> Case:
    """Return a recipe of an environment, from the model that its own warm-up makes: reward on held-out rows, with
    vLLM."""
    validates = ("grpo.val_at_start=true", "grpo.val_at_end=true", UNCHOSEN)
    measures = (Measure("val/accuracy", rises_by(0.3)),)
    return Case(recipe, "grpo", measures, (*validates, *settings), warm_key="", baseline=baseline)


def of_pictures(recipe: str) -> Case:
    """Return a recipe of GRPO about pictures: mean reward of the first step and of the last, with vLLM."""
    return Case(
        recipe,
        "grpo",
        (Measure("reward/mean", rises_by(0.3)),),
        ("grpo.val_at_end=true", UNCHOSEN, TWO_RANKS),
        warm_key="",
    )


def estimator(value: str, *settings: str, baseline: str = "") -> Case:
    """Return GRPO with another advantage estimator."""
    return on_policy("grpo-arithmetic", f"grpo.adv_estimator={value}", *settings, baseline=baseline)


def preference(loss: str, *settings: str) -> Case:
    """Return DPO with another loss: accuracy on held-out pairs, starting from one half."""
    keys = ("dpo.val_at_end=true", f"dpo.loss={loss}", *settings)
    return Case("dpo-tiny", "dpo", (Measure("val/accuracy", rises_by(0.2)),), keys, baseline="dpo")


def surrogate(value: str, *settings: str, baseline: str = "") -> Case:
    """Return GRPO with another policy term."""
    return on_policy("grpo-arithmetic", f"loss_fn.surrogate={value}", *settings, baseline=baseline)


def distillation(recipe: str, *settings: str, baseline: str = "") -> Case:
    """Return a recipe whose student learns from the warmed-up model: both KL divergences, on held-out sums."""
    measures = tuple(Measure(f"val/{name}", falls_to(0.1)) for name in ("forward_kl", "reverse_kl"))
    validates = ("distillation.val_at_start=true", "distillation.val_at_end=true")
    keys = (*validates, *settings)
    return Case(recipe, "distillation", measures, keys, warm_key="teacher.model_name", baseline=baseline)


CASES = {
    "sft": Case(
        "sft-arithmetic",
        "sft",
        (Measure("val/loss", falls_to(0.3)),),
        ("sft.val_at_start=true", "sft.stop_at_validation_loss=null", "sft.max_num_steps=150"),
        warm_key="",
    ),
    "grpo": on_policy("grpo-arithmetic"),
    "drgrpo": on_policy("drgrpo-tiny"),
    "dapo": on_policy("dapo-tiny"),
    "gspo": on_policy("gspo-tiny"),
    "cispo": on_policy("cispo-tiny"),
    "rloo": on_policy("rloo-tiny"),
    "reinforce++": on_policy("reinforce-pp-tiny"),
    "sapo": on_policy("sapo-tiny"),
    "reinforce": estimator("reinforce", "loss_fn.surrogate=reinforce"),
    "reinforce++-baseline": estimator("reinforce_plus_plus_baseline"),
    "opo": estimator("opo"),
    "remax": estimator("remax"),
    "pass-at-k": estimator("{name: pass_at_k, k: 4}"),
    "gdpo": estimator("gdpo", f"data.train.env_name={SEVERAL_REWARDS}"),
    "token-baseline": estimator("optimal_token_baseline"),
    # the teacher is the model that the recipe begins with, which has had more SFT than the warmed-up one
    "teacher": on_policy("grpo-arithmetic", TEACHER, baseline="grpo"),
    "teacher-only": on_policy("grpo-arithmetic", TEACHER, "grpo.distillation.reward_weight=0", baseline="grpo"),
    "gmpo": surrogate(
        "gmpo",
        "loss_fn.aggregation=sequence-mean",
        "loss_fn.surrogate.clip_low=0.33",
        "loss_fn.surrogate.clip_high=0.49",
    ),
    "dppo-tv": surrogate("dppo-tv"),
    "dppo-kl": surrogate("dppo-kl"),
    # the paper's share leaves out no token of batches as small as these
    "clip-cov": surrogate("{name: clip-cov, share: 0.02}"),
    "kl-cov": surrogate("kl-cov"),
    "raft": estimator("raft", baseline="grpo"),
    "topr": surrogate("topr", baseline="grpo"),
    "dro": surrogate("dro", baseline="grpo"),
    "stale": on_policy("grpo-arithmetic", *STALE, baseline="grpo"),
    "m2po": on_policy("grpo-arithmetic", *STALE, "loss_fn.filters.max_second_moment=0.04", baseline="stale"),
    "tpo": estimator("tpo", "loss_fn.aggregation=sequence-mean", baseline="grpo"),
    "luffy": on_policy("luffy-tiny", baseline="grpo"),
    "chord": on_policy("chord-tiny", baseline="grpo"),
    # an untrained model answers nothing right, so that rewards alone teach nothing
    "untrained": from_nothing("grpo-arithmetic"),
    "luffy-untrained": from_nothing("luffy-tiny", baseline="untrained"),
    "chord-untrained": from_nothing("chord-tiny", "loss_fn.demonstrations.by_probability=false", baseline="untrained"),
    "deepscaler": on_policy("deepscaler-tiny", baseline="grpo"),
    "few-prompts": on_policy("grpo-arithmetic", FEW_PROMPTS, baseline="grpo"),
    "curriculum": on_policy(
        "grpo-arithmetic",
        FEW_PROMPTS,
        "grpo.curriculum.enabled=true",
        "grpo.curriculum.by=prompt",
        baseline="few-prompts",
    ),
    "multi-env": on_policy("grpo-multi-env-tiny"),
    "sliding-puzzle": in_environment("grpo-sliding-puzzle-tiny"),
    # sampled: the warmed-up model calls in about half of its answers, and most of its greedy ones may call already
    "tools": in_environment("grpo-tools-tiny", "policy.generation.val_temperature=1"),
    "echo": in_environment(
        "grpo-tools-tiny",
        "policy.generation.val_temperature=1",
        "loss_fn.observation_nll_weight=0.01",
        baseline="tools",
    ),
    "search": in_environment("search-r1-tiny", "policy.generation.val_temperature=1", "policy.generation.backend=hf"),
    "code": in_environment("grpo-code-tiny"),
    # as it is for a user: mean reward of the first step and of the last
    "agent": Case(
        "grpo-agent-tiny",
        "grpo",
        (Measure("reward/mean", rises_by(0.3)),),
        ("grpo.val_period=0", UNCHOSEN),
        warm_key="",
    ),
    # rewards are scores of a reward model that rm-tiny has trained, and the accuracy is of the grader
    "judge": replace(
        on_policy("grpo-judge-tiny", baseline="grpo"),
        measures=(Measure("val/accuracy", rises_by(0.2)), Measure("reward/mean", rises_by(0.5))),
    ),
    "ppo": on_policy("ppo-tiny", section="ppo"),
    "dpo": Case(
        "dpo-tiny",
        "dpo",
        (
            Measure("val/preference_loss", falls_to(0.7)),  # ln 2 at the start
            Measure("val/accuracy", rises_by(0.2)),
            Measure("val/margin", rises_by(0.5)),
        ),
        ("dpo.val_at_end=true",),
    ),
    **{loss: preference(loss) for loss in ("ipo", "hinge", "robust-dpo", "kto")},
    # without a reference, the accuracy is of the likelihoods and begins with what SFT has taught
    **{
        loss: replace(preference(loss), measures=(Measure("val/accuracy", ends_above(0.9)),))
        for loss in ("simpo", "cpo", "orpo")
    },
    "exo": preference("exo"),
    "nca": preference("nca"),
    "bco": preference("bco"),
    "sppo": preference("sppo"),
    "aot": preference("aot"),
    "aot-unpaired": preference("aot-unpaired"),
    "apo-zero": preference("apo-zero"),
    "apo-down": preference("apo-down"),
    # with its own tau, 0.05, the loss increases with the margin where policy and reference are equal
    "discopop": preference("{name: discopop, tau: 1.0}"),
    "f-divergence": preference("dpo", "dpo.f_divergence=js_divergence"),
    "ld-dpo": preference("dpo", "dpo.ld_alpha=0.5"),
    "wpo": preference("dpo", "dpo.weigh_by_policy=true"),
    "mpo": preference(
        "dpo", "dpo.preference_loss_weight=0.8", "dpo.added_losses={bco: {weight: 0.2}}", "dpo.sft_loss_weight=1"
    ),
    "online-dpo": on_policy("online-dpo-tiny", section="online_dpo", baseline="grpo"),
    "best-of-n": on_policy("best-of-n-tiny", section="online_dpo", baseline="grpo"),
    "rm": Case(
        "rm-tiny",
        "rm",
        (Measure("val/accuracy", ends_above(0.9)), Measure("val/margin", rises_by(1))),
        ("rm.val_at_end=true",),
    ),
    "distillation": distillation("distill-tiny", *GENERATION),
    "given-responses": distillation(
        "distill-tiny", *GENERATION, "distillation.on_policy_share=0.5", baseline="distillation"
    ),
    "self-teacher": Case(
        "self-distill-tiny",
        "distillation",
        (Measure("val/accuracy", rises_by(0.2)),),
        (*GENERATION, "distillation.val_at_start=true", "distillation.val_at_end=true"),
        warm_key="",
    ),
    "offline-distillation": distillation("distill-offline-tiny"),
    "vision-count": of_pictures("grpo-clevr-count-tiny"),
    "vision-geometry": of_pictures("grpo-vlm-geometry-tiny"),
    "vision-caption": Case(
        "sft-vlm-tiny",
        "sft",
        (Measure("val/loss", falls_to(0.1)),),
        (
            "sft.val_at_start=true",
            "sft.val_at_end=true",
            "sft.max_num_steps=300",
            "policy.max_total_sequence_length=80",
        ),
        warm_key="",
        data=write_captions,
    ),
    "vision-preference": Case(
        "dpo-tiny",
        "dpo",
        (Measure("val/accuracy", rises_by(0.2)), Measure("val/margin", rises_by(0.5))),
        (
            "dpo.val_at_end=true",
            "policy.model_name=tiny-vision-sft",
            "policy.vision={enabled: true, tower: trained, projector: trained}",
        ),
        warm_key="",
        data=write_preferences,
    ),
}


@dataclass(frozen=True)
class Curve:
    """A metric of one run: steps and values, the first and the last of which count."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, run: RunFolder, metric: str) -> Curve:
        rows = [(row["step"], row[metric]) for row in run.metrics() if row.get(metric) is not None]
        if not rows:
            sys.exit(f"{run.path} has no metric {metric!r}")
        steps, values = zip(*rows, strict=True)
        return cls(steps, values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=" ".join(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N", help="(1 2 3)")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"), help="of the runs (%(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="(%(default)s)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw every run as well; needs matplotlib")
    parser.add_argument("--table", action="store_true", help="start nothing: show the runs that are finished")
    parser.add_argument("--quick", action="store_true", help="see that it runs: two steps of SFT")
    chosen = parser.parse_args()
    folder = chosen.folder.absolute()
    cases = {name: CASES[name] for name in chosen.only}
    if chosen.quick:
        folder, chosen.seeds = folder / "quick", SEEDS[:1]
        cases = {"sft": Case("sft-arithmetic", "sft", CASES["sft"].measures, ("sft.max_num_steps=2",), warm_key="")}
    if not chosen.table:
        make_runs(cases, chosen.seeds, folder, num_jobs=1 if chosen.quick else chosen.jobs)
    beside = {case.baseline: CASES[case.baseline] for case in cases.values() if case.baseline}
    curves = {
        (name, measure.metric): [Curve.of(run, measure.metric) for run in finished_runs(folder, name, chosen.seeds)]
        for name, case in {**cases, **beside}.items()
        for measure in case.measures
    }
    print(f"{surroundings('rl-launch', 'rl-algos')}\n")
    print(table(HEAD, rows(cases, curves)))
    print(f"\n{table(('algorithm', 'metric', 'steps', 'values of each seed'), along(curves))}")
    if chosen.png is not None:
        draw(cases, curves, chosen.png)


@dataclass(frozen=True)
class Task:
    """A run to make: a recipe, keys that are set, its folder, and the work during it."""

    recipe: str
    settings: Sequence[str]
    run: Path
    beside: Beside = nullcontext


def make_runs(cases: Mapping[str, Case], seeds: Sequence[int], folder: Path, *, num_jobs: int) -> None:
    """Make all runs, a number of them at once; one that fails is reported, and the others are made."""
    folder.mkdir(parents=True, exist_ok=True)
    warm = folder / "warm"
    if any(case.warm_key for case in cases.values()) and not is_finished(warm):
        in_jobs([Task("sft-arithmetic", [*ON_CPU, *WARM_UP], warm)], 1)
        if not is_finished(warm):
            sys.exit("the model to start from does not exist")
    model = RunFolder(warm).checkpoints()[-1].path / "hf" if is_finished(warm) else warm
    tasks = [
        Task(
            case.recipe, case.settings_of(seed, model, folder / "data" / name), run_dir(folder, name, seed), case.beside
        )
        for seed in seeds  # so that each algorithm has one run soon
        for name, case in cases.items()
    ]
    in_jobs([task for task in tasks if not is_finished(task.run)], num_jobs)


def in_jobs(tasks: Sequence[Task], num_jobs: int) -> None:
    """Make runs in processes, each with a Ray of its own.

    Raises:
        SystemExit: if a signal ended one of them, after all have ended.
    """
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    jobs = [context.Process(target=make_each, args=(queue,)) for _ in range(min(num_jobs, len(tasks)))]
    for job in jobs:
        job.start()
    signal.signal(signal.SIGTERM, lambda *_: [job.terminate() for job in jobs])
    for task in [*tasks, *[None] * len(jobs)]:
        queue.put(task)
    for job in jobs:
        job.join()
    if any(job.exitcode for job in jobs):
        sys.exit("a job was told to end, or died; start again to continue")


def make_each(tasks: Any) -> None:
    """Make the runs of a queue until it gives None."""
    cluster = read_plan("sft-arithmetic", [*ON_CPU, f"cluster.cpu_ranks_per_node={MOST_RANKS}"]).config.cluster
    with VirtualCluster.of(cluster, resolve_device(cluster)):
        while (task := tasks.get()) is not None:
            make_run(task)


def make_run(task: Task) -> None:
    """Train in a folder, or continue there; a folder of another config is refused.

    Raises:
        SystemExit: If a signal ended the run, which resumes when the benchmark is started again.
    """
    try:
        with task.beside(task.run):
            result = rl_launch.train(task.recipe, [*task.settings, f"run_dir={task.run}"])
    except RLError as error:
        print(f"{task.run}: {error}\n", file=sys.stderr)
        return
    if not result.finished:
        sys.exit(f"{task.run} was told to end")


def run_dir(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name}-{seed}"


def is_finished(run: Path) -> bool:
    return is_run(run) and RunFolder(run).state().status == "finished"


def finished_runs(folder: Path, name: str, seeds: Sequence[int]) -> list[RunFolder]:
    """Return the finished runs of a case."""
    paths = [run_dir(folder, name, seed) for seed in seeds]
    return [RunFolder(path) for path in paths if is_finished(path)]


HEAD = (
    "algorithm", "metric", "runs", "start", "end", "change", "std over seeds", "change / std", "aim", "met", "baseline"
)  # fmt: skip

Curves = Mapping[tuple[str, str], Sequence[Curve]]


def rows(cases: Mapping[str, Case], curves: Curves) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table: means over seeds, and the deviation of the end next to the change."""
    for name, case in cases.items():
        for measure in case.measures:
            found = curves[name, measure.metric]
            base = curves.get((case.baseline, measure.metric), ())
            beside = f"{case.baseline} {figures(base, measure.aim)[2]}" if base else case.baseline
            yield (name, measure.metric, str(len(found)), *(figures(found, measure.aim) if found else [""] * 7), beside)


POINTS = 5
"""Steps of a curve that are shown, evenly spread over the run."""


def along(curves: Curves) -> Iterator[tuple[str, ...]]:
    """Yield a row for each metric that has runs: its steps, and its values in each run."""
    for (name, metric), found in curves.items():
        if found:
            last = min(len(curve.steps) for curve in found) - 1
            places = sorted({round(place * last / (POINTS - 1)) for place in range(POINTS)})
            steps = " ".join(str(found[0].steps[place]) for place in places)
            yield name, metric, steps, "; ".join(" ".join(f"{run.values[at]:.2f}" for at in places) for run in found)


def figures(found: Sequence[Curve], aim: Aim) -> list[str]:
    """Return the figures of runs: start, end, change, deviation of the end over seeds, their ratio, the aim and whether
    it is met."""
    start = statistics.fmean(curve.values[0] for curve in found)
    ends = [curve.values[-1] for curve in found]
    end = statistics.fmean(ends)
    noise = statistics.stdev(ends) if len(ends) > 1 else float("nan")
    ratio = f"{abs(end - start) / noise:.0f}" if noise > 0 else ""
    deviation = f"{noise:.3g}" if len(ends) > 1 else ""
    met = "yes" if aim.is_met(start, end) else "no"
    return [f"{start:.3g}", f"{end:.3g}", f"{end - start:+.3g}", deviation, ratio, aim.text, met]


def draw(cases: Mapping[str, Case], curves: Curves, path: Path) -> None:
    """Draw a small plot for each metric of a case that has runs: a line for each seed, the baseline's in grey."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [(name, each.metric) for name, case in cases.items() for each in case.measures if curves[name, each.metric]]
    columns = min(4, len(drawn))
    num_rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.4 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (name, metric) in enumerate(drawn, start=1):
        axes = figure.add_subplot(num_rows, columns, place)
        for curve in curves.get((cases[name].baseline, metric), ()):
            axes.plot(curve.steps, curve.values, linewidth=0.9, color="0.7", linestyle="--")
        for curve in curves[name, metric]:
            axes.plot(curve.steps, curve.values, linewidth=1.2)
        axes.set_title(f"{name}: {metric}", fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"\n{path}")


if __name__ == "__main__":
    main()
