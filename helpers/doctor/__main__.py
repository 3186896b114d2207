"""`python3 -m helpers.doctor preflight`: one line per rule; exit status 1 if the course cannot run here."""

from __future__ import annotations

import argparse
import sys

from helpers.doctor import collect, preflight


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="doctor", description="Diagnose this machine for the course.")
    parser.add_argument("examination", choices=["preflight"], help="preflight: can this machine run the CPU lane?")
    parser.parse_args(argv)
    findings = preflight(collect())
    for finding in findings:
        print(finding)
    return int(any(finding.level == "fail" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
