"""The README of a package names its entry points and extras."""

import re

import pytest
from workspace import ROOT, folder, packages


@pytest.mark.parametrize("package", packages(ROOT))
def test_a_readme_names_every_entry_point_and_every_extra(package):
    project = packages(ROOT)[package].project
    plugins = [plugin for group in project.get("entry-points", {}).values() for plugin in group]
    names = {*plugins, *project.get("scripts", {}), *project.get("optional-dependencies", {})}
    readme = (ROOT / folder(package) / "README.md").read_text()
    # a word in a span of code, or in the brackets of `pip install rl-x[extra]`
    code = re.findall(r"`[^`\n]+`|\[[\w,-]+\]", readme)
    missing = [
        each for each in sorted(names) if not any(re.search(rf"(?<![\w-]){each}(?![\w-])", span) for span in code)
    ]
    assert not missing, f"{folder(package)}/README.md does not name {missing}"
