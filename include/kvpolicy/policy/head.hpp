// SPDX-License-Identifier: Apache-2.0
//
// One KV head of one sequence as its cache sees it, whatever the policy is. A cache holds a table of
// these, so that its type says nothing of the policies; `PolicyHead` (policy_head.hpp) implements
// the interface once for every policy.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <kvpolicy/core/expected_queries.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/core/type_tag.hpp>
#include <kvpolicy/policy/policy.hpp>
#include <kvpolicy/policy/shared_rows.hpp>

namespace kvpolicy {

class PageVisitor;
class RecordWriter;
template <class Out>
class SavingArchive;
class LoadingArchive;

/// What a head does besides keeping and showing rows.
struct HeadRoles {
  bool selects = false;            ///< reads some of its rows
  bool compresses = false;         ///< drops rows by rank
  bool accumulates = false;        ///< adds up the attention of calls
  bool shares = false;             ///< competes with other heads for rows
  bool waits_for_scoring = false;  ///< adds up the attention of scoring passes alone
};

/// The rows that one call brings to one head, for all that happens before its attention.
struct HeadCall {
  std::span<const Segment> uncommitted;  ///< rows that the cache holds, in the text's order
  Segment chunk;                         ///< the call's own rows, if it brings any
  std::size_t leaving = 0;               ///< of all of them, rows that the policy will be given
  ReadRequest request;
};

/// One head: its policy and the rows it was given. Not synchronised. Where a member says which role
/// it serves, heads without that role do nothing.
class Head {
 public:
  virtual ~Head() = default;
  Head& operator=(const Head&) = delete;

  [[nodiscard]] const HeadRoles& roles() const { return roles_; }
  /// The policy's type.
  [[nodiscard]] virtual TypeTag policy_type() const noexcept = 0;
  /// The policy itself, of type `policy_type()`.
  [[nodiscard]] virtual const void* policy() const noexcept = 0;
  /// A copy, which shares full pages. @throws std::bad_alloc
  [[nodiscard]] virtual std::unique_ptr<Head> fork() const = 0;

  // ---- a call, in two visits

  /// Before the attention of a call: checks the call's rows, obtains memory for the rows that leave,
  /// and adds what the call's queries read to `shown`.
  /// @throws ShapeError, std::bad_alloc, StorageError; `release_unused` then gives back what it obtained
  virtual void begin_call(const HeadCall& call, SegmentList& shown) = 0;
  /// After it: the policy is given these rows, for which memory was obtained, and spare memory goes.
  virtual void end_call(std::span<const Segment> leaving) noexcept = 0;

  // ---- the same in small steps

  virtual void check(const Segment& rows) const = 0;
  virtual void reserve(std::size_t rows) = 0;
  virtual void release_unused() noexcept = 0;
  virtual void commit(const Segment& rows) noexcept = 0;
  virtual void show(const ReadRequest& request, SegmentList& shown) const = 0;
  virtual void show_uncommitted(const Segment& rows, const ReadRequest& request,
                                SegmentList& shown) const = 0;

  /// Goes back to what it was when row `row` had not come. False if that is not known any more: the head may
  /// have forgotten rows, or have changed how it stores them.
  [[nodiscard]] virtual bool cut(std::size_t row) noexcept = 0;

  // ---- how much it holds

  [[nodiscard]] virtual std::size_t rows() const = 0;
  [[nodiscard]] virtual std::size_t bytes() const = 0;
  [[nodiscard]] virtual std::size_t shared_bytes() const = 0;
  [[nodiscard]] virtual std::size_t slow_bytes() const = 0;
  /// Bookkeeping: the head itself and all that it holds besides rows.
  [[nodiscard]] virtual std::size_t overhead_bytes() const = 0;

  // ---- heads that select (SelectingPolicy)

  [[nodiscard]] virtual bool selection_is_stale() const = 0;
  virtual void prepare_refresh(std::span<const float> queries, ChunkScorer& scorer, std::size_t tokens) = 0;
  virtual void end_refresh(bool keep) noexcept = 0;
  virtual void undo_refresh(std::size_t tokens) noexcept = 0;
  virtual void forget_selection() noexcept = 0;

  // ---- heads that compress (CompressingPolicy, AccumulatingPolicy, AdaptiveBudgetPolicy)

  [[nodiscard]] virtual std::size_t observed_queries() const = 0;
  [[nodiscard]] virtual bool wants_compress() const = 0;
  [[nodiscard]] virtual bool is_compressible(std::size_t more) const = 0;
  virtual void prepare_compress(std::span<const float> sums, std::size_t group, std::size_t queries) = 0;
  virtual void end_compress(bool keep) noexcept = 0;
  virtual void accumulate(std::span<const float> sums, std::size_t group) noexcept = 0;
  [[nodiscard]] virtual std::span<const double> accumulated() const = 0;
  virtual void inherit(std::span<const double> accumulated) = 0;
  /// Whether the settings ask for it, too.
  [[nodiscard]] virtual bool is_adaptive_in_layer() const = 0;
  [[nodiscard]] virtual bool is_adaptive_in_model() const = 0;
  /// What the attention of several queries comes to.
  [[nodiscard]] virtual Votes votes() const = 0;
  /// Set if rows are ranked by the attention of queries that have not come.
  [[nodiscard]] virtual std::optional<ExpectedQueries> expected_queries() const = 0;
  /// Rows that could not be ranked once `more` were committed, because no scoring pass has seen them.
  [[nodiscard]] virtual std::size_t unscored_rows(std::size_t more) const = 0;
  [[nodiscard]] virtual SharingHead compete(std::span<const float> sums, std::size_t group,
                                            std::size_t queries) const = 0;
  virtual void prepare_survivors(std::vector<std::size_t> rows) = 0;

  // ---- copies of the head elsewhere (policy/head_contents.hpp)

  /// What the head holds of the `committed` rows that it was given. Its planes are valid until the head changes.
  [[nodiscard]] virtual HeadContents contents(std::size_t committed) const = 0;
  /// Fills a new head. @throws std::bad_alloc
  virtual void take(const HeadContents& contents, std::size_t head_dim) = 0;

  // ---- saving (state/archive.hpp), of policies that can be saved (HeadSettings::is_savable)

  /// @throws StorageError
  virtual void save(SavingArchive<RecordWriter>& archive) const = 0;
  /// Fills a new head. @throws FormatError
  virtual void load(LoadingArchive& archive) = 0;
  /// Shows all its page tables (storage/page_visitor.hpp). Between calls none has reserved pages.
  /// @throws ConfigError if the policy cannot be saved; what the visitor throws
  virtual void visit_pages(PageVisitor& visitor) = 0;

 protected:
  explicit Head(const HeadRoles& roles) : roles_{roles} {}
  Head(const Head&) = default;

 private:
  HeadRoles roles_;
};

/// Owns a head; copying one makes a fork.
class HeadPtr {
 public:
  explicit HeadPtr(std::unique_ptr<Head> head) : head_{std::move(head)} {}
  HeadPtr(const HeadPtr& other) : head_{other.head_->fork()} {}
  HeadPtr(HeadPtr&&) noexcept = default;
  HeadPtr& operator=(const HeadPtr& other) { return *this = HeadPtr{other}; }
  HeadPtr& operator=(HeadPtr&&) noexcept = default;
  ~HeadPtr() = default;

  [[nodiscard]] Head& operator*() const { return *head_; }
  [[nodiscard]] Head* operator->() const { return head_.get(); }

 private:
  std::unique_ptr<Head> head_;
};

}  // namespace kvpolicy
