// SPDX-License-Identifier: Apache-2.0
//
// The model on a device over the library's device cache: compares logits and tokens with those of the CPU
// over the CPU's cache under the same plan, and a recorded step with a plain step.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/cuda/kv_cache.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>
#include <reference_model/cuda/graph.hpp>
#include <reference_model/cuda/llama.hpp>
#include <reference_model/cuda/run.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/run.hpp>
#include <reference_model/sampler.hpp>

#include "cuda/support/device_backend.hpp"
#include "model/golden.hpp"
#include "model_cuda/models.hpp"
#include "support/source_dir.hpp"

namespace kvpolicy::reference::run_test {
namespace {

using Plan = HeadPlan<bfloat16>;
using DeviceCache = gpu::KvCache<bfloat16>;
using Dense = DenseStorage<bfloat16>;
using Full = FullCache<Dense>;
using Window = SinkRecentCache<Dense>;

std::vector<int> prompt_of(std::string_view text) {
  std::vector<int> tokens;
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

Plan plan_of(const Llama& model, const HeadSettings<bfloat16>& config) {
  Plan plan{model.config().shape(), config};
  limit_windows(plan, model.config());
  return plan;
}

// Every other head has a window.
Plan mixed_plan(const Llama& model) {
  Plan plan = plan_of(model, Full::Config{});
  for (std::size_t layer = 0; layer < model.config().layers; ++layer) {
    for (std::size_t head = layer % 2; head < model.config().kv_heads; head += 2) {
      plan.set(layer, head, Window::Config{.sinks = 4, .recent = 24});
    }
  }
  return plan;
}

TEST_CASE("logits over a device cache equal those over the CPU's, in prefill and decode") {
  constexpr std::size_t length = 90;
  constexpr std::size_t prompt = 70;
  for (const std::string name : {"gqa7_d64", "all_biases", "mistral_window", "llama3_scaling"}) {
    const Llama model = rounded_to_bfloat16(Llama::load(golden_folder(name)));
    if (model.config().head_dim != 64) continue;
    const std::vector<int> tokens = golden_tokens(name, length);
    const reference::Stream stream;
    CudaLlama device{model, {}, stream};
    for (const Plan& plan : {plan_of(model, Full::Config{}), mixed_plan(model)}) {
      CAPTURE(name);
      KvCache<bfloat16> host_cache{plan};
      DeviceCache device_cache{plan, {}, stream};
      const std::span all{tokens};
      auto want = prefill(model, host_cache, all.first(prompt), 32);
      auto got = prefill(device, device_cache, all.first(prompt), 32, {}, {}, stream);
      Decoder decoder{device, device_cache, {}, stream};
      for (std::size_t at = prompt; at < length; ++at) {
        const auto more = step(model, host_cache, all.subspan(at, 1));
        want.insert(want.end(), more.begin(), more.end());
        const auto found = decoder.step(tokens[at]);
        got.insert(got.end(), found.begin(), found.end());
      }
      CHECK(device_cache.tokens() == length);
      check_errors(errors(got, want), of_bfloat16);
    }
  }
}

TEST_CASE("a recorded step gives the bits of a plain step") {
  const Llama model = Llama::load(golden_folder("gqa7_d64"));
  const std::vector<int> prompt = golden_tokens("gqa7_d64", 50);
  const reference::Stream stream;
  CudaLlama device{model, {}, stream};
  struct Run {
    std::vector<int> chosen;
    std::vector<float> logits;
  };
  const auto run = [&](bool graph, std::size_t eager) {
    DeviceCache cache{mixed_plan(model), {}, stream};
    static_cast<void>(prefill(device, cache, prompt, 50, {}, {}, stream));
    Decoder decoder{device, cache, {.graph = graph, .steps_before_graph = eager}, stream};
    Run result{decoder.continue_text(20), {}};
    CHECK(cache.tokens() == prompt.size() + 19);
    result.logits = decoder.step(result.chosen.back());  // uses the other graph, and a new page
    const auto more = decoder.continue_text(3);
    result.chosen.insert(result.chosen.end(), more.begin(), more.end());
    return result;
  };
  const Run plain = run(false, 1);
  CHECK(plain.chosen.size() == 23);
  for (const std::size_t eager : {0, 1, 7, 100}) {
    CAPTURE(eager);
    const Run recorded = run(true, eager);
    CHECK(recorded.chosen == plain.chosen);
    CHECK(recorded.logits == plain.logits);
  }
  // The same with tokens that are drawn: a launch of the graph draws anew.
  const auto drawn = [&](bool graph) {
    DeviceSampler sampler{{.temperature = 1.5F, .top_k = 50, .top_p = 0.9F, .seed = 3},
                          model.config().vocabulary};
    DeviceCache cache{mixed_plan(model), {}, stream};
    static_cast<void>(prefill(device, cache, prompt, 50, {}, {}, stream));
    return Decoder{device, cache, {.sampler = &sampler, .graph = graph}, stream}.continue_text(20);
  };
  const std::vector<int> tokens = drawn(false);
  CHECK(tokens != std::vector<int>(plain.chosen.begin(), plain.chosen.begin() + 20));
  CHECK(drawn(true) == tokens);
#if !defined(__CUDACC__)
  // The emulated stream does nothing before it is waited for, so that reading or reusing memory too early is
  // detected.
  gpu::simt::device().late = true;
  const Run late = run(true, 1);
  gpu::simt::device().late = false;
  CHECK(late.chosen == plain.chosen);
  CHECK(late.logits == plain.logits);
#endif
}

TEST_CASE("the shipped model answers on a device as on a host, byte for byte") {
  const Llama model = Llama::load(testing::source_dir() + "/reference_model/weights/keyfinder");
  const std::vector<int> prompt = prompt_of(
      "And it came to pass. The key of Bamelo is 48213. And the earth was without form.\n"
      "What is the key of Bamelo? The key of Bamelo is ");
  using Int4 = QuantizedResidualCache<bfloat16, Granularity::per_token>;
  const reference::Stream stream;
  CudaLlama device{model, {}, stream};
  for (const HeadSettings<bfloat16>& config :
       {HeadSettings<bfloat16>{Full::Config{}},
        HeadSettings<bfloat16>{Int4::Config{.storage = {.bits = 4, .residual = 32}}}}) {
    const Plan plan = plan_of(model, config);
    constexpr std::size_t count = 8;
    KvCache<bfloat16> host_cache{plan};
    std::vector<int> want{likeliest(prefill(model, host_cache, prompt, 64))};
    while (want.size() < count) {
      want.push_back(likeliest(step(model, host_cache, std::array{want.back()})));
    }
    CHECK(std::string{want.begin(), want.end()}.starts_with("48213."));

    DeviceCache cache{plan, {}, stream};
    static_cast<void>(prefill(device, cache, prompt, 64, {}, {}, stream));
    Decoder decoder{device, cache, {}, stream};
    CHECK(decoder.continue_text(count) == want);
  }
}

TEST_CASE("the room of a text that goes on grows, so that steps are seldom recorded anew") {
  const Llama model = Llama::load(golden_folder("gqa7_d64"));
  const std::vector<int> prompt = golden_tokens("gqa7_d64", 50);
  const reference::Stream stream;
  CudaLlama device{model, {}, stream};
  test::CountingDeviceMemory memory;
  // Steps until the text has `length` tokens; returns the rooms that there were, and the last logits.
  const auto decode = [&](Decoder<DeviceCache>& decoder, const DeviceCache& cache, std::size_t length) {
    std::vector<std::size_t> rooms;
    std::vector<float> logits;
    while (cache.tokens() < length) {
      logits = decoder.step(static_cast<int>(cache.tokens() % 7));
      if (rooms.empty() || rooms.back() != cache.reserved()) rooms.push_back(cache.reserved());
    }
    return std::pair{rooms, logits};
  };
  std::vector<float> plain;
  for (const bool graph : {false, true}) {
    DeviceCache cache{mixed_plan(model), {.memory = &memory}, stream};
    static_cast<void>(prefill(device, cache, prompt, 50, {}, {}, stream));
    Decoder decoder{device, cache, {.graph = graph}, stream};
    CHECK(decode(decoder, cache, 256).first == std::vector<std::size_t>{64, 128, 256});
    // Without memory for more a step says so, and one page is what is asked for next.
    memory.fail_after(0);
    CHECK_THROWS_AS(static_cast<void>(decoder.step(1)), std::bad_alloc);
    CHECK(cache.tokens() == 256);
    memory.fail_after(test::never);
    const auto [rooms, logits] = decode(decoder, cache, 330);
    CHECK(rooms == std::vector<std::size_t>{320, 448});
    if (graph) CHECK(logits == plain);
    plain = logits;
  }
}

TEST_CASE("sequences share a model: a decoder continues after another's steps and after buffers grew") {
  const Llama model = Llama::load(golden_folder("gqa7_d64"));
  const std::vector<int> tokens = golden_tokens("gqa7_d64", 100);
  const std::span all{tokens};
  const reference::Stream stream;
  const auto alone = [&](std::span<const int> prompt) {
    CudaLlama device{model, {}, stream};
    DeviceCache cache{mixed_plan(model), {}, stream};
    static_cast<void>(prefill(device, cache, prompt, 40, {}, {}, stream));
    Decoder decoder{device, cache, {}, stream};
    std::vector<float> logits;
    for (int token = 0; token < 6; ++token) logits = decoder.step(token);
    return logits;
  };
  CudaLlama device{model, {}, stream};
  DeviceCache one{mixed_plan(model), {}, stream};
  static_cast<void>(prefill(device, one, all.first(40), 40, {}, {}, stream));
  DeviceCache other = one.fork(stream);
  Decoder first{device, one, {}, stream};
  for (int token = 0; token < 4; ++token) static_cast<void>(first.step(token));
  static_cast<void>(prefill(device, other, all.subspan(40, 60), 60, {}, {}, stream));
  Decoder second{device, other, {}, stream};
  static_cast<void>(second.step(0));
  static_cast<void>(first.step(4));
  CHECK(first.step(5) == alone(all.first(40)));
}

TEST_CASE("invalid prompts and graphs are refused") {
  const Llama model = Llama::load(golden_folder("gqa7_d64"));
  const reference::Stream stream;
  CudaLlama device{model, {}, stream};
  DeviceCache cache{plan_of(model, Full::Config{}), {}, stream};
  CHECK_THROWS_AS(prefill(device, cache, std::array{1}, 0, {}, {}, stream), ConfigError);
  CHECK_THROWS_AS(prefill(device, cache, std::span<const int>{}, 4, {}, {}, stream), ShapeError);
  CHECK_THROWS_AS(prefill(device, cache, std::array{1, 99}, 4, {}, {}, stream), ShapeError);
  CHECK(cache.tokens() == 0);
  CHECK_THROWS_AS((Graph{nullptr, [] {}}), ConfigError);
  // An exception ends a recording, and the stream can be used again.
  CHECK_THROWS_AS((Graph{stream, [] { throw CapacityError{"full"}; }}), CapacityError);
  static_cast<void>(prefill(device, cache, std::array{1, 2, 3}, 2, {}, {}, stream));
  CHECK(cache.tokens() == 3);

  const Llama wider = Llama::load(golden_folder("mha_d64"));
  DeviceCache other{plan_of(wider, Full::Config{}), {}, stream};
  CHECK_THROWS_AS(prefill(device, other, std::array{1}, 4, {}, {}, stream), ShapeError);
}

}  // namespace
}  // namespace kvpolicy::reference::run_test
