// SPDX-License-Identifier: Apache-2.0
//
// Which chunks a head that retrieves has chosen (policy/chunk_retrieval_cache.hpp), and how it chooses.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/boxed.hpp>
#include <kvpolicy/core/choices.hpp>
#include <kvpolicy/core/rule_ranges.hpp>
#include <kvpolicy/core/scratch.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/policy/head_contents.hpp>
#include <kvpolicy/policy/top_rows.hpp>

namespace kvpolicy::detail {

/// What one query chose.
struct ChunkSelection {
  std::vector<RowRun> runs;  // of rows, ascending, not touching
  std::size_t chunks_end;    // rows from here on are read on top
  std::size_t rows;          // committed when it was chosen
  std::size_t tokens;        // the text with the query that chose

  template <class Archive>
  void serialize(Archive& archive) {
    archive(runs, chunks_end, rows, tokens);
  }

  /// Adds to `out` the rows of [first, first + count) that are read, as runs counted from `first`.
  /// Returns their number.
  std::size_t clip(std::size_t first, std::size_t count, std::vector<RowRun>& out) const {
    const std::size_t last = first + count;
    std::size_t total = 0;
    const auto add = [&](RowRun run) {
      const std::size_t from = std::max(run.first, first);
      const std::size_t to = std::min(run.first + run.rows, last);
      if (from >= to) return;
      total += to - from;
      if (!out.empty() && out.back().first + out.back().rows == from - first) {
        out.back().rows += to - from;
      } else {
        out.push_back({from - first, to - from});
      }
    };
    for (const RowRun& run : runs) add(run);
    add({chunks_end, last - std::min(last, chunks_end)});
    return total;
  }
};

/// Whether `runs` are whole chunks of `chunk` rows, ascending, apart from each other, before row `end` and
/// not more than `budget` rows.
[[nodiscard]] inline bool are_chunks(std::span<const RowRun> runs, std::size_t chunk, std::size_t end,
                                     std::size_t budget) {
  std::size_t next = 0;
  std::size_t total = 0;
  for (const RowRun& run : runs) {
    if (run.first < next || run.first > end || run.rows == 0 || run.rows > end - run.first ||
        run.first % chunk != 0 || run.rows % chunk != 0) {
      return false;
    }
    next = run.first + run.rows;
    total += run.rows;
  }
  return total <= budget;
}

/// Scratch memory of a choice, which belongs to the thread that chooses.
struct RefreshScratch {
  Scratch<float> scores;
  Scratch<std::uint32_t> ranks;
  Scratch<std::size_t> chosen;
};
[[nodiscard]] inline RefreshScratch& refresh_scratch() {
  thread_local RefreshScratch scratch;
  return scratch;
}

/// The choices of one head, whatever its rows are stored in: the latest counts, and those before it come
/// back with a rollback. Takes no memory until the head first chooses. Copying makes a fork. Not synchronised.
class ChunkChoices {
 public:
  using Rule = ChunkRule<std::size_t>;

  [[nodiscard]] std::span<const ChunkSelection> kept() const {
    return state_ ? std::span<const ChunkSelection>{state_->kept} : std::span<const ChunkSelection>{};
  }
  /// What a selected read shows; null if nothing was chosen.
  [[nodiscard]] const ChunkSelection* current() const {
    if (state_ && state_->pending) return &*state_->pending;
    return kept().empty() ? nullptr : &kept().back();
  }
  /// Whether a selected read of `rows` committed rows must choose first.
  [[nodiscard]] bool is_stale(const Rule& rule, std::size_t rows) const {
    return kept().empty() || rule.is_stale(kept().back().rows, rows);
  }

  /// Chooses by the scores of all full chunks of `rows` committed rows. `tokens`: how long the text is with
  /// the query that chooses. `current` is the new choice at once, but only `finish` keeps it.
  /// @throws std::bad_alloc, with the choices as they were
  void prepare(const Rule& rule, std::span<float> scores, std::size_t rows, std::size_t tokens) {
    // Chunk 0 holds the attention sinks: always read, whatever its keys say.
    if (!scores.empty()) scores.front() = std::numeric_limits<float>::infinity();
    RefreshScratch& scratch = refresh_scratch();
    const std::span<std::size_t> chosen = scratch.chosen.take(rule.chosen(rows));
    top_rows(scores, scratch.ranks.take(scores.size()), chosen);
    if (!state_) state_.emplace();
    ChunkSelection selection{std::move(state_->spare_runs), rule.closed_rows(rows), rows, tokens};
    std::vector<RowRun>& runs = selection.runs;
    runs.clear();
    for (const std::size_t chunk : chosen) {
      const std::size_t first = chunk * rule.chunk;
      if (!runs.empty() && runs.back().first + runs.back().rows == first) {
        runs.back().rows += rule.chunk;
      } else {
        runs.push_back({first, rule.chunk});
      }
    }
    state_->kept.reserve(state_->kept.size() + 1);
    state_->pending = std::move(selection);
  }
  void finish() noexcept {
    if (!state_ || !state_->pending) return;
    state_->kept.push_back(std::move(*state_->pending));
    state_->pending.reset();
  }
  void abandon() noexcept {
    if (!state_ || !state_->pending) return;
    state_->spare_runs = std::move(state_->pending->runs);
    state_->pending.reset();
  }

  /// Takes back what was chosen after the first `tokens` tokens.
  void undo(std::size_t tokens) noexcept {
    while (!kept().empty() && is_taken_back(kept().back().tokens, tokens)) state_->kept.pop_back();
  }
  void forget() noexcept {
    if (state_) state_->kept.clear();
  }
  /// A rollback never goes back before the end of the committed rows: of the choices up to there one is enough.
  void drop_old(std::size_t committed) noexcept {
    if (!state_) return;
    auto& kept = state_->kept;
    const auto first_later = std::ranges::find_if(
        kept, [&](const ChunkSelection& s) { return is_taken_back(s.tokens, committed); });
    if (first_later - kept.begin() > 1) {
      state_->spare_runs = std::move(kept.front().runs);
      kept.erase(kept.begin(), first_later - 1);
    }
  }

  /// Leaves of the segments of `out` from number `first` on, which are all rows, what the current choice
  /// reads. A segment may begin and end inside a chunk.
  void limit(SegmentList& out, std::size_t first) const {
    const ChunkSelection& selected = *current();
    std::vector<std::vector<RowRun>>& shown_runs = state_->shown_runs;
    shown_runs.resize(std::max(shown_runs.size(), out.size() - first));
    std::size_t kept = first;
    for (std::size_t s = first; s < out.size(); ++s) {
      Segment segment = out[s];
      std::vector<RowRun>& runs = shown_runs[s - first];
      runs.clear();
      segment.rows = selected.clip(static_cast<std::size_t>(segment.position), segment.rows, runs);
      segment.runs = runs;
      if (segment.rows > 0) out[kept++] = segment;
    }
    out.resize(kept);
  }

  void add_to(std::vector<ChosenChunks>& choices) const {
    for (const ChunkSelection& selection : kept()) {
      choices.push_back({selection.runs, selection.rows, selection.tokens});
    }
  }
  void take(const Rule& rule, const std::vector<ChosenChunks>& choices) {
    if (!choices.empty()) state_.emplace();
    for (const ChosenChunks& choice : choices) {
      state_->kept.push_back(
          {choice.runs, rule.closed_rows(choice.committed), choice.committed, choice.tokens});
    }
  }

  /// Bytes besides the object itself.
  [[nodiscard]] std::size_t bytes() const {
    if (!state_) return 0;
    std::size_t runs = state_->spare_runs.capacity();
    for (const ChunkSelection& selection : state_->kept) runs += selection.runs.capacity();
    for (const std::vector<RowRun>& shown : state_->shown_runs) runs += shown.capacity();
    return sizeof(State) + state_->kept.capacity() * sizeof(ChunkSelection) +
           state_->shown_runs.capacity() * sizeof(std::vector<RowRun>) + runs * sizeof(RowRun);
  }

  template <class Archive>
  void serialize(Archive& archive) {
    std::vector<ChunkSelection> all{kept().begin(), kept().end()};
    archive(all);
    if constexpr (Archive::loading) {
      state_.reset();
      if (!all.empty()) state_.emplace().kept = std::move(all);
    }
  }
  /// Refuses what was loaded unless it is choices by this rule among `rows` rows.
  template <class Archive>
  void check(const Archive& archive, const Rule& rule, std::size_t rows) const {
    const std::size_t budget = rule.budget * rule.chunk;
    std::size_t tokens = 0;
    for (const ChunkSelection& selection : kept()) {
      archive.check(selection.rows <= rows && selection.chunks_end == rule.closed_rows(selection.rows) &&
                        are_chunks(selection.runs, rule.chunk, selection.chunks_end, budget),
                    "selections of whole chunks, ascending, within ", budget, " rows");
      archive.check(tokens <= selection.tokens, "selections in their order");
      tokens = selection.tokens;
    }
  }

 private:
  struct State {
    std::vector<ChunkSelection> kept;
    std::optional<ChunkSelection> pending;
    std::vector<RowRun> spare_runs;               // of a choice that is gone, for the next
    std::vector<std::vector<RowRun>> shown_runs;  // what the last `limit` points to
  };
  mutable Boxed<State> state_;  // its `shown_runs` change when rows are shown
};

}  // namespace kvpolicy::detail
