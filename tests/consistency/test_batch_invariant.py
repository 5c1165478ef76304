from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional

import consistency
from consistency import InvalidInputError, UnsupportedError, batch_invariant, kernels

# pyright: reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false
# pyright: reportOptionalSubscript=false, reportOptionalIterable=false
BFLOAT = torch.bfloat16
DTYPES = [torch.float32, BFLOAT, torch.float16]


def wide(seed, *shape, dtype=torch.float32):
    """Signed, over many magnitudes, cancelling along a row."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values *= torch.exp2(torch.randint(-5, 6, shape, generator=generator).float())
    half = shape[-1] // 2
    values[..., half : 2 * half] = -values[..., :half].flip(-1) * 1.001
    return values.to(dtype)


def is_on():
    """Whether torch's matrix product is the kernels'."""
    product = torch.mm(torch.ones(2, 3, requires_grad=True), torch.ones(3, 4))
    return type(product.grad_fn).__name__ == "_MatmulBackward"


# Fault 1: a nested exit that drops the overrides, an exception that leaves them on.
def test_an_inner_exit_keeps_the_outer_context_and_the_last_exit_restores_torch():
    with batch_invariant():
        with batch_invariant():
            assert is_on()
        assert is_on()
        consistency.enable()
        consistency.disable()
        assert is_on()
    assert not is_on()


def test_an_exception_in_a_nested_context_leaves_nothing_on():
    with pytest.raises(ZeroDivisionError):
        with batch_invariant():
            with batch_invariant():
                raise ZeroDivisionError
    assert not is_on()
    with batch_invariant():
        with pytest.raises(UnsupportedError):
            torch.mm(torch.zeros(2, 2).double(), torch.zeros(2, 2).double())
        assert is_on()
    assert not is_on()


def test_disable_without_enable_and_a_changed_option_are_refused():
    with pytest.raises(InvalidInputError, match="not on"):
        consistency.disable()
    with batch_invariant(tp_invariant=True):
        with pytest.raises(InvalidInputError, match="tp_invariant=True"):
            consistency.enable()
        assert is_on()
    assert not is_on()


def test_it_decorates_functions_and_holds_in_other_threads():
    found = []

    @batch_invariant()
    def body():
        worker = threading.Thread(target=lambda: found.append(is_on()))
        worker.start()
        worker.join()
        return is_on()

    assert body() and found == [True] and not is_on()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operator_is_the_kernel_of_its_name(dtype):
    x, weight, bias = wide(0, 9, 300, dtype=dtype), wide(1, 20, 300, dtype=dtype), wide(2, 20)
    bias, norm = bias.to(dtype), wide(3, 300, dtype=dtype)
    a, b = wide(4, 3, 5, 64, dtype=dtype), wide(5, 3, 64, 7, dtype=dtype)
    linear = kernels.linear(x, weight, bias)
    with batch_invariant():
        pairs = [
            (functional.linear(x, weight, bias), linear),
            (functional.linear(x.view(3, 3, 300), weight, bias), linear.view(3, 3, 20)),
            (torch.nn.functional.linear(x[0], weight, bias), linear[0]),
            (x @ weight.t(), kernels.linear(x, weight)),
            (torch.addmm(bias, x, weight.t()), linear),
            (torch.mv(weight, x[0]), kernels.linear(x[:1], weight)[0]),
            (torch.dot(x[0], weight[0]), kernels.linear(x[:1], weight)[0, 0]),
            (torch.einsum("ik,jk->ij", x, weight), kernels.linear(x, weight)),
            (torch.bmm(a, b), kernels.bmm(a, b)),
            (a @ b, kernels.bmm(a, b)),
            (torch.softmax(x, -1), kernels.softmax(x).to(dtype)),
            (torch.log_softmax(x, 0), kernels.log_softmax(x.t()).t().to(dtype)),
            (torch.log_softmax(x, -1, dtype=torch.float32), kernels.log_softmax(x.float())),
            (x.sum(), kernels.sum(x)),
            (x.mean(0, keepdim=True), kernels.mean(x, 0, keepdim=True)),
            (x.sum(-1, dtype=torch.float32), kernels.sum(x, -1, out_dtype=torch.float32)),
            (functional.layer_norm(x, (300,), norm, None), kernels.layer_norm(x, norm, None, 1e-5)),
            (functional.rms_norm(x, (300,), norm, 1e-6), kernels.rms_norm(x, norm, 1e-6)),
        ]
        with torch.inference_mode():
            pairs.append((functional.linear(x, weight, bias), linear))
    for index, (got, want) in enumerate(pairs):
        assert got.dtype == want.dtype, index
        assert torch.equal(got, want), index


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_model_does_not_depend_on_its_batch_forward_and_backward(dtype):
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(130, 200), torch.nn.LayerNorm(200), torch.nn.GELU(),
        torch.nn.Linear(200, 70), torch.nn.RMSNorm(70), torch.nn.Softmax(-1),
    ).to(dtype)  # fmt: skip
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    x, grad = wide(1, 40, 130, dtype=dtype), wide(2, 40, 70, dtype=dtype)

    def run(rows):
        part = x[rows].clone().requires_grad_()
        with batch_invariant():
            y = model(part)
        # After the context has ended: the gradients are the kernels' all the same.
        y.backward(grad[rows])
        return y.detach(), part.grad

    whole = run(list(range(40)))
    for rows in ([3], [39, 0, 7], list(range(16))):
        part = run(rows)
        assert torch.equal(part[0], whole[0][rows])
        assert torch.equal(part[1], whole[1][rows])


# Fault 2: beta, alpha, a 2-D bias, out= and dtype variants.
@pytest.mark.parametrize("bias_shape", [(), (20,), (1, 20), (9, 1), (9, 20)])
def test_addmm_honours_factors_every_bias_out_and_dtype(bias_shape):
    x, weight, bias = wide(0, 9, 64), wide(1, 64, 20), wide(2, *bias_shape, 1).squeeze(-1)
    options = {"beta": 0.5, "alpha": -2.0}
    expected = kernels.addmm(bias, x, weight, **options)
    out = torch.empty(9, 20)
    with batch_invariant():
        assert torch.equal(torch.addmm(bias, x, weight, **options), expected)
        assert torch.addmm(bias, x, weight, **options, out=out) is out
    assert torch.equal(out, expected)


def test_out_and_dtype_variants_are_covered():
    x, weight = wide(0, 9, 64, dtype=BFLOAT), wide(1, 64, 20, dtype=BFLOAT)
    a, b = x.view(3, 3, 64), weight.expand(3, 64, 20)
    single = kernels.matmul(x, weight, out_dtype=torch.float32)
    with batch_invariant():
        for call, want in (
            (lambda out: torch.mm(x, weight, out=out), kernels.matmul(x, weight)),
            (lambda out: torch.bmm(a, b, out=out), kernels.bmm(a, b)),
            (lambda out: torch.mv(weight.t(), x[0], out=out), kernels.matmul(x, weight)[0]),
            (lambda out: torch.sum(x, -1, out=out), kernels.sum(x, -1)),
            (lambda out: torch.mean(x, -1, out=out), kernels.mean(x, -1)),
            (lambda out: torch.softmax(x, -1, out=out), kernels.softmax(x).to(BFLOAT)),
            (
                lambda out: torch.ops.aten.linear.out(x, weight.t(), out=out),
                kernels.matmul(x, weight),
            ),
        ):
            for out in (torch.empty(want.shape, dtype=BFLOAT), torch.empty(0, dtype=BFLOAT)):
                call(out)
                assert torch.equal(out, want)
        assert torch.equal(torch.mm(x, weight, out_dtype=torch.float32), single)
        assert torch.equal(torch.bmm(a, b, out_dtype=torch.float32).view(9, 20), single)
        with pytest.raises(InvalidInputError, match=r"out must be torch.bfloat16"):
            torch.mm(x, weight, out=torch.empty(9, 20))
        with pytest.raises(InvalidInputError, match="out must have shape"):
            torch.mm(x, weight, out=torch.empty(2, 2, dtype=BFLOAT))


@pytest.mark.parametrize("bias_shape", [(3, 4, 5), (5,), (1, 4, 1)])
@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5])
def test_baddbmm_honours_bias_and_factors(bias_shape, beta):
    a, b, bias = wide(0, 3, 4, 64), wide(1, 3, 64, 5), torch.ones(bias_shape)
    with batch_invariant():
        got = torch.baddbmm(bias, a, b, beta=beta, alpha=2.0)
    product = kernels.bmm(a, b, out_dtype=torch.float32) * 2.0
    assert torch.equal(got, product + bias * beta if beta else product)


# Fault 3: fp64, a softmax over another dimension, empty dimensions, half_to_float.
def test_float64_is_refused_by_name_everywhere():
    x = torch.zeros(2, 2, dtype=torch.float64)
    calls = {
        "mm": lambda: x @ x,
        "addmm": lambda: torch.addmm(x, x, x),
        "bmm": lambda: torch.bmm(x[None], x[None]),
        "linear": lambda: functional.linear(x, x),
        "_softmax": lambda: x.softmax(-1),
        "_log_softmax": lambda: x.log_softmax(-1),
        "sum": x.sum,
        "mean": x.mean,
        "layer_norm": lambda: functional.layer_norm(x, (2,)),
        "rms_norm": lambda: functional.rms_norm(x, (2,)),
        "scaled_dot_product_attention": lambda: functional.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None], is_causal=True
        ),
    }
    with batch_invariant():
        for name, call in calls.items():
            with pytest.raises(UnsupportedError, match=rf"aten::{name} .*float64"):
                call()
        with pytest.raises(UnsupportedError, match=r"aten::sum .*dtype=torch.float64"):
            x.float().sum(dtype=torch.float64)


@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_softmaxes_take_any_dimension(dim):
    x = wide(0, 4, 5, 6)
    with batch_invariant():
        for torchs, ours in (
            (torch.softmax, kernels.softmax),
            (torch.log_softmax, kernels.log_softmax),
        ):
            got = torchs(x, dim)
            assert torch.equal(got, ours(x.movedim(dim, -1)).movedim(-1, dim))


def test_half_to_float_returns_float32():
    x = wide(0, 4, 6, dtype=BFLOAT)
    with batch_invariant():
        assert torch.equal(torch._softmax(x, -1, True), kernels.softmax(x))
        assert torch._log_softmax(x, -1, False).dtype == BFLOAT


def test_empty_dimensions_are_torchs():
    with batch_invariant():
        assert (torch.zeros(0, 3) @ torch.zeros(3, 2)).shape == (0, 2)
        assert torch.equal(torch.zeros(2, 0) @ torch.zeros(0, 3), torch.zeros(2, 3))
        assert torch.zeros(0, 3).softmax(-1).shape == (0, 3)
        assert torch.zeros(3, 0).sum(-1).tolist() == [0, 0, 0]
        assert torch.zeros(3, 0).mean(-1).isnan().all()
        assert torch.zeros(0).sum().item() == 0


# Fault 4: a float16 mean that overflows.
def test_a_float16_mean_of_large_values_is_finite():
    with batch_invariant():
        assert torch.full((4096,), 60000.0, dtype=torch.float16).mean().item() == 60000.0


# Fault 5: indices that overflow 32 bits. A stride span beyond 2^31 elements, without that memory.
def test_offsets_beyond_two_to_the_31_are_read_right():
    storage = torch.empty(0, dtype=torch.float16)
    step = (1 << 31) // 3 + 64
    storage = torch.empty(3 * step + 64, dtype=torch.float16)  # pages that are never touched
    rows = storage.as_strided((4, 64), (step, 1))
    rows.copy_(wide(0, 4, 64, dtype=torch.float16))
    weight = wide(1, 8, 64, dtype=torch.float16)
    with batch_invariant():
        assert torch.equal(functional.linear(rows, weight), kernels.linear(rows.clone(), weight))
        assert torch.equal(rows.sum(-1), kernels.sum(rows.clone(), -1))
        assert torch.equal((rows.t().t() @ weight.t())[3], functional.linear(rows[3], weight))


# Fault 6: a copy of the transposed head weight per call.
def test_a_transposed_weight_is_not_copied():
    x, weight = torch.ones(1, 512), torch.ones(4096, 512)
    with batch_invariant(), torch.profiler.profile(profile_memory=True) as profile:
        torch.mm(x, weight.t())
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < weight.nbytes // 16


# Fault 7: fp32 products in TF32.
def test_float32_products_keep_24_bits():
    x, weight = torch.full((1, 1), 2.0**20 + 1), torch.ones(1, 1)
    with batch_invariant():
        assert (x @ weight).item() == 2.0**20 + 1


# Fault 8: tiles that follow the batch; a norm whose block changes at 256 tokens.
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 64, 255, 256, 257, 300])
def test_no_batch_size_is_a_threshold(rows):
    x, weight, norm = wide(0, 300, 96), wide(1, 33, 96), wide(2, 96)
    with batch_invariant():
        whole = [functional.linear(x, weight), functional.rms_norm(x, (96,), norm, 1e-6)]
        part = [
            functional.linear(x[:rows], weight),
            functional.rms_norm(x[:rows], (96,), norm, 1e-6),
        ]
    for got, want in zip(part, whole, strict=True):
        assert torch.equal(got, want[:rows])


# Fault 9: a softmax whose sum has another order than the kernel's own.
def test_softmax_and_log_softmax_and_the_sampler_share_one_sum():
    logits = wide(0, 5, 700)
    with batch_invariant():
        assert torch.equal(logits.softmax(-1), kernels.softmax(logits))
        assert torch.equal(functional.log_softmax(logits, -1), kernels.log_softmax(logits))
        assert torch.equal(
            -functional.cross_entropy(logits, torch.arange(5), reduction="none"),
            kernels.log_softmax(logits)[torch.arange(5), torch.arange(5)],
        )


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_attention_is_causal_or_one_query_and_anything_else_is_refused(heads):
    q, k, v = wide(0, 2, heads[0], 9, 16), wide(1, 2, heads[1], 9, 16), wide(2, 2, heads[1], 9, 16)
    options = {"enable_gqa": heads[0] != heads[1]}
    call = functional.scaled_dot_product_attention
    with batch_invariant():
        whole = call(q, k, v, is_causal=True, **options)
        assert torch.equal(call(q[1:], k[1:], v[1:], is_causal=True, **options), whole[1:])
        decoded = call(q[:, :, -1:], k, v, **options)
        assert torch.equal(decoded, whole[:, :, -1:])
        for match, change in (
            ("attn_mask", {"attn_mask": torch.ones(9, 9, dtype=torch.bool)}),
            ("dropout_p=0.1", {"dropout_p": 0.1, "is_causal": True}),
            ("is_causal=False with 9 queries", {}),
        ):
            with pytest.raises(UnsupportedError, match=match):
                call(q, k, v, **options, **change)
    repeated = [t.repeat_interleave(heads[0] // heads[1], 1).double() for t in (k, v)]
    exact = call(q.double(), *repeated, is_causal=True)
    assert torch.allclose(whole.double(), exact, rtol=1e-4, atol=1e-4)


def test_operators_without_a_kernel_raise_and_integers_stay_exact():
    x = torch.ones(2, 3)
    with batch_invariant():
        for call in (
            lambda: torch.logsumexp(x, -1),
            lambda: x.var(-1),
            lambda: torch.nn.functional.conv1d(x[None], torch.ones(1, 2, 1)),
            lambda: torch.addbmm(torch.ones(2, 2), torch.ones(2, 2, 3), torch.ones(2, 3, 2)),
        ):
            with pytest.raises(UnsupportedError, match="the contract has no kernel"):
                call()
        with pytest.raises(UnsupportedError, match="normalized_shape"):
            functional.layer_norm(x, (2, 3))
        assert (x > 0).sum().item() == 6
        assert (x > 0).sum(-1, dtype=torch.int32).tolist() == [3, 3]
        assert torch.arange(6).view(2, 3).mm(torch.arange(6).view(3, 2)).tolist() == [
            [10, 13],
            [28, 40],
        ]


def test_autocast_casts_before_the_kernels():
    x, weight = wide(0, 5, 64), wide(1, 7, 64)
    with batch_invariant(), torch.autocast("cpu", BFLOAT):
        got = functional.linear(x, weight)
    assert torch.equal(got, kernels.linear(x.to(BFLOAT), weight.to(BFLOAT)))


def test_a_compiled_function_runs_the_kernels():
    x, weight = wide(0, 9, 300), wide(1, 1000, 300)

    def function(t):
        return functional.linear(t, weight).softmax(-1)

    def with_a_context_inside(t):
        with batch_invariant():
            return functional.linear(t, weight).softmax(-1)

    expected = kernels.softmax(kernels.linear(x, weight))
    compiled = torch.compile(function, backend="aot_eager")
    native = compiled(x)
    with batch_invariant():
        assert torch.equal(compiled(x), expected)
    assert torch.equal(compiled(x), native)
    assert torch.equal(torch.compile(with_a_context_inside, backend="aot_eager")(x), expected)
    assert not is_on()


def test_tp_invariant_cuts_the_products_into_chunks():
    x, weight = wide(0, 4, 1024), wide(1, 12, 1024)
    with batch_invariant(tp_invariant=True):
        got = functional.linear(x, weight), torch.bmm(x[None], weight.t()[None])[0], x @ weight.t()
    expected = kernels.linear(x, weight, tp_invariant=True)
    assert all(torch.equal(tensor, expected) for tensor in got)
    assert not torch.equal(expected, kernels.linear(x, weight))
