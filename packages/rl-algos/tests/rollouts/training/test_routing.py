import pickle
from dataclasses import dataclass

import numpy as np

from rl_algos.rollouts.training.batch import with_routing
from rl_core.data.batch import Batch, RemoteColumn, RemoteRows
from rl_core.data.ragged import Ragged


@dataclass(frozen=True, eq=False)
class Shelf:
    """Columns that count how often they are fetched."""

    columns: Batch
    reads: list

    def fetch(self):
        self.reads.append(self.columns)
        return self.columns


def columns(lengths, *, routed):
    tokens = Ragged.from_rows([np.ones(length) for length in lengths], np.int32)
    found = {"tokens": tokens}
    if routed:
        found["routed_experts"] = tokens.like(np.full((len(tokens.values), 3, 2), 1, np.int16))
    return Batch(found)


def elsewhere(batch, reads):
    return Batch(RemoteRows.of(Shelf(batch, reads), batch.lengths).columns(list(batch)))


def test_a_group_that_failed_as_a_whole_gets_unknown_routing_where_others_have_some():
    reads = []
    parts = [
        elsewhere(columns(lengths, routed=routed), reads)
        for lengths, routed in (((2, 1), True), ((3,), False), ((4,), True))
    ]
    filled = with_routing(parts)
    assert [list(batch) for batch in filled] == [["tokens", "routed_experts"]] * 3
    assert len(reads) == 1
    joined = Batch.concat(filled)
    assert isinstance(joined.columns["routed_experts"], RemoteColumn)
    routed = joined.ragged("routed_experts")
    assert routed.values.shape == (10, 3, 2)
    assert [set(row.flatten().tolist()) for row in routed] == [{1}, {1}, {-1}, {1}]
    store = filled[1].columns["routed_experts"].rows.stores[0]
    assert pickle.loads(pickle.dumps(store)).fetch().ragged("routed_experts")[0].tolist() == [[[-1, -1]] * 3] * 3


def test_columns_stay_as_they_are_if_all_or_none_have_routing():
    for routed in (True, False):
        parts = [columns((2,), routed=routed), columns((3, 1), routed=routed)]
        assert with_routing(parts) == parts
