// The tiles of a linear, whatever its weights are kept as: a few rows against one panel of weights, the sums in
// registers. linear.cpp says how panels are laid out and why a row's bits depend on nothing but the row.
//
// Weights come from a source that hands out one step after another. A kind of panel says, for a panel that begins at
// some address, how many bytes it has and about how many a step, up to how many rows a tile waits for memory, and what the
// source of its i-th tile is; `with_kept`: that lies as Ready has it, or comes to lie so. A source with rounds is asked for kStride steps at a time.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "../kernels.h"
#include "../parallel.h"
#include "../simd.h"

namespace kaiten {

// Vectors of a panel: as many numbers with NEON as with AVX2.
constexpr int kColumns = KAITEN_NEON ? 6 : 3;
// Rows of a tile: kRows * kColumns sums, the weights and x fill the registers, of which AVX2 has half as many as others.
constexpr int kRows = KAITEN_AVX512 ? 8 : 4;
constexpr int kPanel = kColumns * W;
constexpr int kStride = 4;             // steps between two rounds of fetching ahead
constexpr int kNear = 8, kFar = 64;    // steps fetched ahead where a tile waits for memory, and where it must not
constexpr int kLine = 64;
// Places of the next panel that are fetched side by side, beside several passes. A Xeon with AMX has 16 lines under way, and
// its prefetcher 20 more of each page that is read in order: one page at a time leaves memory half idle (52M weights, two
// threads, Sapphire Rapids, 2026-11-27: 64 rows of bf16 6.6 ms, and 5.3 from four; 16 of fp32 11.5 and 10.3).
constexpr int kFetchedAtOnce = KAITEN_AMX ? 4 : 1;
constexpr int64_t kSerialFlops = 1 << 17;
constexpr int64_t kPartRows = 128;     // 0.2 ms against the widest panel of a small model
// 512 rows of 2,048 inputs against 768 outputs: 0.75 ms as one, 0.64 as two (bf16, two threads, Sapphire Rapids, 2026-11-27).
constexpr int64_t kBlockBytes = 1 << 20;

// What tiles multiply where x is of T: pairs of bfloat16 if the processor does, else float32. x is widened once per call.
template <class T>
using Factor = std::conditional_t<KAITEN_BF16_DOT && sizeof(T) == 2, bf16, float>;

template <class T>
constexpr int kPerStep = sizeof(Factor<T>) == 2 ? 2 : 1;

inline int64_t panels_of(int64_t out) { return (out + kPanel - 1) / kPanel; }

// The sums of a step: of a float32 each, or of a pair of bfloat16, the first of it first.
template <int R>
inline void add_step(const VF (&w)[kColumns], const float* x, int64_t x_stride, VF (&sums)[R][kColumns]) {
  KAITEN_UNROLL_WIDE for (int r = 0; r < R; ++r) {
    const VF of_row = splat(x[r * x_stride]);
    KAITEN_UNROLL_WIDE for (int c = 0; c < kColumns; ++c) sums[r][c] = fma(of_row, w[c], sums[r][c]);
  }
}

#if KAITEN_BF16_DOT
template <int R>
inline void add_step(const VF (&w)[kColumns], const bf16* x, int64_t x_stride, VF (&sums)[R][kColumns]) {
  KAITEN_UNROLL_WIDE for (int r = 0; r < R; ++r) {
    uint32_t pair;
    std::memcpy(&pair, x + r * x_stride, sizeof pair);
    const VU of_row = splat(pair);
    KAITEN_UNROLL_WIDE for (int c = 0; c < kColumns; ++c) sums[r][c] = dot_pairs(sums[r][c], (VF)of_row, w[c]);
  }
}
#endif

// What is brought into the cache meanwhile: [at, end), then [next, next_end), some lines every kStride steps.
struct Fetch {
  const char *at, *end, *next, *next_end;
  int lines;
  bool is_spread = false;  // the next one in kFetchedAtOnce places
  int64_t part = 0;        // bytes between these

  inline void turn() {
    if constexpr (kFetchedAtOnce > 1)
      if (part) return turn_spread();
    for (int i = 0; i < lines; ++i, at += kLine) {
      if (at >= end) {
        if (!next) return;
        at = next, end = next_end, next = nullptr;
        if constexpr (kFetchedAtOnce > 1)
          if (is_spread) return turn_spread();
      }
      __builtin_prefetch(at, 0, 2);
    }
  }

 private:
  inline void turn_spread() {
    if (!part) {
      part = ((end - at) / kFetchedAtOnce + kLine - 1) / kLine * kLine;
      end = at + part;
    }
    for (int i = 0; i < lines && at < end; i += kFetchedAtOnce, at += kLine)
      for (int k = 0; k < kFetchedAtOnce; ++k) __builtin_prefetch(at + k * part, 0, 2);
  }
};

// A panel's weights as the sums take them: [steps][kColumns].
struct Ready {
  static constexpr bool kHasRounds = false;
  const VF* at;

  inline void step(VF (&w)[kColumns]) {
    KAITEN_UNROLL_WIDE for (int c = 0; c < kColumns; ++c) w[c] = at[c];
    at += kColumns;
  }
};

// Room of a thread's own for one panel, as large as any that it has seen.
inline VF* room_for(int64_t vectors) {
  struct Free {
    void operator()(VF* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<VF, Free> room;
  static thread_local int64_t size = 0;
  if (size < vectors) {
    room.reset(static_cast<VF*>(std::aligned_alloc(sizeof(VF), vectors * sizeof(VF))));
    if (!room) throw std::bad_alloc();
    size = vectors;
  }
  return room.get();
}

// The next W numbers, or W pairs, as what tiles multiply.
template <class X>
inline VF brought_over(const bf16* weights) { return load(weights); }

template <class X>
inline VF brought_over(const int8_t* codes) {
#if KAITEN_BF16_DOT
  if constexpr (sizeof(X) == 2) return pairs_of(load_codes(codes), load_codes(codes + W));
#endif
  return load_codes(codes);
}

// A panel's weights in another type.
template <class T, class Weight, bool kKeeps>
struct Bringing {
  static constexpr bool kHasRounds = false;
  const Weight* at;
  VF* kept;

  inline void step(VF (&w)[kColumns]) {
    KAITEN_UNROLL_WIDE for (int c = 0; c < kColumns; ++c) {
      w[c] = brought_over<Factor<T>>(at + c * W * kPerStep<T>);
      if constexpr (kKeeps) kept[c] = w[c];
    }
    at += kPanel * kPerStep<T>;
    if constexpr (kKeeps) kept += kColumns;
  }
};

// A panel of weights in another type. The first tile brings them over on its way, so that this hides behind memory or
// sums. Where more tiles follow it keeps them in a place of the thread's own, which stays in the cache: a panel is
// brought over once per use.
template <class T, class Weight>
struct BroughtOver {
  static constexpr int64_t kStepBytes = kPanel * kPerStep<T> * sizeof(Weight);
  static constexpr int64_t bytes(int64_t steps) { return steps * kStepBytes; }
  // Bringing over takes as long as reading so few bytes: fetched close ahead, 4 rows took 11.8 ms where far ahead they
  // take 7.6, and one 5.6 either way (int8, 2026-11-20, Zen 4, 125M parameters, one thread).
  static constexpr int kRowsWaiting = 0;
  const Weight* begin;
  VF* room;

  BroughtOver(const char* panel, int64_t steps, int64_t rows)
      : begin(reinterpret_cast<const Weight*>(panel)), room(rows > kRows ? room_for(steps * kColumns) : nullptr) {}

  Bringing<T, Weight, false> alone() const { return {begin, nullptr}; }

  template <class F>
  void with_kept(int64_t tile, const F& multiply) const {
    tile > 0 ? multiply(Ready{room}) : multiply(Bringing<T, Weight, true>{begin, room});
  }

  template <class F>
  void with_source(int64_t tile, const F& multiply) const {
    room ? with_kept(tile, multiply) : multiply(alone());
  }
};

// kPerStep numbers of an output for each step along K, the outputs of a panel side by side.
template <class T, class Weight>
void pack_panel(const Pack& a, int64_t panel) {
  constexpr int kPer = kPerStep<T>;
  const int64_t steps = a.in / kPer;
  Weight* to = static_cast<Weight*>(a.packed) + panel * steps * kPanel * kPer;
  for (int n = 0; n < kPanel; ++n) {
    const int64_t output = panel * kPanel + n;
    const Weight* from = static_cast<const Weight*>(a.weight) + output * a.in;
    for (int64_t k = 0; k < steps; ++k)
      for (int i = 0; i < kPer; ++i) to[(k * kPanel + n) * kPer + i] = output < a.out ? from[k * kPer + i] : Weight{};
  }
}

// The weights of an output in ascending k: use(k, weight).
template <class T, class Weight, class F>
void for_each_weight(const Unpack& a, int64_t output, const F& use) {
  constexpr int kPer = kPerStep<T>;
  const int64_t steps = a.in / kPer, panel = output / kPanel, n = output % kPanel;
  const Weight* from = static_cast<const Weight*>(a.packed) + (panel * steps * kPanel + n) * kPer;
  for (int64_t k = 0; k < steps; ++k)
    for (int i = 0; i < kPer; ++i) use(k * kPer + i, from[k * kPanel * kPer + i]);
}

template <class T>
struct Panel {
  const T* bias;        // null: none
  const float* scales;  // null: none; else what each output's sum is multiplied with
  int64_t steps, x_stride, out_stride;
  int width;            // outputs of the last panel may be fewer than kPanel
};

template <class T>
inline Panel<T> panel_of(const Linear& a, int64_t panel) {
  const int64_t first = panel * kPanel;
  const T* bias = static_cast<const T*>(a.bias);
  return {bias ? bias + first : nullptr, a.scales ? a.scales + first : nullptr, a.in / kPerStep<T>, a.in, a.out,
          int(std::min<int64_t>(kPanel, a.out - first))};
}

template <class T, int R, bool kWhole>
inline void write_as(const Panel<T>& p, const VF (&in_registers)[R][kColumns], T* out) {
#if KAITEN_NEON
  // A loop that is not unrolled, as this one with its tails is not, would keep the sums in memory all the time.
  VF sums[R][kColumns];
  KAITEN_UNROLL for (int r = 0; r < R; ++r)
    KAITEN_UNROLL for (int c = 0; c < kColumns; ++c) sums[r][c] = in_registers[r][c];
#else
  const auto& sums = in_registers;
#endif
  for (int c = 0; c < kColumns; ++c) {
    const int n = kWhole ? W : std::clamp(p.width - c * W, 0, W);
    if (n == 0) return;
    const VF bias = p.bias ? load(p.bias + c * W, n) : VF{};
    const VF scale = p.scales ? load(p.scales + c * W, n) : splat(1.0f);
    for (int r = 0; r < R; ++r) {
      T* to = out + r * p.out_stride + c * W;
      if constexpr (kWhole)
        store(to, sums[r][c] * scale + bias);
      else
        store(to, sums[r][c] * scale + bias, n);
    }
  }
}

template <class T, int R>
inline void write(const Panel<T>& p, const VF (&sums)[R][kColumns], T* out) {
  p.width == kPanel ? write_as<T, R, true>(p, sums, out) : write_as<T, R, false>(p, sums, out);
}

template <class T, int R, class Source>
void tile(const Panel<T>& p, Source source, Fetch& fetch, const Factor<T>* x, T* out) {
  VF sums[R][kColumns] = {};
  if constexpr (Source::kHasRounds) {
    for (int64_t k = 0; k < p.steps; k += kStride) {
      fetch.turn();
      source.round(k);
      KAITEN_UNROLL for (int i = 0; i < kStride; ++i) {
        VF w[kColumns];
        source.step(w, i);
        add_step<R>(w, x + (k + i) * kPerStep<T>, p.x_stride, sums);
      }
    }
  } else {
    for (int64_t k = 0; k < p.steps; ++k) {
      if (k % kStride == 0) fetch.turn();
      VF w[kColumns];
      source.step(w);
      add_step<R>(w, x + k * kPerStep<T>, p.x_stride, sums);
    }
  }
  write(p, sums, out);
}

template <class T, class Source>
void tile_rows(int rows, const Panel<T>& p, Source source, Fetch& fetch, const Factor<T>* x, T* out) {
  switch (rows) {
    case 1: return tile<T, 1>(p, source, fetch, x, out);
    case 2: return tile<T, 2>(p, source, fetch, x, out);
    case 3: return tile<T, 3>(p, source, fetch, x, out);
#if KAITEN_AVX512
    case 4: return tile<T, 4>(p, source, fetch, x, out);
    case 5: return tile<T, 5>(p, source, fetch, x, out);
    case 6: return tile<T, 6>(p, source, fetch, x, out);
    case 7: return tile<T, 7>(p, source, fetch, x, out);
#endif
    default: return tile<T, kRows>(p, source, fetch, x, out);
  }
}

// What the passes over one panel bring into the cache. Memory is slow beside the sums, so it must not rest: while one
// panel is computed the thread's next one is brought in, in equal portions. Nobody did so for a new panel, and a single
// pass always follows close behind its fetching, `ahead` bytes.
class PassFetch : public Fetch {
 public:
  // `lines` of the cache in every turn of a pass.
  PassFetch(const Linear& a, int64_t panel, int64_t next, bool is_new, int64_t bytes, int64_t passes, int lines, int64_t ahead)
      : PassFetch(static_cast<const char*>(a.packed), panel, next, is_new || passes == 1, bytes, lines, ahead) {
    const int64_t sharing = passes - (is_new && passes > 1);
    shared_ = int((lines + sharing - 1) / sharing);
    is_spread = passes > 1;
  }

  void begin(int64_t pass) {
    if (pass > 0 || !fetches_itself_) lines = shared_;
  }

 private:
  PassFetch(const char* packed, int64_t panel, int64_t next, bool fetches_itself, int64_t bytes, int lines, int64_t ahead)
      : Fetch{packed + panel * bytes + (fetches_itself ? ahead : bytes), packed + (panel + 1) * bytes,
              next < 0 ? nullptr : packed + next * bytes, packed + (next + 1) * bytes, lines},
        fetches_itself_(fetches_itself) {}

  bool fetches_itself_;
  int shared_ = 0;
};

// Rows in tiles of nearly equal height.
template <class T, template <class> class Kept>
void multiply_panel(const Linear& a, int64_t panel, int64_t next, bool is_new) {
  constexpr int64_t kStepBytes = Kept<T>::kStepBytes;
  constexpr int kLines = (kStride * kStepBytes + kLine - 1) / kLine;
  const int64_t steps = a.in / kPerStep<T>, first = panel * kPanel, bytes = Kept<T>::bytes(steps);
  const int64_t tiles = (a.rows + kRows - 1) / kRows;
  const Panel<T> p = panel_of<T>(a, panel);
  const int64_t ahead = (a.rows <= Kept<T>::kRowsWaiting ? kNear : kFar) * kStepBytes;
  PassFetch fetch(a, panel, next, is_new, bytes, tiles, kLines, ahead);
  const Kept<T> weights(static_cast<const char*>(a.packed) + panel * bytes, steps, a.rows);
  for (int64_t i = 0, row = 0; i < tiles; ++i) {
    fetch.begin(i);
    const int64_t after = a.rows * (i + 1) / tiles;
    weights.with_source(i, [&](auto source) {
      tile_rows<T>(int(after - row), p, source, fetch, static_cast<const Factor<T>*>(a.x) + row * a.in,
                   static_cast<T*>(a.y) + first + row * a.out);
    });
    row = after;
  }
}

// Close behind its fetching, then on to the next.
inline Fetch fetch_of(const Linear& a, int64_t panel, int64_t next, int64_t bytes, int64_t ahead, int lines) {
  const char *packed = static_cast<const char*>(a.packed), *begin = packed + panel * bytes;
  return {begin + ahead, begin + bytes, next < 0 ? nullptr : packed + next * bytes, packed + (next + 1) * bytes, lines};
}

// One row against two panels that lie one after the other. A step of one has fewer sums than the processor adds at
// once, and the next step waits for them: where weights are a byte each that takes longer than reading them (int8, one
// row, Zen 3 beside other work, 2026-11-25: 12.5 ms of one thread for 104M weights, two at once 10.4).
template <class T, template <class> class Kept>
void multiply_two(const Linear& a, int64_t panel, int64_t next) {
  constexpr int64_t kStepBytes = Kept<T>::kStepBytes;
  constexpr int kLines = (kStride * kStepBytes + kLine - 1) / kLine;
  const int64_t steps = a.in / kPerStep<T>, bytes = Kept<T>::bytes(steps), other_next = next < 0 ? -1 : next + 1;
  const char* packed = static_cast<const char*>(a.packed);
  const auto* x = static_cast<const Factor<T>*>(a.x);
  Fetch fetch = fetch_of(a, panel, next, bytes, kFar * kStepBytes, kLines);
  Fetch other_fetch = fetch_of(a, panel + 1, other_next, bytes, kFar * kStepBytes, kLines);
  auto source = Kept<T>(packed + panel * bytes, steps, 1).alone();
  auto other = Kept<T>(packed + (panel + 1) * bytes, steps, 1).alone();
  VF sums[1][kColumns] = {}, other_sums[1][kColumns] = {};
  for (int64_t k = 0; k < steps; ++k) {
    if (k % kStride == 0) fetch.turn(), other_fetch.turn();
    VF w[kColumns];
    source.step(w);
    add_step<1>(w, x + k * kPerStep<T>, a.in, sums);
    other.step(w);
    add_step<1>(w, x + k * kPerStep<T>, a.in, other_sums);
  }
  T* const out = static_cast<T*>(a.y) + panel * kPanel;
  write(panel_of<T>(a, panel), sums, out);
  write(panel_of<T>(a, panel + 1), other_sums, out + kPanel);
}

// The rows [first, end) of it.
inline Linear rows_of(const Linear& a, int64_t first, int64_t end) {
  const int64_t size = a.is_bf16 ? sizeof(bf16) : sizeof(float), x_size = a.is_bf16 ? sizeof(Factor<bf16>) : sizeof(float);
  Linear some = a;
  some.x = static_cast<const char*>(a.x) + first * a.in * x_size;
  some.y = static_cast<char*>(a.y) + first * a.out * size;
  some.rows = end - first;
  return some;
}

// Calls multiply(own, part, panel, next, is_new) for all panels against all rows; `own` is what begin() gave a thread. Every
// panel reads all of x, so of more than stays in a core's own cache a block comes after the other. Of many rows each thread
// has blocks of its own, and so do for_rows: what an operator wrote is in the cache of the core that reads it next (a chunk
// of 512 of a 128M model 60.3 ms, so 55.8; in float32 322 and 308: two threads, Sapphire Rapids, 2026-11-27). Rows of a block
// are cut in parts of about kPartRows, one after the other against the same panel, so that no thread waits long for another's
// last.
template <class Begin, class F>
void for_each_part(const Linear& a, const Begin& begin, const F& multiply) {
  if (a.rows == 0) return;
  const int64_t x_bytes = a.in * int64_t(a.is_bf16 ? sizeof(Factor<bf16>) : sizeof(float)), panels = panels_of(a.out);
  const int64_t most = std::max(kPartRows, kBlockBytes / x_bytes), least = (a.rows + most - 1) / most;
  const bool is_worth_threads = a.rows * a.in * a.out > kSerialFlops;
  const int64_t owners = is_worth_threads ? std::clamp<int64_t>(a.rows / kPartRows, 1, threads_max) : 1;
  const int64_t blocks = (least + owners - 1) / owners * owners;
  const int64_t parts = std::max<int64_t>(1, (a.rows / blocks + kPartRows / 2) / kPartRows), all = blocks * parts;
  for_each_ahead(all * panels, is_worth_threads, begin, [&](auto& own, int64_t i, int64_t next, bool is_new) {
    const int64_t panel = i / parts % panels, following = next < 0 ? -1 : next / parts % panels;
    const int64_t part = i / (parts * panels) * parts + i % parts;
    const Linear rows = rows_of(a, a.rows * part / all, a.rows * (part + 1) / all);
    multiply(own, rows, panel, following == panel ? -1 : following, is_new);
  });
}

template <class F>
void for_each_part(const Linear& a, const F& multiply) {
  for_each_part(a, [] { return nullptr; }, [&](auto, const Linear& part, int64_t panel, int64_t next, bool is_new) {
    multiply(part, panel, next, is_new);
  });
}

}  // namespace kaiten
