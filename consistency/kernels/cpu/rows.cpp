// Row operations: rms_norm, silu_and_mul, rotary, softmax and log_softmax, with their gradients.
//
// Order of reduction: a row of width W is folded into 16 lanes by index modulo 16, in order, and
// the lanes by the fixed tree of simd.hpp. The order depends on W alone. Sums over rows (the
// gradient of a norm's weight) run in row order inside blocks of 8 rows, and join the blocks
// by a binary tree of neighbours. Threads own whole rows, or whole columns of such a sum.
#include <cmath>
#include <vector>

#include "fold.hpp"
#include "softmax_row.hpp"
#include "typed.hpp"

namespace lockstep {
namespace {

// The scale that rms_norm multiplies by: weight, or 1 + weight when the weight is zero-centred.
std::vector<float> norm_scale(const void* weight, int32_t dtype, int32_t zero_centered,
                              int64_t width) {
  std::vector<float> scale(width);
  const float offset = zero_centered ? 1.0f : 0.0f;
  for (int64_t i = 0; i < width; ++i)
    scale[i] = load_scalar(weight, i, static_cast<DType>(dtype)) + offset;
  return scale;
}

template <DType kType>
void norm_row(const Element<kType>* x, const float* scale, Element<kType>* out, float* inverse_rms,
              int64_t width, float eps) {
  F16 lanes = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    const F16 value = load_typed<kType>(x + i, width - i);
    lanes = fma(value, value, lanes);
  }
  const float inverse = 1.0f / std::sqrt(sum(lanes) / static_cast<float>(width) + eps);
  if (inverse_rms != nullptr) *inverse_rms = inverse;
  const F16 factor = set1(inverse);
  for (int64_t i = 0; i < width; i += kLanes) {
    const F16 value = mul(load_typed<kType>(x + i, width - i), factor);
    store_typed<kType>(out + i, mul(value, load_typed<kFloat32>(scale + i, width - i)), width - i);
  }
}

// dx = r (g w - xhat mean(g w xhat)) with xhat = x r.
template <DType kType>
void norm_row_gradient(const Element<kType>* grad, const Element<kType>* x, const float* scale,
                       float inverse, Element<kType>* grad_x, int64_t width) {
  const F16 factor = set1(inverse);
  F16 lanes = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t count = width - i;
    const F16 factors = load_typed<kFloat32>(scale + i, count);
    const F16 scaled = mul(load_typed<kType>(grad + i, count), factors);
    lanes = fma(scaled, mul(load_typed<kType>(x + i, count), factor), lanes);
  }
  const F16 mean = set1(-(sum(lanes) / static_cast<float>(width)));
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t count = width - i;
    const F16 factors = load_typed<kFloat32>(scale + i, count);
    const F16 scaled = mul(load_typed<kType>(grad + i, count), factors);
    const F16 normal = mul(load_typed<kType>(x + i, count), factor);
    store_typed<kType>(grad_x + i, mul(fma(normal, mean, scaled), factor), count);
  }
}

F16 sigmoid(F16 x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

// softmax: dx = y (g - sum(g y)); log_softmax: dx = g - exp(y) sum(g).
template <DType kType>
void softmax_row_gradient(const float* grad, const float* y, Element<kType>* out, int64_t width,
                          bool logarithm) {
  F16 lanes = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    const F16 g = load_typed<kFloat32>(grad + i, width - i);
    lanes = logarithm ? add(lanes, g) : fma(g, load_typed<kFloat32>(y + i, width - i), lanes);
  }
  const F16 total = set1(sum(lanes));
  for (int64_t i = 0; i < width; i += kLanes) {
    const F16 g = load_typed<kFloat32>(grad + i, width - i);
    const F16 value = load_typed<kFloat32>(y + i, width - i);
    const F16 result =
        logarithm ? fma(sub(zero(), exp(value)), total, g) : mul(value, sub(g, total));
    store_typed<kType>(out + i, result, width - i);
  }
}

}  // namespace
}  // namespace lockstep

using namespace lockstep;

LOCKSTEP_API int32_t lockstep_rms_norm_forward(
    const void* x, int32_t dtype, const void* weight, int32_t weight_dtype, int32_t zero_centered,
    void* out, float* inverse_rms, int64_t rows, int64_t width, float eps, int32_t threads) {
  return guarded([&] {
    const std::vector<float> scale = norm_scale(weight, weight_dtype, zero_centered, width);
    with_type(dtype, [&](auto type) {
      using T = Element<type()>;
      parallel_for(team_size(threads, rows * width), rows, [&](int64_t row) {
        norm_row<type()>(static_cast<const T*>(x) + row * width, scale.data(),
                         static_cast<T*>(out) + row * width,
                         inverse_rms == nullptr ? nullptr : inverse_rms + row, width, eps);
      });
    });
  });
}

// grad_x or grad_weight may be null.
LOCKSTEP_API int32_t lockstep_rms_norm_backward(
    const void* grad, const void* x, int32_t dtype, const void* weight, int32_t weight_dtype,
    int32_t zero_centered, const float* inverse_rms, void* grad_x, float* grad_weight,
    int64_t rows, int64_t width, int32_t threads) {
  return guarded([&] {
    const std::vector<float> scale = norm_scale(weight, weight_dtype, zero_centered, width);
    with_type(dtype, [&](auto type) {
      using T = Element<type()>;
      const T* grads = static_cast<const T*>(grad);
      const T* inputs = static_cast<const T*>(x);
      const int team = team_size(threads, rows * width);
      if (grad_x != nullptr) {
        parallel_for(team, rows, [&](int64_t row) {
          norm_row_gradient<type()>(grads + row * width, inputs + row * width, scale.data(),
                                    inverse_rms[row], static_cast<T*>(grad_x) + row * width, width);
        });
      }
      if (grad_weight != nullptr) {
        column_sums(team, rows, width, grad_weight,
                    [&](int64_t row, int64_t column, int64_t n, F16 lanes) {
                      const int64_t at = row * width + column;
                      const F16 normal =
                          mul(load_typed<type()>(inputs + at, n), set1(inverse_rms[row]));
                      return fma(load_typed<type()>(grads + at, n), normal, lanes);
                    });
      }
    });
  });
}

LOCKSTEP_API int32_t lockstep_silu_and_mul_forward(
    const void* x, int32_t dtype, void* out, int64_t rows, int64_t half, int32_t threads) {
  return guarded([&] {
    with_type(dtype, [&](auto type) {
      using T = Element<type()>;
      parallel_for(team_size(threads, rows * half, 8192), rows, [&](int64_t row) {
        const T* gate = static_cast<const T*>(x) + row * 2 * half;
        T* result = static_cast<T*>(out) + row * half;
        for (int64_t i = 0; i < half; i += kLanes) {
          const F16 g = load_typed<type()>(gate + i, half - i);
          const F16 silu = div(g, add(set1(1.0f), exp(sub(zero(), g))));
          store_typed<type()>(result + i, mul(silu, load_typed<type()>(gate + half + i, half - i)),
                              half - i);
        }
      });
    });
  });
}

LOCKSTEP_API int32_t lockstep_silu_and_mul_backward(
    const void* grad, const void* x, int32_t dtype, void* grad_x, int64_t rows, int64_t half,
    int32_t threads) {
  return guarded([&] {
    with_type(dtype, [&](auto type) {
      using T = Element<type()>;
      parallel_for(team_size(threads, rows * half, 8192), rows, [&](int64_t row) {
        const T* gate = static_cast<const T*>(x) + row * 2 * half;
        const T* outer = static_cast<const T*>(grad) + row * half;
        T* result = static_cast<T*>(grad_x) + row * 2 * half;
        for (int64_t i = 0; i < half; i += kLanes) {
          const int64_t count = half - i;
          const F16 g = load_typed<type()>(gate + i, count), s = sigmoid(g);
          const F16 up = load_typed<type()>(gate + half + i, count);
          const F16 out_grad = load_typed<type()>(outer + i, count);
          // d silu = s (1 + g (1 - s))
          const F16 slope = mul(s, fma(g, sub(set1(1.0f), s), set1(1.0f)));
          store_typed<type()>(result + i, mul(mul(out_grad, up), slope), count);
          store_typed<type()>(result + half + i, mul(out_grad, mul(g, s)), count);
        }
      });
    });
  });
}

// x: element strides (token_stride, head_stride, 1); out contiguous. sign -1 rotates back.
// *fault: -1, or the first token whose position is outside [0, table_rows).
LOCKSTEP_API int32_t lockstep_rotary(
    const void* x, int32_t dtype, int64_t token_stride, int64_t head_stride,
    const int64_t* positions, const float* table, int64_t table_rows, void* out, int64_t tokens,
    int64_t heads, int64_t head_dim, int32_t inverse, int32_t threads, int64_t* fault) {
  return guarded([&] {
    *fault = -1;
    for (int64_t token = 0; token < tokens; ++token)
      if (positions[token] < 0 || positions[token] >= table_rows) return void(*fault = token);
    const int64_t half = head_dim / 2;
    with_type(dtype, [&](auto type) {
      using T = Element<type()>;
      const int team = team_size(threads, tokens * heads * head_dim);
      parallel_for(team, tokens, [&](int64_t token) {
        const float* cosine = table + positions[token] * head_dim;
        const float* sine = cosine + half;
        for (int64_t head = 0; head < heads; ++head) {
          const T* in = static_cast<const T*>(x) + token * token_stride + head * head_stride;
          T* result = static_cast<T*>(out) + (token * heads + head) * head_dim;
          for (int64_t i = 0; i < half; i += kLanes) {
            const int64_t count = half - i;
            const F16 a = load_typed<type()>(in + i, count);
            const F16 b = load_typed<type()>(in + half + i, count);
            const F16 c = load_typed<kFloat32>(cosine + i, count);
            F16 s = load_typed<kFloat32>(sine + i, count);
            if (inverse) s = sub(zero(), s);
            store_typed<type()>(result + i, sub(mul(a, c), mul(b, s)), count);
            store_typed<type()>(result + half + i, add(mul(b, c), mul(a, s)), count);
          }
        }
      });
    });
  });
}

LOCKSTEP_API int32_t lockstep_softmax_forward(
    const void* x, int32_t dtype, float* out, int64_t rows, int64_t width, int32_t logarithm,
    int32_t threads) {
  return guarded([&] {
    with_type(dtype, [&](auto type) {
      parallel_for(team_size(threads, rows * width, 8192), rows, [&](int64_t row) {
        softmax_row<type()>(static_cast<const Element<type()>*>(x) + row * width, out + row * width,
                            width, logarithm != 0);
      });
    });
  });
}

LOCKSTEP_API int32_t lockstep_softmax_backward(
    const float* grad, const float* y, void* grad_x, int32_t dtype, int64_t rows, int64_t width,
    int32_t logarithm, int32_t threads) {
  return guarded([&] {
    with_type(dtype, [&](auto type) {
      parallel_for(team_size(threads, rows * width, 8192), rows, [&](int64_t row) {
        softmax_row_gradient<type()>(grad + row * width, y + row * width,
                                     static_cast<Element<type()>*>(grad_x) + row * width, width,
                                     logarithm != 0);
      });
    });
  });
}
