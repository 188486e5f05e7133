// SPDX-License-Identifier: Apache-2.0
//
// Linear layers on the device: y = x Wᵀ + b with bfloat16 activations and sums in float. The
// products are computed by cuBLASLt, which no other part of the model calls. Weights are bfloat16,
// or 8-bit integers with a scale for each output; activations are then quantised too, with a scale
// for each token.
//
// In the host emulation of the test suite (tests/simt) the products are plain loops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/memory.hpp>
#include <reference_model/linear.hpp>

namespace kvpolicy::reference {

/// How a product stores its result.
enum class Output : std::uint8_t {
  bfloat16,      ///< y = x Wᵀ + b
  float32,       ///< the same in float
  added_float32  ///< y += x Wᵀ + b: a residual connection without a buffer of its own
};

/// The product library, its workspace, and the algorithm that it chose for each shape and number of
/// rows. The layers of a model share one Matmul; it serves one stream at a time.
class Matmul {
 public:
  /// @throws DeviceError if the library cannot be initialised, std::bad_alloc
  Matmul(gpu::MemoryResource* memory, cudaStream_t stream);
  Matmul(Matmul&&) noexcept;
  Matmul& operator=(Matmul&&) noexcept;
  ~Matmul();

  struct Shape {
    std::size_t inputs = 0;
    std::size_t outputs = 0;
    Output output = Output::bfloat16;
    bool bias = false;
    friend auto operator<=>(const Shape&, const Shape&) = default;
  };

  /// Computes y [rows, outputs] of x [rows, inputs] and weight [outputs, inputs], all row-major.
  /// The bias [outputs] has y's type and may be null. @throws DeviceError
  void multiply(const Shape& shape, const bfloat16* weight, const void* bias, const bfloat16* x,
                std::size_t rows, void* y, cudaStream_t stream);

  /// The same for 8-bit weights, with a scale and an optional float bias for each output. Rows are
  /// computed in blocks, for which `reserve_int8` must have allocated buffers. @throws DeviceError
  void multiply_int8(const Shape& shape, const std::int8_t* weight, const float* scales, const float* bias,
                     const bfloat16* x, std::size_t rows, void* y, cudaStream_t stream);

  /// Allocates the buffers for 8-bit products of `rows` rows. @throws std::bad_alloc
  void reserve_int8(const Shape& shape, std::size_t rows, cudaStream_t stream);

  /// Bytes of workspace and buffers.
  [[nodiscard]] std::size_t bytes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// One linear layer's weights.
class DeviceLinear {
 public:
  DeviceLinear() = default;

  /// Joins layers of equal inputs to one product with their outputs side by side. `format` is
  /// bfloat16, or int8 for inputs that are a multiple of 16; weights are rounded to nearest.
  /// @throws ConfigError, std::bad_alloc, DeviceError
  DeviceLinear(std::initializer_list<const Linear*> parts, Output output, WeightFormat format,
               gpu::MemoryResource* memory, cudaStream_t stream);

  /// Random weights with a variance that keeps the size of activations, and no bias.
  [[nodiscard]] static DeviceLinear random(std::size_t inputs, std::size_t outputs, Output output,
                                           WeightFormat format, std::uint64_t seed,
                                           gpu::MemoryResource* memory, cudaStream_t stream);

  [[nodiscard]] std::size_t inputs() const { return shape_.inputs; }
  [[nodiscard]] std::size_t outputs() const { return shape_.outputs; }
  /// [outputs, inputs] where the weights are bfloat16, else null.
  [[nodiscard]] const bfloat16* weight() const;
  /// Bytes of weights, scales and bias that a product reads.
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

  /// Allocates what `apply` needs besides the weights; call it before the first `apply` with so
  /// many rows.
  void reserve(Matmul& matmul, std::size_t rows, cudaStream_t stream) const;

  /// Applies the layer to x [rows, inputs]; y is [rows, outputs] of the type that `output` says.
  /// @throws DeviceError
  void apply(Matmul& matmul, const bfloat16* x, std::size_t rows, void* y, cudaStream_t stream) const;

 private:
  void allocate_weights(gpu::MemoryResource* memory, cudaStream_t stream);

  Matmul::Shape shape_;
  WeightFormat format_ = WeightFormat::bfloat16;
  std::size_t bytes_ = 0;
  gpu::DeviceBuffer weight_;
  gpu::DeviceBuffer scales_;  // [outputs], for 8-bit weights
  gpu::DeviceBuffer bias_;    // [outputs]
};

}  // namespace kvpolicy::reference
