// The parts of simd.h that processors do each in their own way: on 64-bit ARM, every one of which has NEON and fused
// products; with +bf16 (ARMv8.6: Neoverse V1 and N2, and later) pairs of bfloat16 are multiplied as well. BFDOT rounds a
// pair's products and their sum to odd and flushes what is subnormal, alike on each processor.
#pragma once

#include <arm_neon.h>

#include "types.h"

namespace kaiten {

#define KAITEN_LOW 0, 4, 1, 5
#define KAITEN_HIGH 2, 6, 3, 7

inline VF fma(VF a, VF b, VF c) { return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }

inline VU widen_lanes(VH h) { return (VU)vmovl_u16((uint16x4_t)h); }
inline VF widen(VH h) { return (VF)vshll_n_u16((uint16x4_t)h, 16); }
inline VH low_halves(VU v) { return (VH)vmovn_u32((uint32x4_t)v); }

inline VF load_codes(const int8_t* p) {
  int8_t lanes[8] = {};
  std::memcpy(lanes, p, W);
  return (VF)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vld1_s8(lanes)))));
}

inline bool any(VI lanes) { return vmaxvq_u32((uint32x4_t)lanes) != 0; }

inline Halves multiply_wide(VU a, uint32_t b) {
  const uint32x4_t x = (uint32x4_t)a, m = vdupq_n_u32(b);
  const uint32x4_t low = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(x), vget_low_u32(m)));
  const uint32x4_t high = vreinterpretq_u32_u64(vmull_high_u32(x, m));
  return {(VU)vuzp1q_u32(low, high), (VU)vuzp2q_u32(low, high)};
}

inline void transpose(VF* rows) {
  const auto pairs = [](float32x4_t a, float32x4_t b, float64x2_t* to) {
    to[0] = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), to[1] = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
  };
  float64x2_t above[2], below[2];
  pairs((float32x4_t)rows[0], (float32x4_t)rows[1], above);
  pairs((float32x4_t)rows[2], (float32x4_t)rows[3], below);
  KAITEN_UNROLL for (int i = 0; i < 2; ++i) {
    rows[i] = (VF)vtrn1q_f64(above[i], below[i]), rows[i + 2] = (VF)vtrn2q_f64(above[i], below[i]);
  }
}

// 2^x up to 127 within 2^-14 of its value, 0 below -126: for results that are rounded to bfloat16.
inline VF vexp2_coarse(VF x) {
  const float32x4_t n = vrndnq_f32((float32x4_t)x);
  const VF f = x - (VF)n;
  VF y = splat(9.6181291e-3f);
  y = fma(y, f, splat(5.5504109e-2f));
  y = fma(y, f, splat(2.4022651e-1f));
  y = fma(y, f, splat(6.9314718e-1f));
  y = fma(y, f, splat(1.0f));
  const VF power = (VF)vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
  return x < -126.0f ? VF{} : y * power;
}

#if KAITEN_BF16_DOT
inline VH narrow_at_once(VF v) { return (VH)vcvt_bf16_f32((float32x4_t)v); }

// Sums, and to each the product of the first of its pair and of the second.
inline VF dot_pairs(VF sums, VF a, VF b) {
  return (VF)vbfdotq_f32((float32x4_t)sums, (bfloat16x8_t)a, (bfloat16x8_t)b);
}

// 2 W numbers in their order, rounded: W pairs.
inline VF pairs_of(VF low, VF high) {
  return (VF)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
}

// GCC 12 takes a vector of these as a constant for ones of float16, which have other bits.
inline VF pairs_of_ones() {
  uint32x4_t ones = vdupq_n_u32(0x3F803F80u);
  asm("" : "+w"(ones));
  return (VF)ones;
}

inline VF load_some_pairs(const bf16* p, int n) {
  bf16 lanes[2 * W] = {};
  std::memcpy(lanes, p, (n < 2 * W ? n : 2 * W) * sizeof(bf16));
  VF pairs;
  std::memcpy(&pairs, lanes, sizeof pairs);
  return pairs;
}

// 16 bits of a, 16 of b, in turns; 2 W numbers of each.
inline void interleave_halves(VF a, VF b, VF* to) {
  to[0] = (VF)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b), to[1] = (VF)vzip2q_u16((uint16x8_t)a, (uint16x8_t)b);
}
#endif

}  // namespace kaiten
