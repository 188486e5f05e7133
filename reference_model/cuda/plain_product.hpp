// SPDX-License-Identifier: Apache-2.0
//
// The counterpart of cublas_product.hpp on the host emulation of the test suite: plain loops. They
// run as a kernel on the emulation's streams, so that graphs record them.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/simt.cuh>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/runtime.hpp>
#include <reference_model/cuda/product_shape.hpp>

namespace kvpolicy::reference {

struct PlainProductParams {
  const bfloat16* weight = nullptr;
  const void* bias = nullptr;
  const bfloat16* x = nullptr;
  void* y = nullptr;
  ProductShape shape;
};

/// One thread for each row.
inline void plain_product_kernel(const PlainProductParams p) {
  const auto row = static_cast<std::size_t>(gpu::block_x());
  const bfloat16* x = p.x + row * p.shape.inputs;
  for (std::size_t o = 0; o < p.shape.outputs; ++o) {
    const bfloat16* w = p.weight + o * p.shape.inputs;
    float sum = 0.0F;
    for (std::size_t i = 0; i < p.shape.inputs; ++i) {
      sum += static_cast<float>(x[i]) * static_cast<float>(w[i]);
    }
    const std::size_t at = row * p.shape.outputs + o;
    if (p.shape.rounded) {
      if (p.shape.bias) sum += static_cast<float>(static_cast<const bfloat16*>(p.bias)[o]);
      static_cast<bfloat16*>(p.y)[at] = bfloat16{sum};
    } else {
      if (p.shape.bias) sum += static_cast<const float*>(p.bias)[o];
      float& y = static_cast<float*>(p.y)[at];
      y = p.shape.added ? y + sum : sum;
    }
  }
}

struct PlainInt8Params {
  std::size_t inputs = 0;
  std::size_t outputs = 0;
  const std::int8_t* weight = nullptr;
  const std::int8_t* x = nullptr;
  int* y = nullptr;
};

inline void plain_int8_kernel(const PlainInt8Params p) {
  const auto row = static_cast<std::size_t>(gpu::block_x());
  for (std::size_t o = 0; o < p.outputs; ++o) {
    int sum = 0;
    for (std::size_t i = 0; i < p.inputs; ++i) {
      sum += p.x[row * p.inputs + i] * p.weight[o * p.inputs + i];
    }
    p.y[row * p.outputs + o] = sum;
  }
}

class Product {
 public:
  Product(gpu::MemoryResource*, cudaStream_t) {}

  [[nodiscard]] std::size_t workspace_bytes() const { return 0; }

  void multiply(const ProductShape& shape, const bfloat16* weight, const void* bias, const bfloat16* x,
                void* y, cudaStream_t stream) {
    gpu::launch(gpu::Kernel{plain_product_kernel, "plain_product_kernel", 1},
                {.x = static_cast<int>(shape.rows)}, stream, PlainProductParams{weight, bias, x, y, shape});
  }
  void multiply_int8(std::size_t inputs, std::size_t outputs, std::size_t rows, const std::int8_t* weight,
                     const std::int8_t* x, int* y, cudaStream_t stream) {
    gpu::launch(gpu::Kernel{plain_int8_kernel, "plain_int8_kernel", 1}, {.x = static_cast<int>(rows)}, stream,
                PlainInt8Params{inputs, outputs, weight, x, y});
  }
};

}  // namespace kvpolicy::reference
