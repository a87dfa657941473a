"""The processor of SmolVLM without the package that spells numbers."""

from __future__ import annotations

import inspect

import pytest
from transformers.models.smolvlm import processing_smolvlm

from rl_vllm.patches.numbers_of_videos import _spelled, spell_no_numbers


def test_the_processor_asks_for_the_package_at_once() -> None:
    """Once this fails, it need not be kept from it any longer."""
    assert "num2words" in inspect.getsource(processing_smolvlm.SmolVLMProcessor.__init__)


def test_a_number_is_spelled_by_the_package_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    spell_no_numbers()
    with pytest.raises(NotImplementedError, match="videos need the package num2words"):
        processing_smolvlm.num2words(3)
    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    spell_no_numbers()
    assert processing_smolvlm.num2words is str
    assert _spelled is not str
