// SPDX-License-Identifier: Apache-2.0
//
// Caches whose rows are FP8 codes in the memory of an inference engine, for every attention engine: the codes are those
// that a search through all of E4M3 finds, where the engine's own kernels look for them, and attention over them gives
// what it gives over the same codes in pages of a cache's own.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <sstream>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/storage/residual_storage.hpp>

#include "support/compare.hpp"
#include "support/engine_memory.hpp"
#include "support/oracle.hpp"

namespace test {

/// What a code of E4M3 stands for, by its sign, exponent and mantissa; NaN for the two codes that do.
[[nodiscard]] inline double e4m3_number(unsigned code) {
  static const std::vector<double> numbers = [] {
    std::vector<double> all;
    for (unsigned bits = 0; bits < 256; ++bits) {
      const int exponent = static_cast<int>(bits >> 3 & 15U);
      const double mantissa = bits & 7U;
      const double size = (bits & 0x7fU) == 0x7fU ? std::nan("")
                          : exponent == 0         ? std::ldexp(mantissa, -9)
                                                  : std::ldexp(8 + mantissa, exponent - 10);
      all.push_back(bits >= 128 ? -size : size);
    }
    return all;
  }();
  return numbers.at(code);
}

/// The code nearest to a number; of two the even one, and the largest for all beyond.
[[nodiscard]] inline unsigned e4m3_code(float number) {
  unsigned best = 0;
  double least = INFINITY;
  for (unsigned code = 0; code < 256; ++code) {
    const double off = std::abs(e4m3_number(code) - static_cast<double>(number));
    const bool same_sign = (code >= 128) == std::signbit(number);
    if (same_sign && (off < least || (off == least && code % 2 == 0))) {
      best = code;
      least = off;
    }
  }
  return best;
}

inline constexpr double fp8_key_scale = 0.005;  // some numbers are beyond its largest
inline constexpr double fp8_value_scale = 0.125;

/// The codes of one row.
template <class Number>
[[nodiscard]] std::vector<std::uint8_t> e4m3_codes(const std::vector<Number>& row, double scale) {
  std::vector<std::uint8_t> codes;
  for (const Number number : row) {
    codes.push_back(
        static_cast<std::uint8_t>(e4m3_code(static_cast<float>(number) / static_cast<float>(scale))));
  }
  return codes;
}

/// A query sees all codes, the latest 37, or the first 5 and the latest 20; the row that comes with it is exact.
template <kvpolicy::Element E, class Engine>
void check_attention_in_fp8(Random& random, kvpolicy::KvCache<E, Engine>& cache,
                            const std::vector<std::vector<std::uint8_t>>& keys,
                            const std::vector<std::vector<std::uint8_t>>& values) {
  const auto tokens = keys.size() / 3;
  Chunk<E> chunk{random, cache.plan().shape(), 1};
  chunk.step(cache, 0);
  const auto numbers = [](const std::vector<std::uint8_t>& codes, double scale) {
    std::vector<double> row;
    for (const std::uint8_t code : codes) row.push_back(e4m3_number(code) * scale);
    return row;
  };
  for (std::size_t head = 0; head < 3; ++head) {
    std::vector<oracle::Row> rows;
    for (std::size_t t = 0; t < tokens; ++t) {
      const std::size_t age = tokens - t;  // of the query's own row 0
      if (head == 1 && age >= 37) continue;
      if (head == 2 && t >= 5 && age >= 20) continue;
      rows.push_back(
          {0, numbers(keys[t * 3 + head], fp8_key_scale), numbers(values[t * 3 + head], fp8_value_scale)});
    }
    rows.push_back({0, chunk.k.row_of_doubles(0, head), chunk.v.row_of_doubles(0, head)});
    std::vector<const oracle::Row*> seen;
    for (const oracle::Row& row : rows) seen.push_back(&row);
    for (std::size_t q = 2 * head; q < 2 * head + 2; ++q) {
      const auto truth = oracle::attend(chunk.q.row_of_doubles(0, q), seen, oracle::Options{0.125, 0.0, {}});
      REQUIRE(largest_difference(chunk.out.row(0, q), truth.out) <= 2e-5);
    }
  }
}

template <kvpolicy::Element E, class Engine>
void check_engine_fp8(EngineLayout kind, std::uint64_t seed) {
  using namespace kvpolicy;
  CAPTURE(static_cast<int>(kind));
  Random random{seed};
  EngineMemory<std::uint8_t> memory{kind};
  PagePool pool{memory.pages()};
  const ModelShape shape{.layers = 1, .q_heads = 6, .kv_heads = 3, .head_dim = 64};
  using Fp8Rows = EnginePageStorage<E, Codebook::fp8>;
  using PackedRows = ResidualStorage<E, Granularity::per_token>;
  const typename Fp8Rows::Config scales{.key_scale = fp8_key_scale, .value_scale = fp8_value_scale};
  const ResidualConfig codes{.bits = 8,
                             .residual = 0,
                             .key_codebook = Codebook::fp8,
                             .value_codebook = Codebook::fp8,
                             .key_scale = fp8_key_scale,
                             .value_scale = fp8_value_scale};
  HeadPlan<E> own_plan{shape, typename FullCache<Fp8Rows>::Config{.storage = scales}};
  own_plan.set(0, 1, typename SinkRecentCache<Fp8Rows>::Config{.sinks = 0, .recent = 37, .storage = scales});
  own_plan.set(0, 2, typename SinkRecentCache<Fp8Rows>::Config{.sinks = 5, .recent = 20, .storage = scales});
  HeadPlan<E> control_plan{shape, typename QuantizedResidualCache<E>::Config{.storage = codes}};
  control_plan.set(0, 1,
                   typename SinkRecentCache<PackedRows>::Config{.sinks = 0, .recent = 37, .storage = codes});
  using Cache = KvCache<E, Engine>;
  const CacheOptions options{.max_rollback = 3, .page_rows = 16};
  CacheOptions in_place = options;
  in_place.pool = &pool;
  {
    Cache cache{own_plan, in_place};
    Cache control{control_plan, options};
    CHECK(cache.commit_changes_rows());
    std::vector<std::vector<std::uint8_t>> keys, values;  // of each token and head
    const auto call = [&](Cache& a, Cache& b, std::size_t tokens, bool remember) {
      Chunk<E> chunk{random, shape, tokens};
      Chunk<E> other = chunk;
      chunk.step(a, 0);
      other.step(b, 0);
      for (std::size_t t = 0; t < tokens; ++t) {
        for (std::size_t head = 0; head < 3; ++head) {
          for (std::size_t q = 2 * head; q < 2 * head + 2 && head < 2; ++q) {
            REQUIRE(same_bits(chunk.out.row(t, q), other.out.row(t, q)));
          }
          if (!remember) continue;
          keys.push_back(e4m3_codes(chunk.k.row(t, head), fp8_key_scale));
          values.push_back(e4m3_codes(chunk.v.row(t, head), fp8_value_scale));
        }
      }
    };
    std::optional<Cache> fork, control_fork;
    for (std::size_t i = 0; i < 30; ++i) {
      call(cache, control, i == 0 ? 90 : 1 + below(random, i % 4 == 0 ? 30 : 3), true);
      if (i == 20) {
        fork = cache.fork();
        control_fork = control.fork();
      }
      if (i > 20) call(*fork, *control_fork, 1 + below(random, 4), false);
    }
    const std::size_t tokens = cache.tokens();
    std::ostringstream saved;
    save(cache, saved);
    std::istringstream file{saved.str()};
    Cache loaded{own_plan, in_place};
    load(loaded, file);
    CHECK(dump(loaded) == dump(cache));
    cache.commit();
    // A byte a number, and room for the exact rows that can be rolled back.
    constexpr std::size_t exact = 3 * 3 * 2 * 64 * sizeof(E);
    CHECK(cache.bytes() == own_plan.memory(tokens, {.page_rows = 16, .pool = &pool}).total() + exact);
    check_attention_in_fp8(random, cache, keys, values);
    const auto& full = cache.template policy<FullCache<Fp8Rows>>(0, 0);
    REQUIRE(full.rows() == tokens);
    std::size_t found = 0;
    for (std::size_t row = 0; row < tokens; ++row) {
      const PageId page = full.storage().pages()[row / 16];
      for (std::size_t head = 0; head < 3; ++head) {
        const PageId first = pool.engine_page(0, head, 0);
        if (page < first || static_cast<std::size_t>(page - first) >= memory.blocks) continue;
        const auto block = static_cast<std::size_t>(page - first);
        const auto key = memory.row(block, 0, row % 16, head);
        const auto value = memory.row(block, 1, row % 16, head);
        REQUIRE(std::vector(key.begin(), key.end()) == keys[row * 3]);
        REQUIRE(std::vector(value.begin(), value.end()) == values[row * 3]);
        ++found;
      }
    }
    CHECK(found == tokens);
  }
  CHECK(pool.live_bytes() == 0);
}

/// Rows that a compression keeps are the codes that they were, in order.
template <kvpolicy::Element E, class Engine>
void check_engine_fp8_budget(std::uint64_t seed) {
  using namespace kvpolicy;
  Random random{seed};
  EngineMemory<std::uint8_t> memory{EngineLayout::vllm_nhd};
  PagePool pool{memory.pages()};
  using Fp8Rows = EnginePageStorage<E, Codebook::fp8>;
  using Budget = HeadBudgetCache<Fp8Rows>;
  const ModelShape shape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 64};
  const HeadPlan<E> plan{shape, typename Budget::Config{.budget = 30,
                                                        .scorer = {.observation_window = 4},
                                                        .storage = {fp8_key_scale, fp8_value_scale}}};
  KvCache<E, Engine> cache{plan, {.page_rows = 16, .pool = &pool}};
  Chunk<E> chunk{random, shape, 100};
  chunk.step(cache, 0);
  cache.compress();
  const Budget& head = cache.template policy<Budget>(0, 0);
  REQUIRE(head.rows() == 34);
  const auto shown = cache.segments(0, 0, Read::all);
  REQUIRE(shown.size() == 1);
  std::size_t next = 0;  // token
  std::vector<float> row(64);
  for (std::size_t i = 0; i < 34; ++i) {
    const RowAddress at = shown[0].keys.address_of(i);
    const auto* codes = reinterpret_cast<const std::uint8_t*>(at.page);
    const std::vector<std::uint8_t> kept{codes, codes + 64};
    while (next < 100 && e4m3_codes(chunk.k.row(next, 0), fp8_key_scale) != kept) ++next;
    REQUIRE(next < 100);
    load_row(shown[0].values, i, row);
    const auto value = e4m3_codes(chunk.v.row(next, 0), fp8_value_scale);
    for (std::size_t channel = 0; channel < 64; ++channel) {
      REQUIRE(static_cast<double>(row[channel]) == e4m3_number(value[channel]) * fp8_value_scale);
    }
  }
}

}  // namespace test
