// The products of attention: some query vectors by keys, or weights of the softmax by values, laid out side by side.
#pragma once

#include <algorithm>

#include "simd.h"
#if KAITEN_AMX
#include "simd/amx.h"
#endif

namespace kaiten {

constexpr int kVectorRows = KAITEN_AVX512 || KAITEN_NEON ? 6 : 3;  // query vectors of a tile of vectors
constexpr int kColumns = 4;          // vectors of a tile: kVectorRows * kColumns sums fill the registers
constexpr int kTile = kColumns * W;  // positions laid out and scored at a time

// sums[r][c] = the sum over steps of a[r][step] times the lanes of b[step][c]. A step is a float32, or a pair of
// bfloat16 in its place.
struct Product {
  const float* a;
  int a_stride;
  const VF* b;
  int b_stride, steps;
  float* sums;
  int stride;
  bool adds;  // to what the sums hold; else they begin at zero
};

template <bool kPairs>
inline VF mac(VU a, VF b, VF sum) {
#if KAITEN_BF16_DOT
  if constexpr (kPairs) return dot_pairs(sum, b, (VF)a);
#endif
  return fma((VF)a, b, sum);
}

template <bool kPairs, int R, int C>
void multiply_tile(const Product& p) {
  VF sums[R][C] = {};
  if (p.adds)
    KAITEN_UNROLL for (int r = 0; r < R; ++r)
      KAITEN_UNROLL for (int c = 0; c < C; ++c) sums[r][c] = load(p.sums + r * p.stride + c * W);
  const VF* b = p.b;
  int i = 0;
  do {
    KAITEN_UNROLL for (int r = 0; r < R; ++r) {
      uint32_t step;
      std::memcpy(&step, p.a + r * p.a_stride + i, sizeof step);
      const VU a = splat(step);
      KAITEN_UNROLL for (int c = 0; c < C; ++c) sums[r][c] = mac<kPairs>(a, b[c], sums[r][c]);
    }
    b += p.b_stride;
  } while (++i < p.steps);
  KAITEN_UNROLL for (int r = 0; r < R; ++r)
    KAITEN_UNROLL for (int c = 0; c < C; ++c) store(p.sums + r * p.stride + c * W, sums[r][c]);
}

// Calls f with n, from 1 to kMax, as a constant that a template takes.
template <int kMax, class F>
inline void with_constant(int n, const F& f) {
  if constexpr (kMax > 1)
    if (n < kMax) return with_constant<kMax - 1>(n, f);
  f(std::integral_constant<int, kMax>{});
}

template <bool kPairs>
void multiply_vectors(int rows, int columns, const Product& p) {
  with_constant<kVectorRows>(rows, [&](auto r) {
    with_constant<kColumns>(columns, [&](auto c) { multiply_tile<kPairs, r(), c()>(p); });
  });
}

#if KAITEN_AMX
constexpr int kTileSteps = kTileRowBytes / sizeof(float);

// Tiles 0 to 3 are sums, 4 steps of a and 5 of b, 6 and 7 the same of the last steps, which fill none.
class Tiles {
 public:
  void multiply(int rows, int columns, const Product& p) {
    const int tail = p.steps % kTileSteps;
    shape(rows, tail);
    // Awake before the sums are there (16 rows x 1024: 12.7 ms, so 10.9).
    _tile_stored(0, nowhere(), sizeof(VF));
    stored_for_tiles();
    begin(columns, p);
    const int64_t a_bytes = p.a_stride * sizeof(float), b_bytes = p.b_stride * sizeof(VF);
    const VF* b = p.b;
    int i = 0;
    for (; i + kTileSteps <= p.steps; i += kTileSteps, b += kTileSteps * p.b_stride) {
      _tile_loadd(4, p.a + i, a_bytes);
      _tile_loadd(5, b, b_bytes);
      _tile_dpbf16ps(0, 4, 5);
      if (columns < 2) continue;
      _tile_loadd(5, b + 1, b_bytes);
      _tile_dpbf16ps(1, 4, 5);
      if (columns < 3) continue;
      _tile_loadd(5, b + 2, b_bytes);
      _tile_dpbf16ps(2, 4, 5);
      if (columns < 4) continue;
      _tile_loadd(5, b + 3, b_bytes);
      _tile_dpbf16ps(3, 4, 5);
    }
    if (tail > 0) {
      _tile_loadd(6, p.a + i, a_bytes);
      _tile_loadd(7, b, b_bytes);
      _tile_dpbf16ps(0, 6, 7);
      if (columns > 1) {
        _tile_loadd(7, b + 1, b_bytes);
        _tile_dpbf16ps(1, 6, 7);
      }
      if (columns > 2) {
        _tile_loadd(7, b + 2, b_bytes);
        _tile_dpbf16ps(2, 6, 7);
      }
      if (columns > 3) {
        _tile_loadd(7, b + 3, b_bytes);
        _tile_dpbf16ps(3, 6, 7);
      }
    }
    end(columns, p);
  }

  void release() {
    if (rows_ > 0) _tile_release();
    rows_ = 0;
  }

 private:
  void shape(int rows, int tail) {
    if (rows == rows_ && (tail == 0 || tail == tail_)) return;
    rows_ = rows, tail_ = tail;
    TileConfig config;
    for (int c = 0; c < kColumns; ++c) config.shape(c, rows, sizeof(VF));
    config.shape(4, rows, kTileRowBytes);
    config.shape(5, kTileSteps, sizeof(VF));
    if (tail > 0) config.shape(6, rows, tail * sizeof(float)), config.shape(7, tail, sizeof(VF));
    config.load();
  }

  static void begin(int columns, const Product& p) {
    const int64_t bytes = p.stride * sizeof(float);
    if (!p.adds) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      return;
    }
    _tile_loadd(0, p.sums, bytes);
    if (columns > 1) _tile_loadd(1, p.sums + W, bytes);
    if (columns > 2) _tile_loadd(2, p.sums + 2 * W, bytes);
    if (columns > 3) _tile_loadd(3, p.sums + 3 * W, bytes);
  }

  static void end(int columns, const Product& p) {
    const int64_t bytes = p.stride * sizeof(float);
    _tile_stored(0, p.sums, bytes);
    if (columns > 1) _tile_stored(1, p.sums + W, bytes);
    if (columns > 2) _tile_stored(2, p.sums + 2 * W, bytes);
    if (columns > 3) _tile_stored(3, p.sums + 3 * W, bytes);
  }

  int rows_ = 0, tail_ = 0;
};
constexpr int kRowsMax = kTileRows;
// Positions whose values are laid out and mixed at a time: of pairs whole tiles, wherever a pass begins.
constexpr int kStretch = std::max(kTile, 2 * kTileSteps);
#else
struct Tiles {
  void release() {}
};
constexpr int kRowsMax = kVectorRows;
constexpr int kStretch = kTile;
#endif

}  // namespace kaiten
