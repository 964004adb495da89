// Paged attention without copies. An item is (row, some of its query tokens, kv head, one or all splits of kSplit
// positions); its keys and values are laid out once for its query vectors, which pass over them in tiles, as in
// linear.cpp: sums in registers, a number of the left side beside vectors of the right side.
//
// Exact: positions are grouped by their absolute index (steps of one or two, splits of kSplit), every query vector has
// its own chain of sums in ascending position, and splits are added in order. So a query's bits depend on its own
// context only: not on chunking, batch-mates, tiling or threads. What a query may not see, ahead of it or behind its
// window, is not read into it, or, of its own sequence, has the weight zero, which changes no bit of a sum of numbers.
//
// Where the processor has AMX, whole tiles of pairs are multiplied: then an output's chain is one of sums of 32 inputs or
// positions, at multiples of 32.
//
// Where the processor multiplies pairs of bfloat16, the weights of a softmax are rounded to bfloat16 before they are
// summed and mixed, as matrix units do.
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "attention_products.h"
#include "kernels.h"
#include "parallel.h"

namespace kaiten {
namespace {

constexpr int kSplit = 512;                   // positions per split; part of the result's definition
static_assert(kSplit % kStretch == 0);
constexpr float kBehind = -1e30f;             // as a score: the weight of it is zero
constexpr int kQueriesMax = 192;              // query vectors of an item, which share what is laid out
constexpr int kQueriesApart = 24;             // up to here the splits of a row are items of their own
constexpr int kItemsPerThread = 4;
constexpr int64_t kSerialElements = 1 << 16;  // of keys, times query tokens; less does not pay a thread's waking
// Each of these has a loop that needs the registers for itself.
#define KAITEN_APART __attribute__((noinline))
#define KAITEN_WITHIN __attribute__((always_inline)) inline

struct Item {
  int row, first, count, kv_head;  // query tokens [first, first + count) of the row's step
  int split, split_end;            // positions [split, split_end) * kSplit, as far as any of the queries sees them
  int joint;                       // index of the Joint, where each split of these queries is an item; else -1
};

// Items that are the splits of the same queries. Who is done last adds their partial sums.
struct Joint {
  int64_t offset;  // of the first one's sums
  int first, splits;
};

// What a tile of queries does about keys and values: the first lays them out, kept where others follow.
struct Lay {
  bool is_first, is_kept;
};

// Where a split's keys and values lie in their pools, in elements: of positions [begin, positions) of it, whole tiles
// from the front. Before the first position that is seen at all it is as good as that one, which nobody gave back.
struct Places {
  std::vector<int64_t> at = std::vector<int64_t>(kSplit);
  int begin = 0, positions = 0;
};

// One thread's work space, grown once and kept. `next` are the places of what follows.
struct Space {
  Places here, next;
  std::vector<float> q;                      // steps
  std::vector<VF> keys, values;              // laid out: [tile][step][kColumns], a lane per position; [step][dimension]
  std::vector<float> part, all;              // of each query its sums, their top and total: of a split, of all so far
  alignas(64) float scores[kRowsMax * kSplit];  // then, in their place, the weights of the softmax
  Tiles tiles;

  void fit(int queries, int steps, int width, int state) {
    if (q.size() < size_t(queries) * steps) q.resize(size_t(queries) * steps);
    if (all.size() < size_t(queries) * state) all.resize(size_t(queries) * state);
    if (part.size() < size_t(kRowsMax) * state) part.resize(size_t(kRowsMax) * state);
    if (keys.size() < size_t(steps) * (kSplit / W)) keys.resize(size_t(steps) * (kSplit / W));
    if (values.size() < size_t(width / W) * kSplit) values.resize(size_t(width / W) * kSplit);
  }
};

template <class T>
class Pass {
 public:
  static constexpr bool kPairs = KAITEN_BF16_DOT && sizeof(T) == 2;
  static constexpr int kRows = kPairs ? kRowsMax : kVectorRows;  // query vectors of a tile
  static constexpr int kPerStep = kPairs ? 2 : 1;
  static constexpr int kLanes = W * kPerStep;  // elements of a full vector

  explicit Pass(const Attention& a)
      : a_(a),
        group_(a.heads / a.kv_heads),
        steps_((a.head_dim + kLanes - 1) / kLanes * W),
        width_((a.head_dim + kLanes - 1) / kLanes * kLanes),
        state_(width_ + W),
        keys_(static_cast<const T*>(a.k_pages)),
        values_(static_cast<const T*>(a.v_pages)) {
    // Few threads share a chunk out as it shares best; for many there must be enough items.
    const int64_t queries = int64_t(a.query_starts[a.rows]) * a.heads / (kItemsPerThread * threads_max);
    queries_max_ = int(std::clamp<int64_t>(queries, kQueriesApart, kQueriesMax));
    // Chunks first: their items are the long ones, and short ones even out the end.
    for (const bool is_chunk : {true, false})
      for (int row = 0; row < a.rows; ++row)
        if (const int count = a.query_starts[row + 1] - a.query_starts[row]; (count > 1) == is_chunk) plan(row, count);
  }

  void run() {
    partials_.reset(new float[partials_size_]);
    left_ = std::vector<std::atomic<int>>(joints_.size());
    for (size_t i = 0; i < joints_.size(); ++i) left_[i] = joints_[i].splits;
    for_each_ahead(items_.size(), work_ > kSerialElements, [this](int64_t i, int64_t next, bool is_first) {
      thread_local Space space;
      if (is_first) {
        locate(items_[i], items_[i].split, space.next);
        fetch(keys_, space.next, space.next.begin, space.next.positions);
      }
      attend(items_[i], next < 0 ? nullptr : &items_[next], space);
    });
  }

 private:
  void plan(int row, int count) {
    const int parts = std::min(count, (count * group_ + queries_max_ - 1) / queries_max_);
    for (int part = parts - 1; part >= 0; --part) {
      const int first = int64_t(count) * part / parts, end = int64_t(count) * (part + 1) / parts;
      const int before = a_.contexts[row] - count, seen = before + end, splits = (seen + kSplit - 1) / kSplit;
      const int behind = unseen(before + first);
      work_ += int64_t(end - first) * (seen - behind) * a_.kv_heads * a_.head_dim;
      for (int kv_head = 0; kv_head < a_.kv_heads; ++kv_head)
        add({row, first, end - first, kv_head, behind / kSplit, splits, -1});
    }
  }

  void add(Item item) {
    const int begin = item.split, end = item.split_end, queries = item.count * group_;
    if (end - begin == 1 || queries > kQueriesApart) return items_.push_back(item);
    item.joint = int(joints_.size());
    joints_.push_back({partials_size_, begin, end - begin});
    partials_size_ += int64_t(end - begin) * queries * state_;
    for (; item.split < end; ++item.split) {
      item.split_end = item.split + 1;
      items_.push_back(item);
    }
  }

  // Positions behind the window of the query at this one.
  int unseen(int position) const { return a_.window > 0 ? std::max(0, position + 1 - a_.window) : 0; }

  // How many positions of the split the item's query token i may see (can be negative).
  int seen(const Item& item, int split, int i) const {
    return std::min(kSplit, position(item, i) + 1 - split * kSplit);
  }

  // And how many of those lie behind its window (can be negative, or all).
  int behind(const Item& item, int split, int i) const { return unseen(position(item, i)) - split * kSplit; }

  int position(const Item& item, int i) const {
    const int count = a_.query_starts[item.row + 1] - a_.query_starts[item.row];
    return a_.contexts[item.row] - count + item.first + i;
  }

  void attend(const Item& item, const Item* next, Space& space) {
    const int queries = item.count * group_;
    space.fit(queries, steps_, width_, state_);
    load_queries(item, space);
    float* all = item.joint < 0 ? space.all.data() : partial(item, item.split);
    clear(all, queries);
    for (int split = item.split; split < item.split_end; ++split) {
      std::swap(space.here, space.next);
      if (split + 1 < item.split_end)
        locate(item, split + 1, space.next);
      else if (next)
        locate(*next, next->split, space.next);
      else
        space.next.begin = space.next.positions = 0;
      attend_split(item, split, all, space);
    }
    space.tiles.release();
    if (item.joint < 0)
      write(item, all);
    else if (--left_[item.joint] == 0)
      join(item);
  }

  // Last query tokens first: they see the most, so the first tile lays out what the others need. A single tile keeps
  // nothing, and works on the same few kilobytes all the time.
  void attend_split(const Item& item, int split, float* all, Space& space) const {
    const int queries = item.count * group_, tiles = (queries + kRows - 1) / kRows;
    for (int tile = tiles - 1; tile >= 0; --tile) {
      const int r = queries * tile / tiles, rows = queries * (tile + 1) / tiles - r;
      const int positions = seen(item, split, (r + rows - 1) / group_);
      if (positions <= 0) return;
      const Lay lay{tile == tiles - 1, tiles > 1};
      score(rows, positions, space.q.data() + r * steps_, lay, space);
      float* part = space.part.data();
      for (int i = 0; i < rows; ++i)
        soften(behind(item, split, (r + i) / group_), seen(item, split, (r + i) / group_), space.here.begin, positions,
               space.scores + i * kSplit, part + i * state_ + width_);
      mix(rows, positions, lay, space);
      for (int i = 0; i < rows; ++i) fold(part + i * state_, all + (r + i) * state_);
    }
  }

  static void multiply(int rows, int columns, Product p, Tiles& tiles) {
#if KAITEN_AMX
    if constexpr (kPairs) {
      if (tiles_are_allowed()) return tiles.multiply(rows, columns, p);
      for (; rows > kVectorRows; rows -= kVectorRows, p.a += kVectorRows * p.a_stride, p.sums += kVectorRows * p.stride)
        multiply_vectors<kPairs>(kVectorRows, columns, p);
    }
#endif
    multiply_vectors<kPairs>(rows, columns, p);
  }

  KAITEN_APART void locate(const Item& item, int split, Places& places) const {
    const int positions = places.positions = seen(item, split, item.count - 1);
    const int first = std::max(0, behind(item, split, 0));
    places.begin = first / kStretch * kStretch;
    const int32_t* table = a_.tables + item.row * a_.table_stride;
    const int64_t tile = int64_t(a_.block_size) * a_.head_dim;
    int block = (split * kSplit + first) / a_.block_size, offset = (split * kSplit + first) % a_.block_size;
    for (int j = first; j < positions; ++block, offset = 0) {
      const int64_t at = (int64_t(table[block]) * a_.kv_heads + item.kv_head) * tile + int64_t(offset) * a_.head_dim;
      const int taken = std::min(a_.block_size - offset, positions - j);
      for (int i = 0; i < taken; ++i) places.at[j + i] = at + int64_t(i) * a_.head_dim;
      j += taken;
    }
    for (int j = places.begin; j < first; ++j) places.at[j] = places.at[first];
    for (int j = positions; j % W; ++j) places.at[j] = places.at[positions - 1];
  }

  void load_queries(const Item& item, Space& space) const {
    const int token = a_.query_starts[item.row] + item.first;
    for (int r = 0; r < item.count * group_; ++r) {
      const T* from = static_cast<const T*>(a_.q) + (token + r / group_) * a_.q_stride +
                      (item.kv_head * group_ + r % group_) * a_.head_dim;
      float* to = space.q.data() + r * steps_;
      for (int d = 0; d < a_.head_dim; d += kLanes) store(to + d / kPerStep, take(from + d, a_.head_dim - d));
    }
  }

  // The blocks lie anywhere in the pool, so the processor cannot guess them, and a load that waits for memory costs
  // more than its share of the sums. So who lays out W keys asks for as many values of the split, and who lays out W
  // values for as many keys of what follows: few enough at a time that asking does not wait either.
  // Inlined, as a compiler takes what only fetches for what does nothing.
  KAITEN_WITHIN void fetch(const T* pool, const Places& places, int begin, int end) const {
    const int bytes = a_.head_dim * sizeof(T);
    for (int j = begin; j < end; ++j)
      for (int b = 0; b < bytes; b += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(pool + places.at[j]) + b, 0, 2);
  }

  // Part c of `parts` of fetching positions [begin, begin + parts * W) as far as `end`, out of as many places in turns:
  // kFetchedAtOnce in linear/tiles.h says why.
  KAITEN_WITHIN void fetch_in_turns(const T* pool, const Places& places, int begin, int end, int c, int parts) const {
    for (int i = begin + W * c / parts; i < begin + W * (c + 1) / parts; ++i)
      for (int j = i; j < std::min(i + parts * W, end); j += W) fetch(pool, places, j, j + 1);
  }

  // Beside the c-th W of the values [begin, end), as many keys of what follows, and beside the last all others.
  KAITEN_WITHIN void fetch_next_keys(int begin, int end, int c, bool is_last, const Places& next) const {
    const int first = begin + c * W, parts = (end - begin + W - 1) / W;
    if constexpr (KAITEN_AMX) {
      fetch_in_turns(keys_, next, begin, std::min(begin + parts * W, next.positions), c, parts);
      if (is_last) fetch(keys_, next, first + W, next.positions);
    } else {
      fetch(keys_, next, first, std::min(is_last ? kSplit : first + W, next.positions));
    }
  }

  void score(int rows, int positions, const float* q, Lay lay, Space& space) const {
    for (int j = space.here.begin; j < positions; j += kTile) {
      VF* keys = space.keys.data() + (lay.is_kept ? j / W * steps_ : 0);
      const int columns = std::min(kColumns, (positions - j + W - 1) / W);
      for (int c = 0; lay.is_first && c < columns; ++c) {
        const int from = j + c * W, to = std::min(from + W, positions);
        if constexpr (KAITEN_AMX)
          fetch_in_turns(values_, space.here, j, positions, c, columns);
        else
          fetch(values_, space.here, from, to);
        if (mixes_as_they_lie(lay) && !fetched_by_mixing(from))
          fetch(keys_, space.next, from, std::min(to, space.next.positions));
        lay_out_keys(space.here.at.data() + j + c * W, keys + c);
      }
      multiply(rows, columns, {q, steps_, keys, kColumns, steps_, space.scores + j, kSplit, false}, space.tiles);
    }
  }

  // keys at W places -> a lane each, a vector every kColumns per step
  KAITEN_APART void lay_out_keys(const int64_t* at, VF* to) const {
    VF rows[W];
    int d = 0;
    // Pairs as they lie cost half as many exchanges as numbers already widened.
    if constexpr (sizeof(T) == 2 && !kPairs)
      for (; d + 2 * W <= a_.head_dim; d += 2 * W, to += 2 * W * kColumns) {
        KAITEN_UNROLL for (int i = 0; i < W; ++i) std::memcpy(&rows[i], keys_ + at[i] + d, sizeof rows[i]);
        transpose(rows);
        KAITEN_UNROLL for (int i = 0; i < W; ++i) {
          to[2 * i * kColumns] = (VF)((VU)rows[i] << 16);
          to[(2 * i + 1) * kColumns] = (VF)((VU)rows[i] & 0xFFFF0000u);
        }
      }
    for (; d < a_.head_dim; d += kLanes, to += W * kColumns) {
      const int left = a_.head_dim - d;
      if (left >= kLanes)
        KAITEN_UNROLL for (int i = 0; i < W; ++i) rows[i] = take(keys_ + at[i] + d);
      else
        KAITEN_UNROLL for (int i = 0; i < W; ++i) rows[i] = take(keys_ + at[i] + d, left);
      transpose(rows);
      KAITEN_UNROLL for (int i = 0; i < W; ++i) to[i * kColumns] = rows[i];
    }
  }

  // The next elements as a vector of steps; with `left`, zeros after the last of them.
  static VF take(const T* from) {
    if constexpr (!kPairs) return load(from);
    VF steps;
    std::memcpy(&steps, from, sizeof steps);
    return steps;
  }

  static VF take(const T* from, int left) {
#if KAITEN_BF16_DOT
    if constexpr (kPairs) return load_some_pairs(from, left);
#endif
    return load(from, left);
  }

  // scores of one query, from `begin` on -> weights: exp(score - top) over the positions [behind, count) that it sees,
  // zero before and to the end of the tile
  KAITEN_APART void soften(int behind, int count, int begin, int positions, float* scores, float* top_total) const {
    if (behind >= count) {
      std::fill(scores + begin / kPerStep, scores + (positions + kLanes - 1) / kLanes * W, 0.0f);
      top_total[0] = -kInf, top_total[1] = 0.0f;
      return;
    }
    if (a_.softcap > 0.0f) cap(begin, count, scores);
    std::fill(scores + begin, scores + std::max(begin, behind), kBehind);
    const VF scale = splat(a_.softcap > 0.0f ? 1.0f : a_.scale);
    VF top = splat(-kInf), total = {};
    int j = begin;
    for (; j + W <= count; j += W) top = vmax(top, load(scores + j) * scale);
    if (j < count) top = vmax(top, keep_first(load(scores + j) * scale, count - j, -kInf));
    const float base = max_lanes(top);
    constexpr float kUnit = kPairs ? 1.44269504f : 1.0f;  // pairs are powers of two
    const VF factor = scale * kUnit, minus = splat(-base * kUnit);
    for (j = begin; j + kLanes <= count; j += kLanes) weigh<false>(scores, j, factor, minus, kLanes, total);
    for (; j < positions; j += kLanes) weigh<true>(scores, j, factor, minus, count - j, total);
    top_total[0] = base, top_total[1] = sum_lanes(total);
  }

  // score -> softcap * tanh(scale * score / softcap), with tanh x = 1 - 2 / (e^2x + 1)
  void cap(int begin, int count, float* scores) const {
    const VF inward = splat(2.0f * a_.scale / a_.softcap), outward = splat(a_.softcap), one = splat(1.0f);
    for (int j = begin; j < count; j += W) {
      const VF x = vmin(load(scores + j) * inward, splat(80.0f));  // beyond, and long before, it is 1
      store(scores + j, outward * (one - splat(2.0f) / (vexp(x) + one)));
    }
  }

  // The weights of a step's vectors, of which the query sees the first `count`, take the place of scores before them.
  template <bool kTail>
  static void weigh(float* scores, int j, VF factor, VF minus, int count, VF& total) {
    VF p[kPerStep];
    KAITEN_UNROLL for (int i = 0; i < kPerStep; ++i) {
      p[i] = power(fma(load(scores + j + i * W), factor, minus));
      if (kTail) p[i] = keep_first(p[i], count - i * W, 0.0f);
    }
#if KAITEN_BF16_DOT
    if constexpr (kPairs) {
      const VF pairs = pairs_of(p[0], p[1]);
      std::memcpy(scores + j / 2, &pairs, sizeof pairs);
      total = dot_pairs(total, pairs, pairs_of_ones());
      return;
    }
#endif
    store(scores + j, p[0]);
    total = total + p[0];
  }

  static VF power(VF x) {
#if KAITEN_BF16_DOT
    if constexpr (kPairs) return vexp2_coarse(x);
#endif
    return vexp(x);
  }

  // A single tile of queries takes values as they lie. Laid out first each was written and read once more, which took a
  // sixth of decode attention at 16 rows x 1024 and at 64 x 150 (2026-11-25, Zen 3, bfloat16, one thread), and a twentieth on
  // a Sapphire Rapids (fp32). With AVX-512 it was timed nowhere else, and pairs are laid out in any case.
  bool mixes_as_they_lie(Lay lay) const {
    return (KAITEN_AMX || !KAITEN_AVX512) && !kPairs && !lay.is_kept && a_.head_dim % W == 0;
  }

  // Keys that follow are fetched half beside keys, half beside values, so that memory is as busy with either.
  static bool fetched_by_mixing(int position) { return position & W; }

  void mix(int rows, int positions, Lay lay, Space& space) const {
    if (mixes_as_they_lie(lay)) return mix_as_they_lie(rows, positions, space);
    const int vectors = width_ / W, stretch = lay.is_first ? kStretch : kSplit;
    float* part = space.part.data();
    const int begin = space.here.begin;
    for (int j = begin; j < positions; j += stretch) {
      VF* values = space.values.data() + (lay.is_kept ? j / kPerStep * vectors : 0);
      const int end = std::min(j + stretch, positions);
      for (int i = j; lay.is_first && i < end; i += W) {
        fetch_next_keys(j, end, (i - j) / W, i + W >= positions, space.next);
        lay_out_values(space.here.at.data() + i, std::min(W, end - i), values + (i - j) / kPerStep * vectors);
      }
      const float* weights = space.scores + j / kPerStep;
      const int steps = (end - j + kPerStep - 1) / kPerStep;
      for (int c = 0; c < vectors; c += kColumns)
        multiply(rows, std::min(kColumns, vectors - c),
                 {weights, kSplit, values + c, vectors, steps, part + c * W, state_, j > begin}, space.tiles);
    }
  }

  void mix_as_they_lie(int rows, int positions, Space& space) const {
    const int vectors = width_ / W;
    with_constant<kRows>(rows, [&](auto r) {
      for (int c = 0; c < vectors; c += kColumns)
        with_constant<kColumns>(std::min(kColumns, vectors - c),
                                [&](auto columns) { mix_tile<r(), columns()>(positions, c * W, space); });
    });
    fetch(keys_, space.next, positions, space.next.positions);
  }

  // The sums over positions of a weight times a value, in dimensions [first, first + C * W).
  template <int R, int C>
  KAITEN_APART void mix_tile(int positions, int first, Space& space) const {
    VF sums[R][C] = {};
    const int64_t *at = space.here.at.data(), *next = space.next.at.data();
    for (int j = space.here.begin; j < positions; ++j) {
      if (fetched_by_mixing(j) && j < space.next.positions)
        for (int d = 0; d < C * W; d += 64 / int(sizeof(T))) __builtin_prefetch(keys_ + next[j] + first + d, 0, 2);
      const T* value = values_ + at[j] + first;
      VF weights[R];
      KAITEN_UNROLL for (int r = 0; r < R; ++r) weights[r] = splat(space.scores[r * kSplit + j]);
      KAITEN_UNROLL for (int c = 0; c < C; ++c) {
        const VF lanes = load(value + c * W);
        KAITEN_UNROLL for (int r = 0; r < R; ++r) sums[r][c] = fma(weights[r], lanes, sums[r][c]);
      }
    }
    float* to = space.part.data() + first;
    KAITEN_UNROLL for (int r = 0; r < R; ++r)
      KAITEN_UNROLL for (int c = 0; c < C; ++c) store(to + r * state_ + c * W, sums[r][c]);
  }

  KAITEN_APART void lay_out_values(const int64_t* at, int count, VF* to) const {
    for (int j = 0; j < count; j += kPerStep)
      for (int d = 0; d < a_.head_dim; d += kLanes, to += kPerStep) {
        const int left = a_.head_dim - d;
#if KAITEN_BF16_DOT
        if constexpr (kPairs) {
          interleave_halves(take(values_ + at[j] + d, left), take(values_ + at[j + 1] + d, left), to);
          continue;
        }
#endif
        to[0] = take(values_ + at[j] + d, left);
      }
  }

  void clear(float* all, int queries) const {
    for (int r = 0; r < queries; ++r) {
      float* state = all + r * state_;
      std::fill_n(state, state_, 0.0f);
      state[width_] = -kInf;
    }
  }

  // Adds a split's sums to those of the splits before it, both scaled to the common top.
  void fold(const float* part, float* all) const {
    if (part[width_] == -kInf && part[width_ + 1] == 0.0f) return;  // sees nothing of this split
    const float top = std::max(all[width_], part[width_]);
    const VF mine = vexp(splat(all[width_]) - top), its = vexp(splat(part[width_]) - top);
    for (int d = 0; d < width_; d += W) store(all + d, load(all + d) * mine + load(part + d) * its);
    all[width_] = top, all[width_ + 1] = all[width_ + 1] * mine[0] + part[width_ + 1] * its[0];
  }

  float* partial(const Item& item, int split) const {
    const Joint& joint = joints_[item.joint];
    return partials_.get() + joint.offset + int64_t(split - joint.first) * item.count * group_ * state_;
  }

  void join(const Item& item) const {
    const Joint& joint = joints_[item.joint];
    float* all = partial(item, joint.first);
    for (int split = joint.first + 1; split < joint.first + joint.splits; ++split)
      for (int r = 0; r < item.count * group_; ++r) fold(partial(item, split) + r * state_, all + r * state_);
    write(item, all);
  }

  void write(const Item& item, const float* all) const {
    for (int r = 0; r < item.count * group_; ++r, all += state_) {
      const int token = a_.query_starts[item.row] + item.first + r / group_;
      T* out = static_cast<T*>(a_.out) + (int64_t(token) * a_.heads + item.kv_head * group_ + r % group_) * a_.head_dim;
      const float share = 1.0f / all[width_ + 1];
      for (int d = 0; d < a_.head_dim; d += W) store(out + d, load(all + d) * share, a_.head_dim - d);
    }
  }

  const Attention& a_;
  const int group_, steps_, width_, state_;
  const T *const keys_, *const values_;
  int queries_max_;
  std::vector<Item> items_;
  std::vector<Joint> joints_;
  std::vector<std::atomic<int>> left_;
  std::unique_ptr<float[]> partials_;
  int64_t partials_size_ = 0, work_ = 0;
};

}  // namespace

void paged_attention(const Attention& a) {
  if (a.is_bf16)
    Pass<bf16>(a).run();
  else
    Pass<float>(a).run();
}

}  // namespace kaiten
