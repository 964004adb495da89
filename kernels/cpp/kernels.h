// The native kernels on raw pointers; module.cpp checks the tensors and calls them. Strides are in elements.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace kaiten {

struct Attention {
  const void* q;
  const void* k_pages;
  const void* v_pages;
  void* out;
  const int32_t* tables;
  const int32_t* query_starts;
  const int32_t* contexts;
  int64_t q_stride, table_stride;
  int rows, heads, kv_heads, head_dim, block_size;
  float scale;
  bool is_bf16;
};
void paged_attention(const Attention& a);

struct Norm {
  const void* x;
  const void* residual;  // null: no addition
  const void* weight;
  void* out;
  void* total;
  // Row i is at (i / inner) * outer stride + (i % inner) * inner stride: heads inside a fused projection too.
  int64_t rows, inner, hidden;
  int64_t x_outer, x_inner, residual_outer, residual_inner;
  float eps;
  bool is_bf16;
};
void rms_norm(const Norm& a);

struct Gate {
  const void* gate_up;
  void* out;
  int64_t rows, inner, stride;
  bool is_bf16;
};
void silu_mul(const Gate& a);

struct Rope {
  void* q;
  void* k;
  const int64_t* positions;
  const float* cos_sin;
  int64_t tokens, q_stride, k_stride;
  int heads, kv_heads, head_dim, half;
  bool is_bf16;
};
void rope(const Rope& a);

struct WriteKv {
  const char* k;
  const char* v;
  char* k_pages;
  char* v_pages;
  const int64_t* slots;
  int64_t tokens, k_stride, v_stride, block_size;  // strides in bytes
  int64_t kv_heads, head_bytes;
};
void write_kv(const WriteKv& a);

// Weights [out][in] in rows -> packed: packed_rows(out) * in elements, 64-byte aligned. See linear.cpp.
struct Pack {
  const void* weight;
  void* packed;
  int64_t out, in;
  bool is_bf16;
};
bool has_linear(bool is_bf16, int64_t in);
int64_t packed_rows(int64_t out);
void pack_linear(const Pack& a);

// Rows ids[i] of the weight as they were -> rows [count][in].
struct Unpack {
  const void* packed;
  const int64_t* ids;
  void* rows;
  int64_t count, in;
  bool is_bf16;
};
void unpack_rows(const Unpack& a);

struct Linear {
  const void* x;  // [rows][in]
  const void* packed;
  const void* bias;  // null: none
  void* y;           // [rows][out]
  int64_t rows, in, out;
  bool is_bf16;
};
void linear(const Linear& a);

struct Sample {
  const float* logits;
  const float *temperature, *top_p, *min_p;
  const int64_t *top_k, *seed, *choice, *position;
  int64_t* token_ids;
  bool* ok;
  int64_t rows, vocab;
};
void sample(const Sample& a);
void noise_bits(int64_t seed, int64_t choice, int64_t position, int64_t vocab, int64_t* bits);

// Calls work(i) for every i in [0, count), each once, on whichever thread is free: items may differ in cost.
template <class F>
void for_each_item(int64_t count, bool is_worth_threads, const F& work) {
  const int64_t threads = is_worth_threads ? at::get_num_threads() : 1;
  if (threads == 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads < count ? threads : count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i = next++; i < count; i = next++) work(i);
  });
}

// Calls work(begin, end) for runs that make up [0, count), each on whichever thread is free.
template <class F>
void for_each_run(int64_t count, int64_t runs_per_thread, bool is_worth_threads, const F& work) {
  const int64_t threads = is_worth_threads ? at::get_num_threads() : 1;
  const int64_t runs = threads == 1 ? 1 : std::min(count, threads * runs_per_thread);
  for_each_item(runs, threads > 1, [&](int64_t i) { work(count * i / runs, count * (i + 1) / runs); });
}

}  // namespace kaiten
