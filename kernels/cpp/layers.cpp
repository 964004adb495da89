// All layers of a decoder, one after the other: the kernels of this folder over memory that stays, so that between them
// nothing is allocated, checked or asked of Python. Which bits come out is theirs alone to say.
#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace kaiten {
namespace {

constexpr int64_t kAlign = 64;

struct Widths {
  int64_t q, kv, size;  // elements of a token's queries, of its keys; bytes of an element

  explicit Widths(const Layers& a)
      : q(int64_t(a.heads) * a.head_dim), kv(int64_t(a.kv_heads) * a.head_dim), size(a.is_bf16 ? 2 : 4) {}
  int64_t qkv() const { return q + 2 * kv; }
};

// Memory of `tokens` tokens, as [tokens][elements] each. What attention needs is gone when the MLP begins.
struct Buffers {
  char *hidden, *qkv, *mixed, *gate_up, *inner;
  int64_t bytes;

  Buffers(const Layers& a, int64_t tokens, char* memory) {
    const Widths w(a);
    char* at = memory;
    const auto take = [&](int64_t elements) {
      char* taken = at;
      at += (tokens * elements * w.size + kAlign - 1) / kAlign * kAlign;
      return taken;
    };
    hidden = take(a.hidden);
    char* const shared = at;
    qkv = take(w.qkv()), mixed = take(w.q);
    char* const attention_end = at;
    at = shared;
    gate_up = take(2 * a.inner), inner = take(a.inner);
    bytes = std::max(at, attention_end) - memory;
  }
};

class Pass {
 public:
  Pass(const Layers& a, const LayerStep& step)
      : a_(a), step_(step), w_(a), at_(a, step.all.tokens, static_cast<char*>(step.scratch)), input_(step.residual),
        queries_(step.all) {}

  void run() {
    enter(nullptr, a_.layers[0].attention_norm);
    for (int64_t i = 0; i < a_.count; ++i) {
      const Layer& layer = a_.layers[i];
      const bool is_last = i + 1 == a_.count;
      project(layer);
      if (is_last && !step_.leaves_all()) keep_logits_indices();
      attend(layer);
      multiply(layer.output, at_.mixed, at_.hidden);
      leave(at_.hidden, layer.attention_output_norm);
      enter(at_.hidden, layer.mlp_norm);
      multiply(layer.gate_up, input_, at_.gate_up);
      gate_mul({at_.gate_up, at_.inner, queries_.tokens, a_.inner, 2 * a_.inner, a_.is_bf16, a_.is_gelu});
      void* const out = is_last ? step_.out : at_.hidden;
      multiply(layer.down, at_.inner, out);
      leave(out, layer.mlp_output_norm);
      if (!is_last) enter(out, a_.layers[i + 1].attention_norm);
    }
  }

 private:
  Norm rows_of(const void* x, const void* weight, void* out) const {
    Norm n{};
    n.x = x, n.weight = weight, n.out = out;
    n.rows = queries_.tokens, n.inner = 1, n.hidden = a_.hidden;
    n.x_outer = n.residual_outer = a_.hidden;
    n.eps = a_.eps, n.is_bf16 = a_.is_bf16;
    return n;
  }

  // What a branch takes: the residual, to which `added` is added first, if there is any; normed, if it has a norm.
  void enter(const void* added, const void* norm) {
    Norm n = rows_of(added ? added : step_.residual, norm, at_.hidden);
    n.residual = added ? step_.residual : nullptr, n.total = step_.residual;
    if (norm) rms_norm(n);
    else if (added) add_rows(n);
    input_ = norm ? at_.hidden : step_.residual;
  }

  // What a branch gives, normed in place, if it has a norm there.
  void leave(void* x, const void* norm) const {
    if (norm) rms_norm(rows_of(x, norm, x));
  }

  void multiply(const Weight& w, const void* x, void* y) const {
    linear({x, w.packed, w.bias, w.scales, y, queries_.tokens, w.in, w.out, a_.is_bf16, w.is_int4 != 0});
  }

  // Queries stay in their place in qkv; keys and values go to their pages.
  void project(const Layer& layer) {
    multiply(layer.qkv, input_, at_.qkv);
    char* const k = at_.qkv + w_.q * w_.size;
    char* const v = k + w_.kv * w_.size;
    RopeWriteKv r{};
    r.rope = {at_.qkv, k, step_.positions, layer.cos_sin, queries_.tokens, w_.qkv(), w_.qkv(), a_.positions_max,
              a_.heads, a_.kv_heads, a_.head_dim, a_.half, a_.is_bf16};
    r.write = {k, v, static_cast<char*>(layer.k_pages), static_cast<char*>(layer.v_pages),
               step_.slots + layer.group * step_.all.tokens,
               queries_.tokens, w_.qkv() * w_.size, w_.qkv() * w_.size, a_.block_size, a_.kv_heads,
               a_.head_dim * w_.size, a_.blocks * a_.block_size};
    r.q_norm = layer.q_norm, r.k_norm = layer.k_norm, r.eps = a_.eps, r.is_norm_joint = layer.is_qk_norm_joint;
    rope_write_kv(r);
  }

  // Their queries and residuals move to the front, never past one that has still to move.
  void keep_logits_indices() {
    queries_ = step_.last;
    char* const residual = static_cast<char*>(step_.residual);
    const int64_t qkv_bytes = w_.qkv() * w_.size, q_bytes = w_.q * w_.size, bytes = a_.hidden * w_.size;
    for (int64_t i = 0; i < queries_.tokens; ++i) {
      const int64_t from = step_.logits_indices[i];
      std::memmove(at_.qkv + i * qkv_bytes, at_.qkv + from * qkv_bytes, q_bytes);
      std::memmove(residual + i * bytes, residual + from * bytes, bytes);
    }
  }

  void attend(const Layer& layer) const {
    if (queries_.tokens == 0) return;
    Attention t{};
    t.q = at_.qkv, t.k_pages = layer.k_pages, t.v_pages = layer.v_pages, t.out = at_.mixed;
    t.tables = step_.tables + layer.group * step_.group_stride;
    t.query_starts = queries_.starts, t.contexts = queries_.contexts;
    t.q_stride = w_.qkv(), t.table_stride = step_.table_stride;
    t.rows = int(step_.rows), t.heads = a_.heads, t.kv_heads = a_.kv_heads, t.head_dim = a_.head_dim;
    t.block_size = a_.block_size, t.scale = a_.scale, t.is_bf16 = a_.is_bf16, t.window = int(layer.window);
    t.softcap = a_.softcap;
    paged_attention(t);
  }

  const Layers& a_;
  const LayerStep& step_;
  const Widths w_;
  const Buffers at_;
  const void* input_;  // of the branch that is computed
  Queries queries_;
};

}  // namespace

int64_t layers_scratch_bytes(const Layers& a, int64_t tokens) { return Buffers(a, tokens, nullptr).bytes; }

void run_layers(const Layers& a, const LayerStep& step) { Pass(a, step).run(); }

}  // namespace kaiten
