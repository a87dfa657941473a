"""GPUs are read through NVML, and a machine without one has none."""

import sys

from fake_nvml import FakeGpu, FakeNvml

from rl_core.usage.meter import Gpus, GpuUsage


def test_a_gpu_reports_shares_bytes_watts_and_degrees():
    gpu = FakeGpu("GPU-a", utilization=37, used=3 * 2**30, total=80 * 2**30, milliwatts=412_500, degrees=61)
    assert Gpus(FakeNvml([gpu])).read() == (GpuUsage(0, "GPU-a", 0.37, 3 * 2**30, 80 * 2**30, 412.5, 61.0),)


def test_a_value_that_a_gpu_does_not_have_is_left_out_and_the_others_are_read():
    (found,) = Gpus(FakeNvml([FakeGpu(utilization=None, milliwatts=None, degrees=40)])).read()
    assert (found.utilization, found.power_w, found.temperature_c) == (None, None, 40.0)


def test_memory_of_a_process_is_summed_over_gpus():
    gpus = [FakeGpu(processes=[(7, 100), (8, None)]), FakeGpu(processes=[(7, 20), (9, 5)])]
    assert Gpus(FakeNvml(gpus)).memory_by_pid() == {7: 120, 9: 5}


def test_without_a_driver_or_the_library_there_are_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu()], has_driver=False))
    assert Gpus.of_this_machine().read() == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    found = Gpus.of_this_machine()
    assert (found.read(), found.memory_by_pid()) == ((), None)


def test_the_real_module_has_every_function_that_is_called():
    import pynvml

    functions = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert [name for name in functions if not callable(getattr(pynvml, name, None))] == []
    assert issubclass(pynvml.NVMLError, Exception)
    assert pynvml.NVML_TEMPERATURE_GPU == FakeNvml.NVML_TEMPERATURE_GPU
