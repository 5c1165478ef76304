// Gumbel-max sampling: token = argmax over v of
//   (logits[v] - max(logits)) / temperature + gumbel(seed, position, v).
//
// The noise comes from Philox4x32-10, a counter-based generator: key = seed, counter = (c, position
// low, position high, 0). Vocabulary entry v takes word (v % 64) / 16 of counter
// c = 16 (v / 64) + v % 16, so that sixteen lanes make 64 consecutive entries. The draw of an entry
// is a pure function of (seed, position, v): neither the batch nor the row's place in it enters.
#include <vector>

#include "typed.hpp"

namespace lockstep {
namespace {

constexpr int kWords = 4;
constexpr int64_t kDraws = kWords * kLanes;
// -log(-log1p(-w)) <= 22.9 for every w below; the margin covers the rounding of `log`.
constexpr float kLargestGumbel = 24.0f;

// low[i], high[i] = the halves of a[i] * factor.
void multiply_wide(const uint32_t* a, uint32_t factor, uint32_t* low, uint32_t* high) {
#if defined(__AVX2__)
  const __m256i m = _mm256_set1_epi64x(factor);
  for (int i = 0; i < kLanes; i += 8) {
    const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + i));
    const __m256i even = _mm256_mul_epu32(value, m);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(value, 32), m);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + i),
                        _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + i),
                        _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa));
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t product = static_cast<uint64_t>(a[i]) * factor;
    low[i] = static_cast<uint32_t>(product);
    high[i] = static_cast<uint32_t>(product >> 32);
  }
#endif
}

void philox(uint64_t seed, uint64_t position, uint32_t first, uint32_t out[kWords][kLanes]) {
  uint32_t* a = out[0];
  uint32_t* b = out[1];
  uint32_t* c = out[2];
  uint32_t* d = out[3];
  for (int i = 0; i < kLanes; ++i) {
    a[i] = first + static_cast<uint32_t>(i);
    b[i] = static_cast<uint32_t>(position);
    c[i] = static_cast<uint32_t>(position >> 32);
    d[i] = 0;
  }
  uint32_t key_low = static_cast<uint32_t>(seed), key_high = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    uint32_t a_low[kLanes], a_high[kLanes], c_low[kLanes], c_high[kLanes];
    multiply_wide(a, 0xD2511F53u, a_low, a_high);
    multiply_wide(c, 0xCD9E8D57u, c_low, c_high);
    for (int i = 0; i < kLanes; ++i) {
      a[i] = c_high[i] ^ b[i] ^ key_low;
      b[i] = c_low[i];
      c[i] = a_high[i] ^ d[i] ^ key_high;
      d[i] = a_low[i];
    }
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
}

// Gumbel noise of sixteen 32-bit words: w = (word + 1/2) 2^-32 clamped below 1, E = -log(1 - w),
// noise = -log(E). The entries that win have a small w, where log(1 - w) would lose every digit of
// w; the correction (t - 1 + w) / t restores what rounding t = 1 - w dropped.
F16 gumbel(const uint32_t* words) {
  float uniform[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    // Converted in two exact halves: an unsigned conversion differs between instruction sets.
    const float high = static_cast<float>(static_cast<int32_t>(words[i] >> 16));
    const float low = static_cast<float>(static_cast<int32_t>(words[i] & 0xffffu)) + 0.5f;
    uniform[i] = high * 1.52587890625e-5f + low * 2.3283064365386963e-10f;
  }
  const F16 w = min(load(uniform), set1(0.99999994f));
  const F16 t = sub(set1(1.0f), w);
  const F16 dropped = add(sub(t, set1(1.0f)), w);
  const F16 exponential = sub(div(dropped, t), log(t));
  return sub(zero(), log(exponential));
}

struct Candidate {
  float score;
  int64_t index;
};

// Scores one aligned group of 64 entries; keeps the best, the lowest index among equals.
void score_group(const float* logits, int64_t width, int64_t group, float peak, float temperature,
                 uint64_t seed, uint64_t position, Candidate& best) {
  uint32_t words[kWords][kLanes];
  philox(seed, position, static_cast<uint32_t>(group * kLanes), words);
  const float lowest = -std::numeric_limits<float>::infinity();
  for (int word = 0; word < kWords; ++word) {
    const int64_t start = group * kDraws + word * kLanes;
    if (start >= width) return;
    const F16 values = load_typed<kFloat32>(logits + start, width - start, lowest);
    const F16 scaled = div(sub(values, set1(peak)), set1(temperature));
    float scores[kLanes];
    store(scores, add(scaled, gumbel(words[word])));
    for (int i = 0; i < kLanes && start + i < width; ++i)
      if (scores[i] > best.score || (scores[i] == best.score && start + i < best.index))
        best = {scores[i], start + i};
  }
}

// The logits are taken relative to their peak, so that a tiny temperature cannot overflow.
int64_t sample_row(const float* logits, int64_t width, float peak, float temperature, uint64_t seed,
                   uint64_t position) {
  int64_t greedy = 0;
  while (logits[greedy] != peak) ++greedy;
  if (temperature == 0.0f || peak > std::numeric_limits<float>::max()) return greedy;
  Candidate best{-std::numeric_limits<float>::infinity(), width};
  const int64_t first = greedy / kDraws;
  score_group(logits, width, first, peak, temperature, seed, position, best);
  for (int64_t group = 0; group * kDraws < width; ++group) {
    if (group == first) continue;
    // A group that cannot reach the best score, whatever its noise, is not worth drawing. Strictly
    // below, so that the answer is that of a full scan.
    F16 peaks = set1(-std::numeric_limits<float>::infinity());
    for (int64_t i = group * kDraws; i < std::min(width, (group + 1) * kDraws); i += kLanes)
      peaks = max(load_typed<kFloat32>(logits + i, width - i, logits[i]), peaks);
    if ((max(peaks) - peak) / temperature + kLargestGumbel < best.score) continue;
    score_group(logits, width, group, peak, temperature, seed, position, best);
  }
  return best.index;
}

}  // namespace
}  // namespace lockstep

using namespace lockstep;

// *fault: -1, or row * 3 + reason: 0 a NaN logit, 1 no logit above -inf, 2 a bad temperature.
LOCKSTEP_API int32_t lockstep_sample(
    const float* logits, int64_t rows, int64_t width, const float* temperatures,
    const int64_t* seeds, const int64_t* positions, int64_t* out, int32_t threads, int64_t* fault) {
  return guarded([&] {
    *fault = -1;
    std::vector<int8_t> faults(rows, -1);
    parallel_items(team_size(threads, rows * width), rows, [&](int64_t row, int) {
      const float* values = logits + row * width;
      F16 seen = zero(), peaks = set1(-std::numeric_limits<float>::infinity());
      for (int64_t i = 0; i < width; i += kLanes) {
        const F16 value = load_typed<kFloat32>(values + i, width - i, values[i]);
        seen = where_nan(value, set1(1.0f), seen);
        peaks = max(value, peaks);
      }
      const float temperature = temperatures[row], peak = max(peaks);
      if (max(seen) > 0.0f) faults[row] = 0;
      else if (peak == -std::numeric_limits<float>::infinity()) faults[row] = 1;
      else if (!(temperature >= 0.0f) || temperature > std::numeric_limits<float>::max())
        faults[row] = 2;
      else
        out[row] = sample_row(values, width, peak, temperature, static_cast<uint64_t>(seeds[row]),
                              static_cast<uint64_t>(positions[row]));
    });
    for (int64_t row = 0; row < rows; ++row)
      if (faults[row] >= 0) return void(*fault = row * 3 + faults[row]);
  });
}

// The noise itself, for tests and for other implementations of the contract to compare with.
LOCKSTEP_API int32_t lockstep_gumbel(int64_t seed, int64_t position, int64_t width, float* out) {
  return guarded([&] {
    for (int64_t group = 0; group * kDraws < width; ++group) {
      uint32_t words[kWords][kLanes];
      philox(static_cast<uint64_t>(seed), static_cast<uint64_t>(position),
             static_cast<uint32_t>(group * kLanes), words);
      for (int word = 0; word < kWords; ++word) {
        const int64_t start = group * kDraws + word * kLanes;
        if (start < width) store_typed<kFloat32>(out + start, gumbel(words[word]), width - start);
      }
    }
  });
}
