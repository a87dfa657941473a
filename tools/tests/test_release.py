import subprocess
import sys
import tomllib
import zipfile

import pytest
from changelog import released as versions
from changelog import sections
from packaging.version import Version
from release import next_breaking, plan, raised
from workspace import packages

from rl_core.testing.exhaustive import exhaustive


def release(repository, *arguments):
    command = [sys.executable, "tools/release.py", *arguments]
    return subprocess.run(command, cwd=repository.root, capture_output=True, text=True, check=False)


def state(repository):
    """Everything that a release may change in a clone."""
    seen = [repository.git(*command) for command in (("show-ref",), ("status", "--porcelain"), ("worktree", "list"))]
    return [*seen, (repository / "dist").exists()]


def locked(repository):
    lock = tomllib.loads((repository / "uv.lock").read_text())
    return {each["name"]: each["version"] for each in lock["package"]}


@exhaustive
def test_a_compatible_release_raises_the_bounds_of_the_siblings_that_need_it(released):
    done = release(released, "rl-core", "0.2.1", "--needs-new", "rl-vllm")
    assert done.returncode == 0, done.stderr
    found = packages(released.root)
    assert [str(each.version) for each in found.values()] == ["0.2.1", "0.2.0", "0.2.0"]
    assert [str(each) for name in found for each in found[name].needs("rl-core")] == [
        "rl-core<0.3,>=0.2.0",
        "rl-core<0.3,>=0.2.1",
    ]
    assert versions(found["rl-core"].changelog)[0] == Version("0.2.1")
    assert sections(found["rl-core"].changelog)[0].entries == ()
    assert sections(found["rl-vllm"].changelog)[0].entries == ("Needs rl-core>=0.2.1,<0.3.", "Something new.")
    assert sections(found["rl-launch"].changelog)[0].entries == ("Something new.",)
    assert locked(released)["rl-core"] == "0.2.1"


def test_a_release_is_one_tagged_commit_with_its_distributions(repository):
    before = repository.git("rev-parse", "HEAD").strip()
    done = release(repository, "rl-core", "0.2.1")
    assert done.returncode == 0, done.stderr
    assert repository.git("rev-parse", "HEAD^").strip() == before
    assert repository.git("rev-parse", "rl-core-v0.2.1^{commit}") == repository.git("rev-parse", "main")
    assert repository.git("status", "--porcelain") == ""
    assert sorted(path.name for path in (repository / "dist").iterdir()) == [
        "rl_core-0.2.1-py3-none-any.whl",
        "rl_core-0.2.1.tar.gz",
    ]
    with zipfile.ZipFile(repository / "dist/rl_core-0.2.1-py3-none-any.whl") as wheel:
        assert "rl_core/__init__.py" in wheel.namelist()
    assert (repository / "packages/rl-launch/src/rl_launch/worker_envs/locks/rl-core.txt").exists()


@exhaustive
def test_a_breaking_release_raises_both_bounds_of_every_sibling(repository):
    done = release(repository, "rl-core", "0.3.0")
    assert done.returncode == 0, done.stderr
    found = packages(repository.root)
    assert [str(each) for name in found for each in found[name].needs("rl-core")] == ["rl-core<0.4,>=0.3.0"] * 2
    assert "rl-vllm needs rl-core 0.3.0: release rl-vllm next" in done.stdout


@exhaustive
def test_all_packages_are_released_under_one_version(repository):
    done = release(repository, "all", "0.2.1")
    assert done.returncode == 0, done.stderr
    found = packages(repository.root)
    assert {str(each.version) for each in found.values()} == {"0.2.1"}
    assert [str(each) for name in found for each in found[name].needs("rl-core")] == ["rl-core<0.3,>=0.2.1"] * 2
    assert repository.git("tag").split() == [f"{name}-v0.2.1" for name in found]
    assert len(list((repository / "dist").glob("*.whl"))) == 3


@exhaustive
def test_a_dry_run_does_everything_and_changes_nothing(repository):
    before = state(repository)
    done = release(repository, "rl-core", "0.2.1", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "built and checked: rl_core-0.2.1-py3-none-any.whl, rl_core-0.2.1.tar.gz" in done.stdout
    assert state(repository) == before


def test_a_build_that_fails_changes_nothing(repository):
    repository.git("rm", "--quiet", "packages/rl-core/README.md")
    repository.commit()
    before = state(repository)
    done = release(repository, "rl-core", "0.2.1")
    assert done.returncode == 1
    assert done.stderr.startswith("no release: ")
    assert "README.md" in done.stderr
    assert state(repository) == before


@exhaustive
def test_a_file_that_a_build_leaves_out_ends_the_release(repository):
    (repository / "packages/rl-core/src/rl_core/data.json").write_text("{}\n")
    repository.append("packages/rl-core/pyproject.toml", 'exclude = ["*.json"]\n')
    repository.commit()
    done = release(repository, "rl-core", "0.2.1")
    assert done.returncode == 1
    assert "rl-core 0.2.1: rl_core/data.json is not in the wheel" in done.stderr


@pytest.mark.parametrize(
    ("name", "version", "needs_new", "message"),
    [
        ("rl-cor", "0.2.1", [], "'rl-cor' is not a package; choose all, rl-core, rl-launch, rl-vllm"),
        ("rl-core", "0.2.0", [], "0.2.0 is not higher than the last release, 0.2.0"),
        ("rl-core", "0.1.9", [], "0.1.9 is not higher than the last release, 0.2.0"),
        ("rl-core", "next", [], "'next' is not a version; write X.Y.Z"),
        ("rl-core", "0.3", [], "'0.3' is not a final version"),
        ("rl-core", "0.3.0rc1", [], "'0.3.0rc1' is not a final version"),
        ("rl-core", "0.2.1", ["rl-core"], "--needs-new rl-core: not a package that needs rl-core"),
        ("rl-vllm", "0.2.1", ["rl-launch"], "choose from none"),
        ("all", "0.2.1", ["rl-vllm"], "`all` raises every range"),
    ],
)
def test_a_release_that_is_not_possible_is_refused(repository, name, version, needs_new, message):
    with pytest.raises(ValueError, match=message):
        plan(repository.root, name, version, needs_new)


def test_uncommitted_changes_are_refused(repository):
    (repository / "notes.txt").write_text("a note\n")
    with pytest.raises(ValueError, match=r"1 uncommitted changes .*notes\.txt.*; commit or stash them"):
        plan(repository.root, "rl-core", "0.2.1", [])


def test_a_changelog_without_unreleased_entries_is_refused(repository):
    repository.edit("packages/rl-core/CHANGELOG.md", "- Something new.\n\n", "")
    repository.commit()
    for name in ("rl-core", "all"):
        with pytest.raises(ValueError, match="rl-core: nothing is under `## Unreleased`"):
            plan(repository.root, name, "0.2.1", [])


def test_a_version_with_a_tag_is_refused_whatever_the_changelog_has(repository):
    repository.git("tag", "rl-core-v0.2.1")
    with pytest.raises(ValueError, match=r"0\.2\.1 is not higher than the last release, 0\.2\.1"):
        plan(repository.root, "rl-core", "0.2.1", [])


def test_a_package_that_needs_an_unreleased_version_waits_for_it(repository):
    repository.edit("packages/rl-core/pyproject.toml", 'version = "0.2.0"', 'version = "0.2.1"')
    repository.edit("packages/rl-vllm/pyproject.toml", "rl-core>=0.2.0,<0.3", "rl-core>=0.2.1,<0.3")
    repository.commit()
    with pytest.raises(ValueError, match=r"which is not released; release rl-core 0\.2\.1 first"):
        plan(repository.root, "rl-vllm", "0.2.1", [])
    assert plan(repository.root, "rl-core", "0.2.1", []).raised == ()
    assert plan(repository.root, "rl-launch", "0.2.1", []).names == ("rl-launch",)


@pytest.mark.parametrize(
    ("requirement", "version", "expected"),
    [
        ("rl-core>=0.2.0,<0.3", "0.2.7", "rl-core>=0.2.7,<0.3"),
        ("rl-core[torch]>=0.2.0,<0.3", "0.3.0", "rl-core[torch]>=0.3.0,<0.4"),
        ("rl-core[torch,ray]", "1.4.2", "rl-core[ray,torch]>=1.4.2,<2"),
        ("rl-core>=0.2 ; python_version < '3.13'", "0.2.1", 'rl-core>=0.2.1,<0.3 ; python_version < "3.13"'),
    ],
)
def test_a_raised_range_keeps_extras_and_markers(requirement, version, expected):
    assert raised(requirement, Version(version)) == expected


def test_the_next_breaking_version_is_the_next_minor_before_one_and_the_next_major_after():
    assert next_breaking(Version("0.2.5")) == "0.3"
    assert next_breaking(Version("1.2.5")) == "2"
