from types import SimpleNamespace

from rl_launch.commands.preparation import _to_download
from rl_launch.run_config.reading import read_plan

DEMONSTRATIONS = (
    "grpo.demonstrations.dataset.dataset_name=owner/demonstrations",
    "grpo.demonstrations.rows_per_step=8",
    "loss_fn.demonstrations=nll",
)


def test_rows_of_every_dataset_of_a_run_may_need_a_download():
    def needed(*settings):
        return _to_download(SimpleNamespace(written=read_plan("grpo-arithmetic", list(settings)), evaluates=False))

    assert needed() == ""
    assert needed(*DEMONSTRATIONS) == "owner/demonstrations would be downloaded (rl data show reads rows)"
