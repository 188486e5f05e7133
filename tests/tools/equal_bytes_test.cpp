// SPDX-License-Identifier: Apache-2.0
#include <evaluate/equal_bytes.hpp>

#include <cstddef>
#include <numeric>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <common/exam_plan.hpp>
#include <common/files.hpp>
#include <common/sequence.hpp>
#include <kvpolicy/core/error.hpp>

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

const ModelShape shape{.layers = 4, .q_heads = 8, .kv_heads = 4, .head_dim = 64};

ByteBudget budget(double share, std::size_t length) {
  return {.share = share, .length = length, .shape = shape};
}

// How much a cache really keeps of so many rows, as a share of a full cache.
double kept(const reference::Llama& model, const std::string& plan_name, std::size_t length) {
  const ExamPlan plan = make_exam_plan(plan_name, shape, repository_path(shipped_model));
  const auto cache = make_sequence(model, plan.plan);
  std::vector<int> text(length);
  for (std::size_t i = 0; i < length; ++i) text[i] = static_cast<int>('a' + i * i % 23);
  static_cast<void>(cache->prefill(text));
  if (plan.compresses) cache->compress();
  const std::vector<std::size_t> heads = cache->head_bytes();
  const auto bytes = static_cast<double>(std::accumulate(heads.begin(), heads.end(), std::size_t{0}));
  return bytes / (16.0 * static_cast<double>(length) * 256.0);
}

}  // namespace

TEST_CASE("methods get the setting that fits their bytes") {
  CHECK(at_equal_bytes("h2o", budget(0.25, 1024)) == "h2o:256");
  CHECK(at_equal_bytes("headkv@a/b.json", budget(1.0 / 32, 4096)) == "headkv@a/b.json:128");
  CHECK(at_equal_bytes("keydiff", budget(1.0 / 32, 4096)) == "keydiff:128");
  CHECK(at_equal_bytes("keydiff@a/b.json", budget(1.0 / 32, 4096)) == "keydiff@a/b.json:128,4096");
  CHECK(at_equal_bytes("snapkv", budget(1.0 / 3, 3000)) == "snapkv:1000");
  CHECK(at_equal_bytes("criticalkv", budget(1.0 / 3, 3000)) == "criticalkv:1000");
  CHECK(at_equal_bytes("tova", budget(1, 77)) == "tova:77");
  CHECK(at_equal_bytes("streaming_llm", budget(0.5, 2048)) == "streaming_llm:16,1008");
  CHECK(at_equal_bytes("sink_recent", budget(1.0 / 64, 1024)) == "sink_recent:8,8");
  // 16 heads of 4,096 rows, or 144 if they are streaming heads: with 9 streaming heads 45.7 %, with 8
  // 51.8 %.
  CHECK(at_equal_bytes("duo", budget(0.5, 4096)) == "duo:0.5625");
  CHECK(at_equal_bytes("duo", budget(0.52, 4096)) == "duo:0.5");
  CHECK(at_equal_bytes("duo", budget(1, 4096)) == "duo:0");
  // A row in 4 bits takes 80 bytes, an exact one 256.
  CHECK(row_bytes(shape) == 256);
  CHECK(row_bytes(shape, {.bits = 4, .key_group = 32, .value_group = 32}) == 80);
  CHECK(row_bytes(shape, {.bits = 8, .value_bits = 3, .key_group = 64, .value_group = 16}) ==
        64 + 24 + 4 + 16);
  // Scales without zeros; a byte for 16 channels; none.
  CHECK(
      row_bytes(shape, {.bits = 2, .key_group = 32, .value_group = 64, .value_codebook = Codebook::normal}) ==
      16 + 8 + 16 + 2);
  CHECK(row_bytes(shape, LowBitFormat::of_small_floats(Codebook::nvfp4).storage) == 2 * (32 + 4));
  CHECK(row_bytes(shape, LowBitFormat::of_small_floats(Codebook::fp8).storage) == 2 * 64);
  CHECK(at_equal_bytes("headkv+int4", budget(0.25, 1024)) == "headkv+int4:819");
  CHECK(at_equal_bytes("headkv:kernel=29,beta=2", budget(0.25, 1024)) == "headkv:256,kernel=29,beta=2");
  // Groups of 64 take two bytes less for the scales of keys, and of values: 72 bytes.
  CHECK(at_equal_bytes("headkv+int4:group=64", budget(0.25, 1024)) == "headkv+int4:910,group=64");
  CHECK(at_equal_bytes("duo:sinks=64,recent=1984", budget(0.52, 4096)) == "duo:1,sinks=64,recent=1984");
  CHECK(at_equal_bytes("duo@a:b/c+int4", budget(0.35, 4096)) == "duo@a:b/c+int4:0");
}

TEST_CASE("a cache keeps the requested bytes, and with the next setting it would keep too much") {
  const auto model = reference::Llama::load(repository_path(shipped_model));
  const std::size_t length = 640;
  for (const double share : {0.25, 0.3, 0.41, 0.6}) {
    for (const std::string method : {"sink_recent", "duo", "duo+int8"}) {
      CAPTURE(method);
      CAPTURE(share);
      const double own = kept(model, at_equal_bytes(method, budget(share, length)), length);
      CHECK(own <= share);
      // The next query's row is one of the window's rows.
      CHECK(own > share - (method == "sink_recent" ? 2.0 / 640 : 1.0 / 16));
    }
  }
  // At the end of a text: heads whose budget is longer than the text leave some of it unused.
  for (const double share : {0.05, 0.1}) {
    const double own = kept(model, at_equal_bytes("headkv", budget(share, length)), length);
    CHECK(own <= share);
    CHECK(own > share - 2.0 / 640);
  }
  CHECK(kept(model, at_equal_bytes("headkv", budget(0.5, length)), length) <= 0.5);
}

TEST_CASE("a budget that a method cannot meet is refused") {
  CHECK_THROWS_AS(static_cast<void>(at_equal_bytes("duo", budget(1.0 / 32, 1024))), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(at_equal_bytes("h2o", budget(1e-4, 1024))), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(at_equal_bytes("h2o", budget(0, 1024))), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(at_equal_bytes("h2o", budget(1.5, 1024))), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(at_equal_bytes("quest", budget(0.5, 1024))), ConfigError);
  CHECK_THROWS_AS(static_cast<void>(at_equal_bytes("duo+int7", budget(0.5, 1024))), ConfigError);
}

TEST_CASE("shares are written in three ways") {
  CHECK(parse_share("1/4") == 0.25);
  CHECK(parse_share("0.25") == 0.25);
  CHECK(parse_share("25%") == 0.25);
  for (const char* wrong : {"", "x", "0", "2", "1/0", "-1/2", "1/", "25 %", "nan"}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS(static_cast<void>(parse_share(wrong)), ConfigError);
  }
}

TEST_CASE("a plan's method is its name without the numbers") {
  CHECK(method_of("full") == "full");
  CHECK(method_of("h2o:512") == "h2o");
  CHECK(method_of("duo@gates/a+int4:0.5") == "duo@gates/a+int4");
  CHECK(method_of("duo@a:b/c") == "duo@a:b/c");
  CHECK(method_of("headkv:64,kernel=29") == "headkv:kernel=29");
}
