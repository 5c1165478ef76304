"""When a staging buffer may be overwritten."""

from __future__ import annotations

import threading

import pytest
import torch

from weightplane.errors import InvalidArgumentError, StagingMemoryError
from weightplane.memory import BufferPool, StagingBuffer

DERIVATIONS = {
    "the tensor itself": lambda flat: flat,
    "a slice of a typed view": lambda flat: flat[64:128].view(torch.bfloat16)[3:4],
    "a parameter": lambda flat: torch.nn.Parameter(flat.view(torch.float32), requires_grad=False),
    "a numpy array": lambda flat: flat.numpy()[5:],
    "a detached transpose": lambda flat: flat.view(16, -1).t().detach(),
    "a storage": lambda flat: flat.untyped_storage(),
}


@pytest.mark.parametrize("derivation", list(DERIVATIONS))
def test_a_buffer_is_leased_while_anything_derived_from_it_lives(derivation):
    pool = BufferPool(1024, limit=1)
    buffer = pool.take()
    assert buffer is not None
    derived = DERIVATIONS[derivation](buffer.lease())
    pool.give_back(buffer)
    assert buffer.leased
    assert pool.take() is None
    del derived
    assert not buffer.leased
    assert pool.take() is buffer


def test_a_buffer_is_free_once_another_thread_drops_the_last_view():
    buffer = StagingBuffer(1024)
    release = threading.Event()

    def hold(view: list[torch.Tensor]) -> None:
        release.wait(10)
        view.clear()

    views = [buffer.lease()[100:]]
    thread = threading.Thread(target=hold, args=(views,))
    thread.start()
    assert buffer.leased
    release.set()
    thread.join()
    assert not buffer.leased


def test_the_pool_never_exceeds_its_limit():
    pool = BufferPool(64, limit=3)
    taken = [pool.take() for _ in range(3)]
    assert len({id(buffer) for buffer in taken}) == 3
    assert pool.take() is None
    pool.warm(10)
    assert len(pool) == 3


def test_warming_makes_one_buffer_at_a_time_up_to_the_count():
    pool = BufferPool(64, limit=3)
    for _ in range(5):
        pool.warm(2)
    assert len(pool) == 2


def test_memory_that_cannot_be_had_is_one_clear_error():
    with pytest.raises(StagingMemoryError, match="9223372036854771712 bytes"):
        StagingBuffer((1 << 63) - 4096)


@pytest.mark.parametrize(("size", "limit"), [(0, 1), (1, 0)])
def test_a_pool_of_nothing_is_refused(size, limit):
    with pytest.raises(InvalidArgumentError):
        BufferPool(size, limit)
