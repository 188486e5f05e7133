// SPDX-License-Identifier: Apache-2.0
//
// Compares a head's rule with the sets of its model: which rows live, which of them are exact, which a query
// reads, and whether a compression would drop any.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/rule_ranges.hpp>

#include "support/policy_model.hpp"

namespace test {

/// The functions of a rule with the integer type of the host or of kernels.
template <class Int>
struct RuleOf {
  kvpolicy::WindowRule<Int> window;
  kvpolicy::ResidualRule<Int> keys, values;
  kvpolicy::ChunkRule<Int> chunks;
  kvpolicy::BudgetRule<Int> budget;

  explicit RuleOf(const kvpolicy::HeadRule& rule) {
    const auto number = [](std::size_t n) { return static_cast<Int>(n); };
    const auto residual = [&](const kvpolicy::ResidualRule<std::size_t>& from) {
      return kvpolicy::ResidualRule<Int>{number(from.residual), number(from.unit), from.kivi};
    };
    const auto w = rule.window_rule();
    const auto c = rule.chunk_rule();
    const auto b = rule.budget_rule();
    window = {number(w.sinks), number(w.recent), w.prefill_chunk_mask};
    keys = residual(rule.key_residual());
    values = residual(rule.value_residual());
    chunks = {number(c.chunk), number(c.budget), number(c.refresh_every)};
    budget = {number(b.budget), number(b.kept_rows), number(b.compress_from), number(b.compress_every),
              b.after_first_compress};
  }
};

/// Checks a text of `tokens` tokens, of which as many are committed as the model says.
template <class Int>
void check_rule(const kvpolicy::HeadRule& rule, const oracle::HeadModel& model, std::size_t tokens) {
  const RuleOf<Int> part{rule};
  const oracle::HeadSpec& spec = model.spec();
  const auto committed = static_cast<Int>(model.committed());
  if (spec.kind == oracle::Kind::budget) {
    const auto rows = static_cast<Int>(model.kept().size());
    CHECK(part.budget.drops_rows(rows, committed) == model.is_compressible());
    return;
  }
  const auto sinks = static_cast<std::int64_t>(spec.sinks);
  const auto first = static_cast<std::int64_t>(part.window.first_kept(committed));
  std::vector<std::int64_t> kept;
  for (std::int64_t row = 0; row < static_cast<std::int64_t>(model.committed()); ++row) {
    if (row < sinks || row >= first) kept.push_back(row);
  }
  CHECK(kept == model.kept());
  CHECK(static_cast<std::size_t>(part.window.kept_rows(committed)) == kept.size());

  if (spec.bits > 0) {
    const auto quantized = [&](kvpolicy::ResidualRule<Int> side) {
      side.unit = std::max(side.unit, static_cast<Int>(spec.flush_rows));
      const Int besides =
          committed > static_cast<Int>(spec.sinks) ? committed - static_cast<Int>(spec.sinks) : 0;
      return static_cast<std::int64_t>(side.quantized(besides));
    };
    bool agree = true;
    for (const std::int64_t row : kept) {
      agree = agree && model.key_is_quantized(row) == (row >= sinks && row - sinks < quantized(part.keys)) &&
              model.value_is_quantized(row) == (row >= sinks && row - sinks < quantized(part.values));
    }
    CHECK(agree);
  }

  // The rows that the next query reads.
  const kvpolicy::RowRange<Int> all{0, static_cast<Int>(tokens)};
  const auto next = static_cast<std::int64_t>(tokens);
  std::set<std::int64_t> read, expected;
  for (const auto& range : {part.window.sinks_among(all), part.window.recent_among(all, all.end)}) {
    for (Int row = range.begin; row < range.end; ++row) {
      if (row < part.window.sinks ||
          static_cast<std::int64_t>(row) > next - part.window.query_window(next + 1)) {
        read.insert(static_cast<std::int64_t>(row));
      }
    }
  }
  for (std::int64_t row = 0; row < next; ++row) {
    if (model.reads(row, next, next, false)) expected.insert(row);
  }
  CHECK(read == expected);

  if (spec.kind == oracle::Kind::retrieval) {
    CHECK(static_cast<std::int64_t>(part.chunks.closed(committed)) == model.full_chunks());
  }
}

}  // namespace test
