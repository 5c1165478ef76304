// layer_norm with its gradients, and sums of rows and of columns.
//
// Order of reduction: sums along a row by `fold`, sums over rows by `column_sums` (both in
// fold.hpp); a function of the width or of the number of rows alone.
#include <cmath>
#include <vector>

#include "fold.hpp"

namespace lockstep {
namespace {

// `count` lanes of a value; the lanes beyond are zero, so that they add nothing.
F16 kept(F16 value, int64_t count) {
  if (count >= kLanes) return value;
  float lanes[kLanes];
  store(lanes, value);
  return load_partial(lanes, static_cast<int>(count));
}

std::vector<float> widened(const void* data, int32_t dtype, int64_t width, float missing) {
  std::vector<float> values(width, missing);
  if (data != nullptr)
    for (int64_t i = 0; i < width; ++i)
      values[i] = load_scalar(data, i, static_cast<DType>(dtype));
  return values;
}

struct Moments {
  float mean, inverse;
};

// Two passes: the variance is the mean of the squares of the differences, which cannot cancel.
template <DType kType>
Moments moments_of(const Element<kType>* x, int64_t width, float eps) {
  const float count = static_cast<float>(width);
  const float mean =
      fold(width, [&](int64_t i, int64_t n) { return load_typed<kType>(x + i, n); }) / count;
  const F16 shift = set1(mean);
  const float squares = fold(width, [&](int64_t i, int64_t n) {
    const F16 d = kept(sub(load_typed<kType>(x + i, n), shift), n);
    return mul(d, d);
  });
  return {mean, 1.0f / std::sqrt(squares / count + eps)};
}

template <DType kType>
void norm_row(const Element<kType>* x, const float* weight, const float* bias, Moments m,
              Element<kType>* out, int64_t width) {
  const F16 shift = set1(m.mean), factor = set1(m.inverse);
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t n = width - i;
    const F16 normal = mul(sub(load_typed<kType>(x + i, n), shift), factor);
    store_typed<kType>(
        out + i,
        fma(normal, load_typed<kFloat32>(weight + i, n), load_typed<kFloat32>(bias + i, n)), n);
  }
}

// dx = r (g - mean(g) - xhat mean(g xhat)) with g = grad * weight, xhat = (x - mean) r.
template <DType kType>
void norm_row_gradient(const Element<kType>* grad, const Element<kType>* x, const float* weight,
                       Moments m, Element<kType>* out, int64_t width) {
  const F16 shift = set1(m.mean), factor = set1(m.inverse);
  const auto scaled = [&](int64_t i, int64_t n) {
    return mul(load_typed<kType>(grad + i, n), load_typed<kFloat32>(weight + i, n));
  };
  const auto normal = [&](int64_t i, int64_t n) {
    return mul(sub(load_typed<kType>(x + i, n), shift), factor);
  };
  const float count = static_cast<float>(width);
  const F16 mean = set1(fold(width, scaled) / count);
  const F16 slope =
      set1(-(fold(width, [&](int64_t i, int64_t n) { return mul(scaled(i, n), normal(i, n)); }) /
             count));
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t n = width - i;
    const F16 centred = sub(scaled(i, n), mean);
    store_typed<kType>(out + i, mul(fma(normal(i, n), slope, centred), factor), n);
  }
}

}  // namespace
}  // namespace lockstep

using namespace lockstep;

// weight and bias may be null; moments [rows, 2] (mean, 1 / deviation) may be null.
LOCKSTEP_API int32_t lockstep_layer_norm_forward(const void* x, int32_t dtype, const void* weight,
                                                 int32_t weight_dtype, const void* bias,
                                                 int32_t bias_dtype, void* out, float* moments,
                                                 int64_t rows, int64_t width, float eps,
                                                 int32_t threads) {
  return guarded([&] {
    const std::vector<float> scale = widened(weight, weight_dtype, width, 1.0f);
    const std::vector<float> offset = widened(bias, bias_dtype, width, 0.0f);
    with_type(dtype, [&](auto type) {
      using T = Element<type()>;
      parallel_for(team_size(threads, rows * width), rows, [&](int64_t row) {
        const T* in = static_cast<const T*>(x) + row * width;
        const Moments m = moments_of<type()>(in, width, eps);
        norm_row<type()>(in, scale.data(), offset.data(), m, static_cast<T*>(out) + row * width,
                         width);
        if (moments == nullptr) return;
        moments[2 * row] = m.mean;
        moments[2 * row + 1] = m.inverse;
      });
    });
  });
}

// Any of the three gradients may be null.
LOCKSTEP_API int32_t lockstep_layer_norm_backward(const void* grad, const void* x, int32_t dtype,
                                                  const void* weight, int32_t weight_dtype,
                                                  const float* moments, void* grad_x,
                                                  float* grad_weight, float* grad_bias,
                                                  int64_t rows, int64_t width, int32_t threads) {
  return guarded([&] {
    const std::vector<float> scale = widened(weight, weight_dtype, width, 1.0f);
    with_type(dtype, [&](auto type) {
      constexpr DType kType = type();
      using T = Element<kType>;
      const T* grads = static_cast<const T*>(grad);
      const T* inputs = static_cast<const T*>(x);
      const int team = team_size(threads, rows * width);
      if (grad_x != nullptr)
        parallel_for(team, rows, [&](int64_t row) {
          norm_row_gradient<kType>(grads + row * width, inputs + row * width, scale.data(),
                                   {moments[2 * row], moments[2 * row + 1]},
                                   static_cast<T*>(grad_x) + row * width, width);
        });
      if (grad_weight != nullptr)
        column_sums(team, rows, width, grad_weight,
                    [&](int64_t row, int64_t column, int64_t n, F16 lanes) {
                      const int64_t at = row * width + column;
                      const F16 centred =
                          sub(load_typed<kType>(inputs + at, n), set1(moments[2 * row]));
                      return fma(load_typed<kType>(grads + at, n),
                                 mul(centred, set1(moments[2 * row + 1])), lanes);
                    });
      if (grad_bias != nullptr)
        column_sums(team, rows, width, grad_bias,
                    [&](int64_t row, int64_t column, int64_t n, F16 lanes) {
                      return add(lanes, load_typed<kType>(grads + row * width + column, n));
                    });
    });
  });
}

// out[row] = the sum of the row, divided by `divisor`, rounded once.
LOCKSTEP_API int32_t lockstep_row_sums(const void* x, int32_t dtype, void* out, int32_t out_dtype,
                                       int64_t rows, int64_t width, float divisor,
                                       int32_t threads) {
  return guarded([&] {
    with_type(dtype, [&](auto type) {
      using T = Element<type()>;
      parallel_for(team_size(threads, rows * width), rows, [&](int64_t row) {
        const T* in = static_cast<const T*>(x) + row * width;
        const float total =
            fold(width, [&](int64_t i, int64_t n) { return load_typed<type()>(in + i, n); });
        store_scalar(out, row, static_cast<DType>(out_dtype), total / divisor);
      });
    });
  });
}
