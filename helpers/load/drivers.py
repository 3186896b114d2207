"""Puts a plan on a server through a driver of one's choice, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from helpers.load.plan import LoadPlan
from helpers.load.prompts import make_prompts
from helpers.load.result import LoadResult, Request

LOOPBACK = ("127.0.0.1", "localhost")
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class LoadError(RuntimeError):
    """A load could not be run; the message is one line. Failed requests are no such error: they are in the result."""


def run(plans: LoadPlan | list[LoadPlan], **options) -> LoadResult | list[LoadResult]:
    """One result for one plan, or a list for a list; the options are those of `stream`."""
    if isinstance(plans, LoadPlan):
        [result] = stream([plans], **options)
        return result
    return list(stream(plans, **options))


def stream(
    plans: list[LoadPlan],
    *,
    base_url: str,
    tokenizer: str | Path,
    model_name: str | None = None,
    driver: str = "vllm",
    raw_dir: str | Path | None = None,
    progress: bool = True,
) -> Iterator[LoadResult]:
    """Each result as its plan finishes, so that an interruption costs only the plan that was running.

    The next plan starts when the next result is asked for: what is read from the server in between belongs to no load.

    base_url:   of any server with OpenAI's /v1/completions; a key, if it wants one, is read from OPENAI_API_KEY
    tokenizer:  folder with the model's tokenizer, for prompts of a known length
    model_name: as the server calls it; by default the first one it serves
    driver:     "vllm" (the benchmark behind `vllm bench serve`: both kinds of loop, no think time) or
                "locust" (users of a closed loop, who may think)
    raw_dir:    keeps what the driver itself writes: bench_serve_<n>.json of vLLM, locust_<n>_*.csv of Locust

    Interrupting it, or closing the iterator, kills the driver's process. Raises LoadError if the server does not
    answer at the start or the driver cannot run; a server that dies later gives failed requests with their reasons.
    """
    plans = list(plans)
    base_url = base_url.rstrip("/").removesuffix("/v1")
    model_name = _served_model(base_url, model_name)
    if not (Path(tokenizer) / "tokenizer.json").is_file():
        raise LoadError(f"tokenizer: {tokenizer} has no tokenizer.json; give the folder of the model")
    if driver not in DRIVERS:
        raise LoadError(f"no driver {driver!r}; there are {' and '.join(DRIVERS)}")
    if find_spec(driver) is None:
        raise LoadError(f"the driver {driver!r} needs the package {driver}, which is not installed")
    for plan in plans:
        if driver == "locust" and plan.kind == "open":
            raise LoadError('Locust\'s users wait for their answers: an open loop needs driver="vllm"')
        if driver == "vllm" and plan.think_time:
            raise LoadError('vLLM\'s benchmark has no think time: driver="locust" has')
        if plan.dataset != "random":
            make_prompts(plan, tokenizer)  # ValueError if it has none that fit; vLLM only says IndexError
    if raw_dir is not None:
        Path(raw_dir).mkdir(parents=True, exist_ok=True)

    from tqdm.auto import tqdm

    total = sum(plan.num_requests for plan in plans)
    with tqdm(total=total, unit="request", disable=not progress) as bar:
        for result in DRIVERS[driver](plans, base_url, model_name, Path(tokenizer), raw_dir, bar):
            bar.set_postfix_str(f"{result.plan.name}: {result.failed} failed")
            yield result


def bench_arguments(plan: LoadPlan, base_url: str, model_name: str, tokenizer: str | Path) -> list[str]:
    """The plan as arguments of `vllm bench serve`."""
    options = {
        "backend": "openai",
        "base-url": base_url,
        "endpoint": "/v1/completions",
        "model": model_name,
        "tokenizer": tokenizer,
        "num-prompts": plan.num_requests,
        "seed": plan.seed,
        "temperature": 0,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": "90,99",
    }
    if plan.kind == "closed":
        options["max-concurrency"] = plan.concurrency
    else:
        options |= {"request-rate": plan.rate, "burstiness": plan.burstiness}
    if plan.dataset == "random":
        options |= {"dataset-name": "random", "random-input-len": plan.input_len, "random-output-len": plan.output_len}
    else:
        options |= {"dataset-name": "sharegpt", "dataset-path": plan.dataset}
        if plan.output_len:
            options["sharegpt-output-len"] = plan.output_len
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return arguments + ["--save-detailed"] + ["--ignore-eos"] * plan.ignore_eos


def _with_vllm(plans, base_url, model_name, tokenizer, raw_dir, bar) -> Iterator[LoadResult]:
    runs = []
    for number, plan in enumerate(plans):
        run = {"argv": bench_arguments(plan, base_url, model_name, tokenizer), "warm_up": None}
        if raw_dir is not None:
            name = f"bench_serve_{number}.json"
            run["argv"] += ["--save-result", "--result-dir", str(raw_dir), "--result-filename", name]
        if warm_up := plan.warm_up():
            run["warm_up"] = [*bench_arguments(warm_up, base_url, model_name, tokenizer), "--disable-tqdm"]
        runs.append(run)

    command = [sys.executable, "-P", str(Path(__file__).with_name("vllm_runner.py"))]
    with _process("vLLM's benchmark", command, {"runs": runs}) as (events, permit):
        for plan in plans:
            permit()
            for event in events:
                if "result" in event:
                    yield _from_vllm(plan, model_name, event["result"], event["due"])
                    break
                bar.update(event["done"])
            else:
                raise LoadError(f"vLLM's benchmark ended without a result for {plan.name}")


def _from_vllm(plan: LoadPlan, model_name: str, raw: dict, due: list[float]) -> LoadResult:
    first = min(raw["start_times"])
    requests = []
    for i, start in enumerate(raw["start_times"]):
        error = raw["errors"][i].strip().rsplit("\n", 1)[-1]
        if not error and not raw["latencies"][i]:
            error = "failed, and vLLM's benchmark gives no reason"
        requests.append(
            Request(
                start=start - first,
                ttft=None if error else raw["ttfts"][i],
                itls=raw["itls"][i],
                e2e=None if error else raw["latencies"][i],
                input_tokens=raw["input_lens"][i],
                output_tokens=raw["output_lens"][i],
                delay=start - due[i] if due else None,
                error=error,
            )
        )
    return LoadResult(plan, "vllm", model_name, raw["duration"], requests)


def _with_locust(plans, base_url, model_name, tokenizer, raw_dir, bar) -> Iterator[LoadResult]:
    for number, plan in enumerate(plans):
        if warm_up := plan.warm_up():
            for _ in _locust_requests(warm_up, base_url, model_name, tokenizer, None):
                pass
        events = []
        csv = None if raw_dir is None else Path(raw_dir) / f"locust_{number}"
        for event in _locust_requests(plan, base_url, model_name, tokenizer, csv):
            events.append(event)
            bar.update()
        if len(events) < plan.num_requests:
            raise LoadError(f"Locust stopped after {len(events)} of {plan.num_requests} requests")
        events.sort(key=lambda event: event["start"])
        first = events[0]["start"]
        duration = max(event["end"] for event in events) - first
        yield LoadResult(plan, "locust", model_name, duration, [_from_locust(event, first) for event in events])


def _locust_requests(plan, base_url, model_name, tokenizer, csv) -> Iterator[dict]:
    job = {
        "model": model_name,
        "prompts": make_prompts(plan, tokenizer),
        "ignore_eos": plan.ignore_eos,
        "think_time": plan.think_time,
        "think": plan.think,
        "linger": 0 if csv is None else 1.5,
    }
    users = str(plan.concurrency)
    command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py")), "--headless"]
    command += ["--host", base_url, "--users", users, "--spawn-rate", users, "--exit-code-on-error", "0"]
    command += ["--only-summary"] + ([] if csv is None else ["--csv", str(csv), "--csv-full-history"])
    with _process("Locust", command, job) as (events, _):
        yield from events


def _from_locust(event: dict, first: float) -> Request:
    start, times, failed = event["start"], event["times"], bool(event["error"])
    return Request(
        start=start - first,
        ttft=None if failed else times[0] - start,
        itls=[later - earlier for earlier, later in pairwise(times)],
        e2e=None if failed else times[-1] - start,
        input_tokens=event["usage"].get("prompt_tokens", 0),
        output_tokens=0 if failed else event["usage"].get("completion_tokens", len(times)),
        error=event["error"],
    )


DRIVERS = {"vllm": _with_vllm, "locust": _with_locust}


@contextmanager
def _process(name: str, command: list[str], job: dict) -> Iterator[tuple[Iterator[dict], Callable[[], None]]]:
    """A driver's process: the JSON lines it writes to a pipe, and a call that lets it go on to its next run.

    It ends with the `with` block, or, because its standard input then ends, with this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        job_file, log_file = Path(folder) / "job.json", Path(folder) / "log"
        reading, writing = os.pipe()
        job_file.write_text(json.dumps(job | {"events": writing}))
        others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        direct = f"{','.join(LOOPBACK)},{others}"
        environment = {"LOAD_JOB": str(job_file), "no_proxy": direct, "NO_PROXY": direct, **OFFLINE}
        with log_file.open("w") as log, os.fdopen(reading) as pipe:
            process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(writing,),
                start_new_session=True,
            )
            os.close(writing)

            def events():
                yield from map(json.loads, pipe)
                if code := process.wait():
                    lines = log_file.read_text(errors="replace").split("\n")
                    last = next((line for line in reversed(lines) if line.strip()), "it logged nothing")
                    raise LoadError(f"{name} stopped with code {code}: {last.strip()}")

            def permit():
                with suppress(BrokenPipeError):
                    os.write(process.stdin.fileno(), b".")

            try:
                yield events(), permit
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                process.stdin.close()


def _served_model(base_url: str, model_name: str | None) -> str:
    """The name of a model that the server at this address serves."""
    url = f"{base_url}/v1/models"
    request = urllib.request.Request(url)
    if key := os.environ.get("OPENAI_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    no_proxy = [urllib.request.ProxyHandler({})] if urlsplit(base_url).hostname in LOOPBACK else []
    try:
        with urllib.request.build_opener(*no_proxy).open(request, timeout=10) as response:
            names = [model["id"] for model in json.load(response)["data"]]
    except urllib.error.HTTPError as error:
        hint = "; set OPENAI_API_KEY" if error.code in (401, 403) else ""
        raise LoadError(f"{url} answers HTTP {error.code} {error.reason}{hint}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", error)
        raise LoadError(f"no OpenAI-compatible server at {base_url} ({reason}); start one, or check base_url") from None
    if model_name is None:
        model_name = names[0]
    if model_name not in names:
        raise LoadError(f"{base_url} serves {', '.join(names)}, not {model_name}")
    return model_name
