// Panels of bfloat16 by products of whole tiles (AMX) where the processor has them, else by the tiles of tiles.h.
//
// An output's sum is one of tiles in ascending k, and within a tile that of the first of each pair, of the second, and both:
// otherwise than those of vectors, so of each weight the answer is one for all calls.
#pragma once

#include "tiles.h"
#if KAITEN_AMX
#include "../simd/amx.h"
#endif

namespace kaiten {

#if KAITEN_AMX
constexpr int kTileInputs = kTileRowBytes / sizeof(bf16), kTileSteps = kTileInputs / 2, kTilesAcross = 3;
constexpr int kPairsBytes = kPanel * 2 * sizeof(bf16), kAcrossBytes = kPairsBytes / kTilesAcross;
// Below, vectors are sooner: one row of 52M weights in bf16 3.6 ms and in tiles 3.9, of int8 2.7 and 3.7, two of int8 3.0 and
// 3.8; four take as long (two threads, Sapphire Rapids, 2026-11-27).
constexpr int kFewRows = 2;
constexpr int kSumsBytes = kPanel * sizeof(float), kSumsAcross = kPanel / kTilesAcross;
static_assert(kAcrossBytes <= kTileRowBytes);

inline bool takes_tiles(const Linear& a) { return a.is_bf16 && a.in % kTileInputs == 0 && tiles_are_allowed(); }

// A thread's tiles: 0 to 2 are sums of some rows, 3 to 5 of as many others, 6 their x, 7 weights. To shape them takes as long
// as fifty products, and waits for those before.
class LinearTiles {
 public:
  LinearTiles() = default;
  LinearTiles(const LinearTiles&) = delete;
  ~LinearTiles() {
    if (height_ > 0) _tile_release();
  }

  void shape(int64_t height) {
    if (height == height_) return;
    height_ = height;
    TileConfig config;
    for (int c = 0; c < 2 * kTilesAcross; ++c) config.shape(c, int(height), kAcrossBytes);
    config.shape(6, int(height), kTileRowBytes);
    config.shape(7, kTileSteps, kAcrossBytes);
    config.load();
  }

 private:
  int64_t height_ = 0;
};

// Every few steps of a sum, which take that long when memory is slow.
inline void keep_stores_awake(int64_t k) {
  if (k % (4 * kTileInputs) == 0) _tile_stored(7, nowhere(), kAcrossBytes);
}

// The next kTileSteps steps as tiles take them, a row of a tile being a step.
inline const VF* tile_of(Ready& source) {
  const VF* const at = source.at;
  source.at += kTileSteps * kColumns;
  return at;
}

template <class Weight>
inline const VF* tile_of(Bringing<bf16, Weight, true>& source) {
  const VF* const at = source.kept;
  for (int i = 0; i < kTileSteps; ++i) {
    VF w[kColumns];
    source.step(w);
  }
  stored_for_tiles();
  return at;
}

inline const char* across(const VF* weights, int c) { return reinterpret_cast<const char*>(weights) + c * kAcrossBytes; }

template <class Source>
void sum_in_tiles(const bf16* x, int64_t in, Source source, Fetch& fetch, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  for (int64_t k = 0; k < in; k += kTileInputs) {
    fetch.turn();
    const VF* const weights = tile_of(source);
    _tile_loadd(6, x + k, in * sizeof(bf16));
    _tile_loadd(7, across(weights, 0), kPairsBytes);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(7, across(weights, 1), kPairsBytes);
    _tile_dpbf16ps(1, 6, 7);
    _tile_loadd(7, across(weights, 2), kPairsBytes);
    _tile_dpbf16ps(2, 6, 7);
    keep_stores_awake(k);
  }
  _tile_stored(0, sums, kSumsBytes);
  _tile_stored(1, sums + kSumsAcross, kSumsBytes);
  _tile_stored(2, sums + 2 * kSumsAcross, kSumsBytes);
}

// Of as many rows again from `other` on: weights are read once for both.
template <class Source>
void sum_two_in_tiles(const bf16* x, const bf16* other, int64_t in, Source source, Fetch& fetch, float* sums,
                      float* other_sums) {
  const int64_t row_bytes = in * sizeof(bf16);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t k = 0; k < in; k += kTileInputs) {
    fetch.turn();
    const VF* const weights = tile_of(source);
    _tile_loadd(6, x + k, row_bytes);
    _tile_loadd(7, across(weights, 0), kPairsBytes);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(6, other + k, row_bytes);
    _tile_dpbf16ps(3, 6, 7);
    _tile_loadd(7, across(weights, 1), kPairsBytes);
    _tile_dpbf16ps(4, 6, 7);
    _tile_loadd(6, x + k, row_bytes);
    _tile_dpbf16ps(1, 6, 7);
    _tile_loadd(7, across(weights, 2), kPairsBytes);
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(6, other + k, row_bytes);
    _tile_dpbf16ps(5, 6, 7);
    keep_stores_awake(k);
  }
  _tile_stored(0, sums, kSumsBytes);
  _tile_stored(1, sums + kSumsAcross, kSumsBytes);
  _tile_stored(2, sums + 2 * kSumsAcross, kSumsBytes);
  _tile_stored(3, other_sums, kSumsBytes);
  _tile_stored(4, other_sums + kSumsAcross, kSumsBytes);
  _tile_stored(5, other_sums + 2 * kSumsAcross, kSumsBytes);
}

inline void write_sums(const Panel<bf16>& p, const float* sums, int64_t rows, bf16* out) {
  for (int64_t r = 0; r < rows; ++r, out += p.out_stride) {
    VF of_row[1][kColumns];
    for (int c = 0; c < kColumns; ++c) of_row[0][c] = load(sums + r * kPanel + c * W);
    write(p, of_row, out);
  }
}

// What a step multiplies with the first of each pair of x, and with the second.
template <class Source>
inline void halves_of_step(Source& source, int i, VF (&first)[kColumns], VF (&second)[kColumns]) {
  VF w[kColumns];
  if constexpr (Source::kHasRounds)
    source.step(w, i);
  else
    source.step(w);
  KAITEN_UNROLL_WIDE for (int c = 0; c < kColumns; ++c) {
    first[c] = (VF)((VU)w[c] << 16);
    second[c] = (VF)((VU)w[c] & 0xFFFF0000u);
  }
}

// Codes are exact in float32, too: they need not become pairs before.
inline void halves_of_step(Bringing<bf16, int8_t, false>& source, int, VF (&first)[kColumns], VF (&second)[kColumns]) {
  KAITEN_UNROLL_WIDE for (int c = 0; c < kColumns; ++c) {
    int16_t codes __attribute__((vector_size(2 * W)));
    std::memcpy(&codes, source.at + 2 * c * W, sizeof codes);
    const VI lanes = __builtin_convertvector(codes, VI);
    first[c] = __builtin_convertvector((VI)((VU)lanes << 24) >> 24, VF);
    second[c] = __builtin_convertvector(lanes >> 8, VF);
  }
  source.at += 2 * kPanel;
}

// The sums of tiles for R rows and P panels that lie one after the other, bit for bit, by vectors.
template <int R, int P, class Source>
void sum_as_tiles(const Linear& a, int64_t panel, Source (&sources)[P], Fetch (&fetches)[P]) {
  const FlushesToZero as_tiles_do;
  const bf16* const x = static_cast<const bf16*>(a.x);
  VF sums[P][R][kColumns] = {};
  for (int64_t k = 0; k < a.in; k += kTileInputs) {
    VF firsts[P][R][kColumns] = {}, seconds[P][R][kColumns] = {};
    for (int64_t round = k; round < k + kTileInputs; round += 2 * kStride) {
      for (int p = 0; p < P; ++p) {
        fetches[p].turn();
        if constexpr (Source::kHasRounds) sources[p].round(round / 2);
      }
      KAITEN_UNROLL for (int i = 0; i < kStride; ++i) {
        KAITEN_UNROLL for (int p = 0; p < P; ++p) {
          VF first[kColumns], second[kColumns];
          halves_of_step(sources[p], i, first, second);
          KAITEN_UNROLL for (int r = 0; r < R; ++r) {
            uint32_t pair;
            std::memcpy(&pair, x + r * a.in + round + 2 * i, sizeof pair);
            const VF of_first = (VF)splat(pair << 16), of_second = (VF)splat(pair & 0xFFFF0000u);
            KAITEN_UNROLL_WIDE for (int c = 0; c < kColumns; ++c) {
              firsts[p][r][c] = fma(of_first, first[c], firsts[p][r][c]);
              seconds[p][r][c] = fma(of_second, second[c], seconds[p][r][c]);
            }
          }
        }
      }
    }
    KAITEN_UNROLL for (int p = 0; p < P; ++p)
      KAITEN_UNROLL for (int r = 0; r < R; ++r)
        KAITEN_UNROLL_WIDE for (int c = 0; c < kColumns; ++c) sums[p][r][c] = sums[p][r][c] + (firsts[p][r][c] + seconds[p][r][c]);
  }
  for (int p = 0; p < P; ++p)
    write(panel_of<bf16>(a, panel + p), sums[p], static_cast<bf16*>(a.y) + (panel + p) * kPanel);
}

template <template <class> class Kept>
struct FewRows {
  static constexpr int64_t kStepBytes = Kept<bf16>::kStepBytes;
  static constexpr int kLines = (kStride * kStepBytes + kLine - 1) / kLine;
  const Linear& a;
  const int64_t steps = a.in / 2, bytes = Kept<bf16>::bytes(steps);

  auto source(int64_t panel) const {
    return Kept<bf16>(static_cast<const char*>(a.packed) + panel * bytes, steps, 1).alone();
  }
  Fetch fetch(int64_t panel, int64_t next) const { return fetch_of(a, panel, next, bytes, kFar * kStepBytes, kLines); }
};

template <template <class> class Kept>
void multiply_few_as_tiles(const Linear& a, int64_t panel, int64_t next) {
  const FewRows<Kept> of{a};
  decltype(of.source(0)) sources[] = {of.source(panel)};
  Fetch fetches[] = {of.fetch(panel, next)};
  a.rows == 1 ? sum_as_tiles<1>(a, panel, sources, fetches) : sum_as_tiles<2>(a, panel, sources, fetches);
}

template <template <class> class Kept>
void multiply_two_as_tiles(const Linear& a, int64_t panel, int64_t next) {
  const FewRows<Kept> of{a};
  decltype(of.source(0)) sources[] = {of.source(panel), of.source(panel + 1)};
  Fetch fetches[] = {of.fetch(panel, next), of.fetch(panel + 1, next < 0 ? -1 : next + 1)};
  sum_as_tiles<1>(a, panel, sources, fetches);
}

template <template <class> class Kept>
void multiply_in_tiles(LinearTiles& tiles, const Linear& a, int64_t panel, int64_t next, bool is_new) {
  constexpr int kRowsMax = 2 * kTileRows;
  constexpr int kLines = (kTileSteps * Kept<bf16>::kStepBytes + kLine - 1) / kLine;
  alignas(64) float sums[kRowsMax * kPanel];
  const int64_t steps = a.in / 2, bytes = Kept<bf16>::bytes(steps), passes = (a.rows + kRowsMax - 1) / kRowsMax;
  const Panel<bf16> p = panel_of<bf16>(a, panel);
  // So few rows take less time than memory, which the processor's own prefetcher keeps busy.
  const int lines = a.rows <= kTileRows ? 0 : kLines;
  PassFetch fetch(a, panel, next, is_new, bytes, passes, lines, kFar * Kept<bf16>::kStepBytes);
  const Kept<bf16> weights(static_cast<const char*>(a.packed) + panel * bytes, steps, kRowsMax);
  for (int64_t i = 0, row = 0; i < passes; ++i) {
    fetch.begin(i);
    const int64_t after = a.rows * (i + 1) / passes, rows = after - row;
    const bf16* x = static_cast<const bf16*>(a.x) + row * a.in;
    // An odd row in the middle is one of both halves.
    const int64_t height = rows <= kTileRows ? rows : (rows + 1) / 2, second = rows - height;
    tiles.shape(height);
    stored_for_tiles();
    weights.with_kept(i, [&](auto source) {
      if (second == 0)
        sum_in_tiles(x, a.in, source, fetch, sums);
      else
        sum_two_in_tiles(x, x + second * a.in, a.in, source, fetch, sums, sums + second * kPanel);
    });
    write_sums(p, sums, rows, static_cast<bf16*>(a.y) + row * a.out + panel * kPanel);
    row = after;
  }
}
#endif

template <template <class> class Kept>
void multiply(const Linear& a, int64_t panel, int64_t next, bool is_new) {
  if (!a.is_bf16) return multiply_panel<float, Kept>(a, panel, next, is_new);
#if KAITEN_AMX
  if (takes_tiles(a)) return multiply_few_as_tiles<Kept>(a, panel, next);
#endif
  multiply_panel<bf16, Kept>(a, panel, next, is_new);
}

// As multiply_two of tiles.h.
template <template <class> class Kept>
void multiply_two(const Linear& a, int64_t panel, int64_t next) {
  if (!a.is_bf16) return multiply_two<float, Kept>(a, panel, next);
#if KAITEN_AMX
  if (takes_tiles(a)) return multiply_two_as_tiles<Kept>(a, panel, next);
#endif
  multiply_two<bf16, Kept>(a, panel, next);
}

template <template <class> class Kept>
void multiply_all(const Linear& a) {
#if KAITEN_AMX
  if (takes_tiles(a) && a.rows > kFewRows) return for_each_part(a, [] { return LinearTiles(); }, multiply_in_tiles<Kept>);
#endif
  for_each_part(a, multiply<Kept>);
}

}  // namespace kaiten
