"""The next microbatch is on its way while one is computed on."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rl_core.torch.training import lookahead
from rl_core.torch.training.lookahead import prepared_ahead


@pytest.fixture
def streams(monkeypatch):
    """CUDA's streams in name only; what happens on them, in order."""
    events = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def record_event(self):
            events.append("recorded")
            return len(events)

        def wait_event(self, event):
            events.append(f"waits for {event}")

    @contextmanager
    def within(stream):
        events.append("copies")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(lookahead, "_keep", lambda tensor, stream: events.append("kept"))
    return events


def test_one_microbatch_is_made_ahead_and_none_twice(streams):
    made = []

    def maker(index):
        def make():
            made.append(index)
            return SimpleNamespace(rows=SimpleNamespace(offsets=index, columns={}))

        return make

    taken = prepared_ahead([maker(index) for index in range(3)], torch.device("cuda"))
    for index, ahead in enumerate([[0, 1], [0, 1, 2], [0, 1, 2]]):
        assert taken[index]().rows.offsets == index
        assert made == ahead
    assert streams[:6] == ["copies", "recorded", "copies", "recorded", "waits for 2", "kept"]


def test_a_device_without_streams_makes_each_in_its_turn():
    makers = [lambda: None]
    assert prepared_ahead(makers, torch.device("cpu")) is makers
