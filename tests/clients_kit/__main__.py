"""Makes the environments, starts the server, runs the clients and says which of them failed."""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from adapters import make_adapter
from flyball_protocol import endpoints
from replicas import Replica

HERE = Path(__file__).parent
CHECKPOINT = HERE.parents[1] / "examples" / "demo_model" / "checkpoint"
ENVIRONMENTS = Path.home() / ".cache" / "flyball" / "clients"
KEY = "a-key-for-outside-clients"
TIMEOUT_S = 3600
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_DISABLE_TELEMETRY": "1"}
"""Clients load nothing while they run."""
SERVER_FLAGS = ("--max-model-len=256", "--max-num-seqs=32", "--max-choices=4", "--enable-lora")


class Client(NamedTuple):
    """What to install, separated by spaces, and the command.

    The command's program is of the environment, and it sees BASE_URL and API_KEY.
    """

    requirement: str
    command: tuple[str, ...]
    shares_torch: bool = False
    """Whether its environment sees Flyball's packages behind its own, so that torch is not installed again."""


def script(name: str) -> tuple[str, ...]:
    return ("python", str(HERE / f"{name}_client.py"))


CLIENTS = {
    "schemathesis": Client(
        "schemathesis==4.32.5",
        (
            *("schemathesis", "--config-file", str(HERE / "schemathesis.toml"), "run", "{root}/openapi.json"),
            *("--header", f"Authorization: Bearer {KEY}", "--seed", "1", "--continue-on-failure"),
            *("--request-timeout", "120", "--max-examples", "{examples}"),
        ),
    ),
    "openai": Client("openai==3.54.0", script("openai")),
    "anthropic": Client("anthropic==2.12.0", script("anthropic")),
    "litellm": Client("litellm==1.106.2", script("litellm")),
    "langchain-openai": Client("langchain-openai==1.7.3", script("langchain")),
    "openai-agents": Client("openai-agents==0.24.0", script("openai_agents")),
    "guidellm": Client("guidellm==0.8.1", script("guidellm"), shares_torch=True),
    "jsonschema": Client("jsonschema==4.26.0 lark==1.3.1", script("structured")),
    "aiperf": Client("aiperf==0.13.0", script("aiperf")),
    "lm-eval": Client("lm-eval==0.4.13 lm-eval[api,hf]", script("lm_eval"), shares_torch=True),
}


def environment(name: str, client: Client) -> Path:
    """Return the folder of programs of a client's environment, which is made anew when its version changes."""
    folder = ENVIRONMENTS / name
    stamp = folder / "installed"
    if not stamp.exists() or stamp.read_text() != client.requirement:
        print(f"{name}: installing {client.requirement}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        if client.shares_torch:
            packages = next(folder.glob("lib/python*/site-packages"))
            (packages / "flyball_packages.pth").write_text(sysconfig.get_path("purelib"))
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *client.requirement.split()], check=True)
        stamp.write_text(client.requirement)
    return folder / "bin"


def run(client: Client, programs: Path, url: str, num_examples: int) -> bool:
    """Return whether the client's command succeeded."""
    program, *words = (word.format(root=url, examples=num_examples) for word in client.command)
    variables: Mapping[str, str] = os.environ | {"BASE_URL": f"{url}/v1", "API_KEY": KEY} | OFFLINE
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([programs / program, *words], env=variables, cwd=folder, timeout=TIMEOUT_S, check=False)
    return done.returncode == 0


def model_with_tools(folder: Path) -> Path:
    """Make a checkpoint of the demo model whose chat template shows tools; return its folder."""
    shutil.copytree(CHECKPOINT, folder)
    shutil.copy(HERE / "chat_template.jinja", folder)
    return folder


@contextmanager
def served() -> Iterator[Replica]:
    """A server of the demo model, with an adapter, that needs a key, as outside clients send one."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(KEY)
        model = model_with_tools(Path(folder) / "model")
        adapter = make_adapter(Path(folder) / "adapters" / "accent", CHECKPOINT)
        flags = [f"--lora-modules=accent={adapter}", f"--runtime-lora-dir={adapter.parent}", f"--api-key-file={keys}"]
        server = Replica(model, *SERVER_FLAGS, *flags, log=Path(folder) / "log")
        try:
            server.wait_ready()
            yield server
        finally:
            exit_code = server.stop()
            server.close()
    if exit_code != endpoints.EXIT_OK:
        raise RuntimeError(f"the server ended with exit code {exit_code}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="clients_kit", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--examples", type=int, default=100, help="of schemathesis, for each path (default: 100)")
    args = parser.parse_args()
    if unknown := set(args.names) - set(CLIENTS):
        parser.error(f"{', '.join(sorted(unknown))} is not one of {', '.join(CLIENTS)}")
    names = args.names or list(CLIENTS)
    programs = {name: environment(name, CLIENTS[name]) for name in names}
    with served() as server:
        passed = {name: run(CLIENTS[name], programs[name], server.url, args.examples) for name in names}
    for name in names:
        print(f"{'passed' if passed[name] else 'FAILED'}: {CLIENTS[name].requirement}")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
