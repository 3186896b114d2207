"""The two ceilings of a roofline, measured on this machine: memory bandwidth and matrix-product rate.

Datasheet figures are leads; a figure drawn beside measured points uses these. Source of the method: Williams, Waterman
and Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Roofs:
    """Measured ceilings of one device: `bandwidth` in bytes/s (read plus write of a copy), `flops` in FLOP/s."""

    device: str
    bandwidth: float
    flops: float
    dtype: str

    @property
    def ridge(self) -> float:
        """FLOP per byte above which a kernel is bound by arithmetic."""
        return self.flops / self.bandwidth


def measure(device: str | None = None) -> Roofs:
    """Measure `device` ("cuda" where there is one, else "cpu"): a copy larger than any cache, a square product.

    A GPU copies 2 GB and multiplies bfloat16 (n = 8192); a CPU copies 256 MB and multiplies float32 (n = 1024), because
    one without AVX-512 emulates bfloat16. Each figure is the median of five runs after one warm-up. Raises ValueError
    for a device that torch does not have.
    """
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"roofs.measure: torch {torch.__version__} sees no GPU; use device='cpu'")
    dtype, megabytes, size = ("bfloat16", 2048, 8192) if device.startswith("cuda") else ("float32", 256, 1024)
    source = torch.empty(megabytes * 1_000_000 // 2, dtype=torch.float16, device=device).fill_(1.0)
    target = torch.empty_like(source)
    left = torch.randn(size, size, dtype=getattr(torch, dtype), device=device)
    right = torch.randn_like(left)

    def seconds(action) -> float:
        taken = []
        for _ in range(6):
            start = time.perf_counter()
            action()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    copied = 2 * source.numel() * source.element_size()
    return Roofs(
        device=device,
        bandwidth=copied / seconds(lambda: target.copy_(source)),
        flops=2 * size**3 / seconds(lambda: left @ right),
        dtype=dtype,
    )
