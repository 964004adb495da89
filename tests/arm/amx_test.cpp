// The linears of AMX beside plain loops in double: on a processor that has it, or compiled with instructions that
// played_amx.h plays. Panels of pairs are what tiles take, so it is played where pairs are multiplied: on ARM with bf16,
// emulated. There a panel is 24 outputs wide and a tile 8; with AVX-512 it is 48 and 16.
#include "checking.h"

#include "linear/amx.h"

namespace {

using namespace checking;
using namespace kaiten;

enum class Kind { kBf16, kInt8, kInt4 };

// A weight of some kind, as it is packed and as numbers.
struct Case {
  int64_t out, in;
  Kind kind;
  std::vector<double> weight;
  std::vector<float> scales;
  Packed packed;

  Case(Kind kind, int64_t out, int64_t in)
      : out(out), in(in), kind(kind), weight(out * in), packed(packed_rows(out) * in * sizeof(::bf16)) {
    kind == Kind::kBf16 ? as_bf16() : kind == Kind::kInt8 ? as_int8() : as_int4();
  }

  void as_bf16() {
    const auto rows = random_of<::bf16>(out * in);
    for (int64_t i = 0; i < out * in; ++i) weight[i] = wide(rows[i]);
    pack_linear({rows.data(), packed.at, out, in, true});
  }

  void as_int8() {
    std::vector<int8_t> codes(out * in);
    for (int64_t i = 0; i < out; ++i) scales.push_back(float(1.5 + uniform()));
    for (int64_t i = 0; i < out * in; ++i) codes[i] = int8_t(127 * uniform()), weight[i] = codes[i] * double(scales[i / in]);
    pack_int8({codes.data(), packed.at, out, in, true});
  }

  // Scales that leave a weight as it is in bfloat16.
  void as_int4() {
    std::vector<uint8_t> codes(out * in / 2), zeros(out * in / 32);
    std::vector<::bf16> of_groups(out * in / 32);
    for (auto& zero : zeros) zero = uint8_t(8 + 7 * uniform());
    for (auto& scale : of_groups) put(scale, uniform() < 0 ? 0.5 : 2.0);
    for (int64_t i = 0; i < out * in; ++i) {
      const int code = int(8 + 7 * uniform());
      codes[i / 2] |= uint8_t(code << i % 2 * 4);
      weight[i] = (code - zeros[i / 32]) * double(wide(of_groups[i / 32]));
    }
    pack_int4({codes.data(), of_groups.data(), zeros.data(), packed.at, out, in, true});
  }

  Linear of(const ::bf16* x, int64_t rows, const ::bf16* bias, ::bf16* y) const {
    return {x, packed.at, bias, scales.empty() ? nullptr : scales.data(), y, rows, in, out, true, kind == Kind::kInt4};
  }

  std::vector<::bf16> times(const ::bf16* x, int64_t rows, const ::bf16* bias, int threads) const {
    std::vector<::bf16> y(rows * out);
    threads_max = threads;
    linear(of(x, rows, bias, y.data()));
    return y;
  }
};

// What they are, and that a row has the same bits alone, with another one, and in a crowd.
void check(Check& check, const Case& w, int64_t rows) {
  const auto x = random_of<::bf16>(rows * w.in), bias = random_of<::bf16>(w.out);
  const auto y = w.times(x.data(), rows, bias.data(), 3);
  for (int64_t i = 0; i < rows * w.out; ++i) {
    double sum = wide(bias[i % w.out]), size = std::abs(sum);
    for (int64_t k = 0; k < w.in; ++k) {
      const double product = wide(x[i / w.out * w.in + k]) * w.weight[i % w.out * w.in + k];
      sum += product, size += std::abs(product);
    }
    check.near(wide(y[i]), sum, size * (w.in + 4) * kFloatUnit + kBf16Unit * std::abs(sum));
  }
  for (const int64_t few : {1, 2})
    for (int64_t r = 0; r + few <= rows; r += 3) {
      const auto alone = w.times(x.data() + r * w.in, few, bias.data(), 1);
      check.same(alone.data(), y.data() + r * w.out, few * w.out * sizeof(::bf16));
    }
}

}  // namespace

int main() {
  {
    const Kind kinds[] = {Kind::kBf16, Kind::kInt8, Kind::kInt4};
    const char* names[] = {"tiles", "tiles, int8", "tiles, int4"};
    for (int i = 0; i < 3; ++i) {
      Check whole(names[i]);
      for (const int64_t rows : {1, 2, 16, 17, 33, 70})
        for (const int64_t out : {7, 77, 96}) check(whole, Case(kinds[i], out, 96), rows);
      const Case tiled(kinds[i], 8, 96);
      whole.holds(takes_tiles(tiled.of(nullptr, 1, nullptr, nullptr)));
    }
    Check others("inputs that fill no tile");
    for (const int64_t rows : {1, 2, 17}) check(others, Case(Kind::kBf16, 24, 40), rows);
    others.holds(!takes_tiles(Case(Kind::kBf16, 8, 40).of(nullptr, 1, nullptr, nullptr)));
  }
  return summary("amx");
}
