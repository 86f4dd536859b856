"""Which library a CPU gets, and what each asks of it."""

import itertools
import logging
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from flyball_kernels import PackedLinear, backend, choose_backend
from flyball_kernels.cpu import build, library, variants
from flyball_kernels.cpu.variants import VARIANTS, X86_64_V3, X86_64_V4, choose, this_cpu, variants_of

PENRYN = frozenset({"fpu", "sse2", "ssse3", "sse4_1", "cx16", "lahf_lm"})
HASWELL = X86_64_V3 | {"fpu", "sse2", "erms"}
SKYLAKE_X = X86_64_V4 | HASWELL
ICE_LAKE = SKYLAKE_X | {"avx512_vnni"}
ZEN_4 = ICE_LAKE | {"avx512_bf16"}
SAPPHIRE_RAPIDS = ZEN_4 | {"amx_bf16", "amx_tile", "amx_int8"}
CORTEX_A72 = frozenset({"fp", "asimd", "evtstrm", "aes", "pmull", "sha1", "sha2", "crc32", "cpuid"})
NEOVERSE_N1 = CORTEX_A72 | {"atomics", "fphp", "asimdhp", "asimdrdm", "lrcpc", "dcpop", "asimddp", "ssbs"}
NEOVERSE_V1 = NEOVERSE_N1 | {"jscvt", "fcma", "sve", "asimdfhm", "i8mm", "bf16", "svei8mm", "svebf16"}
NAMES = [variant.name for variant in variants_of("x86_64")]

MACROS = {  # of gcc, and the flag of /proc/cpuinfo
    "LZCNT": "abm",
    "BMI": "bmi1",
    "AVX512BF16": "avx512_bf16",
    "AVX512VNNI": "avx512_vnni",
    "LAHF_SAHF": "lahf_lm",
    "GCC_HAVE_SYNC_COMPARE_AND_SWAP_16": "cx16",
    **{
        name.upper(): name
        for name in {*X86_64_V4, "amx_tile", "amx_bf16", "amx_int8"} - {"abm", "bmi1", "lahf_lm", "cx16"}
    },
}
IN_EVERY_X86_64 = {"SSE3", "CRC32"}  # sse3 came before ssse3, crc32 is part of sse4_2


@pytest.fixture
def folder(tmp_path):
    """A folder as an image has it, of empty files."""
    for variant in VARIANTS:
        (tmp_path / variant.file_name).touch()
    return tmp_path


@pytest.fixture
def load(monkeypatch):
    """Load what a setting names on a CPU with these flags; return the path of the library."""
    loaded = []
    monkeypatch.setattr(library, "_loaded", False)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)

    def load(setting, cpu_flags, machine="x86_64"):
        monkeypatch.setenv(library.PREBUILT_VARIABLE, str(setting))
        monkeypatch.setattr(variants, "this_cpu", lambda: (machine, cpu_flags))
        library.load()
        return loaded[-1]

    return load


@pytest.mark.parametrize(
    ("machine", "cpu_flags", "name"),
    [
        ("x86_64", HASWELL, "x86-64-v3"),
        ("x86_64", SKYLAKE_X, "x86-64-v4"),
        ("x86_64", ICE_LAKE, "x86-64-v4-vnni"),
        ("x86_64", ZEN_4, "x86-64-v4-bf16"),
        ("x86_64", SAPPHIRE_RAPIDS, "x86-64-v4-amx"),
        ("x86_64", SAPPHIRE_RAPIDS - {"amx_bf16"}, "x86-64-v4-bf16"),
        ("x86_64", ZEN_4 - {"avx512vl"}, "x86-64-v3"),
        ("aarch64", CORTEX_A72, "armv8-a"),
        ("aarch64", NEOVERSE_N1, "armv8.2-a-dotprod"),
        ("aarch64", NEOVERSE_V1, "armv8.2-a-bf16"),
    ],
)
def test_a_cpu_gets_the_best_library_that_it_can_run(folder, machine, cpu_flags, name):
    assert choose(folder, machine, cpu_flags).name == name


def test_a_variant_that_the_folder_lacks_gives_way_to_the_next(folder):
    (folder / "libflyball_kernels-x86-64-v4-bf16.so").unlink()
    assert choose(folder, "x86_64", ZEN_4).name == "x86-64-v4-vnni"
    (folder / "libflyball_kernels-x86-64-v4-vnni.so").unlink()
    assert choose(folder, "x86_64", ZEN_4).name == "x86-64-v4"
    (folder / "libflyball_kernels-x86-64-v4.so").unlink()
    assert choose(folder, "x86_64", ZEN_4).name == "x86-64-v3"


def test_a_cpu_without_avx2_gets_none_and_is_told_why(folder):
    with pytest.raises(RuntimeError, match=r"x86-64-v3 need a CPU with abm, avx, avx2, .*xsave; this one lacks it"):
        choose(folder, "x86_64", PENRYN)
    (folder / "libflyball_kernels-x86-64-v3.so").unlink()
    with pytest.raises(RuntimeError, match=r"x86-64-v4 need a CPU with avx512bw, .*; this one lacks it"):
        choose(folder, "x86_64", HASWELL)


@pytest.mark.parametrize("machine", ["aarch64", "riscv64"])
def test_a_machine_that_the_folder_has_nothing_for(tmp_path, machine):
    (tmp_path / "libflyball_kernels-x86-64-v3.so").touch()
    with pytest.raises(RuntimeError, match=f"has no C.. ops for {machine}"):
        choose(tmp_path, machine, ZEN_4)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_variant_asks_for_what_the_one_after_it_asks(machine):
    known = variants_of(machine)
    assert all(worse.cpu_flags < better.cpu_flags for better, worse in itertools.pairwise(known))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks a compiler for x86-64")
@pytest.mark.parametrize("name", NAMES)
def test_a_library_uses_nothing_that_its_variant_does_not_ask_for(name):
    (variant,) = (variant for variant in VARIANTS if variant.name == name)
    added = macros(variant.compile_flags) - macros(["-march=x86-64"]) - IN_EVERY_X86_64
    assert {MACROS.get(macro, macro) for macro in added} <= variant.cpu_flags


def macros(flags) -> set[str]:
    """The instruction sets that a compiler for x86-64 may use with these flags, by its macros."""
    command = [build.find_compiler(), *flags, "-dM", "-E", "-x", "c++", os.devnull]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = {line.split()[1].strip("_") for line in lines if line.endswith(" 1") and line.split()[1].startswith("__")}
    return {name for name in names if name == name.upper() and not name.startswith("FP_FAST_")}


def test_a_folder_is_loaded_by_the_flags_of_the_cpu(folder, load, caplog):
    with caplog.at_level(logging.INFO):
        assert load(folder, SKYLAKE_X) == folder / "libflyball_kernels-x86-64-v4.so"
    assert f"from {folder / 'libflyball_kernels-x86-64-v4.so'}" in caplog.text


def test_a_file_that_the_cpu_cannot_run_is_refused_before_it_is_loaded(folder, load):
    with pytest.raises(RuntimeError, match="x86-64-v4 need a CPU with avx512bw"):
        load(folder / "libflyball_kernels-x86-64-v4.so", HASWELL)
    with pytest.raises(RuntimeError, match="armv8-a are for aarch64; this machine is x86_64"):
        load(folder / "libflyball_kernels-armv8-a.so", HASWELL)
    own = folder / "my-own.so"
    assert load(own, PENRYN) == own


def test_without_a_library_for_this_cpu_the_references_run(folder, load, monkeypatch, caplog):
    monkeypatch.setenv(library.PREBUILT_VARIABLE, str(folder))
    monkeypatch.setattr(variants, "this_cpu", lambda: ("x86_64", PENRYN))
    with caplog.at_level(logging.WARNING):
        assert choose_backend("cpu", "auto").name == "torch"
    assert "slower torch references run instead. The C++ ops x86-64-v3 need a CPU with abm, avx, avx2" in caplog.text


def test_the_flags_of_this_cpu_are_read():
    machine, cpu_flags = this_cpu()
    assert (machine == "x86_64") <= ("sse2" in cpu_flags)


@pytest.mark.slow
def test_every_variant_that_this_cpu_runs_computes_the_same(tmp_path):
    """Compiled for AVX2 and for AVX-512, the ops pass their tests."""
    machine, cpu_flags = this_cpu()
    names = [variant.name for variant in variants_of(machine) if variant.cpu_flags <= cpu_flags]
    tests = [f"{Path(__file__).parent}/test_{op}.py" for op in ("linear", "paged_attention", "rms_norm", "sampling")]
    assert names

    def passes(name: str) -> None:
        (file,) = build.build_variants([name], tmp_path / name)
        environment = {**os.environ, library.PREBUILT_VARIABLE: str(file)}
        command = [sys.executable, "-m", "pytest", "-q", "-k", "not triton", *tests]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{name}:\n{result.stdout}"

    with ThreadPoolExecutor(2) as pool:  # compilers take minutes, and this is often the last test that runs
        list(pool.map(passes, names))


@pytest.mark.slow
@pytest.mark.skipif(not this_cpu()[1] >= X86_64_V3, reason="this CPU lacks AVX2")
def test_bits_do_not_depend_on_the_core_that_the_compiler_tunes_for(tmp_path):
    """For Zen 3, GCC leaves some sums of products as they are written, if that makes a shorter chain of sums."""
    file = build.build_for(("-march=x86-64-v3", "-mtune=znver3"), tmp_path / build.LIBRARY_NAME)
    test = Path(__file__).parents[1] / "runtime/engine/test_same_bits.py"
    environment = {**os.environ, library.PREBUILT_VARIABLE: str(file)}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "test_log_probabilities_are_the_same_bits", str(test)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


# whose linear layers run


@pytest.mark.parametrize("name", NAMES)
def test_the_best_library_that_a_cpu_runs_brings_its_linear_layers(name):
    (variant,) = (variant for variant in VARIANTS if variant.name == name)
    assert backend.reason_for_torch(name, "x86_64", variant.cpu_flags) is None


@pytest.mark.parametrize(
    ("compiled_for", "machine", "cpu_flags", "reason"),
    [
        ("x86-64-v3", "x86_64", ZEN_4, "this CPU has x86-64-v4-bf16, which torch uses, .* compiled for x86-64-v3"),
        ("x86-64-v4-bf16", "x86_64", SAPPHIRE_RAPIDS, "this CPU has x86-64-v4-amx, which torch uses"),
        ("generic", "x86_64", PENRYN, "those for generic have not been measured"),
        ("armv8-a", "aarch64", CORTEX_A72, "those for armv8-a have not been measured"),
        ("armv8.2-a-bf16", "aarch64", NEOVERSE_V1, "those for armv8.2-a-bf16 have not been measured"),
    ],
)
def test_torch_has_linear_layers_for_what_the_library_lacks(compiled_for, machine, cpu_flags, reason):
    assert re.search(reason, backend.reason_for_torch(compiled_for, machine, cpu_flags))


def test_the_compiler_may_know_more_of_a_cpu_than_the_kernel_tells():
    assert backend.reason_for_torch("x86-64-v4", "x86_64", frozenset()) is None
    assert backend.reason_for_torch("x86-64-v4-amx", "x86_64", ZEN_4) is None


@pytest.fixture
def auto(monkeypatch):
    """Choose anew, for a CPU with these flags, whatever this one is."""
    monkeypatch.delenv(backend.LINEAR_VARIABLE, raising=False)

    def auto(requested="auto", cpu_flags=frozenset(), weight=None):
        monkeypatch.setattr(variants, "this_cpu", lambda: ("x86_64", cpu_flags))
        monkeypatch.setattr(backend, "MEASURED", {torch.ops.flyball.instruction_set()} if not cpu_flags else set())
        return PackedLinear(torch.randn(8, 4) if weight is None else weight, backend=choose_backend("cpu", requested))

    return auto


def test_the_choice_does_not_depend_on_what_a_clock_says(auto, monkeypatch, caplog):
    """Replicas and restarts would differ in the last bits. This clock lets every other thing take nine times as long."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: (tick := next(ticks)) // 4 * 12.0 + (0, 9, 10, 11)[tick % 4])
    with caplog.at_level(logging.INFO):
        assert all(auto()._packed for _ in range(3))
        assert not any(auto(cpu_flags=ZEN_4)._packed for _ in range(3))
    assert caplog.text.count("CPU linear layers: cpp") == 3
    assert caplog.text.count("CPU linear layers: torch, not C++, because those for") == 3


def test_torchs_linear_layers_compute_the_same(auto):
    weight, x = torch.randn(8, 4), torch.randn(3, 4)
    linear = auto(cpu_flags=ZEN_4, weight=weight)
    assert linear._weight.shape == weight.shape
    torch.testing.assert_close(linear(x), x @ weight.T)


def test_either_can_be_asked_for(auto, monkeypatch):
    assert auto("cpp", ZEN_4)._packed
    monkeypatch.setenv(backend.LINEAR_VARIABLE, "cpp")
    assert auto("auto", ZEN_4)._packed
    monkeypatch.setenv(backend.LINEAR_VARIABLE, "torch")
    assert not auto("auto")._packed
    assert not auto("cpp")._packed


def test_a_setting_that_cannot_be_is_refused_by_name(auto, monkeypatch):
    monkeypatch.setenv(backend.LINEAR_VARIABLE, "fast")
    with pytest.raises(ValueError, match="FLYBALL_CPU_LINEAR is 'fast'; it must be one of auto, cpp, torch"):
        choose_backend("cpu")
    monkeypatch.setenv(backend.LINEAR_VARIABLE, "cpp")
    with pytest.raises(ValueError, match="FLYBALL_CPU_LINEAR is 'cpp', but the backend is 'torch'"):
        choose_backend("cpu", "torch")
