"""How nbval checks the notebooks: strictly, but for what differs from run to run."""

from helpers import hardware

CELL_TIMEOUT = 300  # seconds; nbval notices a killed kernel only when this has passed


def pytest_configure(config):
    if getattr(config.option, "nbval", False):
        config.option.nbval_cell_timeout = CELL_TIMEOUT


def pytest_collectstart(collector):
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)


def pytest_collection_modifyitems(items):
    """A cell tagged `tier` is compared only on the tier that its notebook was stored on; elsewhere it has to run."""
    here = hardware.tier().name
    for item in items:
        cell = getattr(item, "cell", None)
        if cell is not None and "tier" in cell.metadata.get("tags", []):
            stored = item.parent.nb.metadata["workbook"]["tier"]
            item.options["check"] = item.options["check"] and stored == here
