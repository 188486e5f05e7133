// SPDX-License-Identifier: Apache-2.0
//
// Several texts over ranks: in one step, of any number of tokens each; forks; heads of every kind, whole and cut; and
// speculative decoding. All are compared with one process.
#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <new>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/shards.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <kvpolicy/triforce.hpp>
#include <reference_model/language_model.hpp>
#include <reference_model/parallel/parallel_llama.hpp>
#include <reference_model/parallel/rank_cache.hpp>

#include "model/golden.hpp"
#include "parallel/thread_ranks.hpp"
#include "support/compare.hpp"
#include "support/repeats.hpp"

namespace kvpolicy::reference::many_texts_test {

using Dense = DenseStorage<float>;
using Window = SinkRecentCache<Dense>::Config;
using Budget = HeadBudgetCache<Dense>::Config;
using Chunks = ChunkRetrievalCache<Dense>::Config;
using Quantized = QuantizedResidualCache<float, Granularity::per_token>::Config;
using RankReader = ModelReader<ParallelLlama>;
using Logits = std::vector<float>;
using test::contains;

Llama load(const std::string& name) {
  return Llama::load(golden_folder(name), {.weights = WeightFormat::float32});
}

void require_nothing_thrown(const std::vector<std::exception_ptr>& thrown) {
  for (const std::exception_ptr& one : thrown) {
    if (one) std::rethrow_exception(one);
  }
}
std::string message_of(const std::exception_ptr& thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

// What each rank says, which must be the same bits on all.
template <class Say>
std::vector<Logits> say_over_ranks(const Llama& model, const Shards& shards, Say say) {
  std::vector<std::vector<Logits>> found(shards.ranks());
  require_nothing_thrown(test::run_ranks(shards.ranks(), [&](Communicator& ranks) {
    const ParallelLlama own{model, shards, ranks};
    found[ranks.rank()] = say(own, ranks);
  }));
  for (const auto& other : found) {
    REQUIRE(other.size() == found[0].size());
    for (std::size_t i = 0; i < other.size(); ++i) REQUIRE(test::same_bits(other[i], found[0][i]));
  }
  return found[0];
}
void check_near(const std::vector<Logits>& found, const std::vector<Logits>& expected,
                float tolerance = logit_tolerance) {
  REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    CAPTURE(i);
    REQUIRE(found[i].size() == expected[i].size());
    CHECK(largest_error(found[i], expected[i]) <= tolerance);
  }
}

// Three texts: parts of prompts of several lengths beside single tokens, read together; the second is forked half-way.
template <class Reader, class Cache>
std::vector<Logits> ragged(const Reader& reader, std::vector<Cache>& caches, std::span<const int> tokens,
                           bool each) {
  std::vector<Logits> all;
  const auto read = [&](std::vector<std::array<std::size_t, 3>> parts) {  // cache, first token, how many
    std::vector<BatchCall<Cache>> calls;
    for (const auto& [cache, first, count] : parts) {
      calls.push_back({&caches[cache], {tokens.subspan(first, count), LogitsOf::all}});
    }
    if (each) {
      for (BatchedRead& one : reader.read_each(std::span<const BatchCall<Cache>>{calls})) {
        REQUIRE(one.error == nullptr);
        all.push_back(std::move(one.logits));
      }
    } else {
      for (Logits& one : reader.read_batch(std::span<const BatchCall<Cache>>{calls}))
        all.push_back(std::move(one));
    }
  };
  read({{0, 0, 40}, {1, 3, 1}, {2, 10, 7}});
  read({{2, 17, 1}, {0, 40, 1}});
  read({{1, 4, 33}, {2, 18, 20}, {0, 41, 2}});
  caches.push_back(caches[1].fork());
  read({{3, 60, 5}, {1, 90, 1}, {0, 43, 16}});
  read({{1, 91, 1}, {3, 65, 1}});
  return all;
}

TEST_CASE("several texts in a step, and forks, of every golden checkpoint") {
  for (std::size_t number = 0; number < test::repeats(golden_names.size()); ++number) {
    const std::string name = golden_names[number];
    CAPTURE(name);
    const Llama model = load(name);
    const Golden golden = load_golden(name);
    HeadPlan<float> plan{model.config().shape()};
    plan.set(0, 0, Window{.sinks = 4, .recent = 20});
    limit_windows(plan, model.config());
    for (const bool each : {true, false}) {
      CAPTURE(each);
      std::vector<KvCache<float>> caches;
      for (int i = 0; i < 3; ++i) caches.emplace_back(plan);
      const auto expected = ragged(LlamaReader{model}, caches, golden.tokens, each);
      const Shards cut = balance(plan, 1000, {.ranks = 3});
      const Shards whole = balance(plan, 1000, {.ranks = 2, .cut_rows = false});
      for (const Shards& shards : {cut, whole}) {
        check_near(say_over_ranks(model, shards,
                                  [&](const ParallelLlama& own, Communicator& them) {
                                    std::vector<RankCache<float>> rows;
                                    for (int i = 0; i < 3; ++i) rows.emplace_back(plan, shards, them);
                                    return ragged(RankReader{own}, rows, golden.tokens, each);
                                  }),
                   expected);
      }
      // Whole heads are also a KvCache's.
      if (!each) continue;
      check_near(say_over_ranks(model, whole,
                                [&](const ParallelLlama& own, Communicator& them) {
                                  const auto part = plan_of_rank(plan, whole, them.rank());
                                  std::vector<KvCache<float>> rows;
                                  for (int i = 0; i < 3; ++i) rows.emplace_back(part);
                                  return ragged(RankReader{own}, rows, golden.tokens, true);
                                }),
                 expected);
    }
  }
}

// A prompt, a compression where heads have budgets, and single tokens that read what is selected.
template <class Reader, class Cache>
std::vector<Logits> prompt_and_more(const Reader& reader, Cache& cache, std::span<const int> tokens) {
  std::vector<Logits> all{reader.read(cache, {tokens.first(100), LogitsOf::all})};
  cache.compress();
  for (std::size_t i = 100; i < 112; ++i) {
    all.push_back(reader.read(
        cache, {tokens.subspan(i, 1), LogitsOf::last, {.read = Read::selected, .refresh_selection = true}}));
  }
  return all;
}

TEST_CASE("whole heads of every kind") {
  const Llama model = load("mha_d64");
  const Golden golden = load_golden("mha_d64");
  const ModelShape shape = model.config().shape();
  const std::vector<HeadSettings<float>> kinds{Window{.sinks = 4, .recent = 20}, Budget{.budget = 40},
                                               Chunks{.chunk = 8, .budget = 32}, [] {
                                                 Quantized config;
                                                 config.storage.bits = 8;
                                                 config.storage.residual = 16;
                                                 return config;
                                               }()};
  std::vector<HeadPlan<float>> plans;
  for (const auto& kind : kinds) plans.emplace_back(shape, kind);
  HeadPlan<float> mixed{shape};
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      if ((layer + head) % 5 < kinds.size()) mixed.set(layer, head, kinds[(layer + head) % 5]);
    }
  }
  plans.push_back(mixed);
  constexpr std::size_t quantized = 3;
  float code_error = 0;
  for (std::size_t p = 0; p < plans.size(); ++p) {
    CAPTURE(p);
    const HeadPlan<float>& plan = plans[p];
    KvCache<float> cache{plan};
    const auto expected = prompt_and_more(LlamaReader{model}, cache, golden.tokens);
    // Rounding may move a number of a row that is quantised to the next code. That changes a logit by no more than what
    // quantising all heads does.
    if (p == quantized) {
      const std::span<const float> exact = std::span{golden.logits}.subspan(100 * model.config().vocabulary);
      for (std::size_t i = 1; i < expected.size(); ++i) {
        const auto row = exact.subspan((i - 1) * expected[i].size(), expected[i].size());
        code_error = std::max(code_error, largest_error(expected[i], {row.begin(), row.end()}));
      }
      CHECK(code_error < 0.1F);
    }
    const float tolerance = logit_tolerance + (p >= quantized ? code_error : 0.0F);
    // In the mixed plan full heads, the dearest, may be cut beside all the others.
    for (const bool cut_rows : {false, true}) {
      const Shards shards = balance(plan, 1000, {.ranks = 3, .cut_rows = cut_rows && p + 1 == plans.size()});
      check_near(say_over_ranks(model, shards,
                                [&](const ParallelLlama& own, Communicator& ranks) {
                                  RankCache<float> rows{plan, shards, ranks};
                                  return prompt_and_more(RankReader{own}, rows, golden.tokens);
                                }),
                 expected, tolerance);
    }
  }
}

TEST_CASE("cut heads that quantise are as near to exact rows as whole ones") {
  const Llama model = load("mha_d64");
  const Golden golden = load_golden("mha_d64");
  Quantized config;
  config.storage.bits = 8;
  config.storage.residual = 16;
  const HeadPlan<float> plan{model.config().shape(), config};
  const auto errors = [&](const Logits& logits) {
    double sum = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double error = static_cast<double>(logits[i]) - static_cast<double>(golden.logits[i]);
      sum += error * error;
    }
    return sum;
  };
  const auto in_chunks = [&](const auto& reader, auto& cache) {
    Logits all;
    for (std::size_t first = 0; first < golden.tokens.size(); first += 10) {
      const std::size_t count = std::min<std::size_t>(10, golden.tokens.size() - first);
      const auto some = reader.read(cache, {std::span{golden.tokens}.subspan(first, count), LogitsOf::all});
      all.insert(all.end(), some.begin(), some.end());
    }
    return std::vector<Logits>{all};
  };
  KvCache<float> cache{plan};
  const double whole = errors(in_chunks(LlamaReader{model}, cache)[0]);
  CHECK(whole > 0);
  const Shards shards = balance(plan, 1000, {.ranks = 3});
  CHECK(!shards.merges(0).empty());
  const auto cut = say_over_ranks(model, shards, [&](const ParallelLlama& own, Communicator& ranks) {
    RankCache<float> rows{plan, shards, ranks};
    return in_chunks(RankReader{own}, rows);
  });
  // Parts keep more rows exact, so their errors are no larger; none would be lost if they did not quantise at all.
  CHECK(errors(cut[0]) > 0);
  CHECK(errors(cut[0]) <= whole);
}

// Greedy tokens after a prompt, by speculation.
template <class Decoder>
std::vector<int> decoded(Decoder& decoder, std::span<const int> prompt) {
  decoder.read_prompt(prompt);
  decoder.generate(40);
  const std::span<const int> text = decoder.text();
  return {text.begin(), text.end()};
}

TEST_CASE("speculative decoding writes what one process writes") {
  const Llama model = load("mha_d64");
  const Llama small = load("tied_d64");
  REQUIRE(small.config().vocabulary == model.config().vocabulary);
  const Golden golden = load_golden("mha_d64");
  const std::span<const int> prompt = std::span{golden.tokens}.first(60);
  const CacheOptions options{.max_rollback = 24, .max_append = 24};
  for (const float temperature : {0.0F, 1.0F}) {
    CAPTURE(temperature);
    // Lengths that are chosen by measured times would differ from rank to rank.
    const SpeculationOptions fixed{
        .sampling = {.temperature = temperature}, .seed = 5, .length = 5, .adapt = false};
    HeadPlan<float> plan{model.config().shape(), Chunks{.chunk = 8, .budget = 32}};
    for (std::size_t layer = 0; layer < plan.shape().layers; ++layer)
      plan.set(layer, 1, FullCache<Dense>::Config{});
    LlamaReader one{model};
    KvCache<float> whole{plan, options};
    SpeculativeDecoder alone{
        one, whole, NoDraft{},
        SpeculationOptions{.sampling = fixed.sampling, .seed = 5, .length = 0, .adapt = false}};
    const std::vector<int> expected = decoded(alone, prompt);
    std::vector<std::vector<int>> found(3);
    std::size_t accepted = 0;
    const Shards shards = balance(plan, 1000, {.ranks = 3});
    CHECK(!shards.merges(0).empty());
    require_nothing_thrown(test::run_ranks(3, [&](Communicator& ranks) {
      const ParallelLlama own{model, shards, ranks};
      RankReader target{own};
      RankCache<float> rows{plan, shards, ranks, options};
      LlamaReader reader{small};
      KvCache<float> small_rows{triforce_draft_plan(small.config().shape(), {.sinks = 4, .recent = 20}),
                                options};
      auto decoder = triforce(target, rows, reader, small_rows, fixed);
      found[ranks.rank()] = decoded(decoder, prompt);
      if (ranks.rank() == 0) accepted = decoder.statistics().accepted;
    }));
    CHECK(accepted > 0);
    CHECK(found[1] == found[0]);
    CHECK(found[2] == found[0]);
    // Samples of speculation have the same distribution and are other tokens.
    if (temperature == 0.0F) CHECK(found[0] == expected);
    CHECK(found[0].size() == expected.size());
  }
}

TEST_CASE("guesses of n-grams over every golden checkpoint write what one process writes without guesses") {
  std::size_t cut = 0;
  std::size_t accepted = 0;
  for (std::size_t number = 0; number < test::repeats(golden_names.size()); ++number) {
    const std::string name = golden_names[number];
    CAPTURE(name);
    const Llama model = load(name);
    const Golden golden = load_golden(name);
    const std::span<const int> prompt = std::span{golden.tokens}.first(60);
    HeadPlan<float> plan{model.config().shape()};
    limit_windows(plan, model.config());
    const CacheOptions options{.max_rollback = 8};
    LlamaReader one{model};
    KvCache<float> whole{plan, options};
    SpeculativeDecoder alone{one, whole, NoDraft{}, SpeculationOptions{.length = 0, .adapt = false}};
    const std::vector<int> expected = decoded(alone, prompt);
    const Shards shards = balance(plan, 1000, {.ranks = 3});
    for (std::size_t layer = 0; layer < shards.layers(); ++layer) cut += shards.merges(layer).size();
    std::vector<std::vector<int>> found(3);
    require_nothing_thrown(test::run_ranks(3, [&](Communicator& ranks) {
      const ParallelLlama own{model, shards, ranks};
      RankReader target{own};
      RankCache<float> rows{plan, shards, ranks, options};
      SpeculativeDecoder decoder{target, rows, NgramDraft{}, SpeculationOptions{.length = 4, .adapt = false}};
      found[ranks.rank()] = decoded(decoder, prompt);
      if (ranks.rank() == 0) accepted += decoder.statistics().accepted;
    }));
    for (const std::vector<int>& text : found) CHECK(text == expected);
  }
  CHECK(cut > 0);
  CHECK(accepted > 0);
}

TEST_CASE("trees of draft tokens are read over whole heads") {
  const Llama model = load("gqa2_d80");
  const Golden golden = load_golden("gqa2_d80");
  const HeadPlan<float> plan{model.config().shape()};
  const CacheOptions options{.max_rollback = 8};
  const std::array<std::size_t, 4> parents{TokenTree::text, 0, 0, 2};
  const TokenTree tree{parents};
  const auto branch = [&](const auto& reader, auto& cache) {
    std::vector<Logits> all{reader.read(cache, {std::span{golden.tokens}.first(50)})};
    ModelCall call{std::span{golden.tokens}.subspan(50, 4), LogitsOf::all};
    call.attend.tree = &tree;
    all.push_back(reader.read(cache, call));
    CHECK(cache.tokens() == 54);
    CHECK_THROWS_AS(cache.commit(), RollbackError);
    cache.accept(std::array<std::size_t, 3>{0, 2, 3});
    CHECK(cache.tokens() == 53);
    all.push_back(reader.read(cache, {std::span{golden.tokens}.subspan(54, 2), LogitsOf::all}));
    call.attend.tree = &tree;
    all.push_back(reader.read(cache, call));
    cache.truncate(55);
    all.push_back(reader.read(cache, {std::span{golden.tokens}.subspan(60, 2), LogitsOf::all}));
    return all;
  };
  KvCache<float> cache{plan, options};
  const auto expected = branch(LlamaReader{model}, cache);
  for (const std::size_t ranks : {2U, 4U}) {  // with four, layers leave ranks without a head
    const Shards shards = balance(plan, 1000, {.ranks = ranks, .cut_rows = false});
    check_near(say_over_ranks(model, shards,
                              [&](const ParallelLlama& own, Communicator& them) {
                                RankCache<float> rows{plan, shards, them, options};
                                return branch(RankReader{own}, rows);
                              }),
               expected);
  }
  const Shards cut = balance(plan, 1000, {.ranks = 3});
  REQUIRE(!cut.merges(0).empty());
  for (const std::exception_ptr& one : test::run_ranks(3, [&](Communicator& ranks) {
         const ParallelLlama own{model, cut, ranks};
         RankCache<float> rows{plan, cut, ranks, options};
         static_cast<void>(branch(RankReader{own}, rows));
       })) {
    CHECK(contains(message_of(one), "a tree of draft tokens needs whole heads"));
  }
}

TEST_CASE("ranks that disagree about tokens, and errors of one rank, end on all") {
  const Llama model = load("gqa2_d80");
  const HeadPlan<float> plan{model.config().shape()};
  const Shards shards = balance(plan, 1000, {.ranks = 3});
  REQUIRE(!shards.merges(0).empty());
  const std::vector<int> tokens(10, 1);
  for (const std::exception_ptr& one : test::run_ranks(3, [&](Communicator& ranks) {
         const ParallelLlama own{model, shards, ranks};
         RankCache<float> rows{plan, shards, ranks};
         const RankReader reader{own};
         static_cast<void>(reader.read(rows, {tokens}));
         const int token = ranks.rank() == 2 ? 7 : 8;
         try {
           static_cast<void>(reader.read(rows, {std::span{&token, 1}}));
         } catch (...) {
           CHECK(rows.tokens() == 10);
           throw;
         }
       })) {
    CHECK(contains(message_of(one), "ranks do not have the same tokens: rank 0 has another than rank 2"));
  }
  // What fails on one rank in the middle of a pass, and the text goes on after it.
  const auto golden = load_golden("gqa2_d80");
  KvCache<float> whole{plan, {.max_rollback = 16}};
  const std::vector<Logits> expected{LlamaReader{model}.read(whole, {golden.tokens, LogitsOf::all})};
  const std::span<const int> text{golden.tokens};
  const auto thrown = test::run_ranks(3, [&](Communicator& ranks) {
    const ParallelLlama own{model, shards, ranks};
    RankCache<float> rows{plan, shards, ranks, {.max_rollback = 16}};
    std::vector<Logits> found{RankReader{own}.read(rows, {text.first(40), LogitsOf::all})};
    std::vector<std::size_t> positions(5);
    std::iota(positions.begin(), positions.end(), std::size_t{40});
    const auto attend = [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                            TensorView<const float> v, TensorView<float> out) {
      rows.step(layer, q, k, v, out);
      if (layer == 1 && ranks.rank() == 1) throw std::bad_alloc{};
    };
    std::string said;
    try {
      static_cast<void>(own.forward(text.subspan(40, 5), positions, attend));
    } catch (const std::bad_alloc&) {
      said = "no memory";
    } catch (const RankError& error) {
      said = error.what();
    }
    if (ranks.rank() == 1) {
      CHECK(said == "no memory");
    } else {
      CHECK(contains(said, "rank 1: "));
    }
    rows.truncate(40);
    found[0].resize(40 * own.config().vocabulary);
    const Logits rest = RankReader{own}.read(rows, {text.subspan(40), LogitsOf::all});
    found[0].insert(found[0].end(), rest.begin(), rest.end());
    if (ranks.rank() == 0) check_near(found, expected);
  });
  require_nothing_thrown(thrown);
  // Heads that share their budgets know only those of their own rank.
  HeadPlan<float> shared{model.config().shape(), Budget{.budget = 40}};
  Budget adaptive{.budget = 40};
  adaptive.adaptive_in_layer = true;
  shared.set(0, 0, adaptive);
  shared.set(0, 1, adaptive);
  for (const std::exception_ptr& one : test::run_ranks(2, [&](Communicator& ranks) {
         RankCache<float> rows{shared, even_shards(plan, bytes_read(plan, 1000), 2), ranks};
       })) {
    CHECK(contains(message_of(one), "head 0 of layer 0 shares its budget with other heads"));
  }
  // A KvCache does not merge.
  for (const std::exception_ptr& one : test::run_ranks(3, [&](Communicator& ranks) {
         const ParallelLlama own{model, shards, ranks};
         KvCache<float> rows{plan_of_rank(plan, shards, ranks.rank())};
         static_cast<void>(RankReader{own}.read(rows, {tokens}));
       })) {
    CHECK(contains(message_of(one), "cut by rows, which needs a RankCache"));
  }
}

TEST_CASE("texts of any length are said to all ranks") {
  for (const std::size_t size : {0U, 1U, 2U, 123U, 124U, 125U, 126U, 5000U, 65'537U}) {
    CAPTURE(size);
    std::vector<std::byte> text(size);
    for (std::size_t i = 0; i < size; ++i) text[i] = static_cast<std::byte>(255 - i * 7 % 256);
    for (std::size_t from = 0; from < 3; ++from) {
      require_nothing_thrown(test::run_ranks(3, [&](Communicator& ranks) {
        const std::vector<std::byte> other(ranks.rank() + 1, std::byte{9});
        CHECK(broadcast(ranks, from, ranks.rank() == from ? text : other) == text);
      }));
    }
  }
  require_nothing_thrown(test::run_ranks(3, [&](Communicator& ranks) {
    const std::array own{std::size_t{0xfedcba987654} - ranks.rank(), ranks.rank()};
    const auto all = gather_counts(ranks, own);
    for (std::size_t rank = 0; rank < 3; ++rank) {
      CHECK(all[2 * rank] == 0xfedcba987654 - rank);
      CHECK(all[2 * rank + 1] == rank);
    }
    std::vector<bool> some{ranks.rank() == 2, false, true};
    any_of_ranks(ranks, some);
    CHECK(some == std::vector<bool>{true, false, true});
  }));
}

}  // namespace kvpolicy::reference::many_texts_test
