"""How nbval checks the notebooks: strictly, but for what differs from run to run."""

CELL_TIMEOUT = 300  # seconds; nbval notices a killed kernel only when this has passed


def pytest_configure(config):
    if getattr(config.option, "nbval", False):
        config.option.nbval_cell_timeout = CELL_TIMEOUT


def pytest_collectstart(collector):
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)
