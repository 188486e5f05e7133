// SPDX-License-Identifier: Apache-2.0
//
// A head that takes the contents of another head equals it: it saves the same bytes and continues in
// the same way.
#include <doctest/doctest.h>

#include <cstddef>
#include <sstream>
#include <string>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

#include "cache/random_operations.hpp"
#include "state/twins.hpp"

using kvpolicy::float16;

namespace {

std::string saved_head(const kvpolicy::Head& head, std::size_t committed) {
  struct Sink final : kvpolicy::ByteSink {
    std::string bytes;
    void write(std::span<const std::byte> more) override {
      bytes.append(reinterpret_cast<const char*>(more.data()), more.size());
    }
  } sink;
  kvpolicy::RecordWriter records{sink};
  kvpolicy::SavingArchive<kvpolicy::RecordWriter> archive{records};
  archive.enter({0, 0, committed});
  head.save(archive);
  records.finish();
  return sink.bytes;
}

test::Rows rows_of(const kvpolicy::Head& head, kvpolicy::Read read) {
  kvpolicy::SegmentList shown;
  head.show({.read = read}, shown);
  return test::rows_of_segments(shown, {.head_dim = 64, .value_dim = 64});
}
// Positions and numbers of all rows, then of those that a selected read shows.
std::vector<double> rows_of(const kvpolicy::Head& head) {
  std::vector<double> all;
  for (const auto read : {kvpolicy::Read::all, kvpolicy::Read::selected}) {
    for (const auto& [position, row] : rows_of(head, read)) {
      all.push_back(static_cast<double>(position));
      all.insert(all.end(), row.key.begin(), row.key.end());
      all.insert(all.end(), row.value.begin(), row.value.end());
    }
  }
  return all;
}

}  // namespace

TEST_CASE("a head's contents are everything it holds, for every policy") {
  constexpr kvpolicy::ModelShape shape{2, 20, 10, 64};
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    CAPTURE(seed);
    test::Random random{seed};
    kvpolicy::testing::Random settings{static_cast<unsigned>(seed)};
    const auto plan = test::random_saved_plan<float16>(shape, settings, /*rollback=*/false);
    kvpolicy::CacheOptions options;
    options.page_rows = 64;
    kvpolicy::KvCache<float16> cache{plan, options};
    for (std::size_t i = 0; i < 6; ++i) {
      const kvpolicy::AttendOptions how{.read = i % 2 == 0 ? kvpolicy::Read::all : kvpolicy::Read::selected,
                                        .refresh_selection = i % 3 == 1,
                                        .scores_rows = true};
      test::feed(cache, random, {1 + test::below(random, 70), 1}, how);
      if (i == 3) cache.compress();
      for (std::size_t l = 0; l < shape.layers; ++l) {
        for (std::size_t h = 0; h < shape.kv_heads; ++h) {
          CAPTURE(plan.at(l, h).names().shown());
          const kvpolicy::Head& head = cache.head(l, h);
          for (const std::size_t page_rows : std::vector<std::size_t>{32, 64}) {
            const kvpolicy::HeadPtr copy = plan.at(l, h).make_head({.head_dim = 64, .page_rows = page_rows});
            copy->take(head.contents(cache.tokens()), shape.head_dim);
            // A chunk that is not full is summarised again, from its keys as they are read now. And a
            // window without quantised rows forgets which quantised row was its last.
            const kvpolicy::HeadRule rule = plan.at(l, h).rule(64);
            const bool other_bytes = rule.is_quantized() && (rule.chunk > 0 || rule.recent > 0);
            CHECK((other_bytes || saved_head(*copy, cache.tokens()) == saved_head(head, cache.tokens())));
            CHECK(rows_of(*copy) == rows_of(head));
            CHECK(copy->rows() == head.rows());
            if (page_rows == 64) CHECK(copy->bytes() == head.bytes());
          }
        }
      }
    }
  }
}
