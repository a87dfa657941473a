import pytest
from changelog import with_release
from check_changes import change_problems, tree_problems
from packaging.version import Version

CORE = "packages/rl-core"
SOURCE = f"{CORE}/src/rl_core/__init__.py"


def test_a_consistent_tree_has_no_problems(repository):
    assert tree_problems(repository.root) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "rl-core/pyproject.toml",
            '"0.2.0"',
            '"0.1.9"',
            "rl-core: version 0.1.9 in pyproject.toml is lower than section 0.2.0",
        ),
        ("rl-core/pyproject.toml", '"0.2.0"', '"0.3.0"', "does not admit version 0.3.0 of rl-core"),
        ("rl-vllm/pyproject.toml", ">=0.2.0,<0.3", ">=0.1.0,<0.3", "rl-core has no version 0.1.0"),
        ("rl-vllm/pyproject.toml", ">=0.2.0,<0.3", ">=0.2.0", "is not a range `>=X.Y.Z,<A.B`"),
        ("rl-vllm/pyproject.toml", ">=0.2.0,<0.3", "==0.2.0", "is not a range `>=X.Y.Z,<A.B`"),
        ("rl-core/CHANGELOG.md", "## Unreleased", "## Next", "rl-core: CHANGELOG.md: the first section is not"),
    ],
)
def test_an_inconsistent_tree_is_named(repository, file, old, new, message):
    repository.edit(f"packages/{file}", old, new)
    assert message in "\n".join(tree_problems(repository.root))


def test_a_range_may_begin_at_a_version_of_the_tree_that_is_not_released(repository):
    repository.edit(f"{CORE}/pyproject.toml", '"0.2.0"', '"0.2.1"')
    repository.edit("packages/rl-vllm/pyproject.toml", ">=0.2.0,<0.3", ">=0.2.1,<0.3")
    assert tree_problems(repository.root) == []


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("file", ["__init__.py", "recipe.yaml"])
def test_a_public_change_needs_an_entry(repository, file, committed):
    base = repository.git("rev-parse", "HEAD").strip()
    source = repository / f"{CORE}/src/rl_core/{file}"
    source.write_text("a = 1\n")
    if committed:
        repository.commit()
    (problem,) = change_problems(repository.root, base)
    assert problem.startswith("rl-core: files under packages/rl-core/src changed")
    assert change_problems(repository.root, base, ["rl-core"]) == []
    repository.edit(f"{CORE}/CHANGELOG.md", "- Something new.", "- Something new.\n- A number.")
    assert change_problems(repository.root, base) == []


@pytest.mark.parametrize("path", ["src/rl_core/testing/suite.py", "tests/test_a.py", "README.md", "pyproject.toml"])
def test_other_changes_need_none(repository, path):
    base = repository.git("rev-parse", "HEAD").strip()
    (repository / f"{CORE}/{path}").parent.mkdir(exist_ok=True)
    (repository / f"{CORE}/{path}").touch()
    repository.append(f"{CORE}/{path}", "\n")
    assert change_problems(repository.root, base) == []


def test_an_entry_of_another_package_does_not_count(repository):
    base = repository.git("rev-parse", "HEAD").strip()
    repository.append(SOURCE, "a = 1\n")
    repository.edit("packages/rl-vllm/CHANGELOG.md", "- Something new.", "- Something newer.")
    assert len(change_problems(repository.root, base)) == 1


def test_only_changes_since_the_merge_base_count(repository):
    repository.git("checkout", "--quiet", "-b", "feature")
    repository.append("packages/rl-vllm/CHANGELOG.md", "")
    repository.git("checkout", "--quiet", "main")
    repository.append(SOURCE, "a = 1\n")
    repository.commit()
    repository.git("checkout", "--quiet", "feature")
    assert change_problems(repository.root, "main") == []


def closed(repository, version):
    path = repository / f"{CORE}/CHANGELOG.md"
    path.write_text(with_release(path.read_text(), Version(version), "2026-02-03"))


def test_a_closed_section_counts_only_with_entries_that_were_not_there(repository):
    base = repository.git("rev-parse", "HEAD").strip()
    repository.append(SOURCE, "a = 1\n")
    closed(repository, "0.2.1")
    repository.edit(f"{CORE}/pyproject.toml", '"0.2.0"', '"0.2.1"')
    assert len(change_problems(repository.root, base)) == 1
    repository.edit(f"{CORE}/CHANGELOG.md", "- Something new.", "- Something new.\n- A number.")
    assert change_problems(repository.root, base) == []


def test_a_closed_section_needs_its_version_and_a_higher_one_than_the_last(repository):
    base = repository.git("rev-parse", "HEAD").strip()
    closed(repository, "0.2.1")
    assert "section 0.2.1 of the changelog was closed and the version" in change_problems(repository.root, base)[0]
    repository.edit(f"{CORE}/pyproject.toml", '"0.2.0"', '"0.2.1"')
    assert change_problems(repository.root, base) == []
    repository.git("tag", "rl-core-v0.2.2")
    assert "was closed after 0.2.2 had been released" in change_problems(repository.root, base)[0]


def test_an_unknown_base_or_package_is_refused(repository):
    with pytest.raises(ValueError, match="--base nowhere: no common commit"):
        change_problems(repository.root, "nowhere")
    with pytest.raises(ValueError, match="--internal rl-cor: not a package"):
        change_problems(repository.root, "HEAD", ["rl-cor"])
