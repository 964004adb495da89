// Sampling, one row per item: greedy, or the filters' bound and then the argmax of tempered logit + Gumbel noise.
#include <algorithm>
#include <functional>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace kaiten {
namespace {

constexpr int kBlock = 4 * W;        // tokens whose noise one vector of Philox counters makes
constexpr int kBuckets = 1024;       // of the mass histogram, kBucketsPerNat to a factor e
constexpr float kBucketsPerNat = 32.0f;

struct Stream {
  uint64_t seed, choice, position;
};

// Philox4x32-10 of counters quad, quad + 1, ... -> bits of the 4 * W tokens from 4 * quad on, in token order.
inline void philox(const Stream& s, uint32_t quad, VU* bits) {
  VU a = splat(quad) + (VU)lane_ids(), b = splat(uint32_t(s.position)), c = splat(uint32_t(s.choice)), d = {};
  uint32_t key0 = uint32_t(s.seed), key1 = uint32_t(s.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Halves first = multiply_wide(a, 0xD2511F53u), second = multiply_wide(c, 0xCD9E8D57u);
    a = second.high ^ b ^ key0;
    b = second.low;
    c = first.high ^ d ^ key1;
    d = first.low;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  const VU ac_low = zip_low(a, c), ac_high = zip_high(a, c), bd_low = zip_low(b, d), bd_high = zip_high(b, d);
  bits[0] = zip_low(ac_low, bd_low), bits[1] = zip_high(ac_low, bd_low);
  bits[2] = zip_low(ac_high, bd_high), bits[3] = zip_high(ac_high, bd_high);
}

inline VF gumbel(VU bits) {
  VF u = __builtin_convertvector(bits, VF) * 0x1p-32f + 0x1p-33f;
  u = u < 1.0f - 0x1p-24f ? u : splat(1.0f - 0x1p-24f);
  // log1p(-u) through log(1 - u) and what the subtraction rounded away
  const VF w = 1.0f - u;
  const VF divisor = w == 1.0f ? splat(1.0f) : w - 1.0f;
  const VF log1p = w == 1.0f ? -u : vlog(w) * (-u / divisor);
  return -vlog(-log1p);
}

template <class T>
struct Row {
  const T* logits;
  int64_t vocab;
};

// The largest value, or NaN if there is one.
template <class T>
float row_top(const Row<T>& row) {
  VF tops[4] = {splat(-kInf), splat(-kInf), splat(-kInf), splat(-kInf)};
  VI is_nan = {};
  int64_t i = 0;
  for (; i + kBlock <= row.vocab; i += kBlock)
    for (int part = 0; part < 4; ++part) {
      const VF v = load(row.logits + i + part * W);
      is_nan |= v != v;
      tops[part] = vmax(v, tops[part]);
    }
  for (; i < row.vocab; i += W) {
    const int left = int(std::min<int64_t>(row.vocab - i, W));
    const VF v = keep_first(load(row.logits + i, left), left, -kInf);
    is_nan |= v != v;
    tops[0] = vmax(v, tops[0]);
  }
  if (any(is_nan)) return std::numeric_limits<float>::quiet_NaN();
  return max_lanes(vmax(vmax(tops[0], tops[1]), vmax(tops[2], tops[3])));
}

struct Space {
  std::vector<float> tempered, block_tops, picked;
};

// tempered[i] = logits[i] / temperature, padded with -inf to whole blocks; block_tops[b] = the largest of a block
template <class T>
void temper(const Row<T>& row, float temperature, Space& space) {
  const int64_t blocks = (row.vocab + kBlock - 1) / kBlock;
  space.tempered.resize(blocks * kBlock);
  space.block_tops.resize(blocks);
  for (int64_t b = 0; b < blocks; ++b) {
    VF top = splat(-kInf);
    for (int64_t i = b * kBlock; i < (b + 1) * kBlock; i += W) {
      const int left = int(std::clamp<int64_t>(row.vocab - i, 0, W));
      VF v = left == W ? load(row.logits + i) : left ? load(row.logits + i, left) : VF{};
      v = keep_first(v / temperature, left, -kInf);
      store(&space.tempered[i], v);
      top = vmax(v, top);
    }
    space.block_tops[b] = max_lanes(top);
  }
}

// All tempered values >= bound, in token order.
void pick_from(float bound, Space& space) {
  space.picked.clear();
  for (size_t b = 0; b < space.block_tops.size(); ++b)
    if (space.block_tops[b] >= bound)
      for (size_t i = b * kBlock; i < (b + 1) * kBlock; ++i)
        if (space.tempered[i] >= bound) space.picked.push_back(space.tempered[i]);
}

// The k-th largest value. The k-th largest block top is a lower bound of it, so few values need to be ranked.
float bound_of_top_k(int64_t k, int64_t vocab, Space& space) {
  if (k <= 0 || k >= vocab) return -kInf;
  float floor = -kInf;
  if (k <= static_cast<int64_t>(space.block_tops.size())) {
    space.picked = space.block_tops;
    std::nth_element(space.picked.begin(), space.picked.begin() + (k - 1), space.picked.end(), std::greater<>());
    floor = space.picked[k - 1];
  }
  pick_from(floor, space);
  if (static_cast<int64_t>(space.picked.size()) < k) return -kInf;
  std::nth_element(space.picked.begin(), space.picked.begin() + (k - 1), space.picked.end(), std::greater<>());
  return space.picked[k - 1];
}

inline int bucket_of(float below_top) { return int(std::min(below_top * kBucketsPerNat, float(kBuckets - 1))); }

// The smallest kept value such that the mass strictly above it is < top_p of the mass of values >= bound.
float bound_of_top_p(float top_p, float top, float bound, Space& space) {
  if (!(top_p < 1.0f)) return bound;
  std::vector<double> mass(kBuckets, 0.0);
  for (size_t i = 0; i < space.tempered.size(); i += W) {
    const VF v = load(&space.tempered[i]);
    const VF e = vexp(v - top);
    for (int l = 0; l < W; ++l)
      if (v[l] >= bound && v[l] > -kInf) mass[bucket_of(top - v[l])] += e[l];
  }
  double whole = 0.0, above = 0.0;
  for (double m : mass) whole += m;
  const double wanted = double(top_p) * whole;
  int bucket = 0;
  while (bucket < kBuckets - 1 && above + mass[bucket] < wanted) above += mass[bucket++];
  space.picked.clear();
  for (float v : space.tempered)
    if (v >= bound && v > -kInf && bucket_of(top - v) == bucket) space.picked.push_back(v);
  std::sort(space.picked.begin(), space.picked.end(), std::greater<>());
  float kept = top;
  for (float v : space.picked) {
    if (!(above < wanted)) break;
    kept = v;
    above += vexp(splat(v - top))[0];
  }
  return kept;
}

template <class T>
int64_t first_equal(const Row<T>& row, float value) {
  const VF wanted = splat(value);
  int64_t i = 0;
  for (; i + kBlock <= row.vocab; i += kBlock) {
    VI is_equal = {};
    for (int part = 0; part < 4; ++part) is_equal |= load(row.logits + i + part * W) == wanted;
    if (any(is_equal)) break;
  }
  for (; i < row.vocab; ++i)
    if (load(row.logits + i, 1)[0] == value) return i;
  return 0;
}

int64_t draw(const Stream& stream, float bound, const Space& space) {
  VF best = splat(-kInf);
  VI ids = {};
  for (size_t b = 0; b < space.block_tops.size(); ++b) {
    if (!(space.block_tops[b] >= bound)) continue;
    VU bits[4];
    philox(stream, uint32_t(b * W), bits);
    for (int part = 0; part < 4; ++part) {
      const size_t i = b * kBlock + part * W;
      const VF t = load(&space.tempered[i]);
      const VF noisy = t >= bound ? t + gumbel(bits[part]) : splat(-kInf);
      const VI is_better = noisy > best;
      best = is_better ? noisy : best;
      ids = is_better ? lane_ids() + int(i) : ids;
    }
  }
  int64_t id = ids[0];
  float top = best[0];
  for (int l = 1; l < W; ++l)
    if (best[l] > top || (best[l] == top && ids[l] < id)) top = best[l], id = ids[l];
  return id;
}

template <class T>
void sample_row(const Sample& a, int64_t r) {
  thread_local Space space;
  const Row<T> row{static_cast<const T*>(a.logits) + r * a.vocab, a.vocab};
  float top = row_top(row);
  a.ok[r] = std::isfinite(top) && a.temperature[r] >= 0.0f;
  a.token_ids[r] = 0;
  if (!a.ok[r]) return;
  if (!(a.temperature[r] > 0.0f)) {
    a.token_ids[r] = first_equal(row, top);
    return;
  }
  temper(row, a.temperature[r], space);
  top = top / a.temperature[r];
  float bound = bound_of_top_k(a.top_k[r], a.vocab, space);
  bound = bound_of_top_p(a.top_p[r], top, bound, space);
  if (a.min_p[r] > 0.0f) bound = std::max(bound, top + std::log(a.min_p[r]));
  a.token_ids[r] = draw({uint64_t(a.seed[r]), uint64_t(a.choice[r]), uint64_t(a.position[r])}, bound, space);
}

}  // namespace

void sample(const Sample& a) {
  for_each_item(a.rows, a.rows * a.vocab > 1 << 15,
                [&](int64_t r) { a.is_bf16 ? sample_row<bf16>(a, r) : sample_row<float>(a, r); });
}

void mask_logits(const Mask& a) {
  for_each_item(a.count, a.count * a.vocab > 1 << 15, [&](int64_t g) {
    float* logits = a.logits + a.rows[g] * a.vocab;
    const uint32_t* mask = a.masks + g * a.words;
    for (int64_t w = 0; w < a.words; ++w) {
      const int64_t first = w * 32, count = std::min<int64_t>(32, a.vocab - first);
      if (mask[w] == ~0u) continue;
      if (mask[w] == 0) {
        std::fill_n(logits + first, count, -kInf);
        continue;
      }
      for (int64_t b = 0; b < count; ++b)
        logits[first + b] = mask[w] >> b & 1 ? logits[first + b] : -kInf;
    }
  });
}

void noise_bits(int64_t seed, int64_t choice, int64_t position, int64_t vocab, int64_t* out) {
  VU bits[4];
  for (int64_t i = 0; i < vocab; ++i) {
    if (i % kBlock == 0) philox({uint64_t(seed), uint64_t(choice), uint64_t(position)}, uint32_t(i / 4), bits);
    out[i] = bits[i % kBlock / W][i % W];
  }
}

}  // namespace kaiten
