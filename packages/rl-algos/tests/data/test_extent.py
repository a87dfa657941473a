from __future__ import annotations

import logging

import pytest

from rl_algos.data.flow import FlowStream, tell_extent
from rl_algos.data.stream import Stream


def told(
    caplog: pytest.LogCaptureFixture, items: int, batch: int, steps: int | None, epochs: int | None
) -> tuple[int, str]:
    """The level and text of what is logged."""
    bound = 1 if steps is None and epochs is None else epochs
    stream = Stream([list(range(items))], seed=1, shuffle=False, max_num_epochs=bound)
    with caplog.at_level(logging.INFO, logger="rl_algos.data.flow"):
        tell_extent(stream, batch, unit="rows", size_key="size", max_num_steps=steps, max_num_epochs=epochs)
    [record] = caplog.records
    return record.levelno, record.getMessage()


@pytest.mark.parametrize(
    ("items", "batch", "steps", "epochs", "level", "text"),
    [
        (600, 128, None, None, logging.WARNING, "only 5 steps: 600 rows in steps of 128 (size)"),
        (40, 64, None, 1, logging.WARNING, "only 1 step: 40 rows"),
        (600, 64, None, None, logging.INFO, "600 rows, 64 a step: 10 steps, 1 epoch"),
        # a few steps that were asked for are meant
        (600, 64, 3, None, logging.INFO, "3 steps, 0.32 epochs"),
        (
            6000,
            64,
            20,
            3,
            logging.WARNING,
            "20, which is 0.21 of the 3 epochs in max_num_epochs: an epoch has 94 steps",
        ),
        (600, 64, 20, 3, logging.INFO, "20 steps, 2.13 epochs"),
    ],
)
def test_a_run_tells_how_much_of_its_data_it_trains_on(
    caplog: pytest.LogCaptureFixture,
    items: int,
    batch: int,
    steps: int | None,
    epochs: int | None,
    level: int,
    text: str,
) -> None:
    found = told(caplog, items, batch, steps, epochs)
    assert found[0] == level
    assert text in found[1]


def test_nothing_is_told_of_data_of_unknown_size(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rl_algos.data.flow"):
        tell_extent(FlowStream([]), 4, unit="rows", size_key="size", max_num_steps=3, max_num_epochs=None)
    assert not caplog.records
