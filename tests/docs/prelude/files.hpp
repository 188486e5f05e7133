// SPDX-License-Identifier: Apache-2.0
//
// Names that fragments about files may use.
// needs: io
#include <kvpolicy/io/damage_json.hpp>
#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/io/head_scores.hpp>
#include <kvpolicy/io/plan_json.hpp>
#include <kvpolicy/kvpolicy.hpp>
// each block
struct Engine {
  kvpolicy::ModelShape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};

  void run() { BLOCK }
};
