// SPDX-License-Identifier: Apache-2.0
//
// Names that fragments of the pages may use: an engine's shape, its gates and scores of heads, and one
// layer's tensors. They are members, because names of the library would hide them at namespace level.
#include <cstddef>
#include <cstdio>
#include <memory_resource>
#include <span>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>
// each block
struct Engine {
  kvpolicy::ModelShape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  kvpolicy::HeadGates gates;    // [layers, kv_heads]
  kvpolicy::HeadScores scores;  // [layers, q_heads]
  std::size_t layer = 0;
  kvpolicy::TensorView<const float> q, k, v;
  kvpolicy::TensorView<float> out;

  void run() { BLOCK }
};
