// SPDX-License-Identifier: Apache-2.0
//
// A batch of sequences whose full rows are in a file: what cannot be read leaves out one sequence.
#include <doctest/doctest.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>
#include <kvpolicy/offload/fetching_engine.hpp>
#include <kvpolicy/offload/file_resource.hpp>

#include "cache/dump.hpp"
#include "offload/recording_calls.hpp"
#include "support/temporary_folder.hpp"

using namespace kvpolicy;
using offload::FileResource;

namespace {

using Engine = offload::FetchingEngine<ScalarEngine>;
using Cache = KvCache<float16, Engine>;
constexpr ModelShape shape{1, 4, 2, 64};

}  // namespace

TEST_CASE("offload: a batch leaves out the sequence whose rows cannot be read or kept") {
  const testing::TemporaryFolder folder;
  test::RecordingCalls calls;
  FileResource file{{.folder = folder.path(), .resident_bytes = 0, .slab_bytes = 64 << 10}, calls};
  const CacheOptions options{.max_append = 40, .slow_memory = &file};
  const std::vector<std::int32_t> indptr{0, 40, 80, 120};
  test::Random random{9};
  std::size_t left_out = 0, whole = 0;
  for (std::size_t allowed = 0; whole == 0; ++allowed) {
    REQUIRE(allowed < 1000);
    CAPTURE(allowed);
    std::vector<Cache> caches, alone;
    for (int i = 0; i < 3; ++i) {
      caches.emplace_back(HeadPlan<float16>{shape}, options, Engine{{}, file});
      test::feed(caches.back(), random, {100});
      alone.push_back(caches.back().fork());
    }
    std::vector<test::Dump> before;
    std::vector<BatchSequence<Cache>> sequences;
    for (Cache& cache : caches) {
      before.push_back(test::dump(cache, false));
      sequences.push_back({&cache});
    }
    test::Chunk<> chunk{random, shape, 120}, expected = chunk;
    Batch<float16, Engine> batch{Engine{{}, file}};
    calls.fail_after(allowed, EIO);
    const auto found =
        batch.step(0, sequences, indptr, chunk.q.view(), chunk.k.view(), chunk.v.view(), chunk.out.view());
    calls.recover();
    std::vector<bool> out(3, false);
    for (const LeftOut& one : found) {
      out[one.sequence] = true;
      CHECK_THROWS_AS(std::rethrow_exception(one.error), StorageError);
    }
    left_out += found.size();
    whole += found.empty() ? 1 : 0;
    for (std::size_t i = 0; i < 3; ++i) {
      if (out[i]) {
        CHECK(test::dump(caches[i], false) == before[i]);
        continue;
      }
      const auto part = [&](const auto& tensor) { return tensor.view().slice(40 * i, 40); };
      alone[i].step(0, part(std::as_const(expected.q)), part(std::as_const(expected.k)),
                    part(std::as_const(expected.v)), expected.out.view().slice(40 * i, 40));
      CHECK(test::dump(caches[i], false) == test::dump(alone[i], false));
      for (std::size_t token = 40 * i; token < 40 * (i + 1); ++token) {
        REQUIRE(chunk.out.row(token, 3) == expected.out.row(token, 3));
      }
    }
  }
  CHECK(left_out > 3);
}
