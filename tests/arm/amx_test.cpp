// The linear of AMX, compiled with instructions that played_amx.h plays, beside plain loops in double. Panels of pairs are
// what tiles take, so it runs where pairs are multiplied: on ARM with bf16, emulated. There a panel is 24 outputs wide and
// a tile 8; with AVX-512 it is 48 and 16.
#include "checking.h"

#include "linear.cpp"

namespace kaiten {
void linear_int8(const Linear&) { std::abort(); }
void linear_int4(const Linear&) { std::abort(); }
void unpack_int8_rows(const Unpack&) { std::abort(); }
}  // namespace kaiten

namespace {

using namespace checking;
using namespace kaiten;

struct Case {
  int64_t out, in;
  std::vector<bf16> weight;
  Packed packed;

  Case(int64_t out, int64_t in)
      : out(out), in(in), weight(random_of<::bf16>(out * in)), packed(packed_rows(out) * in * sizeof(::bf16)) {
    pack_linear({weight.data(), packed.at, out, in, true});
  }

  std::vector<::bf16> times(const ::bf16* x, int64_t rows, const ::bf16* bias, int threads) const {
    std::vector<::bf16> y(rows * out);
    threads_max = threads;
    linear({x, packed.at, bias, nullptr, y.data(), rows, in, out, true, false});
    return y;
  }
};

void check(Check& check, const Case& w, int64_t rows) {
  const auto x = random_of<::bf16>(rows * w.in), bias = random_of<::bf16>(w.out);
  const auto y = w.times(x.data(), rows, bias.data(), 3);
  for (int64_t i = 0; i < rows * w.out; ++i) {
    double sum = wide(bias[i % w.out]), size = std::abs(sum);
    for (int64_t k = 0; k < w.in; ++k) {
      const double product = wide(x[i / w.out * w.in + k]) * double(wide(w.weight[i % w.out * w.in + k]));
      sum += product, size += std::abs(product);
    }
    check.near(wide(y[i]), sum, size * (w.in + 4) * kFloatUnit + kBf16Unit * std::abs(sum));
  }
  for (int64_t r = 0; r < rows; ++r)
    check.same(w.times(x.data() + r * w.in, 1, bias.data(), 1).data(), y.data() + r * w.out, w.out * sizeof(::bf16));
}

}  // namespace

int main() {
  {
    Check whole("tiles"), others("inputs that fill no tile");
    for (const int64_t rows : {1, 2, 15, 16, 17, 40, 200})
      for (const int64_t out : {7, 24, 77}) check(whole, Case(out, 96), rows), check(others, Case(out, 40), rows);
    whole.holds(takes_tiles({nullptr, nullptr, nullptr, nullptr, nullptr, 1, 96, 8, true, false}));
    others.holds(!takes_tiles({nullptr, nullptr, nullptr, nullptr, nullptr, 1, 40, 8, true, false}));
  }
  return summary("amx");
}
