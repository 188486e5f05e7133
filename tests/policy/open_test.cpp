// SPDX-License-Identifier: Apache-2.0
//
// The concepts are open: a user's own policy and storage work in a plan and in a cache beside those of
// the library. The file also tests what the concepts must refuse.
#include <doctest/doctest.h>

#include <array>
#include <initializer_list>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "support/compare.hpp"
#include "support/oracle.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace user {

// A policy that keeps every n-th row of the text and nothing else.
class EveryNth {
 public:
  using element_type = float;
  struct Config {
    using policy_type = EveryNth;
    std::size_t n = 3;
    friend bool operator==(const Config&, const Config&) = default;
  };
  EveryNth(const Config& config, const StorageContext& context) : config_{config}, storage_{{}, context} {}

  void reserve(std::size_t rows) {
    storage_.reserve(rows);
    positions_.reserve(positions_.size() + rows);
  }
  void release_unused() noexcept { storage_.release_unused(); }
  void commit(const Segment& rows) noexcept {
    for (std::size_t i = 0; i < rows.rows; ++i) {
      if (rows.position_of(i) % static_cast<std::int64_t>(config_.n) != 0) continue;
      storage_.append(rows.part(i, 1));
      positions_.push_back(rows.position_of(i));
    }
  }
  void segments(const ReadRequest&, SegmentList& out) const {
    storage_.show(0, storage_.end(), {.positions = positions_.data()}, out);
  }
  [[nodiscard]] std::size_t rows() const { return storage_.end(); }
  [[nodiscard]] std::size_t bytes() const { return storage_.bytes(); }
  [[nodiscard]] std::size_t shared_bytes() const { return storage_.shared_bytes(); }

 private:
  Config config_;
  DenseStorage<float> storage_;
  std::vector<std::int64_t> positions_;
};

// A storage of one array that is copied when it grows; its pages have one row, so that planes can show
// it.
class FlatStorage {
 public:
  using element_type = float;
  struct Config {
    friend bool operator==(const Config&, const Config&) = default;
  };
  static constexpr bool movable_rows = true;

  FlatStorage(const Config&, const StorageContext& context) : head_dim_{context.head_dim} {}
  static void validate(const Config&, const StorageContext&) {}
  void check(const Segment&) const {}
  void reserve(std::size_t rows, std::size_t = 0) {
    for (auto& side : sides_) side.reserve((end_ + rows) * head_dim_);
  }
  void release_unused() noexcept {}
  void append(const Segment& rows, std::size_t window = unlimited_rows) {
    const std::array<const Plane*, 2> planes{&rows.keys, &rows.values};
    for (std::size_t s = 0; s < 2; ++s) {
      sides_[s].resize((end_ + rows.rows) * head_dim_);
      for (std::size_t i = 0; i < rows.rows; ++i) {
        load_row(*planes[s], i, std::span{sides_[s]}.subspan((end_ + i) * head_dim_, head_dim_));
      }
    }
    end_ += rows.rows;
    begin_ = std::max(begin_, end_ - std::min(end_, window));
  }
  void show(std::size_t first, std::size_t count, Segment prototype, SegmentList& out) const {
    if (count == 0) return;
    const Segment all = rows_of(sides_[0].data(), sides_[1].data(), end_, head_dim_, 0);
    prototype.keys = all.keys.from(first);
    prototype.values = all.values.from(first);
    prototype.rows = count;
    out.push_back(prototype);
  }
  [[nodiscard]] FlatStorage select(std::span<const std::size_t>) const { return *this; }
  [[nodiscard]] std::size_t begin() const { return begin_; }
  [[nodiscard]] std::size_t end() const { return end_; }
  [[nodiscard]] std::size_t bytes() const { return 0; }
  [[nodiscard]] std::size_t shared_bytes() const { return 0; }
  [[nodiscard]] static std::size_t bytes_of_rows(const Config&, const StorageContext&, std::size_t,
                                                 std::size_t) {
    return 0;
  }
  [[nodiscard]] static std::size_t bytes_of_step(const Config&, const StorageContext&, std::size_t,
                                                 std::size_t) {
    return 0;
  }
  [[nodiscard]] static std::size_t max_bytes(const Config&, const StorageContext&, std::size_t, std::size_t) {
    return 0;
  }
  [[nodiscard]] static std::size_t period(const Config&, const StorageContext&) { return 1; }

 private:
  std::size_t head_dim_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::array<std::vector<float>, 2> sides_;
};

static_assert(KvPolicy<EveryNth> && KvStorage<FlatStorage>);
static_assert(!SelectingPolicy<EveryNth> && !CompressingPolicy<EveryNth>);
static_assert(KvPolicy<FullCache<FlatStorage>> && KvPolicy<SinkRecentCache<FlatStorage>>);

struct Nothing {};
struct NoBytes : EveryNth {
  using EveryNth::EveryNth;
  void bytes() const {}
};
static_assert(!KvPolicy<Nothing> && !KvPolicy<int> && !KvPolicy<NoBytes>);
static_assert(!KvStorage<Nothing> && !KvStorage<EveryNth>);
static_assert(!AttentionEngine<Nothing>);

}  // namespace user

using namespace user;

TEST_CASE("a user's policy and storage, in one plan with the library's") {
  const ModelShape shape{1, 6, 3, 64};
  HeadPlan<float> plan{shape};
  plan.set(0, 1, EveryNth::Config{.n = 5});
  plan.set(0, 2, SinkRecentCache<FlatStorage>::Config{.sinks = 2, .recent = 7});
  KvCache cache{plan, {.max_rollback = 4, .page_rows = 16}};
  test::Random random{1};
  std::vector<std::vector<oracle::Row>> text(3);
  for (const std::size_t tokens : std::initializer_list<std::size_t>{20, 1, 1, 9, 1}) {
    test::Tensor<float> q{tokens, 6, 64}, k{tokens, 3, 64}, v{tokens, 3, 64}, out{tokens, 6, 64};
    q.randomize(random);
    k.randomize(random);
    v.randomize(random);
    const auto commit_point = static_cast<std::int64_t>(cache.commit_point());
    const std::size_t before = cache.tokens();
    cache.step(0, std::as_const(q).view(), std::as_const(k).view(), std::as_const(v).view(), out.view());
    for (std::size_t h = 0; h < 3; ++h) {
      for (std::size_t i = 0; i < tokens; ++i) {
        text[h].push_back(
            {static_cast<std::int64_t>(before + i), k.row_of_doubles(i, h), v.row_of_doubles(i, h)});
      }
    }
    for (std::size_t i = 0; i < tokens; ++i) {
      const auto t = static_cast<std::int64_t>(before + i);
      for (std::size_t q_head = 0; q_head < 6; ++q_head) {
        const std::size_t h = q_head / 2;
        std::vector<const oracle::Row*> rows;
        for (const auto& row : text[h]) {
          const std::int64_t p = row.position;
          const bool reads = h == 0 || (h == 1 ? p >= commit_point || p % 5 == 0 : p < 2 || p > t - 7);
          if (p <= t && reads) rows.push_back(&row);
        }
        const auto expected = oracle::attend(q.row_of_doubles(i, q_head), rows, {0.125, 0.0, {}});
        CHECK(test::largest_difference(expected.out, out.row(i, q_head)) <= 1e-5);
      }
    }
  }
  cache.truncate(cache.tokens() - 3);
  const auto fork = cache.fork();
  CHECK(fork.tokens() == 29);
  CHECK(fork.policy<EveryNth>(0, 1).rows() == 6);
}
