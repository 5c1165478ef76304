"""Digests and manifests."""

from __future__ import annotations

import pytest
import torch
import xxhash

from weightplane.digest import Manifest, tensor_digest
from weightplane.errors import LayoutError
from weightplane.layout import DTYPES, Layout, TensorSpec


def test_the_digest_is_xxh3_128_of_the_elements_in_row_major_order():
    tensor = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    expected = xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())
    assert tensor_digest(tensor) == expected


def test_the_digest_does_not_depend_on_strides_or_place():
    tensor = torch.randn(6, 8)
    expected = tensor_digest(tensor)
    assert tensor_digest(tensor.t().contiguous().t()) == expected
    assert tensor_digest(torch.cat([tensor, tensor])[6:]) == expected
    assert tensor_digest(torch.randn(1, 8).expand(6, 8).clone().copy_(tensor)) == expected


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_can_be_digested(dtype):
    raw = torch.arange(64, dtype=torch.uint8) % 2
    assert tensor_digest(raw.view(DTYPES[dtype])) == tensor_digest(raw)


def test_minus_zero_and_nan_payloads_count():
    plain, signed = torch.tensor([0.0]), torch.tensor([-0.0])
    assert tensor_digest(plain) != tensor_digest(signed)


def test_a_gradient_does_not_get_in_the_way():
    assert tensor_digest(torch.ones(2, requires_grad=True)) == tensor_digest(torch.ones(2))


def test_the_manifest_digest_covers_names_shapes_dtypes_and_bytes():
    tensor = torch.arange(8, dtype=torch.int32)
    manifests = [
        Manifest.of({"a": tensor, "b": tensor}),
        Manifest.of({"a": tensor, "c": tensor}),
        Manifest.of({"a": tensor, "b": tensor.view(2, 4)}),
        Manifest.of({"a": tensor, "b": tensor.view(torch.float32)}),
        Manifest.of({"a": tensor, "b": tensor + 1}),
        Manifest.of({"a": tensor}),
    ]
    assert len({manifest.digest for manifest in manifests}) == len(manifests)


def test_the_same_weights_have_the_same_manifest_wherever_they_lie(state):
    shuffled = dict(reversed(state(1).items()))
    assert Manifest.of(shuffled).digest == Manifest.of(state(1)).digest


def test_a_manifest_survives_packing(state):
    manifest = Manifest.of(state(1))
    assert Manifest.unpack(manifest.layout, manifest.pack()) == manifest


def test_changed_tensors_are_found_by_their_digests(state):
    before, after = state(1), state(1)
    after["layers.1.weight"][3, 4] += 1
    after["new"] = torch.zeros(1)
    assert Manifest.of(after).changed_since(Manifest.of(before)) == ("layers.1.weight", "new")


def test_a_manifest_with_the_wrong_number_of_digests_is_refused():
    layout = Layout.whole([TensorSpec("a", (1,), "int8")])
    with pytest.raises(LayoutError, match="2 digests for 1 tensors"):
        Manifest(layout, (bytes(16), bytes(16)))
    with pytest.raises(LayoutError, match="16 bytes"):
        Manifest.unpack(layout, bytes(15))
