// SPDX-License-Identifier: Apache-2.0
#include <reference_model/cuda/matmul.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/runtime.hpp>
#include <reference_model/cuda/kernels/int8.cuh>
#include <reference_model/cuda/kernels/random.cuh>
#include <reference_model/cuda/tabulate.hpp>
#if defined(__CUDACC__)
#include <reference_model/cuda/cublas_product.hpp>
#else
#include <reference_model/cuda/plain_product.hpp>
#endif

namespace kvpolicy::reference {
namespace {

namespace kernels = gpu::llama;
using gpu::allocate;
using gpu::check;
using gpu::Kernel;
using gpu::launch;

// An 8-bit product has a multiple of this many rows. Fewer rows are padded, because libraries have
// computed a handful of rows badly or not at all, and a product of so few rows waits for its
// weights anyway. More rows than a block are computed block by block, because the sums of a row
// take two to four times the memory of its activations.
constexpr std::size_t int8_row_unit = 32;
constexpr std::size_t int8_block_rows = 1024;

std::size_t padded(std::size_t rows) {
  return std::min((rows + int8_row_unit - 1) / int8_row_unit * int8_row_unit, int8_block_rows);
}

int blocks_of(std::size_t count, int of_block) {
  const auto size = static_cast<std::size_t>(of_block);
  return static_cast<int>((count + size - 1) / size);
}

}  // namespace

// ---- Matmul ----------------------------------------------------------------------------------

struct Matmul::State {
  State(gpu::MemoryResource* memory_, cudaStream_t stream) : memory{memory_}, product{memory_, stream} {}

  gpu::MemoryResource* memory;
  Product product;
  // Buffers of 8-bit products: codes and scales of activations, sums.
  std::size_t codes_bytes = 0;
  std::size_t sums_bytes = 0;
  gpu::DeviceBuffer codes, scales, sums;
};

Matmul::Matmul(gpu::MemoryResource* memory, cudaStream_t stream)
    : state_{std::make_unique<State>(memory, stream)} {}
Matmul::Matmul(Matmul&&) noexcept = default;
Matmul& Matmul::operator=(Matmul&&) noexcept = default;
Matmul::~Matmul() = default;

std::size_t Matmul::bytes() const {
  const std::size_t scales = state_->scales == nullptr ? 0 : int8_block_rows * sizeof(float);
  return state_->product.workspace_bytes() + state_->codes_bytes + scales + state_->sums_bytes;
}

void Matmul::multiply(const Shape& shape, const bfloat16* weight, const void* bias, const bfloat16* x,
                      std::size_t rows, void* y, cudaStream_t stream) {
  state_->product.multiply({.inputs = shape.inputs,
                            .outputs = shape.outputs,
                            .rows = rows,
                            .bias = shape.bias,
                            .rounded = shape.output == Output::bfloat16,
                            .added = shape.output == Output::added_float32},
                           weight, bias, x, y, stream);
}

void Matmul::reserve_int8(const Shape& shape, std::size_t rows, cudaStream_t stream) {
  State& s = *state_;
  const std::size_t most = padded(rows);
  const auto grow = [&](gpu::DeviceBuffer& block, std::size_t& held, std::size_t bytes) {
    if (bytes <= held) return;
    block = {};
    held = 0;
    block = allocate(s.memory, bytes, stream);
    held = bytes;
  };
  grow(s.codes, s.codes_bytes, most * shape.inputs);
  grow(s.sums, s.sums_bytes, most * shape.outputs * sizeof(int));
  if (s.scales == nullptr) s.scales = allocate(s.memory, int8_block_rows * sizeof(float), stream);
}

void Matmul::multiply_int8(const Shape& shape, const std::int8_t* weight, const float* scales,
                           const float* bias, const bfloat16* x, std::size_t rows, void* y,
                           cudaStream_t stream) {
  State& s = *state_;
  auto* codes = reinterpret_cast<std::int8_t*>(s.codes.get());
  auto* row_scales = reinterpret_cast<float*>(s.scales.get());
  auto* sums = reinterpret_cast<int*>(s.sums.get());
  for (std::size_t first = 0; first < rows; first += int8_block_rows) {
    const std::size_t count = std::min(int8_block_rows, rows - first);
    launch(Kernel{kernels::quantize_rows_kernel<>, "quantize_rows_kernel", kernels::quantize_rows_threads,
                  kernels::quantize_rows_shared_bytes()},
           {.x = static_cast<int>(padded(count))}, stream,
           kernels::QuantizeRowsParams{.x = reinterpret_cast<const std::uint16_t*>(x + first * shape.inputs),
                                       .codes = reinterpret_cast<std::uint32_t*>(codes),
                                       .scales = row_scales,
                                       .rows = static_cast<int>(count),
                                       .width = static_cast<int>(shape.inputs)});
    s.product.multiply_int8(shape.inputs, shape.outputs, padded(count), weight, codes, sums, stream);
    kernels::DequantizeParams out{.sums = sums,
                                  .row_scales = row_scales,
                                  .column_scales = scales,
                                  .bias = bias,
                                  .width = static_cast<int>(shape.outputs)};
    const std::size_t at = first * shape.outputs;
    switch (shape.output) {
      case Output::bfloat16: out.out = static_cast<std::uint16_t*>(y) + at; break;
      case Output::float32: out.floats = static_cast<float*>(y) + at; break;
      case Output::added_float32: out.added = static_cast<float*>(y) + at; break;
    }
    launch(
        Kernel{kernels::dequantize_kernel<>, "dequantize_kernel", kernels::dequantize_threads},
        {.x = static_cast<int>(count), .y = blocks_of(shape.outputs, kernels::dequantize_columns_of_block)},
        stream, out);
  }
}

// ---- DeviceLinear ----------------------------------------------------------------------------

namespace {

template <class T>
gpu::DeviceBuffer upload(const std::vector<T>& numbers, gpu::MemoryResource* memory, cudaStream_t stream) {
  gpu::DeviceBuffer block = allocate(memory, numbers.size() * sizeof(T), stream);
  check(cudaMemcpyAsync(block.get(), numbers.data(), numbers.size() * sizeof(T), cudaMemcpyHostToDevice,
                        stream),
        "cudaMemcpyAsync");
  return block;
}

std::vector<bfloat16> rounded(const std::vector<float>& numbers) {
  std::vector<bfloat16> out(numbers.size());
  std::ranges::transform(numbers, out.begin(), [](float x) { return bfloat16{x}; });
  return out;
}

}  // namespace

DeviceLinear::DeviceLinear(std::initializer_list<const Linear*> parts, Output output, WeightFormat format,
                           gpu::MemoryResource* memory, cudaStream_t stream)
    : format_{format} {
  shape_.inputs = (*parts.begin())->inputs();
  shape_.output = output;
  std::vector<float> biases;
  for (const Linear* part : parts) {
    shape_.outputs += part->outputs();
    biases.insert(biases.end(), part->bias.begin(), part->bias.end());
  }
  shape_.bias = !biases.empty();
  allocate_weights(memory, stream);

  // Copies part by part, so that the host never holds a second copy of the whole weight.
  std::size_t first = 0;
  for (const Linear* part : parts) {
    const auto copy = [&](const gpu::DeviceBuffer& to, const auto& numbers, std::size_t at) {
      const std::size_t size = sizeof numbers[0];
      check(cudaMemcpyAsync(to.get() + at * size, numbers.data(), numbers.size() * size,
                            cudaMemcpyHostToDevice, stream),
            "cudaMemcpyAsync");
    };
    const WeightMatrix weight = part->weight.as(format);
    if (format == WeightFormat::bfloat16) {
      copy(weight_, std::span{weight.row<bfloat16>(0), weight.size()}, first * shape_.inputs);
    } else {
      copy(weight_, std::span{weight.row<std::int8_t>(0), weight.size()}, first * shape_.inputs);
      copy(scales_, weight.scales(), first);
    }
    first += part->outputs();
  }
  if (!shape_.bias) return;
  // A product's bias has the type of its output; after a product of integers it is float.
  if (format == WeightFormat::bfloat16 && output == Output::bfloat16) {
    bias_ = upload(rounded(biases), memory, stream);
  } else {
    bias_ = upload(biases, memory, stream);
  }
}

DeviceLinear DeviceLinear::random(std::size_t inputs, std::size_t outputs, Output output, WeightFormat format,
                                  std::uint64_t seed, gpu::MemoryResource* memory, cudaStream_t stream) {
  DeviceLinear made;
  made.shape_ = {.inputs = inputs, .outputs = outputs, .output = output};
  made.format_ = format;
  made.allocate_weights(memory, stream);
  const float amplitude = std::sqrt(3.0F / static_cast<float>(inputs));  // uniform, variance 1 / inputs
  if (format == WeightFormat::bfloat16) {
    tabulate(reinterpret_cast<std::uint16_t*>(made.weight_.get()), inputs * outputs,
             kernels::RandomNumbers{seed, amplitude}, stream);
  } else {
    tabulate(reinterpret_cast<std::int8_t*>(made.weight_.get()), inputs * outputs, kernels::RandomCodes{seed},
             stream);
    const std::vector<float> scales(outputs, amplitude / 127.0F);
    check(cudaMemcpyAsync(made.scales_.get(), scales.data(), outputs * sizeof(float), cudaMemcpyHostToDevice,
                          stream),
          "cudaMemcpyAsync");
  }
  return made;
}

void DeviceLinear::allocate_weights(gpu::MemoryResource* memory, cudaStream_t stream) {
  const std::size_t numbers = shape_.inputs * shape_.outputs;
  if (format_ == WeightFormat::bfloat16) {
    bytes_ = numbers * sizeof(bfloat16);
    weight_ = allocate(memory, bytes_, stream);
    return;
  }
  require(format_ == WeightFormat::int8, "DeviceLinear: weights as ", name_of(format_),
          ", expected bfloat16 or int8");
  require(shape_.inputs % 16 == 0, "DeviceLinear: 8-bit weights of ", shape_.inputs,
          " inputs, must be a multiple of 16");
  weight_ = allocate(memory, numbers, stream);
  scales_ = allocate(memory, shape_.outputs * sizeof(float), stream);
  bytes_ = numbers + shape_.outputs * sizeof(float);
}

const bfloat16* DeviceLinear::weight() const {
  return format_ == WeightFormat::bfloat16 ? reinterpret_cast<const bfloat16*>(weight_.get()) : nullptr;
}

void DeviceLinear::reserve(Matmul& matmul, std::size_t rows, cudaStream_t stream) const {
  if (format_ == WeightFormat::int8) matmul.reserve_int8(shape_, rows, stream);
}

void DeviceLinear::apply(Matmul& matmul, const bfloat16* x, std::size_t rows, void* y,
                         cudaStream_t stream) const {
  if (format_ == WeightFormat::bfloat16) {
    matmul.multiply(shape_, weight(), bias_.get(), x, rows, y, stream);
    return;
  }
  matmul.multiply_int8(shape_, reinterpret_cast<const std::int8_t*>(weight_.get()),
                       reinterpret_cast<const float*>(scales_.get()),
                       reinterpret_cast<const float*>(bias_.get()), x, rows, y, stream);
}

}  // namespace kvpolicy::reference
