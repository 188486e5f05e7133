// SPDX-License-Identifier: Apache-2.0
//
// Policies that know nothing of slow memory, in caches that have it: full pages of one that states a rule
// which keeps every row go there, a selected read touches none of them, and no bit of any output changes.
#include <doctest/doctest.h>

#include <utility>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

#include "cache/dump.hpp"
#include "support/slow_memory.hpp"

using namespace kvpolicy;

namespace {

// Keeps every row. A selected read leaves out every other block of 8 rows before the last choice.
template <bool StatesRule>
class EvenBlocks {
 public:
  using element_type = float;
  using storage_type = DenseStorage<float>;
  struct Config {
    using policy_type = EvenBlocks;
    DenseStorage<float>::Config storage = {};
    friend bool operator==(const Config&, const Config&) = default;
  };

  EvenBlocks(const Config& config, const StorageContext& context) : storage_{config.storage, context} {}

  [[nodiscard]] static HeadRule rule(const Config&, std::size_t)
    requires StatesRule
  {
    HeadRule rule;
    rule.chunk = 8;
    rule.chosen_rows = 80;
    return rule;
  }
  [[nodiscard]] const storage_type& storage() const { return storage_; }
  [[nodiscard]] storage_type& storage() { return storage_; }

  void reserve(std::size_t rows) { storage_.reserve(rows); }
  void release_unused() noexcept { storage_.release_unused(); }
  void commit(const Segment& rows) noexcept { storage_.append(rows); }

  [[nodiscard]] bool selection_is_stale() const { return choices_.empty(); }
  void prepare_refresh(std::span<const float>, ChunkScorer&, std::size_t tokens) {
    choices_.reserve(choices_.size() + 1);
    pending_ = {storage_.end(), tokens};
  }
  void finish_refresh() noexcept {
    if (pending_.tokens > 0) choices_.push_back(std::exchange(pending_, {}));
  }
  void abandon_refresh() noexcept { pending_ = {}; }
  void undo_refresh(std::size_t tokens) noexcept {
    while (!choices_.empty() && choices_.back().tokens > tokens) choices_.pop_back();
  }
  void forget_selection() noexcept { choices_.clear(); }

  void segments(const ReadRequest& request, SegmentList& out) const {
    const std::size_t first = out.size();
    storage_.show(0, storage_.end(), {}, out);
    if (request.read == Read::all || (pending_.tokens == 0 && choices_.empty()) || out.size() == first)
      return;
    const std::size_t until = pending_.tokens > 0 ? pending_.rows : choices_.back().rows;
    runs_.clear();
    for (std::size_t row = 0; row < storage_.end(); ++row) {
      if (row < until && row / 8 % 2 == 1) continue;
      if (!runs_.empty() && runs_.back().first + runs_.back().rows == row)
        ++runs_.back().rows;
      else
        runs_.push_back({row, 1});
    }
    out.back().runs = runs_;
  }
  [[nodiscard]] std::size_t rows() const { return storage_.end(); }
  [[nodiscard]] std::size_t bytes() const { return storage_.bytes(); }
  [[nodiscard]] std::size_t shared_bytes() const { return storage_.shared_bytes(); }

 private:
  struct Choice {
    std::size_t rows = 0, tokens = 0;
  };
  storage_type storage_;
  std::vector<Choice> choices_;
  Choice pending_;
  mutable std::vector<RowRun> runs_;
};

template <bool StatesRule>
void check() {
  constexpr ModelShape shape{.layers = 1, .q_heads = 2, .kv_heads = 2, .head_dim = 16};
  const HeadPlan<float> plan{shape, typename EvenBlocks<StatesRule>::Config{}};
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    CAPTURE(seed);
    test::Random random{seed};
    test::FailingSlowMemory slow;
    CacheOptions options{.max_rollback = seed % 2 * 24, .page_rows = 16};
    KvCache<float> fast{plan, options};
    options.slow_memory = &slow;
    KvCache<float> own{plan, options};
    bool chosen = false;
    for (int i = 0; i < 60; ++i) {
      CAPTURE(i);
      const std::size_t span = fast.tokens() - fast.commit_point();
      if (span > 0 && test::below(random, 4) == 0) {
        const std::size_t to = fast.tokens() - test::below(random, span + 1);
        fast.truncate(to);
        own.truncate(to);
      }
      AttendOptions call{.read = test::below(random, 2) == 0 ? Read::selected : Read::all};
      call.refresh_selection = test::below(random, 3) == 0;
      chosen = chosen || call.refresh_selection || call.read == Read::selected;
      test::Chunk<> chunk{random, shape, 1 + test::below(random, 12)};
      test::Chunk<> other = chunk;
      chunk.step(fast, 0, call);
      other.step(own, 0, call);
      REQUIRE(test::same_bits(chunk.out.numbers(), other.out.numbers()));
      CHECK(own.slow_bytes() == slow.live_bytes());
      for (const Segment& segment : own.segments(0, 0, Read::selected)) {
        if (own.template policy<EvenBlocks<StatesRule>>(0, 0).selection_is_stale()) continue;
        std::vector<PageProvider::Range> ranges;
        list_ranges(slow, segment, shape.head_dim, shape.head_dim, ranges);
        CHECK(ranges.empty());
      }
    }
    CHECK(chosen);
    CHECK((slow.written_bytes() > 0) == StatesRule);
  }
}

}  // namespace

TEST_CASE("slow memory: full pages of a policy of one's own go there if its rule keeps every row") {
  check<true>();
}
TEST_CASE("slow memory: rows of a policy that states no rule stay in fast memory") { check<false>(); }
