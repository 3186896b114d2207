"""The ledger of what the two source articles claim: verdict, truth and proof of each claim, as data.

One record in `helpers/data/claims.toml` per claim. `proof` names a test that decides the claim ("tests/x.py::test_y"
or "tests/x.py::test_y[id]"), or cites what was read ("cite: ...").
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

LEDGER = Path(__file__).parent / "data" / "claims.toml"
VERDICTS = (
    "true",
    "partly true",
    "false",
    "inconsistent",  # contradicts another sentence of the same article
    "impossible",  # contradicts arithmetic or physics, whatever was measured
    "outdated",  # was so in an older version
    "never existed",  # a flag, module or file that no version had
    "unverifiable",
)


@dataclass(frozen=True)
class Claim:
    """One claim. `claimed` and `true_value` are the two numbers, in `unit`, where arithmetic or a source decides it."""

    id: str
    claim: str
    source: str
    verdict: str
    truth: str
    proof: str
    claimed: float | None = None
    true_value: float | None = None
    unit: str = ""
    tolerance: float = 0.01


def load(path: str | os.PathLike = LEDGER) -> list[Claim]:
    """All claims of a ledger, in its order. ValueError, in one line naming the record, for one that is malformed."""
    try:
        records = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("claim", [])
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: is not TOML ({str(error).splitlines()[0]})") from None
    known = {field.name for field in fields(Claim)}
    needed = {field.name for field in fields(Claim) if field.default is MISSING}
    claims: dict[str, Claim] = {}
    for number, record in enumerate(records, 1):
        where = f"{path}: claim {record.get('id', number)!r}"
        if problem := sorted(needed - record.keys()):
            raise ValueError(f"{where} lacks {', '.join(problem)}")
        if problem := sorted(record.keys() - known):
            raise ValueError(f"{where} has unknown keys: {', '.join(problem)}")
        if record["verdict"] not in VERDICTS:
            raise ValueError(f"{where}: verdict {record['verdict']!r} is not one of {', '.join(VERDICTS)}")
        if record["id"] in claims:
            raise ValueError(f"{where} is there twice")
        claims[record["id"]] = Claim(**record)
    return list(claims.values())


def select(
    claims: list[Claim], *, verdict: str | None = None, source: str | None = None, text: str | None = None
) -> list[Claim]:
    """The claims with this verdict, of this article ("A") or section ("A 4.5"), with this text in claim or truth."""
    return [
        claim
        for claim in claims
        if (verdict is None or claim.verdict == verdict)
        and (source is None or claim.source == source or claim.source.startswith(source + " "))
        and (text is None or text.lower() in f"{claim.claim} {claim.truth}".lower())
    ]
