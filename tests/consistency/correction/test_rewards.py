import pytest
import torch

from consistency.correction import overlong_penalty
from consistency.errors import InvalidInputError

LENGTHS = torch.tensor([16384, 17408, 18432, 20480, 21504])


@pytest.mark.parametrize(("floor", "beyond"), [(True, -1.0), (False, -1.25)])
def test_worked_example_of_the_soft_punishment(floor, beyond):
    found = overlong_penalty(LENGTHS, max_length=20480, cache_length=4096, floor=floor)
    assert found.tolist() == [0.0, -0.25, -0.5, -1.0, beyond]


def test_the_factor_scales_the_whole_penalty():
    found = overlong_penalty(LENGTHS, max_length=20480, cache_length=4096, factor=2.0)
    assert found.tolist() == [0.0, -0.5, -1.0, -2.0, -2.0]


@pytest.mark.parametrize(("max_length", "cache_length"), [(10, 0), (10, 11)])
def test_lengths_that_do_not_fit_raise(max_length, cache_length):
    with pytest.raises(InvalidInputError, match="cache_length"):
        overlong_penalty(LENGTHS, max_length=max_length, cache_length=cache_length)
