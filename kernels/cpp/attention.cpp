// Paged attention without copies. An item is (row, up to kQueriesMax query vectors, kv head, split of kSplit positions).
//
// Exact: positions are grouped by their absolute index (groups of W, splits of kSplit), every query vector has its own
// chain of sums in ascending position, and splits are merged in order. So a query's bits depend on its own context
// only: not on chunking, batch-mates, query tiling or threads. What a query may not see is not read into it, or, of its
// own sequence, has the weight zero, which changes no bit of a sum of numbers.
//
// Where the processor multiplies pairs of bfloat16, the weights of a softmax are rounded to bfloat16 before they are
// summed and mixed, as matrix units do.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace kaiten {
namespace {

constexpr int kSplit = 512;       // positions per split; part of the result's definition
constexpr int kQueriesMax = 24;   // query vectors (tokens x heads of the group) that share a pass over K and V
constexpr int kStretch = 64;       // positions mixed between two rounds of fetching ahead
constexpr int kRunsPerThread = 8; // items follow each other in runs: one fetches ahead for the next

struct Item {
  int row, first, count, kv_head, split, splits;  // query tokens [first, first + count) of the row's step
  int64_t scratch;                                // offset of its partial sums, -1: writes the output itself
};

// One step of a score: a float32 product, or a pair of bfloat16 products where the CPU has them.
template <bool kPairs>
inline VF mac(VU q, VF k, VF sum) {
#if KAITEN_BF16_DOT
  if constexpr (kPairs) return (VF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)q, (__m512bh)k);
#endif
  return fma((VF)q, k, sum);
}

template <bool kPairs, int R>
void score_rows(const uint32_t* q, int steps, const VF* keys, float scale, float* scores, int stride) {
  VF even[R] = {}, odd[R] = {};
  for (int i = 0; i < steps; i += 2)
    KAITEN_UNROLL for (int r = 0; r < R; ++r) {
      even[r] = mac<kPairs>(splat(q[r * steps + i]), keys[i], even[r]);
      odd[r] = mac<kPairs>(splat(q[r * steps + i + 1]), keys[i + 1], odd[r]);
    }
  KAITEN_UNROLL for (int r = 0; r < R; ++r) store(scores + r * stride, (even[r] + odd[r]) * scale);
}

template <class T, int R, int C, bool kTail>
void mix_rows(const T* const* values, int column, int begin, int end, const float* p, int stride, float* sums,
              int width, int tail) {
  VF acc[R][C];
  KAITEN_UNROLL for (int r = 0; r < R; ++r)
    KAITEN_UNROLL for (int c = 0; c < C; ++c) acc[r][c] = load(sums + r * width + c * W);
  for (int j = begin; j < end; ++j) {
    const T* from = values[j] + column;
    VF v[C];
    KAITEN_UNROLL for (int c = 0; c < C; ++c)
      v[c] = kTail && c == C - 1 ? load(from + c * W, tail) : load(from + c * W);
    KAITEN_UNROLL for (int r = 0; r < R; ++r) {
      VF weight = splat(p[r * stride + j]);
      KAITEN_UNROLL for (int c = 0; c < C; ++c) acc[r][c] = fma(weight, v[c], acc[r][c]);
    }
  }
  KAITEN_UNROLL for (int r = 0; r < R; ++r)
    KAITEN_UNROLL for (int c = 0; c < C; ++c) store(sums + r * width + c * W, acc[r][c]);
}

template <class T, int R, bool kTail>
void mix_columns(int columns, const T* const* values, int column, int begin, int end, const float* p, int stride,
                 float* sums, int width, int tail) {
  switch (columns) {
    case 1: return mix_rows<T, R, 1, kTail>(values, column, begin, end, p, stride, sums, width, tail);
    case 2: return mix_rows<T, R, 2, kTail>(values, column, begin, end, p, stride, sums, width, tail);
    case 3: return mix_rows<T, R, 3, kTail>(values, column, begin, end, p, stride, sums, width, tail);
    default: return mix_rows<T, R, 4, kTail>(values, column, begin, end, p, stride, sums, width, tail);
  }
}

#if KAITEN_BF16_DOT
constexpr int kPairColumns = 2 * W;  // dimensions that one load of values holds

// As mix_rows, two positions at a time; C columns of kPairColumns dimensions. Interleaving the two positions' values
// leaves the dimensions of a column in another order, see settle().
template <int R, int C, bool kTail>
void mix_pairs(const bf16* const* values, int column, int begin, int end, const bf16* p, int stride, float* sums,
               int width, int tail) {
  VF acc[R][2 * C];
  KAITEN_UNROLL for (int r = 0; r < R; ++r)
    KAITEN_UNROLL for (int c = 0; c < 2 * C; ++c) acc[r][c] = load(sums + r * width + c * W);
  const __mmask32 last = tail >= kPairColumns ? ~0u : (1u << tail) - 1;
  for (int j = begin; j < end; j += 2) {
    const bf16 *first = values[j] + column, *second = values[j + 1] + column;
    __m512i v[2 * C];
    KAITEN_UNROLL for (int c = 0; c < C; ++c) {
      const __mmask32 mask = kTail && c == C - 1 ? last : ~0u;
      const __m512i a = _mm512_maskz_loadu_epi16(mask, first + c * kPairColumns);
      const __m512i b = _mm512_maskz_loadu_epi16(mask, second + c * kPairColumns);
      v[2 * c] = _mm512_unpacklo_epi16(a, b), v[2 * c + 1] = _mm512_unpackhi_epi16(a, b);
    }
    KAITEN_UNROLL for (int r = 0; r < R; ++r) {
      uint32_t pair;
      std::memcpy(&pair, p + r * stride + j, sizeof pair);
      KAITEN_UNROLL for (int c = 0; c < 2 * C; ++c) acc[r][c] = mac<true>(splat(pair), (VF)v[c], acc[r][c]);
    }
  }
  KAITEN_UNROLL for (int r = 0; r < R; ++r)
    KAITEN_UNROLL for (int c = 0; c < 2 * C; ++c) store(sums + r * width + c * W, acc[r][c]);
}

// Sums of mix_pairs in the order of dimensions.
void settle(float* sums, int width) {
  for (int d = 0; d < width; d += kPairColumns) {
    const VF low = load(sums + d), high = load(sums + d + W);
    store(sums + d, __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
    store(sums + d + W,
          __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
  }
}
#endif

// Where an item's keys and values lie, one pointer per position.
template <class T>
struct Places {
  std::vector<const T*> keys, values;
  int positions = 0;
};

// One thread's work space, grown once and kept. `next` are the places of the item after this one.
template <class T>
struct Space {
  Places<T> here, next;
  std::vector<uint32_t> q;
  std::vector<float> scores, sums, top, total;
  std::vector<bf16> weights;  // of the softmax; without pairs they take the place of the scores
  alignas(64) VF packed[256 + W];
  alignas(64) T zeros[256 + 64] = {};

  void fit(int queries, int steps, int width) {
    if (q.size() < size_t(queries) * steps) q.resize(size_t(queries) * steps);
    if (scores.size() < size_t(queries) * kSplit) scores.resize(size_t(queries) * kSplit);
    if (weights.size() < size_t(queries) * kSplit) weights.resize(size_t(queries) * kSplit);
    if (sums.size() < size_t(queries) * width) sums.resize(size_t(queries) * width);
    if (top.size() < size_t(queries)) top.resize(queries), total.resize(queries);
  }
};

template <class T>
class Pass {
 public:
  static constexpr bool kPairs = KAITEN_BF16_DOT && sizeof(T) == 2;
  static constexpr int kPerStep = kPairs ? 2 : 1;

  explicit Pass(const Attention& a)
      : a_(a),
        group_(a.heads / a.kv_heads),
        // A whole number of transposed tiles, and even for the two chains of a score.
        steps_((a.head_dim + W * kPerStep - 1) / (W * kPerStep) * W),
        // Whole vectors, or with pairs whole pairs of them.
        width_((a.head_dim + W * kPerStep - 1) / (W * kPerStep) * (W * kPerStep)) {
    plan();
  }

  void run() {
    partials_.resize(scratch_);
    for_each_run(items_.size(), kRunsPerThread, work_ > 1 << 15, [this](int64_t begin, int64_t end) {
      thread_local Space<T> space;
      locate(items_[begin], space, space.next);
      fetch(space.next.keys, 0, space.next.positions);
      for (int64_t i = begin; i < end; ++i) {
        std::swap(space.here, space.next);
        if (i + 1 < end)
          locate(items_[i + 1], space, space.next);
        else
          space.next.positions = 0;
        attend(items_[i], space);
      }
    });
    if (scratch_ > 0)
      for_each_item(items_.size(), true, [this](int64_t i) {
        if (items_[i].scratch >= 0 && items_[i].split == 0) merge(items_[i]);
      });
  }

 private:
  int partial_size(int queries) const { return queries * (width_ + 2); }

  void plan() {
    const int tokens_max = std::max(1, kQueriesMax / group_);
    for (int row = 0; row < a_.rows; ++row) {
      const int count = a_.query_starts[row + 1] - a_.query_starts[row];
      for (int first = 0; first < count; first += tokens_max) {
        const int taken = std::min(tokens_max, count - first);
        const int seen = a_.contexts[row] - count + first + taken;
        const int splits = (seen + kSplit - 1) / kSplit;
        work_ += int64_t(taken) * seen * a_.kv_heads;
        for (int kv_head = 0; kv_head < a_.kv_heads; ++kv_head) add(row, first, taken, kv_head, splits);
      }
    }
  }

  void add(int row, int first, int count, int kv_head, int splits) {
    for (int split = 0; split < splits; ++split) {
      items_.push_back({row, first, count, kv_head, split, splits, splits > 1 ? scratch_ : -1});
      if (splits > 1) scratch_ += partial_size(count * group_);
    }
  }

  // How many positions of the item's split the item's query token i may see (can be negative).
  int seen(const Item& item, int i) const {
    const int count = a_.query_starts[item.row + 1] - a_.query_starts[item.row];
    const int position = a_.contexts[item.row] - count + item.first + i;
    return std::min(kSplit, position + 1 - item.split * kSplit);
  }

  void attend(const Item& item, Space<T>& space) {
    const int queries = item.count * group_, positions = space.here.positions;
    space.fit(queries, steps_, width_);
    load_queries(item, space);
    score(queries, positions, space);
    for (int r = 0; r < queries; ++r) soften(r, seen(item, r / group_), space);
    std::fill_n(space.sums.data(), size_t(queries) * width_, 0.0f);
    mix(item, queries, space);
    if (item.scratch < 0)
      for (int r = 0; r < queries; ++r)
        write(item, r, space.sums.data() + r * width_, space.total[r]);
    else
      keep(item, queries, space);
  }

  void locate(const Item& item, const Space<T>& space, Places<T>& places) const {
    places.keys.resize(kSplit), places.values.resize(kSplit);
    const int positions = places.positions = seen(item, item.count - 1);
    const int32_t* table = a_.tables + item.row * a_.table_stride;
    const int64_t tile = int64_t(a_.block_size) * a_.head_dim;
    const T* keys = static_cast<const T*>(a_.k_pages);
    const T* values = static_cast<const T*>(a_.v_pages);
    int position = item.split * kSplit;
    int block = position / a_.block_size, offset = position % a_.block_size;
    for (int j = 0; j < positions;) {
      int64_t at = (int64_t(table[block]) * a_.kv_heads + item.kv_head) * tile + int64_t(offset) * a_.head_dim;
      for (; offset < a_.block_size && j < positions; ++offset, ++j, at += a_.head_dim)
        places.keys[j] = keys + at, places.values[j] = values + at;
      ++block, offset = 0;
    }
    for (int j = positions; j % W; ++j) places.keys[j] = places.values[j] = space.zeros;
  }

  void load_queries(const Item& item, Space<T>& space) const {
    const int token = a_.query_starts[item.row] + item.first;
    for (int r = 0; r < item.count * group_; ++r) {
      const T* from = static_cast<const T*>(a_.q) + (token + r / group_) * a_.q_stride +
                      (item.kv_head * group_ + r % group_) * a_.head_dim;
      uint32_t* to = space.q.data() + r * steps_;
      std::memset(to, 0, steps_ * sizeof(uint32_t));
      if (kPairs || sizeof(T) == 4)
        std::memcpy(to, from, a_.head_dim * sizeof(T));
      else
        for (int d = 0; d < a_.head_dim; ++d) to[d] = uint32_t(from[d]) << 16;
    }
  }

  void score(int queries, int positions, Space<T>& space) const {
    for (int j = 0; j < positions; j += W) {
      fetch(space.here.values, j, std::min(positions, j + W));
      pack(space.here.keys.data() + j, space.packed);
      for (int r = 0; r < queries;) {
        const uint32_t* q = space.q.data() + r * steps_;
        float* scores = space.scores.data() + r * kSplit + j;
        const int left = queries - r;
        if (left >= 6) {
          score_rows<kPairs, 6>(q, steps_, space.packed, a_.scale, scores, kSplit), r += 6;
        } else if (left >= 3) {
          score_rows<kPairs, 3>(q, steps_, space.packed, a_.scale, scores, kSplit), r += 3;
        } else {
          score_rows<kPairs, 1>(q, steps_, space.packed, a_.scale, scores, kSplit), r += 1;
        }
      }
    }
  }

  // The blocks lie anywhere in the pool, so the processor cannot guess them, and a load that waits for memory costs
  // more than its share of the sums. So each phase asks for what the next one reads, in small portions: scoring for
  // this item's values, mixing for the next item's keys.
  void fetch(const std::vector<const T*>& places, int begin, int end) const {
    const int bytes = a_.head_dim * sizeof(T);
    for (int j = begin; j < end; ++j)
      for (int b = 0; b < bytes; b += 64) __builtin_prefetch(reinterpret_cast<const char*>(places[j]) + b, 0, 2);
  }

  // keys of W positions -> packed[step] with a lane per position
  void pack(const T* const* keys, VF* packed) const {
    constexpr int kLanes = W * kPerStep;
    for (int d = 0; d < a_.head_dim; d += kLanes) {
      VF* rows = packed + d / kPerStep;
      const int left = a_.head_dim - d;
      for (int j = 0; j < W; ++j) {
        if constexpr (kPairs) {
          if (left >= kLanes) {
            std::memcpy(&rows[j], keys[j] + d, sizeof(VF));
          } else {
            rows[j] = VF{};
            std::memcpy(&rows[j], keys[j] + d, left * sizeof(T));
          }
        } else {
          rows[j] = load(keys[j] + d, left);
        }
      }
      transpose(rows);
    }
  }

  // scores of one query vector -> exp(score - top) over the positions it sees; top and the sum are kept
  void soften(int r, int count, Space<T>& space) const {
    float* scores = space.scores.data() + r * kSplit;
    space.top[r] = -kInf, space.total[r] = 0.0f;
    if constexpr (kPairs) return soften_pairs(r, count, space);
    if (count <= 0) return;
    VF top = splat(-kInf);
    for (int j = 0; j < count; j += W) {
      VF s = keep_first(load(scores + j), count - j, -kInf);
      store(scores + j, s);
      top = vmax(top, s);
    }
    space.top[r] = max_lanes(top);
    VF sum = {};
    for (int j = 0; j < count; j += W) {
      VF p = vexp(load(scores + j) - space.top[r]);
      store(scores + j, p);
      sum = sum + p;
    }
    space.total[r] = sum_lanes(sum);
  }

  // The same into weights, which are zero from the last position that the query sees to the last of the item.
  void soften_pairs(int r, int count, Space<T>& space) const {
#if KAITEN_BF16_DOT
    const float* scores = space.scores.data() + r * kSplit;
    bf16* weights = space.weights.data() + r * kSplit;
    VF top = splat(-kInf), sum = {};
    for (int j = 0; j < count; j += W) top = vmax(top, keep_first(load(scores + j), count - j, -kInf));
    if (count > 0) space.top[r] = max_lanes(top);
    for (int j = 0; j < space.here.positions; j += W) {
      VH p = {};
      if (j < count) {
        p = narrow(keep_first(vexp_coarse(load(scores + j) - space.top[r]), count - j, 0.0f));
        sum = sum + widen(p);
      }
      std::memcpy(weights + j, &p, sizeof p);
    }
    space.total[r] = sum_lanes(sum);
#else
    (void)r, (void)count, (void)space;
#endif
  }

  void mix(const Item& item, int queries, Space<T>& space) const {
    int fetched = std::min(space.next.positions, kStretch);
    fetch(space.next.keys, 0, fetched);
    for (int r = 0; r < queries;) {
      const int left = queries - r;
      const int rows = left >= 6 ? 6 : left >= 3 ? 3 : 1;
      // What the earliest of these queries sees, all see; the rest follows query by query, in the same order.
      const int shared = kPairs ? space.here.positions : std::max(0, seen(item, r / group_));
      int mixed = 0;
      while (fetched < space.next.positions && mixed + kStretch < shared) {
        const int end = std::min(space.next.positions, fetched + kStretch);
        fetch(space.next.keys, fetched, end);
        fetched = end;
        mix_block(rows, r, mixed, mixed + kStretch, space);
        mixed += kStretch;
      }
      mix_block(rows, r, mixed, shared, space);
      for (int i = r; i < r + rows; ++i) mix_block(1, i, shared, seen(item, i / group_), space);
      r += rows;
    }
#if KAITEN_BF16_DOT
    if constexpr (kPairs) settle(space.sums.data(), queries * width_);
#endif
  }

  void mix_block(int rows, int r, int begin, int end, Space<T>& space) const {
    if (begin >= end) return;
#if KAITEN_BF16_DOT
    if constexpr (kPairs) return mix_block_pairs(rows, r, begin, end, space);
#endif
    for (int c = 0; c < width_; c += 4 * W) {
      const int columns = std::min(4, (width_ - c) / W);
      const int tail = a_.head_dim - c - (columns - 1) * W;
      const float* p = space.scores.data() + r * kSplit;
      float* sums = space.sums.data() + r * width_ + c;
      if (tail < W)
        pick<true>(rows, columns, space.here.values.data(), c, begin, end, p, sums, tail);
      else
        pick<false>(rows, columns, space.here.values.data(), c, begin, end, p, sums, tail);
    }
  }

#if KAITEN_BF16_DOT
  void mix_block_pairs(int rows, int r, int begin, int end, Space<T>& space) const {
    for (int c = 0; c < width_; c += 2 * kPairColumns) {
      const int columns = std::min(2, (width_ - c) / kPairColumns);
      const int tail = a_.head_dim - c - (columns - 1) * kPairColumns;
      const auto mixer = tail < kPairColumns ? mixer_for<true>(rows, columns) : mixer_for<false>(rows, columns);
      mixer(space.here.values.data(), c, begin, end, space.weights.data() + r * kSplit, kSplit,
            space.sums.data() + r * width_ + c, width_, tail);
    }
  }

  template <bool kTail>
  static auto mixer_for(int rows, int columns) {
    switch (rows) {
      case 6: return columns == 1 ? mix_pairs<6, 1, kTail> : mix_pairs<6, 2, kTail>;
      case 3: return columns == 1 ? mix_pairs<3, 1, kTail> : mix_pairs<3, 2, kTail>;
      default: return columns == 1 ? mix_pairs<1, 1, kTail> : mix_pairs<1, 2, kTail>;
    }
  }
#endif

  template <bool kTail>
  void pick(int rows, int columns, const T* const* values, int column, int begin, int end, const float* p,
            float* sums, int tail) const {
    switch (rows) {
      case 6: return mix_columns<T, 6, kTail>(columns, values, column, begin, end, p, kSplit, sums, width_, tail);
      case 3: return mix_columns<T, 3, kTail>(columns, values, column, begin, end, p, kSplit, sums, width_, tail);
      default: return mix_columns<T, 1, kTail>(columns, values, column, begin, end, p, kSplit, sums, width_, tail);
    }
  }

  void write(const Item& item, int r, const float* sums, float total) const {
    const int token = a_.query_starts[item.row] + item.first + r / group_;
    T* out = static_cast<T*>(a_.out) +
             (int64_t(token) * a_.heads + item.kv_head * group_ + r % group_) * a_.head_dim;
    for (int d = 0; d < a_.head_dim; d += W) store(out + d, load(sums + d) / total, a_.head_dim - d);
  }

  void keep(const Item& item, int queries, const Space<T>& space) {
    float* to = partials_.data() + item.scratch;
    std::copy_n(space.sums.data(), size_t(queries) * width_, to);
    std::copy_n(space.top.data(), queries, to + queries * width_);
    std::copy_n(space.total.data(), queries, to + queries * (width_ + 1));
  }

  // The splits of one query tile follow each other in scratch; each is scaled to the common top and added in order.
  void merge(const Item& item) const {
    const int queries = item.count * group_, size = partial_size(queries);
    std::vector<float> sums(width_);
    for (int r = 0; r < queries; ++r) {
      const float* part = partials_.data() + item.scratch;
      float top = -kInf, total = 0.0f;
      for (int s = 0; s < item.splits; ++s) top = std::max(top, part[s * size + queries * width_ + r]);
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int s = 0; s < item.splits; ++s) {
        const float* at = part + s * size;
        const float own = at[queries * width_ + r];
        if (own == -kInf && at[queries * (width_ + 1) + r] == 0.0f) continue;  // sees nothing of this split
        const VF weight = vexp(splat(own) - top);
        total += weight[0] * at[queries * (width_ + 1) + r];
        for (int d = 0; d < width_; d += W)
          store(&sums[d], load(&sums[d]) + weight * load(at + r * width_ + d));
      }
      write(item, r, sums.data(), total);
    }
  }

  const Attention& a_;
  const int group_, steps_, width_;
  std::vector<Item> items_;
  std::vector<float> partials_;
  int64_t scratch_ = 0, work_ = 0;
};

}  // namespace

void paged_attention(const Attention& a) {
  if (a.is_bf16)
    Pass<bf16>(a).run();
  else
    Pass<float>(a).run();
}

}  // namespace kaiten
