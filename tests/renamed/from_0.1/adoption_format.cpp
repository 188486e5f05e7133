// SPDX-License-Identifier: Apache-2.0
//
// Names that fragments about printing may use.
// needs: format
#include <kvpolicy/format.hpp>
#include <kvpolicy/kvpolicy.hpp>
namespace block_17 {
struct Engine {
  kvpolicy::HeadGates gates{32, 8, 0.5};
  kvpolicy::ModelShape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};

  void run() {
    const auto plan = kvpolicy::duo_plan<kvpolicy::half>(shape, gates);
    kvpolicy::DuoCache<kvpolicy::half> cache{plan};

    fmt::print("{}\n",
               plan);  // 32 layers of 8 KV heads: 128 full, 128 sink_recent; grows by 65.54 kB a token
    fmt::print("{}\n", plan.memory(8192));                  // 562.2 MB (rows 562.0 MB, tail 131.1 kB)
    fmt::print("{}\n", kvpolicy::Bytes{cache.bytes()});     // 131.1 kB; {:.1MiB} for a unit and digits
    fmt::print("{}\n", kvpolicy::describe(plan.at(0, 0)));  // every row
    try {
      cache.truncate(1);
    } catch (const kvpolicy::Error& error) {
      fmt::print(stderr, "{}\n", error);  // RollbackError: KvCache::truncate: to 1 tokens, but ...
    }
  }
};

}  // namespace block_17
