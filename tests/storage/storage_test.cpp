// SPDX-License-Identifier: Apache-2.0
//
// Storages under random appends, windows and reservations, compared with lists of rows. A reservation must
// also be enough for its rows in whatever pieces they are appended.
#include <doctest/doctest.h>

#include <initializer_list>
#include <vector>

#include <kvpolicy/storage/residual_storage.hpp>

#include "support/compare.hpp"
#include "support/memory.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;
using test::below;
using test::contains;
using test::CountingResource;
using test::Random;
using test::Tensor;
using test::thrown;

namespace {

constexpr std::size_t head_dim = 64;

Segment segment_of(const Tensor<float>& keys, const Tensor<float>& values, std::size_t first,
                   std::size_t rows) {
  const auto plane = [&](const Tensor<float>& t) {
    const auto view = t.view();
    return Plane{.base = reinterpret_cast<const std::byte*>(view.data),
                 .row_stride = view.token_stride * sizeof(float),
                 .first_row = first};
  };
  return {.keys = plane(keys), .values = plane(values), .rows = rows};
}

// The keys and values of the rows [begin, end) that a storage shows, one after another.
template <class Storage>
std::vector<float> shown(const Storage& storage) {
  SegmentList list;
  storage.show(storage.begin(), storage.end() - storage.begin(), {.position = 1000}, list);
  std::vector<float> numbers;
  std::vector<float> row(head_dim);
  std::int64_t next = 1000;
  for (const Segment& segment : list) {
    CHECK(segment.position == next);
    CHECK(segment.rows > 0);
    next += static_cast<std::int64_t>(segment.rows);
    for (std::size_t i = 0; i < segment.rows; ++i) {
      for (const Plane* plane : {&segment.keys, &segment.values}) {
        load_row(*plane, i, row);
        numbers.insert(numbers.end(), row.begin(), row.end());
      }
    }
  }
  CHECK(next == 1000 + static_cast<std::int64_t>(storage.end() - storage.begin()));
  return numbers;
}

// One storage gets whole batches; the other gets the same rows after a reservation, in random pieces, while
// no memory can be allocated. Both must end in the same state, and hold the bytes that bytes_of_rows says.
template <class Storage>
void reserved_pieces(const typename Storage::Config& config, std::size_t window, std::uint64_t seed,
                     bool held = false) {
  CAPTURE(window);
  CAPTURE(seed);
  Random random{seed};
  CountingResource memory;
  CountingResource whole_memory;
  {
    PagePool pool{&memory, {.max_slab_bytes = 0}}, whole_pool{&whole_memory, {.max_slab_bytes = 0}};
    const StorageContext context{head_dim, 16, &pool};
    Storage pieces{config, context};
    Storage whole{config, {head_dim, 16, &whole_pool}};
    if constexpr (requires { pieces.defer_quantization(true); }) {
      pieces.defer_quantization(held);
      whole.defer_quantization(held);
    }
    std::vector<Storage> forks;
    for (int round = 0; round < 25; ++round) {
      const std::size_t rows = test::one_of(random, std::vector<std::size_t>{1, 1, 2, 5, 15, 16, 17, 40, 90});
      Tensor<float> keys{rows, 1, head_dim}, values{rows, 1, head_dim};
      keys.randomize(random);
      values.randomize(random);
      whole.append(segment_of(keys, values, 0, rows), window);
      CHECK(whole_memory.live_bytes() == whole.bytes());

      if (below(random, 4) == 0) forks.assign(1, pieces);  // shared pages cannot be reused
      pieces.reserve(rows, window);
      memory.fail_after(0);
      for (std::size_t done = 0; done < rows;) {
        const std::size_t count = std::min(rows - done, 1 + below(random, rows));
        REQUIRE_NOTHROW(pieces.append(segment_of(keys, values, done, count), window));
        done += count;
      }
      memory.fail_after(test::never);
      pieces.release_unused();
      CHECK(pieces.end() == whole.end());
      CHECK(pieces.begin() == whole.begin());
      CHECK(test::same_bits(shown(pieces), shown(whole)));
      CHECK(pieces.bytes() == whole.bytes());
      if (!held)
        CHECK(pieces.bytes() == Storage::bytes_of_rows(config, context, pieces.begin(), pieces.end()));
      if (forks.empty()) {
        CHECK(memory.live_bytes() == pieces.bytes());
      } else {
        CHECK(memory.live_bytes() == pieces.bytes() + forks[0].bytes() - pieces.shared_bytes());
      }
    }
    CHECK(memory.faults() == 0);
  }
  CHECK(memory.live_blocks() == 0);
  CHECK(whole_memory.live_blocks() == 0);
}

}  // namespace

TEST_CASE("dense: pieces of a reservation") {
  std::uint64_t seed = 0;
  for (const std::size_t window :
       {std::size_t{1}, std::size_t{15}, std::size_t{16}, std::size_t{17}, std::size_t{50}, unlimited_rows}) {
    for (int i = 0; i < 6; ++i) reserved_pieces<DenseStorage<bfloat16>>({}, window, ++seed);
  }
}

TEST_CASE("residual, per token: pieces of a reservation") {
  using Storage = ResidualStorage<float16, Granularity::per_token>;
  std::uint64_t seed = 0;
  for (const std::size_t window : {std::size_t{1}, std::size_t{16}, std::size_t{45}, unlimited_rows}) {
    for (const std::size_t residual : std::initializer_list<std::size_t>{0, 1, 16, 30, 100}) {
      for (int i = 0; i < 3; ++i) reserved_pieces<Storage>({.bits = 4, .residual = residual}, window, ++seed);
    }
    for (const std::size_t residual : std::initializer_list<std::size_t>{1, 16, 30}) {
      reserved_pieces<Storage>({.bits = 8, .residual = residual, .flush = Flush::kivi}, window, ++seed);
    }
    reserved_pieces<Storage>({.residual = 4}, window, ++seed, /*held=*/true);
  }
}

TEST_CASE("residual, per channel: pieces of a reservation") {
  using Storage = ResidualStorage<float, Granularity::per_channel>;
  std::uint64_t seed = 0;
  for (const std::size_t group : std::initializer_list<std::size_t>{1, 4, 16}) {
    for (const std::size_t residual : std::initializer_list<std::size_t>{0, 1, 16, 30, 100}) {
      for (int i = 0; i < 3; ++i) {
        reserved_pieces<Storage>({.bits = 2, .key_group = group, .residual = residual}, unlimited_rows,
                                 ++seed);
      }
    }
    reserved_pieces<Storage>({.bits = 4, .key_group = group, .residual = 48, .flush = Flush::kivi},
                             unlimited_rows, ++seed);
  }
}

TEST_CASE("a failed reservation leaks nothing") {
  using Storage = ResidualStorage<float, Granularity::per_token>;
  Tensor<float> keys{70, 1, head_dim}, values{70, 1, head_dim};
  Random random{1};
  keys.randomize(random);
  values.randomize(random);
  for (std::size_t n = 0;; ++n) {
    CountingResource memory;
    PagePool pool{&memory, {.max_slab_bytes = 0}};
    Storage storage{{.residual = 20}, {head_dim, 16, &pool}};
    storage.append(segment_of(keys, values, 0, 30));
    const auto before = shown(storage);
    const std::size_t bytes = storage.bytes();
    memory.fail_after(n);
    try {
      storage.append(segment_of(keys, values, 0, 70));
      CHECK(n > 3);
      break;
    } catch (const std::bad_alloc&) {
    }
    CHECK(storage.bytes() == bytes);
    CHECK(memory.live_bytes() == bytes);
    CHECK(test::same_bits(shown(storage), before));
  }
}

TEST_CASE("select keeps rows unchanged and renumbers them") {
  using Storage = ResidualStorage<float16, Granularity::per_token>;
  Random random{1};
  Tensor<float> keys{90, 1, head_dim}, values{90, 1, head_dim};
  keys.randomize(random);
  values.randomize(random);
  for (const Flush flush : {Flush::steady, Flush::kivi}) {
    CountingResource memory;
    PagePool pool{&memory, {.max_slab_bytes = 0}};
    Storage storage{{.bits = 4, .residual = 20, .flush = flush}, {head_dim, 16, &pool}};
    storage.append(segment_of(keys, values, 0, 90));
    const auto all = shown(storage);
    const std::vector<std::size_t> numbers{0, 3, 4, 50, 69, 70, 71, 75, 79, 80, 85, 89};
    const Storage kept = storage.select(numbers);
    CHECK(kept.begin() == 0);
    REQUIRE(kept.end() == numbers.size());
    const auto some = shown(kept);
    // The kept rows are fewer than the residual, so no exact row is quantised.
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      for (std::size_t c = 0; c < 2 * head_dim; ++c) {
        CHECK(some[i * 2 * head_dim + c] == all[numbers[i] * 2 * head_dim + c]);
      }
    }
    CHECK(memory.live_bytes() == storage.bytes() + kept.bytes());
    Storage grown = kept;
    grown.append(segment_of(keys, values, 0, 40));
    CHECK(grown.end() == numbers.size() + 40);
    const Storage none = storage.select({});
    CHECK(none.end() == 0);
    CHECK(none.bytes() == 0);
  }
  CountingResource memory;
  PagePool pool{&memory, {.max_slab_bytes = 0}};
  DenseStorage<float16> dense{{}, {head_dim, 16, &pool}};
  dense.append(segment_of(keys, values, 0, 90));
  const auto kept = dense.select(std::vector<std::size_t>{1, 88});
  CHECK(kept.end() == 2);
  CHECK(memory.live_bytes() == dense.bytes() + kept.bytes());
}

TEST_CASE("a plane store drops its first rows, skips rows, and is copied with a half-full page") {
  Random random{4};
  for (int round = 0; round < 40; ++round) {
    CountingResource memory;
    PagePool pool{&memory, {.max_slab_bytes = 0}};
    const StorageContext context{head_dim, 16, &pool};
    PlaneStore store{{.encoding = Encoding::float32}, context};
    std::vector<std::vector<float>> rows;  // row `number` has the index number - begin
    std::size_t begin = 0;
    for (int i = 0; i < 40; ++i) {
      const std::size_t what = below(random, 5);
      if (what < 2) {
        Tensor<float> more{1 + below(random, 20), 1, head_dim};
        more.randomize(random);
        store.append(segment_of(more, more, 0, more.tokens()).keys, more.tokens());
        for (std::size_t t = 0; t < more.tokens(); ++t) rows.push_back(more.row(t, 0));
      } else if (what == 2) {
        const std::size_t count = below(random, rows.size() + 1);
        rows.erase(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(count));
        store.drop_front(begin += count);
      } else if (what == 3) {
        begin = store.end() + below(random, 30);
        store.skip_to(begin);
        rows.clear();
      } else {
        PlaneStore copy{store};
        CHECK(memory.live_bytes() == copy.bytes() + store.bytes() - store.shared_bytes());
        store = std::move(copy);
      }
      REQUIRE(store.begin() == begin);
      REQUIRE(store.rows() == rows.size());
      std::vector<float> row(head_dim);
      bool same = true;
      for (std::size_t r = 0; r < rows.size(); ++r) {
        load_row(store.plane(begin), r, row);
        same = same && test::same_bits(row, rows[r]);
      }
      CHECK(same);
      CHECK(memory.live_bytes() == store.bytes());
      if (!rows.empty()) {
        CHECK(store.bytes() == PlaneStore::bytes_of_rows(store.format(), context, begin, store.end()));
      }
    }
    CHECK(memory.faults() == 0);
  }
}

TEST_CASE("growing allocates memory by pages, and rarely more") {
  CountingResource memory;
  PagePool pool{&memory, {.max_slab_bytes = 0}};
  DenseStorage<float16> storage{{}, {head_dim, 64, &pool}};
  Tensor<float> row{1, 1, head_dim};
  row.fill([](auto...) { return 1.0F; });
  for (int i = 0; i < 1000; ++i) storage.append(segment_of(row, row, 0, 1));
  CHECK(memory.allocations() == 2 * 16);
}

TEST_CASE("storages refuse invalid settings") {
  using Storage = ResidualStorage<float, Granularity::per_token>;
  const auto context_error = [](StorageContext context) {
    return thrown<ConfigError>([&] { DenseStorage<float>{{}, context}; });
  };
  CHECK(context_error({64, 16}).empty());
  CHECK(contains(context_error({0, 16}), "head_dim is 0"));
  CHECK(contains(context_error({30, 16}), "head_dim is 30"));
  CHECK(contains(context_error({64, 0}), "page_rows is 0"));
  CHECK(contains(context_error({64, 24}), "page_rows is 24"));
  PagePool pool;
  CHECK(contains(context_error({64, 16, &pool, 1}), "slow_tier is 1, must be below the pool's 1 tiers"));
  CHECK(contains(thrown<ConfigError>([] { Storage{{.bits = 1}, {64, 16}}; }), "bits is 1"));
  CHECK(contains(thrown<ConfigError>([] { Storage{{.key_group = 65}, {64, 16}}; }),
                 "must divide head_dim = 64"));
  CHECK(contains(thrown<ConfigError>([] { Storage{{.residual = std::size_t{1} << 41}, {64, 16}}; }),
                 "residual is"));
}
