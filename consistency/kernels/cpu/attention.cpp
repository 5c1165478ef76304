// Causal attention, forward: one kernel for variable-length prefill, chunked prefill and paged
// decode.
//
// Order of reduction, for a query at absolute position p: the key blocks 0 .. p / 64 in order, from
// the first that a sliding window reaches. In a block: each score is one chain of fused
// multiply-adds over d, times the scale, then bent by the soft-cap; the block's
// weights exp(score - m) fold into their sum by index modulo 16, and into the values by one chain
// over the keys; the running sum and output are rescaled by one fused multiply-add. A sink joins the
// sum last, as a block without values. The output is divided by the sum and rounded once. Nothing else (batch, chunk, page size, head grouping,
// threads) enters.
#include <memory>
#include <utility>
#include <vector>

#include "attention_tile.hpp"

namespace lockstep {
namespace {

constexpr int64_t kRowsPerItem = 192;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct Shape {
  int64_t query_heads, kv_heads, head_dim;
  int64_t group() const { return query_heads / kv_heads; }
};

// Query positions [begin, end) of one sequence, counted from its first query.
struct Item {
  int64_t sequence, begin, end, head;
};

struct Scratch {
  float *keys, *values, *queries, *outputs, *partial, *peaks, *sums, *scores;

  static int64_t size(int64_t rows, int64_t head_dim) {
    return kBlockKeys * (head_dim + padded(head_dim)) + rows * (head_dim + padded(head_dim) + 2) +
           kTileRows * (padded(head_dim) + kBlockKeys);
  }
  Scratch(float* p, int64_t rows, int64_t head_dim) {
    const auto take = [&p](int64_t count) { return std::exchange(p, p + count); };
    keys = take(kBlockKeys * head_dim);
    values = take(kBlockKeys * padded(head_dim));
    queries = take(rows * head_dim);
    outputs = take(rows * padded(head_dim));
    peaks = take(rows);
    sums = take(rows);
    partial = take(kTileRows * padded(head_dim));
    scores = take(kTileRows * kBlockKeys);
  }
};

// Turns a row of 64 products into weights exp(score - peak); returns their sum.
float weights_of_scores(float* scores, Visible seen, float scale, float cap, float& peak,
                        float& previous) {
  F16 values[4];
  for (int g = 0; g < 4; ++g) values[g] = bent_score(load(scores + g * kLanes), scale, cap);
  if (seen.begin > 0 || seen.end < kBlockKeys) {
    for (int g = 0; g < 4; ++g) store(scores + g * kLanes, values[g]);
    std::fill(scores, scores + std::min(seen.begin, seen.end), kLowest);
    std::fill(scores + seen.end, scores + kBlockKeys, kLowest);
    for (int g = 0; g < 4; ++g) values[g] = load(scores + g * kLanes);
  }
  const float block_peak = max(max(max(values[0], values[1]), max(values[2], values[3])));
  previous = peak;
  if (block_peak > peak) peak = block_peak;
  // A row whose scores are all -inf so far has no peak; shifting by 0 keeps its weights at 0.
  const F16 shift = set1(peak == kLowest ? 0.0f : peak);
  for (int g = 0; g < 4; ++g) {
    values[g] = exp(sub(values[g], shift));
    store(scores + g * kLanes, values[g]);
  }
  return sum(add(add(add(values[0], values[1]), values[2]), values[3]));
}

// Rows [first, first + rows) of an item against the packed block.
template <typename Position>
void attend_tile(const Scratch& s, int64_t first, int rows, int64_t block, int64_t head_dim,
                 float scale, Masking masking, Position position) {
  const int64_t width = padded(head_dim);
  const auto see = [&](int r) {
    return visible_keys(position(first + r), block, masking.window);
  };
  product(rows, s.queries + first * head_dim, head_dim, 1, head_dim, s.keys, kBlockKeys,
          padded(see(rows - 1).end), s.scores, kBlockKeys, true);
  float previous[kLanes] = {}, shifts[kLanes] = {}, totals[kTileRows];
  for (int r = 0; r < rows; ++r) {
    totals[r] = weights_of_scores(s.scores + r * kBlockKeys, see(r), scale, masking.cap,
                                  s.peaks[first + r], previous[r]);
    shifts[r] = s.peaks[first + r] == kLowest ? 0.0f : s.peaks[first + r];
  }
  float rescale[kLanes];
  store(rescale, exp(sub(load(previous), load(shifts))));
  masked_product(rows, s.scores, s.values, width, s.partial, see);
  for (int r = 0; r < rows; ++r) {
    if (see(r).begin >= see(r).end) continue;
    s.sums[first + r] = __builtin_fmaf(s.sums[first + r], rescale[r], totals[r]);
    float* output = s.outputs + (first + r) * width;
    for (int64_t d = 0; d < width; d += kLanes)
      store(output + d, fma(load(output + d), set1(rescale[r]), load(s.partial + r * width + d)));
  }
}

template <DType kType>
struct Forward {
  const Element<kType>* q;
  int64_t q_token_stride, q_head_stride;
  Element<kType>* out;
  float* log_sums;  // may be null
  const int32_t* starts;
  Shape shape;
  float scale;
  Masking masking;
  const float* sinks;  // per query head, may be null

  // context: keys of the sequence; its queries are the last positions of it.
  void run(const Item& item, int64_t context, const KeySource<kType>& k, const KeySource<kType>& v,
           const Scratch& s) const {
    const int64_t group = shape.group(), head_dim = shape.head_dim, width = padded(head_dim);
    const int64_t first_query = starts[item.sequence];
    const int64_t cached = context - (starts[item.sequence + 1] - first_query);
    const int64_t rows = (item.end - item.begin) * group;
    const auto position = [&](int64_t row) { return cached + item.begin + row / group; };
    const auto query_row = [&](int64_t row) { return first_query + item.begin + row / group; };
    for (int64_t row = 0; row < rows; ++row) {
      const Element<kType>* source = q + query_row(row) * q_token_stride +
                                     (item.head * group + row % group) * q_head_stride;
      for (int64_t d = 0; d < head_dim; d += kLanes)
        store_typed<kFloat32>(s.queries + row * head_dim + d,
                              load_typed<kType>(source + d, head_dim - d), head_dim - d);
      s.peaks[row] = kLowest;
      s.sums[row] = 0.0f;
    }
    std::fill(s.outputs, s.outputs + rows * width, 0.0f);
    const int64_t last = position(rows - 1);
    const Element<kType>* addresses[kBlockKeys];
    const int64_t reach = std::max<int64_t>(0, position(0) - masking.window + 1);
    for (int64_t block = reach / kBlockKeys; block <= last / kBlockKeys; ++block) {
      const int64_t keys = visible_keys(last, block, kNoWindow).end;
      block_rows(k, block, item.head, keys, addresses);
      pack_transposed<kType>(addresses, keys, head_dim, s.keys);
      block_rows(v, block, item.head, keys, addresses);
      pack_rows<kType>(addresses, keys, head_dim, width, s.values);
      int64_t row = std::max<int64_t>(0, block * kBlockKeys - position(0)) * group;
      for (; row < rows; row += kTileRows)
        attend_tile(s, row, static_cast<int>(std::min<int64_t>(kTileRows, rows - row)), block,
                    head_dim, scale, masking, position);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t target = query_row(row) * shape.query_heads + item.head * group + row % group;
      float peak = s.peaks[row], total = s.sums[row], factor = 1.0f;
      if (sinks != nullptr) {
        const float sink = sinks[item.head * group + row % group];
        const float joined = sink > peak ? sink : peak;
        factor = exp(peak - joined);
        total = __builtin_fmaf(total, factor, exp(sink - joined));
        peak = joined;
      }
      const F16 divisor = set1(total), scaling = set1(factor);
      for (int64_t d = 0; d < head_dim; d += kLanes)
        store_typed<kType>(out + target * head_dim + d,
                           div(mul(load(s.outputs + row * width + d), scaling), divisor),
                           head_dim - d);
      if (log_sums != nullptr) log_sums[target] = peak + log(total);
    }
  }
};

// -1, or sequence * 4 + reason: 0 query starts that do not ascend from 0 to the number of queries,
// 1 a context shorter than its queries, 2 longer than its block table, 3 a block id out of range.
int64_t check_sequences(const int32_t* starts, const int32_t* contexts, const int32_t* tables,
                        int64_t table_width, int64_t block_size, int64_t blocks, int64_t sequences,
                        int64_t queries) {
  if (starts[0] != 0) return 0;
  for (int64_t s = 0; s < sequences; ++s) {
    if (starts[s + 1] < starts[s]) return s * 4;
    if (contexts == nullptr) continue;
    if (contexts[s] < starts[s + 1] - starts[s]) return s * 4 + 1;
    const int64_t used = (contexts[s] + block_size - 1) / block_size;
    if (used > table_width) return s * 4 + 2;
    for (int64_t i = 0; i < used; ++i)
      if (tables[s * table_width + i] < 0 || tables[s * table_width + i] >= blocks)
        return s * 4 + 3;
  }
  return starts[sequences] == queries ? -1 : std::max<int64_t>(sequences - 1, 0) * 4;
}

// Later tiles see more keys; they come first, so that threads finish together.
std::vector<Item> items_of(const int32_t* starts, int64_t sequences, const Shape& shape) {
  const int64_t step = std::max<int64_t>(1, kRowsPerItem / shape.group());
  std::vector<Item> items;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t queries = starts[s + 1] - starts[s];
    for (int64_t begin = (queries - 1) / step * step; queries > 0 && begin >= 0; begin -= step)
      for (int64_t head = 0; head < shape.kv_heads; ++head)
        items.push_back({s, begin, std::min(queries, begin + step), head});
  }
  return items;
}

}  // namespace
}  // namespace lockstep

using namespace lockstep;

// q: strides (token, head, 1). k and v: strides (block, token, head, 1) when block_tables is given
// (int32 [sequences, table_width], contexts int32 [sequences]), else (unused, token, head, 1). out
// [queries, query_heads, head_dim] contiguous; log_sums fp32 [queries, query_heads] or null. window:
// kNoWindow without one; cap: 0 without one; sinks fp32 [query_heads] or null.
LOCKSTEP_API int32_t lockstep_attention_forward(
    const void* q, int64_t q_token_stride, int64_t q_head_stride, const void* k,
    const int64_t* k_strides, const void* v, const int64_t* v_strides, int32_t dtype, void* out,
    float* log_sums, const int32_t* query_starts, const int32_t* contexts,
    const int32_t* block_tables, int64_t table_width, int64_t block_size, int64_t blocks,
    int64_t sequences, int64_t queries, int64_t query_heads, int64_t kv_heads, int64_t head_dim,
    float scale, int64_t window, float cap, const float* sinks, int32_t threads, int64_t* fault) {
  return guarded([&] {
    *fault = check_sequences(query_starts, contexts, block_tables, table_width, block_size, blocks,
                             sequences, queries);
    if (*fault >= 0 || queries == 0) return;
    const Shape shape{query_heads, kv_heads, head_dim};
    const std::vector<Item> items = items_of(query_starts, sequences, shape);
    const auto context_of = [&](int64_t s) -> int64_t {
      return contexts == nullptr ? query_starts[s + 1] - query_starts[s] : contexts[s];
    };
    int64_t work = 0, rows = 0;
    for (const Item& item : items) {
      const int64_t mine = (item.end - item.begin) * shape.group();
      rows = std::max(rows, mine);
      work += mine * context_of(item.sequence) * head_dim;
    }
    const int team = std::min<int>(team_size(threads, work, 1 << 16), items.size());
    const int64_t scratch_size = Scratch::size(rows, head_dim);
    const std::unique_ptr<float[]> scratch(new float[team * scratch_size]);
    with_type(dtype, [&](auto type) {
      using T = Element<type()>;
      const Forward<type()> forward{static_cast<const T*>(q), q_token_stride, q_head_stride,
                                    static_cast<T*>(out),     log_sums,       query_starts,
                                    shape,                    scale,
                                    Masking{window, cap},     sinks};
      const auto source = [&](const void* base, const int64_t* strides, int64_t s) {
        return KeySource<type()>{static_cast<const T*>(base), strides[0], strides[1], strides[2],
                                 block_tables == nullptr ? nullptr : block_tables + s * table_width,
                                 block_size, query_starts[s]};
      };
      parallel_items(team, items.size(), [&](int64_t i, int thread) {
        const int64_t s = items[i].sequence;
        forward.run(items[i], context_of(s), source(k, k_strides, s), source(v, v_strides, s),
                    Scratch(scratch.get() + thread * scratch_size, rows, head_dim));
      });
    });
  });
}
