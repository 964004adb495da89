// What must not be trusted to reach a pointer: ids and lengths inside tensors. An IndexError names the argument.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

namespace kaiten {

inline void check_positions(const int64_t* positions, int64_t tokens, int64_t table_size) {
  for (int64_t i = 0; i < tokens; ++i)
    TORCH_CHECK_INDEX(positions[i] >= 0 && positions[i] < table_size, "positions: ", positions[i],
                      " is outside the table of ", table_size);
}

inline void check_slots(const int64_t* slots, int64_t tokens, int64_t slots_max) {
  for (int64_t i = 0; i < tokens; ++i)
    TORCH_CHECK_INDEX(slots[i] < slots_max, "slots: ", slots[i], " is outside the pool of ", slots_max);
}

struct Tables {
  const int32_t* blocks;
  int64_t rows, stride, width, block_size, pool;
  int64_t window;  // 0: none. What lies behind a row's is not looked at
};

// Rows that hold their queries, in blocks that the pool has.
inline void check_rows(const Tables& t, const int32_t* query_starts, const int32_t* contexts, int64_t tokens) {
  TORCH_CHECK_INDEX(query_starts[0] == 0 && query_starts[t.rows] == tokens,
                    "query_starts: must ascend from 0 to the number of tokens");
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t count = int64_t(query_starts[r + 1]) - query_starts[r], context = contexts[r];
    TORCH_CHECK_INDEX(count >= 0, "query_starts: must ascend");
    if (count == 0) continue;
    TORCH_CHECK_INDEX(context >= count && context <= t.width * t.block_size, "context_lengths: row ", r,
                      " must hold its queries and fit its block table");
    const int64_t behind = t.window > 0 ? std::max<int64_t>(0, context - count + 1 - t.window) : 0;
    for (int64_t b = behind / t.block_size; b * t.block_size < context; ++b) {
      const int64_t block = t.blocks[r * t.stride + b];
      TORCH_CHECK_INDEX(block >= 0 && block < t.pool, "block_tables: row ", r, " names block ", block, " of ", t.pool);
    }
  }
}

}  // namespace kaiten
