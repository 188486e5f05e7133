// SPDX-License-Identifier: Apache-2.0
//
// A model's output projections, as far as a cache needs them: how much a row's value can add to what its layer gives
// back. Heads that weigh their rows by it (`ValueNorm::output_l1`, policy/head_budget_cache.hpp) are the only readers.
//
// Method: CriticalKV, arXiv:2502.03805, which weighs a row by the L1 norm of its value through the head's part of the
// output projection. L1 has no short form in the value's own channels, as L2 would have (a Gram matrix), so the
// weights themselves are read, where the engine keeps them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/tensor_view.hpp>

namespace kvpolicy {

/// The part of an output projection that the values of one KV head go through, once for each query head of its group.
/// A view of the engine's weights.
class ValueOutput {
 public:
  /// Rows of which `norms` takes that many at once in the shortest time.
  static constexpr std::size_t block_rows = 64;

  /// `weights` [outputs, group, value_dim] of floating-point numbers.
  explicit ValueOutput(const ConstTensor& weights) : weights_{weights} {}

  [[nodiscard]] std::size_t outputs() const { return weights_.tokens; }
  /// Query heads that read the KV head.
  [[nodiscard]] std::size_t group() const { return weights_.heads; }
  [[nodiscard]] std::size_t value_dim() const { return weights_.head_dim; }

  /// The L1 norms of what `rows` values [rows, value_dim] become: `norms` [rows, group]. Each row's norms are the same
  /// whichever rows come with it.
  /// @throws std::bad_alloc
  void norms(std::span<const float> values, std::span<double> norms) const {
    const std::size_t channels = value_dim();
    const std::size_t rows = values.size() / channels;
    KVPOLICY_ASSERT(values.size() == rows * channels && norms.size() == rows * group());
    std::ranges::fill(norms, 0.0);
    std::vector<float> weights(channels);
    std::vector<float> turned(channels * block_rows);  // a block of values, channel after channel
    for (std::size_t first = 0; first < rows; first += block_rows) {
      const std::size_t count = std::min(block_rows, rows - first);
      for (std::size_t row = 0; row < count; ++row) {
        for (std::size_t c = 0; c < channels; ++c) {
          turned[c * block_rows + row] = values[(first + row) * channels + c];
        }
      }
      for (std::size_t output = 0; output < outputs(); ++output) {
        for (std::size_t head = 0; head < group(); ++head) {
          load_dense(weights_.encoding, weights_.row(output, head), weights);
          // Side by side over rows, not channels: so a compiler needs no leave to reorder sums.
          float sums[block_rows] = {};
          for (std::size_t c = 0; c < channels; ++c) {
            const float* column = turned.data() + c * block_rows;
            for (std::size_t row = 0; row < block_rows; ++row) sums[row] += weights[c] * column[row];
          }
          for (std::size_t row = 0; row < count; ++row) {
            norms[(first + row) * group() + head] += std::abs(static_cast<double>(sums[row]));
          }
        }
      }
    }
  }

 private:
  ConstTensor weights_;
};

namespace detail {

/// Refuses weights that are no layer's output projection. Reads none of them: they may be a device's.
/// @throws what ValueOutputs::set throws, but for weights that are not finite
inline void check_output_weights(const ModelShape& shape, std::size_t layer, const ConstTensor& weights) {
  require(layer < shape.layers, "ValueOutputs: there is no layer ", layer, ", the shape has ", shape.layers);
  const LayerShape own = shape.layer(layer);
  require(own.kv_heads > 0, "ValueOutputs: layer ", layer,
          " has no cache of its own, so no rows are weighed in it; leave its weights out");
  require<ShapeError>(weights.tokens > 0 && weights.heads == own.q_heads && weights.head_dim == own.value_dim,
                      "ValueOutputs: the weights of layer ", layer, " are [", weights.tokens, ", ",
                      weights.heads, ", ", weights.head_dim, "], must be [outputs, ", own.q_heads, ", ",
                      own.value_dim, "] with at least 1 output");
  require<ShapeError>(weights.data != nullptr, "ValueOutputs: the weights of layer ", layer, " are null");
  require<ShapeError>(!is_quantized(weights.encoding), "ValueOutputs: the weights of layer ", layer, " are ",
                      name_of(weights.encoding), ", must be float32, float16 or bfloat16");
}

/// Refuses weights of a model `own` for a plan of the model `planned`. has_weights(layer) says which layers have any.
/// @throws what ValueOutputs::check_fits throws
template <class HasWeights>
void check_outputs_fit(const ModelShape& own, const ModelShape& planned, HasWeights has_weights) {
  require<ShapeError>(planned.layers == own.layers, "ValueOutputs: the weights are for ", own.layers,
                      " layers, the plan is for ", planned.layers);
  for (std::size_t layer = 0; layer < own.layers; ++layer) {
    const LayerShape here = own.layer(layer);
    const LayerShape there = planned.layer(layer);
    require<ShapeError>(
        !has_weights(layer) || (here.q_heads == there.q_heads && here.kv_heads == there.kv_heads &&
                                here.value_dim == there.value_dim),
        "ValueOutputs: the weights of layer ", layer, " are for ", here.q_heads, " query and ", here.kv_heads,
        " KV heads with values of ", here.value_dim, " channels, the plan has ", there.q_heads, ", ",
        there.kv_heads, " and ", there.value_dim);
  }
}

}  // namespace detail

/// The output projections of all layers: made once for a model, given to every cache over it
/// (`CacheOptions::value_outputs`), and never changed while one of them lives. It holds views and copies no weight, so
/// the weights must live as long as well. Any thread may read it. A device cache takes `gpu::ValueOutputs`.
class ValueOutputs {
 public:
  /// No layer has its weights yet. @throws ConfigError for a shape that no model can have
  explicit ValueOutputs(ModelShape shape) : shape_{std::move(shape)} {
    shape_.validate();
    layers_.resize(shape_.layers);
  }

  /// The weights of a layer's output projection, [outputs, q_heads, value_dim] in float, float16 or bfloat16, with any
  /// strides: output i of the layer is the sum over query heads h and channels c of weights(i, h, c) times what head h
  /// has gathered in channel c. A checkpoint's `o_proj.weight`, [hidden, q_heads * value_dim], is that as it stands. A
  /// bias changes no row's part in the output.
  /// @throws ShapeError for another shape, a null pointer, or a weight that is not finite, with the object as it was;
  /// ConfigError if the shape has no such layer or the layer has no cache; std::bad_alloc
  template <class T>
  void set(std::size_t layer, const TensorView<T>& weights) {
    set(layer, ConstTensor{weights});
  }
  void set(std::size_t layer, const ConstTensor& weights) {
    detail::check_output_weights(shape_, layer, weights);
    check_finite(layer, weights);
    const LayerShape own = shape_.layer(layer);
    const std::size_t group = own.queries_per_kv();
    std::vector<ValueOutput> heads;
    heads.reserve(own.kv_heads);
    for (std::size_t head = 0; head < own.kv_heads; ++head) {
      ConstTensor part = weights;
      part.data = weights.row(0, head * group);
      part.heads = group;
      heads.emplace_back(part);
    }
    layers_[layer] = std::move(heads);
  }

  [[nodiscard]] const ModelShape& shape() const { return shape_; }
  /// What the values of a KV head go through; null if the layer was given no weights.
  [[nodiscard]] const ValueOutput* head(std::size_t layer, std::size_t head) const {
    KVPOLICY_ASSERT(layer < layers_.size());
    return layers_[layer].empty() ? nullptr : &layers_[layer][head];
  }

  /// @throws ShapeError if a cache of the model `shape` has heads or values that these weights are not for
  void check_fits(const ModelShape& shape) const {
    detail::check_outputs_fit(shape_, shape, [&](std::size_t layer) { return !layers_[layer].empty(); });
  }

 private:
  static void check_finite(std::size_t layer, const ConstTensor& weights) {
    std::vector<float> numbers(weights.head_dim);
    for (std::size_t output = 0; output < weights.tokens; ++output) {
      for (std::size_t head = 0; head < weights.heads; ++head) {
        load_dense(weights.encoding, weights.row(output, head), numbers);
        const auto wrong = std::ranges::find_if_not(numbers, is_finite);
        if (wrong == numbers.end()) continue;
        fail<ShapeError>("ValueOutputs: the weight of layer ", layer, " from channel ",
                         wrong - numbers.begin(), " of query head ", head, " to output ", output, " is ",
                         *wrong, ", must be finite");
      }
    }
  }

  ModelShape shape_;
  std::vector<std::vector<ValueOutput>> layers_;  // [layers] of [kv_heads], or of none
};

}  // namespace kvpolicy
