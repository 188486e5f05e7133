// SPDX-License-Identifier: Apache-2.0
//
// The models that the tools know by name: the bytes of their caches, computed by hand from the numbers
// in their config files.
#include <doctest/doctest.h>

#include <cstddef>
#include <fstream>
#include <string>
#include <vector>

#include <kvpolicy/plan/head_plan.hpp>

#include <common/model_sizes.hpp>
#include "support/compare.hpp"
#include "support/temporary_folder.hpp"

using namespace kvpolicy;
using kvpolicy::tools::parse_shape;

namespace {

// Layers of one kind.
struct Layers {
  std::size_t count, kv_heads, key_channels, value_channels;
  std::size_t rows;  // rows that a head holds
  [[nodiscard]] std::size_t bytes(std::size_t held) const {
    return count * kv_heads * (key_channels + value_channels) * 2 * held;
  }
};

constexpr std::size_t tokens = 131'072;

// Checks a full cache in bfloat16. Windows and the text end with a page, so pages have no unused rows.
// The tail has one row.
void check(const std::string& name, const std::vector<Layers>& layers) {
  CAPTURE(name);
  std::size_t rows = 0;
  std::size_t tail = 0;
  for (const Layers& kind : layers) {
    rows += kind.bytes(kind.rows);
    tail += kind.bytes(1);
  }
  const HeadPlan<bfloat16> plan{parse_shape(name)};
  const MemoryEstimate estimate = plan.memory(tokens);
  CHECK(estimate.heads == rows);
  CHECK(estimate.tail == tail);
  CHECK(estimate.total() == rows + tail);
  // Between two ends of pages a window holds one page more, so there the same bytes suffice for fewer
  // tokens.
  const bool windows = layers.size() > 1;
  CHECK(plan.max_context(estimate.total()).value() <= tokens);
  CHECK((plan.max_context(estimate.total()) == tokens) == !windows);
}

}  // namespace

TEST_CASE("ten published models by name") {
  check("Llama-3.1-8B", {{32, 8, 128, 128, tokens}});
  check("Llama-3.1-70B", {{80, 8, 128, 128, tokens}});
  check("Qwen3-8B", {{36, 8, 128, 128, tokens}});
  check("Gemma-3-12B", {{8, 8, 256, 256, tokens}, {40, 8, 256, 256, 1024}});
  check("gpt-oss-20b", {{12, 8, 64, 64, tokens}, {12, 8, 64, 64, 128}});
  check("Mistral-Small-24B", {{40, 8, 128, 128, tokens}});
  check("Phi-4", {{40, 10, 128, 128, tokens}});
  check("SmolLM2-135M", {{30, 3, 64, 64, tokens}});
  check("DeepSeek-V3", {{61, 1, 576, 512, tokens}});
  check("Qwen3-Next-80B-A3B", {{12, 2, 256, 256, tokens}});
}

TEST_CASE("which layers differ") {
  const ModelShape gemma = parse_shape("gemma-3-12b");
  const ModelShape gpt = parse_shape("gpt-oss-20b");
  const ModelShape qwen = parse_shape("qwen3-next-80b-a3b");
  for (std::size_t l = 0; l < 48; ++l) {
    CHECK(gemma.layer(l).window == ((l + 1) % 6 == 0 ? 0U : 1024U));
    CHECK(qwen.layer(l).kv_heads == ((l + 1) % 4 == 0 ? 2U : 0U));
    if (l < 24) CHECK(gpt.layer(l).window == (l % 2 == 0 ? 128U : 0U));
  }
  // 17.2 GB for 128 Ki tokens of Llama-3.1-8B; 40 GB hold 4,768 pages of 64 tokens.
  const HeadPlan<bfloat16> llama{parse_shape("llama-3.1-8b")};
  CHECK(llama.memory(tokens).total() == 17'180'000'256);
  CHECK(llama.max_context(40'000'000'000) == 4768 * 64);
  CHECK(HeadPlan<bfloat16>{gemma}.memory(tokens).total() == 8'925'872'128);
  CHECK(HeadPlan<bfloat16>{gpt}.memory(tokens).total() == 3'224'420'352);
}

TEST_CASE("a model folder says which layers have a window or no cache") {
  const kvpolicy::testing::TemporaryFolder folder;
  const auto shape = [&](const std::string& heads, const std::string& rest) {
    std::ofstream{folder.path() / "config.json"} << "{\"num_attention_heads\": " << heads
                                                 << ", \"hidden_size\": 256" << rest << "}";
    return parse_shape(folder.path().string());
  };
  const auto gemma = shape("16, \"num_key_value_heads\": 8, \"head_dim\": 256, \"num_hidden_layers\": 48",
                           ", \"sliding_window\": 1024, \"sliding_window_pattern\": 6");
  CHECK(HeadPlan<bfloat16>{gemma}.memory(tokens).total() ==
        HeadPlan<bfloat16>{parse_shape("gemma-3-12b")}.memory(tokens).total());
  const auto listed = shape("4, \"num_hidden_layers\": 3", R"(, "sliding_window": 128,
      "layer_types": ["sliding_attention", "full_attention", "linear_attention"])");
  CHECK(listed.layer(0).window == 128);
  CHECK(listed.layer(1) == (LayerShape{4, 4, 64, 64}));
  CHECK(listed.layer(2).kv_heads == 0);
  const auto qwen =
      shape("4, \"num_hidden_layers\": 2", R"(, "sliding_window": 128, "use_sliding_window": false)");
  CHECK(qwen == (ModelShape{2, 4, 4, 64}));
  const auto later = shape("4, \"num_hidden_layers\": 4",
                           R"(, "sliding_window": 9, "use_sliding_window": true, "max_window_layers": 3)");
  CHECK(later.layer(2).window == 0);
  CHECK(later.layer(3).window == 9);
  CHECK(shape("4, \"num_hidden_layers\": 4", R"(, "full_attention_interval": 4)").kv_head_count() == 4);
  const auto refused = [&](const std::string& rest) {
    return test::thrown<FormatError>([&] { static_cast<void>(shape("4, \"num_hidden_layers\": 2", rest)); });
  };
  CHECK(test::contains(refused(R"(, "kv_lora_rank": 512)"), "kv_lora_rank"));
  CHECK(test::contains(refused(R"(, "layer_types": ["full_attention"])"), "layer_types has 1 entries"));
  CHECK(test::contains(refused(R"(, "layer_types": ["full_attention", "mamba"])"), "must be full_attention"));
  CHECK(test::contains(refused(R"(, "layer_types": ["full_attention", "sliding_attention"])"),
                       "sliding_window is missing"));
}

TEST_CASE("an unknown name is refused, and the message lists the known ones") {
  const std::string error = test::thrown<ConfigError>([] { static_cast<void>(parse_shape("gpt-5")); });
  CHECK(test::contains(error, "--shape gpt-5"));
  for (const char* known : {"llama-3.1-8b", "gemma-3-12b", "40 layers with a window of 1024",
                            "36 layers without a cache", "values of 512"}) {
    CHECK(test::contains(error, known));
  }
  CHECK(test::contains(test::thrown<ConfigError>([] { static_cast<void>(parse_shape("2,4,2,12")); }),
                       "head_dim is 12, must be a multiple of 8 from 8 to 576"));
  CHECK(parse_shape("2,4,2,8").head_dim == 8);
}

TEST_CASE("a latent that a cache keeps twice is named, and no other shape") {
  CHECK(test::contains(tools::latent_note(parse_shape("DeepSeek-V3")),
                       "576 channels of a key and 512 of a value"));
  CHECK(tools::latent_note(parse_shape("Llama-3.1-8B")).empty());
  CHECK(tools::latent_note({61, 128, 1, 576, 576}).empty());
}
