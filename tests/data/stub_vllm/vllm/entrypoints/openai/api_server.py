"""Stands in for vLLM's server in tests of what surrounds it. STUB=serve|start|fail says how far it gets."""

import json
import multiprocessing
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from vllm.engine import engine

ARGUMENTS = sys.argv[1:]
VARIABLES = (
    "HF_HUB_OFFLINE",
    "VLLM_NO_USAGE_STATS",
    "DO_NOT_TRACK",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_CPU_KVCACHE_SPACE",
    "X",
)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        served = {
            "/health": "",
            "/v1/models": json.dumps({"data": [{"id": "stub-model"}]}),
            "/metrics": json.dumps({"arguments": ARGUMENTS, "env": {name: os.environ.get(name) for name in VARIABLES}}),
        }
        body = served.get(self.path)
        self.send_response(404 if body is None else 200)
        self.end_headers()
        self.wfile.write((body or "").encode())

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    if os.environ.get("STUB") == "fail":
        print("(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1] ValueError: the cause of it all", flush=True)
        raise RuntimeError("Engine core initialization failed. See root cause above.")
    multiprocessing.get_context("spawn").Process(target=engine).start()
    if os.environ.get("STUB") == "start":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # gone at once, its engine left behind
    port = int(ARGUMENTS[ARGUMENTS.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
