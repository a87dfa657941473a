"""A mesh tells layouts apart on which ranks hold other parts of a model, and makes few groups."""

from layouts import EP, ETP, PP, TP, VPP


def test_settings_that_give_ranks_other_parts_of_the_model_are_other_layouts(ranks):
    different = [
        {TP: 2, EP: 2},
        {TP: 2, EP: 2, ETP: 1},
        {PP: 2},
        {PP: 2, VPP: 2},
        {PP: 2, "num_layers_in_first_pipeline_stage": 3},
        {PP: 2, "num_layers_in_last_pipeline_stage": 3},
    ]
    layouts = []
    for settings in different:
        first, *others = ranks.run("mesh_cases:layout_of", [(settings,)] * 4)
        assert others == [first] * 3
        layouts.append(first)
    assert all(layouts.count(layout) == 1 for layout in layouts)


def test_spelling_out_what_is_the_default_is_the_same_layout(ranks):
    layouts = [ranks.run("mesh_cases:layout_of", [(each,)] * 4) for each in ({TP: 2, EP: 2}, {TP: 2, EP: 2, ETP: 2})]
    assert layouts[0] == layouts[1]


def test_groups_of_the_same_ranks_are_one_for_each_kind_of_traffic(ranks):
    found = ranks.run("mesh_cases:groups_of", [({},)] * 4)
    # The default group, control, and one of rows, tensors with rows, experts' rows and the optimizer's.
    assert found == [([(0, 1, 2, 3)] * 6, True, True, 0 + 1 + 2 + 3)] * 4


def test_ranks_of_one_row_sum_over_the_ranks_with_other_rows(ranks):
    found = ranks.run("mesh_cases:groups_of", [({TP: 2},)] * 4)
    assert [total for *_, total in found] == [0 + 2, 1 + 3, 0 + 2, 1 + 3]
