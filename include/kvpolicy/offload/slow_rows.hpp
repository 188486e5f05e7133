// SPDX-License-Identifier: Apache-2.0
//
// The rows of one head that lie in slow memory. Neither its policy nor its storage knows of them: the head,
// which owns both, moves full pages of final rows there and shows copies of the rows that were chosen
// (policy/slow_rule.hpp says of which heads).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/core/rule_ranges.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/core/try.hpp>
#include <kvpolicy/memory/page_pool.hpp>
#include <kvpolicy/offload/chosen_rows.hpp>
#include <kvpolicy/offload/slow_pages.hpp>
#include <kvpolicy/storage/plane_store.hpp>

namespace kvpolicy::offload {

/// What a head that keeps every row needs besides its policy where there is slow memory. `final_rows`:
/// how many of its rows, from row 0 on, are final. Copying makes a fork. Not synchronised.
class SlowRows {
 public:
  /// The planes of a head's final rows: keys, then values.
  using Planes = std::array<const PlaneStore*, 2>;
  /// The same, whose pages may be replaced.
  using OwnPlanes = std::array<PlaneStore*, 2>;

  /// `chunks`: how the head chooses, if it does.
  SlowRows(PagePool& pool, std::size_t tier, const ChunkRule<std::size_t>& chunks)
      : pages_{SlowPages{pool, tier}, SlowPages{pool, tier}},
        provider_{pool.provider(tier)},
        chunks_{chunks} {}

  // ---- pages

  /// Before rows come: moves pages that are full but still in fast memory, and obtains slow pages for
  /// those that will be full once `final_then` rows are final.
  /// @throws std::bad_alloc, StorageError; `settle` then gives back what was obtained
  void reserve(const OwnPlanes& planes, std::size_t final_rows, std::size_t final_then) {
    const std::size_t rows = full_rows({planes[0], planes[1]}, final_rows);
    for (std::size_t side = 0; side < planes.size(); ++side) {
      SlowPages& pages = pages_[side];
      PlaneStore& plane = *planes[side];
      const std::size_t full = movable(side, plane, rows);
      pages.reserve(full, plane.page_bytes());
      pages.move(plane.pages(), full, plane.page_bytes());
      pages.reserve(movable(side, plane, final_then), plane.page_bytes());
    }
  }
  /// After rows came: full pages go to the slow pages that were reserved for them. Where these fail to
  /// take them they stay, and the next `reserve` tries again and says why.
  void settle(const OwnPlanes& planes, std::size_t final_rows, std::size_t committed) noexcept {
    chosen_.drop_old(committed);
    const std::size_t rows = full_rows({planes[0], planes[1]}, final_rows);
    for (std::size_t side = 0; side < planes.size(); ++side) {
      SlowPages& pages = pages_[side];
      PlaneStore& plane = *planes[side];
      KVPOLICY_TRY {
        pages.move(plane.pages(), std::min(pages.reserved(), movable(side, plane, rows)), plane.page_bytes());
      }
      KVPOLICY_CATCH_ALL {}
      pages.release_reserved();
    }
  }

  // ---- choices

  /// The head has chosen: a selected read shows `shown`. `tokens`: of the text with the query that chose.
  /// @throws std::bad_alloc, StorageError, with the choices as they were
  void prepare_choice(const Planes& planes, const SegmentList& shown, std::size_t final_rows,
                      std::size_t tokens) {
    const std::size_t end = copied_until(planes, final_rows);
    std::vector<RowRun> runs;
    for (const Segment& segment : shown) {
      if (segment.positions != nullptr) continue;
      segment.for_each_run([&](const RowRun& run) {
        add_run(runs, static_cast<std::size_t>(segment.position) + run.first, run.rows, end);
      });
    }
    chosen_.prepare(*planes[0], *planes[1], *provider_, runs, end, tokens);
  }
  void end_choice(bool keep, std::size_t committed) noexcept {
    keep ? chosen_.finish() : chosen_.abandon();
    if (keep) chosen_.drop_old(committed);
  }
  void undo_choices(std::size_t tokens) noexcept { chosen_.undo(tokens); }
  void forget_choices() noexcept { chosen_.forget(); }
  /// A new head has taken over a choice of the rows `chosen`, made when `committed` rows had come and
  /// `final_rows` of them were final.
  /// @throws std::bad_alloc, StorageError
  void take_choice(const Planes& planes, std::span<const RowRun> chosen, std::size_t committed,
                   std::size_t final_rows, std::size_t tokens) {
    const std::size_t end = copied_until(planes, final_rows);
    std::vector<RowRun> runs;
    for (const RowRun& run : chosen) add_run(runs, run.first, run.rows, end);
    const std::size_t closed = chunks_.closed_rows(committed);
    add_run(runs, closed, committed - closed, end);
    chosen_.prepare(*planes[0], *planes[1], *provider_, runs, end, tokens);
    chosen_.finish();
  }
  /// Puts the copies in the place of what a selected read shows, from segment `first` on.
  void show(SegmentList& shown, std::size_t first) const { chosen_.replace(shown, first); }

  /// Besides the head's own pages.
  void visit_pages(PageVisitor& visitor) { chosen_.visit_pages(visitor); }

  // ---- how much there is besides the head's own pages

  [[nodiscard]] std::size_t bytes(const Planes& planes) const {
    return reserved_bytes(planes) + chosen_.bytes();
  }
  [[nodiscard]] std::size_t shared_bytes() const { return chosen_.shared_bytes(); }
  /// In slow memory, the head's own pages included.
  [[nodiscard]] std::size_t slow_bytes(const Planes& planes) const {
    std::size_t total = reserved_bytes(planes);
    for (std::size_t side = 0; side < planes.size(); ++side) {
      total += pages_[side].moved(planes[side]->pages()) * planes[side]->page_bytes();
    }
    return total;
  }
  /// Bookkeeping, with the object itself.
  [[nodiscard]] std::size_t overhead_bytes() const {
    return sizeof(*this) + pages_[0].overhead_bytes() + pages_[1].overhead_bytes() + chosen_.overhead_bytes();
  }

 private:
  // Keys and values of a row leave fast memory together, though they may become final at different
  // times.
  [[nodiscard]] static std::size_t full_rows(const Planes& planes, std::size_t final_rows) {
    return std::min({final_rows, planes[0]->end(), planes[1]->end()});
  }
  [[nodiscard]] static std::size_t copied_until(const Planes& planes, std::size_t final_rows) {
    const std::size_t rows = full_rows(planes, final_rows);
    return rows - rows % planes[0]->context().page_rows;
  }
  // Pages of a plane that hold only rows below `row`, may leave fast memory and have not left it.
  [[nodiscard]] std::size_t movable(std::size_t side, const PlaneStore& plane, std::size_t row) const {
    const std::size_t page_rows = plane.context().page_rows;
    const std::size_t gone = plane.begin() / page_rows + pages_[side].moved(plane.pages());
    return std::max(std::min(row, chosen_.first_uncopied()) / page_rows, gone) - gone;
  }
  [[nodiscard]] std::size_t reserved_bytes(const Planes& planes) const {
    return pages_[0].reserved() * planes[0]->page_bytes() + pages_[1].reserved() * planes[1]->page_bytes();
  }
  // Adds the rows [first, first + count) that lie below row `end`.
  static void add_run(std::vector<RowRun>& runs, std::size_t first, std::size_t count, std::size_t end) {
    const std::size_t last = std::min(first + count, end);
    if (first >= last) return;
    if (!runs.empty() && runs.back().first + runs.back().rows == first) {
      runs.back().rows += last - first;
    } else {
      runs.push_back({first, last - first});
    }
  }

  std::array<SlowPages, 2> pages_;
  PageProvider* provider_;
  ChunkRule<std::size_t> chunks_;
  ChosenRows chosen_;
};

}  // namespace kvpolicy::offload
