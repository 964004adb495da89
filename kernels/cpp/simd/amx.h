// Products of whole tiles of bfloat16 (AMX): up to 16 rows of 32 inputs against 32 inputs of up to 16 outputs. A test may
// name a header that plays the processor, in KAITEN_AMX_PLAYED_BY.
#pragma once

#include <cstdint>

#ifdef KAITEN_AMX_PLAYED_BY
#include KAITEN_AMX_PLAYED_BY
#else
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kaiten {

constexpr int kTileRows = 16, kTileRowBytes = 64;

// As the processor reads it.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void shape(int tile, int tile_rows, int bytes) { rows[tile] = uint8_t(tile_rows), row_bytes[tile] = uint16_t(bytes); }

  // GCC takes ldtilecfg for a reader of the first 8 bytes, and keeps the others out of memory.
  void load() const {
    asm volatile("" : : "r"(this) : "memory");
    _tile_loadconfig(this);
  }
};
static_assert(sizeof(TileConfig) == 64);

// Numbers too small to be normal count as zero while it is there, as they do in tiles.
class FlushesToZero {
#ifndef KAITEN_AMX_PLAYED_BY
 public:
  FlushesToZero() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | kDenormalsAreZero); }
  ~FlushesToZero() { _mm_setcsr(before_); }
  FlushesToZero(const FlushesToZero&) = delete;

 private:
  static constexpr unsigned kDenormalsAreZero = 0x40;
  const unsigned before_ = _mm_getcsr();
#endif
};

// Before tiles are loaded from what was stored just now: GCC does not know that they read memory, and may store it later.
inline void stored_for_tiles() { asm volatile("" : : : "memory"); }

// Where a tile is stored for nobody. What stores tiles sleeps after some 2,000 cycles without one, and takes 1,000 to wake,
// what reads the sums waiting: 24 steps of six products and their stores took 3,350 cycles, and 2,380 with another store in
// between (Sapphire Rapids, 2026-11-27).
inline void* nowhere() {
  alignas(64) static thread_local char bytes[kTileRows * kTileRowBytes];
  return bytes;
}

// Linux gives the room for tiles only to who asks; once for the process.
inline bool tiles_are_allowed() {
#ifdef KAITEN_AMX_PLAYED_BY
  return true;
#else
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool are_allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return are_allowed;
#endif
}

}  // namespace kaiten
