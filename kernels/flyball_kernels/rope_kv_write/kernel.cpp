// One pass from the QKV projection to a rotated query and a written cache; see reference.py for what it composes.
#include "../cpu/kv_cache.h"
#include "../cpu/rounding.h"
#include "../cpu/works.h"
#include "../rms_norm/norm.h"
#include "rotate.h"

namespace flyball {
namespace {

template <class T, class C>
struct Heads {
  int64_t num_q, num_kv, head_dim, half;  // half: of the rotated part
  const T *q_norm, *k_norm;               // or null
  float eps, norm_offset;

  void prepare(const T* x, const T* norm, const C* cos_sin, T* out) const {
    if (norm) {
      normalise_row(x, norm, out, head_dim, eps, norm_offset);
      x = out;
    }
    rotate_head(x, cos_sin, out, half, head_dim);
  }

  // Returns where the token's values begin.
  const T* token(const T* qkv, const C* cos_sin, T* query, T* key) const {
    for (int64_t h = 0; h < num_q; ++h) prepare(qkv + h * head_dim, q_norm, cos_sin, query + h * head_dim);
    qkv += num_q * head_dim;
    for (int64_t h = 0; h < num_kv; ++h) prepare(qkv + h * head_dim, k_norm, cos_sin, key + h * head_dim);
    return qkv + num_kv * head_dim;
  }
};

// Writes a token's keys and values, one vector of each head, into a slot. Those of an int8 cache are rounded.
template <class T, class C>
void write_token(const KVCache<C>& keys, const KVCache<C>& values, int64_t slot, const T* key, const T* value) {
  const int64_t block = slot / keys.block_size, offset = slot % keys.block_size;
  for (int64_t h = 0; h < keys.num_kv_heads; ++h, key += keys.head_dim, value += keys.head_dim) {
    if constexpr (kIsInt8<C>) {
      struct Rounded;
      int8_t* const rounded = reinterpret_cast<int8_t*>(scratch<Rounded>(keys.head_dim));
      const float key_scale = round_vector(key, keys.head_dim, rounded);
      keys.write_key(block, offset, h, rounded);
      std::memcpy(keys.scale(block, offset, h), &key_scale, sizeof(float));
      const float value_scale = round_vector(value, keys.head_dim, values.value(block, offset, h));
      std::memcpy(values.scale(block, offset, h), &value_scale, sizeof(float));
    } else {
      keys.write_key(block, offset, h, key);
      values.write_value(block, offset, h, value);
    }
  }
}

Tensor rope_kv_write(const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin_cache, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& slot_mapping, const std::optional<Tensor>& q_norm,
                     const std::optional<Tensor>& k_norm, double eps, double norm_offset) {
  const Tensor rows = qkv.contiguous(), table = cos_sin_cache.contiguous();
  const Tensor at = positions.contiguous(), slots = slot_mapping.contiguous();
  const int64_t num_kv = k_cache.size(2), head_dim = head_dim_of(k_cache), num_q = rows.size(1) / head_dim - 2 * num_kv;
  const Tensor query = at::empty({rows.size(0), num_q, head_dim}, rows.options());
  run_in_team({rope_kv_write_work(rows, at, table, k_cache, v_cache, slots, q_norm, k_norm, eps, norm_offset, query)},
              rows.numel() > kParallelGrain);
  return query;
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def(
      "rope_kv_write(Tensor qkv, Tensor positions, Tensor cos_sin_cache, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor slot_mapping, Tensor? q_norm, Tensor? k_norm, float eps, float norm_offset) -> Tensor");
  m.impl("rope_kv_write", c10::DispatchKey::CPU, TORCH_FN(rope_kv_write));
}

}  // namespace

Work rope_kv_write_work(const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin_cache, const Tensor& k_cache,
                        const Tensor& v_cache, const Tensor& slot_mapping, const OptionalTensor& q_norm,
                        const OptionalTensor& k_norm, double eps, double norm_offset, const Tensor& query) {
  const int64_t num_tokens = qkv.size(0), width = qkv.size(1), num_q = query.size(1), head_dim = query.size(2);
  const int64_t num_kv = k_cache.size(2), rotary_dim = cos_sin_cache.size(1);
  const int64_t *position = data<const int64_t>(positions), *slot = data<const int64_t>(slot_mapping);
  check_below("positions", position, num_tokens, cos_sin_cache.size(0));
  check_below("slot_mapping", slot, num_tokens, k_cache.size(0) * k_cache.size(1));
  Work work;
  dispatch(qkv, "rope_kv_write", [&]<class T>(T*) {
    dispatch(cos_sin_cache, "rope_kv_write", [&]<class C>(C*) {
      const Heads<T, C> heads{num_q, num_kv, head_dim, rotary_dim / 2, data_or_null<T>(q_norm), data_or_null<T>(k_norm),
                              static_cast<float>(eps), static_cast<float>(norm_offset)};
      const T* from = data<const T>(qkv);
      const C* cos_sin = data<const C>(cos_sin_cache);
      T* to = data<T>(query);
      const auto write = [&]<class K>(K*) {
        const KVCache<K> keys{data<K>(k_cache), k_cache.size(1), num_kv, head_dim};
        const KVCache<K> values{data<K>(v_cache), k_cache.size(1), num_kv, head_dim};
        work.run = [=](const Team& team, float*) {
          struct Key;
          T* const key = reinterpret_cast<T*>(scratch<Key>(num_kv * head_dim));
          team.share(num_tokens, [&](int64_t i) {
            const T* value = heads.token(from + i * width, cos_sin + position[i] * rotary_dim, to + i * num_q * head_dim, key);
            write_token(keys, values, slot[i], key, value);
          });
        };
      };
      if (is_int8(k_cache)) write(static_cast<int8_t*>(nullptr));
      else write(static_cast<T*>(nullptr));
    });
  });
  return work;
}

}  // namespace flyball
