// y = x W^T + bias for few rows as for many, on weights laid out once: panels of kPanel outputs, in a panel the outputs
// side by side for each step along K (one float32, or a pair of bfloat16), so a panel is read front to back.
//
// Without products of pairs (AVX2) a step of bfloat16 is one number as well, widened on the way to the sums: a tile of 4
// rows has no register left for what a pair would leave over, and the compiler then keeps a third of the sums in memory.
//
// Exact: an output is one chain of sums in ascending k whatever rows share the pass, so a row's bits depend on nothing
// but the row. The matrix library sums otherwise for few rows, and reads at half the memory's rate there.
#include <vector>

#include "linear_tiles.h"
#if KAITEN_AMX
#include "simd/amx.h"
#endif

namespace kaiten {
namespace {

template <class T>
struct AsTheyAre {
  static constexpr int64_t kStepBytes = kPanel * sizeof(float);
  static constexpr int64_t bytes(int64_t steps) { return steps * kStepBytes; }
  static constexpr int kRowsWaiting = 4;
  const VF* begin;

  AsTheyAre(const char* panel, int64_t, int64_t) : begin(reinterpret_cast<const VF*>(panel)) {}

  template <class F>
  void with_source(int64_t, const F& multiply) const { multiply(Ready{begin}); }
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

#if KAITEN_AMX
constexpr int kTileInputs = kTileRowBytes / sizeof(bf16), kTileSteps = kTileInputs / 2, kTilesAcross = 3;
constexpr int kStepBytes = kPanel * 2 * sizeof(bf16), kAcrossBytes = kStepBytes / kTilesAcross;
static_assert(kAcrossBytes <= kTileRowBytes);

// Of each weight the answer is one for all calls, as its sums are made otherwise than those of vectors.
bool takes_tiles(const Linear& a) { return a.is_bf16 && a.in % kTileInputs == 0 && tiles_are_allowed(); }

// Sums of up to kTileRows rows: [rows][kPanel]. Panels of pairs are what tiles take: a row of one is a step. An output's sum
// is one of tiles in ascending k, and within a tile that of the first of each pair, of the second, and both.
void sum_in_tiles(const bf16* x, int64_t in, const char* panel, int rows, float* sums) {
  TileConfig config;
  for (int c = 0; c < kTilesAcross; ++c) config.shape(c, rows, kAcrossBytes), config.shape(4 + c, kTileSteps, kAcrossBytes);
  config.shape(3, rows, kTileRowBytes);
  config.load();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  for (int64_t k = 0; k < in; k += kTileInputs, panel += kTileSteps * kStepBytes) {
    _tile_loadd(3, x + k, in * sizeof(bf16));
    _tile_loadd(4, panel, kStepBytes);
    _tile_dpbf16ps(0, 3, 4);
    _tile_loadd(5, panel + kAcrossBytes, kStepBytes);
    _tile_dpbf16ps(1, 3, 5);
    _tile_loadd(6, panel + 2 * kAcrossBytes, kStepBytes);
    _tile_dpbf16ps(2, 3, 6);
  }
  constexpr int kSumsBytes = kPanel * sizeof(float), kSumsAcross = kPanel / kTilesAcross;
  _tile_stored(0, sums, kSumsBytes);
  _tile_stored(1, sums + kSumsAcross, kSumsBytes);
  _tile_stored(2, sums + 2 * kSumsAcross, kSumsBytes);
  _tile_release();
}

void multiply_in_tiles(const Linear& a, int64_t panel) {
  alignas(64) float sums[kTileRows * kPanel];
  const char* packed = static_cast<const char*>(a.packed) + panel * (a.in / 2) * kStepBytes;
  const Panel<bf16> p = panel_of<bf16>(a, panel);
  for (int64_t first = 0; first < a.rows; first += kTileRows) {
    const int rows = int(std::min<int64_t>(kTileRows, a.rows - first));
    sum_in_tiles(static_cast<const bf16*>(a.x) + first * a.in, a.in, packed, rows, sums);
    bf16* out = static_cast<bf16*>(a.y) + first * a.out + panel * kPanel;
    for (int r = 0; r < rows; ++r, out += a.out) {
      VF of_row[1][kColumns];
      for (int c = 0; c < kColumns; ++c) of_row[0][c] = load(sums + r * kPanel + c * W);
      p.width == kPanel ? write<bf16, 1, true>(p, of_row, out) : write<bf16, 1, false>(p, of_row, out);
    }
  }
}
#endif

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
  const Linear a = as_tiles_read(given);
  if (a.scales) return linear_int8(a);
  if (a.is_int4) return linear_int4(a);
#if KAITEN_AMX
  if (takes_tiles(a))
    return for_each_panel(a, [](const Linear& part, int64_t panel, int64_t, bool) { multiply_in_tiles(part, panel); });
#endif
  for_each_panel(a, [](const Linear& part, int64_t panel, int64_t next, bool is_new) {
    part.is_bf16 ? multiply_panel<bf16, Plain>(part, panel, next, is_new)
                 : multiply_panel<float, Plain>(part, panel, next, is_new);
  });
}

}  // namespace kaiten
