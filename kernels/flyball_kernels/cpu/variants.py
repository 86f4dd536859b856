"""The instruction sets that the C++ ops distinguish, and which of them a CPU has.

An image carries one library for each. What a variant is compiled with has to be what it asks of a CPU, else a process ends
with SIGILL; ``tests/kernels/test_variants.py`` holds the two to each other.
"""

import platform
from dataclasses import dataclass
from pathlib import Path

_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
X86_64_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}  # abm is lzcnt
X86_64_V4 = X86_64_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True)
class Variant:
    """One way to compile the ops.

    Attributes:
        machine: what ``platform.machine()`` says where it runs.
        cpu_flags: what /proc/cpuinfo must list.
        compile_flags: what makes the compiler use it.
    """

    name: str
    machine: str
    cpu_flags: frozenset[str]
    compile_flags: tuple[str, ...]

    @property
    def file_name(self) -> str:
        return f"libflyball_kernels-{self.name}.so"


_VNNI = X86_64_V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}  # no CPU has the second without the first
_AMX = _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
_BF16_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16")
# Armv8.2-A with what it makes mandatory that a compiler may use: large system extensions, rounding doubling, CRC
_ARMV8_2 = frozenset({"asimd", "atomics", "asimdrdm", "crc32", "asimddp"})

VARIANTS = (
    Variant("x86-64-v4-amx", "x86_64", _AMX, (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
    Variant("x86-64-v4-bf16", "x86_64", _BF16, _BF16_FLAGS),
    Variant("x86-64-v4-vnni", "x86_64", _VNNI, _VNNI_FLAGS),
    Variant("x86-64-v4", "x86_64", X86_64_V4, ("-march=x86-64-v4",)),
    Variant("x86-64-v3", "x86_64", X86_64_V3, ("-march=x86-64-v3",)),
    Variant("armv8.2-a-bf16", "aarch64", _ARMV8_2 | {"bf16"}, ("-march=armv8.2-a+dotprod+bf16",)),
    Variant("armv8.2-a-dotprod", "aarch64", _ARMV8_2, ("-march=armv8.2-a+dotprod",)),
    Variant("armv8-a", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",)),
)
"""Best first, for each machine."""


def variants_of(machine: str) -> tuple[Variant, ...]:
    """Return the variants for a machine, best first; none for one that Flyball does not know."""
    return tuple(variant for variant in VARIANTS if variant.machine == machine)


def check(variant: Variant, machine: str, cpu_flags: frozenset[str]) -> None:
    """Raise RuntimeError, saying what is missing, unless a CPU with these flags can run the variant."""
    if variant.machine != machine:
        raise RuntimeError(f"The C++ ops {variant.name} are for {variant.machine}; this machine is {machine}.")
    if lacking := variant.cpu_flags - cpu_flags:
        raise RuntimeError(
            f"The C++ ops {variant.name} need a CPU with {', '.join(sorted(lacking))}; this one lacks it."
        )


def choose(folder: Path, machine: str, cpu_flags: frozenset[str]) -> Variant:
    """Return the best variant in ``folder`` that a CPU with these flags can run.

    Raises:
        RuntimeError: there is none; the message says what the CPU, or the folder, lacks.
    """
    held = [variant for variant in variants_of(machine) if (folder / variant.file_name).is_file()]
    if not held:
        names = ", ".join(variant.file_name for variant in variants_of(machine)) or "nothing"
        raise RuntimeError(f"{folder} has no C++ ops for {machine}. It could have {names}.")
    best = next((variant for variant in held if variant.cpu_flags <= cpu_flags), held[-1])
    check(best, machine, cpu_flags)
    return best


def this_cpu() -> tuple[str, frozenset[str]]:
    """Return the machine and the flags of this CPU, as the kernel lists them; no flags where there is no /proc."""
    return platform.machine(), frozenset(cpu_flags_line().split())


def cpu_flags_line() -> str:
    """Return the flags of the first CPU of /proc/cpuinfo as they stand there, or nothing."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    line = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return line.partition(":")[2].strip()
