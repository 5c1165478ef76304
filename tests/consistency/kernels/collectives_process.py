"""Eight gloo ranks: every check on groups of 1, 2, 4 and 8 of them, against one process.

Started by test_collectives.py as `python collectives_process.py FOLDER`. Rank r writes FOLDER/r, a
line per check: group size, name, "ok" or what went wrong. The ranks are forks of one process, which
has loaded torch for all of them.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from pathlib import Path

import torch
from torch import distributed

from consistency import kernels
from consistency.kernels import collectives

# pyright: reportCallIssue=false
BFLOAT = torch.bfloat16
SIZES = (1, 2, 4, 8)
HEADS, HEAD_DIM, HIDDEN, INNER, TOKENS, VOCABULARY = 8, 64, 512, 512, 64, 1024


def wide(seed, *shape, dtype=BFLOAT):
    """Signed, over many magnitudes, cancelling along a row."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values *= torch.exp2(torch.randint(-4, 5, shape, generator=generator).float())
    half = shape[-1] // 2
    values[..., half : 2 * half] = -values[..., :half].flip(-1) * 1.001
    return values.to(dtype)


def equal(*pairs):
    for index, (got, want) in enumerate(pairs):
        if got.shape != want.shape or got.dtype != want.dtype or not torch.equal(got, want):
            raise ValueError(f"tensor {index} differs from that of one process")


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def shard(tensor, rank, size, dim=0):
    return tensor.chunk(size, dim)[rank]


def check_column_parallel(group, rank, size):
    x, weight, bias = wide(0, TOKENS, HIDDEN), wide(1, INNER, HIDDEN), wide(2, INNER)
    grad = wide(3, TOKENS, INNER)
    whole = [leaf(t) for t in (x, weight, bias)]
    expected = kernels.linear(*whole, tp_invariant=True)
    expected.backward(grad)
    for sequence in (False, True):
        for gather in (False, True):
            mine = [leaf(shard(x, rank, size) if sequence else x)]
            mine += [leaf(shard(t, rank, size)) for t in (weight, bias)]
            got = collectives.column_parallel_linear(
                *mine, group=group, sequence_parallel=sequence, gather_output=gather
            )
            got.backward(grad if gather else shard(grad, rank, size, 1))
            equal(
                (got, expected if gather else shard(expected, rank, size, 1)),
                (mine[0].grad, shard(whole[0].grad, rank, size) if sequence else whole[0].grad),
                (mine[1].grad, shard(whole[1].grad, rank, size)),
                (mine[2].grad, shard(whole[2].grad, rank, size)),
            )


def check_row_parallel(group, rank, size):
    x, weight, bias = wide(0, TOKENS, INNER), wide(1, HIDDEN, INNER), wide(2, HIDDEN)
    grad = wide(3, TOKENS, HIDDEN)
    whole = [leaf(t) for t in (x, weight, bias)]
    expected = kernels.linear(*whole, tp_invariant=True)
    expected.backward(grad)
    for sequence in (False, True):
        mine = [leaf(shard(x, rank, size, 1)), leaf(shard(weight, rank, size, 1)), leaf(bias)]
        got = collectives.row_parallel_linear(*mine, group=group, sequence_parallel=sequence)
        got.backward(shard(grad, rank, size) if sequence else grad)
        equal(
            (got, shard(expected, rank, size) if sequence else expected),
            (mine[0].grad, shard(whole[0].grad, rank, size, 1)),
            (mine[1].grad, shard(whole[1].grad, rank, size, 1)),
            (mine[2].grad, whole[2].grad),
        )


def check_main_grad(group, rank, size):
    x, weight, grad = wide(0, 9, HIDDEN), wide(1, INNER, HIDDEN), wide(2, 9, INNER)
    whole, mine = leaf(weight), leaf(shard(weight, rank, size))
    for tensor in (whole, mine):
        setattr(tensor, "main_grad", torch.ones(tensor.shape))  # noqa: B010
    kernels.linear(x, whole, tp_invariant=True).backward(grad)
    collectives.column_parallel_linear(x, mine, group=group).backward(shard(grad, rank, size, 1))
    gradients = [getattr(tensor, "main_grad") for tensor in (mine, whole)]  # noqa: B009
    equal((gradients[0], shard(gradients[1], rank, size)))


def check_logits(group, rank, size):
    hidden, weight = wide(0, 16, HIDDEN), wide(1, VOCABULARY, HIDDEN)
    grad = wide(2, 16, VOCABULARY, dtype=torch.float32)
    whole = [leaf(hidden), leaf(weight)]
    expected = kernels.lm_head_logits(*whole)
    expected.backward(grad)
    for sequence in (False, True):
        for gather in (False, True):
            mine = [
                leaf(shard(hidden, rank, size) if sequence else hidden),
                leaf(shard(weight, rank, size)),
            ]
            got = collectives.vocabulary_parallel_logits(
                *mine, group=group, sequence_parallel=sequence, gather_output=gather
            )
            got.backward(grad if gather else shard(grad, rank, size, 1))
            rows = whole[0].grad
            equal(
                (got, expected if gather else shard(expected, rank, size, 1)),
                (mine[0].grad, shard(rows, rank, size) if sequence else rows),
                (mine[1].grad, shard(whole[1].grad, rank, size)),
            )


def check_logprob(group, rank, size):
    targets = torch.randint(0, VOCABULARY, (37,), generator=torch.Generator().manual_seed(5))
    for dtype in (BFLOAT, torch.float32):
        hidden, weight = wide(0, 37, 72, dtype=dtype), wide(1, VOCABULARY, 72, dtype=dtype) / 16
        grads = (wide(2, 37, dtype=torch.float32), wide(3, 37, dtype=torch.float32))
        whole = [leaf(hidden), leaf(weight)]
        expected = kernels.lm_head_logprob(*whole, targets, temperature=0.7)
        torch.autograd.backward(expected, grads)
        mine = [leaf(hidden), leaf(shard(weight, rank, size))]
        got = collectives.vocabulary_parallel_logprob(*mine, targets, temperature=0.7, group=group)
        torch.autograd.backward(got, grads)
        equal(
            *zip(got, expected, strict=True),
            (mine[0].grad, whole[0].grad),
            (mine[1].grad, shard(whole[1].grad, rank, size)),
        )


def block_weights():
    shapes = {
        "norm": (HIDDEN,), "q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN),
        "o": (HIDDEN, HIDDEN), "norm2": (HIDDEN,), "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }  # fmt: skip
    return {name: wide(i, *shape) / 8 for i, (name, shape) in enumerate(shapes.items())}


def block(x, w, heads, norm_weight, column, row):
    """A transformer block; the last three arguments are the plain or the parallel kernels."""
    starts = torch.tensor([0, 20, TOKENS], dtype=torch.int32)
    positions = torch.cat([torch.arange(20), torch.arange(TOKENS - 20)])
    table = kernels.rotary_table(HEAD_DIM, TOKENS, 10000.0)
    normed = kernels.rms_norm(x, norm_weight(w["norm"]), 1e-6)
    q, k, v = (column(normed, w[n]).view(TOKENS, heads, HEAD_DIM) for n in "qkv")
    q, k = (kernels.rotary(t, positions, table) for t in (q, k))
    mixed = kernels.attention_varlen(q, k, v, starts, scale=HEAD_DIM**-0.5)
    x = x + row(mixed.reshape(TOKENS, heads * HEAD_DIM), w["o"])
    normed = kernels.rms_norm(x, norm_weight(w["norm2"]), 1e-6)
    gate_up = torch.cat([column(normed, w["gate"]), column(normed, w["up"])], -1)
    return x + row(kernels.silu_and_mul(gate_up), w["down"])


@functools.cache
def whole_block():
    def plain(t, weight):
        return kernels.linear(t, weight, tp_invariant=True)

    x, whole = leaf(wide(20, TOKENS, HIDDEN)), {n: leaf(t) for n, t in block_weights().items()}
    expected = block(x, whole, HEADS, lambda weight: weight, plain, plain)
    expected.backward(wide(21, TOKENS, HIDDEN))
    return x, whole, expected


def check_transformer_block(group, rank, size):
    x, grad, weights = wide(20, TOKENS, HIDDEN), wide(21, TOKENS, HIDDEN), block_weights()
    whole_x, whole, expected = whole_block()
    cuts = dict.fromkeys(("q", "k", "v", "gate", "up"), 0) | {"o": 1, "down": 1}

    def mine_of(name, tensor):
        return shard(tensor, rank, size, cuts[name]) if name in cuts else tensor

    for sequence in (False, True):
        options = {"group": group, "sequence_parallel": sequence}

        def of_rank(tensor, sequence=sequence):
            return shard(tensor, rank, size) if sequence else tensor

        mine = {name: leaf(mine_of(name, t)) for name, t in weights.items()}
        my_x = leaf(of_rank(x))
        got = block(
            my_x,
            mine,
            HEADS // size,
            lambda w, s=sequence: (
                collectives.shared_weight(w, TOKENS // size, group=group) if s else w
            ),
            lambda t, w, o=options: collectives.column_parallel_linear(t, w, **o),
            lambda t, w, o=options: collectives.row_parallel_linear(t, w, **o),
        )
        got.backward(of_rank(grad))
        equal(
            (got, of_rank(expected)),
            (my_x.grad, of_rank(whole_x.grad)),
            *((mine[name].grad, mine_of(name, whole[name].grad)) for name in weights),
        )


def check_tree_sums(group, rank, size):
    partials = wide(7, 8, 24, 5, dtype=torch.float32)
    mine = leaf(partials[:size][rank])
    total = kernels.join_partials(list(partials[:size]), out_dtype=BFLOAT)
    got = collectives.tree_all_reduce(mine, group=group, out_dtype=BFLOAT)
    rows = collectives.tree_reduce_scatter(mine, group=group, out_dtype=BFLOAT)
    equal((got, total), (rows, shard(total, rank, size)))
    odd = collectives.tree_all_reduce(partials[:size][rank, :3, :1], group=group)
    equal((odd, kernels.join_partials([p[:3, :1] for p in partials[:size]])))
    empty = collectives.tree_all_reduce(torch.empty(0, 4), group=group)
    equal((empty, torch.empty(0, 4)))
    rows.backward(shard(total, rank, size))
    equal((mine.grad, total.float()))


def check_sequence_seams(group, rank, size):
    whole = wide(8, 24, 5)
    x = leaf(whole)
    rows = collectives.scatter_sequence(x, group=group)
    back = collectives.gather_sequence(rows, group=group)
    equal((rows, shard(whole, rank, size)), (back, whole))
    back.backward(whole)
    equal((x.grad, whole))


def check_run_to_run(group, rank, size):
    hidden, weight = wide(0, 9, HIDDEN), leaf(shard(wide(1, INNER, HIDDEN), rank, size))
    results = []
    for _ in range(2):
        x = leaf(hidden)
        y = collectives.column_parallel_linear(x, weight, group=group)
        (grad_weight,) = torch.autograd.grad(y.float().sum(), [weight], retain_graph=True)
        y.float().square().sum().backward(inputs=[x])
        results.append((y, grad_weight, x.grad))
    equal(*zip(*results, strict=True))


def refuses(match, call):
    try:
        call()
    except ValueError as error:
        if match in str(error) and "\n" not in str(error):
            return
        raise
    raise ValueError(f"nothing was raised where {match!r} was expected")


def check_refusals(group, rank, size):
    x, weight = torch.zeros(3, 64), torch.zeros(64, 64)
    if size > 1:
        refuses(
            f"N is {3 * size}, which the contract cuts into 1 chunk(s)",
            lambda: collectives.column_parallel_linear(x, weight[:3], group=group),
        )
        refuses(
            "K is", lambda: collectives.row_parallel_linear(x[:, :5], weight[:, :5], group=group)
        )
        refuses("3 rows cannot", lambda: collectives.tree_reduce_scatter(x, group=group))
        refuses("cannot be scattered", lambda: collectives.scatter_sequence(x, group=group))
        refuses("rows is 24", lambda: collectives.shared_weight(x[0], 24, group=group))
    refuses("partial must be float32", lambda: collectives.tree_all_reduce(x.half(), group=group))
    refuses(
        "targets must lie in",
        lambda: collectives.vocabulary_parallel_logprob(
            x, weight, torch.tensor([0, 1, 64 * size]), temperature=1.0, group=group
        ),
    )


CHECKS = {name.removeprefix("check_"): f for name, f in globals().items() if name[:6] == "check_"}


def run_rank(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=max(SIZES))
    groups = {size: distributed.new_group(list(range(size))) for size in SIZES}
    lines = []
    for size in SIZES:
        if rank < size:
            for name, check in CHECKS.items():
                try:
                    check(groups[size], rank, size)
                    outcome = "ok"
                except Exception:
                    outcome = traceback.format_exc().replace("\n", " | ")
                lines.append(f"{size} {name} {outcome}")
    (folder / str(rank)).write_text("\n".join(lines) + "\n")
    distributed.barrier()
    distributed.destroy_process_group()


def main():
    folder = Path(sys.argv[1])
    children = []
    for rank in range(max(SIZES)):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run_rank(rank, folder)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()
