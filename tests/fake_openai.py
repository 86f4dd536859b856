"""A scripted OpenAI server on loopback, in a thread of its own."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Reply:
    """What to answer: packets to write as they are, and pauses in seconds between them."""

    packets: list[bytes | float] = field(default_factory=list)
    status: int = 200
    body: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    """Of an answer that has a body."""
    break_off: bool = False
    """Close the connection after the packets, inside the chunked body."""
    gate: int = 0
    """Hold the answer back until so many requests have been in flight at once."""


def event(payload: dict[str, Any] | str) -> bytes:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return f"data: {text}\n\n".encode()


def token(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]})


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}})


DONE = event("[DONE]")


def num_prompt_tokens(request: dict[str, Any]) -> int:
    """Two tokens a word; a chat template adds seven; token ids count as they are."""
    if "messages" in request:
        return 7 + sum(2 * len(message["content"].split()) for message in request["messages"])
    prompt = request["prompt"]
    return len(prompt) if isinstance(prompt, list) else 2 * len(prompt.split())


def answer_in_full(request: dict[str, Any], gap_s: float = 0.0) -> Reply:
    """``max_tokens`` tokens, one a chunk, the first at once."""
    count = request["max_tokens"]
    piece = (lambda text: delta(content=text)) if "messages" in request else token
    packets: list[bytes | float] = [piece("a")]
    for _ in range(count - 1):
        packets += [gap_s, piece(" b")]
    last = delta("length") if "messages" in request else token("", "length")
    return Reply([*packets, last, usage(num_prompt_tokens(request), count), DONE])


class FakeServer:
    """Attributes are set by tests before, and read after, the calls under test."""

    def __init__(self) -> None:
        self.script: Callable[[dict[str, Any]], Reply] = answer_in_full
        self.models: dict[str, Any] | None = {"data": [{"id": "demo", "max_model_len": 4096}]}
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[str] = []
        self.connections: list[int] = []  # of each request, its port on the other side
        self.in_flight = self.max_in_flight = self.disconnects = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Give the server's thread up to 20 s; raises TimeoutError after that."""
        for _ in range(2000):
            if condition():
                return
            time.sleep(0.01)
        raise TimeoutError

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**24)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one_request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _one_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(x.split(":")[1]) for x in head.splitlines() if x.lower().startswith("content-length")), 0)
        body = await reader.readexactly(length)
        self.paths.append(head.split()[1])
        self.headers.append(head)
        self.connections.append(writer.get_extra_info("peername")[1])
        if head.startswith("GET"):
            known = self.models is not None
            _write_json(writer, 200 if known else 404, self.models if known else {"error": {"message": "no list"}})
            return True
        self.requests.append(json.loads(body))
        return await self._answer(self.script(self.requests[-1]), reader, writer)

    async def _answer(self, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if reply.body is not None:
            _write_json(writer, reply.status, reply.body, **reply.headers)
            return True
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            while self.max_in_flight < reply.gate:
                await asyncio.sleep(0.001)
            await _write_packets(reply, reader, writer)
        except ConnectionError:
            self.disconnects += 1
            raise
        finally:
            self.in_flight -= 1
        return not reply.break_off


def _write_json(writer: asyncio.StreamWriter, status: int, body: Any, **headers: str) -> None:
    data = json.dumps(body).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n{lines}\r\n".encode() + data)


async def _write_packets(reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(SSE_HEAD)
    for packet in reply.packets:
        if isinstance(packet, float):
            await writer.drain()
            await asyncio.sleep(packet)
            if reader.at_eof():
                raise ConnectionResetError
        else:
            writer.write(f"{len(packet):x}\r\n".encode() + packet + b"\r\n")
    if not reply.break_off:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
