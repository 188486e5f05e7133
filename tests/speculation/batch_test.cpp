// SPDX-License-Identifier: Apache-2.0
//
// Several texts in common steps: each must become what it becomes alone, whichever others join, leave
// or fail.
#include <algorithm>
#include <cstddef>
#include <exception>
#include <memory>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <kvpolicy/speculation/batch.hpp>

#include "decoding.hpp"

using namespace kvpolicy;
using test::copy;
using test::fixed;
using test::Small;
using test::TableCache;
using test::TableModel;

namespace {

/// Serves several caches in one call, and can be told to fail in it.
struct BatchedModel : TableModel {
  using TableModel::TableModel;
  std::vector<std::vector<float>> read_batch(std::span<const BatchCall<TableCache>> calls) {
    ++batches;
    largest = std::max(largest, calls.size());
    std::vector<std::vector<float>> logits;
    for (const auto& [cache, call] : calls) logits.push_back(read(*cache, call));
    if (std::exchange(forgets_one, false)) logits.pop_back();
    return logits;
  }
  std::size_t batches = 0;
  std::size_t largest = 0;
  bool forgets_one = false;
};
static_assert(BatchedLanguageModel<BatchedModel, TableCache>);
static_assert(!BatchedLanguageModel<TableModel, TableCache>);

/// One text with its own objects, except the target.
template <class Model>
struct Text {
  using Middle = SelectedDraft<Model, TableCache, Small>;
  using Decoder = SpeculativeDecoder<Model, TableCache, Middle>;

  Text(Model& target, std::size_t number)
      : small{target.like(50 + number, 0.3F * static_cast<float>(number))},
        prompt{1, static_cast<int>(number % 6), 3, static_cast<int>(number * 5 % 6)},
        decoder{target, cache, Middle{target, cache, Small{small, small_cache}, {2, false}},
                options(number)} {
    decoder.read_prompt(prompt);
  }
  static SpeculationOptions options(std::size_t number) {
    SpeculationOptions result = fixed(1 + number % 5, {.temperature = number % 2 == 0 ? 1.0F : 0.0F});
    result.seed = number;
    return result;
  }

  TableCache cache;
  TableCache small_cache;
  TableModel small;
  std::vector<int> prompt;
  Decoder decoder;
};

// Steps text `number` alone until there are so many tokens.
template <class Model>
std::vector<int> alone(std::size_t number, std::size_t tokens) {
  Model target{6, 33, 2.0F, 0.5F};
  Text<Model> text{target, number};
  while (text.decoder.text().size() < tokens) (void)text.decoder.step();
  return copy(text.decoder.text());
}

template <class Model>
void joins_and_leaves() {
  Model target{6, 33, 2.0F, 0.5F};
  std::vector<std::unique_ptr<Text<Model>>> texts;
  std::vector<std::size_t> different(7);
  for (std::size_t round = 0; round < 60; ++round) {
    if (round % 8 == 0 && texts.size() < 7) {
      texts.push_back(std::make_unique<Text<Model>>(target, texts.size()));
    }
    // Text 2 pauses now and then, text 0 leaves for good.
    std::vector<typename Text<Model>::Decoder*> present;
    std::vector<std::size_t> lengths;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      if ((i == 2 && round % 3 == 0) || (i == 0 && round > 40)) continue;
      present.push_back(&texts[i]->decoder);
      lengths.push_back(present.back()->text().size());
    }
    const auto results = step_together(target, std::span<typename Text<Model>::Decoder* const>{present});
    REQUIRE(results.size() == present.size());
    for (std::size_t i = 0; i < results.size(); ++i) {
      CHECK(results[i].error == nullptr);
      CHECK(results[i].step.ending == Ending::open);
      CHECK(results[i].step.tokens.size() >= 1);
      CHECK(present[i]->text().size() == lengths[i] + results[i].step.tokens.size());
      ++different[results[i].step.tokens.size()];
    }
  }
  CHECK(std::ranges::count_if(different, [](std::size_t n) { return n > 0; }) > 3);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    CAPTURE(i);
    const std::vector<int> together = copy(texts[i]->decoder.text());
    CHECK(together == alone<Model>(i, together.size()));
  }
}

}  // namespace

TEST_CASE("texts with different acceptance that join and leave are the same as alone") {
  joins_and_leaves<TableModel>();
  joins_and_leaves<BatchedModel>();
}

TEST_CASE("a batched model reads all texts at once; ended texts are left out and say why") {
  BatchedModel target{6, 33, 2.0F, 0.5F};
  std::vector<std::unique_ptr<Text<BatchedModel>>> texts;
  std::vector<Text<BatchedModel>::Decoder*> decoders;
  for (std::size_t i = 0; i < 4; ++i) {
    texts.push_back(std::make_unique<Text<BatchedModel>>(target, i));
    decoders.push_back(&texts.back()->decoder);
  }
  const std::span<Text<BatchedModel>::Decoder* const> all{decoders};
  (void)step_together(target, all);
  CHECK(target.batches == 1);
  CHECK(target.largest == 4);
  // No more tokens than requested.
  for (const BatchedStep& result : step_together(target, all, 1)) {
    CHECK(result.step.tokens.size() == 1);
  }
  // One text has no room left.
  TableCache small_cache{{.max_rollback = 16, .max_tokens = 5}};
  TableCache draft_cache;
  TableModel small = target.like(9, 0.5F);
  using Middle = Text<BatchedModel>::Middle;
  Text<BatchedModel>::Decoder full{target, small_cache,
                                   Middle{target, small_cache, Small{small, draft_cache}}, fixed(3)};
  full.read_prompt(std::vector<int>{1, 2, 3});
  full.generate(100);
  REQUIRE(full.ending() == Ending::capacity);
  decoders.insert(decoders.begin() + 1, &full);
  target.largest = 0;
  const auto results = step_together(target, std::span<Text<BatchedModel>::Decoder* const>{decoders});
  CHECK(target.largest == 4);
  CHECK(results[1].step.ending == Ending::capacity);
  CHECK(results[1].step.tokens.empty());
  CHECK(results[1].error == nullptr);
  CHECK(results[2].step.tokens.size() >= 1);
  // All texts have ended, so the model is not called. With no texts, nothing happens.
  target.batches = 0;
  std::vector<Text<BatchedModel>::Decoder*> ended{&full};
  CHECK(step_together(target, std::span<Text<BatchedModel>::Decoder* const>{ended}).size() == 1);
  CHECK(step_together(target, std::span<Text<BatchedModel>::Decoder* const>{}).empty());
  CHECK(target.batches == 0);
  const std::vector<Text<BatchedModel>::Decoder*> twice{decoders[0], &full, decoders[0]};
  CHECK_THROWS_AS((void)step_together(target, std::span{twice}), ConfigError);
}

TEST_CASE("one text fails alone, by its draft or by its logits") {
  for (const bool by_draft : {true, false}) {
    CAPTURE(by_draft);
    BatchedModel target{6, 33, 2.0F, 0.5F};
    std::vector<std::unique_ptr<Text<BatchedModel>>> texts;
    std::vector<Text<BatchedModel>::Decoder*> decoders;
    for (std::size_t i = 0; i < 3; ++i) {
      texts.push_back(std::make_unique<Text<BatchedModel>>(target, 2 * i + 1));  // greedy
      decoders.push_back(&texts.back()->decoder);
    }
    const std::span<Text<BatchedModel>::Decoder* const> all{decoders};
    (void)step_together(target, all);
    const std::vector<int> before = copy(decoders[1]->text());
    if (by_draft) {
      texts[1]->small.fault = test::Fault{test::Fault::Kind::nan, texts[1]->small.calls()};
    } else {
      target.fault = test::Fault{test::Fault::Kind::infinite, target.calls() + 1};
    }
    const auto results = step_together(target, all);
    REQUIRE(results[1].error != nullptr);
    CHECK_THROWS_AS(std::rethrow_exception(results[1].error), ShapeError);
    CHECK(copy(decoders[1]->text()) == before);
    for (const std::size_t i : std::vector<std::size_t>{0, 2}) {
      CHECK(results[i].error == nullptr);
      CHECK(results[i].step.tokens.size() >= 1);
    }
    for (int round = 0; round < 10; ++round) (void)step_together(target, all);
    for (std::size_t i = 0; i < 3; ++i) {
      const std::vector<int> text = copy(decoders[i]->text());
      CHECK(text == test::plain_greedy(target, texts[i]->prompt, text.size() - 4));
    }
  }
}

TEST_CASE("a common call that fails changes no text") {
  BatchedModel target{6, 33, 2.0F, 0.5F};
  std::vector<std::unique_ptr<Text<BatchedModel>>> texts;
  std::vector<Text<BatchedModel>::Decoder*> decoders;
  for (std::size_t i = 0; i < 3; ++i) {
    texts.push_back(std::make_unique<Text<BatchedModel>>(target, 2 * i + 1));
    decoders.push_back(&texts.back()->decoder);
  }
  const std::span<Text<BatchedModel>::Decoder* const> all{decoders};
  (void)step_together(target, all);
  for (std::size_t failing = 0; failing < 4; ++failing) {
    CAPTURE(failing);
    std::vector<std::vector<int>> before;
    for (const auto* decoder : decoders) before.push_back(copy(decoder->text()));
    // It fails in the layers of the first, second or third text; or one text's logits are missing.
    if (failing < 3) {
      target.fault = test::Fault{test::Fault::Kind::throws_half_way, target.calls() + failing};
      CHECK_THROWS_AS((void)step_together(target, all), std::runtime_error);
    } else {
      target.forgets_one = true;
      CHECK_THROWS_AS((void)step_together(target, all), ShapeError);
    }
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(copy(decoders[i]->text()) == before[i]);
      CHECK(texts[i]->cache.tokens() + 1 == before[i].size());
    }
  }
  for (int round = 0; round < 10; ++round) (void)step_together(target, all);
  for (std::size_t i = 0; i < 3; ++i) {
    const std::vector<int> text = copy(decoders[i]->text());
    CHECK(text == test::plain_greedy(target, texts[i]->prompt, text.size() - 4));
  }
}
