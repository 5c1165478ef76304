import pytest

from consistency.errors import InvalidInputError
from consistency.metrics import DriftBound

T30 = {
    "coupling": 0.5,
    "alignment": 0.1,
    "smoothness": 2.0,
    "gradient_norm": 1.0,
    "step": 0.01,
    "max_step": 0.01,
}


def test_worked_example_of_the_compounding_theorem():
    bound = DriftBound(**T30)
    assert bound.kappa == pytest.approx(0.11)
    assert bound.threshold == pytest.approx(0.44)
    assert bound.after(0.5, 3) == pytest.approx((0.5014, 0.502807, 0.504221), abs=1e-6)
    assert bound.geometric_after(0.5, 3) == pytest.approx((0.50125, 0.502503, 0.503759), abs=1e-6)


def test_the_bound_stays_above_the_geometric_one_from_the_threshold_on():
    bound = DriftBound(**T30)
    pairs = zip(bound.after(0.44, 200), bound.geometric_after(0.44, 200), strict=True)
    assert all(value >= geometric - 1e-12 for value, geometric in pairs)


def test_below_the_threshold_geometric_growth_is_not_claimed():
    with pytest.raises(InvalidInputError, match="threshold"):
        DriftBound(**T30).geometric_after(0.4, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("coupling", 0.0), ("alignment", -1.0), ("smoothness", float("nan")), ("step", 0.02)],
)
def test_a_constant_out_of_its_range_raises(field, value):
    with pytest.raises(InvalidInputError, match=field):
        DriftBound(**{**T30, field: value})
