"""Runs vLLM's own serving benchmark, once for each argument list of a job; helpers.load starts it as a process.

One process for all plans, because importing vLLM takes ten seconds. The job is a JSON file named by LOAD_JOB: "runs" is
a list of {argv, warm_up}, "events" the file descriptor for JSON lines (one a finished request, one a finished run).
"""

import json
import os
import threading
import time

import numpy as np


def obey_parent(permits: threading.Semaphore):
    """A byte on the standard input permits one run; its end means that the parent is gone."""
    while os.read(0, 1):
        permits.release()
    os._exit(1)


def planned_arrivals(count: int, rate: float, burstiness: float) -> list[float]:
    """Seconds after the start at which vLLM's `get_request` plans to send; leaves the random state as it was.

    It draws gamma gaps from numpy's global state and stretches them so that the last request is due at count / rate.
    """
    state = np.random.get_state()
    arrivals = np.cumsum(np.random.gamma(burstiness, 1 / (rate * burstiness), count))
    np.random.set_state(state)
    return list(arrivals * (count / rate / arrivals[-1]))


def main():
    with open(os.environ["LOAD_JOB"]) as file:
        job = json.load(file)
    permits = threading.Semaphore(0)
    threading.Thread(target=obey_parent, args=(permits,), daemon=True).start()
    events = os.fdopen(job["events"], "w", buffering=1)

    def emit(**event):
        events.write(json.dumps(event) + "\n")

    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Progress:
        def __init__(self, total):
            pass

        def update(self, count):
            emit(done=count)

        def close(self):
            pass

    due: list[float] = []
    get_request = serve.get_request

    def get_request_and_note_when(requests, rate, burstiness, *rest):
        arrivals = planned_arrivals(len(requests), rate, burstiness) if rate < float("inf") else []
        now = time.perf_counter()
        due[:] = [now + arrival for arrival in arrivals]
        return get_request(requests, rate, burstiness, *rest)

    serve.tqdm = Progress
    serve.get_request = get_request_and_note_when
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    for run in job["runs"]:
        permits.acquire()
        if run["warm_up"]:
            serve.main(parser.parse_args(run["warm_up"]))
        result = serve.main(parser.parse_args(run["argv"]))
        del result["generated_texts"]
        emit(result=result, due=due)


if __name__ == "__main__":
    main()
