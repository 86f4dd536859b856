"""What is not needed is not imported: server packages by the in-process engine, torch by the API process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from replicas import environment

SERVER_PACKAGES = ("fastapi", "uvicorn", "starlette", "prometheus_client", "aiohttp", "rich")

SCRIPT = f"""
import sys
for package in {SERVER_PACKAGES}:
    sys.modules[package] = None  # importing it raises ModuleNotFoundError
import flyball_runtime.llm
"""


def test_llm_imports_without_the_servers_packages() -> None:
    everything = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=everything, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_the_api_process_loads_no_torch(tmp_path: Path) -> None:
    if loads_torch("from transformers import PreTrainedTokenizerFast"):
        pytest.skip("this version of transformers loads torch for a tokenizer")
    make_checkpoint(tmp_path, "llama2")
    code = f"""
from pathlib import Path
import flyball_runtime.serve
from flyball_runtime.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer(Path({str(tmp_path)!r}))
tokenizer.apply_chat_template([{{"role": "user", "content": "hi"}}], tokenize=False)
"""
    assert not loads_torch(code)


def loads_torch(code: str) -> bool:
    """Whether torch is loaded after ``code`` has run in a fresh process."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint('torch' in sys.modules)"]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=60)
    return result.stdout.splitlines()[-1] == "True"


@pytest.mark.parametrize(
    "module", ["flyball_runtime.engine.runner", pytest.param("flyball_runtime.llm", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("own", "in_force"), [({}, "10000"), pytest.param({"GOMP_SPINCOUNT": "77"}, "77", marks=pytest.mark.slow)]
)
def test_openmp_spins_little_unless_told_otherwise(module: str, own: dict[str, str], in_force: str) -> None:
    variables = environment(OMP_DISPLAY_ENV="verbose", **own)  # libgomp prints what it has read, when it is loaded
    if not own:
        variables.pop("GOMP_SPINCOUNT", None)
    command = [sys.executable, "-c", f"import {module}"]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=120)
    assert f"GOMP_SPINCOUNT = '{in_force}'" in result.stderr
