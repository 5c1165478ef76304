"""Writing a state into a slot and reading it back, verified."""

from __future__ import annotations

import threading
import time

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightplane.digest import Manifest
from weightplane.errors import DigestMismatchError
from weightplane.layout import DTYPES, Layout, TensorSpec
from weightplane.memory import StagingBuffer
from weightplane.transfer import cut_into_runs, read_verified, verify_held, write_state
from weightplane.version import Transfer


class BufferReader:
    """A transport in miniature: one slot, in this process."""

    def __init__(self, slot: memoryview) -> None:
        self._slot = slot

    def register(self, arena: memoryview) -> None:
        pass

    def read(self, slot: int, offset: int, destination: memoryview) -> None:
        destination[:] = self._slot[offset : offset + len(destination)]

    def close(self) -> None:
        self._slot.release()


class ArrayReader(BufferReader):
    """The same, copying as the shared-memory transport does."""

    def read(self, slot: int, offset: int, destination: memoryview) -> None:
        source = numpy.frombuffer(self._slot, numpy.uint8)
        target = numpy.frombuffer(destination, numpy.uint8)
        numpy.copyto(target, source[offset : offset + len(target)])


def write(state: dict[str, torch.Tensor]) -> tuple[Layout, bytearray, Manifest]:
    layout = Layout.of(state)
    slot = bytearray(layout.size)
    views = layout.views(torch.frombuffer(slot, dtype=torch.uint8))
    manifest, _ = write_state(layout, state, memoryview(slot), views)
    return layout, slot, manifest


@settings(max_examples=100, deadline=None)
@given(
    extents=st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    run_bytes=st.integers(1, 700),
)
def test_runs_cover_every_byte_of_every_tensor_exactly_once(extents, run_bytes):
    layout = Layout.whole(
        TensorSpec(f"{index:02}", (extent,), "uint8") for index, extent in enumerate(extents)
    )
    runs = cut_into_runs(layout, run_bytes)
    assert all(0 <= run.stop - run.start <= run_bytes for run in runs)
    pieces: dict[int, list[tuple[int, int, bool]]] = {}
    for run in runs:
        for part in run.parts:
            assert run.start <= part.start <= part.stop <= run.stop
            pieces.setdefault(part.index, []).append((part.start, part.stop, part.last))
    for index, shard in enumerate(layout.shards):
        end = shard.offset
        for position, (start, stop, last) in enumerate(pieces[index]):
            assert start == end
            assert last == (position == len(pieces[index]) - 1)
            end = stop
        assert end == shard.offset + layout.shard_bytes(shard)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_arrives_bit_for_bit(dtype):
    raw = torch.randint(0, 2, (256,), dtype=torch.uint8)
    _, slot, manifest = write({"a": raw.view(DTYPES[dtype])})
    assert bytes(slot[:256]) == raw.numpy().tobytes()
    assert manifest == Manifest.of({"a": raw.view(DTYPES[dtype])})


def test_strided_and_expanded_tensors_are_written_in_row_major_order():
    base = torch.randn(5, 7)
    state = {"t": base.t(), "e": base[:1].expand(3, 7), "s": base[:, ::2]}
    layout, slot, manifest = write(state)
    views = layout.views(torch.frombuffer(slot, dtype=torch.uint8))
    assert all(torch.equal(views[name], state[name]) for name in state)
    assert manifest == Manifest.of(state)


@pytest.mark.parametrize("run_bytes", [64, 200, 1 << 20])
def test_what_is_read_is_what_was_written(state, run_bytes):
    layout, slot, manifest = write(state(3))
    target = bytearray(layout.size)
    done: list[int] = []
    runs = cut_into_runs(layout, run_bytes)
    reader = BufferReader(memoryview(slot))
    transfer = read_verified(reader, 0, manifest, runs, memoryview(target), done.append)
    assert transfer.byte_count == layout.byte_count
    assert done == [run.stop for run in runs]
    views = layout.views(torch.frombuffer(target, dtype=torch.uint8))
    assert Manifest.of(views) == manifest


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found_and_the_tensor_named(data):
    state = {"a": torch.arange(50), "b": torch.arange(7, dtype=torch.int8)}
    layout, slot, manifest = write(state)
    shard = data.draw(st.sampled_from(layout.shards))
    position = shard.offset + data.draw(st.integers(0, layout.shard_bytes(shard) - 1))
    slot[position] ^= 1 << data.draw(st.integers(0, 7))
    target = memoryview(bytearray(layout.size))
    with pytest.raises(DigestMismatchError, match=f"tensor '{shard.tensor}' .*corrupt or torn"):
        read_verified(
            BufferReader(memoryview(slot)), 0, manifest, cut_into_runs(layout, 128), target,
            lambda _: None,
        )  # fmt: skip


def test_a_write_into_held_weights_is_found(state):
    layout, slot, manifest = write(state(1))
    buffer = StagingBuffer(layout.size)
    buffer.bytes[:] = slot
    verify_held(manifest, buffer.bytes)
    layout.views(buffer.lease())["layers.0.router"][0, 0] += 1
    with pytest.raises(DigestMismatchError, match=r"layers\.0\.router"):
        verify_held(manifest, buffer.bytes)


def test_copying_and_digesting_leave_the_interpreter_to_other_threads():
    """One run of 256 MB: a copy or digest that kept the lock would stop this thread for its length.

    The best of several attempts counts, because the machine may be busy with something else.
    """
    layout = Layout.whole([TensorSpec("a", (1 << 28,), "uint8")])
    slot = StagingBuffer(layout.size)
    views = layout.views(torch.frombuffer(slot.bytes, dtype=torch.uint8))
    manifest = Manifest.of(views)
    target = StagingBuffer(layout.size)
    runs = cut_into_runs(layout, run_bytes=1 << 28)
    longest: list[float] = []
    for _ in range(6):
        transfers: list[Transfer] = []

        def stage(transfers: list[Transfer] = transfers) -> None:
            reader = ArrayReader(slot.bytes)
            transfers.append(read_verified(reader, 0, manifest, runs, target.bytes, lambda _: None))

        thread = threading.Thread(target=stage)
        thread.start()
        gap, last = 0.0, time.perf_counter()
        while thread.is_alive():
            now = time.perf_counter()
            gap, last = max(gap, now - last), now
        thread.join()
        longest.append(gap / (transfers[0].copy_seconds + transfers[0].verify_seconds))
    # A copy or a digest that kept the lock would be half of the whole in one piece.
    assert min(longest) < 0.4
