"""How many programs the tests have compiled for chips that aren't here, and whether that is enough."""

import collections
import os

import pytest

PROPERTY = "compiled_for"
# Names of chips; a run of the tests in which nothing was compiled for one of them fails.
REQUIRED = os.environ.get("KVEC_MUST_COMPILE", "").split()


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session):
    config = session.config
    if not hasattr(config, "workerinput") and any(not _counts(config)[chip] for chip in REQUIRED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return (yield)


def pytest_terminal_summary(terminalreporter, config):
    counts = _counts(config)
    for chip in sorted(counts.keys() | set(REQUIRED)):
        terminalreporter.write_line(f"{'FAILED: ' * (not counts[chip])}{counts[chip]} programs compiled for {chip}")


def _counts(config) -> collections.Counter:
    reports = config.pluginmanager.get_plugin("terminalreporter").stats.get("passed", [])
    return collections.Counter(
        chip for report in reports if report.when == "call" for name, chip in report.user_properties if name == PROPERTY
    )
