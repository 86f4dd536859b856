"""Stands in for `flyball serve`: its ports, probes, admin API, streams and drain, without a model. Starts in 0.1 s.

Environment: FAKE_FAIL (end at once with this message and exit code 2), FAKE_START_S (time until ready),
FAKE_IGNORE_SIGTERM,
FAKE_ITL_OVER (of 20000 inter-token gaps, how many the evidence says were slow),
FAKE_FAST_BELOW (a step-time target, in ms, below which none was).
From revision 2 on, it counts as if since long ago, so that a trial waits for a whole window.
POST /fake/hang stops answering anything; POST /fake/exit ends at once with code 3; POST /fake/unready turns /readyz red;
POST /fake/window/2 lets the evidence cover 2 s, 60 at first.
POST /v1/completions takes {"tokens": 3, "gap_s": 0.01, "stream": true}.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path


class FakeRuntime:
    def __init__(self, flags):
        self.flags = flags
        self.ready = self.draining = self.unready = False
        self.running = 0
        self.max_running = 0
        self.revision, self.limits, self.objectives = 0, None, None
        self.window_s = 60.0
        self.started_s, self.verifier = time.time(), None

    async def serve(self):
        await asyncio.start_server(self.api, self.flags["--host"], int(self.flags["--port"]))
        await asyncio.start_server(self.admin, self.flags["--admin-host"], int(self.flags["--admin-port"]))
        if "FAKE_IGNORE_SIGTERM" in os.environ:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, setattr, self, "draining", True)
        await asyncio.sleep(float(os.environ.get("FAKE_START_S", "0")))
        self.ready = True
        while not self.draining:
            await asyncio.sleep(0.01)
        deadline = time.monotonic() + float(self.flags["--drain-timeout"])
        while self.running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return 4 if self.running else 0

    async def api(self, reader, writer):
        await self.answer(reader, writer, self.api_route)

    async def admin(self, reader, writer):
        await self.answer(reader, writer, self.admin_route)

    async def answer(self, reader, writer, route):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await route(writer, *head[0].split()[:2], headers, body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def api_route(self, writer, method, path, headers, body):
        if path == "/livez":
            return send(writer, 200, {})
        if path == "/readyz":
            return send(writer, 200 if self.ready and not self.draining and not self.unready else 503, {})
        if path == "/fake/hang":
            send(writer, 200, {})
            await writer.drain()
            writer.close()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)  # the whole process, as a stuck engine would
        if path == "/fake/exit":
            print("the engine is gone", file=sys.stderr)
            os._exit(3)
        if path == "/fake/unready":
            self.unready = True
            return send(writer, 200, {})
        if path.startswith("/fake/window/"):
            self.window_s = float(path.rpartition("/")[2])
            return send(writer, 200, {})
        if path == "/echo":
            return send(writer, 200, {"headers": headers, "length": len(body), "path": path, "method": method})
        if path.startswith("/v1/"):
            return await self.complete(writer, json.loads(body or b"{}"))
        return send(writer, 404, {"path": path})

    async def complete(self, writer, request):
        if self.draining:
            return send(writer, 503, {"error": {"code": "draining"}}, "Retry-After: 1\r\n")
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            await self.generate(writer, request)
        finally:
            self.running -= 1

    async def generate(self, writer, request):
        tokens, gap_s = request.get("tokens", 3), request.get("gap_s", 0.01)
        if request.get("stream"):
            await stream(writer, tokens, gap_s)
        else:
            await asyncio.sleep(tokens * gap_s)
            send(writer, 200, {"pid": os.getpid(), "max_running": self.max_running})

    async def admin_route(self, writer, method, path, headers, body):
        sys.path.append(str(Path(__file__).parents[1]))  # a script's path begins at its own folder
        from flyball_protocol import signing

        token, given = os.environ["FLYBALL_ADMIN_TOKEN"], headers.get("authorization", "")
        if given == f"Bearer {token}":
            send_bytes(writer, *self.admin_answer(path, body))
            return
        self.verifier = self.verifier or signing.Verifier(token, self.started_s)
        target = signing.target_of(*writer.get_extra_info("sockname")[:2])
        try:
            signed = self.verifier.check(given, method=method, path=path, target=target, now_s=time.time())
        except signing.SignatureError as error:
            send(writer, 401, {"error": str(error)})
            return
        if not signed.covers(body):
            send(writer, 401, {"error": "another body"})
            return
        status, payload = self.admin_answer(path, body)
        signature = signing.sign_answer(token, signed.nonce, status, payload)
        send_bytes(writer, status, payload, f"{signing.ANSWER_HEADER}: {signature}\r\n")

    def admin_answer(self, path, body):
        import msgspec

        from flyball_protocol import Limits, LimitsAck, LimitsUpdate
        from operator_kit.evidence import ENVELOPE, make_evidence

        start = Limits(max_num_seqs=64, kv_cache_fraction=1.0, max_num_batched_tokens=512)
        self.limits = self.limits or start
        if path == "/admin/evidence":
            fast = (self.limits.step_time_target_ms or 1000.0) < float(os.environ.get("FAKE_FAST_BELOW", "0"))
            evidence = make_evidence(
                itl_over=0 if fast else int(os.environ.get("FAKE_ITL_OVER", "0")),
                window_s=self.window_s,
                limits=self.limits,
                revision=self.revision,
                envelope=ENVELOPE,
                num_running=self.running,
                posted=self.objectives,
                since_s=5.0 if self.revision < 2 or self.window_s < 60 else 1000.0,
            )
            return 200, msgspec.json.encode(evidence)
        update = msgspec.json.decode(body, type=LimitsUpdate)
        if update.revision < self.revision:
            ack, status = "stale", 409
        elif update.revision == self.revision and update.limits.applied_to(self.limits) != self.limits:
            ack, status = "rejected", 422
        else:
            self.revision, self.limits = update.revision, update.limits.applied_to(self.limits)
            self.objectives = update.objectives or self.objectives
            ack, status = "applied", 200
        answer = LimitsAck(status=ack, revision=self.revision, target=self.limits, effective=self.limits)
        return status, msgspec.json.encode(answer)


async def stream(writer, tokens, gap_s):
    head = (
        "HTTP/1.1 200 OK",
        "Content-Type: text/event-stream",
        "Transfer-Encoding: chunked",
        "Connection: close",
        "",
        "",
    )
    writer.write("\r\n".join(head).encode())
    for i in range(tokens):
        chunk(writer, b'data: {"token": %d, "pid": %d}\n\n' % (i, os.getpid()))
        await writer.drain()
        await asyncio.sleep(gap_s)
    chunk(writer, b"data: [DONE]\n\n")
    chunk(writer, b"")


def chunk(writer, data):
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def send(writer, status, content, headers=""):
    send_bytes(writer, status, json.dumps(content).encode(), headers)


def send_bytes(writer, status, payload, headers=""):
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n"
    writer.write(f"{head}{headers}\r\n".encode() + payload)


def main():
    if "FAKE_FAIL" in os.environ:
        print(os.environ["FAKE_FAIL"], file=sys.stderr)
        return 2
    flags = dict(word.split("=", 1) for word in sys.argv[1:] if word.startswith("--"))
    print("serving on", flags["--port"])
    return asyncio.run(FakeRuntime(flags).serve())


if __name__ == "__main__":
    os._exit(main())
