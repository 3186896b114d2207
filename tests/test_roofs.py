import pytest

from helpers import roofs


def test_ceilings_are_physical():
    measured = roofs.measure("cpu")
    # A DDR channel moves more than 1 GB/s, a socket less than 2 TB/s; a core does more than 1 GFLOP/s in float32.
    assert 1e9 < measured.bandwidth < 2e12
    assert 1e9 < measured.flops < 1e14
    assert measured.ridge == pytest.approx(measured.flops / measured.bandwidth)


def test_a_device_that_is_not_there():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="sees no GPU"):
        roofs.measure("cuda")
