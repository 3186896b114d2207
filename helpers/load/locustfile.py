"""Locust users that stream completions and note when every token arrives; helpers.load starts it as a process.

The job is a JSON file named by LOAD_JOB: model, prompts ([prompt, tokens to generate]), ignore_eos, think_time, think,
"linger" (seconds to stay after the last answer, for Locust writes its CSVs once a second and not at the end), and
"events", the file descriptor for JSON lines (one a finished request).
"""

import json
import os
import random
import time

import gevent
import gevent.os
from locust import HttpUser, task
from locust.exception import StopUser

with open(os.environ["LOAD_JOB"]) as file:
    JOB = json.load(file)
EVENTS = os.fdopen(JOB["events"], "w", buffering=1)
HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"} if os.environ.get("OPENAI_API_KEY") else {}
waiting = list(reversed(JOB["prompts"]))
unfinished = len(waiting)


def end_with_parent():
    gevent.os.tp_read(0, 1)
    os._exit(1)


gevent.spawn(end_with_parent)


class Student(HttpUser):
    def wait_time(self):
        mean = JOB["think_time"]
        return random.expovariate(1 / mean) if mean and JOB["think"] == "exponential" else mean

    @task
    def complete(self):
        global unfinished
        if not waiting:
            raise StopUser
        prompt, output_len = waiting.pop()
        body = {
            "model": JOB["model"],
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if JOB["ignore_eos"]:
            body["ignore_eos"] = True
        times, usage, error = [], {}, ""
        start = time.perf_counter()
        with self.client.post(
            "/v1/completions", json=body, headers=HEADERS, stream=True, catch_response=True
        ) as response:
            try:
                if response.status_code != 200:
                    raise RuntimeError(f"HTTP {response.status_code} {response.error or response.text}".strip())
                for line in response.iter_lines(chunk_size=None):
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line.removeprefix(b"data: "))
                    if chunk.get("choices"):
                        times.append(time.perf_counter())
                    elif "error" in chunk:
                        raise RuntimeError(str(chunk["error"]))
                    usage = chunk.get("usage") or usage
                if not times:
                    raise RuntimeError("the answer ended without a token")
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            end = time.perf_counter()
            response.request_meta["response_time"] = 1000 * ((times[-1] if times and not error else end) - start)
            response.request_meta["response_length"] = len(times)
            response.failure(error) if error else response.success()
        event = {"start": start, "end": end, "times": times, "usage": usage, "error": error}
        EVENTS.write(json.dumps(event) + "\n")
        unfinished -= 1
        if not unfinished:
            gevent.spawn_later(JOB["linger"], self.environment.runner.quit)
