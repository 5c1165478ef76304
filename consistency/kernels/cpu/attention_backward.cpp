// Causal attention, backward, from the log-sum-exp that the forward stored.
//
// Order of reduction: one thread owns a (sequence, key head) and walks its key blocks in order, and
// inside a block the query rows in order (position, then head of the group) in chunks of 64.
//   p = exp(score - log_sum); score = scale q.k, or cap tanh(scale q.k / cap), whose slope is
//   1 - (score / cap)^2; dv_j += p do; dp = do.v; ds = p (dp - do.o) scale;
//   dq_i += ds k; dk_j += ds q.
// dk and dv add one chain per chunk, chunk by chunk; dq adds one chain per key block, block by
// block. The order depends on the sequence alone: not on the batch, and not on the number of threads.
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "attention_tile.hpp"

namespace lockstep {
namespace {

constexpr int64_t kChunkRows = 64;

struct Scratch {
  float *keys, *keys_transposed, *values_transposed, *grad_keys, *grad_values;
  float *queries, *grads, *weights, *slopes, *partial;

  static int64_t size(int64_t head_dim) {
    return kBlockKeys * (3 * padded(head_dim) + 2 * head_dim) +
           2 * kChunkRows * (padded(head_dim) + kBlockKeys) + kTileRows * padded(head_dim);
  }
  Scratch(float* p, int64_t head_dim) {
    const auto take = [&p](int64_t count) { return std::exchange(p, p + count); };
    const int64_t width = padded(head_dim);
    keys = take(kBlockKeys * width);
    grad_keys = take(kBlockKeys * width);
    grad_values = take(kBlockKeys * width);
    keys_transposed = take(kBlockKeys * head_dim);
    values_transposed = take(kBlockKeys * head_dim);
    queries = take(kChunkRows * width);
    grads = take(kChunkRows * width);
    weights = take(kChunkRows * kBlockKeys);
    slopes = take(kChunkRows * kBlockKeys);
    partial = take(kTileRows * width);
  }
};

void add_rows(float* dst, const float* src, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(dst + i, add(load(dst + i), load(src + i)));
}

// total[j, :] += sum over rows that see key j, in order, of coefficient[row, j] * b[row, :].
// first_row(j) and last_row(j) bound those of the `rows` rows that see it; both rise with j.
template <typename FirstRow, typename LastRow>
void transposed_product(const float* coefficient, int64_t rows, const float* b, int64_t width,
                        int64_t keys, float* partial, float* total, FirstRow first_row,
                        LastRow last_row) {
  const auto alone = [&](int64_t key, int i, int64_t from, int64_t to, bool fresh) {
    if (fresh || from < to)
      product(1, coefficient + from * kBlockKeys + key, 1, kBlockKeys,
              std::max<int64_t>(to - from, 0), b + from * width, width, width, partial + i * width,
              width, fresh);
  };
  for (int64_t j = 0; j < keys; j += kTileRows) {
    const int count = static_cast<int>(std::min<int64_t>(kTileRows, keys - j));
    const auto begin_of = [&](int i) { return std::min(rows, first_row(j + i)); };
    const auto end_of = [&](int i) { return std::clamp<int64_t>(last_row(j + i), 0, rows); };
    const int64_t begin = begin_of(count - 1), end = end_of(0);
    if (begin >= end) {
      for (int i = 0; i < count; ++i) alone(j + i, i, begin_of(i), end_of(i), true);
    } else {
      for (int i = 0; i < count; ++i) alone(j + i, i, begin_of(i), begin, true);
      product(count, coefficient + begin * kBlockKeys + j, 1, kBlockKeys, end - begin,
              b + begin * width, width, width, partial, width, false);
      for (int i = 0; i < count; ++i) alone(j + i, i, end, end_of(i), false);
    }
    add_rows(total + j * width, partial, count * width);
  }
}

struct Shape {
  int64_t query_heads, kv_heads, head_dim;
  float scale;
  Masking masking;
  int64_t group() const { return query_heads / kv_heads; }
};

template <DType kType>
struct Backward {
  using T = Element<kType>;
  const T* grad;
  const T* q;
  int64_t q_token_stride, q_head_stride;
  const float* log_sums;
  const float* deltas;
  float* grad_q;  // fp32 [tokens, query_heads, padded head_dim], zero at the start
  T* grad_k;
  T* grad_v;
  Shape shape;

  // Rows of a sequence are numbered position * group + head of the group.
  int64_t flat(int64_t start, int64_t head, int64_t row) const {
    const int64_t group = shape.group();
    return (start + row / group) * shape.query_heads + head * group + row % group;
  }

  void load_rows(const Scratch& s, int64_t start, int64_t head, int64_t first, int64_t rows) const {
    const int64_t head_dim = shape.head_dim, width = padded(head_dim), group = shape.group();
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = first + r;
      const T* query = q + (start + row / group) * q_token_stride +
                       (head * group + row % group) * q_head_stride;
      const T* outer = grad + flat(start, head, row) * head_dim;
      for (int64_t d = 0; d < head_dim; d += kLanes) {
        store(s.queries + r * width + d, load_typed<kType>(query + d, head_dim - d));
        store(s.grads + r * width + d, load_typed<kType>(outer + d, head_dim - d));
      }
    }
  }

  // Weights and slopes of one tile of rows, and their share of dq.
  template <typename See>
  void query_tile(const Scratch& s, int64_t start, int64_t head, int64_t first, int64_t r, int rows,
                  See see) const {
    const int64_t head_dim = shape.head_dim, width = padded(head_dim);
    float* weights = s.weights + r * kBlockKeys;
    float* slopes = s.slopes + r * kBlockKeys;
    const int64_t columns = padded(see(rows - 1).end);
    product(rows, s.queries + r * width, width, 1, head_dim, s.keys_transposed, kBlockKeys, columns,
            weights, kBlockKeys, true);
    product(rows, s.grads + r * width, width, 1, head_dim, s.values_transposed, kBlockKeys, columns,
            slopes, kBlockKeys, true);
    for (int i = 0; i < rows; ++i) {
      const int64_t source = flat(start, head, first + r + i);
      const F16 log_sum = set1(log_sums[source]), delta = set1(deltas[source]);
      for (int64_t j = 0; j < columns; j += kLanes) {
        float* weight = weights + i * kBlockKeys + j;
        float* slope = slopes + i * kBlockKeys + j;
        const F16 score = bent_score(load(weight), shape.scale, shape.masking.cap);
        const F16 p = exp(sub(score, log_sum));
        F16 change = mul(p, sub(load(slope), delta));
        if (shape.masking.cap != 0.0f) {
          const F16 bend = div(score, set1(shape.masking.cap));
          change = mul(change, fma(sub(zero(), bend), bend, set1(1.0f)));
        }
        store(weight, p);
        store(slope, mul(change, set1(shape.scale)));
      }
    }
    masked_product(rows, slopes, s.keys, width, s.partial, see);
    for (int i = 0; i < rows; ++i)
      add_rows(grad_q + flat(start, head, first + r + i) * width, s.partial + i * width, width);
  }

  void run(int64_t start, int64_t length, int64_t head, const KeySource<kType>& k,
           const KeySource<kType>& v, const Scratch& s) const {
    const int64_t head_dim = shape.head_dim, width = padded(head_dim), group = shape.group();
    const T* addresses[kBlockKeys];
    for (int64_t block = 0; block * kBlockKeys < length; ++block) {
      const int64_t keys = std::min(kBlockKeys, length - block * kBlockKeys);
      block_rows(v, block, head, keys, addresses);
      pack_transposed<kType>(addresses, keys, head_dim, s.values_transposed);
      block_rows(k, block, head, keys, addresses);
      pack_transposed<kType>(addresses, keys, head_dim, s.keys_transposed);
      pack_rows<kType>(addresses, keys, head_dim, width, s.keys);
      std::fill(s.grad_keys, s.grad_keys + keys * width, 0.0f);
      std::fill(s.grad_values, s.grad_values + keys * width, 0.0f);
      const int64_t window = shape.masking.window;
      // Behind the last query whose window reaches the block's last key nothing sees the block.
      const int64_t beyond = std::min(length, std::min(window, length) + (block + 1) * kBlockKeys);
      const int64_t end = beyond * group;
      for (int64_t first = block * kBlockKeys * group; first < end; first += kChunkRows) {
        const int64_t rows = std::min(kChunkRows, end - first);
        load_rows(s, start, head, first, rows);
        for (int64_t r = 0; r < rows; r += kTileRows)
          query_tile(s, start, head, first, r,
                     static_cast<int>(std::min<int64_t>(kTileRows, rows - r)), [&](int i) {
                       return visible_keys((first + r + i) / group, block, window);
                     });
        const auto first_row = [&](int64_t j) {
          return std::max<int64_t>(0, (block * kBlockKeys + j) * group - first);
        };
        const auto last_row = [&](int64_t j) {
          return window > length ? rows : (block * kBlockKeys + j + window) * group - first;
        };
        transposed_product(s.weights, rows, s.grads, width, keys, s.partial, s.grad_values,
                           first_row, last_row);
        transposed_product(s.slopes, rows, s.queries, width, keys, s.partial, s.grad_keys,
                           first_row, last_row);
      }
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t token = start + block * kBlockKeys + j;
        const int64_t target = (token * shape.kv_heads + head) * head_dim;
        for (int64_t d = 0; d < head_dim; d += kLanes) {
          const int64_t count = head_dim - d;
          store_typed<kType>(grad_k + target + d, load(s.grad_keys + j * width + d), count);
          store_typed<kType>(grad_v + target + d, load(s.grad_values + j * width + d), count);
        }
      }
    }
  }
};

// Sequences, the longest first, so that threads finish together.
std::vector<int64_t> longest_first(const int32_t* starts, int64_t sequences) {
  std::vector<int64_t> order(sequences);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return starts[a + 1] - starts[a] > starts[b + 1] - starts[b];
  });
  return order;
}

}  // namespace
}  // namespace lockstep

using namespace lockstep;

// grad and out: contiguous [tokens, query_heads, head_dim]; q, k and v by strides (token, head, 1);
// the gradients are contiguous. query_starts were checked by the forward. window, cap and sinks as
// there; sink_terms fp32 [tokens, query_heads]: what each row adds to the gradient of its sink.
LOCKSTEP_API int32_t lockstep_attention_backward(
    const void* grad, const void* out, const float* log_sums, const void* q, int64_t q_token_stride,
    int64_t q_head_stride, const void* k, const int64_t* k_strides, const void* v,
    const int64_t* v_strides, int32_t dtype, void* grad_q, void* grad_k, void* grad_v,
    const int32_t* query_starts, int64_t sequences, int64_t tokens, int64_t query_heads,
    int64_t kv_heads, int64_t head_dim, float scale, int64_t window, float cap, const float* sinks,
    float* sink_terms, int32_t threads) {
  return guarded([&] {
    const Shape shape{query_heads, kv_heads, head_dim, scale, {window, cap}};
    const int64_t width = padded(head_dim), rows = tokens * query_heads;
    const std::vector<int64_t> order = longest_first(query_starts, sequences);
    std::vector<float> query_grads(rows * width), deltas(rows);
    const int64_t items = sequences * kv_heads, scratch_size = Scratch::size(head_dim);
    int64_t work = 0;
    for (int64_t s = 0; s < sequences; ++s) {
      const int64_t length = query_starts[s + 1] - query_starts[s];
      work += length * length * query_heads * head_dim;
    }
    const int wide_team = team_size(threads, rows * width);
    const int team = static_cast<int>(
        std::max<int64_t>(1, std::min<int64_t>(team_size(threads, work, 1 << 16), items)));
    const std::unique_ptr<float[]> scratch(new float[team * scratch_size]);
    with_type(dtype, [&](auto type) {
      using T = Element<type()>;
      const T* grads = static_cast<const T*>(grad);
      const T* outputs = static_cast<const T*>(out);
      parallel_for(wide_team, rows, [&](int64_t row) {
        F16 lanes = zero();
        for (int64_t d = 0; d < head_dim; d += kLanes)
          lanes = fma(load_typed<type()>(grads + row * head_dim + d, head_dim - d),
                      load_typed<type()>(outputs + row * head_dim + d, head_dim - d), lanes);
        deltas[row] = sum(lanes);
        if (sinks != nullptr)
          sink_terms[row] = -(exp(sinks[row % query_heads] - log_sums[row]) * deltas[row]);
      });
      const Backward<type()> backward{grads,
                                      static_cast<const T*>(q),
                                      q_token_stride,
                                      q_head_stride,
                                      log_sums,
                                      deltas.data(),
                                      query_grads.data(),
                                      static_cast<T*>(grad_k),
                                      static_cast<T*>(grad_v),
                                      shape};
      const auto source = [&](const void* base, const int64_t* strides, int64_t start) {
        return KeySource<type()>{static_cast<const T*>(base), 0, strides[1], strides[2], nullptr, 1,
                                 start};
      };
      parallel_items(team, items, [&](int64_t item, int thread) {
        const int64_t s = order[item / kv_heads], start = query_starts[s];
        backward.run(start, query_starts[s + 1] - start, item % kv_heads,
                     source(k, k_strides, start), source(v, v_strides, start),
                     Scratch(scratch.get() + thread * scratch_size, head_dim));
      });
      parallel_for(wide_team, rows, [&](int64_t row) {
        for (int64_t d = 0; d < head_dim; d += kLanes)
          store_typed<type()>(static_cast<T*>(grad_q) + row * head_dim + d,
                              load(query_grads.data() + row * width + d), head_dim - d);
      });
    });
  });
}
