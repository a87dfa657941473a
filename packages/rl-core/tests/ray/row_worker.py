"""A rank whose results follow from the rows that it is given."""

import os
from dataclasses import dataclass

import numpy as np

from rl_core.data.batch import Batch
from rl_core.metrics import Metric
from rl_core.model import LOGPROBS, Coordinates, Read


@dataclass(frozen=True)
class RowLoss:
    columns: tuple[str, ...] = ("loss_mask", "advantages", "prev_logprobs")
    reads: tuple[Read, ...] = (LOGPROBS,)


class RowHead:
    """A part of a rank that trains on all rows that it is given."""

    def __init__(self, coordinates: Coordinates):
        self._coordinates = coordinates

    def coordinates(self):
        return self._coordinates

    def train_step(self, batch, loss):
        return {"num_rows": Metric(float(len(batch)), reduction="sum")} if self._coordinates.leads else {}

    def send(self, manifest, transport):
        return ["digest of the head"]


class RowWorker:
    def __init__(self, coordinates: Coordinates):
        self._coordinates = coordinates
        self.head = RowHead(coordinates)
        self.has_device = True
        self.reference_factor = 2.0

    def coordinates(self):
        return self._coordinates

    def echo(self, value):
        return value

    def offload(self, parts):
        self.has_device = False

    def onload(self, parts):
        self.has_device = True

    def send(self, manifest, transport):
        return ["digest" if self.has_device else "weights that are away"]

    def end(self):
        os._exit(3)

    def infer(self, batch, reads, *, reference, temperature):
        if not self._coordinates.leads:
            return None
        tokens = batch.ragged("tokens")
        if "routed_experts" in batch:
            return Batch({"logprobs": tokens.like(batch.ragged("routed_experts").values.astype(np.float32))})
        return Batch(
            {
                "logprobs": tokens.like(
                    tokens.values.astype(np.float32) / temperature * (self.reference_factor if reference else 1)
                )
            }
        )

    def update_reference(self, share):
        self.reference_factor += share

    def train_step(self, batch, loss):
        if not self._coordinates.leads:
            return {}
        rows = zip(*(batch.ragged(name) for name in ("tokens", "loss_mask", "prev_logprobs")), strict=True)
        sums = [float((t * m).sum() + p.sum()) for t, m, p in rows]
        weighted = float((np.array(sums) * batch.array("advantages")).sum())
        return {
            "weighted": Metric(weighted, reduction="sum"),
            "num_routed": Metric(float("routed_experts" in batch), reduction="sum"),
            "most_rows": Metric(float(len(batch)), reduction="max"),
        }
