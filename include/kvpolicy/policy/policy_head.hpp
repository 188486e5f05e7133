// SPDX-License-Identifier: Apache-2.0
//
// A head whose policy is a P: the one implementation of Head. What P lacks its traits stand in for
// (policy_traits.hpp). Where there is slow memory, the head keeps the rows of P there
// (offload/slow_rows.hpp), and P does not know.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/boxed.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/try.hpp>
#include <kvpolicy/offload/slow_rows.hpp>
#include <kvpolicy/policy/head.hpp>
#include <kvpolicy/policy/policy_traits.hpp>
#include <kvpolicy/policy/shared_config.hpp>
#include <kvpolicy/policy/slow_rule.hpp>
#include <kvpolicy/state/archive.hpp>

namespace kvpolicy {

/// One head under policy P.
template <KvPolicy P>
class PolicyHead final : public Head {
  using Traits = policy_traits<P>;

 public:
  static constexpr bool is_savable = Traits::is_savable;

  /// @throws ConfigError, as P's constructor
  PolicyHead(const SharedConfig<typename P::Config>& config, const StorageContext& context)
      : Head{{Traits::selects, Traits::compresses, Traits::accumulates, Traits::shares,
              Traits::waits_for_scoring}},
        policy_{Traits::make(config, context)} {
    if constexpr (may_be_slow) {
      if (!SlowRule<P>{*config, context}.is_slow()) return;
      slow_.emplace(context.pages(), context.slow_tier, P::rule(*config, context.head_dim).chunk_rule());
    }
  }

  [[nodiscard]] TypeTag policy_type() const noexcept override { return type_tag_of<P>(); }
  [[nodiscard]] const void* policy() const noexcept override { return &policy_; }
  [[nodiscard]] std::unique_ptr<Head> fork() const override { return std::make_unique<PolicyHead>(*this); }

  void begin_call(const HeadCall& call, SegmentList& shown) override {
    if (call.chunk.rows > 0) Traits::check(policy_, call.chunk);
    if (call.leaving > 0) reserve(call.leaving);
    show(call.request, shown);
    for (const Segment& rows : call.uncommitted) {
      Traits::show_uncommitted(policy_, rows, call.request, shown);
    }
    Traits::show_uncommitted(policy_, call.chunk, call.request, shown);
  }
  void end_call(std::span<const Segment> leaving) noexcept override {
    for (const Segment& rows : leaving) policy_.commit(rows);
    release_unused();
  }

  void check(const Segment& rows) const override { Traits::check(policy_, rows); }
  void reserve(std::size_t rows) override {
    if constexpr (may_be_slow) {
      if (slow_) {
        slow_->reserve(policy_.storage().final_planes(), final_rows(policy_.rows()),
                       final_rows(policy_.rows() + rows));
      }
    }
    policy_.reserve(rows);
  }
  void release_unused() noexcept override {
    if constexpr (may_be_slow) {
      if (slow_) {
        slow_->settle(policy_.storage().final_planes(), final_rows(policy_.rows()), policy_.rows());
      }
    }
    policy_.release_unused();
  }
  void commit(const Segment& rows) noexcept override { policy_.commit(rows); }
  void show(const ReadRequest& request, SegmentList& shown) const override {
    const std::size_t first = shown.size();
    policy_.segments(request, shown);
    if constexpr (may_be_slow && Traits::selects) {
      if (slow_ && request.read == Read::selected) slow_->show(shown, first);
    }
    if (request.read != Read::upper_half) return;
    for (std::size_t i = first; i < shown.size(); ++i) {
      shown[i].keys = shown[i].keys.upper_half();
      shown[i].values = shown[i].values.upper_half();
    }
  }
  void show_uncommitted(const Segment& rows, const ReadRequest& request, SegmentList& shown) const override {
    Traits::show_uncommitted(policy_, rows, request, shown);
  }

  [[nodiscard]] bool cut(std::size_t row) noexcept override { return Traits::cut(policy_, row); }

  [[nodiscard]] std::size_t rows() const override { return policy_.rows(); }
  [[nodiscard]] std::size_t bytes() const override {
    std::size_t total = policy_.bytes();
    if constexpr (may_be_slow) {
      if (slow_) total += slow_->bytes(policy_.storage().final_planes());
    }
    return total;
  }
  [[nodiscard]] std::size_t shared_bytes() const override {
    return policy_.shared_bytes() + (slow_ ? slow_->shared_bytes() : 0);
  }
  [[nodiscard]] std::size_t slow_bytes() const override {
    if constexpr (may_be_slow) {
      if (slow_) return slow_->slow_bytes(policy_.storage().final_planes());
    }
    return 0;
  }
  [[nodiscard]] std::size_t overhead_bytes() const override {
    return sizeof(*this) + Traits::overhead_bytes(policy_) + (slow_ ? slow_->overhead_bytes() : 0);
  }

  [[nodiscard]] bool selection_is_stale() const override {
    if constexpr (Traits::selects) return policy_.selection_is_stale();
    return false;
  }
  void prepare_refresh([[maybe_unused]] std::span<const float> queries, [[maybe_unused]] ChunkScorer& scorer,
                       [[maybe_unused]] std::size_t tokens) override {
    if constexpr (Traits::selects) policy_.prepare_refresh(queries, scorer, tokens);
    if constexpr (may_be_slow && Traits::selects) {
      if (!slow_) return;
      KVPOLICY_TRY {
        SegmentList shown;
        policy_.segments({.first_position = static_cast<std::int64_t>(tokens) - 1, .read = Read::selected},
                         shown);
        slow_->prepare_choice(std::as_const(policy_).storage().final_planes(), shown,
                              final_rows(policy_.rows()), tokens);
      }
      KVPOLICY_CATCH_ALL {
        policy_.abandon_refresh();
        KVPOLICY_RETHROW;
      }
    }
  }
  void end_refresh([[maybe_unused]] bool keep) noexcept override {
    if constexpr (Traits::selects) keep ? policy_.finish_refresh() : policy_.abandon_refresh();
    if (slow_) slow_->end_choice(keep, policy_.rows());
  }
  void undo_refresh([[maybe_unused]] std::size_t tokens) noexcept override {
    if constexpr (Traits::selects) policy_.undo_refresh(tokens);
    if (slow_) slow_->undo_choices(tokens);
  }
  void forget_selection() noexcept override {
    if constexpr (Traits::selects) policy_.forget_selection();
    if (slow_) slow_->forget_choices();
  }

  [[nodiscard]] std::size_t observed_queries() const override {
    if constexpr (Traits::compresses) return policy_.observed_queries();
    return 0;
  }
  [[nodiscard]] bool wants_compress() const override {
    if constexpr (Traits::compresses) return policy_.wants_compress();
    return false;
  }
  [[nodiscard]] bool is_compressible([[maybe_unused]] std::size_t more) const override {
    if constexpr (Traits::compresses) return policy_.is_compressible(more);
    return false;
  }
  void prepare_compress([[maybe_unused]] std::span<const float> sums, [[maybe_unused]] std::size_t group,
                        [[maybe_unused]] std::size_t queries) override {
    if constexpr (Traits::compresses) policy_.prepare_compress(sums, group, queries);
  }
  void end_compress([[maybe_unused]] bool keep) noexcept override {
    if constexpr (Traits::compresses) keep ? policy_.finish_compress() : policy_.abandon_compress();
  }
  void accumulate([[maybe_unused]] std::span<const float> sums,
                  [[maybe_unused]] std::size_t group) noexcept override {
    if constexpr (Traits::accumulates) policy_.accumulate(sums, group);
  }
  [[nodiscard]] std::span<const double> accumulated() const override {
    if constexpr (Traits::accumulates) return policy_.accumulated();
    return {};
  }
  void inherit([[maybe_unused]] std::span<const double> accumulated) override {
    if constexpr (Traits::accumulates) policy_.inherit(accumulated);
  }
  [[nodiscard]] bool is_adaptive_in_layer() const override {
    if constexpr (Traits::shares) return policy_.is_adaptive_in_layer();
    return false;
  }
  [[nodiscard]] bool is_adaptive_in_model() const override { return Traits::is_adaptive_in_model(policy_); }
  [[nodiscard]] Votes votes() const override { return Traits::votes(policy_); }
  [[nodiscard]] std::optional<ExpectedQueries> expected_queries() const override {
    return Traits::expected_queries(policy_);
  }
  [[nodiscard]] std::size_t unscored_rows(std::size_t more) const override {
    return Traits::unscored_rows(policy_, more);
  }
  [[nodiscard]] SharingHead compete([[maybe_unused]] std::span<const float> sums,
                                    [[maybe_unused]] std::size_t group,
                                    [[maybe_unused]] std::size_t queries) const override {
    if constexpr (Traits::shares) return policy_.compete(sums, group, queries);
    return {};
  }
  void prepare_survivors([[maybe_unused]] std::vector<std::size_t> rows) override {
    if constexpr (Traits::shares) policy_.prepare_survivors(std::move(rows));
  }

  [[nodiscard]] HeadContents contents(std::size_t committed) const override {
    return Traits::contents(policy_, committed);
  }
  void take(const HeadContents& contents, std::size_t head_dim) override {
    Traits::take(policy_, contents, head_dim);
    take_choices();
  }

  void save([[maybe_unused]] SavingArchive<RecordWriter>& archive) const override {
    KVPOLICY_ASSERT(is_savable);
    if constexpr (is_savable) archive(policy_);
  }
  void load([[maybe_unused]] LoadingArchive& archive) override {
    KVPOLICY_ASSERT(is_savable);
    if constexpr (is_savable) archive(policy_);
    take_choices();
  }
  void visit_pages([[maybe_unused]] PageVisitor& visitor) override {
    if constexpr (is_savable) {
      NoSink nowhere;
      RecordWriter writer{nowhere};
      SavingArchive archive{writer};
      archive.visit_pages(visitor);
      archive(policy_);
      if (slow_) slow_->visit_pages(visitor);
    } else {
      fail<ConfigError>("KvCache: the pages of a head under ", Traits::names().shown(),
                        " cannot be found, because the policy cannot be saved (docs/saved_cache.md)");
    }
  }

 private:
  static constexpr bool may_be_slow = Traits::may_be_slow;

  // How many rows are final once so many came.
  [[nodiscard]] std::size_t final_rows([[maybe_unused]] std::size_t rows) const {
    if constexpr (may_be_slow) return policy_.storage().final_rows(Traits::stored_rows(policy_, rows));
    return 0;
  }
  // Copies the rows of choices that a new policy has taken over, all of which count after a rollback.
  void take_choices() {
    if constexpr (may_be_slow) {
      if (!slow_) return;
      HeadContents all;
      Traits::add_to(policy_, all);
      for (const ChosenChunks& choice : all.choices) {
        slow_->take_choice(std::as_const(policy_).storage().final_planes(), choice.runs, choice.committed,
                           final_rows(choice.committed), choice.tokens);
      }
    }
  }

  P policy_;
  detail::Boxed<offload::SlowRows> slow_;  // only where there is slow memory, and the policy keeps every row
};

}  // namespace kvpolicy
