// What a vector is on the processor that is compiled for: W float32 lanes by the compiler's vector extensions, 16 with
// AVX-512, 4 with NEON, else 8.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KAITEN_AVX512 1
#else
#define KAITEN_AVX512 0
#endif
#if defined(__aarch64__) && defined(__ARM_NEON)
#define KAITEN_NEON 1
#else
#define KAITEN_NEON 0
#endif

// Products of pairs of bfloat16, summed in float32.
#if (KAITEN_AVX512 && defined(__AVX512BF16__)) || (KAITEN_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define KAITEN_BF16_DOT 1
#else
#define KAITEN_BF16_DOT 0
#endif

// And of whole tiles of them.
#if (KAITEN_AVX512 && KAITEN_BF16_DOT && defined(__AMX_BF16__)) || defined(KAITEN_AMX_PLAYED_BY)
#define KAITEN_AMX 1
#else
#define KAITEN_AMX 0
#endif

#if KAITEN_AVX512 || KAITEN_NEON || (defined(__AVX2__) && defined(__FMA__))
#define KAITEN_FMA 1
#else
#define KAITEN_FMA 0
#endif

// vexp2_coarse is there.
#define KAITEN_EXP2_COARSE (KAITEN_AVX512 || KAITEN_NEON)

// Before a loop over an array of sums: the compiler keeps the array in registers only if it unrolls the loop early.
#define KAITEN_UNROLL _Pragma("GCC unroll 16")
// The same, where a panel has so many vectors that the compiler does not do so by itself.
#if KAITEN_NEON
#define KAITEN_UNROLL_WIDE KAITEN_UNROLL
#else
#define KAITEN_UNROLL_WIDE
#endif

namespace kaiten {

constexpr int W = KAITEN_AVX512 ? 16 : KAITEN_NEON ? 4 : 8;
using bf16 = uint16_t;

typedef float VF __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef uint32_t VU __attribute__((vector_size(4 * W)));
typedef uint16_t VH __attribute__((vector_size(2 * W)));

inline VF splat(float x) { return x - VF{}; }
inline VU splat(uint32_t x) { return x - VU{}; }

struct Halves {
  VU low, high;
};

}  // namespace kaiten
