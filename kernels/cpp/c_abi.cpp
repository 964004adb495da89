// The door: what Python calls (library.py). Nothing but C types cross it, so the library knows no version of Python or
// torch. What must not be trusted to reach a pointer is checked here, before anything is written.
#include <string>

#include "checks.h"
#include "kernels.h"
#include "parallel.h"
#include "simd.h"

#define KAITEN_DOOR extern "C" __attribute__((visibility("default")))

using namespace kaiten;

namespace {

enum Answer { kDone, kOutOfRange, kFailed };

thread_local std::string refusal;

template <class Kernel>
int call(int threads, const Kernel& kernel) {
  try {
    threads_max = threads;
    kernel();
    return kDone;
  } catch (const std::out_of_range& error) {
    refusal = error.what();
    return kOutOfRange;
  } catch (const std::exception& error) {
    refusal = error.what();
    return kFailed;
  }
}

void check_layers(const Layers& a, const LayerStep& s) {
  check_positions(s.positions, s.all.tokens, a.positions_max);
  check_slots(s.slots, a.groups * s.all.tokens, a.blocks * a.block_size);
  for (int64_t g = 0; g < a.groups; ++g) {
    const Tables own{s.tables + g * s.group_stride, s.rows, s.table_stride, s.table_width, a.block_size, a.blocks,
                     a.windows[g]};
    check_rows(own, s.all.starts, s.all.contexts, s.all.tokens);
    if (!s.leaves_all()) check_rows(own, s.last.starts, s.last.contexts, s.last.tokens);
  }
  if (s.leaves_all()) return;
  for (int64_t i = 0, least = 0; i < s.last.tokens; least = s.logits_indices[i++] + 1)
    require(s.logits_indices[i] >= least && s.logits_indices[i] < s.all.tokens,
            "logits_indices: %ld must ascend below %ld", s.logits_indices[i], s.all.tokens);
}

}  // namespace

// Of the calling thread's last call that did not answer kDone.
KAITEN_DOOR const char* kaiten_refusal() { return refusal.c_str(); }

KAITEN_DOOR const char* kaiten_instructions() {
  if (KAITEN_NEON) return KAITEN_BF16_DOT ? "neon-bf16" : "neon";
  if (KAITEN_AMX) return "avx512-amx";
  if (KAITEN_BF16_DOT) return "avx512-bf16";
  if (KAITEN_AVX512) return "avx512";
#if defined(__AVX2__)
  return "avx2";
#else
  return "generic";
#endif
}

KAITEN_DOOR int kaiten_paged_attention(const Attention* a, int threads) {
  return call(threads, [=] {
    check_rows({a->tables, a->rows, a->table_stride, a->table_width, a->block_size, a->blocks, a->window},
               a->query_starts, a->contexts, a->tokens);
    if (a->tokens > 0) paged_attention(*a);
  });
}

KAITEN_DOOR int kaiten_rms_norm(const Norm* a, int threads) {
  return call(threads, [=] { rms_norm(*a); });
}

KAITEN_DOOR int kaiten_gate_mul(const Gate* a, int threads) {
  return call(threads, [=] { gate_mul(*a); });
}

KAITEN_DOOR int kaiten_rope(const Rope* a, int threads) {
  return call(threads, [=] {
    check_positions(a->positions, a->tokens, a->positions_max);
    rope(*a);
  });
}

KAITEN_DOOR int kaiten_write_kv(const WriteKv* a, int threads) {
  return call(threads, [=] {
    check_slots(a->slots, a->tokens, a->slots_max);
    write_kv(*a);
  });
}

KAITEN_DOOR int kaiten_has_linear(int is_bf16, int64_t in) { return has_linear(is_bf16, in); }
KAITEN_DOOR int64_t kaiten_packed_rows(int64_t out) { return packed_rows(out); }

KAITEN_DOOR int kaiten_pack_linear(const Pack* a, int threads) {
  return call(threads, [=] { pack_linear(*a); });
}

KAITEN_DOOR int kaiten_pack_int8(const Pack* a, int threads) {
  return call(threads, [=] { pack_int8(*a); });
}

KAITEN_DOOR int64_t kaiten_packed_int4_bytes(int64_t out, int64_t in) { return packed_int4_bytes(out, in); }

KAITEN_DOOR int kaiten_pack_int4(const PackInt4* a, int threads) {
  return call(threads, [=] {
    require(a->in % 32 == 0, "codes: %ld inputs are not a multiple of 32", a->in);
    pack_int4(*a);
  });
}

KAITEN_DOOR int kaiten_unpack_rows(const Unpack* a, int threads) {
  return call(threads, [=] {
    check_ids(a->ids, a->count, a->out);
    unpack_rows(*a);
  });
}

KAITEN_DOOR int kaiten_linear(const Linear* a, int threads) {
  return call(threads, [=] { linear(*a); });
}

KAITEN_DOOR int64_t kaiten_layers_scratch_bytes(const Layers* a, int64_t tokens) {
  return layers_scratch_bytes(*a, tokens);
}

KAITEN_DOOR int kaiten_run_layers(const Layers* a, const LayerStep* step, int threads) {
  return call(threads, [=] {
    check_layers(*a, *step);
    run_layers(*a, *step);
  });
}

KAITEN_DOOR int kaiten_sample(const Sample* a, int threads) {
  return call(threads, [=] { sample(*a); });
}

KAITEN_DOOR int kaiten_mask_logits(const Mask* a, int threads) {
  return call(threads, [=] {
    for (int64_t g = 0; g < a->count; ++g)
      require(a->rows[g] >= 0 && a->rows[g] < a->logit_rows, "rows: %ld must be below %ld", a->rows[g], a->logit_rows);
    mask_logits(*a);
  });
}

KAITEN_DOOR void kaiten_noise_bits(int64_t seed, int64_t choice, int64_t position, int64_t vocab, int64_t* bits) {
  noise_bits(seed, choice, position, vocab, bits);
}
