// What the programs of this folder check by: bounds, bits, random numbers.
//
// Bounds are derived: a float32 sum of n products is within n 2^-24 of the sum of their sizes, a bfloat16 result within
// 2^-8 of itself, a weight of the softmax that is rounded to bfloat16 within 2^-8.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

using bf16 = uint16_t;

namespace checking {

constexpr double kFloatUnit = 0x1p-24, kBf16Unit = 0x1p-8;
inline int failed = 0, checked = 0;

// One kind of check: how far from its bound the worst was.
struct Check {
  std::string name;
  double worst = 0;
  bool is_exact = true;

  explicit Check(std::string name) : name(std::move(name)) {}
  ~Check() {
    const bool holds = is_exact && worst <= 1;
    failed += !holds, ++checked;
    std::printf("%s %-52s %s %.3f of the bound\n", holds ? "ok    " : "FAILED", name.c_str(),
                is_exact ? "exact," : "NOT EXACT,", worst);
  }
  void near(double found, double known, double bound) {
    const double excess = std::abs(found - known) / (bound + 1e-30);
    worst = std::isnan(excess) ? HUGE_VAL : std::max(worst, excess);
  }
  void same(const void* a, const void* b, size_t bytes) { is_exact &= std::memcmp(a, b, bytes) == 0; }
  void holds(bool is_true) { is_exact &= is_true; }
};

inline uint64_t state = 1;
inline double uniform() {  // [-1, 1)
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return double(state >> 11) * 0x1p-52 - 1;
}

inline float wide(float x) { return x; }
inline float wide(bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}
inline void put(float& to, double x) { to = float(x); }
inline void put(bf16& to, double x) {
  const float f = float(x);
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof f);
  to = bf16((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

template <class T>
constexpr double kUnit = sizeof(T) == 2 ? kBf16Unit : kFloatUnit;
template <class T>
const char* const kName = sizeof(T) == 2 ? "bf16" : "fp32";

template <class T>
std::vector<T> random_of(int64_t count, double size = 1) {
  std::vector<T> made(count);
  for (T& one : made) put(one, size * uniform());
  return made;
}

// Aligned as tensors are that weights are packed into.
struct Packed {
  char* at;
  explicit Packed(int64_t bytes) : at(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64))) {}
  ~Packed() { std::free(at); }
  Packed(const Packed&) = delete;
};

// The exit status.
inline int summary(const char* name) {
  std::printf("%s: %d of %d held\n", name, checked - failed, checked);
  return failed > 0;
}

}  // namespace checking
