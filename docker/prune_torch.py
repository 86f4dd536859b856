"""Delete from this Python's packages what torch does not need to run on a CPU, and say how much that was.

torch on PyPI is a CUDA build. It loads on a machine without a GPU as long as the libraries that it links to are there; what
those would load later (most of cuDNN and NVRTC), triton and the headers of CUDA are gigabytes that nothing uses. The headers of
torch stay: the C++ ops are compiled with them.
"""

import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = Path(sysconfig.get_path("purelib"))
TORCH = PACKAGES / "torch"
ENTRY = TORCH / "lib" / "libtorch_python.so"
UNUSED = ("triton", "cuda", "nvidia/*/include", "torch/share", "torch/lib/*.a")


def needed_names(library: Path) -> set[str]:
    dynamic = subprocess.run(("readelf", "-d", library), check=True, capture_output=True, text=True).stdout
    return {line.partition("[")[2].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}


def closure(entry: Path, libraries: dict[str, Path]) -> set[Path]:
    """Return every library of ours that loading ``entry`` brings with it."""
    found: set[Path] = set()
    queue = [entry]
    while queue:
        library = queue.pop()
        if library not in found:
            found.add(library)
            queue += [libraries[name] for name in needed_names(library) if name in libraries]
    return found


def shared_libraries() -> Iterator[Path]:
    yield from (TORCH / "lib").glob("*.so*")
    yield from (PACKAGES / "nvidia").rglob("*.so*")


def prune() -> None:
    libraries = {path.name: path for path in shared_libraries()}
    kept = closure(ENTRY, libraries) | {TORCH / "lib" / "libtorch_global_deps.so"}
    for path in set(libraries.values()) - kept:
        path.unlink()
    for pattern in UNUSED:
        for path in PACKAGES.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


before = size(PACKAGES)
prune()
print(f"{PACKAGES}: {before / 1e9:.2f} GB before, {size(PACKAGES) / 1e9:.2f} GB without what only a GPU needs")
