// The parts of simd.h that processors do each in their own way: with AVX-512, or with AVX2 and FMA.
#pragma once

#include <immintrin.h>

#include "types.h"

namespace kaiten {

#if KAITEN_AVX512
#define KAITEN_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define KAITEN_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31

inline VF fma(VF a, VF b, VF c) { return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

inline VF widen(VH h) { return (VF)(__builtin_convertvector(h, VU) << 16); }
inline VU widen_lanes(VH h) { return __builtin_convertvector(h, VU); }
inline VH low_halves(VU v) { return __builtin_convertvector(v, VH); }

// The first n lanes, fewer than W; the others are zero.
inline VF load_some(const float* p, int n) { return (VF)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
inline VF load_some(const bf16* p, int n) { return widen((VH)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p)); }

inline VF load_codes(const int8_t* p) {
  return (VF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

inline bool any(VI lanes) { return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0; }

inline Halves multiply_wide(VU a, uint32_t b) {
  const __m512i m = _mm512_set1_epi32(static_cast<int>(b)), x = (__m512i)a;
  const __m512i even = _mm512_mul_epu32(x, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);
  return {(VU)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32)),
          (VU)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd)};
}

// Within quarters of 16 lanes first: the processor moves numbers between quarters more slowly.
inline void transpose(VF* rows) {
  VF other[W];
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
}

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

#if KAITEN_BF16_DOT
inline VH narrow_at_once(VF v) { return (VH)_mm512_cvtneps_pbh((__m512)v); }

// Sums, and to each the product of the first of its pair and of the second.
inline VF dot_pairs(VF sums, VF a, VF b) { return (VF)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b); }

// 2 W numbers in their order, rounded: W pairs.
inline VF pairs_of(VF low, VF high) { return (VF)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

inline VF pairs_of_ones() { return (VF)splat(0x3F803F80u); }

inline VF load_some_pairs(const bf16* p, int n) {
  return (VF)_mm512_maskz_loadu_epi16(n < 2 * W ? (1u << n) - 1 : ~0u, p);
}

// 16 bits of a, 16 of b, in turns; 2 W numbers of each.
inline void interleave_halves(VF a, VF b, VF* to) {
  typedef uint16_t V16 __attribute__((vector_size(64)));
  to[0] = (VF)__builtin_shufflevector((V16)a, (V16)b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9,
                                      41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
  to[1] = (VF)__builtin_shufflevector((V16)a, (V16)b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                      24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
}
#endif

#else  // AVX2
#define KAITEN_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define KAITEN_HIGH 4, 12, 5, 13, 6, 14, 7, 15

inline VF fma(VF a, VF b, VF c) { return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

// The compiler makes five instructions of a conversion between 16 and 32 bits.
inline VU widen_lanes(VH h) { return (VU)_mm256_cvtepu16_epi32((__m128i)h); }
inline VF widen(VH h) { return (VF)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16); }
inline VH low_halves(VU v) {
  const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  return (VH)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

inline VF load_codes(const int8_t* p) {
  return (VF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

inline bool any(VI lanes) { return _mm256_movemask_epi8((__m256i)lanes) != 0; }

inline Halves multiply_wide(VU a, uint32_t b) {
  const __m256i m = _mm256_set1_epi32(static_cast<int>(b)), x = (__m256i)a;
  const __m256i even = _mm256_mul_epu32(x, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), m);
  return {(VU)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA),
          (VU)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA)};
}

inline void transpose(VF* rows) {
  VF other[W];
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
}
#endif

}  // namespace kaiten
