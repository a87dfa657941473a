"""Statistics of vLLM's scheduler become the load of an engine."""

from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from rl_vllm.engine.process_engine import Load


def stats(running, waiting, deferred, usage, drafts=None):
    return SchedulerStats(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=deferred,
        kv_cache_usage=usage,
        spec_decoding_stats=drafts,
    )


def test_the_newest_step_counts_and_drafts_add_up():
    load = Load()
    load.record(stats(3, 2, 1, 0.25), None)
    load.record(None, None)
    assert load.newest == {"num_running": 3, "num_waiting": 3, "kv_cache_usage": 0.25}
    for accepted in (4, 1):
        drafts = SpecDecodingStats.new(5)
        drafts.observe_draft(num_draft_tokens=5, num_accepted_tokens=accepted)
        load.record(stats(1, 0, 0, 0.5, drafts), None, engine_idx=0)
    assert load.newest == {"num_running": 1, "num_waiting": 0, "kv_cache_usage": 0.5}
    assert load.drafts.read() == (2, 10, (2, 1, 1, 1, 0))


def test_preempted_requests_are_counted_since_the_start():
    load = Load()
    for num_preempted in (2, 0, 3):
        step = IterationStats()
        step.num_preempted_reqs = num_preempted
        load.record(stats(3, 2, 0, 1.0), step, engine_idx=0)
    assert load.newest["num_preempted"] == 5
