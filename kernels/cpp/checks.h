// What must not be trusted to reach a pointer: ids and lengths inside tensors. What is thrown names the argument.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <stdexcept>

namespace kaiten {

// `rule` as printf takes it, a %ld for each number.
template <class... Number>
inline void require(bool is_met, const char* rule, Number... numbers) {
  if (is_met) [[likely]] return;
  char sentence[200];
  std::snprintf(sentence, sizeof sentence, rule, long(numbers)...);
  throw std::out_of_range(sentence);
}

inline void check_positions(const int64_t* positions, int64_t tokens, int64_t table_size) {
  for (int64_t i = 0; i < tokens; ++i)
    require(positions[i] >= 0 && positions[i] < table_size, "positions: %ld is outside the table of %ld", positions[i],
            table_size);
}

inline void check_slots(const int64_t* slots, int64_t tokens, int64_t slots_max) {
  for (int64_t i = 0; i < tokens; ++i)
    require(slots[i] < slots_max, "slots: %ld is outside the pool of %ld", slots[i], slots_max);
}

inline void check_ids(const int64_t* ids, int64_t count, int64_t rows) {
  for (int64_t i = 0; i < count; ++i)
    require(ids[i] >= 0 && ids[i] < rows, "ids: %ld is not one of %ld rows", ids[i], rows);
}

struct Tables {
  const int32_t* blocks;
  int64_t rows, stride, width, block_size, pool;
  int64_t window;  // 0: none. What lies behind a row's is not looked at
};

// Rows that hold their queries, in blocks that the pool has.
inline void check_rows(const Tables& t, const int32_t* query_starts, const int32_t* contexts, int64_t tokens) {
  require(query_starts[0] == 0 && query_starts[t.rows] == tokens,
          "query_starts: must ascend from 0 to the number of tokens");
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t count = int64_t(query_starts[r + 1]) - query_starts[r], context = contexts[r];
    require(count >= 0, "query_starts: must ascend");
    if (count == 0) continue;
    require(context >= count && context <= t.width * t.block_size,
            "context_lengths: row %ld must hold its queries and fit its block table", r);
    const int64_t behind = t.window > 0 ? std::max<int64_t>(0, context - count + 1 - t.window) : 0;
    for (int64_t b = behind / t.block_size; b * t.block_size < context; ++b) {
      const int64_t block = t.blocks[r * t.stride + b];
      require(block >= 0 && block < t.pool, "block_tables: row %ld names block %ld of %ld", r, block, t.pool);
    }
  }
}

}  // namespace kaiten
