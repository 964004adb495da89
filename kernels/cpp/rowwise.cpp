// Kernels that touch each element once: norms, activation, rotation, and the write into the pages.
#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace kaiten {
namespace {

// Below this many elements waking a second thread costs more than it saves.
constexpr int64_t kSerialElements = 1 << 15;

constexpr int kRunsPerThread = 4;

template <class F>
void for_rows(int64_t rows, int64_t elements, const F& work) {
  for_each_run(rows, kRunsPerThread, rows * elements > kSerialElements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i);
  });
}

template <class T>
VF rounded(VF v) {
  if constexpr (sizeof(T) == 2) return widen(narrow(v));
  return v;
}

template <class T>
void norm_row(const Norm& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row / a.inner * a.x_outer + row % a.inner * a.x_inner;
  const T* weight = static_cast<const T*>(a.weight);
  T* out = static_cast<T*>(a.out) + row * a.hidden;
  const T* residual = static_cast<const T*>(a.residual);
  if (residual) residual += row / a.inner * a.residual_outer + row % a.inner * a.residual_inner;
  T* total = residual ? static_cast<T*>(a.total) + row * a.hidden : nullptr;
  VF squares = {};
  for (int64_t i = 0; i < a.hidden; i += W) {
    const int n = static_cast<int>(std::min<int64_t>(W, a.hidden - i));
    VF v = load(x + i, n);
    if (residual) {
      v = rounded<T>(v + load(residual + i, n));
      store(total + i, v, n);
    }
    squares = fma(v, v, squares);
  }
  const float mean = sum_lanes(squares) / static_cast<float>(a.hidden);
  const float scale = 1.0f / std::sqrt(mean + a.eps);
  const T* summed = residual ? total : x;
  for (int64_t i = 0; i < a.hidden; i += W) {
    const int n = static_cast<int>(std::min<int64_t>(W, a.hidden - i));
    store(out + i, load(summed + i, n) * scale * load(weight + i, n), n);
  }
}

template <class T>
void gate_row(const Gate& a, int64_t row) {
  const T* gate = static_cast<const T*>(a.gate_up) + row * a.stride;
  const T* up = gate + a.inner;
  T* out = static_cast<T*>(a.out) + row * a.inner;
  for (int64_t i = 0; i < a.inner; i += W) {
    const int n = static_cast<int>(std::min<int64_t>(W, a.inner - i));
    const VF g = load(gate + i, n);
    // e^-|g| never overflows: sigmoid(g) = 1 / (1 + e^-g) = e^g / (1 + e^g)
    const VF small = vexp(g < 0.0f ? g : -g);
    const VF sigmoid = (g < 0.0f ? small : splat(1.0f)) / (small + 1.0f);
    store(out + i, g * sigmoid * load(up + i, n), n);
  }
}

template <class T>
void rotate(T* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += W) {
    const int n = std::min(W, half - i);
    const VF first = load(x + i, n), second = load(x + half + i, n);
    const VF c = load(cos + i, n), s = load(sin + i, n);
    store(x + i, first * c - second * s, n);
    store(x + half + i, second * c + first * s, n);
  }
}

template <class T>
void rope_token(const Rope& a, int64_t token) {
  const float* cos = a.cos_sin + a.positions[token] * 2 * a.half;
  T* q = static_cast<T*>(a.q) + token * a.q_stride;
  T* k = static_cast<T*>(a.k) + token * a.k_stride;
  for (int h = 0; h < a.heads; ++h) rotate(q + h * a.head_dim, cos, cos + a.half, a.half);
  for (int h = 0; h < a.kv_heads; ++h) rotate(k + h * a.head_dim, cos, cos + a.half, a.half);
}

}  // namespace

void rms_norm(const Norm& a) {
  for_rows(a.rows, a.hidden, [&](int64_t i) { a.is_bf16 ? norm_row<bf16>(a, i) : norm_row<float>(a, i); });
}

void silu_mul(const Gate& a) {
  for_rows(a.rows, a.inner, [&](int64_t i) { a.is_bf16 ? gate_row<bf16>(a, i) : gate_row<float>(a, i); });
}

void rope(const Rope& a) {
  const int64_t elements = int64_t(a.heads + a.kv_heads) * a.head_dim;
  for_rows(a.tokens, elements, [&](int64_t i) { a.is_bf16 ? rope_token<bf16>(a, i) : rope_token<float>(a, i); });
}

void write_kv(const WriteKv& a) {
  for_rows(a.tokens, a.kv_heads * a.head_bytes, [&](int64_t i) {
    if (a.slots[i] < 0) return;
    const int64_t block = a.slots[i] / a.block_size, offset = a.slots[i] % a.block_size;
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      const int64_t to = ((block * a.kv_heads + h) * a.block_size + offset) * a.head_bytes;
      std::memcpy(a.k_pages + to, a.k + i * a.k_stride + h * a.head_bytes, a.head_bytes);
      std::memcpy(a.v_pages + to, a.v + i * a.v_stride + h * a.head_bytes, a.head_bytes);
    }
  });
}

}  // namespace kaiten
