// SPDX-License-Identifier: Apache-2.0
//
// A small cache with heads of every kind, and one with heads of few bits, for tests that save and load them. Their
// files are small enough to be damaged at every byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

namespace test {

using SmallPlan = kvpolicy::HeadPlan<kvpolicy::float16>;
using SmallCache = kvpolicy::KvCache<kvpolicy::float16>;
inline constexpr kvpolicy::ModelShape small_shape{1, 9, 9, 64};

inline SmallPlan small_plan() {
  using namespace kvpolicy;
  SmallPlan plan{small_shape};
  QuantizedResidualCache<float16, Granularity::per_channel>::Config kivi;
  kivi.storage.bits = 2;
  kivi.storage.key_group = 4;
  kivi.storage.residual = 3;
  plan.set(0, 1, kivi);
  SinkRecentCache<PerTokenStorage<float16>>::Config window;
  window.sinks = 2;
  window.recent = 5;
  window.rotary_in_cache = RotaryConfig{};
  window.storage.residual = 2;
  plan.set(0, 2, window);
  plan.set(0, 3,
           HeadBudgetCache<DenseStorage<float16>>::Config{.budget = 2, .scorer = {.observation_window = 2}});
  HeadBudgetCache<PerTokenStorage<float16>>::Config budget;
  budget.budget = 3;
  budget.scorer.observation_window = 1;
  budget.storage.bits = 8;
  budget.storage.residual = 2;
  plan.set(0, 4, budget);
  plan.set(0, 5, HeadBudgetCache<DenseStorage<float16>, KeyNormScorer>::Config{.budget = 3});
  plan.set(0, 6, ChunkRetrievalCache<DenseStorage<float16>, MinMaxKey>::Config{.chunk = 3, .budget = 6});
  ChunkRetrievalCache<PerTokenStorage<float16>>::Config retrieval;
  retrieval.chunk = 2;
  retrieval.budget = 4;
  retrieval.storage.residual = 4;
  plan.set(0, 7, retrieval);
  plan.set(0, 8, HeadBudgetCache<DenseStorage<float16>, TovaScorer>::Config{.budget = 3});
  return plan;
}

/// Widths that fill no byte, keys and values of different ones, first rows that stay exact, and rotated rows. A plan
/// of its own, because files of `small_plan` are kept in the repository.
inline SmallPlan low_bit_plan() {
  using namespace kvpolicy;
  SmallPlan plan{{1, 5, 5, 64}};
  QuantizedResidualCache<float16, Granularity::per_channel>::Config by_channel;
  by_channel.sinks = 2;
  by_channel.storage.bits = 3;
  by_channel.storage.key_group = 4;
  by_channel.storage.residual = 1;
  by_channel.storage.key_hadamard = by_channel.storage.value_hadamard = true;
  plan.set(0, 0, by_channel);
  QuantizedResidualCache<float16>::Config by_row;
  by_row.sinks = 1;
  by_row.storage.key_bits = 5;
  by_row.storage.value_bits = 6;
  by_row.storage.residual = 2;
  plan.set(0, 1, by_row);
  SinkRecentCache<PerTokenStorage<float16>>::Config window;
  window.sinks = 2;
  window.recent = 5;
  window.storage.bits = 6;
  window.storage.key_bits = 3;
  window.storage.residual = 2;
  window.storage.value_hadamard = true;
  plan.set(0, 2, window);
  HeadBudgetCache<PerTokenStorage<float16>>::Config budget;
  budget.budget = 3;
  budget.scorer.observation_window = 1;
  budget.storage.bits = 5;
  budget.storage.value_bits = 3;
  budget.storage.residual = 2;
  budget.storage.key_hadamard = true;
  plan.set(0, 3, budget);
  ChunkRetrievalCache<PerChannelStorage<float16>>::Config retrieval;
  retrieval.chunk = 4;
  retrieval.budget = 4;
  retrieval.storage.bits = 6;
  retrieval.storage.key_bits = 3;
  retrieval.storage.key_group = 4;
  retrieval.storage.residual = 0;
  retrieval.storage.key_hadamard = true;
  plan.set(0, 4, retrieval);
  return plan;
}

/// Every codebook: scales of two bytes, of one and of none.
inline SmallPlan codebook_plan() {
  using namespace kvpolicy;
  SmallPlan plan{{1, 5, 5, 64}};
  const std::vector<ResidualConfig> rows{{.bits = 3,
                                          .value_group = 32,
                                          .residual = 1,
                                          .key_codebook = Codebook::normal,
                                          .value_codebook = Codebook::normal},
                                         {.bits = 8,
                                          .residual = 0,
                                          .key_codebook = Codebook::fp8,
                                          .value_codebook = Codebook::fp8,
                                          .value_scale = 0.5},
                                         {.bits = 4, .residual = 2, .key_codebook = Codebook::mxfp4},
                                         {.bits = 4,
                                          .residual = 0,
                                          .key_codebook = Codebook::nvfp4,
                                          .value_codebook = Codebook::nvfp4,
                                          .key_scale = 0.5}};
  for (std::size_t head = 0; head < rows.size(); ++head) {
    QuantizedResidualCache<float16>::Config config;
    config.storage = rows[head];
    plan.set(0, head, config);
  }
  QuantizedResidualCache<float16, Granularity::per_channel>::Config by_channel;
  by_channel.sinks = 1;
  by_channel.storage.bits = 2;
  by_channel.storage.key_group = 4;
  by_channel.storage.residual = 0;
  by_channel.storage.value_codebook = Codebook::normal;
  plan.set(0, 4, by_channel);
  return plan;
}

/// All of them, for tests of files.
[[nodiscard]] inline std::vector<SmallPlan> small_plans() {
  return {small_plan(), low_bit_plan(), codebook_plan()};
}

inline kvpolicy::CacheOptions small_options() {
  kvpolicy::CacheOptions options;
  options.max_rollback = 2;
  options.page_rows = 16;
  return options;
}

/// Number i of a text's keys, values or queries: all are exact in half, and the same on every machine.
[[nodiscard]] inline float small_number(std::size_t i) {
  const auto mixed = static_cast<std::uint32_t>(i) * 2654435761U;
  return static_cast<float>(static_cast<int>(mixed >> 24) - 128) / 64.0F;
}

/// Adds `tokens` tokens whose numbers follow from their position; returns the attention output.
template <class Cache>
std::vector<float> small_step(Cache& cache, std::size_t tokens, const kvpolicy::AttendOptions& options = {}) {
  const std::size_t heads = cache.plan().shape().kv_heads;
  const std::size_t numbers = tokens * heads * 64;
  std::vector<float> q(numbers), k(numbers), v(numbers), out(numbers);
  for (std::size_t i = 0; i < numbers; ++i) {
    const std::size_t at = 3 * (cache.tokens() * heads * 64 + i);
    q[i] = small_number(at);
    k[i] = small_number(at + 1);
    v[i] = small_number(at + 2);
  }
  const auto view = [&](std::vector<float>& data) {
    return kvpolicy::TensorView{data.data(), tokens, heads, 64};
  };
  cache.step(0, view(q), view(k), view(v), view(out), options);
  return out;
}

/// A cache after a prompt, a compression, a selection and a few tokens, two of which can be rolled back.
inline SmallCache small_cache(const SmallPlan& plan = small_plan()) {
  SmallCache cache{plan, small_options()};
  small_step(cache, 8);
  cache.compress();
  kvpolicy::AttendOptions selecting;
  selecting.read = kvpolicy::Read::selected;
  selecting.refresh_selection = true;
  small_step(cache, 2, selecting);
  small_step(cache, 1);
  return cache;
}

template <class Cache>
[[nodiscard]] std::string saved(const Cache& cache, std::string_view tag = {}) {
  std::ostringstream stream;
  kvpolicy::save(cache, stream, tag);
  return stream.str();
}

template <class Cache>
void load_bytes(Cache& cache, const std::string& bytes, std::string_view tag = {}) {
  std::istringstream stream{bytes};
  kvpolicy::load(cache, stream, tag);
}

/// The file with checksums that fit its contents, as an attacker would write it.
[[nodiscard]] inline std::string with_checksums(std::string file) {
  std::uint64_t before = 0;
  std::size_t at = sizeof(kvpolicy::SavedPrefix);
  while (at + sizeof(kvpolicy::RecordHeader) <= file.size()) {
    kvpolicy::RecordHeader header;
    std::memcpy(&header, file.data() + at, sizeof header);
    at += sizeof header;
    if (header.bytes > file.size() - at) break;
    const auto data = std::as_bytes(std::span{file}).subspan(at, header.bytes);
    header.checksum = before = header.expected(before, data);
    std::memcpy(file.data() + at - sizeof header, &header, sizeof header);
    at += header.bytes;
  }
  return file;
}

}  // namespace test
