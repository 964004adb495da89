// AMX's instructions as plain loops, as Intel's manual writes them: for a processor that has none. What would be an invalid
// instruction ends the program.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace played {

struct Tile {
  int rows = 0, row_bytes = 0;
  uint8_t bytes[16][64] = {};
};
inline thread_local Tile tiles[8];

inline void valid(bool is_valid, const char* what) {
  if (is_valid) return;
  std::fprintf(stderr, "invalid: %s\n", what);
  std::abort();
}

inline void load_config(const void* from) {
  const uint8_t* config = static_cast<const uint8_t*>(from);
  valid(config[0] == 1 && config[1] == 0, "palette");
  for (int i = 2; i < 16; ++i) valid(config[i] == 0, "reserved bytes");
  for (int t = 0; t < 16; ++t) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, config + 16 + 2 * t, sizeof row_bytes);
    const int rows = config[48 + t];
    valid(t < 8 ? rows <= 16 && row_bytes <= 64 && (rows == 0) == (row_bytes == 0) : rows + row_bytes == 0, "shape");
    if (t < 8) tiles[t] = Tile{rows, row_bytes, {}};
  }
}

inline void release() {
  for (Tile& tile : tiles) tile = Tile{};
}

inline void zero(int t) {
  valid(tiles[t].rows > 0, "a tile without a shape");
  std::memset(tiles[t].bytes, 0, sizeof tiles[t].bytes);
}

inline void load(int t, const void* from, int64_t stride) {
  zero(t);
  for (int r = 0; r < tiles[t].rows; ++r)
    std::memcpy(tiles[t].bytes[r], static_cast<const char*>(from) + r * stride, tiles[t].row_bytes);
}

inline void store(int t, void* to, int64_t stride) {
  valid(tiles[t].rows > 0, "a tile without a shape");
  for (int r = 0; r < tiles[t].rows; ++r)
    std::memcpy(static_cast<char*>(to) + r * stride, tiles[t].bytes[r], tiles[t].row_bytes);
}

inline float widened(const uint8_t* at) {
  const uint32_t bits = uint32_t(at[0] | at[1] << 8) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void dot(int to, int a_index, int b_index) {
  Tile &sums = tiles[to], &a = tiles[a_index], &b = tiles[b_index];
  valid(sums.rows == a.rows && a.row_bytes == 4 * b.rows && sums.row_bytes == b.row_bytes, "shapes of a product");
  for (int m = 0; m < sums.rows; ++m) {
    float of_pairs[32] = {};
    for (int k = 0; k < a.row_bytes / 4; ++k)
      for (int n = 0; n < sums.row_bytes / 4; ++n)
        for (int half = 0; half < 2; ++half)
          of_pairs[2 * n + half] += widened(a.bytes[m] + 4 * k + 2 * half) * widened(b.bytes[k] + 4 * n + 2 * half);
    for (int n = 0; n < sums.row_bytes / 4; ++n) {
      float sum;
      std::memcpy(&sum, sums.bytes[m] + 4 * n, sizeof sum);
      sum += of_pairs[2 * n] + of_pairs[2 * n + 1];
      std::memcpy(sums.bytes[m] + 4 * n, &sum, sizeof sum);
    }
  }
}

}  // namespace played

#define _tile_loadconfig(config) played::load_config(config)
#define _tile_release() played::release()
#define _tile_zero(tile) played::zero(tile)
#define _tile_loadd(tile, from, stride) played::load(tile, from, stride)
#define _tile_stored(tile, to, stride) played::store(tile, to, stride)
#define _tile_dpbf16ps(to, a, b) played::dot(to, a, b)
