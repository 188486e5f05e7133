// SPDX-License-Identifier: Apache-2.0
//
// The interface of the shared library. Its two translation units are compiled for different instruction sets,
// and the program that links it uses the same headers. So one definition of each function must serve all
// three, or there must be separate functions.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <kvpolicy/duo.hpp>

namespace own {

struct Attended {
  std::string instruction_set;
  std::vector<float> out;  // [tokens, q_heads, head_dim]
};

inline constexpr kvpolicy::ModelShape shape{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
inline constexpr std::size_t tokens = 40;

/// A number in [-1, 1) that only depends on the arguments, in every translation unit.
inline float number(std::size_t seed, std::size_t index) {
  const std::size_t mixed = (seed * 2654435761U + index * 40503U) % 65536U;
  return static_cast<float>(mixed) / 32768.0F - 1.0F;
}

/// Makes a prefill of all but 5 tokens, then 5 steps, with any cache.
template <class Cache>
std::vector<float> run(Cache& cache) {
  const auto filled = [](std::size_t seed, std::size_t heads) {
    std::vector<float> numbers(tokens * heads * shape.head_dim);
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = number(seed, i);
    return numbers;
  };
  const auto q = filled(1, shape.q_heads);
  const auto k = filled(2, shape.kv_heads);
  const auto v = filled(3, shape.kv_heads);
  std::vector<float> out(q.size());
  for (std::size_t first = 0; first < tokens;) {
    const std::size_t count = first == 0 ? tokens - 5 : 1;
    const std::size_t at_q = first * shape.q_heads * shape.head_dim;
    const std::size_t at_k = first * shape.kv_heads * shape.head_dim;
    cache.step(0, kvpolicy::TensorView{q.data() + at_q, count, shape.q_heads, shape.head_dim},
               kvpolicy::TensorView{k.data() + at_k, count, shape.kv_heads, shape.head_dim},
               kvpolicy::TensorView{v.data() + at_k, count, shape.kv_heads, shape.head_dim},
               kvpolicy::TensorView{out.data() + at_q, count, shape.q_heads, shape.head_dim});
    first += count;
  }
  return out;
}

inline kvpolicy::HeadPlan<float> plan() {
  return kvpolicy::duo_plan(shape, {1, 2, {0.9, 0.1}}, {.sinks = 4, .recent = 8});
}

#define ENGINE_API __attribute__((visibility("default")))
ENGINE_API Attended attend_baseline();
ENGINE_API Attended attend_native();
/// A cache that the library made and the program continues to use.
ENGINE_API kvpolicy::DuoCache<float> made_by_library();
/// Throws kvpolicy::RollbackError.
ENGINE_API void refuse();

}  // namespace own
