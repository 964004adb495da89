// Vectors of W float32 lanes over the compiler's vector extensions: 16 lanes with AVX-512, 8 otherwise.
// Compiled with -ffp-contract=off: a product and a sum are fused exactly where fma() says so, so that every
// instantiation of a loop rounds alike and a result does not depend on which one computed it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KAITEN_AVX512 1
#else
#define KAITEN_AVX512 0
#endif
#if KAITEN_AVX512 && defined(__AVX512BF16__)
#define KAITEN_BF16_DOT 1
#else
#define KAITEN_BF16_DOT 0
#endif

#if KAITEN_AVX512 || (defined(__AVX2__) && defined(__FMA__))
#define KAITEN_FMA 1
#else
#define KAITEN_FMA 0
#endif

// Before a loop over an array of sums: the compiler keeps the array in registers only if it unrolls the loop early.
#define KAITEN_UNROLL _Pragma("GCC unroll 16")

namespace kaiten {

constexpr int W = KAITEN_AVX512 ? 16 : 8;
using bf16 = uint16_t;

typedef float VF __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef uint32_t VU __attribute__((vector_size(4 * W)));
typedef uint16_t VH __attribute__((vector_size(2 * W)));

constexpr float kInf = std::numeric_limits<float>::infinity();

inline VF splat(float x) { return x - VF{}; }
inline VU splat(uint32_t x) { return x - VU{}; }

inline VF fma(VF a, VF b, VF c) {
#if KAITEN_AVX512
  return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif KAITEN_FMA
  return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// For AVX2 the compiler makes five instructions of a conversion between 16 and 32 bits.
inline VF widen(VH h) {
#if KAITEN_FMA && !KAITEN_AVX512
  return (VF)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
  return (VF)(__builtin_convertvector(h, VU) << 16);
#endif
}

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
  return (VF)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
  float lanes[W] = {};
  std::memcpy(lanes, p, n * sizeof(float));
  return load(lanes);
#endif
}

inline VF load(const bf16* p, int n) {
  if (n >= W) return load(p);
#if KAITEN_AVX512
  return widen((VH)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
#else
  bf16 lanes[W] = {};
  std::memcpy(lanes, p, n * sizeof(bf16));
  return load(lanes);
#endif
}

// Round to nearest even; a NaN stays a NaN.
inline VH narrow(VF v) {
#if KAITEN_BF16_DOT
  return (VH)_mm512_cvtneps_pbh((__m512)v);
#endif
  VU bits = (VU)v;
  VU rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  VU quiet = VU{} + 0x7FC0u;
  VU picked = (VU)(v == v) ? rounded : quiet;
#if KAITEN_FMA && !KAITEN_AVX512
  const __m256i packed = _mm256_packus_epi32((__m256i)picked, (__m256i)picked);
  return (VH)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return __builtin_convertvector(picked, VH);
#endif
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
  v = v + rotate<4>(v);
  v = v + rotate<2>(v);
  return v[0] + v[1];
}

inline float max_lanes(VF v) {
  if constexpr (W == 16) v = vmax(v, rotate<8>(v));
  v = vmax(v, rotate<4>(v));
  v = vmax(v, rotate<2>(v));
  return v[0] > v[1] ? v[0] : v[1];
}

#if KAITEN_AVX512
#define KAITEN_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define KAITEN_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
#define KAITEN_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define KAITEN_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#endif
template <class V>
inline V zip_low(V a, V b) { return __builtin_shufflevector(a, b, KAITEN_LOW); }
template <class V>
inline V zip_high(V a, V b) { return __builtin_shufflevector(a, b, KAITEN_HIGH); }

#if KAITEN_BF16_DOT
// 16 bits of a, 16 of b, in turns; 2 W numbers of each.
inline void interleave_halves(VF a, VF b, VF* to) {
  typedef uint16_t V16 __attribute__((vector_size(64)));
  to[0] = (VF)__builtin_shufflevector((V16)a, (V16)b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9,
                                      41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
  to[1] = (VF)__builtin_shufflevector((V16)a, (V16)b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                      24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
}
#endif

// W x W in place. Within quarters of 16 lanes first: the processor moves numbers between quarters more slowly.
inline void transpose(VF* rows) {
  VF other[W];
#if KAITEN_AVX512
  KAITEN_UNROLL for (int i = 0; i < 16; i += 2) {
    const __m512 a = (__m512)rows[i], b = (__m512)rows[i + 1];
    other[i] = (VF)_mm512_unpacklo_ps(a, b), other[i + 1] = (VF)_mm512_unpackhi_ps(a, b);
  }
  KAITEN_UNROLL for (int i = 0; i < 16; i += 4)
    KAITEN_UNROLL for (int j = 0; j < 2; ++j) {
      const __m512d a = (__m512d)other[i + j], b = (__m512d)other[i + j + 2];
      rows[i + 2 * j] = (VF)_mm512_unpacklo_pd(a, b), rows[i + 2 * j + 1] = (VF)_mm512_unpackhi_pd(a, b);
    }
  // Now 4 x 4 quarters, each transposed: row 4 i + j holds in quarter q numbers 4 q + j of rows 4 i to 4 i + 3.
  const auto even = [](VF a, VF b) { return (VF)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88); };
  const auto odd = [](VF a, VF b) { return (VF)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xDD); };
  KAITEN_UNROLL for (int i = 0; i < 16; i += 8)
    KAITEN_UNROLL for (int j = i; j < i + 4; ++j)
      other[j] = even(rows[j], rows[j + 4]), other[j + 4] = odd(rows[j], rows[j + 4]);
  KAITEN_UNROLL for (int j = 0; j < 8; ++j)
    rows[j] = even(other[j], other[j + 8]), rows[j + 8] = odd(other[j], other[j + 8]);
#elif KAITEN_FMA
  KAITEN_UNROLL for (int i = 0; i < 8; i += 2) {
    const __m256 a = (__m256)rows[i], b = (__m256)rows[i + 1];
    other[i] = (VF)_mm256_unpacklo_ps(a, b), other[i + 1] = (VF)_mm256_unpackhi_ps(a, b);
  }
  KAITEN_UNROLL for (int i = 0; i < 8; i += 4)
    KAITEN_UNROLL for (int j = 0; j < 2; ++j) {
      const __m256d a = (__m256d)other[i + j], b = (__m256d)other[i + j + 2];
      rows[i + 2 * j] = (VF)_mm256_unpacklo_pd(a, b), rows[i + 2 * j + 1] = (VF)_mm256_unpackhi_pd(a, b);
    }
  // Now 2 x 2 halves, each transposed.
  KAITEN_UNROLL for (int j = 0; j < 4; ++j) {
    const __m256 a = (__m256)rows[j], b = (__m256)rows[j + 4];
    rows[j] = (VF)_mm256_permute2f128_ps(a, b, 0x20), rows[j + 4] = (VF)_mm256_permute2f128_ps(a, b, 0x31);
  }
#else
  for (int step = 1; step < W; step *= 2) {  // log2(W) perfect shuffles of the rows
    KAITEN_UNROLL for (int i = 0; i < W / 2; ++i)
      other[2 * i] = zip_low(rows[i], rows[i + W / 2]), other[2 * i + 1] = zip_high(rows[i], rows[i + W / 2]);
    std::memcpy(rows, other, sizeof other);
  }
#endif
}

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

#if KAITEN_AVX512
// 2^x up to 127 within 2^-14 of its value: for results that are rounded to bfloat16.
inline VF vexp2_coarse(VF x) {
  const VF n = (VF)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const VF f = x - n;
  VF y = splat(9.6181291e-3f);
  y = fma(y, f, splat(5.5504109e-2f));
  y = fma(y, f, splat(2.4022651e-1f));
  y = fma(y, f, splat(6.9314718e-1f));
  y = fma(y, f, splat(1.0f));
  return (VF)_mm512_scalef_ps((__m512)y, (__m512)n);
}
#endif

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
