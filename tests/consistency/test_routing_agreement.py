import pytest
import torch

from consistency.errors import InvalidInputError
from consistency.metrics import router_flip_rate, routing_confidence, token_flip_rate


def test_worked_example_of_the_routing_confidence():
    rows = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.25] * 4])
    assert routing_confidence(rows[:1], 2) == pytest.approx(0.7)
    assert routing_confidence(rows[1:], 2) == pytest.approx(0.5)
    assert routing_confidence(rows, 2) == pytest.approx(0.6)


def test_confidence_averages_over_tokens_and_layers_and_skips_invalid_tokens():
    scores = torch.tensor([[[0.4, 0.3, 0.2, 0.1], [0.25] * 4], [[1.0, 0, 0, 0], [1.0, 0, 0, 0]]])
    assert routing_confidence(scores, 2) == pytest.approx((0.7 + 0.5 + 1 + 1) / 4)
    assert routing_confidence(scores, 2, torch.tensor([True, False])) == pytest.approx(0.6)
    assert routing_confidence(scores, 2, torch.tensor([False, False])) == 0.0


def test_sigmoid_scores_are_divided_by_their_sum():
    scores = torch.tensor([[0.8, 0.6, 0.4, 0.2]])
    assert routing_confidence(scores, 2, normalise=True) == pytest.approx(0.7)
    with pytest.raises(InvalidInputError, match="normalise"):
        routing_confidence(scores, 2)


@pytest.mark.parametrize("topk", [0, 5])
def test_a_topk_that_does_not_fit_raises(topk):
    with pytest.raises(InvalidInputError, match="topk"):
        routing_confidence(torch.tensor([[0.25] * 4]), topk)


def test_logits_are_not_taken_for_probabilities():
    with pytest.raises(InvalidInputError, match="negative"):
        routing_confidence(torch.tensor([[1.5, -0.5]]), 1)


IDS = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 7], [1, 2]]])


def test_the_order_of_the_slots_is_no_flip_unless_asked_for():
    swapped = IDS.flip(-1)
    assert router_flip_rate(IDS, swapped) == 0.0
    assert router_flip_rate(IDS, swapped, ordered=True) == 1.0


def test_flips_are_counted_per_token_and_layer_and_per_token():
    other = IDS.clone()
    other[0, 0, 1] = 9
    other[1] = torch.tensor([[5, 8], [7, 9]])
    assert router_flip_rate(IDS, other) == pytest.approx(3 / 6)
    assert token_flip_rate(IDS, other) == pytest.approx(2 / 3)


def test_invalid_tokens_do_not_count():
    other = IDS.clone()
    other[1] = 0
    assert router_flip_rate(IDS, other, torch.tensor([True, False, True])) == 0.0
    assert router_flip_rate(IDS, other, torch.zeros(3, dtype=torch.bool)) == 0.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int32])
def test_any_integer_dtype_compares_with_any_other(dtype):
    assert router_flip_rate(IDS.to(dtype), IDS.flip(-1)) == 0.0
    assert router_flip_rate(IDS.to(dtype), IDS.flip(-1).to(dtype)) == 0.0


def test_large_uint16_ids_compare_as_sets():
    ids = torch.tensor([[[40000, 3, 65535]]]).to(torch.uint16)
    other = torch.tensor([[[65535, 40000, 3]]]).to(torch.uint16)
    assert router_flip_rate(ids, other) == 0.0
    assert router_flip_rate(ids, torch.tensor([[[65535, 40000, 4]]]).to(torch.uint16)) == 1.0


@pytest.mark.parametrize(
    "other", [IDS[:2], IDS[:, :1], IDS.to(torch.float32)], ids=["tokens", "layers", "floating"]
)
def test_routings_that_do_not_fit_raise(other):
    with pytest.raises(InvalidInputError):
        router_flip_rate(IDS, other)
