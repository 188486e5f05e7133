// SPDX-License-Identifier: Apache-2.0
//
// Failures around a decoder over real caches: a cache that is full or too small, memory that runs out at
// every single allocation of a step, weights that are NaN. Each gives a named error or a named end, the text
// is unchanged, and what follows equals plain decoding to the last bit.
#include <array>
#include <cstddef>
#include <limits>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "model/guessing.hpp"
#include "support/failing_new.hpp"
#include "support/memory.hpp"

namespace kvpolicy::reference::speculation_failure_test {
namespace {

constexpr std::size_t prompt_chunk = 20;

struct Models {
  Llama target = tiny_llama({.vocabulary = 20, .layers = 2}, 81);
  Llama near = with_noise(target, 0.05F, 82);
  std::vector<int> prompt = random_text(20, 45, 83);

  [[nodiscard]] HeadPlan<float> plan() const {
    return triforce_plan<float>(target.config().shape(), {.chunk = 4, .budget = 12});
  }
  [[nodiscard]] PlainText plain(std::size_t tokens) const {
    KvCache cache{plan(), cache_options()};
    return decode_plainly(RowByRow{target}, cache, prompt, prompt_chunk, tokens);
  }
};

// Everything that a hierarchy of three levels consists of, with memory of its own.
template <class DraftOver>
struct Running {
  Running(const Models& models, CacheOptions cache, DraftOver draft_over, SpeculationOptions options = {})
      : target{models.target},
        near{models.near},
        small_cache{small_plan(models), with(cache_options())},
        full_cache{models.plan(), with(cache)},
        decoder{target, full_cache, draft_over(target, full_cache, near, small_cache),
                fixed(std::move(options))} {}

  using Cache = KvCache<float>;
  using SmallCache = KvCache<float>;
  using DraftType =
      decltype(std::declval<DraftOver>()(std::declval<RowByRow&>(), std::declval<Cache&>(),
                                         std::declval<RowByRow&>(), std::declval<SmallCache&>()));

  CacheOptions with(CacheOptions options) {
    options.memory = &memory;
    options.page_rows = 16;
    return options;
  }
  static HeadPlan<float> small_plan(const Models& models) {
    return triforce_draft_plan<float>(models.near.config().shape(), {.sinks = 4, .recent = 26});
  }
  static SpeculationOptions fixed(SpeculationOptions options) {
    options.adapt = false;
    options.prompt_chunk = prompt_chunk;
    return options;
  }

  test::CountingResource memory;
  RowByRow target, near;
  SmallCache small_cache;
  Cache full_cache;
  SpeculativeDecoder<RowByRow, Cache, DraftType> decoder;
};

// Prompts are read in calls that can be rolled back.
constexpr auto three_levels = [](auto& target, auto& cache, auto& small, auto& small_cache) {
  return SelectedDraft{
      target, cache, ModelDraft{small, small_cache, {.chunk = prompt_chunk}}, {.length = 2, .adapt = false}};
};
constexpr auto tree = [](auto&, auto&, auto& small, auto& small_cache) {
  return TreeDraft{small, small_cache, tree_of(6), {.chunk = prompt_chunk}};
};

bool is_prefix(std::span<const int> text, std::span<const int> of) {
  return text.size() <= of.size() && std::ranges::equal(text, of.first(text.size()));
}

TEST_CASE("a full cache ends the text where plain decoding would") {
  const Models models;
  const PlainText plain = models.plain(40);
  const auto check = [&](auto draft_over) {
    for (const std::size_t room : {0, 1, 2, 5, 6, 7, 20}) {
      CAPTURE(room);
      CacheOptions options = cache_options();
      options.max_tokens = models.prompt.size() + room;
      Running running{models, options, draft_over};
      running.decoder.read_prompt(models.prompt);
      CHECK(running.decoder.generate(1000) == Ending::capacity);
      // The last token was decoded but cannot be read any more.
      CHECK(running.decoder.text().size() == options.max_tokens + 1);
      CHECK(is_prefix(running.decoder.text(), plain.text));
      CHECK(running.decoder.step().tokens.empty());
      CHECK_THROWS_AS(running.decoder.read_prompt(std::array{1}), CapacityError);
      CHECK(running.decoder.text().size() == options.max_tokens + 1);
    }
  };
  check(three_levels);
  check(tree);
}

TEST_CASE("a prompt that does not fit changes nothing") {
  const Models models;
  CacheOptions options = cache_options();
  options.max_tokens = models.prompt.size() - 1;
  Running running{models, options, three_levels};
  CHECK_THROWS_AS(running.decoder.read_prompt(models.prompt), CapacityError);
  CHECK(running.decoder.text().empty());
  CHECK(running.full_cache.tokens() == 0);
}

TEST_CASE("invalid sizes") {
  const Models models;
  const auto with_rollback = [&](std::size_t rows, std::size_t length) {
    CacheOptions options = cache_options();
    options.max_rollback = rows;
    Running running{models, options, three_levels, {.length = length}};
  };
  CHECK_NOTHROW(with_rollback(7, 6));
  CHECK_THROWS_AS(with_rollback(6, 6), ConfigError);
  CHECK_THROWS_AS(with_rollback(0, 1), ConfigError);
  CHECK_NOTHROW(with_rollback(0, 0));
  // The budget is smaller than a chunk.
  CHECK_THROWS_AS((void)triforce_plan<float>(models.target.config().shape(), {.chunk = 8, .budget = 4}),
                  ConfigError);
  CHECK_THROWS_AS((void)triforce_draft_plan<float>(models.target.config().shape(), {.sinks = 4, .recent = 0}),
                  ConfigError);
}

TEST_CASE("texts shorter than the budget, and than a chunk") {
  Models models;
  models.prompt.resize(2);
  const PlainText plain = models.plain(20);
  Running running{models, cache_options(), three_levels};
  running.decoder.read_prompt(models.prompt);
  CHECK(running.decoder.generate(20) == Ending::length);
  CHECK(std::ranges::equal(running.decoder.text(), plain.text));
}

TEST_CASE("stop tokens end the text after themselves, and it can continue") {
  const Models models;
  const PlainText plain = models.plain(40);
  const auto check = [&](auto draft_over) {
    for (const std::size_t index : {0, 3, 9, 17}) {
      const int stop = plain.continuation()[index];
      Running running{models, cache_options(), draft_over, {.stop_tokens = {stop}}};
      running.decoder.read_prompt(models.prompt);
      std::size_t ends = 0;
      while (running.decoder.text().size() < plain.text.size()) {
        const std::size_t left = plain.text.size() - running.decoder.text().size();
        if (running.decoder.generate(left) != Ending::stop_token) break;
        ++ends;
        CHECK(running.decoder.text().back() == stop);
        CHECK(running.decoder.step().tokens.empty());
        running.decoder.reopen();
      }
      CHECK(std::ranges::equal(running.decoder.text(), plain.text));
      CHECK(ends == static_cast<std::size_t>(std::ranges::count(plain.continuation(), stop)));
    }
  };
  check(three_levels);
  check(tree);
}

// Tries `call` with ever more memory until it succeeds; `stays` checks what a failure left. Only every
// `stride`-th amount is tried, from `first` on.
template <class Fail, class Call, class Stays>
std::size_t fail_until_done(std::size_t first, std::size_t stride, Fail fail, Call call, Stays stays) {
  std::size_t failures = 0;
  for (std::size_t memory = first;; memory += stride) {
    try {
      fail(memory, call);
      return failures;
    } catch (const std::bad_alloc&) {
      ++failures;
    }
    stays();
  }
}

template <class DraftOver>
void run_out_of_memory(const Models& models, const PlainText& plain, DraftOver draft_over,
                       std::size_t commit_every) {
  // There are far more allocations by `new`. The first step tries each of them (buffers that are kept grow
  // there), the others every 16th, each from another one on.
  constexpr std::size_t steps = 16;
  struct Kind {
    bool any_new;
    std::size_t stride;
  };
  for (const Kind& kind : {Kind{false, 1}, Kind{true, steps * runs_share}}) {
    const bool any_new = kind.any_new;
    const std::size_t stride = kind.stride;
    CAPTURE(any_new);
    std::size_t failures = 0;
    Running running{models,
                    cache_options(),
                    draft_over,
                    {.length = 5, .refresh_selection = {.every = 7}, .commit_every = commit_every}};
    const auto fail = [&](std::size_t memory, auto call) {
      if (any_new) {
        const test::FailNew failing{memory};
        call();
      } else {
        struct Restore {
          test::CountingResource& resource;
          ~Restore() { resource.fail_after(test::never); }
        } const restore{running.memory};
        running.memory.fail_after(memory);
        call();
      }
    };
    auto& decoder = running.decoder;
    // A prompt that fails on the way is read to its end by the next step.
    std::size_t read = 0;
    try {
      fail(any_new ? 700 : 9, [&] { decoder.read_prompt(models.prompt); });
    } catch (const std::bad_alloc&) {
      ++failures;
    }
    read = running.full_cache.tokens();
    CHECK(read + 1 < models.prompt.size());
    REQUIRE(std::ranges::equal(decoder.text(), models.prompt));
    for (std::size_t turn = 0; turn < steps; ++turn) {
      CAPTURE(turn);
      const std::vector<int> before{decoder.text().begin(), decoder.text().end()};
      failures += fail_until_done(
          any_new ? turn : 0, turn == 0 ? 1 : stride, fail, [&] { (void)decoder.step(); },
          [&] { CHECK(std::ranges::equal(decoder.text(), before)); });
      CHECK(decoder.text().size() > before.size());
      CHECK(is_prefix(decoder.text(), plain.text));
    }
    MESSAGE(failures << " failures, " << decoder.statistics().accepted << " guesses kept");
    CHECK(failures > 4);
    CHECK(decoder.statistics().accepted > 0);
    CHECK(decoder.statistics().tokens == decoder.text().size() - models.prompt.size());
    CHECK(running.memory.faults() == 0);
  }
}

TEST_CASE("memory runs out at every allocation of a step") {
  const Models models;
  const PlainText plain = models.plain(120);
  run_out_of_memory(models, plain, three_levels, 0);
  run_out_of_memory(models, plain, tree, 0);
  run_out_of_memory(models, plain, three_levels, 9);
}

TEST_CASE("weights that are NaN") {
  Models models;
  const PlainText plain = models.plain(20);
  const auto spoilt = [](const Llama& model) {
    LlamaWeights weights = model.weights();
    WeightMatrix& v = weights.layers.back().v.weight;
    v = v.changed([](std::span<float> numbers) { numbers[7] = std::numeric_limits<float>::quiet_NaN(); });
    return Llama{model.config(), std::move(weights)};
  };
  {
    Models target = models;
    target.target = spoilt(models.target);
    Running running{target, cache_options(), three_levels};
    running.decoder.read_prompt(models.prompt);
    for (int i = 0; i < 2; ++i) CHECK_THROWS_AS((void)running.decoder.step(), ShapeError);
    CHECK(std::ranges::equal(running.decoder.text(), models.prompt));
    CHECK(running.full_cache.tokens() == models.prompt.size() - 1);
  }
  {
    // The draft has the NaN: the step throws, and another decoder can continue with the cache.
    Models draft = models;
    draft.near = spoilt(models.near);
    Running running{draft, cache_options(), three_levels};
    running.decoder.read_prompt(models.prompt);
    for (int i = 0; i < 2; ++i) CHECK_THROWS_AS((void)running.decoder.step(), ShapeError);
    CHECK(std::ranges::equal(running.decoder.text(), models.prompt));
    SpeculativeDecoder plainly{running.target, running.full_cache, NoDraft{},
                               SpeculationOptions{.length = 0, .adapt = false}};
    plainly.continue_text(running.decoder.text());
    CHECK(plainly.generate(20) == Ending::length);
    CHECK(std::ranges::equal(plainly.text(), plain.text));
  }
}

}  // namespace
}  // namespace kvpolicy::reference::speculation_failure_test
