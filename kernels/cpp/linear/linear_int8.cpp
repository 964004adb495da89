// A linear with int8 weights and a scale per output: the panels of linear.cpp with a byte for each weight. An int8 is
// exact in bfloat16 and in float32, so a panel is brought to x's dtype and goes through the same tiles; the scale is
// applied to the float32 sums. Memory is read half (a quarter) as much; the sums cost what they cost.
#include "amx.h"

namespace kaiten {
namespace {

template <class T>
using Codes = BroughtOver<T, int8_t>;

template <class T>
void unpack_row(const Unpack& a, int64_t row) {
  const float scale = a.scales[a.ids[row]];
  T* to = static_cast<T*>(a.rows) + row * a.in;
  for_each_weight<T, int8_t>(a, a.ids[row], [=](int64_t k, int8_t code) { store(to + k, splat(code * scale), 1); });
}

}  // namespace

void pack_int8(const Pack& a) {
  for_each_item(panels_of(a.out), true,
                [&](int64_t i) { a.is_bf16 ? pack_panel<bf16, int8_t>(a, i) : pack_panel<float, int8_t>(a, i); });
}

void unpack_int8_rows(const Unpack& a) {
  for_each_item(a.count, a.count * a.in > kSerialFlops,
                [&](int64_t i) { a.is_bf16 ? unpack_row<bf16>(a, i) : unpack_row<float>(a, i); });
}

void linear_int8(const Linear& a) {
  const int64_t panels = panels_of(a.out);
  if (a.rows == 1 && panels % 2 == 0) {
    return for_each_ahead(panels / 2, a.in * a.out > kSerialFlops, [&](int64_t i, int64_t next, bool) {
      multiply_two<Codes>(a, 2 * i, next < 0 ? -1 : 2 * next);
    });
  }
  multiply_all<Codes>(a);
}

}  // namespace kaiten
