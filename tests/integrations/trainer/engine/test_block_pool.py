from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from integrations.trainer.engine.blocks import BlockPool, block_keys


def keys_of(tokens: list[int], epoch: int = 0, size: int = 4) -> list[bytes]:
    return block_keys(epoch, np.array(tokens, np.int64), size)


def test_only_full_blocks_have_keys():
    assert [len(keys_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_key_depends_on_every_token_before_it_and_on_the_weights():
    one = keys_of([1, 2, 3, 4, 5, 6, 7, 8])
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 9])[0] == one[0]
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 9])[1] != one[1]
    assert keys_of([0, 2, 3, 4, 5, 6, 7, 8])[1] != one[1]
    assert not set(keys_of([1, 2, 3, 4, 5, 6, 7, 8], epoch=1)) & set(one)


def test_known_keys_are_continued_not_changed():
    tokens = np.arange(12)
    first = block_keys(3, tokens[:8], 4)
    assert block_keys(3, tokens, 4, first) == block_keys(3, tokens, 4)


def test_a_released_block_is_found_again_until_it_is_given_out():
    pool = BlockPool(2)
    block = pool.take()
    assert block is not None
    pool.publish(block, b"a")
    pool.release([block])
    assert pool.find([b"a"]) == [block]
    assert pool.available == 2
    assert {pool.take(), pool.take()} == {0, 1}
    assert pool.find([b"a"]) == []
    assert pool.take() is None


def test_the_block_used_least_recently_is_given_out_first():
    pool = BlockPool(3)
    blocks = [pool.take() for _ in range(3)]
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        assert block is not None
        pool.publish(block, key)
        pool.release([block])
    pool.share(pool.find([b"a"])[0])
    pool.release(pool.find([b"a"]))
    pool.take()
    assert pool.find([b"b"]) == []
    assert pool.find([b"a"]) != []


def test_a_shared_block_stays_until_its_last_user_releases_it():
    pool = BlockPool(1)
    block = pool.take()
    assert block is not None
    pool.publish(block, b"a")
    pool.share(block)
    pool.release([block])
    assert pool.take() is None
    pool.release([block])
    assert pool.take() == block


def test_a_second_block_with_the_same_content_stays_private():
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    pool.release([second])
    assert pool.find([b"a"]) == [first]
    assert not pool.is_idle(second)


def test_a_prefix_ends_at_the_first_block_that_is_gone():
    pool = BlockPool(3)
    for key in (b"a", b"c"):
        block = pool.take()
        assert block is not None
        pool.publish(block, key)
    assert len(pool.find([b"a", b"b", b"c"])) == 1


def test_forgetting_the_cache_frees_idle_blocks_and_keeps_used_ones():
    pool = BlockPool(2)
    used, idle = pool.take(), pool.take()
    assert used is not None
    assert idle is not None
    pool.publish(used, b"a")
    pool.publish(idle, b"b")
    pool.release([idle])
    pool.forget_cached()
    assert pool.find([b"a"]) == pool.find([b"b"]) == []
    assert pool.available == 1
    pool.release([used])
    assert pool.available == 2


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_every_block_is_free_idle_or_used_and_never_two_of_them(actions: list[tuple[int, int]]):
    pool, held = BlockPool(4), []
    for action, number in actions:
        key = bytes([number])
        if action == 0 and (block := pool.take()) is not None:
            assert block not in held
            held.append(block)
        elif action == 1 and held:
            pool.release([held.pop(number % len(held))])
        elif action == 2 and held:
            pool.publish(held[number % len(held)], key)
        elif action == 3:
            for block in pool.find([key]):
                pool.share(block)
                held.append(block)
        assert pool.available == 4 - len(set(held))
