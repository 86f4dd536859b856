"""Can this Python run the GPU checks? Names what is missing and how to bring it to a machine without a network."""

import os
import shutil
import sys
from importlib.util import find_spec

# what the in-process engine, its tests and the benchmark import; none of the server's packages
PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "huggingface_hub": "huggingface-hub",
    "numpy": "numpy",
    "msgspec": "msgspec",
    "pytest": "pytest",
    "xdist": "pytest-xdist",
}


def missing_packages() -> list[str]:
    """Names, as pip knows them, of the packages that cannot be imported."""
    return [package for module, package in PACKAGES.items() if find_spec(module) is None]


def how_to_get(packages: list[str]) -> str:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"""{sys.executable} (Python {python}) lacks: {" ".join(packages)}
With a network:
    {sys.executable} -m pip install {" ".join(packages)}
Without one, on a machine that has it:
    python3 -m pip download --no-deps --only-binary=:all: --python-version {python} \\
        --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --dest wheels {" ".join(packages)}
and here, with the folder wheels beside you:
    {sys.executable} -m pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=$PWD/site benchmarks/gpu.sh"""


def main() -> None:
    packages = missing_packages()
    if packages:
        sys.exit(how_to_get(packages))
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        sys.exit(
            f"{compiler} is not on PATH: Triton and the kernels' tests compile with it. Install g++ or set CXX and CC."
        )
    import torch  # may be missing, see above

    if not torch.cuda.is_available():
        sys.exit(
            f"torch {torch.__version__} finds no CUDA device. Check nvidia-smi, and that this torch is built for CUDA "
            f"(torch.version.cuda is {torch.version.cuda}); PYTHON=... benchmarks/gpu.sh chooses another Python."
        )
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}")


if __name__ == "__main__":
    main()
