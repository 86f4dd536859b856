"""The in-process engine needs no server packages: it runs where none of them is installed."""

import os
import subprocess
import sys

SERVER_PACKAGES = ("fastapi", "uvicorn", "starlette", "zmq", "prometheus_client", "aiohttp", "rich")

SCRIPT = f"""
import sys
for package in {SERVER_PACKAGES}:
    sys.modules[package] = None  # importing it raises ModuleNotFoundError
import flyball_runtime.llm
"""


def test_llm_imports_without_the_servers_packages() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
