"""Packs what `benchmarks/gpu_check.py` needs for a machine with a GPU and torch, but without a package index.

    ssh MACHINE python3 -m pip list --format=freeze > there.txt
    uv run python tools/carry.py there.txt parts/ --python 3.12
    scp -r parts MACHINE: && ssh MACHINE 'for part in parts/*.tar.xz; do tar -xJf $part -C site; done'
    ssh MACHINE 'cd checkout && PYTHONPATH=~/site python3 benchmarks/gpu_check.py'

Packages that are there already stay out, and so do those that vLLM imports for other devices, formats and models only.
The machine keeps its torch: vLLM's kernels use torch's stable ABI and load with versions near the one they name. Of
each CUDA library only code for one architecture is kept, which makes vLLM's 330 MB 45. The parts are small enough to be
sent one by one.
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = {"rl-core": "ray", "rl-dtensor": "worker", "rl-megatron": "worker", "rl-vllm": "cuda"}
"""Extras whose requirements are wanted with those of all packages."""
NEWER = frozenset({"transformers", "peft", "tokenizers", "huggingface-hub", "typing-extensions", "anyio", "httpx"})
"""Packages that are carried even if the machine has another version of them."""
UNUSED = re.compile(
    r"(nvidia|torch|triton|rl|z3|cuda|nccl|tokenspeed)-.*|torch|triton|tilelang|flashinfer-python|torchcodec|"
    r"mistral-common|pynvvideocodec|instanttensor|pycountry|cryptography|anthropic|supervisor|quack-kernels|sentry-sdk|"
    r"rignore|fastar|uv"
)
"""Distributions that no section imports; `nvidia-ml-py` is kept."""
DROPPED = re.compile(
    r"^ray/(jars|rllib|serve|tune|train|data|dashboard/client|cpp)/|^vllm/(vllm-rs|third_party/(deep_gemm|fmha_sm100))|"
    r"^vllm/(_qutlass|_flashkda|_deepselect|_flashmla|vllm_flash_attn/_vllm_fa2)|\.map$|__pycache__|^\.\."
)
"""Files of the kept distributions that no section uses."""

MAGIC = 0xBA55ED50
ELF, PTX = 2, 1


def main() -> None:
    """Resolve, prune and pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("there", type=Path, help="`pip list --format=freeze` of the machine")
    parser.add_argument("parts", type=Path, help="folder for the parts")
    parser.add_argument("--python", default="3.12", help="version of the machine's Python (%(default)s)")
    parser.add_argument("--arch", type=int, default=90, help="its GPU's architecture (%(default)s)")
    parser.add_argument("--mib", type=float, default=45.0, help="most MiB of a part (%(default)s)")
    chosen = parser.parse_args()
    there = dict(line.split("==") for line in chosen.there.read_text().splitlines() if "==" in line)
    there = {normal(name): version for name, version in there.items()}
    if "torch" not in there:
        sys.exit(f"error: {chosen.there} lists no torch==VERSION; the machine needs torch with CUDA of its own")
    chosen.parts.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        install(site, chosen.python, there)
        files = list(kept_files(site, there))
        for library in (site / name for name in files if name.endswith(".so")):
            library.write_bytes(pruned(library.read_bytes(), chosen.arch))
        for number, names in enumerate(parts_of(site, files, chosen.mib * 2**20)):
            path = chosen.parts / f"part-{number}.tar.xz"
            pack(site, names, path)
            sys.stdout.write(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, {len(names)} files\n")


def normal(name: str) -> str:
    """Return a distribution's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name.strip().lower())


def requirements() -> Iterator[str]:
    """Yield the requirements of this repository's packages, with extras and without versions."""
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        extra = project.get("optional-dependencies", {}).get(EXTRAS.get(project["name"], ""), [])
        for each in map(Requirement, [*project["dependencies"], *extra]):
            if not each.name.startswith("rl-"):
                yield each.name + (f"[{','.join(sorted(each.extras))}]" if each.extras else "")


def install(site: Path, python: str, there: dict[str, str]) -> None:
    """Install the wanted packages at the lock's versions, for the machine's torch, with all that they need."""
    locked = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    times = Counter(each["name"] for each in locked)  # one with several versions is left to the resolver
    pins = {each["name"]: f"=={each['version']}" for each in locked if times[each["name"]] == 1}
    overrides = site.with_name("overrides.txt")
    held = ("torch", "torchvision", "torchaudio", "triton")
    overrides.write_text("".join(f"{name}=={there[name]}\n" for name in held if name in there))
    wanted = [each + pins.get(each.partition("[")[0], "") for each in sorted({*requirements()})]
    target = ["--target", str(site), "--python-version", python, "--python-platform", "x86_64-manylinux_2_35"]
    # without the workspace's own overrides, which name another torch; copies, as libraries are changed in their place
    options = ["-q", "--no-config", "--link-mode", "copy"]
    command = ["uv", "pip", "install", *options, *target, "--override", str(overrides), *wanted]
    subprocess.run(command, check=True)


def kept_files(site: Path, there: dict[str, str]) -> Iterator[str]:
    """Yield the paths within the site of all files to carry."""
    for distribution in distributions(path=[str(site)]):
        name = normal(distribution.metadata["Name"])
        is_there = name in there and name not in NEWER
        if not is_there and (name == "nvidia-ml-py" or not UNUSED.fullmatch(name)):
            yield from files_of(distribution, site)


def files_of(distribution: Distribution, site: Path) -> Iterator[str]:
    """Yield the files of a wheel, except the ones that no section uses."""
    for file in map(str, distribution.files or []):
        if not DROPPED.search(file) and (site / file).is_file():
            yield file


def pruned(library: bytes, arch: int) -> bytes:
    """Return a shared library with zeros in place of CUDA code that another architecture would run.

    Fat binaries list images by kind and architecture. The driver takes machine code of its own architecture, else it
    compiles the newest PTX that is not above it; both stay, headers too, so that offsets remain what they are.
    """
    data = bytearray(library)
    at = data.find(struct.pack("<I", MAGIC))
    while at >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        end, entry, images = at + header + size, at + header, []
        while entry < end:
            kind, _, start, length = struct.unpack_from("<HHIQ", data, entry)
            (target,) = struct.unpack_from("<I", data, entry + 28)
            images.append((kind, target, entry + start, length))
            entry += start + length
        machine_code = any((kind, target) == (ELF, arch) for kind, target, _, _ in images)
        newest = max((target for kind, target, _, _ in images if kind == PTX and target <= arch), default=None)
        kept = (ELF, arch) if machine_code else (PTX, newest)
        for kind, target, start, length in images:
            if (kind, target) != kept:
                data[start : start + length] = bytes(length)
        at = data.find(struct.pack("<I", MAGIC), end)
    return bytes(data)


def parts_of(site: Path, files: Sequence[str], limit: float) -> Iterator[list[str]]:
    """Yield files in groups that compress to less than a number of bytes, each with the files of one package after
    another."""
    part, held = [], 0.0
    for file in files:
        size = compressed_bytes(site / file)
        if part and held + size > limit:
            yield part
            part, held = [], 0.0
        part.append(file)
        held += size
    yield part


def compressed_bytes(path: Path) -> int:
    """Return the bytes of a file by xz; of a small one, its size, which is more."""
    if path.stat().st_size < 2**20:
        return path.stat().st_size // 3
    done = subprocess.run(["xz", "-1", "-c", str(path)], check=True, capture_output=True)
    return len(done.stdout)


def pack(site: Path, names: Sequence[str], path: Path) -> None:
    """Write one part."""
    plain = path.with_suffix("")
    with tarfile.open(plain, "w") as tar:
        for name in names:
            tar.add(site / name, name)
    subprocess.run(["xz", "-6", "-T0", "-f", str(plain)], check=True)


if __name__ == "__main__":
    if shutil.which("xz") is None:
        sys.exit("error: xz is missing: install xz-utils")
    main()
