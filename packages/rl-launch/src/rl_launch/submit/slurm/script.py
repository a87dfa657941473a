"""The batch script of a run: `job.sh`, with its header, its settings and its commands filled in."""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path

from rl_core.config import Problem, load, refusal
from rl_core.config.load import interpolate
from rl_launch.submit.slurm.config import SlurmConfig
from rl_launch.submit.target import JobRequest

_CACHES = ("RL_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")
"""Environment variables with the folders of downloads and worker environments."""


def outside_mounts(request: JobRequest[SlurmConfig]) -> dict[str, str]:
    """Return the environment variables of a job that name folders of caches which no mount of its container has; their
    values by name."""
    container = request.settings.container
    if container.image is None:
        return {}
    mounted = [request.run_dir, Path.home(), *(Path(mount.split(":")[:2][-1]) for mount in container.mounts)]
    return {
        name: value
        for name, value in request.settings.env_vars.items()
        if name in _CACHES and not any(map(Path(value).is_relative_to, mounted))
    }


_REFERENCE = re.compile(r"(?<!\\)(\$\{oc\.env:\w+(?:,[^{}]*)?\})")
_NAME = re.compile(r"(?<=:)\w+")
_UNSET = "_RL_NO_SUCH_VARIABLE"
_NOT_SET = "is not set in this job. Submit with --export=ALL, or set it in slurm.setup instead of slurm.env_vars"
_GRES = "--gres="
_STEP = "srun --overlap --whole"
_NUM_NAME_CHARACTERS = 24

CONTINUATIONS: Mapping[str, str] = {
    "requeue": """\
continue_later() { scontrol requeue "$SLURM_JOB_ID"; }
end_chain() { :; }""",
    "array": """\
# The array's next task continues the run. There is none once the run is finished, or has failed.
continue_later() { :; }
end_chain() { scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"; }""",
    "dependency": """\
# The next job of this name continues the run. There is none once the run is finished, or has failed.
continue_later() { :; }
end_chain() { scancel --state=PENDING --name="$SLURM_JOB_NAME" --user="$(id -un)"; }""",
}
"""How an attempt is followed by another, and how that is prevented."""

LIMIT_KEY = "checkpointing.checkpoint_must_save_by"
REPLACEMENT_KEY = "cluster.replacement_timeout_s"
"""Keys of the run's config that the script sets, unless the user does."""

OF_SERVER = "tinker."
"""Beginning of the keys that only a server reads."""

REPLACEMENT_S = 30
"""Time for devices of a lost process to become free again. A job gets no node in place of a lost one."""

_LIMIT = """\
# the time that the job has left, as DD:HH:MM:SS
limit=''
if end_time=$(date -d "$(job_field EndTime)" +%s 2> /dev/null); then
    left=$((end_time - $(date +%s) - save_margin_s))
    ((left > 0)) || left=1
    limit=$((left / 86400)):$((left / 3600 % 24)):$((left / 60 % 60)):$((left % 60))
fi"""

_PREFLIGHT = """\
# Look at the nodes and their network.
"${on_first[@]}" bash -c "$(code_of run_driver)" run_driver \\
    @DOCTOR@ \\
    > "$logs/doctor.log" 2>&1 &
driver=$!
while is_running "$driver"; do pause; done
wait "$driver"
status=$?
driver=''
check_start "$head"
grep -e '^missing' -e '^warning' -e '^error' "$logs/doctor.log"
((status == 0)) || end 1 "the nodes are not fit for the run. See $logs/doctor.log"
"""


def _in_container(request: JobRequest[SlurmConfig]) -> tuple[list[str], list[str]]:
    """Return how the commands of a job are run in its container, if it has one: options of srun, because of which each
    command needs its own step, and words before the command."""
    container, recipe = request.settings.container, Path(request.recipe)
    # bash reads the mounts between double quotes
    own = dict.fromkeys(map(str, [request.run_dir, *([recipe.parent] if recipe.is_absolute() else [])]))
    given = [mount if ":" in mount else f"{mount}:{mount}" for mount in container.mounts]
    escaped = [re.sub(r'([\\"$`])', r"\\\1", each) for each in (*(f"{path}:{path}" for path in own), *given)]
    mounts = ",".join([*escaped[: len(own)], "$scratch:$scratch", *escaped[len(own) :]])
    image, options = shlex.quote(str(container.image)), [*map(shlex.quote, container.options)]
    match container.runtime:
        case "pyxis":
            # without this option a variable of the image would be kept instead
            names = ",".join(request.settings.env_vars)
            chosen = [f"--container-env={names}"] if names else []
            return [f"--container-image={image}", f'--container-mounts="{mounts}"', *chosen, *options], []
        case "apptainer":
            gpus = ["--nv"] if request.device.has_gpus and not request.device.is_logical else []
            return [], ["apptainer exec", *gpus, f'--bind "{mounts}"', *options, image]
        case _:
            return [], []


def render(request: JobRequest[SlurmConfig]) -> str:
    """Return the batch script of a run."""
    own_limit = request.is_written(LIMIT_KEY) or not request.trains
    header = [
        f"# {'Trains' if request.trains else 'Serves'} {request.run_dir}, in as many attempts as it takes.",
        "# Written by `rl submit slurm`; jobs/ in the run directory has the logs of each attempt.",
        *(f"#SBATCH {option}" for option in _sbatch_options(request)),
    ]
    of_run = (each for each in request.overrides if not each.startswith(OF_SERVER))
    doctor = shlex.join(("rl", "doctor", "--cluster", request.recipe, *of_run, f"run_dir={request.run_dir}"))
    preflight = _PREFLIGHT.replace("@DOCTOR@", doctor).rstrip() if request.settings.preflight else ""
    filled = {
        "HEADER": "\n".join(header),
        "SETTINGS": "\n".join(_settings(request)),
        "COMMANDS": _commands(request),
        "CONTINUATION": CONTINUATIONS[request.settings.continuation],
        "PREFLIGHT": preflight,
        "LIMIT": "" if own_limit else _LIMIT,
        "TRAIN": _train(request, own_limit=own_limit),
    }
    script = files(__package__).joinpath("job.sh").read_text(encoding="utf-8")
    for name, text in filled.items():
        script = script.replace(f"@{name}@\n", f"{text}\n" if text else "").replace(f"@{name}@", text)
    return re.sub(r"\n{3,}", "\n\n", script)


def job_name(request: JobRequest[SlurmConfig]) -> str:
    """Return the name of the jobs of a run, which no other run has."""
    readable = re.sub(r"[^\w.-]", "-", request.name)[:_NUM_NAME_CHARACTERS]
    return f"{readable}-{hashlib.sha256(str(request.run_dir).encode()).hexdigest()[:8]}"


def _sbatch_options(request: JobRequest[SlurmConfig]) -> Iterator[str]:
    settings = request.settings
    yield f"--job-name={job_name(request)}"
    given = {name: getattr(settings, name) for name in ("partition", "account", "qos")}
    yield from (f"--{name}={value}" for name, value in {**given, "time": settings.time_limit}.items() if value)
    yield from (f"--nodes={request.num_nodes}", "--ntasks-per-node=1")
    resources = [each.removeprefix(_GRES) for each in settings.sbatch_options if each.startswith(_GRES)]
    if request.device.has_gpus and not request.device.is_logical:
        kind = f"{settings.gpu_type}:" if settings.gpu_type else ""
        if settings.gpu_option == "gres":
            resources.insert(0, f"gpu:{kind}{request.gpus_per_node}")
        else:
            yield f"--gpus-per-node={kind}{request.gpus_per_node}"
    if resources:
        # sbatch keeps only the last of several options
        yield f"{_GRES}{','.join(resources)}"
    if settings.exclusive:
        yield from ("--exclusive", "--mem=0")
    if settings.cpus_per_node:
        yield f"--cpus-per-task={settings.cpus_per_node}"
    if settings.memory_per_node:
        yield f"--mem={settings.memory_per_node}"
    yield from (f"--signal=B:USR1@{settings.save_margin_s}", "--requeue", "--no-kill")
    if settings.continuation == "array":
        yield f"--array=1-{settings.max_jobs}%1"
    if settings.continuation == "dependency":
        yield "--dependency=singleton"
    yield "--open-mode=append"
    log = str(request.jobs / "%j.log")
    yield f'--output="{log}"' if re.search(r"\s", log) else f"--output={log}"
    yield from (option for option in settings.sbatch_options if not option.startswith(_GRES))


def _settings(request: JobRequest[SlurmConfig]) -> Iterator[str]:
    settings = request.settings
    values = {
        "run": str(request.run_dir),
        "local_folder": settings.local_folder,
        "first_port": settings.first_port,
        "num_gpus": request.gpus_per_node if request.device.has_gpus else 0,
        "save_margin_s": settings.save_margin_s,
        "max_attempts_without_checkpoint": settings.max_attempts_without_checkpoint,
    }
    if request.is_written(LIMIT_KEY):
        del values["save_margin_s"]
    yield from (f"{name}={shlex.quote(str(value))}" for name, value in values.items())
    if settings.container.image is None:
        yield f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"
    yield f"ray_options=({' '.join(map(shlex.quote, settings.ray_options))})"
    yield from (f"export {name}={_value(name, settings)}" for name in settings.env_vars)
    if ("setup",) in settings.references:
        reason, remedy = "would have the value of a variable in the script", "Write $NAME, which bash reads in the job"
        raise refusal([Problem("slurm.setup", reason, remedy=remedy)], load({}))
    if settings.setup.strip():
        # modules and environments read variables that are not set
        yield f"set +u\n{settings.setup.strip()}\nset -u"


def _value(name: str, settings: SlurmConfig) -> str:
    """Return the value of an environment variable for bash, with references to variables as bash writes them.

    Raises:
        ConfigProblems: If it is computed from variables in another way, which bash does not know.
    """
    text = settings.references.get(("env_vars",)) or settings.references.get(("env_vars", name))
    if text is None:
        return shlex.quote(settings.env_vars[name])
    parts = _REFERENCE.split(text)
    if any("${" in part for part in parts[::2]):
        allowed = "${oc.env:NAME} and ${oc.env:NAME,DEFAULT} with a plain default, and text around them"
        reason = "cannot be written as a reference of bash"
        raise refusal([Problem(f"slurm.env_vars.{name}", reason, got=text, allowed=allowed)], load({}))
    return "".join(_in_bash(part) if place % 2 else shlex.quote(part) for place, part in enumerate(parts) if part)


def _in_bash(reference: str) -> str:
    """Return a reference to an environment variable, which may have a default, as bash's own."""
    (name,) = _NAME.findall(reference.partition(",")[0])
    unset = {"value": _NAME.sub(_UNSET, reference, count=1)}
    default = interpolate(unset, unset)[0]["value"]
    if default is None:
        return f'"${{{name}?{_NOT_SET}}}"'
    escaped = re.sub(r'([\\"$`}])', r"\\\1", default)
    return f'"${{{name}-{escaped}}}"'


def _commands(request: JobRequest[SlurmConfig]) -> str:
    """Return the commands of the first node and of the others, as arrays of bash with a line for each group."""
    step_options, command = _in_container(request)
    mark = 'env "RL_JOB=$job"'
    # options of srun take effect in a step only
    step = [f'{_STEP} --nodes=1 --ntasks=1 --nodelist="$first"', *step_options] if step_options else []
    sizes = "--nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --ntasks-per-node=1"
    where = '--exclude="$first" --no-kill --kill-on-bad-exit=0'
    on_first = [mark, *step, *command]
    on_others = [mark, f"{_STEP} {sizes}", where, *step_options, *command]
    arrays = []
    for name, lines in (("on_first", on_first), ("on_others", on_others)):
        several = "\n    ".join([f"{name}=(", *lines]) + "\n)"
        arrays.append(f"{name}=({lines[0]})" if len(lines) == 1 else several)
    return "\n".join(arrays)


def _train(request: JobRequest[SlurmConfig], *, own_limit: bool) -> str:
    command, overrides = (*request.command, request.recipe), list(request.overrides)
    overrides.append(f"run_dir={request.run_dir}")
    if request.trains and not request.is_written(REPLACEMENT_KEY):
        overrides.append(f"{REPLACEMENT_KEY}={REPLACEMENT_S}")
    words = [shlex.join(command), *map(shlex.quote, overrides)]
    if not own_limit:
        words.append(f'${{limit:+"{LIMIT_KEY}=$limit"}}')
    return " \\\n    ".join(words)
