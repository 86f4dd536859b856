"""Running coroutines side by side."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_of(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends, then end the others; raises what it raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
