"""What load to put on a server: one point of a measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LoadPlan:
    """One load: how requests arrive, how many, and of what lengths.

    kind "closed": `concurrency` users; each sends its next request when the last one is answered, after `think_time`
    seconds (constant, or exponential with that mean). A slow server is asked less often, so queueing stays hidden.
    kind "open": requests arrive at `rate` per second whether or not the server keeps up. The gaps follow a gamma
    distribution of shape `burstiness`: 1 is a Poisson process, below 1 is burstier, far above 1 a metronome.

    dataset: "random" (`input_len` and `output_len` tokens) or the path of a file in ShareGPT's format, whose lengths
    are used (`output_len` replaces the length of the answers). `ignore_eos` makes the model write exactly that many
    tokens; after random prompts it always does. vLLM's random prompts can be a token or two off: results carry the
    server's own count.

    seed: the prompts and the arrival times. Give each repeat of a measurement its own seed: the same prompts again
    would be answered from the prefix cache, and the second run would measure the cache.
    num_warmups: requests sent first, with other prompts, and not counted.
    """

    kind: str
    num_requests: int
    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    dataset: str = "random"
    input_len: int | None = None
    output_len: int | None = None
    ignore_eos: bool = True
    seed: int = 0
    num_warmups: int = 0
    think_time: float = 0.0
    think: str = "constant"

    def __post_init__(self):
        object.__setattr__(self, "dataset", str(self.dataset))
        closed = self.kind == "closed"
        problems = [
            (self.kind not in ("closed", "open"), f'kind is "closed" or "open", not {self.kind!r}'),
            (self.num_requests < 1, f"num_requests is at least 1, not {self.num_requests}"),
            (closed and (self.concurrency or 0) < 1, "a closed loop needs concurrency, the number of users"),
            (closed and self.rate is not None, "a closed loop has no rate: its users set it"),
            (not closed and not 0 < (self.rate or 0) < math.inf, "an open loop needs rate, in requests per second"),
            (not closed and self.concurrency is not None, "an open loop has no limit of concurrency"),
            (not closed and self.think_time != 0, "think_time belongs to the users of a closed loop"),
            (not 0 < self.burstiness < math.inf, f"burstiness is above 0 and finite, not {self.burstiness}"),
            (self.think_time < 0, f"think_time is in seconds, not {self.think_time}"),
            (self.think not in ("constant", "exponential"), f"think is constant or exponential, not {self.think!r}"),
            (self.num_warmups < 0, f"num_warmups is not negative, but {self.num_warmups}"),
        ]
        if self.dataset == "random":
            lengths = (self.input_len, self.output_len)
            problems.append((None in lengths or min(lengths) < 1, "random prompts need input_len and output_len"))
            problems.append((not self.ignore_eos, "random prompts have no natural end: ignore_eos stays True"))
        else:
            problems.append((self.input_len is not None, "the lengths of the prompts come from the file: no input_len"))
        for wrong, message in problems:
            if wrong:
                raise ValueError(f"load plan: {message}")

    @property
    def name(self) -> str:
        if self.kind == "open":
            return f"{self.rate:g} requests/s"
        return f"{self.concurrency} user{'s' * (self.concurrency > 1)}"

    def warm_up(self) -> LoadPlan | None:
        """The uncounted load before this one: the same, but few requests and other prompts."""
        if not self.num_warmups:
            return None
        return replace(self, num_requests=self.num_warmups, num_warmups=0, seed=self.seed + 10**6)
