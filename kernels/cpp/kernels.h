// The native kernels on raw pointers. Strides are in elements. Python fills in the structs that cross the door
// (c_abi.cpp), field by field in the order they have here: library.py. It has checked shapes, dtypes and strides.
#pragma once

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
  int64_t tokens, table_width, blocks;  // of q, of a row's table, of the pool: for the checks at the door
  int rows, heads, kv_heads, head_dim, block_size;
  int window;            // positions that a query sees, its own the last; 0: all
  float scale, softcap;  // of scores; 0: none
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
// total = x + residual, [rows][hidden] each, dense.
void add_rows(const Norm& a);

struct Gate {
  const void* gate_up;
  void* out;
  int64_t rows, inner, stride;
  bool is_bf16, is_gelu;  // silu, or gelu by tanh
};
void gate_mul(const Gate& a);

struct Rope {
  void* q;
  void* k;
  const int64_t* positions;
  const float* cos_sin;
  int64_t tokens, q_stride, k_stride;
  int64_t positions_max;  // rows of cos_sin: for the checks at the door
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
  int64_t slots_max;  // of the pool: for the checks at the door
};
void write_kv(const WriteKv& a);

// Of each token: the norms of its heads in place, if there are any, then rope, then write_kv.
struct RopeWriteKv {
  Rope rope;
  WriteKv write;
  const void* q_norm;  // null: none
  const void* k_norm;
  float eps;
  bool is_norm_joint;  // one norm over all heads, weights [heads * head_dim], instead of one for each
};
void rope_write_kv(const RopeWriteKv& a);

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
  const float* scales;  // of an int8 weight, else null
  int64_t count, in;
  int64_t out;  // rows of the weight: for the checks at the door
  bool is_bf16;
};
void unpack_rows(const Unpack& a);

struct Linear {
  const void* x;  // [rows][in]
  const void* packed;
  const void* bias;     // null: none
  const float* scales;  // null: `packed` is of x's dtype; else int8, and an output is its sum * scales[output]
  void* y;              // [rows][out]
  int64_t rows, in, out;
  bool is_bf16;
  bool is_int4;         // `packed` is pack_int4's, and `scales` null
};
void linear(const Linear& a);
void linear_int8(const Linear& a);
void linear_int4(const Linear& a);
// Both as above for an int8 weight, in the layout for x of either dtype: 1 byte where a float takes dtype's.
void pack_int8(const Pack& a);
void unpack_int8_rows(const Unpack& a);

// An int4 weight, (code - zero) * scale, each scale and zero of a group of inputs -> packed: packed_int4_bytes(out, in).
struct PackInt4 {
  const uint8_t* codes;    // [out][in / 2], of each pair of inputs the first one's in the low half
  const uint16_t* scales;  // [out][in / 32], bfloat16
  const uint8_t* zeros;    // [out][in / 32], 0 to 15
  void* packed;
  int64_t out, in;
  bool is_bf16;            // of x
};
int64_t packed_int4_bytes(int64_t out, int64_t in);
void pack_int4(const PackInt4& a);

// Of a linear: as there.
struct Weight {
  const void *packed, *bias;
  const float* scales;
  int64_t in, out, is_int4;
};
struct Layer {
  // Null: no norm there.
  const void *attention_norm, *attention_output_norm, *mlp_norm, *mlp_output_norm, *q_norm, *k_norm;
  Weight qkv, output, gate_up, down;
  const float* cos_sin;
  void *k_pages, *v_pages;
  int64_t is_qk_norm_joint;
  int64_t group, window;  // positions that a query sees, its own the last; 0: all
};
struct Layers {
  const Layer* layers;
  const int64_t* windows;  // of each group
  int64_t count, hidden, inner, groups;
  int64_t positions_max, blocks;  // of cos_sin, of the pool: for the checks at the door
  int heads, kv_heads, head_dim, half, block_size;
  float eps, scale, softcap;  // 0: none
  bool is_bf16, is_gelu;
};
// Query tokens, row after row.
struct Queries {
  const int32_t *starts, *contexts;
  int64_t tokens;
};
struct LayerStep {
  void* residual;  // [all.tokens][hidden]: embeddings, afterwards the residuals of last.tokens
  void* out;       // [last.tokens][hidden]
  void* scratch;   // layers_scratch_bytes of all.tokens
  const int64_t *positions, *slots;  // [all.tokens], [groups][all.tokens]
  const int32_t* tables;             // [groups][rows][table_width]
  const int64_t* logits_indices;     // [last.tokens] ascending, the tokens that leave the last layer
  int64_t rows, group_stride, table_stride, table_width;
  Queries all, last;
  bool leaves_all() const { return last.tokens == all.tokens; }  // then nothing is read from logits_indices
};
int64_t layers_scratch_bytes(const Layers& a, int64_t tokens);
void run_layers(const Layers& a, const LayerStep& step);

struct Sample {
  const void* logits;
  const float* temperature;  // below 0: padding, for which the answer is 0 and not ok
  const float *top_p, *min_p;
  const int64_t *top_k, *seed, *choice, *position;
  int64_t* token_ids;
  bool* ok;
  int64_t rows, vocab;
  bool is_bf16;
};
void sample(const Sample& a);

struct Mask {
  float* logits;
  const int64_t* rows;    // [masks]
  const uint32_t* masks;  // [masks][words] a bit for each token that may be sampled
  int64_t count, words, logit_rows, vocab;
};
void mask_logits(const Mask& a);
void noise_bits(int64_t seed, int64_t choice, int64_t position, int64_t vocab, int64_t* bits);

}  // namespace kaiten
