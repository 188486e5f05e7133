// SPDX-License-Identifier: Apache-2.0
//
// What caches ask of a policy, and what stands in for what it lacks. Policies that have a part of a role are
// in compile_fail.
#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include <kvpolicy/plan/shipped_policies.hpp>
#include <kvpolicy/policy/policy_traits.hpp>

using namespace kvpolicy;

namespace user {

using Dense = DenseStorage<float>;
using Residual = ResidualStorage<float>;

// Keeps rows somewhere, and has nothing that a policy need not have.
class Plain {
 public:
  using element_type = float;
  struct Config {
    using policy_type = Plain;
    friend bool operator==(const Config&, const Config&) = default;
  };
  Plain(const Config&, const StorageContext&) {}
  void reserve(std::size_t) {}
  void release_unused() noexcept {}
  void commit(const Segment&) noexcept {}
  void segments(const ReadRequest&, SegmentList&) const {}
  [[nodiscard]] std::size_t rows() const { return 0; }
  [[nodiscard]] std::size_t bytes() const { return 0; }
  [[nodiscard]] std::size_t shared_bytes() const { return 0; }

 private:
  // What nobody else can call makes it no policy of a role.
  [[maybe_unused]] void compete() {}
  [[maybe_unused]] void finish_compress() {}
};

}  // namespace user

using namespace user;

namespace {

template <class P>
constexpr bool has_roles(bool selects, bool compresses, bool accumulates, bool shares) {
  using Traits = policy_traits<P>;
  return Traits::selects == selects && Traits::compresses == compresses &&
         Traits::accumulates == accumulates && Traits::shares == shares;
}
static_assert(has_roles<Plain>(false, false, false, false));
static_assert(has_roles<FullCache<Dense>>(false, false, false, false));
static_assert(has_roles<SinkRecentCache<Dense>>(false, false, false, false));
static_assert(has_roles<ChunkRetrievalCache<Dense>>(true, false, false, false));
static_assert(has_roles<HeadBudgetCache<Dense>>(false, true, false, true));
static_assert(has_roles<HeadBudgetCache<Dense, KeyNormScorer>>(false, true, false, true));
static_assert(has_roles<HeadBudgetCache<Dense, KeyDiffScorer>>(false, true, false, true));
static_assert(has_roles<HeadBudgetCache<Dense, ExpectedAttentionScorer>>(false, true, false, true));
static_assert(has_roles<HeadBudgetCache<Dense, H2oScorer>>(false, true, true, true));
static_assert(has_roles<HeadBudgetCache<Dense, KvZipScorer>>(false, true, true, true));
static_assert(policy_traits<HeadBudgetCache<Dense, KvZipScorer>>::waits_for_scoring &&
              !policy_traits<HeadBudgetCache<Dense, H2oScorer>>::waits_for_scoring);

static_assert(policy_traits<FullCache<Dense>>::may_be_slow &&
              policy_traits<FullCache<Residual>>::may_be_slow &&
              policy_traits<ChunkRetrievalCache<Dense>>::may_be_slow);
static_assert(!policy_traits<Plain>::may_be_slow && !policy_traits<HeadBudgetCache<Dense>>::may_be_slow);
static_assert(policy_traits<FullCache<Dense>>::is_savable && !policy_traits<Plain>::is_savable);

constexpr StorageContext context{.head_dim = 16, .page_rows = 16};

template <class P>
P holding(std::size_t rows, const typename P::Config& config = {}) {
  const std::vector<float> numbers(rows * context.head_dim, 1.0F);
  P policy{config, context};
  policy.reserve(rows);
  policy.commit(rows_of(numbers.data(), numbers.data(), rows, context.head_dim, 0));
  return policy;
}

}  // namespace

TEST_CASE(
    "policy traits: rows that a policy keeps outside of its storage are not counted among the storage's") {
  using Quantized = QuantizedResidualCache<float>;
  const Quantized::Config config{.sinks = 5};
  for (const std::size_t rows : {std::size_t{0}, std::size_t{4}, std::size_t{5}, std::size_t{40}}) {
    CAPTURE(rows);
    const auto policy = holding<Quantized>(rows, config);
    CHECK(policy_traits<Quantized>::stored_rows(config, rows) == policy.storage().end());
    CHECK(policy_traits<Quantized>::stored_rows(policy, rows) == policy.storage().end());
    CHECK(policy_traits<Plain>::stored_rows({}, rows) == rows);
    CHECK(policy_traits<Plain>::stored_rows(Plain{{}, context}, rows) == rows);
  }
}

TEST_CASE("policy traits: a policy goes back before a row if it can, and changes nothing if it cannot") {
  auto full = holding<FullCache<Dense>>(40);
  CHECK(policy_traits<FullCache<Dense>>::cut(full, 32));
  CHECK(full.rows() == 32);
  auto window = holding<SinkRecentCache<Dense>>(40);
  CHECK_FALSE(policy_traits<SinkRecentCache<Dense>>::cut(window, 33));
  CHECK(window.rows() == 40);
}
