"""One place for what every test shares: what a machine may lack, and how properties are explored.

A test that needs something says so by mark, and a machine without it skips that test by name:

    @pytest.mark.needs_command("promtool", "prometheus")     the command, and the Debian package that brings it
    @pytest.mark.needs_avx512                                AWQ and the FP8 KV cache of vLLM's CPU build

With WORKBOOK_NO_SKIP=1 (set by .ci/run, which installs the packages) a skip is a failure. A processor cannot be
installed, so there `needs_avx512` still skips, by name.
"""

import os
import shutil

import hypothesis
import pytest

from helpers.doctor import collect

hypothesis.settings.register_profile("workbook", derandomize=True, deadline=None)
hypothesis.settings.load_profile("workbook")

NO_SKIP = os.environ.get("WORKBOOK_NO_SKIP") == "1"
LACKS_AVX512 = "this processor has no AVX-512"


def pytest_configure(config):
    config.addinivalue_line("markers", "needs_command(command, package): skipped by name where the command is missing")
    config.addinivalue_line("markers", "needs_avx512: skipped by name on processors without AVX-512")


def pytest_runtest_setup(item):
    for mark in item.iter_markers("needs_command"):
        command, package = mark.args
        if shutil.which(command) is None:
            pytest.skip(f"{command} is missing: sudo apt install {package}")
    if item.get_closest_marker("needs_avx512") and "avx512f" not in collect()["cpu_flags"]:
        pytest.skip(LACKS_AVX512)


def _fail_if_skipped(report):
    reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if NO_SKIP and report.skipped and not hasattr(report, "wasxfail") and LACKS_AVX512 not in reason:
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped (WORKBOOK_NO_SKIP=1): {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    _fail_if_skipped(report)
    return report
