// SPDX-License-Identifier: Apache-2.0
//
// A cache whose rows are in slow memory is the cache that has all on the device, bit for bit,
// whatever the order in which the streams get to their work.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "cuda/support/random_device.hpp"
#include "cuda/support/slow_twins.hpp"

using namespace kvpolicy;
using test::DeviceCache;
using test::DevicePlan;
using test::SlowTwins;

namespace {

constexpr AttendOptions selecting{.read = Read::selected};
constexpr AttendOptions choosing{.read = Read::selected, .refresh_selection = true};
constexpr AttendOptions choosing_after{.refresh_selection = true};

// How the emulated streams work: at once, late, or late but for those that copy.
enum class Pace { at_once, late, copies_first };

class Paced {
 public:
#if defined(__CUDACC__)
  explicit Paced(Pace) {}
#else
  explicit Paced(Pace pace) {
    gpu::simt::device().late = pace != Pace::at_once;
    gpu::simt::device().eager_streams = pace == Pace::copies_first;
  }
  ~Paced() {
    gpu::simt::device().late = false;
    gpu::simt::device().eager_streams = false;
  }
#endif
  Paced(const Paced&) = delete;
  Paced& operator=(const Paced&) = delete;
};

void run_randomly(const ModelShape& shape, const std::vector<test::HeadSpec>& heads,
                  const gpu::CacheOptions& options, Pace pace, std::uint64_t seed, int calls) {
  CAPTURE(seed);
  CAPTURE(static_cast<int>(pace));
  const test::Stream stream;  // before copies are eager
  const Paced paced{pace};
  test::Random random{seed};
  SlowTwins twins{test::plan_with(shape, heads, seed), options, stream};
  bool equal = twins.step(random, 150 + test::below(random, 100), choosing_after);
  for (int i = 0; i < calls; ++i) {
    CAPTURE(i);
    const std::size_t what = test::below(random, 16);
    const std::size_t tokens = twins.near().tokens();
    if (what == 0) {
      twins.both([&](DeviceCache& cache) { cache.commit(stream); });
    } else if (what == 1) {
      twins.both([&](DeviceCache& cache) { cache.compress(stream); });
    } else if (what == 2) {
      twins.fork();
    } else if (what == 3) {
      twins.both([&](DeviceCache& cache) { cache.reserve(tokens + 90, stream); });
    } else if (what <= 6) {
      const std::size_t back = test::below(random, tokens - twins.near().commit_point() + 1);
      twins.both([&](DeviceCache& cache) { cache.truncate(tokens - back, stream); });
    } else {
      std::size_t count = test::one_of(random, std::vector<std::size_t>{1, 1, 2, 5, 30, 70});
      const bool apart = test::below(random, 4) == 0;
      if (apart) count = std::min(count, options.max_append);
      const AttendOptions how = test::one_of(
          random, std::vector<AttendOptions>{{}, selecting, selecting, selecting, choosing, choosing_after});
      equal = twins.step(random, count, how, apart) && equal;
    }
    REQUIRE(equal);
  }
  twins.check_rows();
}

}  // namespace

TEST_CASE("any sequence of calls: the cache without slow memory, bit for bit") {
  const test::SmallDevice device;
  struct Case {
    std::size_t layers;
    Pace pace;
    std::size_t max_rollback, max_append, latest_rows, page_rows;
    bool only_selecting;
  };
  const std::vector<Case> cases{
      {1, Pace::at_once, 7, 21, 100, 64, false},   {1, Pace::late, 0, 1, 0, 64, false},
      {2, Pace::late, 70, 41, 0, 64, false},       {2, Pace::copies_first, 0, 5, 0, 64, true},
      {3, Pace::late, 7, 9, 0, 128, false},        {3, Pace::copies_first, 20, 30, 0, 64, false},
      {5, Pace::copies_first, 0, 1, 0, 64, false},
  };
  std::uint64_t seed = test::more_seeds(1);
  for (const Case& one : cases) {
    CAPTURE(one.layers);
    gpu::CacheOptions options;
    options.max_rollback = one.max_rollback;
    options.max_append = one.max_append;
    options.latest_rows = one.latest_rows;
    options.page_rows = one.page_rows;
    run_randomly({one.layers, 3, 3, 64}, one.only_selecting ? test::selecting_heads() : test::slow_heads(),
                 options, one.pace, seed++, 60 / static_cast<int>(4 + one.layers));
  }
}

TEST_CASE("pages that rows came to and left again") {
  const test::SmallDevice device;
  const test::Stream stream;
  gpu::CacheOptions options;
  options.max_rollback = 100;
  options.latest_rows = 0;
  SlowTwins twins{
      test::plan_with({1, 2, 2, 64}, {{}, {.kind = test::Kind::retrieval, .budget = 32, .chunk = 8}}),
      options, stream};
  test::Random random{4};
  REQUIRE(twins.step(random, 200, choosing_after));
  REQUIRE(twins.step(random, 100, {}));  // two pages leave the latest ones, and do not come back
  twins.both([&](DeviceCache& cache) { cache.truncate(205, stream); });
  CHECK(twins.step(random, 1, {}, /*apart=*/true));
  CHECK(twins.step(random, 1, selecting));
  twins.fork();
  CHECK(twins.step(random, 1, {}, /*apart=*/true));
  CHECK(twins.step(random, 120, {}));
  CHECK(twins.step(random, 1, {}));
  twins.check_rows();
}

TEST_CASE("texts that are shorter than what a head may choose, a residual, or a page") {
  const test::SmallDevice device;
  const test::Stream stream;
  SlowTwins twins{test::plan_with({1, 4, 4, 64}, test::selecting_heads()), {.max_rollback = 4}, stream};
  test::Random random{6};
  CHECK(twins.step(random, 1, selecting));
  CHECK(twins.step(random, 40, choosing_after));
  twins.fork();  // with a choice of rows of which none is packed
  CHECK(twins.step(random, 1, selecting));
  CHECK(twins.step(random, 1, {}));
  for (int i = 0; i < 9; ++i) CHECK(twins.step(random, 11, selecting));  // by and by they are
  twins.check_rows();
}

TEST_CASE("trees of guesses: the rows of a path move where they are for good as well") {
  const test::SmallDevice device;
  const test::Stream stream;
  gpu::CacheOptions options;
  options.max_rollback = 12;
  options.latest_rows = 0;
  const std::vector<test::HeadSpec> heads{
      {},
      {.bits = 4, .residual = 20},
      {.kind = test::Kind::retrieval, .budget = 32, .chunk = 8},
      {.kind = test::Kind::retrieval, .budget = 32, .chunk = 16, .bits = 8, .residual = 9}};
  SlowTwins twins{test::plan_with({2, 4, 4, 64}, heads), options, stream};
  test::Random random{8};
  REQUIRE(twins.step(random, 60, choosing_after));
  bool equal = true;
  for (int i = 0; i < 14; ++i) {
    std::vector<std::size_t> parents;
    for (std::size_t node = 0; node < 12; ++node) {
      const std::size_t parent = test::below(random, node + 1);
      parents.push_back(parent == node ? TokenTree::text : parent);
    }
    const TokenTree tree{parents};
    AttendOptions how = i % 3 == 1 ? selecting : AttendOptions{};
    how.tree = &tree;
    equal = twins.step(random, tree.size(), how) && equal;
    std::vector<std::size_t> path;
    for (std::size_t node = 6 + test::below(random, 6); node != TokenTree::text; node = tree.parent(node)) {
      path.insert(path.begin(), node);
    }
    twins.both([&](DeviceCache& cache) { cache.accept(path, stream); });
    equal = twins.step(random, 9, i % 4 == 0 ? choosing : selecting) && equal;  // pages go by
  }
  CHECK(equal);
  CHECK(twins.near().tokens() > 220);
  CHECK(twins.step(random, 1, {}));
  twins.check_rows();
}
