"""Sections made from what a user's function or dataclass takes."""

import pickle
from dataclasses import dataclass, field

import pytest

from rl_core.config import (
    Config,
    NamedConfig,
    assemble,
    changed_to_yaml,
    explain,
    load,
    resolve,
    section_of,
    settings_of,
)
from rl_core.errors import NOT_GIVEN, ConfigProblems


class Chosen(Config):
    name: str


def first_layers():
    return (1, 2)


@dataclass(frozen=True)
class Loss:
    weight: float
    mode: str = "mean"
    layers: tuple[int, ...] = field(default_factory=first_layers)
    temperature: float = 1.0


def shrink(rewards, groups, *, strength: float = 0.5, steps: int | None = None):
    return rewards


def root(target=Loss, **options):
    return assemble("Root", {"loss": section_of(target, Chosen, **options)})


def test_fields_of_a_dataclass_are_keys_and_derived_ones_are_not():
    values = {"loss": {"name": "mine.py:Loss", "weight": 2, "layers": [3]}}
    config = resolve(load(values), root(derived=("temperature",))).config
    assert settings_of(config.loss) == {"weight": 2.0, "mode": "mean", "layers": (3,)}


def test_keyword_only_parameters_of_a_function_are_keys():
    config = resolve(load({"loss": {"name": "f"}}, ["loss.steps=3"]), root(shrink)).config
    assert settings_of(config.loss) == {"strength": 0.5, "steps": 3}
    assert explain(root(shrink), "loss.strength").default == 0.5


@pytest.mark.parametrize(
    ("setting", "key", "got", "allowed"),
    [
        ("loss.wieght=1", "loss.wieght", NOT_GIVEN, ""),
        ("loss.weight=heavy", "loss.weight", "heavy", "float"),
        ("loss.mode=mean", "loss.weight", NOT_GIVEN, "float"),
    ],
)
def test_settings_are_checked_like_all_keys(setting, key, got, allowed):
    with pytest.raises(ConfigProblems) as refused:
        resolve(load({"loss": {"name": "mine.py:Loss"}}, [setting]), root())
    (problem,) = (problem for problem in refused.value.problems if problem.key == key)
    assert (problem.got, problem.allowed) == (got, allowed)
    assert "loss.weight" in problem.remedy or key != "loss.wieght"


def test_a_config_with_such_a_section_pickles():
    config = resolve(load({"loss": {"name": "x", "weight": 1.0}}), root()).config
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_setting_without_annotation_or_with_the_choosing_key_is_refused():
    with pytest.raises(ValueError, match="the setting 'a' of <lambda> has no type annotation"):
        section_of(lambda *, a=1: a, Chosen)

    def takes_name(*, name: str = ""):
        return name

    with pytest.raises(ValueError, match="rename the setting"):
        section_of(takes_name, Chosen)


def test_a_section_may_be_extended_by_one_of_its_own_kind_alone():
    holder = assemble("Holder", {"loss": (Chosen, Chosen(name="a"))})
    narrowed = assemble("Narrowed", {"loss": section_of(shrink, Chosen)}, base=holder)
    assert narrowed.model_fields["loss"].annotation is not Chosen
    with pytest.raises(ValueError, match="two parties claim the same config key"):
        assemble("Other", {"loss": Config}, base=holder)


def test_a_file_is_relative_to_the_folder_in_which_it_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "base.yaml").write_text("loss: {name: mine.py:Loss, weight: 1.0}\nlist: [a.py:f]\n")
    (tmp_path / "run.yaml").write_text("defaults: recipes/base.yaml\n")
    monkeypatch.chdir(tmp_path)
    raw = load("run.yaml", ["env.type=here.py:Env"])
    assert raw.select("loss.name") == f"{folder}/mine.py:Loss"
    assert raw.select("list") == [f"{folder}/a.py:f"]
    assert raw.select("env.type") == f"{tmp_path}/here.py:Env"


def test_a_section_that_chooses_another_class_does_not_inherit_its_settings(tmp_path):
    (tmp_path / "base.yaml").write_text("loss: {clip: 0.2}\noptimizer: {name: torch.optim.AdamW, kwargs: {lr: 1.0}}\n")
    (tmp_path / "mine.yaml").write_text("defaults: base\nloss: {name: mine.py:Loss, weight: 1.0}\n")
    (tmp_path / "more.yaml").write_text("defaults: mine\nloss: {mode: sum}\noptimizer: {name: torch.optim.SGD}\n")
    (tmp_path / "back.yaml").write_text("defaults: more\nloss: {name: policy}\n")
    more = load(tmp_path / "more.yaml")
    assert set(more.select("loss")) == {"name", "weight", "mode"}
    assert more.select("optimizer.kwargs.lr") == 1.0
    assert load(tmp_path / "back.yaml").select("loss") == {"name": "policy"}


class Shape(NamedConfig):
    name: str


class Circle(Shape):
    name: str = "circle"
    radius: float = 1.0


class Square(Shape):
    name: str = "square"
    side: float = 1.0


class Drawing(Config):
    shape: Shape = Circle()


def drawing(kind):
    """A root whose section is narrowed to the type that its name chose."""
    return assemble("Root", {"drawing": assemble("Drawing", {"shape": (kind, Circle())}, base=Drawing)})


@pytest.mark.parametrize("overrides", [["drawing.shape.side=2"], ["drawing.shape=square", "drawing.shape.side=2"]])
def test_settings_laid_over_a_name_keep_it(overrides, tmp_path):
    (tmp_path / "base.yaml").write_text("drawing: {shape: square}\n")
    (tmp_path / "run.yaml").write_text("defaults: base\n")
    (tmp_path / "over.yaml").write_text("defaults: base\ndrawing: {shape: {side: 2}}\n")
    expected = Square(side=2)
    assert resolve(load(tmp_path / "run.yaml", overrides), drawing(Square)).config.drawing.shape == expected
    assert resolve(load(tmp_path / "over.yaml"), drawing(Square)).config.drawing.shape == expected


@pytest.mark.parametrize("written", ["square", {"name": "square", "side": 3.0}])
def test_the_changed_keys_of_a_section_of_another_type_hold_its_name(written, tmp_path):
    root = drawing(Square)
    config = resolve(load({"drawing": {"shape": written}}), root).config
    (tmp_path / "changed.yaml").write_text(changed_to_yaml(config))
    assert load(tmp_path / "changed.yaml").select("drawing.shape.name") == "square"
    assert resolve(load(tmp_path / "changed.yaml"), root).config == config
    default = resolve(load({}), drawing(Circle)).config
    assert changed_to_yaml(default) == "{}\n"
