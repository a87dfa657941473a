import subprocess
import sys

import pytest
from oldest import Source, oldest, versions
from workspace import Package, packages

from rl_core.testing.exhaustive import exhaustive, partly_exhaustive

CORE = "packages/rl-core"
USE = "packages/rl-vllm/src/rl_vllm/__init__.py"


def package(name, version, *needs):
    requirements = ", ".join(f'"{each}"' for each in needs)
    return Package(f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = [{requirements}]\n', "")


def available(*found):
    names = dict.fromkeys(each.name for each in found)
    return {name: [Source(each, "a tag") for each in found if each.name == name] for name in names}


def chosen(siblings):
    return [f"{each.package.name} {each.package.version}" for each in siblings]


def check(repository, *names):
    command = [sys.executable, "tools/oldest.py", *names]
    return subprocess.run(command, cwd=repository.root, capture_output=True, text=True, check=False)


def test_the_oldest_versions_that_fit_together_are_chosen():
    cores = [package("rl-core", version) for version in ("0.2.0", "0.2.1", "0.2.2", "0.3.0")]
    algos = [package("rl-algos", "0.2.0", "rl-core>=0.2.0,<0.3"), package("rl-algos", "0.2.1", "rl-core>=0.2.2,<0.3")]
    launch = package("rl-launch", "0.2.0", "rl-algos>=0.2.1,<0.3", "rl-core>=0.2.1,<0.3")
    assert chosen(oldest(launch, available(*cores, *algos))) == ["rl-algos 0.2.1", "rl-core 0.2.2"]
    assert chosen(oldest(algos[0], available(*cores, *algos))) == ["rl-core 0.2.0"]
    assert oldest(cores[0], available(*cores, *algos)) == []


def test_siblings_that_do_not_fit_one_another_are_not_chosen():
    algos = package("rl-algos", "0.2.0", "rl-core>=0.2.0,<0.3")
    launch = package("rl-launch", "0.2.0", "rl-algos>=0.2.0,<0.3", "rl-core>=0.3.0,<0.4")
    assert oldest(launch, available(algos, package("rl-core", "0.3.0"))) is None


def test_a_tag_is_its_version_and_the_tree_one_without_a_tag(released):
    core = packages(released.root)["rl-core"]
    assert [each.tag for each in versions(released.root, core)] == ["rl-core-v0.2.0"]
    released.edit(f"{CORE}/pyproject.toml", 'version = "0.2.0"', 'version = "0.2.1"')
    core = packages(released.root)["rl-core"]
    assert [each.tag for each in versions(released.root, core)] == ["rl-core-v0.2.0", None]


USES = [
    ("__init__", "from rl_core import added", "cannot import name 'added'"),
    ("part", "import no_such_engine\nfrom rl_core import added", "rl_vllm.part, line 2: rl_core has no added"),
    ("part", "def late():\n    import rl_core.new_part", "rl_vllm.part, line 2: there is no module rl_core.new_part"),
    ("part", "from rl_core import old\nold(keyword=1)", "unexpected keyword argument 'keyword'"),
]


@pytest.mark.parametrize(("module", "code", "message"), partly_exhaustive(USES, always=USES[1:2]))
def test_a_use_of_something_that_the_oldest_sibling_lacks_is_red_until_the_bound_is_raised(
    repository, module, code, message
):
    source = repository / f"{CORE}/src/rl_core"
    source.joinpath("__init__.py").write_text("def old():\n    pass\n")
    repository.commit()
    for name in ("rl-core", "rl-vllm", "rl-launch"):
        repository.git("tag", f"{name}-v0.2.0")
    source.joinpath("__init__.py").write_text("def old(keyword=0):\n    pass\n\n\ndef added():\n    pass\n")
    source.joinpath("new_part.py").touch()
    (repository / f"packages/rl-vllm/src/rl_vllm/{module}.py").write_text(code + "\n")
    done = check(repository, "rl-vllm")
    assert done.returncode == 1
    assert "rl-vllm 0.2.0 with rl-core 0.2.0 (rl-core-v0.2.0)" in done.stdout
    assert message in done.stdout
    repository.edit(f"{CORE}/pyproject.toml", 'version = "0.2.0"', 'version = "0.2.1"')
    repository.edit("packages/rl-vllm/pyproject.toml", ">=0.2.0,<0.3", ">=0.2.1,<0.3")
    done = check(repository, "rl-vllm")
    assert done.returncode == 0, done.stdout
    assert "with rl-core 0.2.1 (tree)" in done.stdout


@exhaustive
def test_a_clone_without_tags_says_what_it_used(repository, tmp_path):
    done = check(repository, "rl-vllm")
    assert done.returncode == 0, done.stdout
    assert "no release has a tag in this clone: every sibling is the one in the tree" in done.stdout
    repository.edit(f"{CORE}/pyproject.toml", 'version = "0.2.0"', 'version = "0.2.1"')
    repository.commit()
    repository.git("clone", "--quiet", "--depth", "1", f"file://{repository.root}", str(tmp_path / "shallow"))
    repository.root = tmp_path / "shallow"
    done = check(repository, "rl-vllm")
    assert done.returncode == 0, done.stdout
    assert "in this clone, which is shallow" in done.stdout
    assert "no tag rl-core-v0.2.0 in this clone: rl-core 0.2.1 (tree) stands in for the lower bound" in done.stdout
