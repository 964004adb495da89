// y = x W^T + bias for few rows as for many, on weights laid out once: panels of kPanel outputs, in a panel the outputs
// side by side for each step along K (one float32, or a pair of bfloat16), so a panel is read front to back.
//
// Without products of pairs (AVX2) a step of bfloat16 is one number as well, widened on the way to the sums: a tile of 4
// rows has no register left for what a pair would leave over, and the compiler then keeps a third of the sums in memory.
//
// Exact: an output is one chain of sums in ascending k whatever rows share the pass, so a row's bits depend on nothing
// but the row. The matrix library sums otherwise for few rows, and reads at half the memory's rate there.
#include <vector>

#include "amx.h"

namespace kaiten {
namespace {

template <class T>
struct AsTheyAre {
  static constexpr int64_t kStepBytes = kPanel * sizeof(float);
  static constexpr int64_t bytes(int64_t steps) { return steps * kStepBytes; }
  static constexpr int kRowsWaiting = 4;
  const VF* begin;

  AsTheyAre(const char* panel, int64_t, int64_t) : begin(reinterpret_cast<const VF*>(panel)) {}

  Ready alone() const { return {begin}; }

  template <class F>
  void with_kept(int64_t, const F& multiply) const { multiply(alone()); }

  template <class F>
  void with_source(int64_t, const F& multiply) const { multiply(alone()); }
};

template <class T>
using Plain = std::conditional_t<std::is_same_v<T, Factor<T>>, AsTheyAre<T>, BroughtOver<T, T>>;

// x widened, if tiles do not read it as it is, into a place of the calling thread's own.
Linear as_tiles_read(Linear a) {
  if (!a.is_bf16 || KAITEN_BF16_DOT) return a;
  static thread_local std::vector<float> wide;
  const int64_t count = a.rows * a.in;
  if (int64_t(wide.size()) < count) wide.resize(count);
  float* to = wide.data();
  const bf16* from = static_cast<const bf16*>(a.x);
  for_each_item(a.rows, count > kSerialFlops, [&](int64_t row) {
    for (int64_t i = row * a.in; i < (row + 1) * a.in; i += W) {
      const int n = int(std::min<int64_t>(W, (row + 1) * a.in - i));
      store(to + i, load(from + i, n), n);
    }
  });
  a.x = to;
  return a;
}

template <class T>
void unpack_row(const Unpack& a, int64_t row) {
  T* to = static_cast<T*>(a.rows) + row * a.in;
  for_each_weight<T, T>(a, a.ids[row], [=](int64_t k, T weight) { to[k] = weight; });
}

}  // namespace

bool has_linear(bool is_bf16, int64_t in) { return KAITEN_FMA && (!is_bf16 || in % 2 == 0); }

int64_t packed_rows(int64_t out) { return panels_of(out) * kPanel; }

void pack_linear(const Pack& a) {
  for_each_item(panels_of(a.out), true,
                [&](int64_t i) { a.is_bf16 ? pack_panel<bf16, bf16>(a, i) : pack_panel<float, float>(a, i); });
}

void unpack_rows(const Unpack& a) {
  if (a.scales) return unpack_int8_rows(a);
  for_each_item(a.count, a.count * a.in > kSerialFlops,
                [&](int64_t i) { a.is_bf16 ? unpack_row<bf16>(a, i) : unpack_row<float>(a, i); });
}

void linear(const Linear& given) {
  if (given.rows == 0) return;
  const Linear a = as_tiles_read(given);
  if (a.scales) return linear_int8(a);
  if (a.is_int4) return linear_int4(a);
  multiply_all<Plain>(a);
}

}  // namespace kaiten
