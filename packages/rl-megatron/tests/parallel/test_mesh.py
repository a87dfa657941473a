"""A mesh tells layouts apart on which ranks hold other parts of a model."""

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
