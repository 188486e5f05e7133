// SPDX-License-Identifier: Apache-2.0
//
// The scores of rows that a compression ranks, against probabilities in double that are all
// written out; and the rows that follow from them.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include <kvpolicy/cuda/kernels/votes.cuh>
#include <kvpolicy/policy/snapkv_scorer.hpp>

#include "cuda/support/codes.hpp"
#include "cuda/support/device_head.hpp"
#include "cuda/support/elements.hpp"
#include "cuda/support/forbid.hpp"
#include "cuda/support/launch.hpp"
#include "support/oracle.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;
using namespace kvpolicy::gpu;

namespace {

using test::all_codes;
using test::Codes;
using test::OtherElement;

constexpr float untouched = -12345.0F;

struct Head {
  int rows = 200;           // stored
  int survivors = 0;        // of them, from an earlier compression: positions not those of the rows
  CompressionSettings how;  // ranked by nothing: left alone
  Codes codes = Encoding::float32;
  int key_group = 0;
  bool hadamard = false;  // keys are rotated before they are quantised
};
struct Case {
  std::vector<Head> heads;
  int tokens = 0;  // of the text: 0 means as many as the first head has rows
  int group = 1;
  int known = 1000;  // latest queries that are known
  int blocks = 1;
  int page_rows = 64;
  float deviation = 1.0F;  // of the queries
  float softcap = 0.0F;
  bool sinks = false;
};

template <Element E>
double number(std::uint16_t bits) {
  E value;
  value.bits = bits;
  return static_cast<double>(static_cast<float>(value));
}

double joined(Votes votes, double so_far, double vote) {
  return votes == Votes::largest ? std::max(so_far, vote) : so_far + vote;
}

// Each query head's votes: probabilities of all rows, summed over the queries, or the largest.
template <Element E>
std::vector<std::vector<double>> votes_of(const Case& c, const Head& head,
                                          const std::vector<oracle::Row>& rows,
                                          const std::vector<std::vector<double>>& queries, int tokens,
                                          int count, const oracle::Options& options,
                                          const std::vector<float>& attention_sink_bias, int kv_head) {
  const int q_heads = static_cast<int>(c.heads.size()) * c.group;
  std::vector<std::vector<double>> votes;
  for (int member = 0; member < c.group; ++member) {
    auto& sums = votes.emplace_back(static_cast<std::size_t>(head.rows), 0.0);
    for (int i = 0; i < count; ++i) {
      const int position = tokens - count + i;
      std::vector<const oracle::Row*> visible;
      for (const oracle::Row& row : rows) {
        if (row.position <= position) visible.push_back(&row);
      }
      oracle::Options own = options;
      const int q_head = kv_head * c.group + member;
      if (c.sinks) own.sink_logit = attention_sink_bias[static_cast<std::size_t>(q_head)];
      const auto shares =
          oracle::probabilities(queries[static_cast<std::size_t>(position * q_heads + q_head)], visible, own);
      for (std::size_t r = 0; r < shares.size(); ++r) {
        double& sum = sums[static_cast<std::size_t>(visible[r] - rows.data())];
        sum = joined(head.how.votes, sum, shares[r]);
      }
    }
  }
  return votes;
}

// The largest error of a score, in parts of the head's largest.
template <Element E, int HeadDim, bool Packed = false>
double check(const Case& c) {
  CAPTURE(HeadDim);
  CAPTURE(c.group);
  CAPTURE(c.blocks);
  const int kv_heads = static_cast<int>(c.heads.size());
  const int q_heads = kv_heads * c.group;
  const int tokens = c.tokens > 0 ? c.tokens : c.heads[0].rows;
  const auto state = std::make_unique<LayerState>(LayerState{tokens, tokens});
  test::Random random{static_cast<std::uint64_t>(tokens * 8 + c.group)};

  int window = 1, most_rows = 1;
  std::vector<CompressionSettings> compressions;
  std::vector<std::unique_ptr<test::DeviceHead<E>>> device;
  std::vector<HeadView> views;
  std::vector<std::vector<oracle::Row>> rows;
  for (const Head& head : c.heads) {
    compressions.push_back(head.how);
    // Of every second head the scores of each query head are asked for as well.
    compressions.back().weighs_values = compressions.size() % 2 == 1;
    compressions.back().value_norm = ValueNorm::output_l1;
    window = std::max(window, head.how.queries);
    most_rows = std::max(most_rows, head.rows);
    HeadView view;
    view.evicted = tokens - head.rows;
    if (kvpolicy::is_quantized(head.codes.keys)) {
      head.codes.describe(view);
      view.key_group = head.key_group;
      view.value_group = head.key_group;
      view.key_hadamard = view.value_hadamard = head.hadamard;
      view.residual = 70;
      view.exact_ring = 256;
    }
    device.push_back(std::make_unique<test::DeviceHead<E>>(view, HeadDim, c.page_rows, head.rows));
    views.push_back(device.back()->view());
    std::vector<float> keys(static_cast<std::size_t>(head.rows) * HeadDim);
    for (float& x : keys) x = test::normal(random);
    device.back()->store(keys, keys, *state);
    for (int r = 0; r < head.rows; ++r) {
      if (r >= views.back().packed_end(tokens)) {
        test::forbid(device.back()->exact(test::Side::values, r), HeadDim);
      }
    }
    for (int r = head.rows; r % c.page_rows != 0; ++r) {
      test::forbid(device.back()->exact(test::Side::keys, r), HeadDim);
    }
    auto& own = rows.emplace_back();
    for (int r = 0; r < head.rows; ++r) {
      // Survivors came from anywhere before the rows that followed.
      own.push_back({.position = r < head.survivors ? r : r + view.evicted, .key = {}, .value = {}});
      const auto key = device.back()->row(test::Side::keys, r, *state);
      own.back().key.assign(key.begin(), key.end());
    }
  }

  // The ring holds a few queries more than the window, and NaN where none is known.
  const int slots = window + 5;
  const int first_query = std::max(0, tokens - c.known);
  std::vector<std::uint16_t> ring(static_cast<std::size_t>(slots * q_heads * HeadDim), 0xffff);
  std::vector<std::vector<double>> queries(static_cast<std::size_t>(tokens * q_heads));
  for (int p = std::max(first_query, tokens - slots); p < tokens; ++p) {
    for (int h = 0; h < q_heads; ++h) {
      for (int d = 0; d < HeadDim; ++d) {
        auto& place = ring[static_cast<std::size_t>((p % slots * q_heads + h) * HeadDim + d)];
        place = E{c.deviation * test::normal(random)}.bits;
        queries[static_cast<std::size_t>(p * q_heads + h)].push_back(number<E>(place));
      }
    }
  }
  std::vector<float> attention_sink_bias;
  for (int h = 0; h < q_heads; ++h) attention_sink_bias.push_back(3.0F * test::normal(random));

  const auto columns = static_cast<std::size_t>(observe_columns(c.group, window));
  const auto heads = static_cast<std::size_t>(kv_heads);
  std::vector<PartialState> partial(heads * static_cast<std::size_t>(c.blocks) * columns, {NAN, NAN});
  std::vector<std::uint32_t> tickets(heads, 0);
  std::vector<float> lse(heads * columns, NAN);
  const long long pitch = most_rows;
  std::vector<float> scores(heads * static_cast<std::size_t>(pitch), untouched);
  std::vector<float> unpooled = scores;
  std::vector<float> of_query_heads(static_cast<std::size_t>(q_heads * pitch), untouched);
  VotesParams votes_params;
  ObserveParams& params = votes_params.observed;
  params.heads = views.data();
  params.state = state.get();
  params.compressions = compressions.data();
  params.kv_heads = kv_heads;
  params.group = c.group;
  params.page_rows = c.page_rows;
  params.queries = window;
  params.q = {.data = reinterpret_cast<std::byte*>(ring.data()),
              .token_stride = q_heads * HeadDim,
              .head_stride = HeadDim};
  params.query_slots = slots;
  params.first_query = first_query;
  params.attention_sink_bias = c.sinks ? attention_sink_bias.data() : nullptr;
  const double scale = 1.0 / std::sqrt(static_cast<double>(HeadDim));
  params.scale_log2 = static_cast<float>(scale) * log2_e;
  params.softcap = c.softcap;
  params.partial = partial.data();
  params.tickets = tickets.data();
  params.log_sum_exp = lse.data();
  votes_params.scores = scores.data();
  votes_params.unpooled = unpooled.data();
  votes_params.of_query_heads = of_query_heads.data();
  votes_params.pitch = pitch;
  const auto launch = [&](auto kernel, const auto& of_kernel) {
    test::launch(kernel, c.blocks, kv_heads, observe_threads, observe_shared_bytes<HeadDim>(c.group, window),
                 of_kernel);
  };
  launch(observe_lse_kernel<E, HeadDim, Packed>, params);
  CHECK(std::all_of(tickets.begin(), tickets.end(), [](auto ticket) { return ticket == 0; }));
  launch(votes_kernel<E, HeadDim, Packed>, votes_params);

  double worst = 0;
  for (int h = 0; h < kv_heads; ++h) {
    CAPTURE(h);
    const Head& head = c.heads[static_cast<std::size_t>(h)];
    CAPTURE(head.rows);
    CAPTURE(head.how.queries);
    CAPTURE(head.how.kernel);
    const float* own = scores.data() + h * pitch;
    const int candidates =
        head.how.ranking == Ranking::none ? 0 : std::max(0, head.rows - head.how.kept_rows);
    const float* own_votes = unpooled.data() + h * pitch;
    for (int r = candidates; r < pitch; ++r) REQUIRE((own[r] == untouched && own_votes[r] == untouched));
    // Scores of each query head by itself, where they are asked for.
    const float* of_members = of_query_heads.data() + h * c.group * pitch;
    const int asked = compressions[static_cast<std::size_t>(h)].weighs_outputs() ? candidates : 0;
    for (int i = 0; i < c.group * pitch; ++i) {
      if (i % pitch >= asked) REQUIRE(of_members[i] == untouched);
    }
    if (candidates == 0) continue;

    const int count = std::min(head.how.queries, tokens - first_query);
    const auto votes =
        votes_of<E>(c, head, rows[static_cast<std::size_t>(h)], queries, tokens, count,
                    {.scale = scale, .softcap = c.softcap, .sink_logit = {}}, attention_sink_bias, h);
    std::vector<double> expected(static_cast<std::size_t>(candidates), 0.0);
    std::vector<float> sums;
    double error_of_members = 0, most_of_members = 0;
    int member = 0;
    for (const auto& of_head : votes) {
      for (const double sum : of_head) sums.push_back(static_cast<float>(sum));
      for (int r = 0; r < candidates; ++r) {
        double pooled = 0;
        for (int at = r - head.how.kernel / 2; at <= r + head.how.kernel / 2; ++at) {
          if (at < 0 || at >= candidates) continue;
          const double vote = of_head[static_cast<std::size_t>(at)];
          pooled = head.how.average ? pooled + vote / head.how.kernel : std::max(pooled, vote);
        }
        double& score = expected[static_cast<std::size_t>(r)];
        score = joined(head.how.votes, score,
                       head.how.votes == Votes::mean ? pooled / (count * c.group) : pooled);
        if (asked == 0) continue;
        const double alone = head.how.votes == Votes::mean ? pooled / count : pooled;
        const double off = std::abs(of_members[member * pitch + r] - alone);
        error_of_members = off <= error_of_members ? error_of_members : off;
        most_of_members = std::max(most_of_members, alone);
      }
      ++member;
    }
    // The oracle's pooling is the host's.
    std::vector<float> of_host(static_cast<std::size_t>(candidates));
    SnapKvScorer::score({.observation_window = static_cast<std::size_t>(head.how.queries),
                         .pooling = head.how.average ? Pooling::average : Pooling::max,
                         .kernel = static_cast<std::size_t>(head.how.kernel),
                         .votes = head.how.votes},
                        sums, static_cast<std::size_t>(c.group), static_cast<std::size_t>(count), of_host);

    const double largest = *std::max_element(expected.begin(), expected.end());
    double error = 0, error_of_host = 0, error_of_votes = 0, most_votes = 0;
    for (int r = 0; r < candidates; ++r) {
      const auto i = static_cast<std::size_t>(r);
      // Written so that NaN stays.
      error = std::abs(own[r] - expected[i]) <= error ? error : std::abs(own[r] - expected[i]);
      error_of_host = std::max(error_of_host, std::abs(of_host[i] - expected[i]));
      double together = 0;
      for (const auto& of_head : votes) together = joined(head.how.votes, together, of_head[i]);
      most_votes = std::max(most_votes, together);
      const double off = std::abs(own_votes[r] - together);
      error_of_votes = off <= error_of_votes ? error_of_votes : off;
    }
    // What a float logit is off by, 2^-23 of its size or so, is the relative error of a
    // probability. Measured here: 6e-7 for logits to 5, 2.3e-6 for logits to 50; the rest is for
    // tensor cores, which truncate their sums, and for the device's exponential.
    const double bound = (c.deviation > 2 ? 4e-5 : 1e-5) * largest;
    CHECK(error <= bound);
    CHECK(error_of_host <= bound);
    CHECK(error_of_votes <= (c.deviation > 2 ? 4e-5 : 1e-5) * most_votes);
    CHECK(error_of_members <= (c.deviation > 2 ? 4e-5 : 1e-5) * most_of_members);
    if (!(error / largest <= worst)) worst = error / largest;

    // The choice is the oracle's, but for rows that are worth the same to within the errors.
    const int k = std::min(head.how.budget, candidates);
    std::vector<int> order(static_cast<std::size_t>(candidates));
    for (int r = 0; r < candidates; ++r) order[static_cast<std::size_t>(r)] = r;
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return expected[static_cast<std::size_t>(a)] > expected[static_cast<std::size_t>(b)];
    });
    std::vector<int> kept(static_cast<std::size_t>(k + head.how.kept_rows), -1);
    const auto place = std::make_unique<int*>(kept.data());
    const auto count_kept = std::make_unique<int>(-1);
    KeepParams keep;
    keep.heads = &views[static_cast<std::size_t>(h)];
    keep.state = state.get();
    const auto by_scores = std::make_unique<CompressionSettings>(head.how);
    keep.compressions = by_scores.get();
    keep.scores = {own, own_votes, pitch};
    keep.kept = place.get();
    keep.counts = count_kept.get();
    test::launch(keep_select_kernel<256>, 1, 1, 256, select_shared_bytes(), keep);
    REQUIRE(*count_kept == k + head.how.kept_rows);
    for (int i = 0; i < k && k < candidates; ++i) {
      const int row = kept[static_cast<std::size_t>(i)];
      REQUIRE((row >= 0 && row < candidates));
      if (std::find(order.begin(), order.begin() + k, row) != order.begin() + k) continue;
      const double last = expected[static_cast<std::size_t>(order[static_cast<std::size_t>(k - 1)])];
      CHECK(std::abs(expected[static_cast<std::size_t>(row)] - last) <= 2 * bound);
    }
  }
  return worst;
}

// Takes its turn.
template <Element E, int HeadDim, bool Packed = false>
  requires(!test::tests_head_dim<HeadDim>)
double check(const Case&) {
  return 0;
}

CompressionSettings how(int window, int kernel = 7, bool average = false, int budget = 40) {
  return {.ranking = Ranking::attention,
          .average = average,
          .queries = window,
          .kept_rows = window,
          .budget = budget,
          .kernel = kernel};
}

template <Element E, int HeadDim>
void check_breadth() {
  for (const int window : {1, 8, 16, 33}) {
    for (const int more : {0, 1, 2, 50}) {
      check<E, HeadDim>({.heads = {{.rows = window + more, .survivors = 0, .how = how(window)}}});
    }
  }
  // Heads of one layer: other windows, kernels, poolings; one that is left alone.
  check<E, HeadDim>({.heads = {{.rows = 200, .survivors = 0, .how = how(8, 1)},
                               {.rows = 200, .survivors = 0, .how = how(16, 29, true)},
                               {.rows = 200, .survivors = 0, .how = {}},
                               {.rows = 200, .survivors = 0, .how = how(33, 7)}},
                     .group = 4,
                     .blocks = 3});
}

TEST_CASE_TEMPLATE("observed scores", E, KVPOLICY_KERNEL_ELEMENTS) {
  check_breadth<E, 64>();
  check_breadth<E, 80>();
  check_breadth<E, 96>();
  check_breadth<E, 128>();
  check_breadth<E, 256>();
}

TEST_CASE("long texts: several tiles of votes and their halos, several blocks, larger pages") {
  double worst = 0;
  for (const int blocks : {1, 2, 5}) {
    worst =
        std::max(worst, check<OtherElement, 64>({.heads = {{.rows = 1000, .survivors = 0, .how = how(8, 7)}},
                                                 .group = 4,
                                                 .blocks = blocks,
                                                 .page_rows = 128}));
    worst = std::max(
        worst, check<float16, 128>(
                   {.heads = {{.rows = 977, .survivors = 0, .how = how(33, 65, true)}}, .blocks = blocks}));
    worst =
        std::max(worst, check<float16, 80>({.heads = {{.rows = 1024 + 8, .survivors = 0, .how = how(8, 65)}},
                                            .blocks = blocks}));
    worst = std::max(worst,
                     check<OtherElement, 64>(
                         {.heads = {{.rows = 512 + 1, .survivors = 0, .how = how(1, 1)}}, .blocks = blocks}));
  }
  MESSAGE("error / largest score: " << worst);
}

TEST_CASE("the widest kernel, a wide window") {
  for (const int kernel : {67, 129, most_pooled}) {
    check<OtherElement, 64>({.heads = {{.rows = 600, .survivors = 0, .how = how(8, kernel, true)},
                                       {.rows = 600, .survivors = 0, .how = how(8, kernel)}},
                             .blocks = 2});
  }
  check<float16, 64>({.heads = {{.rows = 300, .survivors = 0, .how = how(130, 7)}}, .group = 2});
}

TEST_CASE("groups; query heads that do not fit into shared memory together") {
  check<OtherElement, 128>({.heads = {{.rows = 200, .survivors = 0, .how = how(16, 7)}}, .group = 7});
  static_assert(observe_heads_at_once<128>(7, 64) < 7);
  check<OtherElement, 128>({.heads = {{.rows = 300, .survivors = 0, .how = how(64, 7, true)},
                                      {.rows = 300, .survivors = 0, .how = how(8, 29)}},
                            .group = 7,
                            .blocks = 2});
  static_assert(observe_heads_at_once<256>(4, 64) == 1);
  check<float16, 256>({.heads = {{.rows = 150, .survivors = 0, .how = how(64, 5)}}, .group = 4});
}

TEST_CASE("TOVA: the last query ranks all rows, its own among them") {
  const auto last = [](int kept_rows) {
    return CompressionSettings{
        .ranking = Ranking::attention, .queries = 1, .kept_rows = kept_rows, .budget = 40};
  };
  for (const int rows : {1, 31, 32, 33, 64, 511, 512, 513}) {
    check<float16, 64>({.heads = {{.rows = rows, .survivors = 0, .how = last(0)}}, .group = 3, .blocks = 2});
  }
  check<OtherElement, 128>({.heads = {{.rows = 700, .survivors = 0, .how = last(0)},
                                      {.rows = 700, .survivors = 0, .how = last(5)},
                                      {.rows = 700, .survivors = 0, .how = how(8)}},
                            .blocks = 3});
}

TEST_CASE("peaked attention, softcap, sink logits") {
  const std::vector<Head> heads{{.rows = 300, .survivors = 0, .how = how(8, 7)}};
  double worst = check<float16, 128>({.heads = heads, .group = 2, .deviation = 12.0F});
  worst = std::max(worst, check<OtherElement, 64>({.heads = heads, .group = 2, .deviation = 12.0F}));
  MESSAGE("error / largest score: " << worst);
  check<OtherElement, 64>({.heads = heads, .deviation = 4.0F, .softcap = 5.0F});
  check<OtherElement, 64>({.heads = heads, .group = 2, .blocks = 2, .sinks = true});
  check<float16, 128>({.heads = heads, .group = 2, .softcap = 20.0F, .sinks = true});
}

TEST_CASE("a second compression: rows that survived the first, heads of other lengths") {
  check<OtherElement, 128>({.heads = {{.rows = 128, .survivors = 90, .how = how(8, 7)},
                                      {.rows = 99, .survivors = 91, .how = how(8, 3)},
                                      {.rows = 700, .survivors = 0, .how = how(16, 7)}},
                            .tokens = 700,
                            .group = 2,
                            .blocks = 2});
}

TEST_CASE("the largest vote in place of the mean") {
  const auto worst_case = [](CompressionSettings settings) {
    settings.votes = Votes::largest;
    return settings;
  };
  for (const int blocks : {1, 3}) {
    check<float16, 64>({.heads = {{.rows = 300, .survivors = 0, .how = worst_case(how(8, 7))},
                                  {.rows = 300, .survivors = 0, .how = worst_case(how(33, 5, true))},
                                  {.rows = 300, .survivors = 0, .how = how(8, 7)}},
                        .group = 3,
                        .blocks = blocks});
    // Query heads that are observed one after another.
    static_assert(observe_heads_at_once<128>(7, 64) < 7);
    check<OtherElement, 128>({.heads = {{.rows = 200, .survivors = 0, .how = worst_case(how(64, 3))},
                                        {.rows = 200, .survivors = 0, .how = worst_case(how(64, 7, true))}},
                              .group = 7,
                              .blocks = blocks});
  }
  check<float16, 64>(
      {.heads = {{.rows = 100, .survivors = 0, .how = worst_case(how(16, 7))}}, .group = 2, .known = 3});
  check<OtherElement, 64, true>({.heads = {{.rows = 300,
                                            .survivors = 260,
                                            .how = worst_case(how(8, 7)),
                                            .codes = Encoding::uint8,
                                            .key_group = 64}},
                                 .tokens = 500,
                                 .group = 2});
}

TEST_CASE("fewer queries are known than would vote") {
  check<float16, 64>({.heads = {{.rows = 100, .survivors = 0, .how = how(16, 7)},
                                {.rows = 100, .survivors = 0, .how = how(2, 7)}},
                      .group = 2,
                      .known = 3});
}

TEST_CASE("quantised survivors") {
  double worst = 0;
  for (const Codes& codes : all_codes) {
    const auto head = [&](int rows, int group, bool hadamard = false) {
      return Head{.rows = rows,
                  .survivors = rows - 40,
                  .how = how(8, 7),
                  .codes = codes,
                  .key_group = group,
                  .hadamard = hadamard};
    };
    for (const int blocks : {1, 2}) {
      worst = std::max(
          worst,
          check<OtherElement, 64, true>(
              {.heads = {head(300, 64, true), head(150, 32)}, .tokens = 500, .group = 2, .blocks = blocks}));
      worst = std::max(worst, check<float16, 128, true>({.heads = {head(333, 128, true), head(200, 16, true)},
                                                         .tokens = 500,
                                                         .group = 2,
                                                         .blocks = blocks}));
    }
    worst = std::max(worst,
                     check<OtherElement, 64, true>(
                         {.heads = {head(300, 64), head(150, 32)}, .tokens = 500, .group = 2, .blocks = 2}));
    worst = std::max(worst, check<float16, 128, true>(
                                {.heads = {head(333, 128), {.rows = 120, .survivors = 0, .how = how(16, 1)}},
                                 .tokens = 500,
                                 .page_rows = 128}));
  }
  MESSAGE("error / largest score: " << worst);
}

}  // namespace
