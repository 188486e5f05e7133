// SPDX-License-Identifier: Apache-2.0
//
// Copies, in fast memory, of the rows that a selecting head has chosen and that lie in slow memory or
// may come to lie there. A selected read then touches nothing slow and reads the very same numbers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/choices.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/memory/slow_memory.hpp>
#include <kvpolicy/storage/page_visitor.hpp>
#include <kvpolicy/storage/plane_store.hpp>

namespace kvpolicy::offload {

/// The copies that belong to the choices of one head, oldest first: a rollback that takes the latest
/// choice back makes the one before it count again. Copying shares the copies, which never change.
/// Not synchronised.
class ChosenRows {
 public:
  /// Copies rows for a choice: those of `runs`, all below row `end`. From row `end` on the choice reads
  /// rows where they are. `tokens`: of the text with the query that chose. The choice counts at once, but
  /// only `finish` keeps it.
  /// @throws std::bad_alloc, StorageError, with the choices as they were
  void prepare(const PlaneStore& keys, const PlaneStore& values, PageProvider& slow,
               std::span<const RowRun> runs, std::size_t end, std::size_t tokens) {
    Choice choice{end, tokens, nullptr};
    if (!runs.empty()) {
      fetch(keys, values, slow, runs);
      Copies copies{keys.gather(runs), values.gather(runs), {}};
      copies.positions.reserve(copies.keys.rows());
      for (const RowRun& run : runs) {
        for (std::size_t i = 0; i < run.rows; ++i) {
          copies.positions.push_back(static_cast<std::int64_t>(run.first + i));
        }
      }
      choice.copies = std::make_shared<Copies>(std::move(copies));
    }
    kept_.reserve(kept_.size() + 1);
    pending_.emplace(std::move(choice));
  }
  void finish() noexcept {
    if (pending_) kept_.push_back(std::move(*pending_));
    pending_.reset();
  }
  void abandon() noexcept { pending_.reset(); }

  /// The text now ends after `tokens` tokens.
  void undo(std::size_t tokens) noexcept {
    while (!kept_.empty() && is_taken_back(kept_.back().tokens, tokens)) kept_.pop_back();
  }
  /// A rollback cannot reach the first `committed` rows, so only the newest choice made before them is
  /// kept, and those after it.
  void drop_old(std::size_t committed) noexcept {
    const auto first_later = std::ranges::find_if(
        kept_, [&](const Choice& choice) { return is_taken_back(choice.tokens, committed); });
    if (first_later - kept_.begin() > 1) kept_.erase(kept_.begin(), first_later - 1);
  }
  void forget() noexcept { kept_.clear(); }

  /// Rows from here on must stay in fast memory: some choice has no copies of them.
  [[nodiscard]] std::size_t first_uncopied() const noexcept {
    return kept_.empty() ? std::numeric_limits<std::size_t>::max() : kept_.front().end;
  }

  /// Puts the copies in the place of the rows that a selected read shows, which are the segments of
  /// `shown` from number `first` on, ascending. Does nothing where these are other rows than the copied
  /// ones. What `shown` then points to lives until the next call.
  void replace(SegmentList& shown, std::size_t first) const {
    const Choice* choice = pending_ ? &*pending_ : kept_.empty() ? nullptr : &kept_.back();
    if (choice == nullptr || choice->copies == nullptr || !choice->is_of(shown, first)) return;
    shown_runs_.resize(std::max(shown_runs_.size(), shown.size() - first));
    std::size_t kept = first;
    for (std::size_t s = first; s < shown.size(); ++s) {
      Segment segment = shown[s];
      const auto begin = static_cast<std::size_t>(segment.position);
      const std::size_t cut = choice->end - std::min(choice->end, begin);
      std::vector<RowRun>& runs = shown_runs_[s - first];
      runs.clear();
      segment.for_each_run([&](const RowRun& run) {
        const std::size_t from = std::max(run.first, cut);
        if (from < run.first + run.rows) runs.push_back({from - cut, run.first + run.rows - from});
      });
      segment.keys = segment.keys.from(cut);
      segment.values = segment.values.from(cut);
      segment.position += static_cast<std::int64_t>(cut);
      segment.runs = runs;
      segment.rows = 0;
      for (const RowRun& run : runs) segment.rows += run.rows;
      if (segment.rows > 0) shown[kept++] = segment;
    }
    shown.resize(kept);
    shown.insert(shown.begin() + static_cast<std::ptrdiff_t>(first), choice->copies->segment());
  }

  /// Shows the pages of all copies; none is pending.
  void visit_pages(PageVisitor& visitor) {
    for (Choice& choice : kept_) {
      if (choice.copies == nullptr) continue;
      if (visitor.replaces() && choice.copies.use_count() > 1) {
        choice.copies = std::make_shared<Copies>(*choice.copies);
      }
      for (PlaneStore* side : {&choice.copies->keys, &choice.copies->values}) {
        visitor.visit(side->pages(), side->page_bytes());
      }
    }
  }

  [[nodiscard]] std::size_t bytes() const {
    return sum([](const Choice& choice) { return choice.copies->bytes(); });
  }
  /// The part of `bytes()` that a fork holds too.
  [[nodiscard]] std::size_t shared_bytes() const {
    return sum(
        [](const Choice& choice) { return choice.copies.use_count() > 1 ? choice.copies->bytes() : 0; });
  }
  /// Bookkeeping besides the object itself.
  [[nodiscard]] std::size_t overhead_bytes() const {
    return kept_.capacity() * sizeof(Choice) + shown_runs_.capacity() * sizeof(std::vector<RowRun>) +
           sum([](const Choice& choice) { return choice.copies->overhead_bytes(); });
  }

 private:
  struct Copies {
    PlaneStore keys, values;
    std::vector<std::int64_t> positions;

    [[nodiscard]] Segment segment() const {
      return {.keys = keys.plane(0),
              .values = values.plane(0),
              .rows = positions.size(),
              .positions = positions.data()};
    }
    [[nodiscard]] std::size_t bytes() const { return keys.bytes() + values.bytes(); }
    [[nodiscard]] std::size_t overhead_bytes() const {
      return sizeof(Copies) + keys.overhead_bytes() + values.overhead_bytes() +
             positions.capacity() * sizeof(std::int64_t);
    }
  };
  struct Choice {
    std::size_t end;                 // of the rows before this one, those that are read are in `copies`
    std::size_t tokens;              // of the text with the query that chose
    std::shared_ptr<Copies> copies;  // null if there are none

    // Whether the rows before `end` that are shown are the copied ones.
    [[nodiscard]] bool is_of(const SegmentList& shown, std::size_t first) const {
      const std::vector<std::int64_t>& copied = copies->positions;
      std::size_t next = 0;
      for (std::size_t s = first; s < shown.size(); ++s) {
        const Segment& segment = shown[s];
        if (segment.positions != nullptr) return false;
        bool same = true;
        segment.for_each_run([&](const RowRun& run) {
          const auto from = static_cast<std::size_t>(segment.position) + run.first;
          const std::size_t count = std::min(from + run.rows, std::max(from, end)) - from;
          if (count == 0) return;
          // Copied positions ascend, so a run is copied if its two ends are.
          same = same && next + count <= copied.size() && copied[next] == static_cast<std::int64_t>(from) &&
                 copied[next + count - 1] == static_cast<std::int64_t>(from + count - 1);
          next += count;
        });
        if (!same) return false;
      }
      return next == copied.size();
    }
  };

  static void fetch(const PlaneStore& keys, const PlaneStore& values, PageProvider& slow,
                    std::span<const RowRun> runs) {
    std::vector<PageProvider::Range> ranges;
    for (const PlaneStore* side : {&keys, &values}) {
      for (const RowRun& run : runs) {
        list_ranges(slow, side->plane(run.first), side->context().head_dim, 0, run.rows, ranges);
      }
    }
    slow.fetch(ranges);
  }

  template <class Bytes>
  [[nodiscard]] std::size_t sum(Bytes bytes_of) const {
    std::size_t total = 0;
    for (const Choice& choice : kept_) total += choice.copies == nullptr ? 0 : bytes_of(choice);
    return total + (pending_ && pending_->copies != nullptr ? bytes_of(*pending_) : 0);
  }

  std::vector<Choice> kept_;  // the last counts
  std::optional<Choice> pending_;
  mutable std::vector<std::vector<RowRun>> shown_runs_;  // what the last `replace` points to
};

}  // namespace kvpolicy::offload
