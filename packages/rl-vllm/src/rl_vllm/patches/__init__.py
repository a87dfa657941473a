"""Corrections of vLLM, one row per fault, all needed with vLLM 0.32.0, the version that this package pins.

A patch is deleted when its removal test fails: the test shows that vLLM still has the fault. Run `tests/patches` after
each update of vLLM, and search upstream again for those without an issue (searched from 2026-11-26 to 30).

========================  ==============================================  =========  ================
file                      fault                                           seen in    upstream
========================  ==============================================  =========  ================
`bare_model`              adapters rename the parameters of their layers  0.32.0     issue 39934
`continued_text`          stop strings are not found across interruptions 0.32.0     none found
`direct_copies`           a reload drops what a model copies by itself    0.32.0     pull request 57795
`draft_files`             draft models are loaded as the model is         0.32.0     pull request 55337
`draft_files`             heads share layers that are equal at first      0.32.0     none found
`expert_layers`           a reload on CPU does not pack experts again     0.32.0     pull request 40390
`expert_layers`           the router on CPU ignores sigmoids and biases   0.32.0     none found
`expert_layers`           a rank on CPU computes experts of other ranks   0.32.0     issue 57837
`gathered_tokens`         engines on CPU cannot share experts             0.32.0     issue 57837
`head_bias`               each load makes another bias of the head        0.32.0     pull request 46835
`kernel_overrides`        no engine starts on CPU once numba is loaded    0.32.0     none found
`model_inspection`        a model's class is imported twice on CPU too    0.32.0     issue 19317
`numbers_of_videos`       SmolVLM's images need a package for videos      0.32.0     none found
`per_layer_inputs`        Gemma 3n leaves out embeddings for each layer   0.32.0     none found
`pipeline_buffers`        pipeline ranks on CPU receive no activations    0.32.0     none found
`ranks_of_node`           a node on CPU has one rank of an engine         0.32.0     none found
`rotary_embeddings`       the kernel on CPU takes heads for tokens        0.32.0     none found
`sampling_of_drafts`      a filter on CPU fails in a step without drafts  0.32.0     none found
`sampling_of_drafts`      temperatures of drafts on CPU are arbitrary     0.32.0     issue 55005
`siglip_names`            SigLIP towers have other names in transformers  0.32.0     none found
`sleep_memory`            sleep beside other processes kills an engine    0.32.0     pull request 45620
========================  ==============================================  =========  ================

Removal tests, in `tests/`:

- `bare_model`: `patches/test_bare_model.py::test_vllm_puts_the_parameters_of_a_wrapped_layer_under_another_name`
- `continued_text`: `patches/test_continued_text.py::test_vllm_looks_for_stop_strings_only_in_the_tokens_of_a_request`
- `direct_copies`: `patches/test_direct_copies.py::test_vllms_reload_drops_what_a_model_copies_itself` and
  `patches/test_direct_copies.py::test_gpt_oss_copies_its_sinks_by_itself`
- `draft_files`: `patches/test_draft_files.py::test_vllms_loader_of_draft_models_drops_their_load_config` and
  `patches/test_layers_of_heads.py::test_vllm_shares_layers_that_are_equal`
- `expert_layers`: `patches/test_expert_layers.py::test_vllms_method_packs_only_when_it_makes_the_kernel`,
  `patches/test_expert_routing.py::test_vllms_router_on_cpu_leaves_out_sigmoids_and_biases` and
  `patches/test_expert_layers.py::test_vllms_kernel_takes_numbers_of_experts_for_places`
- `gathered_tokens`: `patches/test_gathered_tokens.py::test_vllms_communicator_on_cpu_gathers_no_uneven_tokens`
- `head_bias`: `patches/test_head_bias.py::test_vllm_makes_another_bias_in_every_load`
- `kernel_overrides`: `patches/test_kernel_overrides.py::test_vllm_takes_any_attribute_for_a_mapping`
- `model_inspection`: `patches/test_model_inspection.py::test_vllm_inspects_a_model_in_another_process`
- `numbers_of_videos`: `patches/test_numbers_of_videos.py::test_the_processor_asks_for_the_package_at_once`
- `per_layer_inputs`:
  `patches/test_per_layer_inputs.py::test_vllms_language_model_of_gemma_3n_does_not_embed_tokens_for_each_layer`
- `pipeline_buffers`: `patches/test_pipeline_buffers.py::test_vllms_pipeline_rank_begins_without_buffers`
- `ranks_of_node`: `patches/test_ranks_of_node.py::test_vllm_takes_the_second_rank_for_one_of_another_node`
- `rotary_embeddings`:
  `patches/test_rotary_embeddings.py::test_vllms_kernel_is_wrong_for_heads_in_a_dimension_of_their_own`
- `sampling_of_drafts`: `patches/test_sampling_of_drafts.py::test_vllms_fallback_leaves_the_output_as_it_was` and
  `patches/test_empty_top_k.py::test_vllms_filter_fails_for_no_logits`
- `siglip_names`: `patches/test_siglip_names.py::test_vllm_does_not_know_the_names_of_transformers`
- `sleep_memory`: `patches/test_sleep_memory.py::test_vllms_worker_fails_if_another_process_takes_memory`
"""
