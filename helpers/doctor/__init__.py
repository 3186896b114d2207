"""The doctor: facts about a machine go in, findings come out.

Everything the pre-flight imports is standard library and parses on Python 3.8, so that a machine with nothing installed
gets a sentence and not a traceback.
"""

from helpers.doctor.facts import collect
from helpers.doctor.rules import Finding, preflight

__all__ = ["Finding", "collect", "preflight"]
