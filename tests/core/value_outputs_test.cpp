// SPDX-License-Identifier: Apache-2.0
//
// Output projections: L1 norms of values through them, compared with plain sums in double, and what is refused.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <kvpolicy/core/value_outputs.hpp>

#include "support/compare.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

template <class T>
void check_norms(test::Random& random) {
  constexpr std::size_t block = ValueOutput::block_rows;
  for (const std::size_t rows :
       {std::size_t{0}, std::size_t{1}, std::size_t{7}, block - 1, block, block + 1, std::size_t{131}}) {
    for (const auto layout : {test::Layout::contiguous, test::Layout::padded, test::Layout::heads_first}) {
      CAPTURE(rows);
      const std::size_t group = 1 + test::below(random, 3);
      const std::size_t kv_heads = 1 + test::below(random, 3);
      const std::size_t channels = 8 * (1 + test::below(random, 5));
      const std::size_t outputs = 1 + test::below(random, 23);
      const ModelShape shape{1, group * kv_heads, kv_heads, 16, channels};
      test::Tensor<T> weights{outputs, group * kv_heads, channels, layout};
      weights.randomize(random);
      ValueOutputs given{shape};
      given.set(0, std::as_const(weights).view());
      for (std::size_t head = 0; head < kv_heads; ++head) {
        const ValueOutput* own = given.head(0, head);
        REQUIRE(own != nullptr);
        CHECK(own->outputs() == outputs);
        CHECK(own->group() == group);
        CHECK(own->value_dim() == channels);
        std::vector<float> values(rows * channels);
        for (float& number : values) number = test::normal(random);
        std::vector<double> norms(rows * group, -1.0);
        own->norms(values, norms);
        for (std::size_t row = 0; row < rows; ++row) {
          for (std::size_t g = 0; g < group; ++g) {
            double norm = 0.0;
            double most = 0.0;  // what the sums would come to without signs: the scale of rounding
            for (std::size_t output = 0; output < outputs; ++output) {
              double sum = 0.0;
              for (std::size_t c = 0; c < channels; ++c) {
                const double product = static_cast<double>(weights.number(output, head * group + g, c)) *
                                       static_cast<double>(values[row * channels + c]);
                sum += product;
                most += std::abs(product);
              }
              norm += std::abs(sum);
            }
            // Each of the products in float is rounded at most `channels` times.
            CHECK(std::abs(norms[row * group + g] - norm) <=
                  most * static_cast<double>(channels) * 0x1p-24 + 1e-30);
            // A row's norms do not depend on the rows beside it, to the bit.
            std::vector<double> alone(group);
            own->norms(std::span{values}.subspan(row * channels, channels), alone);
            CHECK(alone[g] == norms[row * group + g]);
          }
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("value outputs: L1 norms of values through each query head's weights") {
  test::Random random{91};
  check_norms<float>(random);
  check_norms<float16>(random);
  check_norms<bfloat16>(random);
}

TEST_CASE("value outputs: a value that is not finite has a norm that is not") {
  const std::vector<float> weights(2 * 8, 1.0F);
  ValueOutputs given{{1, 1, 1, 8}};
  given.set(0, TensorView<const float>{weights.data(), 2, 1, 8});
  for (const float number : {not_a_number, infinity, -infinity}) {
    std::vector<float> values(2 * 8, 1.0F);
    values[3] = number;
    std::vector<double> norms(2);
    given.head(0, 0)->norms(values, norms);
    CHECK(!(norms[0] < std::numeric_limits<double>::max()));
    CHECK(norms[1] == 16.0);
  }
}

TEST_CASE("value outputs: layers that differ, and those without weights") {
  ModelShape shape{3, 4, 2, 16};
  shape.change(1) = {.q_heads = 6, .kv_heads = 2, .head_dim = 16, .value_dim = 8};
  shape.change(2) = {.q_heads = 4, .kv_heads = 0, .head_dim = 16};
  ValueOutputs given{shape};
  CHECK(given.head(0, 0) == nullptr);
  CHECK(given.head(2, 0) == nullptr);
  const std::vector<float> weights(5 * 6 * 8, 0.25F);
  given.set(1, TensorView<const float>{weights.data(), 5, 6, 8});
  CHECK(given.head(0, 1) == nullptr);
  REQUIRE(given.head(1, 1) != nullptr);
  CHECK(given.head(1, 1)->group() == 3);
  CHECK(given.head(1, 1)->value_dim() == 8);
  CHECK(test::thrown<ShapeError>([&] { given.check_fits(shape); }).empty());
  ModelShape windowed = shape;
  windowed.change(1).window = 64;  // what a query sees is no matter of its weights
  CHECK(test::thrown<ShapeError>([&] { given.check_fits(windowed); }).empty());
  ModelShape other = shape;
  other.change(0).q_heads = 8;  // of this layer nothing is known
  CHECK(test::thrown<ShapeError>([&] { given.check_fits(other); }).empty());
  other.change(1).q_heads = 4;
  CHECK(test::thrown<ShapeError>([&] { given.check_fits(other); }) ==
        "ValueOutputs: the weights of layer 1 are for 6 query and 2 KV heads with values of 8 channels, the "
        "plan has 4, 2 and 8");
  other = shape;
  other.layers = 2;
  other.per_layer.pop_back();
  CHECK(test::thrown<ShapeError>([&] { given.check_fits(other); }) ==
        "ValueOutputs: the weights are for 3 layers, the plan is for 2");
}

TEST_CASE("value outputs: what is refused changes nothing") {
  ModelShape shape{2, 4, 2, 16, 8};
  shape.change(1).kv_heads = 0;
  ValueOutputs given{shape};
  std::vector<float> weights(3 * 4 * 8, 0.5F);
  const auto view = [&](std::size_t outputs, std::size_t heads, std::size_t channels) {
    return TensorView<const float>{weights.data(), outputs, heads, channels};
  };
  given.set(0, view(3, 4, 8));
  const auto refusal = [&]<class Error>(Error*, std::size_t layer, const ConstTensor& tensor) {
    const std::string message = test::thrown<Error>([&] { given.set(layer, tensor); });
    CHECK(given.head(0, 0)->outputs() == 3);
    return message;
  };
  ShapeError* shape_error = nullptr;
  ConfigError* config_error = nullptr;
  CHECK(refusal(config_error, 2, ConstTensor{view(3, 4, 8)}) ==
        "ValueOutputs: there is no layer 2, the shape has 2");
  CHECK(test::contains(refusal(config_error, 1, ConstTensor{view(3, 4, 8)}), "layer 1 has no cache"));
  const char* wanted = "must be [outputs, 4, 8] with at least 1 output";
  CHECK(test::contains(refusal(shape_error, 0, ConstTensor{view(0, 4, 8)}), "are [0, 4, 8]"));
  CHECK(test::contains(refusal(shape_error, 0, ConstTensor{view(3, 2, 8)}), wanted));
  CHECK(test::contains(refusal(shape_error, 0, ConstTensor{view(3, 4, 16)}), wanted));
  CHECK(test::contains(refusal(shape_error, 0, ConstTensor{TensorView<const float>{nullptr, 3, 4, 8}}),
                       "weights of layer 0 are null"));
  ConstTensor codes{view(3, 4, 8)};
  codes.encoding = Encoding::uint8;
  CHECK(test::contains(refusal(shape_error, 0, codes), "must be float32, float16 or bfloat16"));
  for (const float number : {not_a_number, infinity, -infinity}) {
    weights[(2 * 4 + 1) * 8 + 5] = number;
    const std::string message = refusal(shape_error, 0, ConstTensor{view(3, 4, 8)});
    CHECK(test::contains(message, "the weight of layer 0 from channel 5 of query head 1 to output 2 is "));
    CHECK(test::contains(message, "must be finite"));
  }
  CHECK(test::contains(test::thrown<ConfigError>([] { ValueOutputs{ModelShape{}}; }), "layers is 0"));
}
