"""Layouts: what they say, that they say it canonically, and what they refuse."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightplane.errors import LayoutError, LayoutMismatchError
from weightplane.layout import ALIGNMENT, DTYPES, Layout, Shard, TensorSpec

specs = st.builds(
    TensorSpec,
    name=st.text(min_size=1, max_size=8),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(sorted(set(DTYPES) - {"float4_e2m1fn"})),
)
nibbles = st.builds(
    TensorSpec,
    name=st.text(min_size=1, max_size=8),
    shape=st.lists(st.integers(0, 2).map(lambda half: 2 * half), min_size=1, max_size=3).map(tuple),
    dtype=st.just("float4_e2m1fn"),
)
layouts = st.lists(specs | nibbles, min_size=1, max_size=8, unique_by=lambda spec: spec.name).map(
    Layout.whole
)


@settings(max_examples=50, deadline=None)
@given(layout=layouts, seed=st.integers(0, 99))
def test_the_order_in_which_tensors_are_named_does_not_change_the_layout(layout, seed):
    shuffled = list(layout.tensors)
    random.Random(seed).shuffle(shuffled)
    assert Layout.whole(shuffled) == layout
    assert Layout.whole(shuffled).digest == layout.digest


@settings(max_examples=50, deadline=None)
@given(layout=layouts)
def test_a_layout_survives_its_canonical_json(layout):
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.to_json() == layout.to_json()
    assert again.is_whole


@settings(max_examples=50, deadline=None)
@given(layout=layouts)
def test_views_cover_their_shards_and_nothing_else(layout):
    flat = torch.zeros(layout.size, dtype=torch.uint8)
    views = layout.views(flat)
    assert list(views) == [spec.name for spec in layout.tensors]
    for shard in layout.shards:
        spec = layout.spec(shard.tensor)
        view = views[shard.tensor]
        expected = spec.shape
        if spec.dtype == "float4_e2m1fn":
            expected = (*expected[:-1], expected[-1] // 2)
        assert (tuple(view.shape), view.dtype) == (expected, DTYPES[spec.dtype])
        assert shard.offset % ALIGNMENT == 0
        view.reshape(-1).view(torch.uint8).add_(1)
    assert int(flat.sum()) == layout.byte_count
    assert int(flat.max()) <= 1


def test_the_digest_depends_on_every_part_of_a_layout():
    base = [TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (4,), "bfloat16")]
    variants = [
        base,
        base[:1],
        [TensorSpec("c", (2, 3), "float32"), base[1]],
        [TensorSpec("a", (3, 2), "float32"), base[1]],
        [TensorSpec("a", (2, 3), "int32"), base[1]],
    ]
    assert len({Layout.whole(variant).digest for variant in variants}) == len(variants)


def test_a_state_that_fits_is_accepted_in_any_order_and_with_any_strides(state, layout):
    fitting = dict(reversed(state(1).items()))
    fitting["embedding"] = fitting["embedding"].t().contiguous().t()
    layout.check(fitting)


def test_a_missing_tensor_is_named(state, layout):
    broken = state(1)
    del broken["layers.2.weight"]
    with pytest.raises(LayoutError, match=r"'layers\.2\.weight' is missing"):
        layout.check(broken)


def test_an_extra_tensor_is_named(state, layout):
    with pytest.raises(LayoutError, match=r"'lm_head' is extra"):
        layout.check({**state(1), "lm_head": torch.zeros(2)})


def test_a_router_in_another_dtype_is_named_with_both_dtypes(state, layout):
    broken = state(1)
    broken["layers.0.router"] = broken["layers.0.router"].bfloat16()
    expected = r"'layers\.0\.router' is bfloat16\[4, 16\] instead of float32\[4, 16\]"
    with pytest.raises(LayoutError, match=expected):
        layout.check(broken)


def test_a_transposed_tensor_is_named_with_both_shapes(state, layout):
    broken = state(1)
    broken["layers.0.router"] = broken["layers.0.router"].t()
    with pytest.raises(LayoutError, match=r"float32\[16, 4\] instead of float32\[4, 16\]"):
        layout.check(broken)


def test_many_differences_are_summed_up(state, layout):
    with pytest.raises(LayoutError, match="and 3 more"):
        layout.check({"embedding": state(1)["embedding"][:-1]})


def test_another_layout_is_refused_by_naming_the_tensors(layout):
    other = Layout.whole([*layout.tensors[1:], TensorSpec("new", (1,), "int8")])
    with pytest.raises(LayoutMismatchError, match="engine has another layout: 'embedding' is miss"):
        layout.require_same(other, "engine")
    layout.require_same(Layout.from_json(layout.to_json()), "engine")


def test_nibbles_are_counted_one_by_one_and_never_cut_out_of_their_byte():
    layout = Layout.whole([TensorSpec("packed", (3, 64), "float4_e2m1fn")])
    assert layout.byte_count == 3 * 32
    with pytest.raises(LayoutError, match="last extent must be even"):
        TensorSpec("packed", (3, 63), "float4_e2m1fn")
    shards = (Shard("packed", (0, 31), (3, 32), 0),)
    with pytest.raises(LayoutError, match="cuts a byte of two elements in half"):
        Layout((TensorSpec("packed", (3, 64), "float4_e2m1fn"),), shards, 64)


def test_an_empty_update_is_refused_rather_than_called_a_success():
    with pytest.raises(LayoutError, match="at least one tensor"):
        Layout.of({})


def test_a_sparse_tensor_is_refused():
    with pytest.raises(LayoutError, match=r"'a' is torch.sparse_coo"):
        Layout.of({"a": torch.eye(2).to_sparse()})


@pytest.mark.parametrize(
    ("shards", "size", "reason"),
    [
        ((Shard("a", (0,), (5,), 0),), 64, "no box inside"),
        ((Shard("a", (-1,), (2,), 0),), 64, "no box inside"),
        ((Shard("a", (0, 0), (2, 1), 0),), 64, "no box inside"),
        ((Shard("a", (0,), (4,), 8),), 64, "multiple of 64"),
        ((Shard("a", (0,), (2,), 0), Shard("a", (2,), (2,), 0)), 64, "at least 8"),
        ((Shard("b", (0,), (4,), 0),), 64, "does not name"),
        ((Shard("a", (0,), (4,), 0),), 128, "size is 128"),
        ((), 64, "needs a shard"),
    ],
)
def test_an_impossible_layout_is_refused(shards, size, reason):
    with pytest.raises(LayoutError, match=reason):
        Layout((TensorSpec("a", (4,), "float32"),), shards, size)


def test_a_layout_of_parts_is_described_but_not_whole():
    shards = (Shard("a", (0,), (2,), 0), Shard("a", (2,), (2,), 64))
    layout = Layout((TensorSpec("a", (4,), "float32"),), shards, 128)
    assert not layout.is_whole
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"tensors": [], "shards": [], "size": 64}',
        b'{"tensors": [{"name": "a", "shape": [-1], "dtype": "int8"}], "shards": [], "size": 64}',
        b'{"tensors": [{"name": "a", "shape": [1], "dtype": "qint8"}], "shards": [], "size": 64}',
        b'{"tensors": [{"name": 3, "shape": [1], "dtype": "int8"}], "shards": [], "size": 64}',
    ],
)
def test_what_is_no_layout_is_refused_with_one_error(document):
    with pytest.raises(LayoutError):
        Layout.from_json(document)
