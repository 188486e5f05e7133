// SPDX-License-Identifier: Apache-2.0
//
// Checks the arithmetic of rules against sets of positions, over random rules and random sequences of
// calls, with the integers of the host and those of kernels. The sets that say what a head holds and
// reads are those of support/policy_model.hpp, which also check the host cache (tests/cache) and the
// device cache (tests/cuda). The sets that say which rows are committed are in this file.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <vector>

#include <kvpolicy/core/choices.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/progress.hpp>
#include <kvpolicy/core/rule_ranges.hpp>

#include "support/policy_model.hpp"
#include "support/rule_check.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

using oracle::HeadModel;
using oracle::HeadSpec;
using oracle::Kind;
using test::below;
using test::one_of;
using test::Random;

// The rows of a text, and which of them can no longer be taken back.
class TextModel {
 public:
  explicit TextModel(std::size_t max_rollback) : max_rollback_{max_rollback} {}

  [[nodiscard]] std::size_t tokens() const { return rows_.size(); }
  [[nodiscard]] std::size_t committed() const { return firm_.size(); }
  [[nodiscard]] bool can_return_to(std::size_t length) const {
    return length <= rows_.size() &&
           std::ranges::all_of(firm_, [&](std::size_t row) { return row < length; });
  }
  void append(std::size_t count) {
    settle(max_rollback_);
    add(count);
  }
  void step(std::size_t count) {
    add(count);
    settle(max_rollback_);
  }
  void commit() { settle(0); }
  void truncate(std::size_t length) { rows_.erase(rows_.lower_bound(length), rows_.end()); }

 private:
  void add(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) rows_.insert(rows_.size());
  }
  // Commits each row that has so many rows after it.
  void settle(std::size_t later) {
    for (auto row = rows_.begin(); row != rows_.end(); ++row) {
      const auto after = static_cast<std::size_t>(std::distance(row, rows_.end())) - 1;
      if (after >= later) firm_.insert(*row);
    }
  }

  std::size_t max_rollback_;
  std::set<std::size_t> rows_, firm_;
};

HeadRule random_rule(Random& random, Kind kind) {
  HeadRule rule;
  if (kind == Kind::window) {
    rule.sinks = one_of(random, std::vector<std::size_t>{0, 1, 4, 33});
    rule.recent = one_of(random, std::vector<std::size_t>{1, 2, 17, 64});
    rule.prefill_chunk_mask = below(random, 2) == 0;
  }
  if (kind == Kind::budget) {
    rule.compresses = true;
    rule.budget = one_of(random, std::vector<std::size_t>{0, 1, 13, 40});
    rule.observation_window = rule.kept_rows = 1 + below(random, 8);
    rule.compress_from = one_of(random, std::vector<std::size_t>{0, 50, 101});
    rule.compress_every = one_of(random, std::vector<std::size_t>{0, 1, 20});
    rule.after_first_compress = below(random, 2) == 0;
  }
  if (kind == Kind::retrieval) {
    rule.chunk = one_of(random, std::vector<std::size_t>{1, 5, 8, 16});
    rule.chosen_rows = rule.chunk * (1 + below(random, 4));
    rule.refresh_every = one_of(random, std::vector<std::size_t>{0, 1, 20});
  }
  if (kind != Kind::budget && below(random, 2) == 0) {
    rule.key_encoding = rule.value_encoding = Encoding::uint4;
    rule.key_per_channel = kind != Kind::window && below(random, 2) == 0;
    rule.key_group = rule.key_per_channel ? one_of(random, std::vector<std::size_t>{4, 8}) : 64;
    rule.kivi_flush = below(random, 3) == 0;
    rule.residual = rule.kivi_flush ? 8 * (1 + below(random, 4)) : below(random, 40);
    if (kind == Kind::full) rule.sinks = one_of(random, std::vector<std::size_t>{0, 1, 4, 33});
  }
  return rule;
}

HeadSpec spec_of(const HeadRule& rule, Kind kind) {
  HeadSpec spec{.kind = kind,
                .sinks = rule.sinks,
                .recent = rule.recent,
                .prefill_chunk_mask = rule.prefill_chunk_mask,
                .budget = kind == Kind::budget ? rule.budget : rule.chosen_rows,
                .window = rule.observation_window,
                .compress_every = rule.compress_every,
                .compress_from = rule.compress_from,
                .after_first = rule.after_first_compress,
                .chunk = rule.chunk,
                .refresh_every = rule.refresh_every};
  if (rule.is_quantized()) {
    spec.bits = 4;
    spec.key_group = rule.key_group;
    spec.residual = rule.residual;
    spec.per_channel = rule.key_per_channel;
    spec.kivi = rule.kivi_flush;
  }
  return spec;
}

// One head of one text, by its rule and by its sets.
template <class Int>
class TwoHeads {
 public:
  TwoHeads(Random& random, Kind kind)
      : random_{random},
        max_rollback_{one_of(random, std::vector<std::size_t>{0, 1, 5, 70})},
        text_{max_rollback_},
        kind_{kind},
        rule_{random_rule(random, kind)},
        part_{rule_},
        model_{spec_of(rule_, kind)} {
    if (kind == Kind::budget) max_rollback_ = 0;
    text_ = TextModel{max_rollback_};
    ring_.slots = number(max_rollback_ + 2);
    chosen_at_.resize(max_rollback_ + 2);
    committed_at_.resize(max_rollback_ + 2);
  }

  void run(int calls) {
    for (int call = 0; call < calls; ++call) {
      const std::size_t rows = one_of(random_, std::vector<std::size_t>{0, 1, 1, 2, 7, 16, 65});
      const std::size_t what = below(random_, 10);
      if (what < 5) {
        check_read(rows);
        move(rows, rows, max_rollback_);
        text_.step(rows);
      } else if (what < 7) {
        move(rows, 0, max_rollback_);
        text_.append(rows);
      } else if (what == 7) {
        move(0, 0, 0);
        text_.commit();
      } else if (what == 8) {
        truncate();
      } else {
        choose();
        compress();
      }
      if (below(random_, 3) == 0) choose();
      check();
    }
  }

 private:
  static Int number(std::size_t n) { return static_cast<Int>(n); }
  static std::size_t size(Int n) { return static_cast<std::size_t>(n); }

  void move(std::size_t rows, std::size_t commit_rows, std::size_t max_rollback) {
    const Int leaving = progress_.leaving(number(commit_rows), number(max_rollback));
    const Int before = progress_.committed;
    progress_ = progress_.after(number(rows), number(commit_rows), number(max_rollback));
    CHECK(leaving == progress_.committed - before);
  }

  void truncate() {
    const std::size_t length = below(random_, text_.tokens() + 2);
    CHECK(progress_.can_return_to(number(length)) == text_.can_return_to(length));
    if (!text_.can_return_to(length)) return;
    progress_.tokens = number(length);
    ring_ = ring_.after_rollback(number(length), chosen_at_.data());
    text_.truncate(length);
    model_.truncate(length);
  }

  void check() {
    model_.commit(text_.committed());
    CHECK(size(progress_.tokens) == text_.tokens());
    CHECK(size(progress_.committed) == text_.committed());
    CHECK(size(progress_.uncommitted()) == text_.tokens() - text_.committed());
    for (const std::size_t length : {text_.tokens(), text_.committed(), text_.tokens() + 1}) {
      CHECK(progress_.can_return_to(number(length)) == text_.can_return_to(length));
    }
    CHECK(progress_.has_room(3, 0));
    CHECK(progress_.has_room(3, progress_.tokens + 3));
    CHECK_FALSE(progress_.has_room(4, progress_.tokens + 3));
    test::check_rule<Int>(rule_, model_, text_.tokens());
    check_budget();
    check_choice();
  }

  // Checks what the queries of a call read of the rows before it and of its own, in two parts cut at a
  // random row.
  void check_read(std::size_t queries) {
    if (kind_ == Kind::budget || queries == 0) return;
    const std::size_t call = text_.tokens();
    const std::size_t end = call + queries;
    const std::size_t cut = below(random_, end + 1);
    constexpr std::int64_t unlimited = std::int64_t{1} << 60;
    const std::int64_t query_window = part_.window.query_window(unlimited);
    std::vector<RowRange<Int>> sinks, recent;
    for (const RowRange<Int> rows :
         {RowRange<Int>{0, number(cut)}, RowRange<Int>{number(cut), number(end)}}) {
      sinks.push_back(part_.window.sinks_among(rows));
      recent.push_back(part_.window.recent_among(rows, number(call)));
      for (const RowRange<Int>& part : {sinks.back(), recent.back()}) {
        CHECK(part.begin >= rows.begin);
        CHECK(part.end >= part.begin);
        CHECK(part.end <= rows.end);
      }
    }
    const auto has = [](const std::vector<RowRange<Int>>& ranges, std::int64_t row) {
      return std::ranges::any_of(ranges, [&](const RowRange<Int>& range) {
        return row >= static_cast<std::int64_t>(range.begin) && row < static_cast<std::int64_t>(range.end);
      });
    };
    for (const std::size_t query : {call, end - 1}) {
      const auto t = static_cast<std::int64_t>(query);
      std::set<std::int64_t> read, expected;
      for (std::int64_t p = 0; p <= t; ++p) {
        const bool chosen = has(sinks, p) || (has(recent, p) && p > t - query_window);
        if (chosen) read.insert(p);
        if (model_.reads(p, t, static_cast<std::int64_t>(call), false)) expected.insert(p);
      }
      CHECK(read == expected);
    }
  }

  void check_budget() {
    if (kind_ != Kind::budget) return;
    const auto rows = number(model_.kept().size());
    CHECK(part_.budget.is_due(rows, progress_.committed, compressed_once_) == model_.wants_compress());
  }

  // Lets random candidates survive, because the choice among them is up to the scorer.
  void compress() {
    if (kind_ != Kind::budget) return;
    const std::vector<std::int64_t> before = model_.kept();
    const auto rows = number(before.size());
    compressed_once_ = true;
    if (!model_.is_compressible()) {
      model_.release();
      CHECK(part_.budget.survivors(rows, progress_.committed) == rows);
      return;
    }
    std::vector<std::int64_t> ranked(
        before.begin(), before.begin() + static_cast<std::ptrdiff_t>(size(part_.budget.candidates(rows))));
    CHECK(ranked.size() + rule_.observation_window == before.size());
    std::ranges::shuffle(ranked, random_);
    ranked.resize(size(part_.budget.chosen(rows)));
    std::set<std::int64_t> survivors(ranked.begin(), ranked.end());
    survivors.insert(before.end() - static_cast<std::ptrdiff_t>(rule_.kept_rows), before.end());
    CHECK(size(part_.budget.survivors(rows, progress_.committed)) == survivors.size());
    CHECK(survivors.size() == rule_.budget + rule_.observation_window);
    model_.compress({survivors.begin(), survivors.end()});
  }

  // Chooses chunk 0 and random chunks, because the choice among them is up to the summaries.
  void choose() {
    if (kind_ != Kind::retrieval) return;
    model_.commit(text_.committed());
    const auto count = static_cast<std::size_t>(part_.chunks.chosen(progress_.committed));
    std::set<std::int64_t> chosen;
    if (count > 0) chosen.insert(0);
    while (chosen.size() < count) {
      chosen.insert(
          static_cast<std::int64_t>(below(random_, static_cast<std::size_t>(model_.full_chunks()))));
    }
    const std::vector<double> equal(static_cast<std::size_t>(model_.full_chunks()), 0.0);
    CHECK(model_.may_select(chosen, equal, 0.0));
    model_.select(chosen, text_.tokens());
    ring_ = ring_.after_choice(progress_.tokens, chosen_at_.data());
    chosen_at_[size(ring_.latest)] = progress_.tokens;
    committed_at_[size(ring_.latest)] = progress_.committed;
  }

  void check_choice() {
    if (kind_ != Kind::retrieval) return;
    const bool stale =
        ring_.valid == 0 || part_.chunks.is_stale(committed_at_[size(ring_.latest)], progress_.committed);
    CHECK(stale == model_.selection_is_stale());
    if (ring_.valid == 0) return;
    const Int then = committed_at_[size(ring_.latest)];
    CHECK(static_cast<std::int64_t>(part_.chunks.closed_rows(then)) == model_.selected_until());
  }

  Random& random_;
  std::size_t max_rollback_;
  TextModel text_;
  Kind kind_;
  HeadRule rule_;
  test::RuleOf<Int> part_;
  HeadModel model_;
  TextProgress<Int> progress_;
  ChoiceRing<Int> ring_;
  std::vector<Int> chosen_at_, committed_at_;
  bool compressed_once_ = false;
};

}  // namespace

TEST_CASE_TEMPLATE("random texts: a rule and sets of positions agree about all rows", Int, std::size_t, int) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    CAPTURE(seed);
    Random random{seed};
    for (const Kind kind : {Kind::full, Kind::window, Kind::budget, Kind::retrieval}) {
      TwoHeads<Int>{random, kind}.run(60);
    }
  }
}

// Compares with a list of the lengths at which choices were made, of which the latest are kept.
TEST_CASE_TEMPLATE("random choices and rollbacks: the ring returns to the choice before", Int, std::size_t,
                   int) {
  Random random{3};
  for (const std::size_t slots : {1U, 2U, 3U, 7U}) {
    CAPTURE(slots);
    ChoiceRing<Int> ring{.slots = static_cast<Int>(slots)};
    std::vector<Int> lengths(slots), names(slots);
    std::map<std::size_t, Int> model;
    std::size_t length = 1;
    for (Int name = 1; name < 3000; ++name) {
      if (below(random, 3) > 0) {
        length += below(random, 3);
        ring = ring.after_choice(static_cast<Int>(length), lengths.data());
        lengths[static_cast<std::size_t>(ring.latest)] = static_cast<Int>(length);
        names[static_cast<std::size_t>(ring.latest)] = name;
        model[length] = name;
        if (model.size() > slots) model.erase(model.begin());
      } else {
        length -= below(random, std::min<std::size_t>(length, 5));
        ring = ring.after_rollback(static_cast<Int>(length), lengths.data());
        model.erase(model.upper_bound(length), model.end());
      }
      CHECK(static_cast<std::size_t>(ring.valid) == model.size());
      if (model.empty()) continue;
      CHECK(names[static_cast<std::size_t>(ring.latest)] == model.rbegin()->second);
    }
  }
}

TEST_CASE("numbers at the ends of a text") {
  const WindowRule<std::size_t> window{.sinks = 4, .recent = 3};
  CHECK(window.first_kept(0) == 4);
  CHECK(window.kept_rows(0) == 0);
  CHECK(window.kept_rows(3) == 3);
  CHECK(window.kept_rows(8) == 7);
  CHECK(window.first_read(6) == 4);
  CHECK(window.first_read(7) == 5);
  CHECK(WindowRule<std::size_t>{.sinks = 4, .recent = 3, .prefill_chunk_mask = true}.first_read(7) == 4);
  CHECK(window.sinks_among({2, 3}) == RowRange<std::size_t>{2, 3});
  CHECK(window.sinks_among({9, 12}).rows() == 0);
  CHECK(window.recent_among({0, 2}, 7).rows() == 0);
  CHECK(RowRange<std::size_t>{5, 2}.rows() == 0);
  CHECK(ResidualRule<int>{.residual = 2147483647}.quantized(2147483647) == 0);
  CHECK(ResidualRule<int>{.residual = 0, .unit = 64}.quantized(127) == 64);
  CHECK(TextProgress<std::size_t>{.tokens = 9, .committed = 2}.has_room(0, 5));
  CHECK_FALSE(TextProgress<std::size_t>{.tokens = 9, .committed = 2}.has_room(1, 5));
}
