// Sums whose order is a tree fixed by the number of items alone.
#pragma once

#include <algorithm>

#include "typed.hpp"

namespace lockstep {

// Columns of a segment: 16 additions per lane.
constexpr int64_t kFoldSegment = 256;

// Joins values in their order of arrival by the binary tree whose left side is the largest power
// of two.
template <typename Value>
class Tree {
 public:
  void push(Value value) {
    for (int64_t done = ++count_; done % 2 == 0; done /= 2) value = stack_[--top_] + value;
    stack_[top_++] = value;
  }
  // Of at least one value.
  Value total() const {
    Value value = stack_[top_ - 1];
    for (int i = top_ - 2; i >= 0; --i) value = stack_[i] + value;
    return value;
  }

 private:
  Value stack_[64];
  int top_ = 0;
  int64_t count_ = 0;
};

// The sum of `width` numbers: segments of 256 fold into 16 lanes by index modulo 16, in order, the
// lanes by the tree of simd.hpp, segments by `Tree`. item(i, count) yields lanes i .. i + 15, those
// at `count` and beyond zero.
template <typename Item>
inline float fold(int64_t width, Item&& item) {
  if (width == 0) return 0.0f;
  Tree<float> segments;
  for (int64_t start = 0; start < width; start += kFoldSegment) {
    const int64_t end = std::min(start + kFoldSegment, width);
    F16 lanes = zero();
    for (int64_t i = start; i < end; i += kLanes) lanes = add(lanes, item(i, end - i));
    segments.push(sum(lanes));
  }
  return segments.total();
}

constexpr int64_t kRowsPerBlock = 8;
constexpr int64_t kColumnsPerBlock = 16 * kLanes;

// Sums over rows: in order inside blocks of 8 rows, the blocks by a binary tree of neighbours.
// accumulate(row, column, count, lanes) adds a row's 16 columns to the lanes; threads own columns.
template <typename Accumulate>
struct ColumnSums {
  int64_t rows, width;
  Accumulate accumulate;

  // out [kColumnsPerBlock] = the sum over rows [first, first + span), `count` columns from `begin`
  // on. span is kRowsPerBlock times a power of two; rows that do not exist count as zero.
  void add_rows(int64_t first, int64_t span, int64_t begin, int64_t count, float* out) const {
    if (span > kRowsPerBlock) {
      add_rows(first, span / 2, begin, count, out);
      if (first + span / 2 >= rows) return;
      float other[kColumnsPerBlock];
      add_rows(first + span / 2, span / 2, begin, count, other);
      for (int64_t i = 0; i < count; i += kLanes)
        store(out + i, add(load(out + i), load(other + i)));
      return;
    }
    std::fill(out, out + kColumnsPerBlock, 0.0f);
    for (int64_t row = first; row < std::min(rows, first + span); ++row)
      for (int64_t i = 0; i < count; i += kLanes)
        store(out + i, accumulate(row, begin + i, count - i, load(out + i)));
  }

  void run(int team, float* out) const {
    int64_t span = kRowsPerBlock;
    while (span < rows) span *= 2;
    const int64_t blocks = (width + kColumnsPerBlock - 1) / kColumnsPerBlock;
    parallel_for(team, blocks, [&](int64_t block) {
      const int64_t begin = block * kColumnsPerBlock;
      const int64_t count = std::min(kColumnsPerBlock, width - begin);
      float total[kColumnsPerBlock];
      add_rows(0, span, begin, count, total);
      std::copy(total, total + count, out + begin);
    });
  }
};

template <typename Accumulate>
inline void column_sums(int team, int64_t rows, int64_t width, float* out, Accumulate accumulate) {
  ColumnSums<Accumulate>{rows, width, accumulate}.run(team, out);
}

}  // namespace lockstep
