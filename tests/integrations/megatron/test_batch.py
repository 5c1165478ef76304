"""Where the tokens of a batch lie in the rows of a pass."""

from __future__ import annotations

import pytest
import torch

from integrations.errors import RequestError
from integrations.megatron.batch import Batch


def test_padded_rows_are_those_of_the_transposed_batch():
    sequences = [[10, 11, 12], [20], [30, 31]]
    batch = Batch((3, 1, 2), multiple=2)
    assert (batch.width, batch.rows) == (4, 12)
    by_row = batch.token_ids(sequences).transpose(0, 1).flatten()
    for index, sequence in enumerate(sequences):
        assert by_row[batch.rows_of(index)].tolist() == sequence


def test_packed_rows_lie_one_after_the_other():
    sequences = [[10, 11, 12], [20], [30]]
    batch = Batch((3, 1, 1), multiple=2, packed=True)
    assert (batch.width, batch.rows) == (6, 6)
    assert batch.starts.tolist() == [0, 3, 4, 6]
    by_row = batch.token_ids(sequences).flatten()
    for index, sequence in enumerate(sequences):
        assert by_row[batch.rows_of(index)].tolist() == sequence


@pytest.mark.parametrize("packed", [False, True])
def test_the_shares_of_the_ranks_are_the_rows(packed):
    batch = Batch((5, 2, 3), multiple=4, packed=packed)
    rows = torch.arange(batch.rows)
    assert torch.equal(torch.cat([rows[batch.share(rank, 4)] for rank in range(4)]), rows)


def test_impossible_batches_are_refused():
    for lengths in ((), (3, 0)):
        with pytest.raises(RequestError, match="none is empty"):
            Batch(lengths)
    with pytest.raises(RequestError, match="multiple is 0"):
        Batch((1,), multiple=0)
    with pytest.raises(RequestError, match=r"\(2,\) tokens, the batch \(3,\)"):
        Batch((3,)).token_ids([[1, 2]])
