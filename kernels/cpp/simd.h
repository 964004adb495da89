// Vectors of W float32 lanes over the compiler's vector extensions; what processors do each in their own way is in simd/.
// Compiled with -ffp-contract=off: a product and a sum are fused exactly where fma() says so, so that every
// instantiation of a loop rounds alike and a result does not depend on which one computed it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "simd/types.h"

#if KAITEN_NEON
#include "simd/neon.h"
#elif KAITEN_FMA
#include "simd/x86.h"
#else
#include "simd/plain.h"
#endif

namespace kaiten {

constexpr float kInf = std::numeric_limits<float>::infinity();

inline VF load(const float* p) {
  VF v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline VF load(const bf16* p) {
  VH h;
  std::memcpy(&h, p, sizeof h);
  return widen(h);
}

// The first n lanes; the others are zero and their memory is not touched.
inline VF load(const float* p, int n) {
  if (n >= W) return load(p);
#if KAITEN_AVX512
  return load_some(p, n);
#else
  float lanes[W] = {};
  std::memcpy(lanes, p, n * sizeof(float));
  return load(lanes);
#endif
}

inline VF load(const bf16* p, int n) {
  if (n >= W) return load(p);
#if KAITEN_AVX512
  return load_some(p, n);
#else
  bf16 lanes[W] = {};
  std::memcpy(lanes, p, n * sizeof(bf16));
  return load(lanes);
#endif
}

// Round to nearest even; a NaN stays a NaN.
inline VH narrow(VF v) {
#if KAITEN_BF16_DOT
  return narrow_at_once(v);
#endif
  VU bits = (VU)v;
  VU rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  VU quiet = VU{} + 0x7FC0u;
  return low_halves((VU)(v == v) ? rounded : quiet);
}

inline void store(float* p, VF v) { std::memcpy(p, &v, sizeof v); }
inline void store(bf16* p, VF v) {
  VH h = narrow(v);
  std::memcpy(p, &h, sizeof h);
}

// The first n lanes. A copy of W lanes, whose size is known, is one instruction.
inline void store(float* p, VF v, int n) {
  if (n >= W) return store(p, v);
  std::memcpy(p, &v, n * sizeof(float));
}
inline void store(bf16* p, VF v, int n) {
  if (n >= W) return store(p, v);
  VH h = narrow(v);
  std::memcpy(p, &h, n * sizeof(bf16));
}

inline VF vmax(VF a, VF b) { return a > b ? a : b; }
inline VF vmin(VF a, VF b) { return a < b ? a : b; }

inline VI lane_ids() {
  VI ids;
  for (int i = 0; i < W; ++i) ids[i] = i;
  return ids;
}

// Lanes from n on become `fill`.
inline VF keep_first(VF v, int n, float fill) { return lane_ids() < (VI{} + n) ? v : splat(fill); }

template <int kBy, size_t... kLane>
inline VF rotate(VF v, std::index_sequence<kLane...>) { return __builtin_shufflevector(v, v, ((kLane + kBy) % W)...); }
template <int kBy>
inline VF rotate(VF v) { return rotate<kBy>(v, std::make_index_sequence<W>{}); }

// Always the same order: halves, quarters, ...
inline float sum_lanes(VF v) {
  if constexpr (W == 16) v = v + rotate<8>(v);
  if constexpr (W >= 8) v = v + rotate<4>(v);
  v = v + rotate<2>(v);
  return v[0] + v[1];
}

inline float max_lanes(VF v) {
  if constexpr (W == 16) v = vmax(v, rotate<8>(v));
  if constexpr (W >= 8) v = vmax(v, rotate<4>(v));
  v = vmax(v, rotate<2>(v));
  return v[0] > v[1] ? v[0] : v[1];
}

template <class V>
inline V zip_low(V a, V b) { return __builtin_shufflevector(a, b, KAITEN_LOW); }
template <class V>
inline V zip_high(V a, V b) { return __builtin_shufflevector(a, b, KAITEN_HIGH); }

// e^x within 2 units in the last place for x <= 0 (below -87: 0) and up to 88.
inline VF vexp(VF x) {
  const VF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  VF n = fma(x, splat(1.44269504f), magic);
  VI exponent = (VI)n - (VI)magic;
  n = n - magic;
  VF r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  VF y = splat(1.9875691500e-4f);
  y = fma(y, r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  y = fma(y, r * r, r + 1.0f);
  VF scaled = y * (VF)((exponent + 127) << 23);
  return x < -87.0f ? VF{} : scaled;
}

// ln x for normal x > 0.
inline VF vlog(VF x) {
  VI bits = (VI)x;
  VI exponent = ((bits >> 23) & 0xFF) - 126;
  VF m = (VF)((bits & 0x007FFFFF) | 0x3F000000);  // [0.5, 1)
  VI is_small = m < 0.707106781186547524f;
  exponent = exponent + is_small;  // true is -1
  m = (is_small ? m + m : m) - 1.0f;
  VF z = m * m;
  VF y = splat(7.0376836292e-2f);
  y = fma(y, m, splat(-1.1514610310e-1f));
  y = fma(y, m, splat(1.1676998740e-1f));
  y = fma(y, m, splat(-1.2420140846e-1f));
  y = fma(y, m, splat(1.4249322787e-1f));
  y = fma(y, m, splat(-1.6668057665e-1f));
  y = fma(y, m, splat(2.0000714765e-1f));
  y = fma(y, m, splat(-2.4999993993e-1f));
  y = fma(y, m, splat(3.3333331174e-1f));
  y = y * m * z;
  VF e = __builtin_convertvector(exponent, VF);
  y = fma(e, splat(-2.12194440e-4f), y);
  y = fma(z, splat(-0.5f), y);
  return fma(e, splat(0.693359375f), m + y);
}

}  // namespace kaiten
