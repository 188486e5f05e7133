// SPDX-License-Identifier: Apache-2.0
//
// Names that fragments about printing may use.
// needs: format
#include <kvpolicy/format.hpp>
#include <kvpolicy/kvpolicy.hpp>
// each block
struct Engine {
  kvpolicy::HeadGates gates{32, 8, 0.5};
  kvpolicy::ModelShape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};

  void run() {
    const auto plan = kvpolicy::duo_plan<kvpolicy::float16>(shape, gates);
    kvpolicy::DuoCache<kvpolicy::float16> cache{plan};
    BLOCK
  }
};
