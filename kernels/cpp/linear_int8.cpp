// A linear with int8 weights and a scale per output: the panels of linear.cpp with a byte for each weight. An int8 is
// exact in bfloat16 and in float32, so a panel is brought to x's dtype and goes through the same tiles; the scale is
// applied to the float32 sums. Memory is read half (a quarter) as much; the sums cost what they cost.
//
// The first tile brings the weights over on its way, so that this hides behind memory or sums. Where more tiles follow
// it keeps them in a place of the thread's own, which stays in the cache: a panel is brought over once per use.
#include <cstdlib>
#include <memory>
#include <new>

#include "linear_tiles.h"

namespace kaiten {
namespace {

template <class T>
inline VF brought_over(const int8_t* codes);

template <>
inline VF brought_over<float>(const int8_t* codes) {
#if KAITEN_AVX512
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return (VF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif KAITEN_FMA
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  return (VF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  (void)codes;
  return VF{};
#endif
}

template <>
inline VF brought_over<bf16>(const int8_t* codes) {
#if KAITEN_BF16_DOT
  const VF low = brought_over<float>(codes), high = brought_over<float>(codes + W);
  return (VF)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
  VH pairs;
  std::memcpy(&pairs, codes, sizeof pairs);
  const VI both = (VI)__builtin_convertvector(pairs, VU);
  const VU first = (VU)__builtin_convertvector((both << 24) >> 24, VF);
  const VU second = (VU)__builtin_convertvector((both << 16) >> 24, VF);
  return (VF)(first >> 16 | (second & 0xFFFF0000u));
#endif
}

template <class T, bool kKeeps>
struct Codes {
  const int8_t* at;
  VF* kept;

  inline void step(VF (&w)[kColumns]) {
    for (int c = 0; c < kColumns; ++c) {
      w[c] = brought_over<T>(at + c * W * kPerStep<T>);
      if constexpr (kKeeps) kept[c] = w[c];
    }
    at += kPanel * kPerStep<T>;
    if constexpr (kKeeps) kept += kColumns;
  }
};

// Room for one panel, as large as any that this thread has seen.
VF* room_for(int64_t vectors) {
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

template <class T>
struct AsCodes {
  static constexpr int64_t kStepBytes = kPanel * kPerStep<T>;
  // Bringing over takes as long as reading so few bytes: fetched close ahead, 4 rows took 11.8 ms where far ahead they
  // take 7.6, and one 5.6 either way (2026-11-20, Zen 4, 125M parameters, one thread).
  static constexpr int kRowsWaiting = 0;
  const int8_t* begin;
  VF* room;

  AsCodes(const char* panel, int64_t steps, int64_t tiles)
      : begin(reinterpret_cast<const int8_t*>(panel)), room(tiles > 1 ? room_for(steps * kColumns) : nullptr) {}

  template <class F>
  void with_source(int64_t tile, const F& multiply) const {
    if (tile > 0) return multiply(Ready{room});
    room ? multiply(Codes<T, true>{begin, room}) : multiply(Codes<T, false>{begin, nullptr});
  }
};

// kPer codes of an output for each step along K, the outputs of a panel side by side.
void pack_panel(const Pack& a, int64_t panel, int64_t per) {
  const int64_t steps = a.in / per;
  int8_t* to = static_cast<int8_t*>(a.packed) + panel * steps * kPanel * per;
  for (int n = 0; n < kPanel; ++n) {
    const int64_t output = panel * kPanel + n;
    const int8_t* from = static_cast<const int8_t*>(a.weight) + output * a.in;
    for (int64_t k = 0; k < steps; ++k)
      for (int64_t i = 0; i < per; ++i) to[(k * kPanel + n) * per + i] = output < a.out ? from[k * per + i] : 0;
  }
}

template <class T>
void unpack_row(const Unpack& a, int64_t row) {
  constexpr int64_t kPer = kPerStep<T>;
  const int64_t steps = a.in / kPer, panel = a.ids[row] / kPanel, n = a.ids[row] % kPanel;
  const int8_t* from = static_cast<const int8_t*>(a.packed) + (panel * steps * kPanel + n) * kPer;
  const float scale = a.scales[a.ids[row]];
  T* to = static_cast<T*>(a.rows) + row * a.in;
  for (int64_t k = 0; k < steps; ++k)
    for (int64_t i = 0; i < kPer; ++i) store(to + k * kPer + i, splat(from[k * kPanel * kPer + i] * scale), 1);
}

}  // namespace

void pack_int8(const Pack& a) {
  const int64_t per = a.is_bf16 ? kPerStep<bf16> : kPerStep<float>;
  for_each_item(panels_of(a.out), true, [&](int64_t i) { pack_panel(a, i, per); });
}

void unpack_int8_rows(const Unpack& a) {
  for_each_item(a.count, a.count * a.in > kSerialFlops,
                [&](int64_t i) { a.is_bf16 ? unpack_row<bf16>(a, i) : unpack_row<float>(a, i); });
}

void linear_int8(const Linear& a) {
  for_each_panel(a, [](const Linear& part, int64_t panel, int64_t next, bool is_new) {
    part.is_bf16 ? multiply_panel<bf16, AsCodes>(part, panel, next, is_new)
                 : multiply_panel<float, AsCodes>(part, panel, next, is_new);
  });
}

}  // namespace kaiten
