"""Money from measured throughput. Any currency: what goes in per GPU-hour comes out per million tokens or requests."""

from __future__ import annotations


def per_million_tokens(price_per_gpu_hour: float, gpus: int, tokens_per_second: float) -> float:
    """Cost of a million tokens: price x GPUs / (tokens/s x 3600) x 10^6. All GPUs that serve are paid for."""
    return _hourly(price_per_gpu_hour, gpus) / (_rate(tokens_per_second, "tokens_per_second") * 3600) * 1e6


def per_thousand_requests(price_per_gpu_hour: float, gpus: int, requests_per_second: float) -> float:
    """Cost of a thousand requests: price x GPUs / (requests/s x 3600) x 10^3."""
    return _hourly(price_per_gpu_hour, gpus) / (_rate(requests_per_second, "requests_per_second") * 3600) * 1e3


def saving(before: float, after: float) -> float:
    """Relative change of a cost: -0.34 means 34 % cheaper."""
    return after / _rate(before, "before") - 1


def _hourly(price_per_gpu_hour: float, gpus: int) -> float:
    if not price_per_gpu_hour >= 0 or gpus < 1:
        raise ValueError(f"price {price_per_gpu_hour} per GPU-hour and {gpus} GPUs: need a price and at least one GPU")
    return price_per_gpu_hour * gpus


def _rate(value: float, name: str) -> float:
    if not value > 0:
        raise ValueError(f"{name} is {value}: must be above 0 (was anything completed?)")
    return value
