// SPDX-License-Identifier: Apache-2.0
//
// Top-k against a stable sort; the two kernels that put choices down.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include <kvpolicy/cuda/kernels/select.cuh>
#include <kvpolicy/policy/top_rows.hpp>

#include "cuda/support/launch.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;
using namespace kvpolicy::gpu;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
using Rows = std::vector<int>;

// What top_rows.hpp promises, said another way; `second` decides between equal scores, if there is any.
Rows expected_top(const std::vector<float>& scores, int k, const std::vector<float>& second = {}) {
  Rows order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto higher = [](float x, float y) { return y != y ? x == x : x > y; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const auto i = static_cast<std::size_t>(a), j = static_cast<std::size_t>(b);
    if (higher(scores[i], scores[j]) || higher(scores[j], scores[i]) || second.empty()) {
      return higher(scores[i], scores[j]);
    }
    return higher(second[i], second[j]);
  });
  order.resize(std::min(order.size(), static_cast<std::size_t>(k)));
  std::sort(order.begin(), order.end());
  return order;
}

// Of buffers that are exactly as large as they must be, so that sanitizers see their ends.
template <int Threads>
Rows keep(const std::vector<float>& scores, const std::vector<float>& second, int k, int window) {
  const int rows = static_cast<int>(scores.size()) + window;
  const std::vector<HeadView> heads{{.evicted = 17}};
  const std::vector<LayerState> states{{rows + 17, rows + 17}};
  const std::vector<CompressionSettings> how{
      {.ranking = Ranking::attention, .kept_rows = window, .budget = k}};
  const auto exact = std::make_unique<float[]>(scores.size());
  std::copy(scores.begin(), scores.end(), exact.get());
  const auto unpooled = std::make_unique<float[]>(scores.size());
  std::copy(second.begin(), second.end(), unpooled.get());
  const int size = std::min(k, rows - window) + window;
  const auto kept = std::make_unique<int[]>(static_cast<std::size_t>(size));
  std::fill_n(kept.get(), size, -1);
  const std::vector<int*> places{kept.get()};
  std::vector<int> counts{-1};
  KeepParams params;
  params.heads = heads.data();
  params.state = states.data();
  params.compressions = how.data();
  params.scores = {exact.get(), unpooled.get(), static_cast<long long>(scores.size())};
  params.kept = places.data();
  params.counts = counts.data();
  test::launch(keep_select_kernel<Threads>, 1, 1, Threads, select_shared_bytes(), params);
  CHECK(counts[0] == size);
  return {kept.get(), kept.get() + size};
}

bool same_rows(const Rows& of_device, const std::vector<std::size_t>& of_host) {
  return std::equal(of_device.begin(), of_device.end(), of_host.begin(), of_host.end(),
                    [](int a, std::size_t b) { return static_cast<std::size_t>(a) == b; });
}

// By `scores` alone, and where `second` decides between equal ones.
template <int Threads>
void check(const std::vector<float>& scores, int k, int window = 1) {
  CAPTURE(scores.size());
  CAPTURE(k);
  const auto count = static_cast<std::size_t>(k);
  const std::vector<float> level(scores.size(), 0.25F);
  Rows expected = expected_top(scores, k);
  REQUIRE(same_rows(expected, top_rows(scores, count)));
  for (int row = 0; row < window; ++row) expected.push_back(static_cast<int>(scores.size()) + row);
  CHECK((keep<Threads>(scores, level, k, window) == expected));

  test::Random random{static_cast<std::uint64_t>(scores.size()) + count};
  std::vector<float> second;
  std::vector<std::uint64_t> ranks;
  for (const float score : scores) {
    second.push_back(test::below(random, 4) == 0 ? 0.0F : test::normal(random) * 1e-3F);
    ranks.push_back(kvpolicy::rank_of(score, second.back()));
  }
  expected = expected_top(scores, k, second);
  REQUIRE(same_rows(expected, top_ranks<std::uint64_t>(ranks, count)));
  for (int row = 0; row < window; ++row) expected.push_back(static_cast<int>(scores.size()) + row);
  CHECK((keep<Threads>(scores, second, k, window) == expected));
}

std::vector<float> made(int n, const std::function<float(int)>& score) {
  std::vector<float> scores;
  for (int i = 0; i < n; ++i) scores.push_back(score(i));
  return scores;
}

template <int Threads>
void check_all(int n) {
  test::Random random{static_cast<std::uint64_t>(n)};
  const std::vector<float> odd{not_a_number, -inf,    inf,  0.0F,  -0.0F,
                               1e-42F,       -1e-42F, 3.0F, -3.0F, -not_a_number};
  const std::vector<std::vector<float>> all{
      made(n, [&](int) { return test::normal(random); }),
      made(n, [&](int) { return std::abs(test::normal(random)) * 1e-4F; }),
      made(n, [](int) { return 0.5F; }),
      made(n, [](int) { return not_a_number; }),
      made(n, [](int i) { return static_cast<float>(i); }),
      made(n, [](int i) { return static_cast<float>(-i); }),
      made(n, [&](int) { return static_cast<float>(test::below(random, 3)); }),
      made(n, [&](int) { return test::one_of(random, odd); }),
      // Apart in the lowest bits alone.
      made(n, [&](int) { return 1.0F + static_cast<float>(test::below(random, 1500)) * 0x1p-23F; }),
  };
  for (const auto& scores : all) {
    for (const int k : {0, 1, n / 3, n - 1, n, n + 1}) {
      if (k >= 0) check<Threads>(scores, k);
    }
  }
}

}  // namespace

TEST_CASE("top-k of one block is the host's top_rows, and by two scores its top_ranks") {
  for (const int n : {0, 1, 2, 31, 255, 256, 257, 1023, 1024, 1025}) {
    CAPTURE(n);
    check_all<256>(n);
  }
  for (const int n : {1, 257, 4095, 4096, 5000}) {
    CAPTURE(n);
    check_all<select_threads>(n);
  }
  test::Random random{9};
  check<select_threads>(made(70'001, [&](int) { return test::normal(random); }), 4'096);
}

TEST_CASE("keep_select puts the window after the choice and leaves other heads alone") {
  test::Random random{3};
  for (const int window : {2, 8, 64}) {
    for (const int n : {0, 1, 100}) {
      check<256>(made(n, [&](int) { return test::normal(random); }), 30, window);
    }
  }
  // Fewer rows than the window: all of them.
  const std::vector<HeadView> heads(2);
  const std::vector<LayerState> states{{5, 5}};
  const std::vector<CompressionSettings> how{{.ranking = Ranking::attention, .kept_rows = 8, .budget = 4},
                                             {}};
  Rows kept(13, -1);
  const std::vector<int*> places{kept.data(), nullptr};
  std::vector<int> counts(2, -1);
  const std::vector<float> scores(2, 0.0F);
  KeepParams params;
  params.heads = heads.data();
  params.state = states.data();
  params.compressions = how.data();
  params.scores = {scores.data(), scores.data(), 1};
  params.kept = places.data();
  params.counts = counts.data();
  test::launch(keep_select_kernel<256>, 2, 1, 256, select_shared_bytes(), params);
  CHECK(counts[0] == 5);
  CHECK(counts[1] == -1);
  CHECK((Rows(kept.begin(), kept.begin() + 6) == Rows{0, 1, 2, 3, 4, -1}));
}

TEST_CASE("keep_select chooses a share of the rows before scores are weighed") {
  test::Random random{8};
  for (const int n : {0, 1, 2, 257, 1025}) {
    for (const double share : {0.0, 0.3, 0.5, 1.0}) {
      for (const int k : {0, 1, n / 3, n - 1, n, n + 4}) {
        if (k < 0) continue;
        CAPTURE(n);
        CAPTURE(share);
        CAPTURE(k);
        const std::vector<float> odd{not_a_number, 0.0F, 3.0F, 3.0F, 1e-42F};
        const std::vector<float> high{std::numeric_limits<float>::max(), 0.0F, 1.0F};
        const auto scores = made(n, [&](int) { return test::one_of(random, odd); });
        const auto votes = made(n, [&](int) { return test::normal(random); });
        const auto weighed = made(n, [&](int) { return test::one_of(random, high); });
        // Said another way: the first part by scores, then the best of the others.
        const int chosen = std::min(k, n);
        const auto first = static_cast<int>(share * static_cast<double>(chosen));
        Rows expected = expected_top(scores, first, votes);
        std::vector<float> left, votes_left;
        Rows rows_left;
        for (int row = 0; row < n; ++row) {
          if (std::find(expected.begin(), expected.end(), row) != expected.end()) continue;
          left.push_back(weighed[static_cast<std::size_t>(row)]);
          votes_left.push_back(votes[static_cast<std::size_t>(row)]);
          rows_left.push_back(row);
        }
        for (const int i : expected_top(left, chosen - first, votes_left))
          expected.push_back(rows_left[static_cast<std::size_t>(i)]);
        std::sort(expected.begin(), expected.end());

        const std::vector<HeadView> heads(1);
        const std::vector<LayerState> states{{n, n}};
        const std::vector<CompressionSettings> how{
            {.ranking = Ranking::attention, .budget = k, .weighs_values = true, .unweighed_share = share}};
        std::vector<float> marked = weighed;
        Rows kept(static_cast<std::size_t>(chosen), -1);
        const std::vector<int*> places{kept.data()};
        std::vector<int> counts{-1};
        KeepParams params;
        params.heads = heads.data();
        params.state = states.data();
        params.compressions = how.data();
        params.scores = {scores.data(), votes.data(), n, marked.data()};
        params.kept = places.data();
        params.counts = counts.data();
        test::launch(keep_select_kernel<256>, 1, 1, 256, select_shared_bytes(), params);
        CHECK(counts[0] == chosen);
        CHECK((kept == expected));
      }
    }
  }
}

TEST_CASE("refresh_select writes one choice into each selecting head's ring") {
  constexpr int slots = 3, budget = 10, sequences = 2, kv_heads = 2;
  test::Random random{5};
  struct Choices {
    Rows tokens = Rows(slots, -1), ends = Rows(slots, -1), counts = Rows(slots, -1);
    Rows chunks = Rows(slots * budget, -1);
    Selections view;
  };
  std::vector<Choices> choices(sequences);
  std::vector<HeadView> heads(sequences * kv_heads);  // of two heads the second selects
  std::vector<LayerState> states(sequences);
  for (std::size_t s = 0; s < choices.size(); ++s) {
    Choices& c = choices[s];
    c.view = {.slots = slots,
              .tokens = c.tokens.data(),
              .ends = c.ends.data(),
              .counts = c.counts.data(),
              .chunks = c.chunks.data()};
    HeadView& head = heads[s * kv_heads + 1];
    head.chunk_rows = 8;
    head.budget_chunks = budget;
    head.selections = &c.view;
  }
  for (int round = 0; round < 8; ++round) {
    CAPTURE(round);
    std::vector<std::vector<float>> scores;
    constexpr std::size_t pitch = 400;
    std::vector<float> all(sequences * kv_heads * pitch, not_a_number);
    const int call_rows = round % 2;
    for (std::size_t s = 0; s < choices.size(); ++s) {
      // The first rounds know no chunk, or fewer than the budget, whose scores nobody wrote.
      const int committed = round == 0   ? 7
                            : round == 1 ? 8 * 4 + 3
                                         : 8 * (100 + 30 * round + static_cast<int>(s)) + 5;
      states[s] = {.tokens = committed + 2, .committed = committed};
      scores.push_back(made(committed / 8, [&](int) { return test::normal(random); }));
      if (round > 1) {
        std::copy(scores[s].begin(), scores[s].end(), all.data() + (s * kv_heads + 1) * pitch);
      }
    }
    // In round 5 a rollback has taken back two choices.
    if (round == 5) {
      for (Choices& c : choices) c.view.latest = (c.view.latest + 1) % slots, c.view.valid = 1;
    }
    const int latest = choices[0].view.latest, valid = choices[0].view.valid;
    RefreshParams params;
    params.heads = heads.data();
    params.states = states.data();
    params.kv_heads = kv_heads;
    params.call_rows = call_rows;
    for (std::size_t y = 0; y < heads.size(); ++y) heads[y].scores = all.data() + y * pitch;
    // In round 6 the same query chooses twice: the second choice takes the place of the first.
    for (int i = 0; i < (round == 6 ? 2 : 1); ++i) {
      test::launch(refresh_select_kernel<256>, sequences * kv_heads, 1, 256, select_shared_bytes(), params);
    }
    for (std::size_t s = 0; s < choices.size(); ++s) {
      const Choices& c = choices[s];
      const auto& own = scores[s];
      CHECK(c.view.latest == (latest + 1) % slots);
      CHECK(c.view.valid == std::min(valid + 1, slots));
      const auto slot = static_cast<std::size_t>(c.view.latest);
      CHECK(c.tokens[slot] == states[s].tokens + call_rows);
      CHECK(c.ends[slot] == static_cast<int>(own.size()) * 8);
      Rows expected = expected_top(own, budget);
      CHECK(c.counts[slot] == static_cast<int>(expected.size()));
      const auto first = c.chunks.begin() + static_cast<std::ptrdiff_t>(slot) * budget;
      CHECK((Rows(first, first + c.counts[slot]) == expected));
    }
  }
}
