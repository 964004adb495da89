// The Python face of layers.cpp: a model's tensors, seen once, and the memory that its steps share. kernels/layers.py
// has checked shapes and dtypes.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include "checks.h"
#include "kernels.h"

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;
namespace py = pybind11;

// Of each layer, in this order; a linear's weight is followed by its bias and its scales.
enum Part {
  kAttentionNorm, kQkv, kQNorm = kQkv + 3, kKNorm, kOutput, kAttentionOutputNorm = kOutput + 3,
  kMlpNorm, kGateUp, kDown = kGateUp + 3, kMlpOutputNorm = kDown + 3, kKPages, kVPages, kCosSin, kParts
};

const void* pointer(const Maybe& x) { return x ? x->const_data_ptr() : nullptr; }

class Layers {
 public:
  // `parts` of each layer as above, weights as `pack_linear` lays them out; the group of each; the window of each group.
  Layers(std::vector<std::vector<Maybe>> parts, int64_t heads, int64_t hidden, int64_t inner, bool is_gelu, double eps,
         double scale, std::vector<int64_t> groups, std::vector<int64_t> windows, double softcap)
      : parts_(std::move(parts)), windows_(std::move(windows)) {
    const Tensor &pages = *parts_.at(0).at(kKPages), &cos_sin = *parts_[0].at(kCosSin);
    a_.count = parts_.size(), a_.hidden = hidden, a_.inner = inner, a_.is_gelu = is_gelu;
    a_.heads = heads, a_.kv_heads = pages.size(1), a_.block_size = pages.size(2), a_.head_dim = pages.size(3);
    a_.half = cos_sin.size(2), positions_max_ = cos_sin.size(0);
    a_.eps = eps, a_.scale = scale, a_.softcap = float(softcap), a_.is_bf16 = pages.scalar_type() == at::kBFloat16;
    slots_max_ = pages.size(0) * pages.size(2);
    for (size_t i = 0; i < parts_.size(); ++i) {
      layers_.push_back(layer(parts_[i]));
      layers_[i].group = int(groups.at(i)), layers_[i].window = int(windows_.at(groups[i]));
    }
    a_.layers = layers_.data();
  }

  // (last layer's output, residual), [tokens that leave it, hidden] each. `residual` holds the embeddings at first.
  std::tuple<Tensor, Tensor> run(const Tensor& residual, const Tensor& positions, const Tensor& slots,
                                 const Tensor& tables, const Tensor& starts, const Tensor& contexts,
                                 const Maybe& logits_indices, const Maybe& last_starts, const Maybe& last_contexts) {
    kaiten::LayerStep step{};
    step.all = {starts.const_data_ptr<int32_t>(), contexts.const_data_ptr<int32_t>(), residual.size(0)};
    step.last = step.all;
    if (logits_indices) {
      step.logits_indices = logits_indices->const_data_ptr<int64_t>();
      step.last = {last_starts->const_data_ptr<int32_t>(), last_contexts->const_data_ptr<int32_t>(),
                   logits_indices->size(0)};
    }
    step.positions = positions.const_data_ptr<int64_t>(), step.slots = slots.const_data_ptr<int64_t>();
    step.tables = tables.const_data_ptr<int32_t>();
    step.rows = contexts.size(0), step.group_stride = tables.stride(0), step.table_stride = tables.stride(1);
    check(step, tables);
    Tensor out = at::empty({step.last.tokens, a_.hidden}, residual.options());
    step.residual = residual.data_ptr(), step.out = out.data_ptr();
    kaiten::run_layers(a_, step, scratch(step.all.tokens));
    return {out, residual.narrow(0, 0, step.last.tokens)};
  }

 private:
  kaiten::Layer layer(const std::vector<Maybe>& of) const {
    TORCH_CHECK_VALUE(of.size() == kParts, "layers: each must have ", int(kParts), " parts");
    const int64_t q = int64_t(a_.heads) * a_.head_dim, kv = int64_t(a_.kv_heads) * a_.head_dim;
    kaiten::Layer l{};
    l.attention_norm = pointer(of[kAttentionNorm]), l.attention_output_norm = pointer(of[kAttentionOutputNorm]);
    l.mlp_norm = pointer(of[kMlpNorm]), l.mlp_output_norm = pointer(of[kMlpOutputNorm]);
    l.q_norm = pointer(of[kQNorm]), l.k_norm = pointer(of[kKNorm]);
    l.is_qk_norm_joint = of[kQNorm] && of[kQNorm]->numel() != a_.head_dim;
    const Tensor& cos_sin = *of[kCosSin];
    TORCH_CHECK_VALUE(cos_sin.size(0) == positions_max_ && cos_sin.size(2) == a_.half, "layers: tables differ in shape");
    l.cos_sin = cos_sin.const_data_ptr<float>();
    l.qkv = linear(of, kQkv, a_.hidden, q + 2 * kv), l.output = linear(of, kOutput, q, a_.hidden);
    l.gate_up = linear(of, kGateUp, a_.hidden, 2 * a_.inner), l.down = linear(of, kDown, a_.inner, a_.hidden);
    l.k_pages = of[kKPages]->data_ptr(), l.v_pages = of[kVPages]->data_ptr();
    return l;
  }

  kaiten::Linear linear(const std::vector<Maybe>& of, int weight, int64_t in, int64_t out) const {
    kaiten::Linear l{};
    l.packed = pointer(of[weight]), l.bias = pointer(of[weight + 1]);
    l.scales = static_cast<const float*>(pointer(of[weight + 2]));
    l.in = in, l.out = out, l.is_bf16 = a_.is_bf16;
    return l;
  }

  void check(const kaiten::LayerStep& s, const Tensor& tables) const {
    const int64_t groups = windows_.size();
    TORCH_CHECK_VALUE(tables.size(0) == groups, "tables: ", tables.size(0), " layer groups instead of ", groups);
    kaiten::check_positions(s.positions, s.all.tokens, positions_max_);
    kaiten::check_slots(s.slots, groups * s.all.tokens, slots_max_);
    for (int64_t g = 0; g < groups; ++g) {
      const kaiten::Tables own{s.tables + g * s.group_stride, s.rows, s.table_stride, tables.size(2), a_.block_size,
                               slots_max_ / a_.block_size, windows_[g]};
      kaiten::check_rows(own, s.all.starts, s.all.contexts, s.all.tokens);
      if (s.logits_indices) kaiten::check_rows(own, s.last.starts, s.last.contexts, s.last.tokens);
    }
    if (!s.logits_indices) return;
    for (int64_t i = 0, least = 0; i < s.last.tokens; least = s.logits_indices[i++] + 1)
      TORCH_CHECK_INDEX(s.logits_indices[i] >= least && s.logits_indices[i] < s.all.tokens, "logits_indices: ", s.logits_indices[i],
                        " must ascend below ", s.all.tokens);
  }

  // Grows to what the largest step needs, and stays.
  void* scratch(int64_t tokens) {
    const int64_t bytes = kaiten::layers_scratch_bytes(a_, tokens);
    if (!scratch_.defined() || scratch_.numel() < bytes) {
      scratch_ = Tensor();
      scratch_ = at::empty({bytes}, at::kByte);
    }
    return scratch_.data_ptr();
  }

  const std::vector<std::vector<Maybe>> parts_;
  const std::vector<int64_t> windows_;
  std::vector<kaiten::Layer> layers_;
  kaiten::Layers a_{};
  int64_t slots_max_ = 0, positions_max_ = 0;
  Tensor scratch_;
};

}  // namespace

void bind_layers(py::module_& m) {
  py::class_<Layers>(m, "Layers")
      .def(py::init<std::vector<std::vector<Maybe>>, int64_t, int64_t, int64_t, bool, double, double,
                    std::vector<int64_t>, std::vector<int64_t>, double>())
      .def("run", &Layers::run, py::call_guard<py::gil_scoped_release>());
}
