// SPDX-License-Identifier: Apache-2.0
//
// Names that fragments about the CPU engine may use: a pool of threads of the caller.
// needs: cpu
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/duo.hpp>
#include <kvpolicy/kivi.hpp>
namespace block_4 {
struct Pool {
  std::size_t size() const;
  template <class Body>
  void run(std::size_t count, const Body& body);
};

using Cache = kvpolicy::cpu::KvCache<kvpolicy::bfloat16>;
using Sequence = kvpolicy::BatchSequence<Cache>;

void step(kvpolicy::cpu::Batch<kvpolicy::bfloat16>& batch, std::size_t layer,
          std::vector<Sequence>& sequences, const std::vector<std::int32_t>& indptr,
          const kvpolicy::TensorView<float>& q, const kvpolicy::TensorView<float>& k,
          const kvpolicy::TensorView<float>& v, const kvpolicy::TensorView<float>& out) {
  for (const kvpolicy::LeftOut& one : batch.step(layer, sequences, indptr, q, k, v, out)) {
    std::printf("sequence %zu has no memory: move it out, or let it wait\n", one.sequence);
  }
}

}  // namespace block_4
namespace block_6 {
struct Pool {
  std::size_t size() const;
  template <class Body>
  void run(std::size_t count, const Body& body);
};

inline void decode_quantised(const kvpolicy::ModelShape& shape) {
  const auto plan = kvpolicy::kivi_plan<kvpolicy::bfloat16>(shape, {.bits = 4});
  kvpolicy::cpu::KvCache<kvpolicy::bfloat16> cache{plan};
}

}  // namespace block_6
namespace block_10 {
struct Pool {
  std::size_t size() const;
  template <class Body>
  void run(std::size_t count, const Body& body);
};

struct OnMyPool {
  Pool* pool;
  std::size_t threads() const { return pool->size(); }
  template <class Body>
  void operator()(std::size_t count, const Body& body) const {
    pool->run(count, body);  // body(0) ... body(count - 1), on any threads; returns when all are done
  }
};
using Engine = kvpolicy::cpu::Engine<OnMyPool>;

inline void decode(Pool& pool, const kvpolicy::ModelShape& shape, const kvpolicy::HeadGates& gates) {
  const auto plan = kvpolicy::duo_plan<kvpolicy::bfloat16>(shape, gates);
  kvpolicy::cpu::KvCache<kvpolicy::bfloat16, Engine> cache{plan, {}, Engine{{&pool}}};
}

}  // namespace block_10
