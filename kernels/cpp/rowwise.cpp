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

// residual and total may be null, and the same; out may be x.
template <class T>
void norm(const T* x, const T* residual, const T* weight, T* out, T* total, int64_t hidden, float eps) {
  VF squares = {};
  for (int64_t i = 0; i < hidden; i += W) {
    const int n = static_cast<int>(std::min<int64_t>(W, hidden - i));
    VF v = load(x + i, n);
    if (residual) {
      v = rounded<T>(v + load(residual + i, n));
      store(total + i, v, n);
    }
    squares = fma(v, v, squares);
  }
  const float mean = sum_lanes(squares) / static_cast<float>(hidden);
  const float scale = 1.0f / std::sqrt(mean + eps);
  const T* summed = residual ? total : x;
  for (int64_t i = 0; i < hidden; i += W) {
    const int n = static_cast<int>(std::min<int64_t>(W, hidden - i));
    store(out + i, load(summed + i, n) * scale * load(weight + i, n), n);
  }
}

template <class T>
void add_row(const Norm& a, int64_t row) {
  const T *x = static_cast<const T*>(a.x) + row * a.hidden, *residual = static_cast<const T*>(a.residual) + row * a.hidden;
  T* total = static_cast<T*>(a.total) + row * a.hidden;
  for (int64_t i = 0; i < a.hidden; i += W) {
    const int n = static_cast<int>(std::min<int64_t>(W, a.hidden - i));
    store(total + i, load(x + i, n) + load(residual + i, n), n);
  }
}

template <class T>
void norm_row(const Norm& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row / a.inner * a.x_outer + row % a.inner * a.x_inner;
  const T* residual = static_cast<const T*>(a.residual);
  if (residual) residual += row / a.inner * a.residual_outer + row % a.inner * a.residual_inner;
  T* total = residual ? static_cast<T*>(a.total) + row * a.hidden : nullptr;
  norm(x, residual, static_cast<const T*>(a.weight), static_cast<T*>(a.out) + row * a.hidden, total, a.hidden, a.eps);
}

// e^x up to 88, as exactly as a result in T can show.
template <class T>
VF exponential(VF x) {
#if KAITEN_EXP2_COARSE
  if constexpr (sizeof(T) == 2) return vexp2_coarse(x * 1.44269504f);
#endif
  return vexp(x);
}

// What the gate is times, as 1 / (1 + e^-this): of gelu by tanh 2 sqrt(2 / pi) (g + 0.044715 g^3), of silu the gate.
template <bool kGelu>
VF gate_exponent(VF g) {
  if constexpr (kGelu) return g * (g * g * splat(0.0713548128f) + splat(1.5957691216f));
  return g;
}

template <class T, bool kGelu>
void gate_row(const Gate& a, int64_t row) {
  const T* gate = static_cast<const T*>(a.gate_up) + row * a.stride;
  const T* up = gate + a.inner;
  T* out = static_cast<T*>(a.out) + row * a.inner;
  for (int64_t i = 0; i < a.inner; i += W) {
    const int n = static_cast<int>(std::min<int64_t>(W, a.inner - i));
    const VF g = load(gate + i, n);
    // Beyond 88 e^-g is no number, and g / (1 + e^88) is 0 to all that is left of it.
    store(out + i, g / (exponential<T>(vmin(-gate_exponent<kGelu>(g), splat(88.0f))) + 1.0f) * load(up + i, n), n);
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

void write_token(const WriteKv& a, int64_t token) {
  if (a.slots[token] < 0) return;
  const int64_t block = a.slots[token] / a.block_size, offset = a.slots[token] % a.block_size;
  for (int64_t h = 0; h < a.kv_heads; ++h) {
    const int64_t to = ((block * a.kv_heads + h) * a.block_size + offset) * a.head_bytes;
    std::memcpy(a.k_pages + to, a.k + token * a.k_stride + h * a.head_bytes, a.head_bytes);
    std::memcpy(a.v_pages + to, a.v + token * a.v_stride + h * a.head_bytes, a.head_bytes);
  }
}

template <class T>
void norm_heads(void* heads, int count, int head_dim, const void* weight, float eps) {
  T* x = static_cast<T*>(heads);
  for (int h = 0; h < count; ++h, x += head_dim)
    norm<T>(x, nullptr, static_cast<const T*>(weight), x, nullptr, head_dim, eps);
}

template <class T>
void rope_write_token(const RopeWriteKv& a, int64_t token) {
  const Rope& r = a.rope;
  if (a.q_norm) {
    const int joint = a.is_norm_joint;
    const auto normalise = [&](void* x, int64_t offset, int heads, const void* weight) {
      norm_heads<T>(static_cast<T*>(x) + offset, joint ? 1 : heads, joint ? heads * r.head_dim : r.head_dim, weight,
                    a.eps);
    };
    normalise(r.q, token * r.q_stride, r.heads, a.q_norm);
    normalise(r.k, token * r.k_stride, r.kv_heads, a.k_norm);
  }
  rope_token<T>(r, token);
  write_token(a.write, token);
}

}  // namespace

void rms_norm(const Norm& a) {
  for_rows(a.rows, a.hidden, [&](int64_t i) { a.is_bf16 ? norm_row<bf16>(a, i) : norm_row<float>(a, i); });
}

void add_rows(const Norm& a) {
  for_rows(a.rows, a.hidden, [&](int64_t i) { a.is_bf16 ? add_row<bf16>(a, i) : add_row<float>(a, i); });
}

void gate_mul(const Gate& a) {
  const auto run = [&](auto row) { for_rows(a.rows, a.inner, [&](int64_t i) { row(a, i); }); };
  if (a.is_bf16) a.is_gelu ? run(gate_row<bf16, true>) : run(gate_row<bf16, false>);
  else a.is_gelu ? run(gate_row<float, true>) : run(gate_row<float, false>);
}

void rope(const Rope& a) {
  const int64_t elements = int64_t(a.heads + a.kv_heads) * a.head_dim;
  for_rows(a.tokens, elements, [&](int64_t i) { a.is_bf16 ? rope_token<bf16>(a, i) : rope_token<float>(a, i); });
}

void write_kv(const WriteKv& a) {
  for_rows(a.tokens, a.kv_heads * a.head_bytes, [&](int64_t i) { write_token(a, i); });
}

void rope_write_kv(const RopeWriteKv& a) {
  const Rope& r = a.rope;
  const int64_t elements = int64_t(r.heads + 2 * r.kv_heads) * r.head_dim;
  for_rows(r.tokens, elements, [&](int64_t i) {
    r.is_bf16 ? rope_write_token<bf16>(a, i) : rope_write_token<float>(a, i);
  });
}

}  // namespace kaiten
