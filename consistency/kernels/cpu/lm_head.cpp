// Log-probability and entropy of one token per row of fp32 logits, with their gradient.
//
// With z = logit / temperature (one division), m = max z, d = z - m, S = sum exp(d):
//   logprob = d[target] - log S          entropy = log S - sum(exp(d) d) / S
//
// Order of reduction, a function of the vocabulary's width V alone. V is cut into P equal parts,
// the largest power of two P <= 8 with V % (64 P) == 0, else 1; a part into segments of 1024 columns.
// A part has its own maximum. A segment is folded into 16 lanes by index modulo 16, in order, and
// the lanes by the tree of simd.hpp. Segments of a part are joined by the binary tree whose left
// side is the largest power of two. Parts are joined by a binary tree of neighbours, each join
// shifting both sides to the larger maximum. A vocabulary-parallel rank with P / R parts therefore
// computes a subtree, and nothing has to be known of the other ranks.
#include <algorithm>
#include <cmath>

#include "fold.hpp"

namespace lockstep {
namespace {

constexpr int64_t kSegment = 1024;
// Replaces -inf in products with a probability of exactly zero, where 0 * -inf would be NaN.
constexpr float kFloor = -1e30f;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Sums {
  float weight;  // sum exp(d)
  float moment;  // sum exp(d) d
};

inline Sums operator+(Sums a, Sums b) { return {a.weight + b.weight, a.moment + b.moment}; }

int64_t parts_of(int64_t width) {
  for (int64_t parts = 8; parts > 1; parts /= 2)
    if (width % (64 * parts) == 0) return parts;
  return 1;
}

// log x for a positive normal number, within 1 ulp of double, from explicit operations alone: the
// library's log may differ between processors.
double natural_log(double x) {
  if (!(x > 0.0) || std::isinf(x)) return x > 0.0 ? x : std::nan("");
  int exponent;
  double f = std::frexp(x, &exponent);
  if (f < 0.70710678118654752) {
    f *= 2.0;
    --exponent;
  }
  const double s = (f - 1.0) / (f + 1.0);
  const double square = s * s;
  double series = 0.0;
  for (int term = 23; term >= 1; term -= 2) series = series * square + 1.0 / term;
  return 2.0 * s * series + exponent * 0.69314718055994531;
}

F16 scaled(const float* row, int64_t i, int64_t end, F16 temperature) {
  return div(load_typed<kFloat32>(row + i, end - i, kMinusInfinity), temperature);
}

float maximum_of(const float* row, int64_t width, F16 temperature) {
  F16 best = set1(kMinusInfinity);
  // A NaN leaves the maximum alone; it enters the sums.
  for (int64_t i = 0; i < width; i += kLanes) best = max(scaled(row, i, width, temperature), best);
  return max(best);
}

// What is known of some columns of a row: m, S and sum exp(d) d, and z of the target (-inf where it
// is not among the columns).
struct Statistics {
  float maximum, weight, moment, chosen;
};

// Sums shifted from maximum `from` to the larger `to`. A side that holds nothing but -inf has no
// weight, and the floor keeps it so.
Sums shifted(const Statistics& s, float to) {
  if (s.maximum == to || to == kMinusInfinity) return {s.weight, s.moment};
  const float distance = s.maximum - to;
  const float factor = exp(distance);
  const float moment = __builtin_fmaf(s.weight, std::max(distance, kFloor), s.moment);
  return {s.weight * factor, moment * factor};
}

Statistics joined(const Statistics& a, const Statistics& b) {
  const float maximum = a.maximum > b.maximum ? a.maximum : b.maximum;
  const Sums sums = shifted(a, maximum) + shifted(b, maximum);
  return {maximum, sums.weight, sums.moment, a.chosen > b.chosen ? a.chosen : b.chosen};
}

Statistics part_of(const float* row, int64_t width, F16 temperature) {
  const float maximum = maximum_of(row, width, temperature);
  const F16 shift = set1(maximum == kMinusInfinity ? 0.0f : maximum), floor = set1(kFloor);
  Tree<Sums> segments;
  for (int64_t start = 0; start < width; start += kSegment) {
    const int64_t end = std::min(start + kSegment, width);
    F16 weight = zero(), moment = zero();
    for (int64_t i = start; i < end; i += kLanes) {
      const F16 d = sub(scaled(row, i, end, temperature), shift);
      const F16 e = exp(d);
      weight = add(weight, e);
      moment = fma(e, max(d, floor), moment);
    }
    segments.push({sum(weight), sum(moment)});
  }
  const Sums sums = segments.total();
  return {maximum, sums.weight, sums.moment, kMinusInfinity};
}

// Joins 2^n items by a binary tree of neighbours; item(i) yields them.
template <typename Item>
Statistics tree(int64_t begin, int64_t count, Item&& item) {
  if (count == 1) return item(begin);
  const Statistics left = tree(begin, count / 2, item);
  return joined(left, tree(begin + count / 2, count / 2, item));
}

// Columns [0, width) in `parts` parts; target may lie outside.
Statistics statistics_of(const float* row, int64_t width, int64_t parts, int64_t target,
                         float temperature) {
  const F16 divisor = set1(temperature);
  const int64_t part_width = width / parts;
  Statistics s = tree(0, parts, [&](int64_t part) {
    return part_of(row + part * part_width, part_width, divisor);
  });
  if (0 <= target && target < width) s.chosen = row[target] / temperature;
  return s;
}

void finish(const Statistics& s, int64_t r, float* logprob, float* entropy) {
  const double log_weight = natural_log(s.weight);
  logprob[r] = static_cast<float>(static_cast<double>(s.chosen) - s.maximum - log_weight);
  entropy[r] = static_cast<float>(log_weight - static_cast<double>(s.moment) / s.weight);
}

// g_logprob (onehot - p) - g_entropy p (log p + entropy), over the temperature, in place.
void gradient_row(float* row, int64_t width, int64_t target, float temperature, float maximum,
                  float weight, float entropy, float grad_logprob, float grad_entropy) {
  if (grad_logprob == 0.0f && grad_entropy == 0.0f) {
    std::fill(row, row + width, 0.0f);
    return;
  }
  const F16 divisor = set1(temperature), shift = set1(maximum), floor = set1(kFloor);
  const F16 inverse = set1(1.0f / weight);
  const F16 minus_entropy_grad = set1(-grad_entropy), logprob_grad = set1(grad_logprob);
  const F16 offset = set1(static_cast<float>(entropy - natural_log(weight)));
  for (int64_t i = 0; i < width; i += kLanes) {
    const F16 d = sub(scaled(row, i, width, divisor), shift);
    const F16 p = mul(exp(d), inverse);
    const F16 slope = sub(mul(minus_entropy_grad, add(max(d, floor), offset)), logprob_grad);
    F16 grad = mul(p, slope);
    if (i <= target && target < i + kLanes) {
      float lanes[kLanes];
      store(lanes, grad);
      lanes[target - i] += grad_logprob;
      grad = load(lanes);
    }
    store_typed<kFloat32>(row + i, div(grad, divisor), width - i);
  }
}

}  // namespace
}  // namespace lockstep

// Per row: logprob and entropy, and m and S, which are kept for the gradient.
LOCKSTEP_API int32_t lockstep_token_logprob(const float* logits, int64_t row_stride, int64_t rows,
                                            int64_t width, const int64_t* targets,
                                            float temperature, float* logprob, float* entropy,
                                            float* maximum, float* weight, int32_t threads) {
  using namespace lockstep;
  const int64_t parts = parts_of(width);
  parallel_items(team_size(threads, rows * width), rows, [&](int64_t r, int) {
    const Statistics s =
        statistics_of(logits + r * row_stride, width, parts, targets[r], temperature);
    finish(s, r, logprob, entropy);
    maximum[r] = s.maximum;
    weight[r] = s.weight;
  });
  return 0;
}

// Columns [first, first + width) of a vocabulary, in `parts` parts. out [4, out_rows]: m, S,
// sum exp(d) d and z of the target, from row 0 on.
LOCKSTEP_API int32_t lockstep_token_logprob_partial(const float* logits, int64_t row_stride,
                                                    int64_t rows, int64_t first, int64_t width,
                                                    int64_t parts, const int64_t* targets,
                                                    float temperature, float* out,
                                                    int64_t out_rows, int32_t threads) {
  using namespace lockstep;
  parallel_items(team_size(threads, rows * width), rows, [&](int64_t r, int) {
    const Statistics s =
        statistics_of(logits + r * row_stride, width, parts, targets[r] - first, temperature);
    out[r] = s.maximum;
    out[out_rows + r] = s.weight;
    out[2 * out_rows + r] = s.moment;
    out[3 * out_rows + r] = s.chosen;
  });
  return 0;
}

// partials [ranks, 4, rows], ranks a power of two, joined in rank order.
LOCKSTEP_API int32_t lockstep_token_logprob_join(const float* partials, int64_t ranks, int64_t rows,
                                                 float* logprob, float* entropy, float* maximum,
                                                 float* weight) {
  using namespace lockstep;
  const IeeeMode mode;
  for (int64_t r = 0; r < rows; ++r) {
    const Statistics s = tree(0, ranks, [&](int64_t rank) -> Statistics {
      const float* p = partials + rank * 4 * rows + r;
      return {p[0], p[rows], p[2 * rows], p[3 * rows]};
    });
    finish(s, r, logprob, entropy);
    maximum[r] = s.maximum;
    weight[r] = s.weight;
  }
  return 0;
}

// Turns columns [first, first + width) of the logits into the gradient with respect to them.
LOCKSTEP_API int32_t lockstep_token_logprob_gradient(
    float* logits, int64_t row_stride, int64_t rows, int64_t first, int64_t width,
    const int64_t* targets, float temperature, const float* maximum, const float* weight,
    const float* entropy, const float* grad_logprob, const float* grad_entropy, int32_t threads) {
  using namespace lockstep;
  parallel_items(team_size(threads, rows * width), rows, [&](int64_t r, int) {
    gradient_row(logits + r * row_stride, width, targets[r] - first, temperature, maximum[r],
                 weight[r], entropy[r], grad_logprob[r], grad_entropy[r]);
  });
  return 0;
}
