// SPDX-License-Identifier: Apache-2.0
//
// The model over the library's own cache: compares it with the goldens' logits for every division into
// chunks, with sliding windows from the plan, after forks and after rollbacks.
#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>
#include <reference_model/run.hpp>

#include "model/golden.hpp"

namespace kvpolicy::reference::run_test {
namespace {

HeadPlan<float> full_plan(const LlamaConfig& config) {
  HeadPlan<float> plan{config.shape()};
  limit_windows(plan, config);
  return plan;
}

TEST_CASE("a full plan, with the model's own windows, gives transformers' logits") {
  for (const std::string name : golden_names) {
    const Llama model = Llama::load(golden_folder(name), {.weights = WeightFormat::float32});
    const Golden golden = load_golden(name);
    for (const std::size_t chunk : {150, 64, 7, 1}) {
      CAPTURE(name);
      CAPTURE(chunk);
      KvCache cache{full_plan(model.config())};
      std::vector<float> logits;
      const std::span tokens{golden.tokens};
      for (std::size_t first = 0; first < tokens.size(); first += chunk) {
        const auto part = tokens.subspan(first, std::min(chunk, tokens.size() - first));
        const auto some = step(model, cache, part, LogitsOf::all);
        logits.insert(logits.end(), some.begin(), some.end());
      }
      CHECK(largest_error(logits, golden.logits) <= logit_tolerance);
    }
  }
}

TEST_CASE("a cache in bfloat16 gives the same logits for a prompt in one call and in several") {
  const Llama model = Llama::load(golden_folder("gqa2_d80"), {.weights = WeightFormat::float32});
  const Golden golden = load_golden("gqa2_d80");
  const auto logits_in_chunks = [&](std::size_t chunk) {
    KvCache cache{HeadPlan<bfloat16>{model.config().shape()}};
    return prefill(model, cache, golden.tokens, chunk);
  };
  const std::vector<float> at_once = logits_in_chunks(golden.tokens.size());
  // Products of other shapes round differently, so a few numbers of rows become the other neighbour in bfloat16.
  // Rows that are not rounded for the call's own queries give errors above 3e-3.
  constexpr float bound = 5e-4F;
  for (const std::size_t chunk : {64, 7, 1}) {
    CAPTURE(chunk);
    CHECK(largest_error(logits_in_chunks(chunk), at_once) <= bound);
  }
}

TEST_CASE("prefill reports progress and gives the last token's logits") {
  const Llama model = Llama::load(golden_folder("gqa2_d80"));
  const Golden golden = load_golden("gqa2_d80");
  KvCache cache{full_plan(model.config())};
  std::vector<std::size_t> seen;
  const auto logits = prefill(model, cache, golden.tokens, 64, [&](std::size_t done, std::size_t total) {
    CHECK(total == 150);
    seen.push_back(done);
  });
  CHECK(seen == std::vector<std::size_t>{64, 128, 150});
  CHECK(cache.tokens() == 150);
  CHECK(largest_error(logits, std::span(golden.logits).last(64)) <= logit_tolerance);
  CHECK_THROWS_AS((void)prefill(model, cache, golden.tokens, 0), ConfigError);
  CHECK_THROWS_AS((void)prefill(model, cache, std::span<const int>{}, 8), ShapeError);
}

TEST_CASE("forks and rollbacks continue as if nothing else had been read") {
  const Llama model = Llama::load(golden_folder("mistral_window"));
  const Golden golden = load_golden("mistral_window");
  const std::span tokens{golden.tokens};
  const auto expected = [&](std::size_t token) { return std::span(golden.logits).subspan(token * 64, 64); };
  KvCache cache{full_plan(model.config()), {.max_rollback = 8}};
  (void)prefill(model, cache, tokens.first(120), 50);
  auto fork = cache.fork();
  const std::array<int, 5> wrong{1, 2, 3, 4, 5};
  (void)step(model, cache, wrong);
  cache.truncate(120);
  const auto after_rollback = step(model, cache, tokens.subspan(120, 10));
  CHECK(largest_error(after_rollback, expected(129)) <= logit_tolerance);
  const auto from_fork = step(model, fork, tokens.subspan(120, 30));
  CHECK(largest_error(from_fork, expected(149)) <= logit_tolerance);
}

TEST_CASE("a plan of another shape and a cache with an unfinished step are refused") {
  const Llama model = Llama::load(golden_folder("gqa2_d80"));
  const std::array<int, 2> tokens{1, 2};
  ModelShape shape = model.config().shape();
  shape.layers = 3;
  KvCache other{HeadPlan<float>{shape}};
  CHECK_THROWS_AS((void)step(model, other, tokens), ShapeError);

  KvCache cache{full_plan(model.config()), {.max_rollback = 4}};
  const std::vector<float> rows(2 * 4 * 80);
  std::vector<float> out(rows.size());
  cache.step(0, TensorView<const float>{rows.data(), 2, 4, 80},
             TensorView<const float>{rows.data(), 2, 2, 80}, TensorView<const float>{rows.data(), 2, 2, 80},
             TensorView<float>{out.data(), 2, 4, 80});
  CHECK_THROWS_AS((void)step(model, cache, tokens), RollbackError);
  cache.truncate(0);
  CHECK_NOTHROW((void)step(model, cache, tokens));
}

}  // namespace
}  // namespace kvpolicy::reference::run_test
