// SPDX-License-Identifier: Apache-2.0
//
// Compares losses of whole tiny models and their gradients with respect to the gates with PyTorch autograd in
// float64 (make_goldens.py), and tests rules that hold for any numbers.
#include <reference_model/gradient/gated_llama.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <reference_model/identify/loss.hpp>

#include "model/dense_attention.hpp"
#include "model/golden.hpp"
#include "support/source_dir.hpp"

namespace kvpolicy::reference::gated_llama_test {
namespace {

io::Json goldens() {
  const std::string path = testing::source_dir() + "/tests/gradient/goldens.json";
  return io::parse_json(io::read_text_file(path), path);
}

HeadGates table(const io::Json& rows) {
  HeadGates gates{rows.size(), rows[0].size()};
  for (std::size_t layer = 0; layer < gates.layers(); ++layer) {
    for (std::size_t head = 0; head < gates.heads(); ++head) {
      gates(layer, head) = rows[layer][head].get<double>();
    }
  }
  return gates;
}

TEST_CASE("losses and gate gradients equal those of autograd") {
  const io::Json all = goldens();
  REQUIRE(all.size() == 5);
  for (const auto& item : all.items()) {
    const std::string& name = item.key();
    const io::Json& golden = item.value();
    const Llama model = Llama::load(golden_folder(name));
    LabelledText text;
    text.tokens = load_golden(name).tokens;
    text.labels = golden["labels"].get<std::vector<std::size_t>>();
    const AttentionMask mask{.sinks = golden["sinks"].get<std::size_t>(),
                             .recent = golden["recent"].get<std::size_t>()};
    REQUIRE(golden["runs"].size() == 4);
    for (const io::Json& expected : golden["runs"]) {
      CAPTURE(name);
      CAPTURE(expected.dump());
      const bool unmodified = expected["mixing"] == "full_of_unmodified";
      GatedLlama gated{model, mask, unmodified ? Mixing::full_of_unmodified : Mixing::full_of_mixed};
      const std::vector<float> full = gated.read(text.tokens);
      const std::vector<float>& mixed = gated.mix(table(golden["gates"]));
      const Loss loss = expected["loss"] == "distillation"
                            ? distillation_loss(mixed, full, text, Reduction::mean)
                            : language_loss(model, mixed, text, Reduction::mean);
      CHECK(std::abs(loss.value - expected["value"].get<double>()) <= 2e-6);
      const HeadGates gradient = gated.gradient(loss.dhidden);
      const HeadGates wanted = table(expected["gradient"]);
      for (std::size_t i = 0; i < wanted.values().size(); ++i) {
        CHECK(std::abs(gradient.values()[i] - wanted.values()[i]) <= 2e-6);
      }
    }
  }
}

TEST_CASE("open gates give the unmodified model, closed ones a streaming model") {
  for (const std::string name : {"gqa7_d64", "mistral_window", "qwen2_window_upper_layers"}) {
    CAPTURE(name);
    const Llama model = Llama::load(golden_folder(name));
    const std::vector<int> tokens = load_golden(name).tokens;
    const auto& c = model.config();
    GatedLlama gated{model, {.sinks = 2, .recent = 11}};
    const std::vector<float> full = gated.read(tokens);
    DenseCache cache(c);
    CHECK(largest_error(full, model.hidden(tokens, cache.attend())) <= logit_tolerance);
    CHECK(gated.mix(HeadGates{c.layers, c.kv_heads, 1.0}) == full);
    // The same computed only from masks, one for each head.
    const HeadTable<AttentionMask> masks{c.layers, c.kv_heads, {.sinks = 2, .recent = 11}};
    const std::vector<float> streaming = model.hidden(tokens, attend_masked(c, masks));
    CHECK(largest_error(gated.mix(HeadGates{c.layers, c.kv_heads, 0.0}), streaming) <= 1e-5F);
    CHECK(largest_error(full, streaming) > 1e-2F);
  }
}

TEST_CASE("layers that are computed a second time give the same gradients, bit for bit") {
  for (const std::string name : {"gqa7_d64", "qwen2_window_upper_layers"}) {
    const Llama model = Llama::load(golden_folder(name));
    const auto& c = model.config();
    LabelledText text{.tokens = load_golden(name).tokens, .labels = {20, 60}, .passkeys = {}};
    for (const Mixing mixing : {Mixing::full_of_unmodified, Mixing::full_of_mixed}) {
      const auto gradient = [&](std::size_t stored_bytes) {
        GatedLlama gated{model, {.sinks = 2, .recent = 11}, mixing, stored_bytes};
        const std::vector<float> full = gated.read(text.tokens);
        HeadGates gates{c.layers, c.kv_heads, 0.7};
        gates(0, 0) = 0.2;
        const std::vector<float>& mixed = gated.mix(gates);
        const HeadGates found = gated.gradient(distillation_loss(mixed, full, text, Reduction::mean).dhidden);
        return std::vector<double>(found.values().begin(), found.values().end());
      };
      const auto all = gradient(GatedLlama::default_stored_bytes);
      CHECK(std::ranges::any_of(all, [](double change) { return change != 0.0; }));
      // None, one or more layers fit.
      for (std::size_t bytes = 0; bytes <= std::size_t{2} << 20; bytes += std::size_t{1} << 18) {
        CHECK(gradient(bytes) == all);
      }
    }
  }
}

TEST_CASE("a sum is the mean times the number of its terms") {
  const Llama model = Llama::load(golden_folder("mha_d64"));
  LabelledText text{.tokens = load_golden("mha_d64").tokens, .labels = {0, 5, 149}, .passkeys = {}};
  GatedLlama gated{model, {.sinks = 1, .recent = 8}};
  const std::vector<float> full = gated.read(text.tokens);
  const std::vector<float> mixed = gated.mix(HeadGates{2, 2, 0.5});
  const double mean = distillation_loss(mixed, full, text, Reduction::mean).value;
  const double sum = distillation_loss(mixed, full, text, Reduction::sum).value;
  CHECK(sum == doctest::Approx(mean * 3.0 * 32.0));
  CHECK(mean > 0.0);
  // No row predicts the first token, so two of three tokens count.
  CHECK(language_loss(model, mixed, text, Reduction::sum).value ==
        doctest::Approx(2.0 * language_loss(model, mixed, text, Reduction::mean).value));
}

TEST_CASE("a sliding window narrows the masks of its layer as a plan would") {
  LlamaConfig config;
  config.windows = {0, 24};
  const AttentionMask streaming{.sinks = 4, .recent = 16};
  CHECK(limited(streaming, config, 0) == streaming);
  CHECK(limited(streaming, config, 1) == streaming);
  CHECK(limited({}, config, 1) == AttentionMask{.sinks = 0, .recent = 24});
  CHECK(limited({.sinks = 9, .recent = 16}, config, 1) == AttentionMask{.sinks = 0, .recent = 24});
}

TEST_CASE("runs in the wrong order and wrong sizes are refused") {
  const Llama model = Llama::load(golden_folder("mha_d64"));
  CHECK_THROWS_AS((GatedLlama{model, {.sinks = 0, .recent = 0}}), ConfigError);
  GatedLlama gated{model, {.sinks = 1, .recent = 8}};
  const std::vector<int> tokens{1, 2, 3};
  const std::vector<float> none;
  CHECK_THROWS_AS(gated.mix(HeadGates{2, 2}), ConfigError);
  gated.read(tokens);
  CHECK_THROWS_AS(static_cast<void>(gated.gradient(none)), ConfigError);
  CHECK_THROWS_AS(gated.mix(HeadGates{2, 3}), ShapeError);
  gated.mix(HeadGates{2, 2, 0.5});
  CHECK_THROWS_AS(static_cast<void>(gated.gradient(none)), ShapeError);
  gated.read(tokens);  // this drops the mixed run of the text before
  CHECK_THROWS_AS(static_cast<void>(gated.gradient(none)), ConfigError);
  CHECK_THROWS_AS(gated.read(std::vector<int>{1, 64}), ShapeError);
}

}  // namespace
}  // namespace kvpolicy::reference::gated_llama_test
