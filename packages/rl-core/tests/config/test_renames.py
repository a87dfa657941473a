"""Configs that earlier versions recorded, read under the keys of this version."""

from typing import Any, ClassVar

import pytest

from rl_core.config import Config, Rename, chosen, load, moved, resolve
from rl_core.config.renames import Upgrade


class Loss(Config):
    renamed: ClassVar = {
        "form": Rename("form", lambda value, _: {} if value is None else {"form": value}),
        "use_x": chosen("form", "x"),
        "penalty": moved("kl.weight"),
        "share": moved("share_kept", unless=None),
    }
    before_it_existed: ClassVar = {"strict": False}

    form: str = "y"
    kl: dict[str, float] = {"weight": 1.0}
    share_kept: float = 0.5
    strict: bool = True


class Root(Config):
    loss: Loss = Loss()
    parts: list[Loss] = []
    by_name: dict[str, Loss] = {}


@pytest.mark.parametrize(
    ("recorded", "read", "renamed"),
    [
        ({"form": None, "use_x": True, "penalty": 0.1, "share": None}, Loss(form="x", kl={"weight": 0.1}), 3),
        ({"form": "z", "use_x": False, "penalty": 1, "share": 0.25}, Loss(form="z", share_kept=0.25), 3),
        ({"form": "z", "strict": True}, Loss(form="z", strict=True), 0),
    ],
)
def test_a_recorded_section_means_the_same_wherever_it_is(recorded: Any, read: Loss, renamed: int) -> None:
    read = read if "strict" in recorded else read.model_copy(update={"strict": False})
    raw = load({"loss": recorded, "parts": [recorded], "by_name": {"a": recorded}})
    upgraded, upgrade = raw.upgraded(Root)
    assert resolve(upgraded, Root).config == Root(loss=read, parts=[read], by_name={"a": read})
    assert len(upgrade.renamed) == 3 * renamed
    places = () if "strict" in recorded else ("loss", "parts[0]", "by_name.a")
    as_before = {f"{place}.strict": False for place in places}
    assert upgrade.as_before == as_before
    assert upgraded.upgraded(Root) == (upgraded, Upgrade(as_before=as_before))


def test_a_key_of_this_version_wins_over_an_earlier_one() -> None:
    raw = load({"loss": {"use_x": True, "penalty": 0.1}}, ["loss.kl.weight=0.3", "loss.form=z"])
    upgraded, upgrade = raw.upgraded(Root)
    assert upgrade.renamed == ["loss.use_x", "loss.penalty"]
    assert resolve(upgraded, Root).config.loss == Loss(form="z", kl={"weight": 0.3}, strict=False)
    assert str(upgraded.origin("loss.kl.weight")) == "command line"
