// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstddef>
#include <string>

#include <fmt/format.h>

#include <kvpolicy/format.hpp>
#include <kvpolicy/kvpolicy.hpp>

namespace {

using namespace kvpolicy;
using Plan = HeadPlan<bfloat16>;
using Dense = DenseStorage<bfloat16>;
using Codes = PerTokenStorage<bfloat16>;
using ChannelCodes = PerChannelStorage<bfloat16>;

}  // namespace

// A foreign policy without a name and without a prediction of its memory.
namespace elsewhere {

struct Nameless : kvpolicy::FullCache<Dense> {
  struct Config {
    friend bool operator==(const Config&, const Config&) = default;
  };
  Nameless(const Config&, const kvpolicy::StorageContext& context) : FullCache{{}, context} {}
  static void validate(const Config&, const kvpolicy::StorageContext&) {}
  static void name() {}
  static void bytes_of_tokens() {}
};

}  // namespace elsewhere

TEST_CASE("formats of rows") {
  CHECK(fmt::format("{}", Encoding::bfloat16) == "bfloat16");
  CHECK(fmt::format("{:>7}|", Encoding::uint4) == "  uint4|");
  CHECK(fmt::format("{}", Granularity::per_token) == "per token");
  CHECK(fmt::format("{}", Granularity::per_channel) == "per channel");
  CHECK(fmt::format("{}", RowFormat{Encoding::float16}) == "float16");
  CHECK(fmt::format("{}", RowFormat{Encoding::uint2, Granularity::per_channel, 32}) ==
        "uint2 per channel in groups of 32");
  CHECK(fmt::format("{}", RowFormat{Encoding::uint4, Granularity::per_token, 32, false, Codebook::mxfp4}) ==
        "mxfp4 in uint4 per token in groups of 32");
}

TEST_CASE("settings of storages with other codebooks") {
  const auto both = [](Codebook codebook, std::size_t bits, double scale) {
    return fmt::format("{}", Codes::Config{.bits = bits,
                                           .residual = 0,
                                           .key_codebook = codebook,
                                           .value_codebook = codebook,
                                           .key_scale = scale,
                                           .value_scale = scale});
  };
  CHECK(both(Codebook::fp8, 8, 1.0) == "fp8");
  CHECK(both(Codebook::fp8, 8, 0.25) == "fp8, times 0.25");
  CHECK(both(Codebook::mxfp4, 4, 1.0) == "mxfp4");
  CHECK(both(Codebook::normal, 3, 1.0) == "3 bits, in the normal codebook");
  CHECK(fmt::format("{}", Codes::Config{.bits = 4,
                                        .residual = 0,
                                        .key_codebook = Codebook::nvfp4,
                                        .value_codebook = Codebook::nvfp4,
                                        .key_scale = 0.5}) == "nvfp4, keys times 0.5, values times 1");
  CHECK(fmt::format("{}", Codes::Config{.bits = 2, .residual = 8, .value_codebook = Codebook::normal}) ==
        "2 bits but for the latest 8, values in the normal codebook");
  CHECK(fmt::format(
            "{}", Codes::Config{.bits = 8, .residual = 8, .key_codebook = Codebook::fp8, .key_scale = 2.0}) ==
        "8 bits but for the latest 8, keys in the fp8 codebook times 2");
}

TEST_CASE("settings of storages") {
  CHECK(fmt::format("{}", Dense::Config{}) == "bfloat16");
  CHECK(fmt::format("{}", DenseStorage<float>::Config{}) == "float32");
  CHECK(fmt::format("{}", ResidualConfig{}) == "4 bits but for the latest 128");
  CHECK(fmt::format("{}", Codes::Config{.bits = 8, .residual = 0}) == "8 bits");
  CHECK(fmt::format("{}", Codes::Config{.bits = 2, .key_group = 32, .value_group = 32, .residual = 4096}) ==
        "2 bits but for the latest 4,096, groups of 32");
  CHECK(fmt::format("{}", Codes::Config{.key_group = 32, .residual = 0}) ==
        "4 bits, groups: 32 for keys, the row for values");
  CHECK(fmt::format("{}", ChannelCodes::Config{.residual = 32}) ==
        "4 bits but for the latest 32, keys per channel in groups of 32");
  CHECK(fmt::format("{}", ChannelCodes::Config{.key_group = 64, .value_group = 16, .flush = Flush::kivi}) ==
        "4 bits but for the latest 128, keys per channel in groups of 64, values in groups of 16, "
        "flushed as "
        "published");
}

TEST_CASE("settings of policies") {
  CHECK(fmt::format("{}", FullCache<Dense>::Config{}) == "every row");
  CHECK(fmt::format("{:.>12}", FullCache<Dense>::Config{}) == "...every row");
  CHECK(fmt::format("{}", QuantizedResidualCache<bfloat16>::Config{}) ==
        "every row in 4 bits but for the latest 128");
  CHECK(fmt::format("{}", SinkRecentCache<Dense>::Config{.sinks = 16, .recent = 4096}) ==
        "the first 16 rows and the latest 4,096");
  CHECK(fmt::format("{}",
                    SinkRecentCache<Dense>::Config{.sinks = 0, .recent = 64, .mask = Mask::prefill_chunk}) ==
        "the latest 64 rows, masked by chunk");
  CHECK(fmt::format("{}", SinkRecentCache<Codes>::Config{.rotary_in_cache = RotaryConfig{},
                                                         .storage = {.residual = 8}}) ==
        "the first 4 rows and the latest 1,020 in 4 bits but for the latest 8, at positions in the "
        "cache");
  CHECK(fmt::format("{}", HeadBudgetCache<Dense>::Config{.budget = 1200}) ==
        "1,200 rows after a compression, and the latest 8");
  CHECK(fmt::format("{}", HeadBudgetCache<Dense>::Config{.budget = 12, .compress_from = 1280}) ==
        "12 rows after a compression, and the latest 8, all of a text of fewer than 1,280");
  CHECK(fmt::format("{}", HeadBudgetCache<Dense, TovaScorer>::Config{.compress_every = 64}) ==
        "120 rows after a compression, ranked by tova, compressed every 64");
  CHECK(fmt::format("{}",
                    HeadBudgetCache<Codes>::Config{.adaptive_in_layer = true, .storage = {.residual = 0}}) ==
        "120 rows after a compression, and the latest 8 in 4 bits, shared by the heads of the "
        "layer");
  CHECK(fmt::format("{}", HeadBudgetCache<Dense>::Config{.weigh_values = true}) ==
        "120 rows after a compression, and the latest 8, times the length of the value");
  CHECK(fmt::format(
            "{}", HeadBudgetCache<Dense>::Config{.weigh_values = true,
                                                 .value_norm = ValueNorm::output_l1,
                                                 .unweighed_share = 0.5,
                                                 .scorer = {.votes = Votes::largest, .prior_share = 1.0}}) ==
        "120 rows after a compression, and the latest 8 by their largest vote, at least 100 % of the mean, "
        "times what the value adds to the output, 50 % of them by attention alone");
  CHECK(fmt::format("{}", ChunkRetrievalCache<Dense>::Config{.chunk = 16, .budget = 1024}) ==
        "every row, of which 1,024 are read in chunks of 16 by mean key");
  CHECK(fmt::format("{}", ChunkRetrievalCache<Codes, MinMaxKey>::Config{.refresh_every = 64}) ==
        "every row in 4 bits but for the latest 128, of which 4,096 are read in chunks of 8 by "
        "minmax key, chosen "
        "again every 64");
}

TEST_CASE("what a head of a plan keeps, for any policy") {
  Plan plan{{.layers = 1, .q_heads = 2, .kv_heads = 2, .head_dim = 64}};
  plan.set(0, 1, SinkRecentCache<Dense>::Config{.sinks = 1, .recent = 2});
  CHECK(describe(plan.at(0, 0)) == "every row");
  CHECK(describe(plan.at(0, 1)) == "the first 1 rows and the latest 2");
}

TEST_CASE("shapes and plans in one line") {
  const ModelShape shape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  CHECK(fmt::format("{}", shape) == "32 layers, 32 query heads, 8 KV heads of 128");
  const ModelShape one{1, 1, 1, 64};
  CHECK(fmt::format("{}", one) == "1 layer, 1 query head, 1 KV head of 64");

  Plan plan{shape};
  // 256 heads, keys and values of 128 numbers of 2 bytes.
  CHECK(fmt::format("{}", plan) == "32 layers of 8 KV heads: 256 full; grows by 131.1 kB a token");
  for (std::size_t layer = 0; layer < 32; ++layer) {
    for (std::size_t head = 0; head < 4; ++head) plan.set(layer, head, SinkRecentCache<Dense>::Config{});
  }
  CHECK(fmt::format("{}", plan) ==
        "32 layers of 8 KV heads: 128 sink_recent, 128 full; grows by 65.54 kB a token");
  plan.set(31, 0, HeadBudgetCache<Dense, H2oScorer>::Config{});
  CHECK(fmt::format("{}", plan) ==
        "32 layers of 8 KV heads: 127 sink_recent, 128 full, 1 head_budget (h2o); grows by 65.54 "
        "kB a token once "
        "compressed");

  // A row has 64 codes of 4 bits for keys and for values, each with a scale and a zero of 2 bytes.
  const HeadPlan<QuantizedResidualCache<float>> quantised{one};
  CHECK(fmt::format("{}", quantised) == "1 layer of 1 KV head: 1 full (4 bits); grows by 72 B a token");
  CHECK(fmt::format("{}", uniform_plan<SinkRecentCache<DenseStorage<float>>>(one)) ==
        "1 layer of 1 KV head: 1 sink_recent; of bounded size");
  // 8 bytes for each of 64 channels, and a mean of 64 floats for every 8 rows.
  CHECK(fmt::format("{}", uniform_plan<ChunkRetrievalCache<DenseStorage<float>>>(one)) ==
        "1 layer of 1 KV head: 1 chunk_retrieval; grows by 544 B a token");
  // All that a plan keeps before a selection: the budget exceeds every text.
  CHECK(fmt::format("{}", uniform_plan<HeadBudgetCache<Dense>>(one, {.budget = std::size_t{1} << 40})) ==
        "1 layer of 1 KV head: 1 head_budget; grows by 256 B a token once compressed");
  CHECK(fmt::format("[{:<40}]", HeadPlan<FullCache<Dense>>{one}) ==
        "[1 layer of 1 KV head: 1 full; grows by 256 B a token]");
}

TEST_CASE("a foreign policy can be in a plan") {
  static_assert(KvPolicy<elsewhere::Nameless>);
  const HeadPlan<elsewhere::Nameless, FullCache<Dense>> plan{{2, 2, 1, 64}};
  CHECK(fmt::format("{}", plan) == "2 layers of 1 KV head: 2 other");
}

TEST_CASE("the memory of a plan") {
  CHECK(fmt::format("{}", MemoryEstimate{}) == "0 B");
  CHECK(fmt::format("{}", MemoryEstimate{.heads = 17'000'000}) == "17.00 MB (rows 17.00 MB)");
  CHECK(fmt::format("{}", MemoryEstimate{.heads = 3000, .tail = 500, .queries = 1, .slow = 2000}) ==
        "3.50 kB (rows 3.00 kB, 2.00 kB of them in slow memory, tail 500 B, queries 1 B)");
}
