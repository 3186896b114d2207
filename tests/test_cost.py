"""Costs against sums by hand, and against the sums of the two articles, which must not come out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.cost import per_million_tokens, per_thousand_requests, saving


def test_yuan_per_million_tokens_are_41_67_and_not_the_articles_4_2():
    """15 yuan an hour at 100 tokens/s: 150 yuan for 3.6 million tokens. The article has 150 / 3.6 = 4.2."""
    cost = per_million_tokens(15, 1, 100)
    assert cost == pytest.approx(150 / 3.6) == pytest.approx(41.67, abs=0.01)
    assert cost != pytest.approx(4.2, rel=0.5)


def test_500_tokens_a_second_cost_8_33_and_not_less_than_1():
    assert per_million_tokens(15, 1, 500) == pytest.approx(8.33, abs=0.01)
    assert not per_million_tokens(15, 1, 500) < 1


def test_a_hundred_million_tokens_a_day_differ_by_3333_yuan_and_not_by_tens_of_thousands():
    difference = 100 * (per_million_tokens(15, 1, 100) - per_million_tokens(15, 1, 500))
    assert difference == pytest.approx(3333, abs=1) and difference < 10_000


def test_a_request_costs_6e_6_dollars_and_not_0_0082():
    """3.2 dollars an hour at 142 requests/s are 511,200 requests: the article's table is 1,310 times too high."""
    cost = per_thousand_requests(3.2, 1, 142) / 1000
    assert cost == pytest.approx(3.2 / 511_200) == pytest.approx(6.26e-6, rel=1e-3)
    assert 0.0082 / cost == pytest.approx(1310, rel=1e-3)


def test_two_gpus_cost_twice():
    """The articles serve with two A100s and pay for one."""
    assert per_thousand_requests(3.2, 2, 142) == pytest.approx(6.4 / 511.2)
    assert per_million_tokens(3.2, 2, 1000) == 2 * per_million_tokens(3.2, 1, 1000)


def test_the_saving_is_34_percent_and_not_54():
    """From 142 to 215 requests/s on the same cards; the table says -54 %, the text -34 %."""
    change = saving(per_thousand_requests(3.2, 2, 142), per_thousand_requests(3.2, 2, 215))
    assert change == pytest.approx(-0.3395, abs=1e-4)
    assert change != pytest.approx(-0.54, abs=0.1)


def test_twenty_million_requests_a_day_save_thousands_a_year_and_not_a_million_and_a_half():
    for gpus, dollars in ((1, 15_500), (2, 31_000)):
        per_request = (per_thousand_requests(3.2, gpus, 142) - per_thousand_requests(3.2, gpus, 215)) / 1000
        assert per_request * 20e6 * 365 == pytest.approx(dollars, rel=0.01)


@given(st.floats(0.01, 1e3), st.integers(1, 64), st.floats(0.01, 1e6))
def test_the_bill_is_paid_whatever_the_unit(price, gpus, rate):
    """Cost per unit times units per hour is the price of an hour."""
    assert per_million_tokens(price, gpus, rate) * rate * 3600 / 1e6 == pytest.approx(price * gpus)
    assert per_thousand_requests(price, gpus, rate) * rate * 3600 / 1e3 == pytest.approx(price * gpus)


@pytest.mark.parametrize("arguments", [(3.2, 1, 0), (3.2, 1, -5), (3.2, 1, float("nan")), (-1, 1, 5), (3.2, 0, 5)])
def test_no_throughput_has_no_cost(arguments):
    for function in (per_million_tokens, per_thousand_requests):
        with pytest.raises(ValueError, match=r"must be above 0|need a price"):
            function(*arguments)
