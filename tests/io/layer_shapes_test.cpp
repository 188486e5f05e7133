// SPDX-License-Identifier: Apache-2.0
//
// Plan files of models whose layers differ.
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/io/plan_json.hpp>

#include "support/compare.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;

namespace {

ModelShape some_shape() {
  ModelShape shape{.layers = 5, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
  shape.change(1) = {};
  shape.change(2) = {.q_heads = 6, .kv_heads = 3, .head_dim = 24, .value_dim = 40, .softcap = 0.1F};
  shape.change(3) = {.q_heads = 3, .reads = 2};
  shape.change(4).window = 100;
  return shape;
}

std::string refused(std::string text, const std::string& part, const std::string& other) {
  const std::size_t at = text.find(part);
  REQUIRE(at != std::string::npos);
  text.replace(at, part.size(), other);
  return thrown<FormatError>([&] { static_cast<void>(io::parse_plan<float>(text)); });
}

}  // namespace

TEST_CASE("a plan of layers that differ is read as it was written") {
  HeadPlan<float> plan{some_shape()};
  plan.set(2, 1, QuantizedResidualCache<float>::Config{.storage = {.bits = 4, .residual = 9}});
  plan.set(4, 0, SinkRecentCache<DenseStorage<float>>::Config{.sinks = 2, .recent = 50});
  const std::string text = io::format_plan(plan);
  CHECK(contains(text, "{\"q_heads\":6,\"kv_heads\":3,\"head_dim\":24,\"value_dim\":40,\"softcap\":"));
  CHECK(contains(text, "{\"q_heads\":3,\"reads\":2}"));
  const auto read = io::parse_plan<float>(text);
  CHECK(read == plan);
  CHECK(read.shape() == some_shape());
  CHECK(io::format_plan(read) == text);
}

TEST_CASE("a uniform shape is written as before, and values may have a different number of channels") {
  const HeadPlan<float> plan{ModelShape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 8}};
  CHECK(contains(io::format_plan(plan),
                 "\"shape\": {\"layers\":1,\"q_heads\":2,\"kv_heads\":1,\"head_dim\":8}"));
  const ModelShape wide{.layers = 2, .q_heads = 2, .kv_heads = 1, .head_dim = 576, .value_dim = 512};
  CHECK(io::parse_plan<float>(io::format_plan(HeadPlan<float>{wide})).shape() == wide);
}

TEST_CASE("settings that do not fit a layer are refused with their position") {
  const std::string text = io::format_plan(HeadPlan<float>{some_shape()});
  CHECK(contains(refused(text, "\"head_dim\":24", "\"head_dim\":12"),
                 "layer 2: head_dim is 12, must be a multiple of 8"));
  CHECK(contains(refused(text, "\"window\":100", "\"width\":100"), "per_layer[4]: unknown key 'width'"));
  CHECK(contains(refused(text, "\"reads\":2", "\"reads\":4"),
                 "layer 3: reads the cache of layer 4, must be an earlier layer"));
  CHECK(contains(refused(text, "\"layers\":5", "\"layers\":6"),
                 "must be an array of 6 layers, is an array of 5"));
  CHECK(contains(refused(text, "[0, 0, 0]", "[0, 0]"), "heads[2]: must be an array of 3 KV heads"));
  // Groups that fit the first layer but not the third.
  const std::string groups =
      "{\"policy\":\"full\",\"storage\":{\"type\":\"residual_per_token\",\"key_group\":32}}";
  const std::size_t setting = text.find("{\"policy\"");
  const std::string first = text.substr(setting, text.find(",\n", setting) - setting);
  CHECK(contains(refused(text, first, groups),
                 "heads[2]: ResidualStorage: key_group is 32, must divide head_dim = 24"));
}
