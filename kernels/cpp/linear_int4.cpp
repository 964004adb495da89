// A linear with int4 weights: codes of 0 to 15, and for each output and group of 32 inputs a scale and a zero, a weight
// being (code - zero) * scale. That is brought to x's dtype on the way to the tiles of linear.cpp: exact in float32, as
// it has 12 bits of a bfloat16 scale and a code; rounded where pairs of bfloat16 are multiplied.
//
// Of a step the next four inputs' codes (pairs', where pairs are multiplied) lie in one 16-bit lane, the outputs of a
// panel side by side as in the other layouts: a load widens the lanes of a vector, and a shift gets each step's.
#include "linear_tiles.h"

namespace kaiten {
namespace {

constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kCodeBits = 4, kCodeMask = 15;
static_assert(kStride * kCodeBits == 16, "a round takes one lane");

// 32 inputs of a panel, in lines of the cache; without padding, as the zeros of three columns take half a byte each.
template <int kPer>
struct alignas(kLine) Group {
  uint16_t codes[kGroup / kPer / kStride][kPanel * kPer];
  bf16 scales[kPanel];
  uint16_t zeros[W];  // of output c * W + n: from bit 4 c of zeros[n] on
};
static_assert(sizeof(Group<1>) == sizeof(Group<2>) && sizeof(Group<1>) == kPanel * (kGroup / 2 + 2) + 2 * W);

inline VU load_lanes(const uint16_t* p) {
#if KAITEN_FMA && !KAITEN_AVX512  // as in widen
  return (VU)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  VH h;
  std::memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, VU);
#endif
}

inline VF code_of(VU lanes, int i) {
  const VU shifted = lanes >> (i * kCodeBits);
  return __builtin_convertvector((VI)(i + 1 < kStride ? shifted & kCodeMask : shifted), VF);
}

template <class T, bool kKeeps>
struct BringingInt4 {
  static constexpr bool kHasRounds = true;
  static constexpr int kPer = kPerStep<T>, kSteps = kGroup / kPer;
  const Group<kPer>* at;
  VF* kept;
  VU lanes[kColumns * kPer];
  // Weight = code * scale + offset, exact: both are of so few bits.
  VF scales[kColumns * kPer], offsets[kColumns * kPer];

  BringingInt4(const Group<kPer>* begin, VF* room) : at(begin), kept(room) {}

  inline void round(int64_t k) {
    const int64_t step = k % kSteps;
    if (step == 0) {
      at += k > 0;
      enter();
    }
    for (int c = 0; c < kColumns * kPer; ++c) lanes[c] = load_lanes(at->codes[step / kStride] + c * W);
  }

  inline void step(VF (&w)[kColumns], int i) {
    for (int c = 0; c < kColumns; ++c) {
      w[c] = brought(c, i);
      if constexpr (kKeeps) kept[c] = w[c];
    }
    if constexpr (kKeeps) kept += kColumns;
  }

 private:
  inline VF brought(int c, int i) const {
    VF weights[kPer];
    for (int p = 0; p < kPer; ++p) {
      const int lane = c * kPer + p;
      weights[p] = fma(code_of(lanes[lane], i), scales[lane], offsets[lane]);
    }
#if KAITEN_BF16_DOT
    if constexpr (kPer == 2) return (VF)_mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
#endif
    return weights[0];
  }

  inline void enter() {
    const VU zeros = load_lanes(at->zeros);
    for (int c = 0; c < kColumns; ++c) {
      const VF scale = load(at->scales + c * W), zero = code_of(zeros, c);
      const VF offset = VF{} - zero * scale;
      if constexpr (kPer == 2) {
        scales[2 * c] = zip_low(scale, scale), scales[2 * c + 1] = zip_high(scale, scale);
        offsets[2 * c] = zip_low(offset, offset), offsets[2 * c + 1] = zip_high(offset, offset);
      } else {
        scales[c] = scale, offsets[c] = offset;
      }
    }
  }
};

// As BroughtOver.
template <class T>
struct Int4 {
  static constexpr int kSteps = kGroup / kPerStep<T>;
  static constexpr int64_t kGroupBytes = sizeof(Group<kPerStep<T>>), kStepBytes = (kGroupBytes + kSteps - 1) / kSteps;
  static constexpr int64_t bytes(int64_t steps) { return steps / kSteps * kGroupBytes; }
  static constexpr int kRowsWaiting = 0;
  const Group<kPerStep<T>>* begin;
  VF* room;

  Int4(const char* panel, int64_t steps, int64_t tiles)
      : begin(reinterpret_cast<const Group<kPerStep<T>>*>(panel)), room(tiles > 1 ? room_for(steps * kColumns) : nullptr) {}

  template <class F>
  void with_source(int64_t tile, const F& multiply) const {
    if (tile > 0) return multiply(Ready{room});
    room ? multiply(BringingInt4<T, true>(begin, room)) : multiply(BringingInt4<T, false>(begin, nullptr));
  }
};

template <int kPer>
void pack_groups(const PackInt4& a, int64_t panel) {
  const int64_t groups = a.in / kGroup;
  Group<kPer>* to = static_cast<Group<kPer>*>(a.packed) + panel * groups;
  std::fill_n(reinterpret_cast<char*>(to), groups * sizeof *to, 0);
  for (int64_t n = 0; n < std::min<int64_t>(kPanel, a.out - panel * kPanel); ++n) {
    const int64_t output = panel * kPanel + n;
    const uint8_t* codes = a.codes + output * a.in / 2;
    for (int64_t g = 0; g < groups; ++g) {
      to[g].scales[n] = a.scales[output * groups + g];
      to[g].zeros[n % W] |= a.zeros[output * groups + g] << n / W * kCodeBits;
      for (int i = 0; i < kGroup; ++i) {
        const int64_t k = g * kGroup + i, step = i / kPer;
        const int code = codes[k / 2] >> k % 2 * kCodeBits & kCodeMask;
        to[g].codes[step / kStride][n * kPer + i % kPer] |= code << step % kStride * kCodeBits;
      }
    }
  }
}

}  // namespace

int64_t packed_int4_bytes(int64_t out, int64_t in) { return panels_of(out) * (in / kGroup) * sizeof(Group<1>); }

void pack_int4(const PackInt4& a) {
  for_each_item(panels_of(a.out), true, [&](int64_t i) {
    a.is_bf16 ? pack_groups<kPerStep<bf16>>(a, i) : pack_groups<kPerStep<float>>(a, i);
  });
}

void linear_int4(const Linear& a) {
  for_each_panel(a, [](const Linear& part, int64_t panel, int64_t next, bool is_new) {
    part.is_bf16 ? multiply_panel<bf16, Int4>(part, panel, next, is_new)
                 : multiply_panel<float, Int4>(part, panel, next, is_new);
  });
}

}  // namespace kaiten
