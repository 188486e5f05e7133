// SPDX-License-Identifier: Apache-2.0
//
// A model's output projections in device memory, for heads that weigh their rows by them (kernels/weigh_outputs.cuh).
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/core/value_outputs.hpp>

namespace kvpolicy::gpu {

/// What kvpolicy::ValueOutputs is to a cache of the host, with weights in device memory: views, made once for a model
/// and given to every cache over it (`CacheOptions::value_outputs`). Object and weights must outlive these caches and
/// their forks and must not change meanwhile. Any thread may read it. It reads no weight: one that is not finite makes
/// scores that are not, where the host refuses it.
class ValueOutputs {
 public:
  /// No layer has its weights yet. @throws ConfigError for a shape that no model can have
  explicit ValueOutputs(ModelShape shape) : shape_{std::move(shape)} {
    shape_.validate();
    layers_.resize(shape_.layers);
  }

  /// The weights of a layer's output projection, [outputs, q_heads, head_dim] in float16 or bfloat16, whichever the rows
  /// of the caches are; a checkpoint's `o_proj.weight`, [hidden, q_heads * head_dim], is that as it stands. Each row of
  /// head_dim weights is aligned to 16 bytes.
  /// @throws ShapeError for another shape or alignment, a null pointer, or 2^30 outputs or more, with the object as it
  /// was; ConfigError if the shape has no such layer or the layer has no cache
  template <class T>
    requires(!std::same_as<std::remove_const_t<T>, float>)
  void set(std::size_t layer, const TensorView<T>& weights) {
    const ConstTensor view{weights};
    kvpolicy::detail::check_output_weights(shape_, layer, view);
    constexpr std::size_t numbers = 16 / sizeof(T);
    require<ShapeError>(reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
                            (view.tokens == 1 || view.token_stride % numbers == 0) &&
                            (view.heads == 1 || view.head_stride % numbers == 0),
                        "gpu::ValueOutputs: the weights of layer ", layer, " have a stride of ",
                        view.token_stride, " from output to output and of ", view.head_stride,
                        " from head to head, in elements, at ", static_cast<const void*>(view.data),
                        "; kernels read rows that are aligned to 16 bytes (", numbers, " elements)");
    require<ShapeError>(view.tokens < std::size_t{1} << 30, "gpu::ValueOutputs: the weights of layer ", layer,
                        " have ", view.tokens, " outputs, must be fewer than 2^30");
    layers_[layer] = view;
  }

  [[nodiscard]] const ModelShape& shape() const { return shape_; }
  /// A layer's weights, on the device; null if it was given none.
  [[nodiscard]] const ConstTensor* layer(std::size_t layer) const {
    KVPOLICY_ASSERT(layer < layers_.size());
    return layers_[layer].data == nullptr ? nullptr : &layers_[layer];
  }
  /// @throws ShapeError if a cache of the model `shape` has heads or values that these weights are not for
  void check_fits(const ModelShape& shape) const {
    kvpolicy::detail::check_outputs_fit(shape_, shape,
                                        [&](std::size_t layer) { return layers_[layer].data != nullptr; });
  }

 private:
  ModelShape shape_;
  std::vector<ConstTensor> layers_;  // without data where there are no weights
};

}  // namespace kvpolicy::gpu
