"""What a load measured: every request, and the usual numbers over them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np

from helpers.load.plan import LoadPlan

METRICS = ("ttft", "tpot", "itl", "e2el", "delay")
PERCENTILES = (90, 99)


@dataclass
class Request:
    """One request; all times in seconds.

    start: when it was sent, counted from the first request of the load
    ttft:  from sending to the first token                          (None if it failed)
    itls:  the gaps between the chunks that carry tokens, in order
    e2e:   from sending to the last token                           (None if it failed)
    delay: from the planned to the real sending, open loop only     (None in a closed loop)
    error: the reason of a failure, empty after a success
    """

    start: float
    ttft: float | None
    itls: list[float]
    e2e: float | None
    input_tokens: int
    output_tokens: int
    delay: float | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def tpot(self) -> float | None:
        """(e2e - TTFT) / (output tokens - 1); None for a single token or a failure."""
        if not self.ok or self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)


@dataclass
class LoadResult:
    """The requests of one load, failed ones among them, and the seconds from its start to its end."""

    plan: LoadPlan
    driver: str
    model_name: str
    duration: float
    requests: list[Request]

    @property
    def succeeded(self) -> list[Request]:
        return [request for request in self.requests if request.ok]

    @property
    def completed(self) -> int:
        return len(self.succeeded)

    @property
    def failed(self) -> int:
        return len(self.requests) - self.completed

    @property
    def errors(self) -> dict[str, int]:
        """Reason of failure -> number of requests, most frequent first."""
        return dict(Counter(request.error for request in self.requests if not request.ok).most_common())

    def values(self, metric: str) -> list[float]:
        """Seconds of one metric over the successful requests: one value a request, or one a gap for "itl"."""
        if metric not in METRICS:
            raise ValueError(f"no metric {metric!r}; there are {', '.join(METRICS)}")
        if metric == "itl":
            return [gap for request in self.succeeded for gap in request.itls]
        attribute = "e2e" if metric == "e2el" else metric
        values = [getattr(request, attribute) for request in self.succeeded]
        return [value for value in values if value is not None]

    def percentile(self, metric: str, q: float) -> float | None:
        """The q-th percentile (0 to 100) in milliseconds, or None without a value.

        Linear between order statistics (Hyndman and Fan's type 7, numpy's default): of n sorted values the one at
        position (n - 1) * q / 100. With fewer than 100 values a p99 is close to the maximum, no more.
        """
        values = self.values(metric)
        return float(np.percentile(values, q)) * 1000 if values else None

    def goodput(
        self, ttft_ms: float | None = None, tpot_ms: float | None = None, e2el_ms: float | None = None
    ) -> float:
        """Requests per second that meet all the given limits (<=). A failed request meets none.

        A request of one token has no TPOT and meets any limit of it, as in `vllm bench serve --goodput`.
        """
        limits = {"ttft": ttft_ms, "tpot": tpot_ms, "e2e": e2el_ms}
        limits = {name: limit / 1000 for name, limit in limits.items() if limit is not None}
        if not limits:
            raise ValueError("goodput needs a limit: ttft_ms, tpot_ms or e2el_ms")
        good = [r for r in self.succeeded if all((getattr(r, name) or 0.0) <= limits[name] for name in limits)]
        return len(good) / self.duration if self.duration else 0.0

    def summary(self) -> dict[str, float | None]:
        """The keys of `vllm bench serve` and their formulas; latencies are None where nothing succeeded.

        Counts, tokens, duration (s), throughputs per second of the whole duration, and mean, median, std (population),
        p90 and p99 of ttft, tpot, itl and e2el in milliseconds; for an open loop also of delay.
        """
        inputs = sum(request.input_tokens for request in self.succeeded)
        outputs = sum(request.output_tokens for request in self.succeeded)

        def per_second(amount: int) -> float | None:
            return amount / self.duration if self.duration else None

        summary = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": inputs,
            "total_output_tokens": outputs,
            "request_throughput": per_second(self.completed),
            "output_throughput": per_second(outputs),
            "total_token_throughput": per_second(inputs + outputs),
        }
        for metric in METRICS:
            if metric == "delay" and self.plan.kind == "closed":
                continue
            values = self.values(metric)
            for name, statistic in (("mean", np.mean), ("median", np.median), ("std", np.std)):
                summary[f"{name}_{metric}_ms"] = float(statistic(values)) * 1000 if values else None
            for q in PERCENTILES:
                summary[f"p{q}_{metric}_ms"] = self.percentile(metric, q)
        return summary

    def to_dict(self) -> dict:
        """For JSON: one column a field, times as whole microseconds."""
        columns = {name: [getattr(request, name) for request in self.requests] for name in Request.__annotations__}
        for name in ("start", "ttft", "e2e", "delay"):
            columns[name] = [_microseconds(value) for value in columns[name]]
        columns["itls"] = [[_microseconds(gap) for gap in itls] for itls in columns["itls"]]
        fields = {name: getattr(self, name) for name in ("driver", "model_name", "duration")}
        return {"plan": asdict(self.plan), **fields, "requests": columns}

    @classmethod
    def from_dict(cls, data: dict) -> LoadResult:
        columns = dict(data["requests"])
        for name in ("start", "ttft", "e2e", "delay"):
            columns[name] = [_seconds(value) for value in columns[name]]
        columns["itls"] = [[_seconds(gap) for gap in itls] for itls in columns["itls"]]
        requests = [Request(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        return cls(**data | {"plan": LoadPlan(**data["plan"]), "requests": requests})


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / 1e6
