// The Python face: the launchers in kernels/*.py have checked shapes, dtypes and strides; here only what must not be
// trusted to reach a pointer (ids and lengths inside the tensors) is checked, before anything is written.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include "checks.h"
#include "kernels.h"
#include "simd.h"

namespace {

using at::Tensor;
namespace py = pybind11;

bool is_bf16(const Tensor& x) { return x.scalar_type() == at::kBFloat16; }

Tensor paged_attention(const Tensor& q, const Tensor& k_pages, const Tensor& v_pages, const Tensor& block_tables,
                       const Tensor& query_starts, const Tensor& context_lengths, double scale, int64_t window,
                       double softcap) {
  Tensor out = at::empty({q.size(0), q.size(1), q.size(2)}, q.options());
  kaiten::Attention a{};
  a.q = q.const_data_ptr(), a.k_pages = k_pages.const_data_ptr(), a.v_pages = v_pages.const_data_ptr();
  a.out = out.data_ptr();
  a.tables = block_tables.const_data_ptr<int32_t>();
  a.query_starts = query_starts.const_data_ptr<int32_t>();
  a.contexts = context_lengths.const_data_ptr<int32_t>();
  a.q_stride = q.stride(0), a.table_stride = block_tables.stride(0);
  a.rows = context_lengths.size(0), a.heads = q.size(1), a.kv_heads = k_pages.size(1);
  a.head_dim = q.size(2), a.block_size = k_pages.size(2);
  a.scale = scale, a.is_bf16 = is_bf16(q), a.window = window, a.softcap = softcap;
  kaiten::check_rows({a.tables, a.rows, a.table_stride, block_tables.size(1), a.block_size, k_pages.size(0), window},
                     a.query_starts, a.contexts, q.size(0));
  if (q.size(0) > 0) kaiten::paged_attention(a);
  return out;
}

kaiten::Norm norm_of(const Tensor& x, const Tensor& weight, double eps, const Tensor& out) {
  kaiten::Norm a{};
  a.x = x.const_data_ptr(), a.weight = weight.const_data_ptr(), a.out = out.data_ptr();
  a.hidden = x.size(-1), a.inner = x.dim() == 3 ? x.size(1) : 1, a.rows = x.size(0) * a.inner;
  a.x_outer = x.stride(0), a.x_inner = x.dim() == 3 ? x.stride(1) : 0;
  a.eps = eps, a.is_bf16 = is_bf16(x);
  return a;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  Tensor out = at::empty(x.sizes(), x.options());
  kaiten::rms_norm(norm_of(x, weight, eps, out));
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  Tensor out = at::empty(x.sizes(), x.options()), total = at::empty(x.sizes(), x.options());
  kaiten::Norm a = norm_of(x, weight, eps, out);
  a.residual = residual.const_data_ptr(), a.total = total.data_ptr();
  a.residual_outer = residual.stride(0), a.residual_inner = residual.dim() == 3 ? residual.stride(1) : 0;
  kaiten::rms_norm(a);
  return {out, total};
}

Tensor gate_mul(const Tensor& gate_up, bool is_gelu) {
  const int64_t inner = gate_up.size(1) / 2;
  Tensor out = at::empty({gate_up.size(0), inner}, gate_up.options());
  kaiten::gate_mul({gate_up.const_data_ptr(), out.data_ptr(), gate_up.size(0), inner, gate_up.stride(0),
                    is_bf16(gate_up), is_gelu});
  return out;
}

void rope(const Tensor& q, const Tensor& k, const Tensor& positions, const Tensor& cos_sin) {
  kaiten::Rope a{};
  a.q = q.data_ptr(), a.k = k.data_ptr();
  a.positions = positions.const_data_ptr<int64_t>(), a.cos_sin = cos_sin.const_data_ptr<float>();
  a.tokens = q.size(0), a.q_stride = q.stride(0), a.k_stride = k.stride(0);
  a.heads = q.size(1), a.kv_heads = k.size(1), a.head_dim = q.size(2), a.half = cos_sin.size(2);
  a.is_bf16 = is_bf16(q);
  kaiten::check_positions(a.positions, a.tokens, cos_sin.size(0));
  kaiten::rope(a);
}

void write_kv(const Tensor& k, const Tensor& v, const Tensor& k_pages, const Tensor& v_pages, const Tensor& slots) {
  const int64_t size = k.element_size();
  kaiten::WriteKv a{};
  a.k = static_cast<const char*>(k.const_data_ptr()), a.v = static_cast<const char*>(v.const_data_ptr());
  a.k_pages = static_cast<char*>(k_pages.data_ptr()), a.v_pages = static_cast<char*>(v_pages.data_ptr());
  a.slots = slots.const_data_ptr<int64_t>();
  a.tokens = k.size(0), a.k_stride = k.stride(0) * size, a.v_stride = v.stride(0) * size;
  a.block_size = k_pages.size(2), a.kv_heads = k.size(1), a.head_bytes = k.size(2) * size;
  kaiten::check_slots(a.slots, a.tokens, k_pages.size(0) * a.block_size);
  kaiten::write_kv(a);
}

std::tuple<Tensor, Tensor> sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                                  const Tensor& top_p, const Tensor& min_p, const Tensor& seed, const Tensor& choice,
                                  const Tensor& position) {
  Tensor token_ids = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  Tensor ok = at::empty({logits.size(0)}, logits.options().dtype(at::kBool));
  kaiten::Sample a{};
  a.logits = logits.const_data_ptr<float>(), a.temperature = temperature.const_data_ptr<float>();
  a.top_p = top_p.const_data_ptr<float>(), a.min_p = min_p.const_data_ptr<float>();
  a.top_k = top_k.const_data_ptr<int64_t>(), a.seed = seed.const_data_ptr<int64_t>();
  a.choice = choice.const_data_ptr<int64_t>(), a.position = position.const_data_ptr<int64_t>();
  a.token_ids = token_ids.data_ptr<int64_t>(), a.ok = ok.data_ptr<bool>();
  a.rows = logits.size(0), a.vocab = logits.size(1);
  kaiten::sample(a);
  return {token_ids, ok};
}

Tensor noise_bits(int64_t seed, int64_t choice, int64_t position, int64_t vocab) {
  Tensor bits = at::empty({vocab}, at::kLong);
  kaiten::noise_bits(seed, choice, position, vocab, bits.data_ptr<int64_t>());
  return bits;
}

bool has_linear(const Tensor& weight) { return kaiten::has_linear(is_bf16(weight), weight.size(1)); }

std::tuple<int64_t, int64_t> packed_shape(const Tensor& weight) {
  return {kaiten::packed_rows(weight.size(0)), weight.size(1)};
}

void pack_linear(const Tensor& weight, const Tensor& packed) {
  kaiten::pack_linear({weight.const_data_ptr(), packed.data_ptr(), weight.size(0), weight.size(1), is_bf16(weight)});
}

const int64_t* checked_ids(const Tensor& ids, int64_t out_features) {
  const int64_t* id = ids.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.size(0); ++i)
    TORCH_CHECK_INDEX(id[i] >= 0 && id[i] < out_features, "ids: ", id[i], " is not one of ", out_features, " rows");
  return id;
}

Tensor unpack_rows(const Tensor& packed, const Tensor& ids, int64_t out_features) {
  const int64_t* id = checked_ids(ids, out_features);
  Tensor rows = at::empty({ids.size(0), packed.size(1)}, packed.options());
  kaiten::unpack_rows({packed.const_data_ptr(), id, rows.data_ptr(), ids.size(0), packed.size(1), is_bf16(packed)});
  return rows;
}

Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out_features,
              const std::optional<Tensor>& scales) {
  Tensor y = at::empty({x.size(0), out_features}, x.options());
  kaiten::linear({x.const_data_ptr(), packed.const_data_ptr(), bias ? bias->const_data_ptr() : nullptr, y.data_ptr(),
                  x.size(0), x.size(1), out_features, is_bf16(x), scales ? scales->const_data_ptr<float>() : nullptr});
  return y;
}

void pack_int8(const Tensor& codes, const Tensor& packed, at::ScalarType dtype) {
  kaiten::pack_int8({codes.const_data_ptr(), packed.data_ptr(), codes.size(0), codes.size(1), dtype == at::kBFloat16});
}

Tensor unpack_int8_rows(const Tensor& packed, const Tensor& scales, const Tensor& ids, at::ScalarType dtype) {
  const int64_t* id = checked_ids(ids, scales.size(0));
  Tensor rows = at::empty({ids.size(0), packed.size(1)}, packed.options().dtype(dtype));
  kaiten::unpack_int8_rows({packed.const_data_ptr(), id, rows.data_ptr(), ids.size(0), packed.size(1), is_bf16(rows)},
                           scales.const_data_ptr<float>());
  return rows;
}

std::string instructions() {
  if (KAITEN_BF16_DOT) return "avx512-bf16";
  if (KAITEN_AVX512) return "avx512";
#if defined(__AVX2__)
  return "avx2";
#else
  return "generic";
#endif
}

}  // namespace

void bind_layers(py::module_& m);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  // Without the interpreter's lock: a step's thread must not stop the event loop's.
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("paged_attention", &paged_attention, Unlocked());
  m.def("rms_norm", &rms_norm, Unlocked());
  m.def("add_rms_norm", &add_rms_norm, Unlocked());
  m.def("gate_mul", &gate_mul, Unlocked());
  m.def("rope", &rope, Unlocked());
  m.def("write_kv", &write_kv, Unlocked());
  m.def("has_linear", &has_linear);
  m.def("packed_shape", &packed_shape);
  m.def("pack_linear", &pack_linear, Unlocked());
  m.def("unpack_rows", &unpack_rows, Unlocked());
  m.def("linear", &linear, Unlocked(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg("scales") = std::nullopt);
  m.def("pack_int8", &pack_int8, Unlocked());
  m.def("unpack_int8_rows", &unpack_int8_rows, Unlocked());
  m.def("sample", &sample, Unlocked());
  m.def("noise_bits", &noise_bits, Unlocked());
  m.def("instructions", &instructions);
  bind_layers(m);
}
