import pytest

from rl_core.config import Problem
from rl_core.errors import ConfigError, ConfigProblems
from rl_launch.submit.profile import belongs_to_profile, explain_profile, read_profile, refused, settings_of


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "rl").mkdir()
    return tmp_path / "rl"


def problems(*overrides):
    """Problems with keys of the section slurm, as key and remedy."""
    with pytest.raises(ConfigProblems) as caught:
        read_profile("slurm", "", [f"slurm.{each}" for each in overrides])
    return {problem.key: problem for problem in caught.value.problems}


def test_the_default_profile_need_not_exist():
    assert settings_of("slurm", "").partition is None


def test_a_profile_is_read_by_name_and_by_path_and_the_command_line_wins(folder):
    (folder / "submit.yaml").write_text("slurm: {partition: gpu, time_limit: 04:00:00}\n")
    (folder / "big.yaml").write_text("defaults: submit.yaml\nslurm: {partition: big}\n")
    assert settings_of("slurm", "").partition == "gpu"
    assert settings_of("slurm", "big").time_limit == "04:00:00"
    assert settings_of("slurm", str(folder / "big.yaml")).partition == "big"
    assert settings_of("slurm", "big", ["slurm.partition=small"]).partition == "small"


def test_a_profile_that_does_not_exist_is_refused_with_the_nearest(folder):
    (folder / "north.yaml").write_text("slurm: {}\n")
    with pytest.raises(ConfigError, match=r"no profile 'nort'.* has north\. Did you mean north\?"):
        read_profile("slurm", "nort")


def test_an_unknown_key_is_refused_with_the_nearest(folder):
    (folder / "submit.yaml").write_text("slurm: {partiton: gpu}\n")
    with pytest.raises(ConfigError, match=r"slurm\.partiton .*submit\.yaml:1.*partition"):
        read_profile("slurm", "")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["time_limit=4h"], "slurm.time_limit"),
        (["cpus_per_node=8"], "slurm.cpus_per_node"),
        (["max_jobs=3"], "slurm.max_jobs"),
        (["sbatch_options=[--time=3]"], "slurm.sbatch_options"),
        (["sbatch_options=[nodes]"], "slurm.sbatch_options"),
        (["env_vars.A-B=1"], "slurm.env_vars.A-B"),
        (["env_vars.HF_TOKEN=hf_1"], "slurm.env_vars.HF_TOKEN"),
        (["local_folder=/a/path/that/is/too/long"], "slurm.local_folder"),
        (["container.image=/i.sif"], "slurm.container.image"),
        (["container.runtime=pyxis"], "slurm.container.image"),
        (["container={runtime: pyxis, image: i, mounts: [data]}"], "slurm.container.mounts"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, key):
    assert set(problems(*overrides)) == {key}


def test_the_section_of_another_queue_may_refer_to_variables_that_are_not_set(folder, monkeypatch):
    monkeypatch.delenv("TEST_TOKEN", raising=False)
    (folder / "submit.yaml").write_text(
        "slurm:\n  partition: gpu\n  env_vars: {TEST_TOKEN: '${oc.env:TEST_TOKEN}', HF_HOME: /shared/hf}\n"
        "kubernetes:\n  image: rl\n  env_vars: {HF_HOME: '${slurm.env_vars.HF_HOME}'}\n"
    )
    assert settings_of("kubernetes", "").env_vars == {"HF_HOME": "/shared/hf"}
    with pytest.raises(ConfigProblems, match="needs the environment variable TEST_TOKEN"):
        settings_of("slurm", "")
    _, unset = explain_profile("")
    monkeypatch.setenv("TEST_TOKEN", "hf_secret")
    _, given = explain_profile("")
    for keys in (unset, given):
        values = {each.key: each.value for each in keys}
        assert values["slurm.partition"] == "gpu"
        assert values["slurm.env_vars"] == {"TEST_TOKEN": "${oc.env:TEST_TOKEN}", "HF_HOME": "/shared/hf"}


def test_the_printed_profile_has_the_keys_of_its_sections_and_refuses_mistakes(folder):
    (folder / "submit.yaml").write_text("kubernetes: {workers: {cpus: 96}, queue: {scheduler: kueue, name: rl}}\n")
    values = {each.key: each.value for each in explain_profile("")[1]}
    assert values["kubernetes.workers.cpus"] == 96
    assert values["kubernetes.queue.name"] == "rl"
    assert values["slurm.container.runtime"] == "none"
    with pytest.raises(ConfigProblems, match="time_limit"):
        explain_profile("", ["slurm.time_limit=4h"])
    with pytest.raises(ConfigProblems, match="slrum"):
        explain_profile("", ["slrum.time_limit=4h"])


def test_a_mistake_is_answered_with_keys_of_its_section():
    assert problems("images=x").keys() == {"slurm.images"}
    with pytest.raises(ConfigProblems) as caught:
        read_profile("slurm", "", ["slurm.images=x"])
    assert "kubernetes" not in str(caught.value)


def test_an_option_of_the_script_is_refused_with_the_key_that_sets_it():
    assert problems("sbatch_options=[--time=3]")["slurm.sbatch_options"].remedy == "Use slurm.time_limit"


def test_keys_of_profiles_begin_with_a_target():
    assert belongs_to_profile("slurm.partition=gpu")
    assert not belongs_to_profile("cluster.num_nodes=2")


def test_what_a_job_lacks_is_named_with_the_file_and_with_its_contents_if_there_is_none(folder):
    lacking = [Problem("kubernetes.image", "must be set"), Problem("kubernetes.workers.cpus", "must be set")]
    path = folder / "submit.yaml"
    without = str(refused(lacking, "kubernetes", ""))
    assert f"2 problems in {path}" in without
    _, _, template = without.partition(f"{path} does not exist. ")
    path.write_text(template.partition("\n")[2])
    with pytest.raises(ConfigError, match=r"kubernetes\.image \(.*submit\.yaml:2\): must be set, because it is marked"):
        read_profile("kubernetes", "")
    path.write_text("kubernetes: {namespace: research}\n")
    assert "does not exist" not in str(refused(lacking, "kubernetes", ""))
