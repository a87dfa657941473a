"""The reference has every command, key, metric, environment, dataset, error, recipe and public name."""

import importlib
import re
from importlib.metadata import entry_points

import pytest
import typer
from conftest import ROOT
from website.reference.run_files import is_listed
from website.reference.text import code, prose, table
from write_api_page import public_packages

import rl_core.errors
from rl_core.config import all_keys
from rl_core.errors import RLError
from rl_launch.cli.app import app
from rl_launch.commands.explain import explain_anywhere, page_of, roots_of_all
from rl_launch.recipes import recipe_names
from rl_launch.submit.profile import PROFILE

_ID = re.compile(r"\{ #(\S+) \}$", re.MULTILINE)


def ids(pages, folder):
    return {name for place, text in pages.items() if place.startswith(folder) for name in _ID.findall(text)}


def section(text, anchor):
    return text.partition(f"{{ #{anchor} }}\n")[2].partition("\n#")[0]


def test_every_config_key_has_an_entry(pages):
    roots = (*roots_of_all().values(), PROFILE)
    keys = {key.partition("[")[0] for root in roots for key in all_keys(root, {})}
    assert len(keys) > 900
    assert keys - ids(pages, "reference/config/") == set()


def test_an_entry_has_type_default_documentation_and_what_a_change_means(pages):
    entry = section(pages["reference/config/grpo.md"], "grpo.seed")
    assert entry.strip().splitlines() == [
        "Seed for data order, sampling and dropout.",
        "",
        "- allowed: int",
        "- default: `42`",
        "- once a run has begun: a change needs a branch",
        "- only with `algorithm: grpo`",
    ]


@pytest.mark.parametrize("key", ["grpo.seed", "policy", "run_dir", "env.math.type", "data.train.settings.seed"])
def test_the_address_that_the_command_line_prints_is_on_the_site(pages, key):
    page, _, anchor = page_of(explain_anywhere(key)[0].explanation).partition(".html#")
    assert anchor in _ID.findall(pages[f"{page}.md"])


def test_every_command_and_option_is_listed(pages):
    def walk(command, path):
        for name, below in getattr(command, "commands", {}).items():
            page = pages[f"reference/cli/{(*path, name)[0]}.md"]
            anchor = "-".join(("rl", *path, name))
            assert f"{{ #{anchor} }}" in page
            text = section(page, anchor)
            for each in below.params:
                if each.param_type_name == "option" and not each.hidden:
                    assert all(f"`{option}" in text for option in each.opts), (anchor, each.opts)
            walk(below, (*path, name))

    walk(typer.main.get_command(app), ())


def test_every_metric_of_the_glossary_is_listed(pages):
    cells = re.findall(r"^\| (`[^|]+`) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    names = {name for cell in cells for name in re.findall("`(.+?)`", cell)}
    assert names - set(re.findall(r"^\| `(.+?)` \|", pages["reference/metrics.md"], re.MULTILINE)) == set()


@pytest.mark.parametrize(("group", "place"), [("rl.environments", "environments"), ("rl.datasets", "datasets")])
def test_every_installed_environment_and_dataset_is_listed(pages, group, place):
    names = {each.name for each in entry_points(group=group)}
    assert names
    assert names - ids(pages, f"reference/{place}.md") == set()


def test_every_error_is_listed_with_messages(pages):
    kinds = {
        name for name, each in vars(rl_core.errors).items() if isinstance(each, type) and issubclass(each, RLError)
    }
    assert ids(pages, "reference/errors.md") == {*kinds, "problems"}
    assert section(pages["reference/errors.md"], "ConfigError").count("\n- ") > 150
    assert "- --model and --scripted cannot be combined\n" in pages["reference/errors.md"]


def test_problems_of_config_keys_are_listed_with_reasons_and_remedies(pages):
    text = section(pages["reference/errors.md"], "problems")
    assert text.count("\n- ") > 300
    # of a `Problem` in a `ProblemError`, of one in a list, and of one that is made of variables
    assert "- `target`: needs an initial weight. Set weight above 0\n" in text
    assert "is for training datasets only; validation would score a selection of its rows. Remove this key\n" in text
    assert (
        "`distillation.topk_logits_k`: has no effect with distillation.cross\\_tokenizer=true. Remove this key" in text
    )


def test_every_recipe_has_a_page_with_command_file_and_changed_keys(pages):
    for name in recipe_names():
        text = pages[f"recipes/{name}.md"]
        assert f"```sh\nrl train {name}\n```" in text
        assert "\nalgorithm: " in text
    assert "learning.png" in pages["recipes/dapo-tiny.md"]
    assert "learning.png" not in pages["recipes/grpo-math-8b.md"]


def test_every_public_name_is_listed(pages):
    for package in public_packages():
        text = pages[f"reference/python/{package}.md"]
        names = set(importlib.import_module(package).__all__) - {"__version__"}
        assert names - set(re.findall(rf"^::: {re.escape(package)}\.(\w+)$", text, re.MULTILINE)) == set(), package


def test_files_of_a_run_match_whole_patterns():
    listed = ("config.yaml", "rollouts/step_3.jsonl", "checkpoints/step_3/hf/model.safetensors", "logs/driver.log")
    assert all(map(is_listed, listed))
    assert not any(map(is_listed, ("config.yml", "rollouts/other_3.jsonl", "hf/config.yaml")))


def test_text_of_docstrings_is_not_markup():
    assert prose("a <b> `x_<y>` [c](d) *e* f_g") == r"a \<b> `x_<y>` \[c\](d) \*e\* f\_g"
    assert code("a`b") == "``a`b``"
    assert code("`a") == "`` `a ``"
    assert table(("a",), [("x | y\nz",)]) == "| a |\n| --- |\n| x \\| y z |\n"
