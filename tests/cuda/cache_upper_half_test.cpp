// SPDX-License-Identifier: Apache-2.0
//
// Codes in halves on a device: what Read::upper_half reads are the host's upper halves, bit for bit, and attention over
// them is attention in double; other reads, rollbacks, forks and rows that are not in halves know nothing of it.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvpolicy/core/row.hpp>

#include "cuda/support/host_pair.hpp"
#include "support/oracle.hpp"
#include "support/plans.hpp"

using kvpolicy::float16;
using kvpolicy::ModelShape;
using kvpolicy::Read;
using kvpolicy::gpu::CachedRows;
using test::HeadSpec;
using test::HostPair;
using test::Kind;

namespace {

constexpr std::size_t head_dim = 64;

const std::vector<HeadSpec> heads{
    {.sinks = 4, .bits = 8, .key_group = 32, .residual = 20, .per_channel = true, .halves = true},
    {.bits = 8, .key_group = 16, .value_group = 32, .residual = 9, .key_hadamard = true, .halves = true},
    {.bits = 3, .value_bits = 8, .residual = 11, .value_hadamard = true, .halves = true},
    {.kind = Kind::window, .sinks = 3, .recent = 150, .bits = 8, .residual = 12, .halves = true},
    {.kind = Kind::retrieval, .budget = 48, .chunk = 16, .bits = 8, .residual = 10, .halves = true},
    {.bits = 8, .residual = 24, .halves = true, .kivi = true},
    {.kind = Kind::budget, .budget = 90, .window = 6, .bits = 8, .residual = 10, .halves = true},
    {.bits = 8, .residual = 13},
    {.kind = Kind::window, .sinks = 2, .recent = 40}};
// So many of the first ones have codes in halves.
constexpr std::size_t in_halves = 7;
const ModelShape shape{1, 2 * heads.size(), heads.size(), head_dim};

std::span<const float> row_of(const std::vector<float>& side, std::size_t row) {
  return std::span{side}.subspan(row * head_dim, head_dim);
}

/// How many rows of a head a read of upper halves sees in another way. Of these each side is the host's, bit for bit,
/// or what a read of all rows sees, where it has no halves or where the row's block is not packed yet.
std::size_t rows_in_halves(const HostPair& pair, std::size_t head) {
  const CachedRows all = pair.there.rows(0, head), upper = pair.there.rows(0, head, Read::upper_half);
  REQUIRE(all.positions == upper.positions);
  REQUIRE(all.quantized == upper.quantized);
  std::size_t row = 0, differ = 0, wrong = 0;
  std::vector<float> on_host(head_dim);
  for (const kvpolicy::Segment& segment : pair.here.segments(0, head, Read::upper_half)) {
    for (std::size_t i = 0; i < segment.rows; ++i, ++row) {
      bool differs = false;
      for (const bool key : {true, false}) {
        const auto side = key ? &CachedRows::keys : &CachedRows::values;
        const auto seen = row_of(upper.*side, row);
        if (std::ranges::equal(seen, row_of(all.*side, row))) continue;
        differs = true;
        kvpolicy::load_row(key ? segment.keys : segment.values, i, on_host);
        wrong += std::ranges::equal(seen, on_host) ? 0 : 1;
      }
      differ += differs ? 1 : 0;
    }
  }
  CHECK(row == all.positions.size());
  CHECK(wrong == 0);
  return differ;
}

/// The largest distance of a call's outputs from attention in double over the rows that the read shows.
double attention_error(const HostPair& pair, const test::DeviceChunk<>& chunk, Read read) {
  const std::vector<float16> q = chunk.q.download(), out = chunk.out.download();
  double worst = 0;
  for (std::size_t head = 0; head < shape.kv_heads; ++head) {
    const CachedRows rows = pair.there.rows(0, head, read, 1);
    std::vector<oracle::Row> seen(rows.positions.size());
    std::vector<const oracle::Row*> list;
    for (std::size_t i = 0; i < seen.size(); ++i) {
      const auto key = row_of(rows.keys, i), value = row_of(rows.values, i);
      seen[i].key.assign(key.begin(), key.end());
      seen[i].value.assign(value.begin(), value.end());
      list.push_back(&seen[i]);
    }
    for (std::size_t q_head = 2 * head; q_head < 2 * head + 2; ++q_head) {
      std::vector<double> query;
      for (std::size_t c = 0; c < head_dim; ++c)
        query.push_back(static_cast<float>(q[q_head * head_dim + c]));
      const auto expected =
          oracle::attend(query, list, {.scale = 1 / std::sqrt(static_cast<double>(head_dim))});
      for (std::size_t c = 0; c < head_dim; ++c) {
        const double error =
            std::abs(static_cast<double>(static_cast<float>(out[q_head * head_dim + c])) - expected.out[c]);
        worst = error <= worst ? worst : error;  // NaN stays
      }
    }
  }
  return worst;
}

}  // namespace

TEST_CASE("reads of upper halves on a device are those of the host, and change nothing") {
  const test::SmallDevice device;
  HostPair pair{test::plan_of<float16>(shape, heads), {.max_rollback = 4, .max_append = 200}};
  test::Random random{17};
  std::vector<std::size_t> most(heads.size(), 0);
  for (const std::size_t tokens : {1U, 70U, 1U, 130U, 3U, 61U, 1U}) {
    CAPTURE(tokens);
    pair.step(tokens);
    if (tokens == 130) {  // rows of a head with a budget get codes then
      pair.compress();
      pair.step(1);
    }
    const auto before = test::dump_device(pair.there);
    const test::DeviceChunk<> upper{random, shape, 1};
    for (const Read read : {Read::upper_half, Read::all, Read::upper_half}) {
      upper.attend(pair.there, 0, {.read = read});
      // Weights, queries and outputs are in half.
      CHECK(attention_error(pair, upper, read) <= 4e-3);
    }
    CHECK(test::dump_device(pair.there) == before);
    for (std::size_t head = 0; head < heads.size(); ++head) {
      CAPTURE(head);
      const std::size_t count = rows_in_halves(pair, head);
      most[head] = std::max(most[head], count);
      if (head >= in_halves) CHECK(count == 0);
    }
  }
  for (std::size_t head = 0; head < in_halves; ++head) {
    CAPTURE(head);
    CHECK(most[head] >= 64);
  }
}

TEST_CASE("steps that read upper halves: prompts, forks and rollbacks on a device") {
  const test::SmallDevice device;
  HostPair pair{test::plan_of<float16>(shape, heads), {.max_rollback = 4, .max_append = 200}};
  pair.step(150);
  pair.compress();
  pair.step(1);
  HostPair fork = pair;
  for (const std::size_t tokens : {20U, 1U, 90U, 2U}) {
    CAPTURE(tokens);
    fork.step(tokens, tokens < 50, {.read = Read::upper_half});
    for (std::size_t head = 0; head < in_halves; ++head) CHECK(rows_in_halves(fork, head) > 0);
  }
  fork.there.truncate(fork.there.tokens() - 2);
  fork.here.truncate(fork.here.tokens() - 2);
  fork.check();
  const test::DeviceChunk<> chunk{pair.random, shape, 1};
  for (HostPair* each : {&fork, &pair}) {
    chunk.attend(each->there, 0, {.read = Read::upper_half});
    CHECK(attention_error(*each, chunk, Read::upper_half) <= 4e-3);
  }
}
