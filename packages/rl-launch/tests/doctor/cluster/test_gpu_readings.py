"""GPUs and faults as NVML, which is made up here, reports them."""

from dataclasses import dataclass
from types import SimpleNamespace

from rl_launch.doctor.cluster.node_readings import GpuReading, read_gpus

GIB = 2**30


class NVMLError(Exception):
    pass


@dataclass
class Gpu:
    """A GPU; None is not supported by it."""

    errors: int | None = 0
    rows: tuple | None = (0, 0, 0, 0)
    retires: int | None = None
    throttle: int = 0
    links: int = 18
    is_lost: bool = False


class Nvml:
    NVMLError = NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40  # noqa: N815
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80  # noqa: N815

    def __init__(self, *gpus, starts=True):
        self.gpus, self.starts = gpus, starts

    def nvmlInit(self):  # noqa: N802
        if not self.starts:
            raise NVMLError("Driver Not Loaded")

    def __getattr__(self, name):
        answers = {
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
            "nvmlSystemGetDriverVersion": lambda: "570.1",
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetHandleByIndex": self._handle,
            "nvmlDeviceGetName": lambda gpu: "NVIDIA H100",
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=80 * GIB, used=GIB),
            "nvmlDeviceGetNvLinkState": self._link,
            "nvmlDeviceGetFieldValues": lambda gpu, fields: [
                SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=26562))
            ],
            "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter: supported(gpu.errors),
            "nvmlDeviceGetRemappedRows": lambda gpu: supported(gpu.rows),
            "nvmlDeviceGetRetiredPagesPendingStatus": lambda gpu: supported(gpu.retires),
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: gpu.throttle,
        }
        return answers[name]

    def _handle(self, index):
        if self.gpus[index].is_lost:
            raise NVMLError("GPU is lost")
        return self.gpus[index]

    def _link(self, gpu, link):
        if link >= gpu.links:
            raise NVMLError("Not Supported")
        return 1


def supported(value):
    if value is None:
        raise NVMLError("Not Supported")
    return value


def test_a_gpu_is_read_with_its_links():
    found = read_gpus(Nvml(Gpu()))
    assert (found.driver, found.cuda, found.faults, found.problem) == ("570.1", "12.8", (), "")
    assert found.gpus == (GpuReading(0, "NVIDIA H100", 80 * GIB, GIB, 18, 18 * 26562e6),)


def test_a_gpu_without_links_and_counters_has_no_faults():
    found = read_gpus(Nvml(Gpu(errors=None, rows=None, links=0)))
    assert not found.faults
    assert found.gpus[0].nvlink_bytes_per_s is None


def test_faults_name_the_gpu_and_whether_a_run_can_use_it():
    gpus = (
        *(Gpu(errors=3), Gpu(rows=(1, 1, 1, 0)), Gpu(rows=(0, 9, 0, 1)), Gpu(retires=1)),
        *(Gpu(throttle=0xC0), Gpu(is_lost=True), Gpu()),
    )
    found = read_gpus(Nvml(*gpus))
    assert [(fault.text, fault.is_fatal) for fault in found.faults] == [
        ("GPU 0 has had 3 uncorrectable memory errors since its last reset", False),
        ("GPU 1 replaces a broken row of its memory at its next reset", False),
        ("GPU 2 has failed to replace a broken row of its memory", True),
        ("GPU 3 retires a page of its memory at the next reboot", False),
        ("GPU 4 is slowed down by heat and its power supply", False),
        ("GPU 5 does not answer: GPU is lost", True),
    ]
    assert [gpu.index for gpu in found.gpus] == [0, 1, 2, 3, 4, 6]


def test_a_driver_that_does_not_start_is_a_problem():
    assert read_gpus(Nvml(starts=False)).problem == "NVML does not start: Driver Not Loaded"
