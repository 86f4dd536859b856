"""Starts the engine of a replica on this machine's device."""

import msgspec

from flyball_runtime.core.config import EngineConfig
from flyball_runtime.engine.engine import Engine
from flyball_runtime.engine.executor import Executor, InThread, Progress
from flyball_runtime.engine.runner import ModelRunner


def start_engine(config: EngineConfig, *, on_progress: Progress = lambda: None, import_s: float = 0.0) -> Engine:
    """Load the model, allocate the KV cache and return an engine over both.

    Args:
        on_progress: called several times within each step.
        import_s: seconds that went into starting the process, reported as a stage of start-up.
    Raises:
        ConfigError: the model or the machine makes it impossible.
    """
    runner = ModelRunner.start(config, on_progress)
    startup_s = {"import": round(import_s, 4)} | runner.info.startup_s
    runner.info = msgspec.structs.replace(runner.info, startup_s=startup_s)
    executor: Executor = runner
    if config.async_scheduling and runner.info.device == "cpu":
        executor = InThread(runner)
    return Engine(config, executor)
