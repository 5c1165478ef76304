import dataclasses
import json

import pytest
import torch

from consistency.contract import KERNELS_REVISION, NumericsContract
from consistency.errors import (
    ConsistencyError,
    ContractMismatchError,
    InvalidInputError,
    UnsupportedError,
)


def test_a_contract_survives_its_json():
    contract = NumericsContract(compute_dtype="float32", tp_invariant=True, kernels_revision=7)
    assert NumericsContract.from_json(contract.to_json()) == contract


def test_equal_contracts_have_equal_digests_and_a_digest_is_16_hexadecimal_digits():
    digest = NumericsContract().digest()
    assert digest == NumericsContract(compute_dtype="bfloat16").digest()
    assert len(digest) == 16
    assert int(digest, 16) >= 0


def test_every_field_decides_the_digest():
    base = NumericsContract()
    others = [
        NumericsContract(compute_dtype="float16"),
        NumericsContract(tp_invariant=True),
        NumericsContract(matmul_chunk_granule=128),
        NumericsContract(matmul_max_chunks=4),
        NumericsContract(attention_block=128),
        NumericsContract(row_lanes=8),
        NumericsContract(kernels_revision=99),
    ]
    assert len({contract.digest() for contract in [base, *others]}) == len(others) + 1


def test_the_digest_of_the_default_contract_changes_only_on_purpose():
    # A changed digest makes every running engine refuse a new learner: raise kernels_revision or
    # schema when that is meant, and then this line.
    assert NumericsContract().digest() == "4253e38b22cb432a"


def test_a_contract_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        NumericsContract().tp_invariant = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("k", "chunks"),
    [
        *[(0, 1), (1, 1), (63, 1), (64, 1), (96, 1), (128, 2), (192, 1), (256, 4), (512, 8)],
        *[(576, 1), (640, 2), (768, 4), (1024, 8), (4096, 8), (5120, 8), (11008, 4), (2**20, 8)],
    ],
)
def test_chunks_are_the_largest_power_of_two_up_to_8_that_cuts_k_into_multiples_of_64(k, chunks):
    assert NumericsContract(tp_invariant=True).matmul_chunks(k) == chunks


@pytest.mark.parametrize("k", [0, 1, 64, 4096])
def test_without_tp_invariance_k_is_never_cut(k):
    assert NumericsContract(tp_invariant=False).matmul_chunks(k) == 1


@pytest.mark.parametrize("k", [-1, 2.0, True, None])
def test_a_k_that_is_no_length_raises(k):
    with pytest.raises(InvalidInputError, match="k is"):
        NumericsContract(tp_invariant=True).matmul_chunks(k)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("device", "cuda", UnsupportedError),
        ("compute_dtype", "float8_e4m3", UnsupportedError),
        ("router_dtype", "bfloat16", UnsupportedError),
        ("sampler", "by_slot", UnsupportedError),
        ("schema", 2, UnsupportedError),
        ("tp_invariant", 1, InvalidInputError),
        ("attention_block", 48, InvalidInputError),
        ("row_lanes", 0, InvalidInputError),
        ("matmul_max_chunks", True, InvalidInputError),
        ("kernels_revision", 0, InvalidInputError),
        ("kernels_revision", "1", InvalidInputError),
    ],
)
def test_a_choice_that_is_not_implemented_is_refused_by_name(field, value, error):
    with pytest.raises(error, match=field):
        NumericsContract(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("matmul_chunk_granule", 128),
        ("matmul_max_chunks", 4),
        ("attention_block", 128),
        ("row_lanes", 8),
        ("kernels_revision", KERNELS_REVISION + 1),
    ],
)
def test_a_peers_choice_can_be_read_and_compared_but_not_computed_under(field, value):
    peer = NumericsContract.from_json(NumericsContract(**{field: value}).to_json())
    assert NumericsContract().difference(peer) == (field,)
    with pytest.raises(UnsupportedError, match=rf"{field} is {value}, the kernels .* have \d+"):
        peer.require_supported()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("tp_invariant", [False, True])
def test_every_contract_of_this_release_can_be_computed_under(dtype, tp_invariant):
    NumericsContract(compute_dtype=dtype, tp_invariant=tp_invariant).require_supported()


def test_the_contract_names_every_field_that_is_not_compiled_in():
    contract = NumericsContract(attention_block=32, row_lanes=32)
    with pytest.raises(UnsupportedError, match=r"attention_block.*row_lanes"):
        contract.require_supported()


def test_difference_names_the_fields_that_differ():
    left = NumericsContract()
    right = NumericsContract(compute_dtype="float32", kernels_revision=99)
    assert left.difference(right) == ("compute_dtype", "kernels_revision")
    assert left.difference(left) == ()


def test_require_equal_says_in_one_line_what_differs_and_how():
    left, right = NumericsContract(), NumericsContract(tp_invariant=True)
    left.require_equal(NumericsContract())
    with pytest.raises(ContractMismatchError) as caught:
        left.require_equal(right)
    message = str(caught.value)
    assert "tp_invariant is False here and True there" in message
    assert left.digest() in message and right.digest() in message
    assert "\n" not in message


def test_an_unknown_key_raises():
    values = json.loads(NumericsContract().to_json()) | {"fast": True}
    with pytest.raises(InvalidInputError, match="unknown keys fast"):
        NumericsContract.from_json(json.dumps(values))


def test_a_missing_key_raises_instead_of_taking_a_default():
    values = json.loads(NumericsContract().to_json())
    del values["attention_block"]
    with pytest.raises(InvalidInputError, match="attention_block"):
        NumericsContract.from_json(json.dumps(values))


def test_a_newer_schema_is_named_before_its_unknown_fields_are():
    values = json.loads(NumericsContract().to_json()) | {"schema": 2, "attention_sinks": "none"}
    with pytest.raises(UnsupportedError, match="schema is 2"):
        NumericsContract.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", b"\xff\xfe", "null"])
def test_text_that_is_no_contract_raises(text):
    with pytest.raises(InvalidInputError, match="contract"):
        NumericsContract.from_json(text)


def test_the_compute_dtype_is_available_to_torch():
    assert NumericsContract(compute_dtype="float16").torch_dtype is torch.float16


def test_every_error_can_be_caught_as_one():
    with pytest.raises(ConsistencyError):
        NumericsContract(device="tpu")
