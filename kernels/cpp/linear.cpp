// y = x W^T + bias for few rows as for many, on weights laid out once: panels of kPanel outputs, in a panel the outputs
// side by side for each step along K (one float32, or a pair of bfloat16), so a panel is read front to back.
//
// Exact: an output is one chain of sums in ascending k whatever rows share the pass, so a row's bits depend on nothing
// but the row. The matrix library sums otherwise for few rows, and reads at half the memory's rate there.
#include <algorithm>

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace kaiten {
namespace {

constexpr int kColumns = 3;            // vectors of a panel
constexpr int kRows = 8;               // rows of a tile: kRows * kColumns sums, the weights and x fill the registers
constexpr int kPanel = kColumns * W;
constexpr int kStride = 4;             // steps between two rounds of fetching ahead
constexpr int kRowsWaiting = 4;        // up to here a tile waits for memory; above, memory must not wait for the tile
constexpr int kNear = 8, kFar = 64;    // steps fetched ahead in one and the other case
constexpr int kLine = 64;
constexpr int64_t kSerialFlops = 1 << 17;

template <class T>
constexpr int kPerStep = sizeof(T) == 2 ? 2 : 1;

inline VF product(VU x, VF w, VF sum, float) { return fma((VF)x, w, sum); }
inline VF product(VU x, VF w, VF sum, bf16) {
#if KAITEN_BF16_DOT
  return (VF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#else
  (void)x, (void)w;
  return sum;
#endif
}

// What is brought into the cache meanwhile: [at, end), then [next, next_end), some lines every kStride steps.
struct Fetch {
  const char *at, *end, *next, *next_end;
  int lines;

  inline void turn() {
    for (int i = 0; i < lines; ++i, at += kLine) {
      if (at >= end) {
        if (!next) return;
        at = next, end = next_end, next = nullptr;
      }
      __builtin_prefetch(at, 0, 2);
    }
  }
};

template <class T>
struct Panel {
  const VF* weights;  // [steps][kColumns]
  const T* bias;      // null: none
  T* out;
  int64_t steps, x_stride, out_stride;
  int width;          // outputs of the last panel may be fewer than kPanel
};

template <class T, int R, bool kWhole>
inline void write(const Panel<T>& p, const VF (&sums)[R][kColumns], T* out) {
  for (int c = 0; c < kColumns; ++c) {
    const int n = kWhole ? W : std::clamp(p.width - c * W, 0, W);
    if (n == 0) return;
    const VF bias = p.bias ? load(p.bias + c * W, n) : VF{};
    for (int r = 0; r < R; ++r) {
      T* to = out + r * p.out_stride + c * W;
      if constexpr (kWhole)
        store(to, sums[r][c] + bias);
      else
        store(to, sums[r][c] + bias, n);
    }
  }
}

template <class T, int R>
void tile(const Panel<T>& p, Fetch& fetch, const T* x, T* out) {
  VF sums[R][kColumns] = {};
  const VF* w = p.weights;
  for (int64_t k = 0; k < p.steps; ++k, w += kColumns) {
    if (k % kStride == 0) fetch.turn();
    for (int r = 0; r < R; ++r) {
      uint32_t pair;
      std::memcpy(&pair, x + r * p.x_stride + k * kPerStep<T>, sizeof pair);
      const VU wide = splat(pair);
      for (int c = 0; c < kColumns; ++c) sums[r][c] = product(wide, w[c], sums[r][c], T{});
    }
  }
  if (p.width == kPanel)
    write<T, R, true>(p, sums, out);
  else
    write<T, R, false>(p, sums, out);
}

template <class T>
void tile_rows(int rows, const Panel<T>& p, Fetch& fetch, const T* x, T* out) {
  switch (rows) {
    case 1: return tile<T, 1>(p, fetch, x, out);
    case 2: return tile<T, 2>(p, fetch, x, out);
    case 3: return tile<T, 3>(p, fetch, x, out);
    case 4: return tile<T, 4>(p, fetch, x, out);
    case 5: return tile<T, 5>(p, fetch, x, out);
    case 6: return tile<T, 6>(p, fetch, x, out);
    case 7: return tile<T, 7>(p, fetch, x, out);
    default: return tile<T, 8>(p, fetch, x, out);
  }
}

// Rows in tiles of nearly equal height. Memory is slow beside the sums, so it must not rest: while the tiles of one
// panel are computed the thread's next one is brought in, in equal portions. Nobody did so for its first panel, and a
// single tile always follows close behind its fetching.
template <class T>
void multiply_panel(const Linear& a, int64_t panel, int64_t next, bool is_first) {
  constexpr int64_t kStepBytes = kPanel * sizeof(float);
  constexpr int kLines = kStride * kStepBytes / kLine;
  const int64_t steps = a.in / kPerStep<T>, first = panel * kPanel, bytes = steps * kStepBytes;
  const int64_t tiles = (a.rows + kRows - 1) / kRows;
  const char* packed = static_cast<const char*>(a.packed);
  const char* begin = packed + panel * bytes;
  Panel<T> p{};
  p.weights = reinterpret_cast<const VF*>(begin);
  p.bias = a.bias ? static_cast<const T*>(a.bias) + first : nullptr;
  p.steps = steps, p.x_stride = a.in, p.out_stride = a.out;
  p.width = int(std::min<int64_t>(kPanel, a.out - first));
  const char* following = next < 0 ? nullptr : packed + next * bytes;
  Fetch fetch{begin, begin + bytes, following, packed + (next + 1) * bytes, kLines};
  const bool fetches_itself = is_first || tiles == 1;
  fetch.at += fetches_itself ? (a.rows <= kRowsWaiting ? kNear : kFar) * kStepBytes : bytes;
  const int64_t sharing = tiles - (is_first && tiles > 1);
  for (int64_t i = 0, row = 0; i < tiles; ++i) {
    if (i > 0 || !fetches_itself) fetch.lines = int((kLines + sharing - 1) / sharing);
    const int64_t after = a.rows * (i + 1) / tiles;
    tile_rows<T>(int(after - row), p, fetch, static_cast<const T*>(a.x) + row * a.in,
                 static_cast<T*>(a.y) + first + row * a.out);
    row = after;
  }
}

template <class T>
void pack_panel(const Pack& a, int64_t panel) {
  const int64_t steps = a.in / kPerStep<T>;
  uint32_t* to = static_cast<uint32_t*>(a.packed) + panel * steps * kPanel;
  for (int n = 0; n < kPanel; ++n) {
    const int64_t output = panel * kPanel + n;
    const T* from = static_cast<const T*>(a.weight) + output * a.in;
    for (int64_t k = 0; k < steps; ++k) {
      uint32_t step = 0;
      if (output < a.out) std::memcpy(&step, from + k * kPerStep<T>, sizeof step);
      to[k * kPanel + n] = step;
    }
  }
}

template <class T>
void unpack_row(const Unpack& a, int64_t row) {
  const int64_t steps = a.in / kPerStep<T>, panel = a.ids[row] / kPanel, n = a.ids[row] % kPanel;
  const uint32_t* from = static_cast<const uint32_t*>(a.packed) + panel * steps * kPanel + n;
  T* to = static_cast<T*>(a.rows) + row * a.in;
  for (int64_t k = 0; k < steps; ++k) std::memcpy(to + k * kPerStep<T>, from + k * kPanel, sizeof *from);
}

int64_t panels_of(int64_t out) { return (out + kPanel - 1) / kPanel; }

}  // namespace

bool has_linear(bool is_bf16, int64_t in) { return is_bf16 ? KAITEN_BF16_DOT && in % 2 == 0 : KAITEN_AVX512; }

int64_t packed_rows(int64_t out) { return panels_of(out) * kPanel; }

void pack_linear(const Pack& a) {
  for_each_item(panels_of(a.out), true,
                [&](int64_t i) { a.is_bf16 ? pack_panel<bf16>(a, i) : pack_panel<float>(a, i); });
}

void unpack_rows(const Unpack& a) {
  for_each_item(a.count, a.count * a.in > kSerialFlops,
                [&](int64_t i) { a.is_bf16 ? unpack_row<bf16>(a, i) : unpack_row<float>(a, i); });
}

void linear(const Linear& a) {
  const bool is_worth_threads = a.rows * a.in * a.out > kSerialFlops;
  for_each_ahead(panels_of(a.out), is_worth_threads, [&](int64_t i, int64_t next, bool is_first) {
    a.is_bf16 ? multiply_panel<bf16>(a, i, next, is_first) : multiply_panel<float>(a, i, next, is_first);
  });
}

}  // namespace kaiten
