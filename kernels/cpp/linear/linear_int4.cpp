// A linear with int4 weights: codes of 0 to 15, and for each output and group of 32 inputs a scale and a zero, a weight
// being (code - zero) * scale. That is brought to x's dtype on the way to the tiles of linear.cpp: exact in float32, as
// it has 12 bits of a bfloat16 scale and a code; rounded where pairs of bfloat16 are multiplied.
//
// Of a step the next four inputs' codes (pairs', where pairs are multiplied) lie in one 16-bit lane, the outputs of a
// panel side by side as in the other layouts. A load widens the lanes of a vector, and a code becomes a number where it
// lies: below the exponent of the power of two whose mantissa has ones in that place, it is added to that power.
#include "amx.h"

namespace kaiten {
namespace {

constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kCodeBits = 4, kCodeMask = 15;
static_assert(kStride * kCodeBits == 16, "a round takes one lane");

constexpr int kZerosPerLane = 16 / kCodeBits, kZeroVectors = (kColumns + kZerosPerLane - 1) / kZerosPerLane;

// 32 inputs of a panel, in lines of the cache; without padding, as the zeros of a panel take half a byte each.
template <int kPer>
struct alignas(kLine) Group {
  uint16_t codes[kGroup / kPer / kStride][kPanel * kPer];
  bf16 scales[kPanel];
  uint16_t zeros[kZeroVectors][W];  // of output c * W + n: from bit 4 (c % 4) of zeros[c / 4][n] on
};
static_assert(sizeof(Group<1>) == sizeof(Group<2>) &&
              sizeof(Group<1>) == kPanel * (kGroup / 2 + 2) + 2 * W * kZeroVectors);

inline VU load_lanes(const uint16_t* p) {
  VH h;
  std::memcpy(&h, p, sizeof h);
  return widen_lanes(h);
}

// The places that a code is shifted to, from bit 8 on of a lane: where one instruction takes and adds, a second one saves
// shifts. What is added there, as a number and as a float32's bits, is not so much that 16 bits times a scale's 8 were not
// exact; of scales from 2^112 on it is no number any more.
constexpr int kPlaces = KAITEN_AVX512 ? 2 : 1, kPlaceBit = 8;
constexpr float kAdded[] = {32768.0f, 2048.0f};
constexpr uint32_t kAddedBits[] = {0x47000000, 0x45000000};

// kAdded[i % kPlaces] + the i-th code of each lane.
inline VF code_of(VU lanes, int i) {
  const int place = i % kPlaces, bit = kPlaceBit + place * kCodeBits, up = bit - i * kCodeBits;
  const VU there = up < 0 ? lanes >> -up : lanes << up;
  return (VF)((there & uint32_t(kCodeMask << bit)) | kAddedBits[place]);
}

template <class T>
struct BringingInt4 {
  static constexpr bool kHasRounds = true;
  static constexpr int kPer = kPerStep<T>, kSteps = kGroup / kPer;
  const Group<kPer>* at;
  VU lanes[kColumns * kPer];
  // Weight = code_of * scale + offset, exact: all are of so few bits.
  VF scales[kColumns * kPer], offsets[kPlaces][kColumns * kPer];

  explicit BringingInt4(const Group<kPer>* begin) : at(begin) {}

  inline void round(int64_t k) {
    const int64_t step = k % kSteps;
    if (step == 0) {
      at += k > 0;
      enter();
    }
    KAITEN_UNROLL_WIDE for (int c = 0; c < kColumns * kPer; ++c) lanes[c] = load_lanes(at->codes[step / kStride] + c * W);
  }

  inline void step(VF (&w)[kColumns], int i) {
    KAITEN_UNROLL_WIDE for (int c = 0; c < kColumns; ++c) w[c] = brought(c, i);
  }

 private:
  inline VF brought(int c, int i) const {
    VF weights[kPer];
    KAITEN_UNROLL_WIDE for (int p = 0; p < kPer; ++p) {
      const int lane = c * kPer + p;
      weights[p] = fma(code_of(lanes[lane], i), scales[lane], offsets[i % kPlaces][lane]);
    }
#if KAITEN_BF16_DOT
    if constexpr (kPer == 2) return pairs_of(weights[0], weights[1]);
#endif
    return weights[0];
  }

  inline void enter() {
    VU zeros[kZeroVectors];
    KAITEN_UNROLL_WIDE for (int v = 0; v < kZeroVectors; ++v) zeros[v] = load_lanes(at->zeros[v]);
    KAITEN_UNROLL_WIDE for (int c = 0; c < kColumns; ++c) {
      const VF scale = load(at->scales + c * W);
      const int nth = c % kZerosPerLane;
      const VF zero = code_of(zeros[c / kZerosPerLane], nth) - kAdded[nth % kPlaces];
      spread(scales, c, scale);
      KAITEN_UNROLL for (int place = 0; place < kPlaces; ++place)
        spread(offsets[place], c, VF{} - (zero + kAdded[place]) * scale);
    }
  }

  // What belongs to each output of a column, to the numbers of each.
  static inline void spread(VF (&to)[kColumns * kPer], int c, VF of_outputs) {
    if constexpr (kPer == 2)
      to[2 * c] = zip_low(of_outputs, of_outputs), to[2 * c + 1] = zip_high(of_outputs, of_outputs);
    else
      to[c] = of_outputs;
  }
};

// Several rows take a panel that was brought over before: with the sums of a tile in the registers nothing is left for the
// way (4 rows of 50M weights: 10.6 ms of one thread, so 8.8; one row 3.9, int8 5.7 and 3.7; 2026-11-25, Zen 3).
template <class T>
struct Int4 {
  static constexpr int kSteps = kGroup / kPerStep<T>;
  static constexpr int64_t kGroupBytes = sizeof(Group<kPerStep<T>>), kStepBytes = (kGroupBytes + kSteps - 1) / kSteps;
  static constexpr int64_t bytes(int64_t steps) { return steps / kSteps * kGroupBytes; }
  static constexpr int kRowsWaiting = 0;
  const Group<kPerStep<T>>* begin;
  VF* room;

  Int4(const char* panel, int64_t steps, int64_t rows)
      : begin(reinterpret_cast<const Group<kPerStep<T>>*>(panel)), room(rows > 1 ? room_for(steps * kColumns) : nullptr) {
    if (!room) return;
    BringingInt4<T> source(begin);
    for (int64_t k = 0; k < steps; k += kStride) {
      source.round(k);
      KAITEN_UNROLL for (int i = 0; i < kStride; ++i) {
        VF w[kColumns];
        source.step(w, i);
        KAITEN_UNROLL_WIDE for (int c = 0; c < kColumns; ++c) room[(k + i) * kColumns + c] = w[c];
      }
    }
  }

  BringingInt4<T> alone() const { return BringingInt4<T>(begin); }

  template <class F>
  void with_kept(int64_t, const F& multiply) const { multiply(Ready{room}); }

  template <class F>
  void with_source(int64_t tile, const F& multiply) const {
    room ? with_kept(tile, multiply) : multiply(alone());
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
      const int64_t column = n / W;
      to[g].zeros[column / kZerosPerLane][n % W] |= a.zeros[output * groups + g] << column % kZerosPerLane * kCodeBits;
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
  multiply_all<Int4>(a);
}

}  // namespace kaiten
