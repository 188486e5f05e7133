// SPDX-License-Identifier: Apache-2.0
//
// One launch of the decode kernel over a DecodeLayer, with guards, beside its oracle; and the heads that
// the tests of the kernel are made of.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/kernel_tables.hpp>
#include <kvpolicy/cuda/kernels/decode.cuh>

#include "cuda/support/codes.hpp"
#include "cuda/support/decode_layer.hpp"
#include "cuda/support/elements.hpp"
#include "cuda/support/launch.hpp"

namespace test::decode {

using kvpolicy::Element;
using kvpolicy::Encoding;
using kvpolicy::float16;
using test::all_codes;
using test::Codes;
using test::OtherElement;
using namespace kvpolicy::gpu;

struct Output {
  std::vector<double> out;
  std::vector<double> log_sum_exp;
};

/// Kernels over quantised rows take longest to compile: they are those of the engine's table, which has them once for all files
/// (compiled/).
template <Element E, int D, int ColumnTiles, bool Packed>
auto kernel_of() {
  if constexpr (Packed) {
    return kvpolicy::gpu::detail::decode_kernel_of<E, D, ColumnTiles, Packed>().code;
  } else {
    return &decode_kernel<E, D, ColumnTiles, Packed>;
  }
}

/// Runs the kernel, with guards round its outputs and NaN in a workspace exactly as large as it may
/// be; the tickets must be 0 again afterwards.
template <Element E, int D, int ColumnTiles, bool Packed>
Output run(AttendParams p, int grid) {
  constexpr std::uint16_t guard = 0x1234;
  constexpr std::size_t margin = 64;
  const auto heads = static_cast<std::size_t>(p.sequences * p.kv_heads);
  const std::size_t rows = heads * static_cast<std::size_t>(p.request.queries * p.group);
  const std::size_t numbers = rows * D;
  std::vector<std::uint16_t> out(numbers + 2 * margin, guard);
  const long long row = static_cast<long long>(p.kv_heads) * p.group * D;
  p.out = {reinterpret_cast<std::byte*>(out.data() + margin), p.request.queries * row, row, D};
  std::vector<float> lse(rows + 2, 42.0F);
  p.log_sum_exp = lse.data() + 1;
  const auto slots = static_cast<std::size_t>(decode_workspace_slots(grid));
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> values(slots * 8 * ColumnTiles * D, nan);
  std::vector<PartialState> states(slots * 8 * ColumnTiles, PartialState{nan, nan});
  std::vector<std::uint32_t> tickets(heads, 0);
  p.workspace = {values.data(), states.data(), tickets.data()};
  test::launch(kernel_of<E, D, ColumnTiles, Packed>(), grid, 1, decode_threads<D, ColumnTiles, Packed>,
               decode_shared_bytes<E, D, ColumnTiles, Packed>(static_cast<int>(heads)), p);
  for (std::size_t i = 0; i < margin; ++i) {
    REQUIRE(out[i] == guard);
    REQUIRE(out[margin + numbers + i] == guard);
  }
  REQUIRE(lse.front() == 42.0F);
  REQUIRE(lse.back() == 42.0F);
  for (const std::uint32_t ticket : tickets) REQUIRE(ticket == 0);
  Output result;
  for (std::size_t i = 0; i < numbers; ++i) {
    E x;
    x.bits = out[margin + i];
    result.out.push_back(static_cast<float>(x));
  }
  result.log_sum_exp.assign(lse.begin() + 1, lse.end() - 1);
  return result;
}

/// The same call over one head of all, [sequences, kv_heads].
inline AttendParams only(AttendParams p, int head) {
  const int sequence = head / p.kv_heads;
  const int kv_head = head % p.kv_heads;
  const auto move = [&](kvpolicy::gpu::Tensor& tensor, int tensor_head) {
    if (tensor.data != nullptr) {
      tensor.data = reinterpret_cast<std::byte*>(tensor.row(sequence, 0, tensor_head));
    }
  };
  move(p.q, kv_head * p.group);
  move(p.k, kv_head);
  move(p.v, kv_head);
  p.heads += head;
  p.states += sequence;
  if (p.attention_sink_bias != nullptr) p.attention_sink_bias += kv_head * p.group;
  p.sequences = 1;
  p.kv_heads = 1;
  return p;
}
inline std::vector<double> part(const std::vector<double>& all, std::size_t begin, std::size_t count) {
  const auto first = all.begin() + static_cast<std::ptrdiff_t>(begin);
  return {first, first + static_cast<std::ptrdiff_t>(count)};
}

/// The largest |a - b| / (1 + |b|). NaN counts as infinitely far; equal infinities are equal.
inline double distance(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    const double error = std::fabs(a[i] - b[i]) / (1.0 + std::fabs(b[i]));
    if (!(error <= worst)) worst = std::isnan(error) ? 1e30 : error;
  }
  return worst;
}

/// What rounding a number to E costs, relative to the number, is below this.
template <Element E>
inline constexpr double unit = kvpolicy::encoding_of<E> == Encoding::bfloat16 ? 0x1p-8 : 0x1p-11;

/// Tolerances, with what was measured over this file: outputs 1.2 units, most of it what rounding
/// them to E costs, and 2.3 in half where a value of 5 to 8 bits is multiplied by its scale in half. Log-sum-exp
/// 5e-7, 6e-5 where quantised keys are rounded to half on the way, 9e-5 where rotated queries are, and 0.04 units
/// where turned queries are rounded to E.
inline constexpr double out_units = 2.5;
inline constexpr double exact_lse = 2e-6;
inline constexpr double grouped_lse = 2e-4;

/// Against the oracle.
template <Element E, int D, int ColumnTiles, bool Packed>
void check_as(const test::DecodeLayer<E>& layer, int grid, double lse_bound, double units) {
  const auto expected = layer.oracle();
  const Output got = run<E, D, ColumnTiles, Packed>(layer.params(), grid);
  const double out = distance(got.out, expected.out);
  const double lse = distance(got.log_sum_exp, expected.log_sum_exp);
  CAPTURE(D);
  CAPTURE(grid);
  CAPTURE(layer.columns());
  CHECK(out <= units * unit<E>);
  CHECK(lse <= lse_bound);
}

template <int D, Element E>
void check(const test::DecodeLayer<E>& layer, int grid, double lse_bound = exact_lse,
           double units = out_units) {
  REQUIRE(layer.columns() <= decode_most_columns);
  if constexpr (D == 64 || D == 128) {
    if (layer.packed()) {
      if (layer.columns() > 8) return check_as<E, D, 2, true>(layer, grid, lse_bound, units);
      return check_as<E, D, 1, true>(layer, grid, lse_bound, units);
    }
  }
  if constexpr (test::tests_head_dim<D>) {
    if (layer.columns() > 8) return check_as<E, D, 2, false>(layer, grid, lse_bound, units);
    check_as<E, D, 1, false>(layer, grid, lse_bound, units);
  }
}

inline HeadCase full(int tokens) { return {.view = {}, .tokens = tokens, .committed = tokens}; }
inline HeadCase window(int tokens, int sinks, int recent, int ring, bool prefill_chunk_mask = false) {
  return {.view = {.sinks = sinks,
                   .recent = recent,
                   .prefill_chunk_mask = prefill_chunk_mask,
                   .exact_ring = ring},
          .tokens = tokens,
          .committed = tokens};
}
struct Grids {
  int key_group;
  int value_group;
  bool per_channel = false;
};
inline HeadCase quantised(int tokens, const Codes& codes, const Grids& grids, int residual) {
  return {.view = {.key_encoding = codes.keys,
                   .value_encoding = codes.values,
                   .key_per_channel = grids.per_channel,
                   .key_group = grids.key_group,
                   .value_group = grids.value_group,
                   .residual = residual},
          .tokens = tokens,
          .committed = tokens};
}
inline HeadCase choosing(HeadCase head, int chunk_rows, std::vector<int> chosen, int end) {
  head.view.chunk_rows = chunk_rows;
  head.view.budget_chunks = static_cast<int>(chosen.size()) + 3;
  head.chosen = std::move(chosen);
  head.chosen_end = end;
  return head;
}
inline std::vector<int> every(int step, int begin, int end) {
  std::vector<int> chunks;
  for (int c = begin; c < end; c += step) chunks.push_back(c);
  return chunks;
}

}  // namespace test::decode
