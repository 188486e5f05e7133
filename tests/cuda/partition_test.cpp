// SPDX-License-Identifier: Apache-2.0
//
// The partition of a layer's rows among blocks: every unit is taken once, by the block whose piece
// of the line it starts in.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

#include <kvpolicy/cuda/kernels/partition.cuh>

#include "cuda/support/codes.hpp"

namespace {

using kvpolicy::Encoding;
using namespace kvpolicy::gpu;
using test::all_codes;

TEST_CASE("partition: pieces join, are equal, and know their blocks") {
  for (const long long total : {1LL, 47LL, 48LL, 1000LL, 65'537LL, 5'000'000'019LL}) {
    for (const int grid : {1, 2, 7, 132, 1000}) {
      for (const int warps : {8, 12}) {
        const Partition line(total, grid, warps);
        CAPTURE(total);
        CAPTURE(grid);
        REQUIRE(line.blocks >= 1);
        REQUIRE(line.blocks <= grid);
        CHECK(line.begin(0) == 0);
        CHECK(line.begin(line.blocks) == total);
        for (int b = 0; b < line.blocks; ++b) {
          const long long length = line.begin(b + 1) - line.begin(b);
          CHECK(length >= total / line.blocks);
          CHECK(length <= total / line.blocks + 1);
          if (line.blocks > 1) CHECK(length >= warps * least_cost_of_warp);
          CHECK(line.block_of(line.begin(b)) == b);
          CHECK(line.block_of(line.begin(b + 1) - 1) == b);
        }
      }
    }
  }
}

TEST_CASE("partition: a short line leaves blocks idle, a long one none") {
  CHECK(Partition(12 * least_cost_of_warp * 5, 132, 12).blocks == 5);
  CHECK(Partition(12 * least_cost_of_warp * 5 - 1, 132, 12).blocks == 4);
  CHECK(Partition(1, 132, 12).blocks == 1);
  CHECK(Partition(1LL << 31, 132, 12).blocks == 132);
}

TEST_CASE("partition: units of a segment") {
  HeadView head{.sinks = 4, .key_encoding = Encoding::uint4, .value_encoding = Encoding::uint4};
  const auto count = [&](DeviceSegment::Source source, int first, int rows) {
    return units_of(head, DeviceSegment{.source = source, .rows = rows, .first = first}).count;
  };
  using enum DeviceSegment::Source;
  CHECK(count(exact, 0, 1) == 1);
  CHECK(count(exact, 3, 16) == 1);  // exact units begin with the segment
  CHECK(count(exact, 3, 17) == 2);
  CHECK(count(call, 0, 33) == 3);
  CHECK(count(packed, 4, 64) == 1);
  CHECK(count(packed, 4 + 63, 1) == 1);  // packed ones lie in blocks of slots
  CHECK(count(packed, 4 + 63, 65) == 2);
  CHECK(units_of(head, {.source = packed, .rows = 65, .first = 4 + 63}).skipped == 63);
  head.value_encoding = Encoding::uint2;
  CHECK(count(packed, 4 + 63, 1) == 1);
  CHECK(units_of(head, {.source = packed, .rows = 64, .first = 4}).weight == 6);  // as 24 rows of 8 bits
  head.key_encoding = Encoding::uint8;
  CHECK(count(packed, 4 + 31, 2) == 2);
  CHECK(units_of(head, {.source = packed, .rows = 32, .first = 4}).weight == 5);
  CHECK(units_of(head, {.source = exact, .rows = 16}).weight == 8);
  head.key_encoding = head.value_encoding = Encoding::uint3;  // read as bytes
  CHECK(count(packed, 4 + 31, 2) == 2);
  CHECK(units_of(head, {.source = packed, .rows = 32, .first = 4}).weight == 3);
  const int chunks[] = {1, 5, 9};
  CHECK(units_of(head, {.source = packed, .rows = 48, .chunks = chunks, .chunk_rows = 16}).count == 2);
}

TEST_CASE("partition: every unit has one block") {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const auto up_to = [&](int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); };
    std::vector<HeadView> heads;
    std::vector<LayerState> states;
    for (int i = 1 + up_to(9); i > 0; --i) {
      HeadView head;
      if (up_to(2) == 0) head = {.sinks = up_to(20), .recent = 1 + up_to(100), .exact_ring = 256};
      if (up_to(2) == 0) {
        all_codes[static_cast<std::size_t>(up_to(static_cast<int>(all_codes.size())))].describe(head);
        head.residual = up_to(100);
        head.packed_ring = head.recent > 0 ? 256 : 0;
      }
      const int tokens = up_to(3) == 0 ? up_to(4) : up_to(5000);
      heads.push_back(head);
      states.push_back({tokens, tokens});
    }
    Request request{.queries = 1 + up_to(4), .own_rows = up_to(4) > 0};
    if (up_to(3) == 0) request.tree.nodes = request.queries + up_to(30);
    const int appended = request.older_nodes() + (request.own_rows ? 0 : request.queries);
    for (LayerState& state : states) {
      if (state.tokens < appended) state = {appended, 0};
      state.committed = std::min(state.committed, state.tokens - appended);
    }
    std::vector<long long> line{0};
    for (std::size_t h = 0; h < heads.size(); ++h) {
      line.push_back(line.back() + cost_of(heads[h], states[h], request));
    }
    if (line.back() == 0) continue;
    const Partition partition(line.back(), 1 + up_to(40), 8);

    for (std::size_t h = 0; h < heads.size(); ++h) {
      const DeviceSegmentList list = segments_of(heads[h], states[h], request);
      REQUIRE(list.count <= most_segments);
      long long place = line[h] + cost_of_head;
      for (int s = 0; s < list.count; ++s) {
        const Units units = units_of(heads[h], list.segment[s]);
        std::vector<int> taken(static_cast<std::size_t>(units.count), 0);
        for (int b = 0; b < partition.blocks; ++b) {
          const UnitRange range = units_within(units, place, partition.begin(b), partition.begin(b + 1));
          REQUIRE(range.begin <= range.end);
          for (int unit = range.begin; unit < range.end; ++unit) {
            ++taken[static_cast<std::size_t>(unit)];
            REQUIRE(partition.block_of(place + static_cast<long long>(unit) * units.weight) == b);
          }
        }
        for (const int times : taken) REQUIRE(times == 1);
        place += static_cast<long long>(units.count) * units.weight;
      }
      REQUIRE(place == (list.count == 0 ? line[h] + cost_of_head : line[h + 1]));
      REQUIRE((list.count == 0) == (line[h] == line[h + 1]));
    }
  }
}
}  // namespace
