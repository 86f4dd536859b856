// A dense decoder layer in one parallel region: the other ops' work, one after another.
#include "../cpu/kv_cache.h"
#include "../cpu/works.h"
#include "../linear/linear.h"

namespace flyball {
namespace {

// Raise ValueError unless the tensor is like this; -1 stands for any length.
void check_tensor(const char* name, const Tensor& tensor, at::ScalarType type, at::IntArrayRef shape) {
  bool fits = tensor.dim() == static_cast<int64_t>(shape.size()) && tensor.scalar_type() == type && tensor.is_contiguous();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 || tensor.size(i) == shape[i];
  TORCH_CHECK_VALUE(fits, name, " is ", tensor.scalar_type(), " of shape ", tensor.sizes(), " and strides ", tensor.strides(),
                    "; it must be ", type, " of shape ", shape, " (-1: any length) and contiguous.");
}

using Part = c10::intrusive_ptr<Linear>;

struct DecoderLayer : torch::CustomClassHolder {
  Part qkv, output, gate_up, down;
  Tensor attention_norm, mlp_norm;
  OptionalTensor q_norm, k_norm;
  double eps, norm_offset;
  Tensor cos_sin_cache;
  double scale;
  std::optional<int64_t> sliding_window;
  std::optional<double> softcap;
  bool is_gelu;

  DecoderLayer(Part qkv, Part output, Part gate_up, Part down, Tensor attention_norm, Tensor mlp_norm, OptionalTensor q_norm,
               OptionalTensor k_norm, double eps, double norm_offset, Tensor cos_sin_cache, double scale,
               std::optional<int64_t> sliding_window, std::optional<double> softcap, bool is_gelu)
      : qkv(std::move(qkv)), output(std::move(output)), gate_up(std::move(gate_up)), down(std::move(down)),
        attention_norm(std::move(attention_norm)), mlp_norm(std::move(mlp_norm)), q_norm(std::move(q_norm)),
        k_norm(std::move(k_norm)), eps(eps), norm_offset(norm_offset), cos_sin_cache(std::move(cos_sin_cache)), scale(scale),
        sliding_window(sliding_window), softcap(softcap), is_gelu(is_gelu) {}

  std::tuple<Tensor, Tensor> run(const Tensor& x, const OptionalTensor& residual, const Tensor& positions,
                                 const Tensor& k_cache, const Tensor& v_cache, const Tensor& slot_mapping,
                                 const Tensor& block_tables, const Tensor& cu_query_lens, const Tensor& context_lens) const {
    check(x, residual, positions, k_cache, v_cache, slot_mapping, block_tables, cu_query_lens, context_lens);
    const int64_t rows = x.size(0), head_dim = head_dim_of(k_cache), num_q_heads = output->in_features / head_dim;
    const auto empty = [&](int64_t columns) { return at::empty({rows, columns}, x.options()); };
    const Tensor normed = empty(x.size(1)), projected = empty(qkv->out_features), added = empty(x.size(1));
    const Tensor query = empty(output->in_features).view({rows, num_q_heads, head_dim}), attended = at::empty_like(query);
    const Tensor inner = empty(gate_up->out_features), gated = empty(down->in_features);
    const Tensor out = empty(x.size(1)), total = empty(x.size(1));
    const Tensor entered = residual ? empty(x.size(1)) : x;
    run_in_team({
        rms_norm_work(x, residual, attention_norm, eps, norm_offset, normed, residual ? OptionalTensor(entered) : OptionalTensor()),
        qkv->work(normed, projected),
        rope_kv_write_work(projected, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, q_norm, k_norm, eps, norm_offset,
                           query),
        paged_attention_work(query, k_cache, v_cache, block_tables, cu_query_lens, context_lens, scale, sliding_window, softcap,
                             {}, {}, attended),
        output->work(attended.view({rows, output->in_features}), added),
        rms_norm_work(added, entered, mlp_norm, eps, norm_offset, normed, total),
        gate_up->work(normed, inner),
        swiglu_work(inner, is_gelu, gated),
        down->work(gated, out),
    });
    return {out, total};
  }

  void check(const Tensor& x, const OptionalTensor& residual, const Tensor& positions, const Tensor& k_cache,
             const Tensor& v_cache, const Tensor& slot_mapping, const Tensor& block_tables, const Tensor& cu_query_lens,
             const Tensor& context_lens) const {
    const auto type = attention_norm.scalar_type();
    const int64_t rows = positions.numel(), num_seqs = context_lens.numel();
    check_tensor("x", x, type, {rows, qkv->in_features});
    if (residual) check_tensor("residual", *residual, type, x.sizes());
    const auto cached = is_int8(k_cache) ? at::kChar : type;
    check_tensor("k_cache", k_cache, cached, {-1, -1, -1, -1});
    check_tensor("v_cache", v_cache, cached, k_cache.sizes());
    check_tensor("positions", positions, at::kLong, {rows});
    check_tensor("slot_mapping", slot_mapping, at::kLong, {rows});
    check_tensor("block_tables", block_tables, at::kInt, {num_seqs, -1});
    check_tensor("cu_query_lens", cu_query_lens, at::kInt, {num_seqs + 1});
    check_tensor("context_lens", context_lens, at::kInt, {num_seqs});
    const int64_t num_kv = k_cache.size(2), head_dim = head_dim_of(k_cache), query = output->in_features;
    TORCH_CHECK_VALUE(head_dim > 0 && num_kv > 0 && query % (head_dim * num_kv) == 0 &&
                          qkv->out_features == query + 2 * num_kv * head_dim && cos_sin_cache.size(1) <= head_dim,
                      "k_cache has ", num_kv, " heads of ", head_dim, "; they do not fit a layer with ", qkv->out_features,
                      " outputs of qkv, ", query, " of them of query heads, and ", cos_sin_cache.size(1), " angles.");
    for (const auto& [name, norm] : {std::pair("q_norm", &q_norm), std::pair("k_norm", &k_norm)})
      if (*norm) check_tensor(name, **norm, type, {head_dim});
  }
};

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.class_<Linear>("Linear")  // before the class that takes it
      .def_static("packed", &packed_linear)
      .def_static("int8", &int8_linear)
      .def_static("int4", &int4_linear);
  m.class_<DecoderLayer>("DecoderLayer")
      .def(torch::init<Part, Part, Part, Part, Tensor, Tensor, OptionalTensor, OptionalTensor, double, double, Tensor, double,
                       std::optional<int64_t>, std::optional<double>, bool>())
      .def("run", &DecoderLayer::run);
}

}  // namespace
}  // namespace flyball
