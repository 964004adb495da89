// The parts of simd.h that processors do each in their own way, for one of which nothing is known.
#pragma once

#include "types.h"

namespace kaiten {

inline VF fma(VF a, VF b, VF c) { return a * b + c; }

inline VF widen(VH h) { return (VF)(__builtin_convertvector(h, VU) << 16); }
inline VU widen_lanes(VH h) { return __builtin_convertvector(h, VU); }
inline VH low_halves(VU v) { return __builtin_convertvector(v, VH); }

inline VF load_codes(const int8_t*) { return VF{}; }  // there are no linears: has_linear

inline bool any(VI lanes) {
  for (int i = 0; i < W; ++i)
    if (lanes[i]) return true;
  return false;
}

inline Halves multiply_wide(VU a, uint32_t b) {
  Halves product;
  for (int i = 0; i < W; ++i) {
    const uint64_t wide = uint64_t(a[i]) * b;
    product.low[i] = uint32_t(wide), product.high[i] = uint32_t(wide >> 32);
  }
  return product;
}

#define KAITEN_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define KAITEN_HIGH 4, 12, 5, 13, 6, 14, 7, 15

inline void transpose(VF* rows) {
  VF other[W];
  for (int step = 1; step < W; step *= 2) {  // log2(W) perfect shuffles of the rows
    KAITEN_UNROLL for (int i = 0; i < W / 2; ++i) {
      const VF a = rows[i], b = rows[i + W / 2];
      other[2 * i] = __builtin_shufflevector(a, b, KAITEN_LOW);
      other[2 * i + 1] = __builtin_shufflevector(a, b, KAITEN_HIGH);
    }
    std::memcpy(rows, other, sizeof other);
  }
}

}  // namespace kaiten
