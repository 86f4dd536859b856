"""Through the API and a real engine: one client's many choices do not keep another's request waiting."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from checkpoints import make_checkpoint
from flyball_runtime.api import ApiSettings, MetricsCollector, create_app
from flyball_runtime.core.clock import MonotonicClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.engine.client import EngineClient
from flyball_runtime.text.tokenizer import load_tokenizer
from runtime.api.support import MODEL, until

pytestmark = pytest.mark.anyio

NUM_HOG_REQUESTS = 4


async def test_a_small_request_does_not_wait_for_four_times_256_choices(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama3")
    config = EngineConfig(
        model=str(path),
        served_model_name=MODEL,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=128,
        num_threads=1,
        log_level="warning",
    )
    metrics = MetricsCollector(model_name=MODEL, clock=MonotonicClock())
    async with EngineClient(config, observer=metrics.measured) as engine:
        await engine.wait_ready()
        app = create_app(engine, load_tokenizer(path), ApiSettings(served_model_names=(MODEL,)), metrics)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:

            def post(key: str, num_choices: int) -> asyncio.Task[httpx.Response]:
                body = {"prompt": [5, 6, 7], "n": num_choices, "max_tokens": 16, "ignore_eos": True}
                headers = {"Authorization": f"Bearer {key}"}
                return asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))

            os.kill(engine.engine_pid, signal.SIGSTOP)  # so that nothing ends before all have come
            hogs = [post("hog", 256) for _ in range(NUM_HOG_REQUESTS)]
            await until(lambda: engine.num_unfinished == NUM_HOG_REQUESTS * 256)
            small = post("small", 1)
            await until(lambda: engine.num_unfinished > NUM_HOG_REQUESTS * 256)
            os.kill(engine.engine_pid, signal.SIGCONT)
            assert (await small).status_code == 200
            assert not hogs[2].done() and not hogs[3].done(), "it would have waited for all choices but the last few"
            for hog in hogs:
                hog.cancel()
            await asyncio.gather(*hogs, return_exceptions=True)
