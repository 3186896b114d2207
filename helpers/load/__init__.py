"""Load on an OpenAI-compatible server, and what it measured.

    result = load.run(LoadPlan("closed", 64, concurrency=8, input_len=256, output_len=64),
                      base_url=server.base_url, tokenizer=server.model_path)
    result.summary()["p99_ttft_ms"], result.goodput(ttft_ms=500, tpot_ms=50)

Every time is the client's: both drivers look at the clock just before a request is sent and at each chunk that brings
tokens. A client that falls behind its own schedule would hide that (coordinated omission): for an open loop each
request therefore carries `delay`, planned to real sending, and the summary its percentiles; add it to TTFT to count
from the planned time. A closed loop has no schedule, so its latencies say nothing of a load that does not wait.
"""

from helpers.load.drivers import LoadError, bench_arguments, run, stream
from helpers.load.plan import LoadPlan
from helpers.load.result import LoadResult, Request

__all__ = ["LoadError", "LoadPlan", "LoadResult", "Request", "bench_arguments", "run", "stream"]
