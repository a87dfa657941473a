"""The batch script by option. `integration-tests/test_slurm.py` runs it."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rl_core.config import as_written, assemble, load, resolve, to_override
from rl_core.devices import CPU, CUDA, REHEARSAL
from rl_core.errors import ConfigError, ConfigProblems
from rl_launch.run_config.reading import read_plan
from rl_launch.submit.slurm.config import SlurmConfig
from rl_launch.submit.slurm.script import LIMIT_KEY, job_name, outside_mounts, render
from rl_launch.submit.target import SERVE, JobRequest

PROFILE = assemble("Profile", {"slurm": SlurmConfig})


PLAN = read_plan("grpo-math-8b")


def request(*settings, **changes):
    """The request for a job of two nodes with eight GPUs each."""
    given = {
        "name": "8b",
        "run_dir": Path("/shared/runs/8b"),
        "recipe": "grpo-math-8b",
        "overrides": ("grpo.max_num_steps=100",),
        "is_written": lambda key: False,
        "num_nodes": 2,
        "gpus_per_node": 8,
        "device": CUDA,
        "config": PLAN.config,
        "tree": as_written(PLAN.root),
    }
    root = resolve(load({}, [f"slurm.{each}" for each in settings]), PROFILE).config
    references = {path[1:]: text for path, text in root.references.items()}
    return JobRequest(**given | changes, settings=root.slurm.with_references(references))


def options(script):
    """Options of sbatch in the header of a script."""
    return re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)


def variables(script, *names):
    """Values that bash gives to variables of the script's settings."""
    settings = script[script.index("set -uo pipefail") : script.index("job=${SLURM")]
    shown = "".join(f'echo "${name}";' for name in names)
    done = subprocess.run(["bash", "-c", f"{settings}\n{shown}"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


CASES = {
    "plain": request(),
    "one node": request(num_nodes=1),
    "cpu": request(device=CPU, gpus_per_node=0),
    "array": request("continuation=array", "max_jobs=4"),
    "dependency": request("continuation=dependency"),
    "pyxis": request(
        "container.runtime=pyxis", "container.image=/i/rl.sqsh", "container.mounts=[/data:/data:ro, /models]"
    ),
    "apptainer": request("container.runtime=apptainer", "container.image=/i/r l.sif", "container.options=[--cleanenv]"),
    "own limit": request(is_written=lambda key: key == LIMIT_KEY),
    "served": request("preflight=true", command=SERVE, overrides=("tinker.port=8300", "policy.lora_cfg.dim=64")),
    "preflight": request("preflight=true", run_dir=Path("/s/a run")),
    "spaces": request(
        "setup=module load cuda",
        "env_vars.A=it's",
        "env_vars.B=a ${oc.env:HOME,b}",
        run_dir=Path("/s/a run"),
        recipe="/s/a b.yaml",
        overrides=("x=[1, 2]",),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_script_is_good_bash(case, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(render(case))
    assert "@" not in re.sub(r'@\]|\$@|USR1@|"\$\{on_\w+\[@\]\}"', "", path.read_text())
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_shellcheck_finds_nothing(case, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(render(case))
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_job_takes_whole_nodes_and_their_gpus():
    found = options(render(request("partition=gpu", "account=team", "time_limit=04:00:00", "gpu_type=h100")))
    assert {"--nodes=2", "--gpus-per-node=h100:8", "--exclusive", "--mem=0", "--ntasks-per-node=1"} <= set(found)
    assert {"--partition=gpu", "--account=team", "--time=04:00:00"} <= set(found)
    assert {"--requeue", "--open-mode=append", "--output=/shared/runs/8b/jobs/%j.log"} <= set(found)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["gpu_option=gres"], "--gres=gpu:8"),
        (["gpu_option=gres", "gpu_type=h100"], "--gres=gpu:h100:8"),
        (["gpu_option=gres", "sbatch_options=[--gres=tmpdisk:100]"], "--gres=gpu:8,tmpdisk:100"),
        (["sbatch_options=[--gres=tmpdisk:100, --gres=nvme:1]"], "--gres=tmpdisk:100,nvme:1"),
    ],
)
def test_gpus_and_other_generic_resources_are_in_one_option(settings, expected):
    found = [option for option in options(render(request(*settings))) if option.startswith("--gres")]
    assert found == [expected]
    by_number = "--gpus-per-node=8" in options(render(request(*settings)))
    assert by_number == ("gpu_option=gres" not in settings)


def test_gpus_are_asked_for_by_one_key_only():
    with pytest.raises(ConfigError, match=r"--gpus-per-node=4.*Use cluster.gpus_per_node and slurm.gpu_option"):
        request("sbatch_options=[--gpus-per-node=4]")


def test_a_part_of_a_node_is_asked_for_by_size():
    found = options(render(request("exclusive=false", "cpus_per_node=16", "memory_per_node=200G")))
    assert {"--cpus-per-task=16", "--mem=200G"} <= set(found)
    assert not {"--exclusive", "--mem=0"} & set(found)


@pytest.mark.parametrize(("device", "asked", "logical"), [(CUDA, 1, "8"), (CPU, 0, "0"), (REHEARSAL, 0, "8")])
def test_only_real_gpus_are_asked_for(device, asked, logical):
    script = render(request(device=device, gpus_per_node=8 if device.has_gpus else 0))
    assert sum(each.startswith("--gpus-per-node") for each in options(script)) == asked
    assert variables(script, "num_gpus") == [logical]


def test_the_signal_comes_before_the_limit():
    script = render(request("save_margin_s=600"))
    assert "--signal=B:USR1@600" in options(script)
    assert variables(script, "save_margin_s") == ["600"]
    assert LIMIT_KEY in script


def test_keys_that_the_user_set_are_left_alone():
    script = render(request(is_written=lambda key: True, recipe="r", overrides=(f"{LIMIT_KEY}=0:1:0:0",)))
    assert script.count(LIMIT_KEY) == 1
    assert "replacement_timeout_s" not in script
    assert "cluster.replacement_timeout_s=30" in render(request())


def test_the_nodes_are_examined_before_the_run_if_the_profile_says_so():
    script = render(CASES["preflight"])
    doctor = "rl doctor --cluster grpo-math-8b grpo.max_num_steps=100 'run_dir=/s/a run'"
    assert script.index("export RAY_ADDRESS") < script.index(doctor) < script.index("rl train grpo-math-8b")
    assert "rl doctor" not in render(request())


def test_a_job_serves_and_is_continued():
    script = render(CASES["served"])
    assert "rl serve tinker --resumable grpo-math-8b" in script
    assert "tinker.port=8300 " in script
    assert LIMIT_KEY not in script
    assert "replacement_timeout_s" not in script
    # the doctor knows no keys of the server
    assert "rl doctor --cluster grpo-math-8b policy.lora_cfg.dim=64 run_dir=" in script


def test_further_options_of_sbatch_are_passed_on():
    assert options(render(request("sbatch_options=[--mail-type=FAIL]")))[-1] == "--mail-type=FAIL"


def test_chains():
    assert "--array=1-4%1" in options(render(CASES["array"]))
    assert "--dependency=singleton" in options(render(CASES["dependency"]))
    assert "scontrol requeue" in render(request())
    assert not any("scontrol requeue" in render(CASES[name]) for name in ("array", "dependency"))


def test_a_name_is_of_one_run_alone():
    one, other = request(), request(run_dir=Path("/elsewhere/8b"))
    assert job_name(one) == job_name(replace(one, num_nodes=4)) != job_name(other)


def test_a_secret_is_taken_from_the_shell_that_submits(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("SITE", "north")
    script = render(request("env_vars.HF_TOKEN=${oc.env:HF_TOKEN}", "env_vars.CACHE=/scratch of ${oc.env:SITE}/hf"))
    assert "hf_secret" not in script
    assert variables(script, "HF_TOKEN", "CACHE") == ["hf_secret", "/scratch of north/hf"]


VALUES = {
    "default": ("${oc.env:TEST_V,none}", "none", "given"),
    "empty": ("${oc.env:TEST_V,''}", "", "given"),
    "quoted": ("""${oc.env:TEST_V,"a 'b' $HOME `c` \\\\"}""", "a 'b' $HOME `c` \\", "given"),
    "number": ("${oc.env:TEST_V,1}", "1", "given"),
    "truth value": ("${oc.env:TEST_V,true}", "True", "given"),
    "text around": ("it's /${oc.env:TEST_V,x}/ $5", "it's /x/ $5", "it's /given/ $5"),
    "no reference": ("\\${TEST_V}", "${TEST_V}", "${TEST_V}"),
}


@pytest.mark.parametrize(("written", "unset", "set_"), VALUES.values(), ids=list(VALUES))
def test_bash_reads_a_value_as_the_config_does(written, unset, set_, monkeypatch):
    monkeypatch.delenv("TEST_V", raising=False)
    setting = to_override("env_vars.A", written)
    case = request(setting)
    assert case.settings.env_vars == {"A": unset}
    script = render(case)
    assert variables(script, "A") == [unset]
    monkeypatch.setenv("TEST_V", "given")
    assert request(setting).settings.env_vars == {"A": set_}
    assert variables(script, "A") == [set_]


@pytest.mark.parametrize(
    "written", ["${oc.env:TEST_V,${oc.env:TEST_W}}", "${slurm.env_vars.B}", "\\${oc.env:TEST_V} ${oc.env:TEST_V}"]
)
def test_a_value_that_bash_cannot_compute_is_refused(written, monkeypatch):
    monkeypatch.setenv("TEST_V", "given")
    monkeypatch.setenv("TEST_W", "given")
    with pytest.raises(ConfigProblems, match=r"slurm\.env_vars\.A.*allowed: \$\{oc\.env:NAME\}") as caught:
        render(request(to_override("env_vars.A", written), "env_vars.B=${oc.env:TEST_V}"))
    assert "given" not in str(caught.value)


def test_a_secret_that_the_job_does_not_get_ends_it_with_a_remedy(monkeypatch):
    monkeypatch.setenv("TEST_TOKEN", "hf_secret")
    script = render(request("env_vars.TEST_TOKEN=${oc.env:TEST_TOKEN}"))
    monkeypatch.delenv("TEST_TOKEN")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        variables(script, "TEST_TOKEN")
    assert "TEST_TOKEN: is not set in this job. Submit with --export=ALL" in caught.value.stderr


def test_the_setup_has_no_secret_in_it(monkeypatch):
    monkeypatch.setenv("TEST_TOKEN", "hf_secret")
    with pytest.raises(ConfigProblems, match=r"slurm\.setup.*Write \$NAME") as caught:
        render(request("setup=login ${oc.env:TEST_TOKEN}"))
    assert "hf_secret" not in str(caught.value)
    assert "\nlogin $TEST_TOKEN\n" in render(request("setup=login $TEST_TOKEN"))


def test_the_setup_may_read_variables_that_are_not_set_and_the_rest_of_the_script_may_not():
    script = render(request("setup=A=before$NO_SUCH_VARIABLE"))
    assert variables(script, "A") == ["before"]
    with pytest.raises(subprocess.CalledProcessError):
        variables(script, "NO_SUCH_VARIABLE")


def test_steps_get_the_variables_of_the_script_if_the_job_gets_none_of_the_shell(monkeypatch):
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    assert variables(render(request("sbatch_options=[--export=NONE]")), "SLURM_EXPORT_ENV") == ["ALL"]


def test_the_driver_runs_in_the_environment_that_submits_it_unless_it_has_a_container():
    assert "export PATH=" in render(request())
    assert "export PATH=" not in render(CASES["pyxis"])


def array(script, name):
    """The words that bash reads in an array of the script."""
    (text,) = re.findall(rf"^{name}=\(.*?\)$", script, re.MULTILINE | re.DOTALL)
    known = "job=1 first=n1 logs=/l scratch=/tmp/rl-1 SLURM_NNODES=2"
    command = f"{known}\n{text}\nprintf '%s\\n' \"${{{name}[@]}}\""
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines()


def test_containers_see_the_run_the_job_and_what_the_user_mounts():
    own = "/shared/runs/8b:/shared/runs/8b,/tmp/rl-1:/tmp/rl-1"
    for name in ("on_first", "on_others"):
        assert array(render(CASES["pyxis"]), name)[-2:] == [
            "--container-image=/i/rl.sqsh",
            f"--container-mounts={own},/data:/data:ro,/models:/models",
        ]
        assert array(render(CASES["apptainer"]), name)[-7:] == [
            "apptainer", "exec", "--nv", "--bind", own, "--cleanenv", "/i/r l.sif"
        ]  # fmt: skip


def test_variables_of_the_profile_replace_those_of_an_image():
    chosen = request("container={runtime: pyxis, image: i}", "env_vars={RL_HOME: /models/rl, NCCL_DEBUG: INFO}")
    for name in ("on_first", "on_others"):
        assert "--container-env=RL_HOME,NCCL_DEBUG" in array(render(chosen), name)
    assert "--container-env" not in render(CASES["pyxis"])


def test_caches_that_no_mount_of_the_container_has():
    mounts = "mounts: [/models, '/data:/cache:ro', /shared/a]"
    paths = "{RL_HOME: /models/rl, HF_HOME: /data/hf, HF_HUB_CACHE: /cache/hub, XDG_CACHE_HOME: /shared/ab, OTHER: /x}"
    container = f"container={{runtime: apptainer, image: i, {mounts}}}"
    assert outside_mounts(request(container, f"env_vars={paths}")) == {
        "HF_HOME": "/data/hf",
        "XDG_CACHE_HOME": "/shared/ab",
    }
    assert outside_mounts(request(f"env_vars={paths}")) == {}


def test_paths_are_not_read_by_bash():
    odd = Path('/s/$HOME "a" `b`')
    mounts = array(render(replace(CASES["pyxis"], run_dir=odd)), "on_first")[-1]
    assert mounts.startswith(f"--container-mounts={odd}:{odd},")
    assert variables(render(request(run_dir=odd)), "run") == [str(odd)]


def test_with_pyxis_every_command_is_a_step_and_without_containers_none_is_needed_on_the_first_node():
    assert array(render(CASES["pyxis"]), "on_first")[:3] == ["env", "RL_JOB=1", "srun"]
    assert array(render(request()), "on_first") == ["env", "RL_JOB=1"]
    others = array(render(request()), "on_others")
    assert {"srun", "--nodes=1", "--exclude=n1"} <= set(others)
