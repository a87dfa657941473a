"""The worker keeps the contract of model workers, on every kind of mesh."""

from pathlib import Path

import pytest

from rl_core.selfcheck.rank_pool import RankPool
from rl_core.testing.exhaustive import partly_exhaustive, with_exhaustive
from rl_core.testing.model_worker import LAYOUTS, ModelWorkerSuite


class PooledSuite(ModelWorkerSuite):
    @pytest.fixture(scope="session")
    @classmethod
    def pool(cls, ranks: RankPool) -> RankPool:
        return ranks


LAID_OUT = partly_exhaustive(LAYOUTS, always=["packed-16", "padded-3", "padded-alike"])
"""Rows packed, padded, and padded by length; the others differ in the sizes of microbatches, which rl-core cuts."""


# `test_checkpoint` has a reference that resumes on another mesh
@with_exhaustive("test_a_checkpoint_holds_a_reference_that_has_moved")
class TestDTensorWorker(PooledSuite):
    factory = "dtensor_factories:build"

    @pytest.mark.parametrize("layout", LAID_OUT)
    def test_every_read_of_a_policy_is_that_of_transformers(self, layout: str) -> None:
        super().test_every_read_of_a_policy_is_that_of_transformers(layout)

    @pytest.mark.parametrize("layout", LAID_OUT)
    def test_losses_gradients_and_weights_are_those_of_one_process(self, tmp_path: Path, layout: str) -> None:
        super().test_losses_gradients_and_weights_are_those_of_one_process(tmp_path, layout)


@with_exhaustive(
    "test_a_batch_that_counts_for_nothing_changes_nothing",
    "test_a_branch_steps_by_its_own_settings_on_another_number_of_ranks",
    "test_a_checkpoint_holds_a_reference_that_has_moved",
    "test_a_damaged_file_is_named_and_nothing_is_loaded",
    "test_a_model_that_does_not_train_saves_and_loads_all_its_weights",
    "test_a_reference_moves_towards_the_model_when_it_is_told_to",
    "test_a_resumed_run_is_bit_equal",
    "test_an_export_and_a_transfer_hold_the_same_weights",
    "test_frozen_parameters_stay_and_others_step_at_their_own_rates",
    "test_metrics_are_those_of_the_whole_batch",
    "test_muon_steps_whole_matrices_and_adamw_the_rest",
    "test_norms_and_biases_are_not_decayed_if_the_config_says_so",
    "test_overflows_in_float16_are_skipped_and_halve_the_scale_of_the_loss",
    "test_ranks_name_the_files_they_write_and_none_writes_what_another_steps",
    # ranks of these meshes share all rows, so that none is without
    "test_ranks_without_rows_join_in",
    "test_the_reference_stays_what_it_was",
)
class MeshSuite(PooledSuite):
    """Properties of a mesh that no other test shows: reads and roles.

    Layouts, losses and weights are held against one process in `test_parity`, checkpoints and references in
    `test_checkpoint`, and what knows nothing of the mesh in `TestDTensorWorker`.
    """

    worlds = (2,)

    @pytest.mark.parametrize("layout", ["packed-16", "padded-3"])
    def test_every_read_of_a_policy_is_that_of_transformers(self, layout: str) -> None:
        super().test_every_read_of_a_policy_is_that_of_transformers(layout)

    test_losses_gradients_and_weights_are_those_of_one_process = None
    test_the_norm_is_reported_before_clipping = None
    test_schedules_follow_one_another = None
    test_patterns_that_match_nothing_are_refused = None
    test_a_save_in_the_background_holds_what_was_there_when_it_was_asked_for = None
    test_a_save_that_fails_in_the_background_is_told_once_and_the_next_one_works = None
    test_a_run_resumes_on_another_number_of_ranks = None
    test_a_run_saved_before_its_first_step_resumes = None
    test_the_same_seed_gives_the_same_bits = None
    test_what_is_offloaded_comes_back_bit_equal = None
    test_what_a_model_cannot_do_is_refused = None
    test_half_precision_is_near = None


@with_exhaustive("test_a_gradient_that_is_not_finite_skips_the_optimizer_and_not_the_schedule")
class GradientSuite(MeshSuite):
    """Every rank has a part of each gradient, as in `TestDTensorWorker`; a stage of a pipeline has gradients alone."""


class TestTensorParallel(GradientSuite):
    factory = "dtensor_factories:build_tensor_parallel"


class TestContextParallel(GradientSuite):
    """Its ranks share parameters and files as those of `TestDTensorWorker` do, so that only reads and losses differ."""

    factory = "dtensor_factories:build_context_parallel"

    test_a_resumed_run_is_bit_equal = None
    test_a_checkpoint_holds_a_reference_that_has_moved = None
    test_a_model_that_does_not_train_saves_and_loads_all_its_weights = None
    test_a_branch_steps_by_its_own_settings_on_another_number_of_ranks = None
    test_a_damaged_file_is_named_and_nothing_is_loaded = None
    test_ranks_name_the_files_they_write_and_none_writes_what_another_steps = None
    test_an_export_and_a_transfer_hold_the_same_weights = None
    test_the_reference_stays_what_it_was = None


class TestPipelineParallel(MeshSuite):
    factory = "dtensor_factories:build_pipeline_parallel"
