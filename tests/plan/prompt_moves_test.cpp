// SPDX-License-Identifier: Apache-2.0
//
// Which rows ranks need of each other for a prompt, compared row by row with what each query sees and each rank holds.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <set>
#include <tuple>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/prompt_moves.hpp>
#include <kvpolicy/plan/shards.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "support/compare.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;
using test::below;
using test::contains;
using test::Random;
using test::thrown;

namespace {

using Dense = DenseStorage<float>;
using Full = FullCache<Dense>::Config;
using Window = SinkRecentCache<Dense>::Config;
using Budget = HeadBudgetCache<Dense>::Config;
using Chunks = ChunkRetrievalCache<Dense>::Config;

// What a head of the tests keeps, in words of its own.
struct Kind {
  bool window = false;
  bool whole_chunk = false;  // a call's own rows are all seen, causally
  std::size_t sinks = 0, recent = 0;
};

bool sees(const Kind& kind, std::size_t query, std::size_t row) {
  if (row > query) return false;
  return !kind.window || kind.whole_chunk || row < kind.sinks || row + kind.recent > query;
}
// Whether the row may be read by a query at `next` or later: sinks, and the window of the row before it.
bool is_kept(const Kind& kind, std::size_t next, std::size_t row) {
  return !kind.window || row < kind.sinks || row + kind.recent >= next;
}

struct Case {
  HeadPlan<float> plan;
  std::vector<Kind> kinds;
};

Case random_case(Random& random, std::size_t heads) {
  Case made{HeadPlan<float>{ModelShape{1, heads, heads, 8}}, std::vector<Kind>(heads)};
  for (std::size_t head = 0; head < heads; ++head) {
    Kind& kind = made.kinds[head];
    switch (below(random, 4)) {
      case 0: break;
      case 1: made.plan.set(0, head, Chunks{.chunk = 8, .budget = 32}); break;
      default:
        kind = {true, below(random, 3) == 0, below(random, 9), 1 + below(random, 40)};
        made.plan.set(0, head,
                      Window{.sinks = kind.sinks,
                             .recent = kind.recent,
                             .mask = kind.whole_chunk ? Mask::prefill_chunk : Mask::exact});
    }
  }
  return made;
}

using Row = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>;  // from, to, head, row

// Moved rows, each once.
std::set<Row> rows_of(const std::vector<PromptMove>& moves) {
  std::set<Row> rows;
  for (const PromptMove& move : moves) {
    std::size_t count = 0;
    for (std::size_t row = move.rows.begin; row < move.rows.end; ++row) {
      if (!move.share.has(row)) continue;
      ++count;
      REQUIRE(rows.insert({move.from, move.to, move.head, row}).second);
    }
    REQUIRE(count > 0);
    REQUIRE(count == move.count());
  }
  return rows;
}

}  // namespace

TEST_CASE("blocks have every token once, and ranks the same share of causal attention") {
  for (const std::size_t ranks : {1U, 2U, 3U, 5U, 8U}) {
    for (const std::size_t tokens : {0U, 1U, 2U, 3U, 7U, 31U, 97U, 1024U}) {
      CAPTURE(ranks);
      CAPTURE(tokens);
      const PromptBlocks blocks{tokens, ranks};
      REQUIRE(blocks.size() == 2 * ranks);
      std::size_t next = 0;
      std::vector<double> work(ranks, 0.0);
      double all = 0;
      for (std::size_t number = 0; number < blocks.size(); ++number) {
        const RowRange<std::size_t> block = blocks.block(number);
        REQUIRE(block.begin == next);
        next = block.end;
        REQUIRE(block.rows() <= tokens / (2 * ranks) + 1);
        const auto own = blocks.of_rank(blocks.rank_of(number));
        REQUIRE((own[0] == block || own[1] == block));
        for (std::size_t row = block.begin; row < block.end; ++row) {
          work[blocks.rank_of(number)] += static_cast<double>(row + 1);
          all += static_cast<double>(row + 1);
        }
      }
      REQUIRE(next == tokens);
      // A rank's two blocks hold a token more or less than their share, which costs at most a row of all tokens each.
      for (const double own : work) {
        CHECK(own <= all / static_cast<double>(ranks) + 2.0 * static_cast<double>(tokens));
      }
    }
  }
  CHECK_THROWS_AS(PromptBlocks(1, 0), ConfigError);
  CHECK_THROWS_AS(PromptBlocks(1, 1025), ConfigError);
  CHECK_THROWS_AS(PromptBlocks((std::size_t{1} << 40) + 1, 2), CapacityError);
  // Nothing wraps around in the longest text.
  const PromptBlocks longest{std::size_t{1} << 40, 1024};
  CHECK(longest.block(2047).end == std::size_t{1} << 40);
}

TEST_CASE("ranks get the rows that their queries see and that they hold, and no others") {
  Random random{20'261'127};
  std::size_t moved = 0;
  std::size_t cut = 0;
  for (std::size_t trial = 0; trial < 300; ++trial) {
    CAPTURE(trial);
    const std::size_t ranks = 1 + below(random, 5);
    const std::size_t tokens = below(random, 4) == 0 ? below(random, 9) : below(random, 230);
    const std::size_t heads = 1 + below(random, 4);
    const std::size_t rollback = below(random, 2) == 0 ? 0 : below(random, 30);
    const Case own = random_case(random, heads);
    const PromptBlocks blocks{tokens, ranks};
    std::vector<std::size_t> rank_of(tokens);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      for (const auto& block : blocks.of_rank(rank)) {
        for (std::size_t row = block.begin; row < block.end; ++row) rank_of[row] = rank;
      }
    }
    const Shards shards = balance(own.plan, 1000, {.ranks = ranks});
    cut += shards.merges(0).size();
    std::set<Row> attended, all;
    for (std::size_t to = 0; to < ranks; ++to) {
      for (std::size_t head = 0; head < heads; ++head) {
        const Kind& kind = own.kinds[head];
        for (std::size_t row = 0; row < tokens; ++row) {
          if (rank_of[row] == to) continue;
          for (std::size_t query = 0; query < tokens; ++query) {
            if (rank_of[query] == to && sees(kind, query, row))
              attended.insert({rank_of[row], to, head, row});
          }
          for (const HeadPart& part : shards.parts(0, to)) {
            const std::size_t next = tokens - std::min(tokens, rollback);
            if (part.head == head && part.rows.has(row) && is_kept(kind, next, row)) {
              all.insert({rank_of[row], to, head, row});
            }
          }
        }
      }
    }
    all.insert(attended.begin(), attended.end());
    CHECK(rows_of(prompt_moves(own.plan, blocks, 0)) == attended);
    const auto moves = prompt_moves(own.plan, blocks, 0, &shards, rollback);
    CHECK(rows_of(moves) == all);
    CHECK(bytes_moved(moves, own.plan.shape().layer(0), 4) == all.size() * 16 * 4);
    CHECK(std::ranges::is_sorted(
        moves, {}, [](const PromptMove& move) { return std::tuple{move.to, move.head, move.rows.begin}; }));
    moved += all.size();
  }
  CHECK(moved > 10'000);
  CHECK(cut > 50);
}

TEST_CASE("what a window's ranks send does not grow with the prompt") {
  const HeadPlan<float> plan{ModelShape{1, 1, 1, 8}, Window{.sinks = 4, .recent = 64}};
  const LayerShape layer = plan.shape().layer(0);
  const auto bytes = [&](std::size_t tokens) {
    return bytes_moved(prompt_moves(plan, PromptBlocks{tokens, 4}, 0), layer, 2);
  };
  CHECK(bytes(std::size_t{1} << 16) == bytes(std::size_t{1} << 20));
  const HeadPlan<float> full{ModelShape{1, 1, 1, 8}};
  // A rank's earlier block goes to the three others; its later one to those whose last block comes after it.
  const std::size_t tokens = std::size_t{1} << 16;
  CHECK(bytes_moved(prompt_moves(full, PromptBlocks{tokens, 4}, 0), layer, 2) ==
        (4 * 3 + (3 + 2 + 1)) * (tokens / 8) * 16 * 2);
}

TEST_CASE("what cannot be divided is refused by name") {
  HeadPlan<float> plan{ModelShape{2, 2, 2, 8}};
  const PromptBlocks blocks{100, 2};
  const Shards three = balance(plan, 100, {.ranks = 3});
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(prompt_moves(plan, blocks, 0, &three)); }),
                 "shards for 3 ranks, the prompt is divided among 2"));
  const Shards other = balance(HeadPlan<float>{ModelShape{1, 2, 2, 8}}, 100, {.ranks = 2});
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(prompt_moves(plan, blocks, 0, &other)); }),
                 "shards of 1 layers, the plan has 2"));
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(prompt_moves(plan, blocks, 2)); }),
                 "there is no layer 2"));
  plan.set(1, 1, Budget{.budget = 40, .scorer = {.observation_window = 8}});
  CHECK_NOTHROW(static_cast<void>(prompt_moves(plan, blocks, 0)));
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(prompt_moves(plan, blocks, 1)); }),
                 "head 1 of layer 1 has a budget"));
  const Shards cut{{{{{0, {0, 500}, 1}}, {{0, {500, row_slots}, 1}}}}, 2};
  const HeadPlan<float> window{ModelShape{1, 1, 1, 8}, Window{.sinks = 4, .recent = 64}};
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(prompt_moves(window, blocks, 0, &cut)); }),
                 "head 0 of layer 0 is cut by rows, and does not keep every row"));
  CHECK_NOTHROW(static_cast<void>(prompt_moves(HeadPlan<float>{ModelShape{1, 1, 1, 8}}, blocks, 0, &cut)));
  // A layer without a cache moves nothing.
  ModelShape shape{2, 2, 2, 8};
  shape.change(1).kv_heads = 0;
  CHECK(prompt_moves(HeadPlan<float>{shape}, blocks, 1).empty());
}
