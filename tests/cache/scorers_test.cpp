// SPDX-License-Identifier: Apache-2.0
//
// Heads with a budget under every scorer, compared with a slow model of each: sets of rows in double, dense
// attention over the rows that they hold, and sums of attention. Chunks are random; there are forks and heads
// that share budgets.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/key_norm_scorer.hpp>
#include <kvpolicy/policy/tova_scorer.hpp>

#include "cache/dump.hpp"
#include "support/compare.hpp"
#include "support/memory.hpp"
#include "support/oracle.hpp"

using namespace kvpolicy;

namespace {

using E = float16;
using Full = FullCache<DenseStorage<E>>;
using Snap = HeadBudgetCache<DenseStorage<E>>;
using Tova = HeadBudgetCache<DenseStorage<E>, TovaScorer>;
using H2o = HeadBudgetCache<DenseStorage<E>, H2oScorer>;
using KeyNorm = HeadBudgetCache<DenseStorage<E>, KeyNormScorer>;
using Plan = HeadPlan<E>;
using Cache = KvCache<E>;

// The settings of a head, without the library's types.
enum class Rank { none, snapkv, tova, h2o, key_norm };
struct Spec {
  Rank rank = Rank::none;
  std::size_t budget = 0;
  std::size_t kept = 0;  // latest rows that are always kept; SnapKV's observation window
  std::size_t every = 0;
  std::optional<double> safe = {};  // set if it shares budgets in its layer
  bool waits = false;               // `every` counts from the first requested compression
};

HeadSettings<E> settings_of(const Spec& spec) {
  const auto fill = [&](auto config) {
    config.budget = spec.budget;
    config.compress_every = spec.every;
    config.after_first_compress = spec.waits;
    config.adaptive_in_layer = spec.safe.has_value();
    config.safeguard = spec.safe.value_or(0.2);
    if constexpr (requires { config.scorer.recent; }) config.scorer.recent = spec.kept;
    if constexpr (requires { config.scorer.kernel; })
      config.scorer = {.observation_window = spec.kept, .kernel = 1};
    return HeadSettings<E>{config};
  };
  switch (spec.rank) {
    case Rank::snapkv: return fill(Snap::Config{});
    case Rank::tova: return fill(Tova::Config{});
    case Rank::h2o: return fill(H2o::Config{});
    case Rank::key_norm: return fill(KeyNorm::Config{});
    case Rank::none: break;
  }
  return Full::Config{};
}

struct SlowHead {
  Spec spec;
  std::map<std::int64_t, oracle::Row> rows;
  std::map<std::int64_t, double> sums;  // attention received, mean over the query heads
  std::size_t unshared_rows = 0;        // rows that it would have without adaptive sharing
  bool was_compressed = false;
  std::vector<std::int64_t> before = {};  // candidates of the last compression
  std::vector<double> scores = {};

  [[nodiscard]] std::size_t capacity() const { return spec.budget + spec.kept; }
};

/// One layer's cache and its models.
class Twin {
 public:
  Twin(const std::vector<Spec>& specs, std::size_t group, const CacheOptions& options)
      : shape_{1, group * specs.size(), specs.size(), 64}, cache_{plan_of(shape_, specs), options} {
    for (const Spec& spec : specs) heads_.push_back({spec, {}, {}});
  }

  Cache& cache() { return cache_; }
  [[nodiscard]] std::vector<SlowHead>& heads() { return heads_; }
  [[nodiscard]] Twin fork() const { return Twin{*this, cache_.fork()}; }

  void step(test::Random& random, std::size_t tokens, bool apart, const AttendOptions& options = {}) {
    test::Tensor<E> q{tokens, shape_.q_heads, 64}, k{tokens, shape_.kv_heads, 64},
        v{tokens, shape_.kv_heads, 64};
    q.randomize(random, 2.0F);
    k.randomize(random);
    v.randomize(random);
    test::Tensor<float> out{tokens, shape_.q_heads, 64};
    if (apart) {
      cache_.append(0, std::as_const(k).view(), std::as_const(v).view());
      cache_.attend(0, std::as_const(q).view(), out.view(), options);
    } else {
      cache_.step(0, std::as_const(q).view(), std::as_const(k).view(), std::as_const(v).view(), out.view(),
                  options);
    }
    const auto first = static_cast<std::int64_t>(tokens_);
    tokens_ += tokens;
    double error = 0;
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      SlowHead& head = heads_[h];
      for (std::size_t i = 0; i < tokens; ++i) {
        const std::int64_t p = first + static_cast<std::int64_t>(i);
        head.rows[p] = {p, k.row_of_doubles(i, h), v.row_of_doubles(i, h)};
        head.sums[p] = 0;
      }
      head.unshared_rows += tokens;
      for (std::size_t i = 0; i < tokens; ++i) {
        const auto paid = attention(head, h, q, i, first + static_cast<std::int64_t>(i), options, out, error);
        for (const auto& [p, share] : paid) head.sums[p] += share;
      }
    }
    CHECK(error <= 2e-4);
    queries_.push_back({q, first});
    options_ = options;
    follow(/*requested=*/false);
  }

  void compress() {
    cache_.compress();
    follow(/*requested=*/true);
  }

  void check() {
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      CAPTURE(h);
      std::vector<std::int64_t> expected;
      for (const auto& [p, row] : heads_[h].rows) expected.push_back(p);
      CHECK(held(h) == expected);
      if (cache_.plan().has<H2o>(0, h)) {
        std::vector<double> sums;
        for (const auto& [p, sum] : heads_[h].sums) sums.push_back(sum);
        CHECK(test::largest_difference(sums, cache_.policy<H2o>(0, h).accumulated()) <= 1e-3);
      }
    }
  }

 private:
  Twin(const Twin& other, Cache cache)
      : shape_{other.shape_},
        cache_{std::move(cache)},
        heads_{other.heads_},
        queries_{other.queries_},
        options_{other.options_},
        tokens_{other.tokens_} {}

  static Plan plan_of(const ModelShape& shape, const std::vector<Spec>& specs) {
    Plan plan{shape};
    for (std::size_t h = 0; h < specs.size(); ++h) plan.set(0, h, settings_of(specs[h]));
    return plan;
  }

  using Shares = std::map<std::int64_t, double>;

  [[nodiscard]] oracle::Options oracle_options(const AttendOptions& options, std::size_t q_head) const {
    oracle::Options own;
    own.scale = options.scale ? static_cast<double>(*options.scale) : 0.125;
    own.softcap = static_cast<double>(options.softcap);
    if (!options.attention_sink_bias.empty())
      own.sink_logit = static_cast<double>(options.attention_sink_bias[q_head]);
    return own;
  }

  // The attention of query `i` at position `t` to each row, mean over the query heads; checks the output.
  Shares attention(const SlowHead& head, std::size_t h, const test::Tensor<E>& q, std::size_t i,
                   std::int64_t t, const AttendOptions& options, const test::Tensor<float>& out,
                   double& error) const {
    std::vector<const oracle::Row*> visible;
    for (const auto& [p, row] : head.rows) {
      if (p <= t) visible.push_back(&row);
    }
    Shares paid;
    for (std::size_t g = 0; g < shape_.queries_per_kv(); ++g) {
      const std::size_t q_head = h * shape_.queries_per_kv() + g;
      const auto query = q.row_of_doubles(i, q_head);
      const auto own = oracle_options(options, q_head);
      const auto result = oracle::attend(query, visible, own);
      const double one = test::largest_difference(result.out, out.row(i, q_head));
      error = !(one <= error) ? one : error;
      const auto shares = oracle::probabilities(query, visible, own);
      for (std::size_t r = 0; r < visible.size(); ++r) {
        paid[visible[r]->position] += shares[r] / static_cast<double>(shape_.queries_per_kv());
      }
    }
    return paid;
  }

  [[nodiscard]] std::vector<std::int64_t> held(std::size_t h) const {
    std::vector<std::int64_t> positions;
    SegmentList list;
    cache_.head(0, h).show({}, list);
    for (const Segment& segment : list) {
      for (std::size_t i = 0; i < segment.rows; ++i) positions.push_back(segment.position_of(i));
    }
    return positions;
  }

  void score(std::size_t h) {
    SlowHead& head = heads_[h];
    head.before.clear();
    head.scores.clear();
    for (const auto& [p, row] : head.rows) head.before.push_back(p);
    head.before.resize(head.before.size() - std::min(head.before.size(), head.spec.kept));
    // SnapKV computes the attention of its observation window again, over the rows that are held now.
    Shares window;
    if (head.spec.rank == Rank::snapkv || head.spec.rank == Rank::tova) {
      const std::size_t wanted = head.spec.rank == Rank::tova ? 1 : std::min(head.spec.kept, tokens_);
      for (std::size_t back = 0; back < wanted; ++back) {
        const auto t = static_cast<std::int64_t>(tokens_ - 1 - back);
        for (const auto& [q, first] : queries_) {
          const std::int64_t i = t - first;
          if (i < 0 || i >= static_cast<std::int64_t>(q.tokens())) continue;
          double unused = std::numeric_limits<double>::infinity();
          const test::Tensor<float> none{q.tokens(), shape_.q_heads, 64};
          for (const auto& [p, share] :
               attention(head, h, q, static_cast<std::size_t>(i), t, options_, none, unused)) {
            window[p] += share / static_cast<double>(wanted);
          }
        }
      }
    }
    for (const std::int64_t p : head.before) {
      double squares = 0;
      for (const double x : head.rows[p].key) squares += x * x;
      head.scores.push_back(head.spec.rank == Rank::key_norm ? -std::sqrt(squares)
                            : head.spec.rank == Rank::h2o    ? head.sums[p]
                                                             : window[p]);
    }
  }

  // Checks that the cache compressed exactly when it should and kept the best rows, and copies its choice.
  void follow(bool requested) {
    const auto is_due = [&](const SlowHead& head) {
      return head.spec.rank != Rank::none &&
             (requested || (head.spec.every > 0 && (head.was_compressed || !head.spec.waits) &&
                            head.unshared_rows >= head.capacity() + head.spec.every));
    };
    // Heads that share budgets form one pool; any other head is a pool of its own.
    std::vector<std::vector<std::size_t>> pools;
    std::vector<std::size_t> sharing;
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      heads_[h].spec.safe ? sharing.push_back(h) : pools.push_back({h});
    }
    pools.push_back(sharing);
    for (const auto& pool : pools) {
      bool due = false, over = false;
      for (const std::size_t h : pool) {
        due = due || is_due(heads_[h]);
        over = over || (is_due(heads_[h]) && heads_[h].unshared_rows > heads_[h].capacity());
      }
      if (due && requested) {
        over =
            std::ranges::any_of(pool, [&](auto h) { return heads_[h].unshared_rows > heads_[h].capacity(); });
      }
      if (due && over) follow_pool(pool);
      for (const std::size_t h : pool) {
        heads_[h].was_compressed = heads_[h].was_compressed || requested;
        if (due) heads_[h].unshared_rows = std::min(heads_[h].unshared_rows, heads_[h].capacity());
      }
    }
    check();
  }

  void follow_pool(const std::vector<std::size_t>& pool) {
    constexpr double slack = 2e-4;
    std::size_t wanted = 0, chosen = 0;
    double lowest_in = std::numeric_limits<double>::infinity();
    double highest_out = -lowest_in;
    for (const std::size_t h : pool) {
      SlowHead& head = heads_[h];
      score(h);
      const auto survivors = held(h);
      const std::set<std::int64_t> in(survivors.begin(), survivors.end());
      REQUIRE(in.size() == survivors.size());
      wanted += std::min(head.spec.budget, head.unshared_rows - std::min(head.unshared_rows, head.spec.kept));
      for (const auto& [p, row] : head.rows) {  // the latest rows are kept
        const bool ranked = std::ranges::binary_search(head.before, p);
        if (!ranked) CHECK(in.contains(p));
      }
      std::vector<double> best;
      double own_out = -std::numeric_limits<double>::infinity();
      for (std::size_t i = 0; i < head.before.size(); ++i) {
        if (in.contains(head.before[i])) {
          best.push_back(head.scores[i]);
        } else {
          own_out = std::max(own_out, head.scores[i]);
        }
      }
      chosen += best.size();
      std::ranges::sort(best);
      const auto safe = std::min(
          head.before.size(),
          static_cast<std::size_t>(head.spec.safe.value_or(0) * static_cast<double>(head.spec.budget)));
      CHECK(best.size() >= safe);
      if (!best.empty()) CHECK(best.front() >= own_out - slack);
      if (best.size() > safe) lowest_in = std::min(lowest_in, best.front());
      highest_out = std::max(highest_out, own_out);
      for (const auto& [p, row] : std::map{head.rows}) {
        if (in.contains(p)) continue;
        head.rows.erase(p);
        head.sums.erase(p);
      }
    }
    CHECK(chosen == wanted);
    CHECK(lowest_in >= highest_out - slack);
  }

  ModelShape shape_;
  Cache cache_;
  std::vector<SlowHead> heads_;
  std::vector<std::pair<test::Tensor<E>, std::int64_t>> queries_;
  AttendOptions options_;
  std::size_t tokens_ = 0;
};

const std::vector<Spec> apart{
    {Rank::tova, 20, 0, 1},
    {Rank::tova, 1, 0, 5},
    {Rank::h2o, 10, 10, 1},
    {Rank::h2o, 0, 7, 1},
    {Rank::h2o, 33, 0, 4},
    {Rank::h2o, 24, 8, 0},
    {Rank::key_norm, 16, 4, 1},
    {Rank::key_norm, 31, 0, 0},
    {Rank::tova, 20, 0, 1, {}, true},
    {Rank::h2o, 9, 9, 2, {}, true},
    {Rank::snapkv, 12, 5, 0},
    {Rank::snapkv, 12, 3, 3},
    {},
    {Rank::tova, 15, 0, 0},
};

}  // namespace

TEST_CASE("scorers: random chunks, calls in halves, forks") {
  for (const std::size_t group : std::vector<std::size_t>{1, 3}) {
    test::Random random{group};
    test::CountingResource memory;
    std::vector<float> sinks;
    for (std::size_t h = 0; h < group * apart.size(); ++h)
      sinks.push_back(0.2F * static_cast<float>(h) - 1.0F);
    for (const AttendOptions& options :
         {AttendOptions{}, AttendOptions{.scale = 0.2F, .softcap = 4.0F, .attention_sink_bias = sinks}}) {
      std::vector<Twin> twins;
      twins.emplace_back(apart, group, CacheOptions{.max_append = 9, .page_rows = 16, .memory = &memory});
      for (int call = 0; call < 40; ++call) {
        CAPTURE(call);
        Twin& twin = twins[test::below(random, twins.size())];
        std::size_t tokens = test::one_of(random, std::vector<std::size_t>{1, 1, 1, 2, 3, 8, 17});
        if (call == 3) tokens = 65;
        const bool halves = test::below(random, 3) == 0 && tokens <= 9;
        twin.step(random, tokens, halves, options);
        if (call % 9 == 8) twin.compress();
        if (call == 12) twins.push_back(twins[0].fork());
      }
      for (Twin& twin : twins) twin.check();
    }
    CHECK(memory.live_bytes() == 0);
    CHECK(memory.faults() == 0);
  }
}

TEST_CASE("scorers: one row at a time, from the first token") {
  for (const std::size_t budget : std::vector<std::size_t>{0, 1, 2, 15, 16, 17}) {
    const std::vector<Spec> specs{{Rank::tova, budget, 0, 1},
                                  {Rank::h2o, budget, 1, 1},
                                  {Rank::h2o, budget, budget, 1},
                                  {Rank::key_norm, budget, 0, 1}};
    Twin twin{specs, 2, {.page_rows = 16}};
    test::Random random{budget + 1};
    for (int token = 0; token < 40; ++token) twin.step(random, 1, token % 2 == 1);
    twin.compress();
  }
}

TEST_CASE("sharing: the heads of a layer compete for rows, and keep in all as many as without sharing") {
  for (const double safe : {0.0, 0.2, 1.0}) {
    for (const Rank rank : {Rank::snapkv, Rank::tova, Rank::h2o, Rank::key_norm}) {
      for (const std::size_t every : std::vector<std::size_t>{0, 1, 6}) {
        CAPTURE(safe);
        CAPTURE(static_cast<int>(rank));
        CAPTURE(every);
        const std::size_t kept = rank == Rank::tova ? 0 : 4;
        std::vector<Spec> specs;
        for (const std::size_t budget : std::vector<std::size_t>{20, 0, 7, 20, 60})
          specs.push_back({rank, budget, kept, every, safe});
        specs.push_back({});
        specs.push_back({rank, 11, kept, every});  // does not share
        test::Random random{static_cast<std::uint64_t>(every) + 7};
        Twin twin{specs, 2, {.page_rows = 16}};
        twin.step(random, 40, false);
        twin.compress();
        for (const std::size_t tokens : std::vector<std::size_t>{1, 1, 2, 5, 1, 12, 1, 1, 20}) {
          twin.step(random, tokens, false);
          if (tokens > 1) twin.compress();
        }
        std::size_t rows = 0;
        for (std::size_t h = 0; h < 5; ++h) rows += twin.heads()[h].rows.size();
        CHECK(rows == 107 + 5 * kept);
        twin.compress();  // there is nothing left to drop
        Twin other = twin.fork();
        other.step(random, 17, false);
        other.compress();
      }
    }
  }
}

TEST_CASE("share_rows by hand: safe rows first, ties to the lower head, then the lower row") {
  using Chosen = std::vector<std::vector<std::size_t>>;
  const auto head = [](const std::vector<float>& scores, std::size_t rows, std::size_t safeguard) {
    SharingHead one{.ranks = {}, .rows = rows, .safeguard = safeguard};
    for (const float score : scores) one.ranks.push_back(rank_of(score, 0.0F));
    return one;
  };
  const std::vector<SharingHead> heads{head({1, 5, 3}, 2, 1), head({4, 4, 4, 4}, 2, 1), head({0, 0}, 1, 1)};
  CHECK(share_rows(heads) == Chosen{{1}, {0, 1, 2}, {0}});
  const std::vector<SharingHead> tied{head({2, 2}, 1, 0), head({2, 2, 2}, 2, 0)};
  CHECK(share_rows(tied) == Chosen{{0, 1}, {0}});
  constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
  const std::vector<SharingHead> odd{head({not_a_number, -9}, 1, 0), head({}, 0, 3),
                                     head({-10, not_a_number}, 1, 0)};
  CHECK(share_rows(odd) == Chosen{{1}, {}, {0}});
  CHECK(share_rows({}).empty());
}

TEST_CASE("scorers: scorers that cannot be rolled back or shared are refused") {
  const ModelShape shape{1, 2, 2, 64};
  CHECK(test::contains(
      test::thrown<ConfigError>([&] { Cache{Plan{shape, H2o::Config{}}, {.max_rollback = 1}}; }),
      "KV head 0 of layer 0 adds up attention"));
  CHECK(test::thrown<ConfigError>([&] { Cache{Plan{shape, H2o::Config{}}}; }).empty());
  CHECK(test::thrown<ConfigError>([&] {
          Cache{Plan{shape, Tova::Config{.budget = 3}}, {.max_rollback = 1}};
        }).empty());
  Plan plan{shape, Snap::Config{.budget = 9, .adaptive_in_layer = true}};
  plan.set(0, 1, Snap::Config{.budget = 5, .adaptive_in_layer = true});
  CHECK(test::thrown<ConfigError>([&] { Cache{plan}; }).empty());
  for (const HeadSettings<E>& other :
       {HeadSettings<E>{Snap::Config{.budget = 9, .adaptive_in_layer = true, .safeguard = 0.5}},
        HeadSettings<E>{
            Snap::Config{.budget = 9, .adaptive_in_layer = true, .scorer = {.observation_window = 4}}},
        HeadSettings<E>{KeyNorm::Config{.budget = 9, .adaptive_in_layer = true}}}) {
    plan.set(0, 1, other);
    CHECK(test::contains(test::thrown<ConfigError>([&] { Cache{plan}; }), "KV head 1 of layer 0 shares"));
  }
  for (const double share : {-0.1, 1.1, std::nan("")}) {
    CHECK(test::contains(test::thrown<ConfigError>([&] { Plan{shape, Snap::Config{.safeguard = share}}; }),
                         "HeadBudgetCache: safeguard is "));
  }
}

TEST_CASE("scorers: only those that use attention read keys again, and these reads are counted") {
  const auto observed = [](const Spec& spec, std::size_t prompt, std::size_t tokens) {
    Twin twin{{spec}, 2, {}};
    test::Random random{1};
    twin.step(random, prompt, false);
    for (std::size_t i = 0; i < tokens; ++i) twin.step(random, 1, false);
    return twin.cache().observed_rows();
  };
  CHECK(observed({}, 20, 3) == 0);
  CHECK(observed({Rank::key_norm, 8, 0, 1}, 20, 3) == 0);
  CHECK(observed({Rank::snapkv, 8, 2, 0}, 20, 3) == 0);
  CHECK(observed({Rank::tova, 8, 0, 1}, 20, 3) == 20 + 3 * 9);
  CHECK(observed({Rank::h2o, 4, 4, 1}, 20, 3) == 20 + 3 * 9);
  CHECK(observed({Rank::h2o, 50, 0, 1}, 20, 3) == 20 + 21 + 22 + 23);
}

TEST_CASE("fork_as: sums of attention are copied where they exist, and required where not") {
  const ModelShape shape{2, 2, 2, 64};
  const Plan target{shape, H2o::Config{.budget = 8, .compress_every = 1, .scorer = {.recent = 4}}};
  Cache collecting{Plan{shape, H2o::Config{.budget = 1000}}, {.kept_queries = 2}};
  Cache plain{Plan{shape}, {.kept_queries = 2}};
  Cache direct{target, {.kept_queries = 2}};
  test::Random random{4};
  for (std::size_t l = 0; l < 2; ++l) {
    test::Chunk<E> chunk{random, shape, 50};
    for (Cache* cache : {&collecting, &plain, &direct}) chunk.step(*cache, l);
  }
  Cache forked = collecting.fork_as(target);
  CHECK(test::dump(forked) == test::dump(direct));
  CHECK(forked.policy<H2o>(1, 1).rows() == 12);
  CHECK(test::contains(test::thrown<ConfigError>([&] { (void)plain.fork_as(target); }),
                       "KV head 0 of layer 0 has not added up the attention"));
  for (std::size_t l = 0; l < 2; ++l) {
    test::Chunk<E> chunk{random, shape, 3};
    chunk.step(forked, l);
    chunk.step(direct, l);
  }
  CHECK(test::dump(forked) == test::dump(direct));
  // TOVA compresses as soon as the fork is made; a head that adds up attention gives its rows to any other.
  const Plan tova{shape, Tova::Config{.budget = 8, .compress_every = 1}};
  CHECK(plain.fork_as(tova).policy<Tova>(0, 1).rows() == 8);
  CHECK(test::dump(collecting.fork_as(tova)) == test::dump(plain.fork_as(tova)));
}

TEST_CASE("a failed call adds no attention to the sums") {
  test::CountingResource memory;
  const ModelShape shape{1, 2, 1, 64};
  Cache cache{Plan{shape, H2o::Config{.budget = 40, .compress_every = 1, .scorer = {.recent = 8}}},
              {.max_append = 20, .page_rows = 16, .memory = &memory}};
  test::Random random{4};
  test::Chunk<E> first{random, shape, 16}, next{random, shape, 20};
  first.step(cache, 0);
  const auto sums = [&] {
    const auto all = cache.policy<H2o>(0, 0).accumulated();
    return std::vector<double>(all.begin(), all.end());
  };
  const auto before = sums();
  memory.fail_after(0);
  CHECK_THROWS_AS(next.step(cache, 0), std::bad_alloc);
  CHECK(test::same_bits(sums(), before));
  memory.fail_after(test::never);
  next.append(cache, 0);
  memory.fail_after(0);
  CHECK_THROWS_AS(next.attend(cache, 0), std::bad_alloc);
  CHECK(test::same_bits(sums(), before));
  CHECK(cache.commit_point() == 16);
  memory.fail_after(test::never);
  next.attend(cache, 0);
  CHECK(sums().size() == 36);
  CHECK(cache.commit_point() == 36);
}
