// SPDX-License-Identifier: Apache-2.0
//
// What a layer of the Llama family does before attention and after it, for the model in one process (llama.cpp) and
// over ranks (parallel/), where a layer's matrices have the heads and the neurons of one rank.
#pragma once

#include <cstddef>
#include <vector>

#include <reference_model/config.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/operations.hpp>
#include <reference_model/parallel.hpp>

namespace kvpolicy::reference {

/// The data that layers of one forward pass hand on. All work except attention treats rows separately. `q` to `up` are
/// of one layer, and as wide as the widest.
struct Activations {
  /// Widths of a row: of all query heads, of all KV heads, and of the neurons.
  struct Widths {
    std::size_t q, kv, neurons;
  };
  Activations(std::size_t rows_, std::size_t hidden, const Widths& widths)
      : rows{rows_},
        x(rows * hidden),
        normed(x.size()),
        q(rows * widths.q),
        k(rows * widths.kv),
        v(k.size()),
        attended(q.size()),
        gate(rows * widths.neurons),
        up(gate.size()) {}

  std::size_t rows;
  std::vector<float> x;  // the residual stream
  std::vector<float> normed, q, k, v, attended, gate, up;
};

inline void normalise_rows(const LlamaConfig& c, const std::vector<float>& norm, Activations& a) {
  for_each_row_block(a.rows, [&](std::size_t first, std::size_t count) {
    const std::size_t at = first * c.hidden;
    normalise(a.x.data() + at, count, norm, c.norm_eps, a.normed.data() + at);
  });
}

inline void before_attention(const LlamaConfig& c, const LlamaLayer& layer, const Rotation& rotation,
                             Activations& a) {
  normalise_rows(c, layer.attention_norm, a);
  const std::size_t q_heads = layer.q.outputs() / c.head_dim;
  const std::size_t kv_heads = layer.k.outputs() / c.head_dim;
  if (q_heads == 0) return;  // a rank may have none
  apply_all({{&layer.q, a.q.data()}, {&layer.k, a.k.data()}, {&layer.v, a.v.data()}}, a.normed.data(),
            a.rows);
  for_each_row_block(a.rows, [&](std::size_t first, std::size_t count) {
    normalise_heads(c, layer, count, a.q.data() + first * layer.q.outputs(),
                    a.k.data() + first * layer.k.outputs());
    rotation.apply(a.q.data(), q_heads, first, count);
    rotation.apply(a.k.data(), kv_heads, first, count);
  });
}

/// `add(linear, input, a.x)` adds the result of a row of matrices' last one to the residual stream.
template <class Add>
void after_attention(const LlamaConfig& c, const LlamaLayer& layer, Activations& a, Add add) {
  add(layer.o, a.attended.data(), a.x);
  normalise_rows(c, layer.mlp_norm, a);
  const std::size_t neurons = layer.gate.outputs();
  if (neurons > 0) {
    apply_all({{&layer.gate, a.gate.data()}, {&layer.up, a.up.data()}}, a.normed.data(), a.rows);
    for_each_row_block(a.rows, [&](std::size_t first, std::size_t count) {
      const std::size_t at = first * neurons;
      swiglu(a.gate.data() + at, a.up.data() + at, count * neurons);
    });
  }
  add(layer.down, a.gate.data(), a.x);
}

}  // namespace kvpolicy::reference
